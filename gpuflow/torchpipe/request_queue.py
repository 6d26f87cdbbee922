"""Requests, groups of requests that form one batch, and queues (instead of torchpipe's) for busy nodes.

A request has a deadline. Under overload most requests are never answered, and first in, first out would choose the
wrong ones: each would run when its caller is about to give up. So a queue drops what cannot be answered in time, and
takes the newest requests first for as long as callers give up.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import chain, groupby
from typing import Any, final

import torch

from gpuflow.errors import PredictorError, PredictorTimeout

_RECENT_SECONDS = 10.0
"""How long a measurement counts, and for how long the newest requests are taken first after a caller gave up."""
_NEW_SHARE = 0.3
"""The weight of a batch that took longer than those before it in the mean."""


def unchanged(image: torch.Tensor) -> torch.Tensor:
    """Return the image: the `wrap` of requests that want an image as the graph has it."""
    return image


class RequestGroup:
    """Requests that the model gets as one batch, such as those of a list or of a form.

    If a separate node decodes, it reports each request once, and the last report returns the decoded requests.

    Args:
        requests: two or more, whose `group` this becomes.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests, self._missing = list(requests), set(requests)
        self._lock = threading.Lock()
        for request in requests:
            request.group = self

    def report(self, request: Request, *, decoded: bool) -> list[Request]:
        """Report that a request is decoded, or needs no model because its image is bad or it was cancelled.

        The last report returns, in their order, all decoded requests that are still wanted; earlier ones return an
        empty list, and so does a further report of the same request.
        """
        with self._lock:
            if request not in self._missing:
                return []
            self._missing.discard(request)
            if not decoded:
                self._requests.remove(request)
            if self._missing:
                return []
            complete, self._requests = self._requests, []
        return [each for each in complete if not each.ended]


class Request:
    """One image that a graph processes; the item that torchpipe carries has it in `requests`.

    A request that is cancelled ends at once, unless it is being decoded or the model runs on it. So a caller that
    has gone keeps no memory and no place while the graph is busy.

    data: the encoded image. It is dropped once it is decoded, or the request is cancelled.
    deadline: by `time.monotonic`; an answer after it is of no use. dropped: whether it could not be met.
    future: what `wrap` returns for the logits [K], or for the image [C, H, W] that the model gets if `wants_image`.
    done: called once, before the future has its result, when the graph has finished with the request or dropped it.
    group: that it belongs to; without one it is a batch alone.
    ends_call: whether its caller waits for no later request, so that with its answer the caller may send again.
    image: what the model gets, once a node that only decodes has finished.
    ended: whether `done` was called.
    """

    def __init__(
        self,
        data: bytes,
        done: Callable[[Request], None],
        *,
        wrap: Callable[[torch.Tensor], Any],
        wants_image: bool = False,
        deadline: float = math.inf,
    ) -> None:
        self.future: Future[Any] = Future()
        self.deadline, self.dropped = deadline, False
        self.wants_image = wants_image
        self.group: RequestGroup | None = None
        self.ends_call = True
        self.image: torch.Tensor | None = None
        self.ended = False
        self._data: bytes | None = data
        self._is_decoding = False
        self._wrap, self._done = wrap, done
        self._wanted: bool | None = None
        self._lock = threading.Lock()
        # Weakly, because a request that refers to itself would stay until the garbage collector runs.
        dropped = weakref.WeakMethod(self._drop)
        self.future.add_done_callback(lambda future: _drop_cancelled(future, dropped))

    @property
    def held_bytes(self) -> int:
        """Return the size of the encoded image, or 0 once it is no longer in memory."""
        data = self._data
        return 0 if data is None else len(data)

    def begin_decoding(self) -> bytes | None:
        """Return the encoded image, which stays in memory until `end_decoding`; None if it was dropped."""
        with self._lock:
            self._is_decoding = self._data is not None
            return self._data

    def end_decoding(self) -> None:
        """Drop the encoded image. Ends a cancelled request."""
        with self._lock:
            self._is_decoding, self._data = False, None
        if self.future.cancelled():
            self._drop()

    def take_image(self) -> torch.Tensor | None:
        """Return the decoded image, and forget it; None if there is none."""
        image, self.image = self.image, None
        return image

    def begin(self) -> bool:
        """Mark the request as running, after which it cannot be cancelled. Returns False if it was cancelled before."""
        with self._lock:
            if self._wanted is None:
                self._wanted = self.future.set_running_or_notify_cancel()
            return self._wanted

    def set_result(self, value: torch.Tensor | Exception) -> None:
        """Call `done`, then set the future's result or exception unless it was cancelled."""
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

    def drop(self) -> None:
        """Answer with a PredictorTimeout, because the deadline cannot be met."""
        self.dropped = True
        self._data = None
        self.set_result(PredictorTimeout("the answer would come too late; ask again later, or allow more time"))

    def _drop(self) -> None:
        """Free the memory and the place of a cancelled request, unless it is being decoded: `end_decoding` does it."""
        with self._lock:
            if self._is_decoding:
                return
            self._data = self.image = None
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


