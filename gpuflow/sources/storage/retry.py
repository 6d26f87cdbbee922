"""Tries again what fails for a short time, such as a network file system that does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["AFTER_RETRIES", "retry", "retry_each"]

T = TypeVar("T")

_DELAYS = (0.0, 0.05, 0.1, 0.2)
"""Seconds before each attempt."""
AFTER_RETRIES = f"; tried {len(_DELAYS)} times"
"""Ends the reason of a fault that was still there at the last attempt."""


def retry_each(items: Sequence[int], attempt: Callable[[Sequence[int]], Sequence[int]]) -> None:
    """Calls `attempt` on all items, then on those that it returned, until it returns none or was called four times."""
    for delay in _DELAYS:
        if items:
            time.sleep(delay)
            items = attempt(items)


def retry(action: Callable[[], T], lasting: tuple[type[Exception], ...]) -> T:
    """Calls `action` until it succeeds, four times at most. `lasting` exceptions are raised at once, others at last."""
    results: list[T] = []
    faults: list[Exception] = []

    def attempt(items: Sequence[int]) -> Sequence[int]:
        try:
            results.append(action())
        except lasting:
            raise
        except Exception as fault:  # file systems of fsspec raise whatever their library raises
            faults.append(fault)
            return items
        return ()

    retry_each([0], attempt)
    if not results:
        raise faults[-1]
    return results[0]
