"""A queue for requests that wait for a busy node, in Python instead of in torchpipe."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

__all__ = ["Request", "RequestQueue", "Waiting"]


class Request:
    """One image on its way through a graph; the item that torchpipe carries has it as `request`.

    future: what `wrap` returns for the logits [K], or for the image [C, H, W] that the model gets if `wants_image`.
    done: called once when the graph has finished with the request, whatever the outcome, just before the future is set.
    answered: whether `set_result` was called. fault: what a node raised for it; torchpipe passes on only its text.
    """

    def __init__(
        self, done: Callable[[Request], None], *, wrap: Callable[[torch.Tensor], Any], wants_image: bool = False
    ) -> None:
        self.future: Future[Any] = Future()
        self.wants_image, self.answered = wants_image, False
        self.fault: Exception | None = None
        self._wrap, self._done = wrap, done
        self._wanted: bool | None = None

    def begin(self) -> bool:
        """Mark the request as running, after which it cannot be cancelled. Returns False if it was cancelled before."""
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
        self._done(self)
        if not wanted:
            return
        if isinstance(result, Exception):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


Waiting = tuple[bytes, Request]
"""An encoded image and the request for it."""


class RequestQueue:
    """Requests that arrived while all instances of a node were busy, in order. Any thread may call any method.

    torchpipe has a queue of its own. But while that queue holds an item and no instance is free, torchpipe's thread
    polls it without a pause, and each caller that adds a request waits for the same lock, for as long as the batching
    timeout. So torchpipe gets a request only when an instance is free. That instance then takes further batches from
    here until none is left.

    Args:
        start: passes one request to torchpipe and does not wait. instances: of the node. batch: its largest batch.

    arrived: how many requests have been added so far.
    """

    def __init__(self, start: Callable[[bytes, Request], object], *, instances: int, batch: int) -> None:
        self.arrived = 0
        self._start, self._free, self._batch = start, instances, batch
        self._started = 0  # requests that torchpipe has and no instance yet
        self._waiting: deque[Waiting] = deque()
        self._arrival, self._awaited = threading.Condition(), set[int]()

    def add(self, data: bytes, request: Request) -> None:
        """Start an instance with a request, or let the request wait. Raises what `start` does."""
        with self._arrival:
            starts = self._started < self._free
            if starts:
                self._started += 1
            else:
                self._waiting.append((data, request))
            self.arrived += 1
            if self.arrived in self._awaited or len(self._waiting) == self._batch:
                self._arrival.notify_all()
        if starts:
            try:
                self._start(data, request)
            except BaseException:
                with self._arrival:
                    self._started -= 1
                raise

    def mark_started(self, requests: int) -> None:
        """An instance received this many requests from torchpipe. It is busy until `next_batch` returns none."""
        with self._arrival:
            self._started -= requests
            self._free -= 1

    def next_batch(self, *, arrived: int, seconds: float) -> list[Waiting]:
        """The requests that a busy instance runs next; empty if none waits, which frees the instance.

        Waits until `arrived` requests have been added or the batch is full, but no longer than `seconds`.
        """
        with self._arrival:
            self._awaited.add(arrived)
            self._arrival.wait_for(lambda: self.arrived >= arrived or len(self._waiting) >= self._batch, seconds)
            self._awaited.discard(arrived)
            batch = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
            self._free += not batch
        return batch
