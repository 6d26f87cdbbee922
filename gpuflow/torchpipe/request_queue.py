"""Requests, groups of requests that form one batch, and a queue (instead of torchpipe's) for a busy node."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import groupby
from typing import Any

import torch

__all__ = ["Request", "RequestGroup", "RequestQueue", "callers", "joined"]


class RequestGroup:
    """Requests that the model gets as one batch, such as those of a list or of a form.

    If a separate node decodes, it reports each request once, and the last report returns the decoded requests.
    size: number of requests.
    """

    def __init__(self, size: int) -> None:
        self._missing = size
        self._decoded: list[Request] = []
        self._lock = threading.Lock()

    def report(self, request: Request, *, decoded: bool) -> list[Request]:
        """Report that a request is decoded, or needs no model because its image is bad or it was cancelled.

        The last report returns all decoded requests in their order; earlier ones return an empty list.
        """
        with self._lock:
            self._missing -= 1
            if decoded:
                self._decoded.append(request)
            if self._missing:
                return []
            complete, self._decoded = self._decoded, []
        return sorted(complete, key=lambda each: each.row)


class Request:
    """One image that a graph processes; the item that torchpipe carries has it as `request`.

    data: the encoded image. It is dropped once it is decoded, or at once if the request is cancelled before a node
    has taken it, so that a request whose caller has disconnected holds no memory while the graph is busy.
    future: what `wrap` returns for the logits [K], or for the image [C, H, W] that the model gets if `wants_image`.
    done: called once, before the future has its result, when the graph has finished with the request or dropped it.
    group, row: the group that it belongs to, and its place there; without one it is a batch alone.
    ends_call: whether its caller waits for no later request, so that with its answer the caller may send again.
    held_bytes: size of the encoded image while it is in memory.
    image: what the model gets, once a node that only decodes has finished.
    answered: whether `set_result` was called. ended: whether `done` was.
    fault: what a node raised for it; torchpipe passes on only its text.
    """

    def __init__(
        self,
        data: bytes,
        done: Callable[[Request], None],
        *,
        wrap: Callable[[torch.Tensor], Any],
        wants_image: bool = False,
        group: RequestGroup | None = None,
        row: int = 0,
        ends_call: bool = True,
    ) -> None:
        self.future: Future[Any] = Future()
        self.wants_image = wants_image
        self.group, self.row, self.ends_call = group, row, ends_call
        self.image: torch.Tensor | None = None
        self.answered = self.ended = False
        self.fault: Exception | None = None
        self.held_bytes = len(data)
        self._data: bytes | None = data
        self._wrap, self._done = wrap, done
        self._wanted: bool | None = None
        self._lock = threading.Lock()
        # Weakly, because a request that refers to itself would stay until the garbage collector runs.
        dropped = weakref.WeakMethod(self._drop)
        self.future.add_done_callback(lambda future: _drop_cancelled(future, dropped))

    def take_data(self) -> bytes | None:
        """The encoded image, for the node that decodes it and then calls `release_data`; None if it was dropped."""
        with self._lock:
            data, self._data = self._data, None
        return data

    def release_data(self) -> None:
        """The image is decoded: its bytes are no longer in memory."""
        self.held_bytes = 0

    def begin(self) -> bool:
        """Mark the request as running, after which it cannot be cancelled. Returns False if it was cancelled before."""
        with self._lock:
            if self._wanted is None:
                self._wanted = self.future.set_running_or_notify_cancel()
            return self._wanted

    def set_result(self, value: torch.Tensor | Exception) -> None:
        """Call `done`, then set the future's result or exception unless it was cancelled."""
        self.answered = True
        wanted = self.begin()
        result = value
        if wanted and not isinstance(value, Exception):
            try:
                result = self._wrap(value)
            except Exception as error:  # such as a fault of the GPU, for which `wrap` may wait
                result = error
        self._end()
        if not wanted:
            return
        if isinstance(result, Exception):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)

    def _drop(self) -> None:
        """Give the bytes back and end the request, unless a node has taken them and ends it soon."""
        if self.take_data() is not None:
            self.release_data()
            self.begin()
            self._end()

    def _end(self) -> None:
        with self._lock:
            ended, self.ended = self.ended, True
        if not ended:
            self._done(self)


