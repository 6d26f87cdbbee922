"""Limits the concurrent requests of a storage to its server, and adapts the limit to what the server can answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from gpuflow.runtime.threads import stop_flag

__all__ = ["RequestLimit", "WaitEnded"]

_FIRST, _LEAST, _MOST = 16, 1, 128
_POLL_SECONDS = 0.1


class WaitEnded(Exception):
    """The storage was closed, or nobody needs what this thread waits for any more."""


@final
class RequestLimit:
    """A limit on concurrent requests, shared by all threads that use a storage.

    It starts low, because a server with a short queue of connections drops what comes all at once. It grows by one
    each time that as many requests as it allows were answered, and is halved where the server seems overloaded. While
    the server asks to be left alone, no request is sent.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._limit, self._under_way, self._answered = _FIRST, 0, 0
        self._paused_until, self._closed = 0.0, False

    @property
    def limit(self) -> int:
        return self._limit

    @contextmanager
    def requests(self, wanted: int, until: float = threading.TIMEOUT_MAX) -> Iterator[tuple[int, list[object]]]:
        """Wait until there is room, then yield how many of `wanted` requests may be sent now, and a list.

        The caller adds those that failed by overload to the list. Raises TimeoutError at the time `until`, as
        `time.monotonic` has it, and WaitEnded.
        """
        failed: list[object] = []
        with self._free:
            while self._under_way >= self._limit or time.monotonic() < self._paused_until:
                self._wait(min(until, self._paused_until) if self._under_way < self._limit else until)
                if time.monotonic() >= until:
                    raise TimeoutError("other requests to its server took the time")
            count = min(wanted, self._limit - self._under_way)
            self._under_way += count
        try:
            yield count, failed
        finally:
            with self._free:
                self._under_way -= count
                self._adjust(count - len(failed), overloaded=bool(failed))
                self._free.notify_all()

    def pause(self, seconds: float) -> None:
        """Send no request for this time."""
        with self._free:
            self._paused_until = max(self._paused_until, time.monotonic() + seconds)

    def sleep(self, seconds: float) -> None:
        """Wait for this time. Raises WaitEnded."""
        until = time.monotonic() + seconds
        with self._free:
            while time.monotonic() < until:
                self._wait(until)

    def _wait(self, until: float) -> None:
        """Wait until something may have changed, or until a time. The caller holds the lock. Raises WaitEnded."""
        if self._closed or stop_flag():
            raise WaitEnded
        self._free.wait(max(0.0, min(_POLL_SECONDS, until - time.monotonic())))

    def close(self) -> None:
        """End all waits."""
        with self._free:
            self._closed = True
            self._free.notify_all()

    def _adjust(self, answered: int, *, overloaded: bool) -> None:
        if overloaded:
            self._limit, self._answered = max(_LEAST, self._limit // 2), 0
            return
        self._answered += answered
        if self._answered >= self._limit:
            self._limit, self._answered = min(_MOST, self._limit + 1), 0
