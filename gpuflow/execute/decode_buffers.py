"""Device memory that decoded images pass through on their way into a batch."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from gpuflow.execute.device_stream import Delivery

__all__ = ["BUFFERS", "DecodeBuffers"]

BUFFERS = 3
"""Decode buffers at most, one for each thread that launches."""

_BLOCK, _WASTE, _TAKE_SECONDS = 1 << 20, 4, 60.0


class DecodeBuffers:
    """Device memory that decoded images pass through: one is decoded into while another is read.

    nvJPEG writes from streams of its own, which do not wait for what is queued on the caller's. So `lend` waits, on the
    host, until the GPU has read what the buffer held before. As many threads may be in `lend` as there are buffers.

    Args:
        count: buffers that take turns, until `more` allows further ones.
    """

    def __init__(self, delivery: Delivery, count: int = BUFFERS) -> None:
        self._delivery = delivery
        self._free: queue.SimpleQueue[tuple[torch.Tensor | None, torch.cuda.Event | None]] = queue.SimpleQueue()
        self._spare: queue.SimpleQueue[tuple[None, None]] = queue.SimpleQueue()
        for place in range(BUFFERS):
            (self._free if place < count else self._spare).put((None, None))

    def more(self) -> None:
        """Allow one more, if there are not BUFFERS yet."""
        with suppress(queue.Empty):
            self._free.put(self._spare.get_nowait())

    @contextmanager
    def lend(self, size: int) -> Iterator[torch.Tensor]:
        """A uint8 buffer of `size` bytes or more. What is queued when the block ends is the last to read it."""
        buffer = self._take(size)
        try:
            yield buffer
        finally:
            self._free.put((buffer, self._delivery.mark(wait=True)))

    def _take(self, size: int) -> torch.Tensor:
        """A free buffer; one that is too small, or grew for a huge image, is exchanged."""
        buffer, read = self._free.get(timeout=_TAKE_SECONDS)
        if read is not None:
            read.synchronize()
        need = -(-size // _BLOCK) * _BLOCK
        if buffer is None or len(buffer) < size or len(buffer) > _WASTE * need:
            buffer = None  # gives the old one back before there is a new one
            try:
                with self._delivery.queued():
                    buffer = torch.empty(need + need // 16, dtype=torch.uint8, device=self._delivery.device)
            except torch.OutOfMemoryError:
                self._free.put((None, None))
                raise
            self._delivery.synchronize()  # the memory may be another's, read by what is still queued
        return buffer
