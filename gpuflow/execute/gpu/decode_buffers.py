"""Buffers in device memory that hold decoded images until the kernels have read them."""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import final

import torch

from gpuflow.execute.gpu.device_stream import DeviceStream, take_free
from gpuflow.execute.gpu.gpu_call import PlanMemory


class PrivateMemory:
    """A tensor in a separate memory pool (`torch.cuda.MemPool`), for large buffers that are replaced or freed.

    torch keeps the memory of other tensors for the stream that they were allocated on, even if nothing there asks for
    that size again; then neither the training nor another library can have it. `free` gives this memory back to the
    GPU. That may wait for the GPU's work, so it is for rare changes.

    torch's other allocators, such as cudaMallocAsync, have no pools: with one of them this is memory like any other.

    tensor: what `allocate` returned. If something else still holds it when it is freed, its memory goes back only when
        torch empties its cache.

    Args:
        device_stream: its stream and device are current while `allocate` runs.
        allocate: allocates the tensor on that device.
    """

    def __init__(self, device_stream: DeviceStream, allocate: Callable[[], torch.Tensor]) -> None:
        device = device_stream.device
        has_pools = device.type == "cuda" and torch.cuda.get_allocator_backend() == "native"
        with device_stream.queued():
            pool = torch.cuda.MemPool() if has_pools else None
            with torch.cuda.use_mem_pool(pool, device) if pool is not None else contextlib.nullcontext():
                self.tensor = allocate()
        self._pool = pool  # after the tensor, so that it is deleted after it

    def free(self) -> None:
        """Give the memory back. The GPU must have finished all work on it."""
        del self.tensor
        self._pool = None


BUFFERS, BUFFERS_FOR_ONE_CALL = 3, 2
"""The largest number of decode buffers, one for each thread that launches chunks; and how many are of use with one
nvJPEG call at a time: it writes one while kernels read the other."""

_BLOCK, _WASTE, _ACQUIRE_SECONDS = 1 << 23, 4, 60.0
_GROWTH = 4
"""A buffer that is too small is replaced by one that is larger by a fourth at least: each time may wait for the GPU."""
_RECENT = 8
"""A buffer is freed if it is over `_WASTE` times the largest of this many recent requests, some of them small."""
_PLANS_ROUNDED = 1 << 14
"""Memory for plans is allocated in multiples of this, so that it seldom changes."""


