"""Limits the concurrent requests of a storage to its server, and adapts the limit to what the server can answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

__all__ = ["RequestLimit"]

_FIRST, _LEAST, _MOST = 16, 1, 128
_POLL_SECONDS = 1.0


@final
class RequestLimit:
    """A limit on concurrent requests, shared by all threads that use a storage.

    It starts low, because a server with a short queue of connections drops what comes all at once. It grows by one
    each time that as many requests as it allows were answered, and is halved where the server seems overloaded.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._limit, self._under_way, self._answered = _FIRST, 0, 0

    @property
    def limit(self) -> int:
        return self._limit

    @contextmanager
    def requests(self, wanted: int) -> Iterator[tuple[int, list[object]]]:
        """Wait until there is room, then yield how many of `wanted` requests may be sent now, and a list.

        The caller adds those that failed by overload to the list.
        """
        failed: list[object] = []
        with self._free:
            while not self._free.wait_for(lambda: self._under_way < self._limit, _POLL_SECONDS):
                continue
            count = min(wanted, self._limit - self._under_way)
            self._under_way += count
        try:
            yield count, failed
        finally:
            with self._free:
                self._under_way -= count
                self._adjust(count - len(failed), overloaded=bool(failed))
                self._free.notify_all()

    def _adjust(self, answered: int, *, overloaded: bool) -> None:
        if overloaded:
            self._limit, self._answered = max(_LEAST, self._limit // 2), 0
            return
        self._answered += answered
        if self._answered >= self._limit:
            self._limit, self._answered = min(_MOST, self._limit + 1), 0
