"""Requests that wait in Python for a node that does all the work, instead of in torchpipe's queue."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

__all__ = ["Backlog", "Request", "Waiting"]


class Request:
    """One image on its way through a graph; its item carries it as `request`.

    future: what `wrap` makes of the logits [K]; of the image [C, H, W] that the model would get, if `wants_image`.
    done: called once when the graph is through with it, whatever came out.
    fault: what a node raised for it; torchpipe passes on the text alone.
    """

    def __init__(
        self, done: Callable[[Request], None], *, wrap: Callable[[torch.Tensor], Any], wants_image: bool = False
    ) -> None:
        self.future: Future[Any] = Future()
        self.wants_image, self.settled = wants_image, False
        self.fault: Exception | None = None
        self._wrap, self._done = wrap, done
        self._wanted: bool | None = None

    def begin(self) -> bool:
        """From here on it cannot be cancelled. Returns whether it was not."""
        if self._wanted is None:
            self._wanted = self.future.set_running_or_notify_cancel()
        return self._wanted

    def settle(self, value: torch.Tensor | Exception) -> None:
        """Give the answer, if it is still wanted."""
        self.settled = True
        if self.begin():
            if isinstance(value, Exception):
                self.future.set_exception(value)
            else:
                self.future.set_result(self._wrap(value))
        self._done(self)


Waiting = tuple[bytes, Request]
"""An encoded image and the request for it."""


class Backlog:
    """What has come while all instances of a node are at work, in order. Any thread may call any method.

    torchpipe would keep it too. But as long as something is in its queue and no instance is free, its thread looks
    there without a pause, and whoever puts a request in waits for the same lock: for the whole batching timeout, if it
    comes to that. So torchpipe gets a request only where an instance is free. That instance then goes on with what has
    come meanwhile, until nothing is left.

    Args:
        start: hands one request to torchpipe and does not wait. instances: of the node. batch: what one takes at most.

    arrived: how many requests have come so far.
    """

    def __init__(self, start: Callable[[bytes, Request], object], *, instances: int, batch: int) -> None:
        self.arrived = 0
        self._start, self._free, self._batch = start, instances, batch
        self._started = 0  # requests that torchpipe has and no instance yet
        self._waiting: deque[Waiting] = deque()
        self._arrival, self._awaited = threading.Condition(), set[int]()

    def add(self, data: bytes, request: Request) -> None:
        """A request has come: it starts an instance, or waits. Raises what `start` does."""
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

    def begin(self, requests: int) -> None:
        """An instance has got so many from torchpipe. It is at work until `take` gives it nothing."""
        with self._arrival:
            self._started -= requests
            self._free -= 1

    def take(self, *, arrived: int, seconds: float) -> list[Waiting]:
        """What an instance goes on with: a batch, or nothing.

        Waits until so many have `arrived` or the batch is full, but for so many seconds at most.
        """
        with self._arrival:
            self._awaited.add(arrived)
            self._arrival.wait_for(lambda: self.arrived >= arrived or len(self._waiting) >= self._batch, seconds)
            self._awaited.discard(arrived)
            taken = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
            self._free += not taken
        return taken
