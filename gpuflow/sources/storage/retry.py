"""Retries operations that fail temporarily, such as reads from a network file system that does not respond."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

LOCAL_DELAYS = (0.0, 0.05, 0.1, 0.2)
"""Seconds before each attempt to read a file of this machine."""
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 5.0
"""Seconds between two attempts of a server that does not say how long to wait."""
_TRIED, _ENDED, _STALLED = 0.7, 0.95, 0.25
"""Parts of `run.timeout_s`, so that the error of the server comes before that of the loader, which names no cause."""
_LONGEST_STALL = 30.0

_limit: ContextVar[float] = ContextVar("_limit", default=120.0)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Open storages of servers with `run.timeout_s` while the block runs. Those that are open keep their limits."""
    token = _limit.set(seconds)
    try:
        yield
    finally:
        _limit.reset(token)


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How long a storage tries a server, in seconds.

    timeout: `run.timeout_s`, of which the others are parts. tried: after this time no new attempt begins. ended: the
    last attempt ends. stalled: a connection that sends nothing for this long is closed, and the attempt has failed.
    """

    timeout: float

    @classmethod
    def current(cls) -> TimeLimits:
        """Return those of the surrounding `time_limit`."""
        return cls(_limit.get())

    @property
    def tried(self) -> float:
        return _TRIED * self.timeout

    @property
    def ended(self) -> float:
        return _ENDED * self.timeout

    @property
    def stalled(self) -> float:
        return min(_LONGEST_STALL, _STALLED * self.timeout)


def delay_before(attempt: int) -> float:
    """Seconds to wait before an attempt, the second being number 1. Random, so that not all processes come at once."""
    return random.uniform(0.5, 1.0) * min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(attempt - 1, 10))


def after_retries(delays: Sequence[float]) -> str:
    """The end of the error text of an operation that failed at every attempt."""
    return f"; tried {len(delays)} times"


def retry_each(
    items: Sequence[int], attempt: Callable[[Sequence[int]], Sequence[int]], delays: Sequence[float]
) -> None:
    """Call `attempt` on all items, then on those that it returned until there are none, at most once for each delay."""
    for delay in delays:
        if not items:
            return
        if delay:  # a sleep of 0 s would release the interpreter
            time.sleep(delay)
        items = attempt(items)


def retry(action: Callable[[], T], permanent: Callable[[Exception], bool], delays: Sequence[float]) -> T:
    """Call `action` until it succeeds, at most once for each delay. Exceptions of which `permanent` is true are raised
    immediately, others after the last attempt."""
    results: list[T] = []
    faults: list[Exception] = []

    def attempt(items: Sequence[int]) -> Sequence[int]:
        try:
            results.append(action())
        except Exception as fault:  # libraries, such as pyarrow, raise exceptions of other kinds
            if permanent(fault):
                raise
            faults.append(fault)
            return items
        return ()

    retry_each([0], attempt, delays)
    if not results:
        raise faults[-1]
    return results[0]