@final
class DecodeBuffer:
    """Memory for the images of one call of nvJPEG, with what the work on them needs until it is done.

    sources: host memory that this work reads, such as encoded bytes. recorded: whether `PlanMemory.done` has been
        recorded after all work on the images.
    """

    def __init__(self, device_stream: DeviceStream) -> None:
        self._device_stream = device_stream
        self._pixels: PrivateMemory | None = None
        self._plans: PlanMemory | None = None
        self._read: torch.cuda.Event | None = None
        self.recorded = False
        self.sources: list[object] = []
        self._former_sources: list[object] = []

    @property
    def size(self) -> int:
        return 0 if self._pixels is None else len(self._pixels.tensor)

    @property
    def address(self) -> int:
        """Return the address of the first byte in device memory."""
        assert self._pixels is not None
        return self._pixels.tensor.data_ptr()

    def plans(self, size: int) -> PlanMemory:
        """Return memory for plans of at least this size. Its `done` is the event after the work on the images."""
        if self._plans is None or self._plans.size < size:
            self.wait()
            self._plans = PlanMemory(self._device_stream, -(-size // _PLANS_ROUNDED) * _PLANS_ROUNDED)
            self._read = self._plans.done
        return self._plans

    def wait(self) -> None:
        """Block the host until the GPU has read the images that are here."""
        if self._read is not None:
            self._read.synchronize()

    def free(self) -> None:
        """Give the memory for the images back, once the GPU has read them."""
        self.wait()
        if self._pixels is not None:
            self._pixels.free()
        self._pixels = None

    def _begin(self) -> None:
        """Note that new images will be written, once the former ones are read."""
        self._former_sources, self.sources, self.recorded = self.sources, [], False

    def _end(self) -> None:
        """Note that all work on the images is queued."""
        self._former_sources = []
        if self.recorded:
            return
        event = self._device_stream.record_event(blocking=True)
        self._read = event
        if self._plans is not None:
            self._plans.done = event

    def _replace(self, size: int) -> None:
        """Get other memory for the images."""
        self.free()
        device = self._device_stream.device
        self._pixels = PrivateMemory(self._device_stream, lambda: torch.empty(size, dtype=torch.uint8, device=device))
        self._device_stream.synchronize()  # work still queued may read this memory under its previous owner


class DecodeBuffers:
    """A pool of device buffers for decoded images: nvJPEG writes one while kernels read another.

    nvJPEG writes on its internal streams, which are not synchronized with the caller's stream. So the host must wait
    until the GPU has read the buffer's previous contents. At most as many threads as there are buffers may hold one at
    a time.

    Args:
        most_bytes: the largest size of a buffer, except for a larger image.
        count: the number of buffers, until `grow` adds more.
    """

    def __init__(self, device_stream: DeviceStream, most_bytes: int, count: int = BUFFERS) -> None:
        self._device_stream, self._most_bytes = device_stream, most_bytes
        self._sizes: deque[int] = deque(maxlen=_RECENT)
        self._free: queue.SimpleQueue[DecodeBuffer] = queue.SimpleQueue()
        self._spare: queue.SimpleQueue[DecodeBuffer] = queue.SimpleQueue()
        for place in range(BUFFERS):
            (self._free if place < count else self._spare).put(DecodeBuffer(device_stream))

    def grow(self, most: int) -> None:
        """Add one buffer, if there are fewer than `most`, which is at most BUFFERS."""
        if self._spare.qsize() > BUFFERS - most:
            with suppress(queue.Empty):
                self._free.put(self._spare.get_nowait())

    def shrink(self, most: int) -> None:
        """Free buffers that nothing uses until there are at most `most`; `grow` adds them again. May wait for the
        GPU."""
        while BUFFERS - self._spare.qsize() > most:
            try:
                buffer = self._free.get_nowait()
            except queue.Empty:  # all are in use
                return
            try:
                buffer.free()
            finally:
                self._spare.put(DecodeBuffer(self._device_stream))

    @contextmanager
    def acquire(self, size: int, *, wait: bool = True) -> Iterator[DecodeBuffer]:
        """Acquire a buffer of at least `size` bytes. Work that reads it must be queued before the block ends.

        wait: whether to block the host until its previous contents are read; otherwise the caller does that, before
            anything is written.
        """
        buffer = take_free(self._free, _ACQUIRE_SECONDS, "the GPU did not release a decode buffer")
        try:
            buffer._begin()
            self._fit(buffer, size)
            if wait:
                buffer.wait()
        except BaseException:
            self._free.put(DecodeBuffer(self._device_stream))
            raise
        try:
            yield buffer
        finally:
            try:
                buffer._end()
            finally:
                self._free.put(buffer)

    def _fit(self, buffer: DecodeBuffer, size: int) -> None:
        """Replace the memory of a buffer that is too small, or far too large after a huge image."""
        need = self._rounded(size)
        self._sizes.append(need)
        if size <= buffer.size <= _WASTE * max(self._sizes) and buffer.size:
            return
        if buffer.size < size:
            need = max(need, min(self._rounded(buffer.size + buffer.size // _GROWTH), self._most_bytes))
        buffer._replace(need)

    def _rounded(self, size: int) -> int:
        """Return `size`, or the bytes of a buffer for it and for slightly larger ones."""
        return max(size, min(-(-size // _BLOCK) * _BLOCK, self._most_bytes))
