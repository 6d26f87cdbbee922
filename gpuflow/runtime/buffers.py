"""Buffers that are used again: encoded bytes of a chunk, slots of a batch. Who may reuse what, and when.

A chunk's bytes go back when its samples are decoded. A batch's slots go back when the last tensor on them is gone:
the consumer may keep a batch as long as it likes and nothing is ever overwritten under it.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

__all__ = [
    "BytePool",
    "SharedBlock",
    "SlotPool",
    "heap",
    "pinned",
    "shared",
    "shared_and_pinned",
    "shared_block",
    "shared_keys",
]


def heap(size: int) -> NDArray[np.uint8]:
    """So many bytes of ordinary memory."""
    return np.empty(size, np.uint8)


def pinned(size: int) -> NDArray[np.uint8]:
    """So many bytes of memory that a GPU copies from directly."""
    import torch

    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """Memory that other processes can map by its descriptor. key: never used again in this process. size: in bytes."""

    key: int
    descriptor: int
    size: int


_shared: dict[int, SharedBlock] = {}
"""By the address of the first byte."""
_keys = itertools.count()


def shared(size: int) -> NDArray[np.uint8]:
    """So many bytes that other processes can map, see `shared_block`. Raises OSError where there are none."""
    return _share(size)[0]


def shared_and_pinned(size: int) -> NDArray[np.uint8]:
    """The same, that the current GPU copies from directly. Where that cannot be had, it is `pinned` alone."""
    import torch

    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    try:
        memory, address = _share(size)
    except OSError:
        return pinned(size)
    if int(runtime.cudaHostRegister(address, size, 0)):
        return pinned(size)
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return memory


def shared_block(memory: NDArray[Any]) -> SharedBlock | None:
    """By what other processes can map this array, or None where it does not begin where one of `shared` does."""
    return _shared.get(memory.ctypes.data)


def shared_keys() -> set[int]:
    """Of all that there is now."""
    return {block.key for block in list(_shared.values())}


def _share(size: int) -> tuple[NDArray[np.uint8], int]:
    """(the memory, where it is)."""
    descriptor = os.memfd_create("gpuflow")
    try:
        os.ftruncate(descriptor, size)
        memory = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
    except BaseException:
        os.close(descriptor)
        raise
    address, block = memory.ctypes.data, SharedBlock(next(_keys), descriptor, size)
    _shared[address] = block
    weakref.finalize(memory, _unshare, address, block).atexit = False  # views of it keep it
    return memory, address


def _unshare(address: int, block: SharedBlock) -> None:
    if _shared.get(address) is block:
        del _shared[address]
    os.close(block.descriptor)


class BytePool:
    """Buffers for encoded bytes in power-of-two sizes; keeps at most `keep` bytes of free ones.

    make: gives new ones of so many bytes.
    """

    def __init__(self, keep: int = 64 << 20, *, make: Callable[[int], NDArray[np.uint8]] = heap) -> None:
        self._keep, self._held, self._make = keep, 0, make
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._lock = threading.Lock()

    def take(self, size: int) -> NDArray[np.uint8]:
        """A buffer of at least `size` bytes, with whatever it held before."""
        size_class = 1 << max(size - 1, 1 << 16).bit_length()
        with self._lock:
            if free := self._free.get(size_class):
                self._held -= size_class
                return free.pop()
        return self._make(size_class)

    def give(self, buffer: NDArray[np.uint8]) -> None:
        """Return a buffer that came from `take`."""
        with self._lock:
            if self._held + len(buffer) <= self._keep:
                self._held += len(buffer)
                self._free.setdefault(len(buffer), []).append(buffer)

    def clear(self) -> None:
        """Let go of the free ones."""
        with self._lock:
            self._free.clear()
            self._held = 0


class SlotPool:
    """Memory for batches of one shape. Mapping fresh pages costs as much as filling them, so they are kept.

    What was lent is looked through at the next `take`: a callback at its end could swallow a Ctrl-C.

    Args:
        shape: the slots of a full batch, [B, ...]. dtype: of an element. keep: free batches to hold on to.
        make: gives memory of so many bytes.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: DTypeLike, keep: int, *, make: Callable[[int], NDArray[np.uint8]] = heap
    ) -> None:
        self._shape, self._dtype, self._keep, self._make = shape, np.dtype(dtype), keep, make
        self._lent: list[tuple[weakref.ref[NDArray[Any]], NDArray[Any]]] = []
        self._lock = threading.Lock()

    def take(self, count: int) -> NDArray[Any]:
        """Slots for `count` samples, [count, ...]. The memory is free again once nothing refers to the array."""
        with self._lock:
            free = [base for slots, base in self._lent if slots() is None][: self._keep]
            self._lent = [pair for pair in self._lent if pair[0]() is not None or any(pair[1] is x for x in free[1:])]
            base = free[0] if free else self._new()
            slots = base[:count]
            self._lent.append((weakref.ref(slots), base))
        return slots

    def _new(self) -> NDArray[Any]:
        return self._make(math.prod(self._shape) * self._dtype.itemsize).view(self._dtype).reshape(self._shape)

    def clear(self) -> None:
        """Let go of the memory; what is in use stays with its users."""
        with self._lock:
            self._lent.clear()
