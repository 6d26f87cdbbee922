"""Pools of reusable memory: encoded bytes of chunks, slots of batches.

A chunk's bytes are released when its samples are decoded. A batch's slots are free again when the last tensor on them
is gone: a consumer may keep a batch for any time, and it is never overwritten.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import DTypeLike

from gpuflow.arrays import Array, Bytes
from gpuflow.runtime.memory import heap


class BytePool:
    """Buffers for encoded bytes in power-of-two sizes; keeps at most `keep` bytes of free ones.

    make: allocates a new buffer of a given number of bytes.
    """

    def __init__(self, keep: int = 64 << 20, *, make: Callable[[int], Bytes] = heap) -> None:
        self._keep, self._held, self._make = keep, 0, make
        self._free: dict[int, list[Bytes]] = {}
        self._lock = threading.Lock()

    def acquire(self, size: int) -> Bytes:
        """A buffer of at least `size` bytes; its content is undefined."""
        size_class = 1 << max(size - 1, 1 << 16).bit_length()
        with self._lock:
            if free := self._free.get(size_class):
                self._held -= size_class
                return free.pop()
        return self._make(size_class)

    def release(self, buffer: Bytes) -> None:
        """Return a buffer that came from `acquire`."""
        with self._lock:
            if self._held + len(buffer) <= self._keep:
                self._held += len(buffer)
                self._free.setdefault(len(buffer), []).append(buffer)

    def clear(self) -> None:
        """Free the buffers that are not in use."""
        with self._lock:
            self._free.clear()
            self._held = 0


class SlotPool:
    """Memory for batches of one shape. Mapping fresh pages costs as much as filling them, so memory is reused.

    `acquire` looks for slots that nothing refers to any more. A callback when they are dropped could swallow a Ctrl-C.

    Args:
        shape: the slots of a full batch, [B, ...]; they grow with the largest batch.
        dtype: of an element.
        keep: free batches that are kept.
        make: allocates memory of a given number of bytes.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: DTypeLike, keep: int, *, make: Callable[[int], Bytes] = heap
    ) -> None:
        self._shape, self._dtype, self._keep, self._make = shape, np.dtype(dtype), keep, make
        self._acquired: list[tuple[weakref.ref[Array], Array]] = []
        self._lock = threading.Lock()

    def acquire(self, count: int) -> Array:
        """Slots for `count` samples, [count, ...]. The memory is free again once nothing refers to the array."""
        with self._lock:
            if count > self._shape[0]:
                self._shape = (count, *self._shape[1:])
            size = self._shape[0]
            free = [base for slots, base in self._acquired if slots() is None and len(base) == size][: self._keep]
            self._acquired = [
                pair for pair in self._acquired if pair[0]() is not None or any(pair[1] is x for x in free[1:])
            ]
            base = free[0] if free else self._new()
            slots = base[:count]
            self._acquired.append((weakref.ref(slots), base))
        return slots

    def _new(self) -> Array:
        return self._make(math.prod(self._shape) * self._dtype.itemsize).view(self._dtype).reshape(self._shape)

    def clear(self) -> None:
        """Free the memory; slots in use stay valid."""
        with self._lock:
            self._acquired.clear()