@final
class AnswerRate:
    """Measures the answers per second of a graph, while it has as many images as it can work on at a time.

    With fewer images a graph gives fewer answers than it could. So without such a time in the last seconds no rate is
    known. Not thread-safe.

    Args:
        at_once: images that the nodes work on at a time, or more.
        clock: seconds that only rise.
    """

    def __init__(self, at_once: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._at_once, self._clock = at_once, clock
        self._answers = self._seconds = 0.0
        self._last, self._busy, self._measured = 0.0, False, -math.inf

    def count(self, in_flight: int) -> None:
        """Count an answer. in_flight: the images that are left."""
        now = self._clock()
        if self._busy:
            passed = now - self._last
            kept = math.exp(-passed / _RECENT_SECONDS)
            self._answers, self._seconds = kept * self._answers + 1, kept * self._seconds + passed
            self._measured = now
        self._last, self._busy = now, in_flight >= self._at_once

    def seconds(self, images: int) -> float:
        """Return how long it takes to answer this number of images.

        Returns 0 if that is not known, or if the nodes work on these images now or next.
        """
        if images <= 2 * self._at_once or self._clock() - self._measured > _RECENT_SECONDS:
            return 0.0
        return images * self._seconds / self._answers


@final
class Backlog:
    """Requests that wait for a node, and which of them it takes next. Any thread may call any method.

    In order of arrival, or, if callers gave up in the last seconds, the newest first. A request that cannot be answered
    before its deadline is dropped. Requests that are added together are taken together.
    """

    def __init__(self) -> None:
        self._parts: dict[Request, Sequence[Request]] = {}  # each request with those that were added together
        self._earliest, self._gave_up = math.inf, -math.inf
        self._means: dict[int, tuple[float, float]] = {}  # seconds of a batch by its size, and when they were measured
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def newest_first(self) -> bool:
        """Return True if callers gave up in the last seconds, so that the newest requests are taken first."""
        return time.monotonic() - self._gave_up < _RECENT_SECONDS

    def add(self, requests: Sequence[Request]) -> None:
        with self._lock:
            wanted = [request for request in requests if not request.ended]
            self._parts.update(dict.fromkeys(wanted, requests))
            self._earliest = min((self._earliest, *(request.deadline for request in wanted)))

    def discard(self, request: Request) -> None:
        """Remove a request whose caller gave up. One that does not wait here is left alone."""
        with self._lock:
            if self._parts.pop(request, None) is not None:
                self._gave_up = time.monotonic()

    def measured(self, images: int, seconds: float) -> None:
        """Record how long the node took for a batch of this size."""
        now = time.monotonic()
        with self._lock:
            mean, last = self._means.get(images, (seconds, now))
            if now - last < _RECENT_SECONDS and seconds > mean:  # one slow batch says little of the next
                seconds = mean + _NEW_SHARE * (seconds - mean)
            self._means[images] = seconds, now

    def take(self, most: int) -> list[Request]:
        """Remove and return the requests that run next, in order of arrival; none if none is left.

        They are at most `most`, and no more than the node can answer before their deadlines.
        """
        now, taken = time.monotonic(), list[Request]()
        with self._lock:
            late = self._remove_late(now)
            newest_first = self.newest_first
            waiting = reversed(self._parts) if newest_first else iter(self._parts)
            for _, members in groupby(waiting, key=lambda request: id(self._parts[request])):
                part = list(members)
                together = taken + part
                if len(together) > most:
                    break
                if min(request.deadline for request in together) >= now + self._seconds(len(together), now):
                    taken = together
                elif taken:
                    break
                else:
                    late += part
            for request in (*taken, *late):
                self._parts.pop(request, None)
        _drop(late)
        return taken[::-1] if newest_first else taken

    def _remove_late(self, now: float) -> list[Request]:
        """Remove and return the requests that the node cannot answer in time even in the smallest batch."""
        soonest = now + self._seconds(1, now)
        if soonest <= self._earliest:
            return []
        late = [request for request in self._parts if request.deadline < soonest]
        for request in late:
            del self._parts[request]
            self._gave_up = now
        self._earliest = min((request.deadline for request in self._parts), default=math.inf)
        return late

    def _seconds(self, images: int, now: float) -> float:
        """Return how long the node takes for this number of images at least, by what it took for fewer; 0 if that is
        not known."""
        means = (
            mean
            for size, (mean, measured) in self._means.items()
            if size <= images and now - measured < _RECENT_SECONDS
        )
        return max(means, default=0.0)


class RequestQueue:
    """Requests that arrived while all instances of a node were busy. Any thread may call any method.

    The requests of a part are in one batch. A request that is cancelled must be discarded: it leaves the queue at once.

    torchpipe has its own queue. But while that queue holds an item and no instance is free, torchpipe's thread
    polls it without a pause, and each caller that adds a request waits for the same lock, for as long as the batching
    timeout. So torchpipe gets requests only when an instance is free. That instance then takes further batches from
    here until none is left.

    Args:
        start: passes requests to torchpipe as one item and does not wait.
        instances: of the node.
        batch: its largest batch.

    batch: the same as the argument. backlog: the requests that wait. arrived: how many parts have been added so far.
    """

    def __init__(self, start: Callable[[Sequence[Request]], object], *, instances: int, batch: int) -> None:
        self.arrived = 0
        self._start, self._free, self.batch = start, instances, batch
        self._started = 0  # items that torchpipe has and no instance yet
        self.backlog = Backlog()
        self._arrival, self._awaited = threading.Condition(), set[int]()

    def add(self, *parts: Sequence[Request]) -> None:
        """Share parts, single requests or those of one group, among the instances that are free, or let them wait.

        Drops those whose deadline has passed. Raises what `start` does.
        """
        assert all(1 <= len(part) <= self.batch for part in parts)
        now, wanted, starting = time.monotonic(), deque[Sequence[Request]](), list[list[Request]]()
        for part in parts:
            if min(request.deadline for request in part) >= now:
                wanted.append(part)
            else:
                _drop(part)
        with self._arrival:
            self.arrived += len(wanted)
            while wanted and self._started < self._free:
                share = math.ceil(sum(map(len, wanted)) / (self._free - self._started))
                batch = list(wanted.popleft())
                while wanted and len(batch) + len(wanted[0]) <= min(share, self.batch):
                    batch += wanted.popleft()
                starting.append(batch)
                self._started += 1
            for part in wanted:
                self.backlog.add(part)
            if min(self._awaited, default=math.inf) <= self.arrived or len(self.backlog) >= self.batch:
                self._arrival.notify_all()
        while starting:
            try:
                self._start(starting.pop(0))
            except BaseException:
                with self._arrival:
                    self._started -= 1 + len(starting)
                raise

    def add_decoded(self, requests: Sequence[Request]) -> None:
        """Add requests that a node before this one decoded, of a group all once the last one is decoded."""
        groups = [[one] if one.group is None else one.group.report(one, decoded=True) for one in requests]
        self._add_ready([group for group in groups if group])

    def discard(self, request: Request) -> None:
        """Remove a request that has ended before the model ran. Its group, if it has one, does not wait for it."""
        self.backlog.discard(request)
        if request.group is not None and (ready := request.group.report(request, decoded=False)):
            self._add_ready([ready])

    def _add_ready(self, parts: Sequence[Sequence[Request]]) -> None:
        try:
            self.add(*parts)
        except Exception as error:  # a caller waits for each request, so every error becomes an answer
            for request in chain.from_iterable(parts):
                request.set_result(PredictorError(f"the model cannot be started: {error!r}"))

    def work(
        self, parts: Sequence[Sequence[Request]], run: Callable[[Sequence[Request]], object], *, seconds: float = 0.0
    ) -> None:
        """Run what torchpipe gave an instance, each part as a batch or within one, then what waits here, until nothing
        is left.

        seconds: for which callers with an answer may send again before the next batch is run.
        """
        self.mark_started(len(parts))
        *first, batch = joined(parts, self.batch)
        for each in first:
            run(each)
        while batch:
            arrived = self.arrived
            run(batch)
            batch = self.next_batch(arrived=arrived + callers(batch), seconds=seconds)

    def mark_started(self, items: int) -> None:
        """Record that an instance received these items. It is busy until `next_batch` returns none."""
        with self._arrival:
            self._started -= items
            self._free -= 1

    def next_batch(self, *, arrived: int, seconds: float) -> list[Request]:
        """Return the requests that a busy instance runs next; none if none waits, which frees the instance.

        Waits until `arrived` parts have been added or the batch is full, but no longer than `seconds`.
        """
        with self._arrival:
            self._awaited.add(arrived)
            self._arrival.wait_for(lambda: self.arrived >= arrived or len(self.backlog) >= self.batch, seconds)
            self._awaited.discard(arrived)
        while True:
            batch = self.backlog.take(self.batch)
            with self._arrival:
                if batch or not self.backlog:
                    self._free += not batch
                    return batch


def _drop(requests: Sequence[Request]) -> None:
    for request in requests:
        request.drop()


def callers(requests: Sequence[Request]) -> int:
    """Return how many callers may send again once these requests are answered."""
    return sum(request.ends_call for request in requests)


def joined(parts: Sequence[Sequence[Request]], batch: int) -> list[list[Request]]:
    """Return batches of whole parts, in order, none larger than `batch`.

    Examples:
        >>> first, second, third = (Request(b"", print, wrap=unchanged) for _ in range(3))
        >>> [len(batch) for batch in joined([[first], [second, third]], 2)]
        [1, 2]
    """
    batches: list[list[Request]] = []
    for part in parts:
        if batches and len(batches[-1]) + len(part) <= batch:
            batches[-1] += part
        else:
            batches.append(list(part))
    return batches
