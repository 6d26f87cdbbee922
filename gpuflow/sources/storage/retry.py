"""Retries operations that fail temporarily, such as reads from a network file system that does not respond."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["LOCAL_DELAYS", "REMOTE_DELAYS", "after_retries", "retry", "retry_each"]

T = TypeVar("T")

LOCAL_DELAYS = (0.0, 0.05, 0.1, 0.2)
"""Seconds before each attempt to read a file of this machine."""
REMOTE_DELAYS = (0.0, 0.1, 0.5, 2.0)
"""As `LOCAL_DELAYS`, for a server: one that is overloaded needs time."""


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
        except Exception as fault:  # file systems of fsspec raise any exceptions of their libraries
            if permanent(fault):
                raise
            faults.append(fault)
            return items
        return ()

    retry_each([0], attempt, delays)
    if not results:
        raise faults[-1]
    return results[0]
