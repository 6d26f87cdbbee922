"""Allocates memory: ordinary, pinned for a GPU, or shared with worker processes; and keeps pools of it.

Shared memory is cut from *regions*, each a file in memory (memfd) of 64 GiB of addresses, mapped once here and once in
each worker. So a buffer takes no file descriptor, however many there are, and pages only where it was written to.
"""

from __future__ import annotations

import errno
import itertools
import math
import mmap
import os
import resource
import threading
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import DTypeLike

from gpuflow.arrays import Array, Bytes

_REGION_BYTES = 1 << 36


def heap(size: int) -> Bytes:
    """Allocate `size` bytes of ordinary memory."""
    return np.empty(size, np.uint8)


def pinned(size: int) -> Bytes:
    """Allocate `size` bytes of pinned memory, which a GPU copies from directly."""
    import torch

    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """Names bytes [start, start + length) of a region that other processes can map by its descriptor.

    key: of the region, never used again in this process. size: of the region, in bytes.
    """

    key: int
    descriptor: int
    size: int
    start: int
    length: int


def memory_file(name: str) -> int:
    """Return the descriptor of a new file in memory. Raises OSError where there is none, such as in a sandbox."""
    try:
        return os.memfd_create(name)
    except AttributeError as error:
        raise OSError(errno.ENOSYS, "this Python has no os.memfd_create") from error


def shared(size: int) -> Bytes:
    """Allocate `size` bytes that other processes can map, see `shared_block`; as `heap` where the system has none."""
    try:
        return _here().allocate(size)
    except OSError:
        return heap(size)


def shared_and_pinned(size: int) -> Bytes:
    """Allocate shared memory that the current GPU copies from directly; where there is none, `pinned` memory."""
    import torch

    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    try:
        memory = _here().allocate(size)
    except OSError:
        return pinned(size)
    address = memory.ctypes.data
    if int(runtime.cudaHostRegister(address, size, 0)):
        _clear_cuda_error()
        return pinned(size)
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False  # the latest one runs first
    return memory


def _clear_cuda_error() -> None:
    """Clear the error that a failed call of CUDA's runtime left to this thread.

    torch raises it after the next kernel that this thread launches, so this launches one whose result nothing uses.
    """
    import torch

    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


def shared_block(memory: Array) -> SharedBlock | None:
    """Return what other processes need to map this array, or None if it does not begin where an array of `shared`
    does."""
    return _here().blocks.get(memory.ctypes.data)


def shared_keys() -> set[int]:
    """Return the keys of all open regions."""
    return {region.key for region in tuple(_here().regions)}


_keys = itertools.count()


@final
class _Region:
    """Maps a file in memory once, and knows which of its pages are free: sorted, disjoint (start, length).

    Raises OSError where there is no memory to share, or there are no descriptors.
    """

    def __init__(self, size: int) -> None:
        self.key, self.size = next(_keys), size
        self.descriptor = memory_file("gpuflow")
        try:
            os.ftruncate(self.descriptor, size)
            self.map = mmap.mmap(self.descriptor, size)
        except BaseException:
            os.close(self.descriptor)
            raise
        with suppress(OSError):
            self.map.madvise(mmap.MADV_DONTDUMP)  # a core dump would walk through all of its addresses
        self._free = [(0, size)]

    @property
    def unused(self) -> bool:
        return self._free == [(0, self.size)]

    def acquire(self, length: int) -> int | None:
        """Return where the first `length` contiguous free bytes start; None if there are none."""
        for i, (start, free) in enumerate(self._free):
            if free >= length:
                self._free[i : i + 1] = [(start + length, free - length)] if free > length else []
                return start
        return None

    def release(self, start: int, length: int) -> None:
        """Give the pages back to the system, and their addresses to `acquire`."""
        with suppress(OSError):  # on a file system without holes the memory is used again, or freed with the region
            self.map.madvise(mmap.MADV_REMOVE, start, length)
        insort(self._free, (start, length))
        joined: list[tuple[int, int]] = []
        for begin, free in self._free:
            if joined and sum(joined[-1]) == begin:
                joined[-1] = (joined[-1][0], joined[-1][1] + free)
            else:
                joined.append((begin, free))
        self._free = joined

    def close(self) -> None:
        """Close the file. The mapping ends with the last array on it, which may be about to go."""
        os.close(self.descriptor)


