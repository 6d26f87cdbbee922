"""Buffers that are used again: encoded bytes of a chunk, slots of a batch. Who may reuse what, and when.

A chunk's bytes go back when its samples are decoded. A batch's slots go back when the last tensor on them is gone:
the consumer may keep a batch as long as it likes and nothing is ever overwritten under it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = ["BytePool", "SlotPool"]


class BytePool:
    """Buffers for encoded bytes in power-of-two sizes; keeps at most `keep` bytes of free ones."""

    def __init__(self, keep: int = 64 << 20) -> None:
        self._keep, self._held = keep, 0
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._lock = threading.Lock()

    def take(self, size: int) -> NDArray[np.uint8]:
        """A buffer of at least `size` bytes, with whatever it held before."""
        size_class = 1 << max(size - 1, 1 << 16).bit_length()
        with self._lock:
            if free := self._free.get(size_class):
                self._held -= size_class
                return free.pop()
        return np.empty(size_class, np.uint8)

    def give(self, buffer: NDArray[np.uint8]) -> None:
        """Return a buffer that came from `take`."""
        with self._lock:
            if self._held + len(buffer) <= self._keep:
                self._held += len(buffer)
                self._free.setdefault(len(buffer), []).append(buffer)


class SlotPool:
    """Memory for batches of one shape. Mapping fresh pages costs as much as filling them, so they are kept.

    Args:
        shape: the slots of a full batch, [B, ...]. dtype: of an element. keep: free batches to hold on to.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike, keep: int) -> None:
        self._shape, self._dtype, self._keep = shape, np.dtype(dtype), keep
        self._free: list[NDArray[Any]] = []

    def take(self, count: int) -> NDArray[Any]:
        """Slots for `count` samples, [count, ...]. The memory comes back when nothing refers to the array any more."""
        try:
            base = self._free.pop()
        except IndexError:
            base = np.empty(self._shape, self._dtype)
        slots = base[:count]
        weakref.finalize(slots, self._give, base).atexit = False
        return slots

    def _give(self, base: NDArray[Any]) -> None:
        if len(self._free) < self._keep:
            self._free.append(base)

    def clear(self) -> None:
        """Let go of the free memory; what is in use stays with its users and is not kept when it comes back."""
        self._keep = 0
        self._free.clear()
