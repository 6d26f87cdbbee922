"""Buffers in device memory that hold decoded images until the kernels have read them."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from gpuflow.execute.device_stream import DeviceStream, take_free
from gpuflow.execute.private_memory import PrivateMemory

__all__ = ["BUFFERS", "BUFFERS_FOR_ONE_CALL", "DecodeBuffers"]

BUFFERS, BUFFERS_FOR_ONE_CALL = 3, 2
"""The largest number of decode buffers, one for each thread that launches chunks; and how many are of use with one
nvJPEG call at a time: it writes one while kernels read the other."""

_BLOCK, _WASTE, _ACQUIRE_SECONDS = 1 << 23, 4, 60.0
_GROWTH = 4
"""A buffer that is too small is replaced by one that is larger by a fourth at least: each time may wait for the GPU."""
_RECENT = 8
"""A buffer is freed if it is over `_WASTE` times the largest of this many recent requests, some of them small."""


_Buffer = PrivateMemory[torch.Tensor]


class DecodeBuffers:
    """A pool of device buffers for decoded images: nvJPEG writes one while kernels read another.

    nvJPEG writes from streams of its own, which do not wait for work queued on the caller's stream. So `acquire` blocks
    the host until the GPU has read the buffer's previous contents. At most as many threads as there are buffers may
    hold one at a time.

    Args:
        most_bytes: the largest size of a buffer, except for a larger image.
        count: the number of buffers, until `grow` adds more.
    """

    def __init__(self, device_stream: DeviceStream, most_bytes: int, count: int = BUFFERS) -> None:
        self._device_stream, self._most_bytes = device_stream, most_bytes
        self._sizes: deque[int] = deque(maxlen=_RECENT)
        self._free: queue.SimpleQueue[tuple[_Buffer | None, torch.cuda.Event | None]] = queue.SimpleQueue()
        self._spare: queue.SimpleQueue[tuple[None, None]] = queue.SimpleQueue()
        for place in range(BUFFERS):
            (self._free if place < count else self._spare).put((None, None))

    def grow(self, most: int) -> None:
        """Add one buffer, if there are fewer than `most`, which is at most BUFFERS."""
        if self._spare.qsize() > BUFFERS - most:
            with suppress(queue.Empty):
                self._free.put(self._spare.get_nowait())

    @contextmanager
    def acquire(self, size: int) -> Iterator[torch.Tensor]:
        """A uint8 buffer of at least `size` bytes. Work that reads it must be queued before the block ends."""
        buffer = self._free_buffer(size)
        try:
            yield buffer.tensors
        finally:
            self._free.put((buffer, self._device_stream.record_event(blocking=True)))

    def _free_buffer(self, size: int) -> _Buffer:
        """A free buffer. One that is too small, or far too large after a huge image, is replaced."""
        buffer, read = take_free(self._free, _ACQUIRE_SECONDS, "the GPU did not release a decode buffer")
        try:
            if read is not None:
                read.synchronize()
            need = self._rounded(size)
            self._sizes.append(need)
            has = 0 if buffer is None else len(buffer.tensors)
            if buffer is None or has < size or has > _WASTE * max(self._sizes):
                if has < size:
                    need = max(need, min(self._rounded(has + has // _GROWTH), self._most_bytes))
                if buffer is not None:
                    buffer.free()
                device = self._device_stream.device
                buffer = PrivateMemory(self._device_stream, lambda: torch.empty(need, dtype=torch.uint8, device=device))
                self._device_stream.synchronize()  # work still queued may read this memory under its previous owner
        except BaseException:
            self._free.put((None, None))
            raise
        return buffer

    def _rounded(self, size: int) -> int:
        """`size`, or the bytes of a buffer for it and for slightly larger ones."""
        return max(size, min(-(-size // _BLOCK) * _BLOCK, self._most_bytes))