def _drop_cancelled(future: Future[Any], dropped: weakref.WeakMethod[Callable[[], None]]) -> None:
    drop = dropped()
    if drop is not None and future.cancelled():
        drop()


class RequestQueue:
    """Requests that arrived while all instances of a node were busy, in order. Any thread may call any method.

    Requests that are added together are one batch, or part of one. A request that is cancelled must be discarded: it
    leaves the queue at once.

    torchpipe has its own queue. But while that queue holds an item and no instance is free, torchpipe's thread
    polls it without a pause, and each caller that adds a request waits for the same lock, for as long as the batching
    timeout. So torchpipe gets requests only when an instance is free. That instance then takes further batches from
    here until none is left.

    Args:
        start: passes requests to torchpipe as one item and does not wait.
        instances: of the node.
        batch: its largest batch.

    arrived: how often requests have been added so far.
    """

    def __init__(self, start: Callable[[Sequence[Request]], object], *, instances: int, batch: int) -> None:
        self.arrived = 0
        self._start, self._free, self._batch = start, instances, batch
        self._started = 0  # items that torchpipe has and no instance yet
        self._waiting: OrderedDict[Request, None] = OrderedDict()
        self._arrival, self._awaited = threading.Condition(), set[int]()

    def add(self, requests: Sequence[Request]) -> None:
        """Start an instance with one request or with those of one group, or let them wait. Raises what `start` does."""
        assert 1 <= len(requests) <= self._batch
        with self._arrival:
            starts = self._started < self._free
            if starts:
                self._started += 1
            else:
                self._waiting.update(dict.fromkeys(requests))
            self.arrived += 1
            if self.arrived in self._awaited or len(self._waiting) >= self._batch:
                self._arrival.notify_all()
        if starts:
            try:
                self._start(requests)
            except BaseException:
                with self._arrival:
                    self._started -= 1
                raise

    def discard(self, request: Request) -> None:
        """Remove a request that was cancelled. One that does not wait here is left alone."""
        with self._arrival:
            self._waiting.pop(request, None)

    def mark_started(self, items: int) -> None:
        """An instance received this many items from torchpipe. It is busy until `next_batch` returns none."""
        with self._arrival:
            self._started -= items
            self._free -= 1

    def next_batch(self, *, arrived: int, seconds: float) -> list[Request]:
        """The requests that a busy instance runs next; empty if none waits, which frees the instance.

        Waits until requests have been added `arrived` times or the batch is full, but no longer than `seconds`.
        """
        with self._arrival:
            self._awaited.add(arrived)
            self._arrival.wait_for(lambda: self.arrived >= arrived or len(self._waiting) >= self._batch, seconds)
            self._awaited.discard(arrived)
            batch: list[Request] = []
            for _, members in groupby(self._waiting, key=lambda request: request.group or request):
                whole = list(members)
                if len(batch) + len(whole) > self._batch:
                    break
                batch += whole
            for request in batch:
                del self._waiting[request]
            self._free += not batch
        return batch


def callers(requests: Sequence[Request]) -> int:
    """How many callers may send again once these requests are answered."""
    return sum(request.ends_call for request in requests)


def joined(parts: Sequence[Sequence[Request]], batch: int) -> list[list[Request]]:
    """Batches of whole parts, in order, none larger than `batch`."""
    batches: list[list[Request]] = []
    for part in parts:
        if batches and len(batches[-1]) + len(part) <= batch:
            batches[-1] += part
        else:
            batches.append(list(part))
    return batches