@final
class _SharedMemory:
    """Holds the regions of one process, and the blocks in use by the address of their first byte.

    A block is free once nothing refers to its array. The garbage collector notices that, on any thread and
    perhaps in the middle of `allocate`: so the block is put into a queue, which the holder of the lock empties.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self.blocks: dict[int, SharedBlock] = {}
        self.regions: list[_Region] = []
        self._lock = threading.Lock()
        self._unreferenced: deque[tuple[int, _Region, SharedBlock]] = deque()

    def allocate(self, size: int) -> Bytes:
        """Allocate `size` bytes, which views of the array keep. Raises OSError where there is no memory to share."""
        length = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            with self._lock:
                region, start = self._acquire(length)
                memory = np.frombuffer(region.map, np.uint8, size, start)
                address = memory.ctypes.data
                block = SharedBlock(region.key, region.descriptor, region.size, start, length)
                self.blocks[address] = block
                weakref.finalize(memory, self._unreference, address, region, block).atexit = False
        finally:
            self._empty_queue()
        return memory

    def _acquire(self, length: int) -> tuple[_Region, int]:
        for region in self.regions:
            start = region.acquire(length)
            if start is not None:
                return region, start
        region = _new_region(length)
        self.regions.append(region)
        start = region.acquire(length)
        assert start is not None
        return region, start

    def _unreference(self, address: int, region: _Region, block: SharedBlock) -> None:
        if os.getpid() == self.process:  # a forked child must not take away what its parent uses
            self._unreferenced.append((address, region, block))
            self._empty_queue()

    def _empty_queue(self) -> None:
        while self._unreferenced and self._lock.acquire(blocking=False):
            try:
                while self._unreferenced:
                    address, region, block = self._unreferenced.popleft()
                    del self.blocks[address]
                    region.release(block.start, block.length)
                    if region.unused:
                        self.regions.remove(region)
                        region.close()
            finally:
                self._lock.release()


def _new_region(length: int) -> _Region:
    """Return a region for `length` bytes and many more, within an eighth of the addresses that this process may
    have."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)]
    most = min([_REGION_BYTES, *(limit // 8 for limit in limits if limit != resource.RLIM_INFINITY)])
    try:
        return _Region(max(length, most // mmap.PAGESIZE * mmap.PAGESIZE))
    except OSError:
        return _Region(length)


_memory = _SharedMemory()


def _here() -> _SharedMemory:
    """Return the shared memory of this process. A forked child gets a new one, whose lock no thread holds."""
    global _memory
    if _memory.process != os.getpid():
        _memory = _SharedMemory()
    return _memory


class BytePool:
    """Lends buffers for encoded bytes in power-of-two sizes, and keeps at most `keep` bytes of free ones.

    make: allocates a new buffer of a given number of bytes.

    Examples:
        >>> pool = BytePool()
        >>> buffer = pool.acquire(100_000)
        >>> pool.release(buffer)
        >>> len(buffer), pool.acquire(120_000) is buffer
        (131072, True)
    """

    def __init__(self, keep: int = 64 << 20, *, make: Callable[[int], Bytes] = heap) -> None:
        self._keep, self._held, self._make = keep, 0, make
        self._free: dict[int, list[Bytes]] = {}
        self._lock = threading.Lock()

    def acquire(self, size: int) -> Bytes:
        """Return a buffer of at least `size` bytes; its content is undefined."""
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
    """Lends memory for batches of one shape, and reuses it: mapping fresh pages costs as much as filling them.

    A consumer may keep a batch for any time: it is never overwritten. `acquire` looks for slots that nothing refers to
    any more. A callback when they are dropped could swallow a Ctrl-C.

    Args:
        shape: the slots of a full batch, [B, ...]; they grow with the largest batch.
        dtype: of an element.
        keep: free batches that are kept.
        make: allocates memory of a given number of bytes.

    Examples:
        >>> pool = SlotPool((4, 2), np.float32, keep=1)
        >>> slots, address = pool.acquire(4), pool.acquire(3).ctypes.data  # nothing refers to the three slots now
        >>> pool.acquire(4).ctypes.data == address, pool.acquire(5).shape
        (True, (5, 2))
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: DTypeLike, keep: int, *, make: Callable[[int], Bytes] = heap
    ) -> None:
        self._shape, self._dtype, self._keep, self._make = shape, np.dtype(dtype), keep, make
        self._acquired: list[tuple[weakref.ref[Array], Array]] = []
        self._lock = threading.Lock()

    def acquire(self, count: int) -> Array:
        """Return slots for `count` samples, [count, ...]. The memory is free again once nothing refers to the array."""
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
