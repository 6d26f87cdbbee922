"""Device memory outside of torch's cache: freeing it returns it to the GPU at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from gpuflow.execute.device_stream import DeviceStream

__all__ = ["PrivateMemory"]

T = TypeVar("T")


class PrivateMemory(Generic[T]):
    """Tensors in a separate memory pool (`torch.cuda.MemPool`), for large buffers that are replaced or freed.

    torch keeps the memory of other tensors for the stream that they were allocated on, even if nothing there asks for
    that size again; then neither the training nor another library can have it. `free` gives this memory back to the
    GPU. That may wait for the GPU's work, so it is for rare changes.

    torch's other allocators, such as cudaMallocAsync, have no pools: with one of them this is memory like any other.

    tensors: what `allocate` returned. Memory of a tensor that something else still holds when it is freed goes back
        only when torch empties its cache.

    Args:
        device_stream: its stream and device are current while `allocate` runs.
        allocate: allocates the tensors on that device.
    """

    def __init__(self, device_stream: DeviceStream, allocate: Callable[[], T]) -> None:
        device = device_stream.device
        has_pools = device.type == "cuda" and torch.cuda.get_allocator_backend() == "native"
        with device_stream.queued():
            pool = torch.cuda.MemPool() if has_pools else None
            with torch.cuda.use_mem_pool(pool, device) if pool is not None else contextlib.nullcontext():
                self.tensors = allocate()
        self._pool = pool  # after the tensors, so that it is deleted after them

    def free(self) -> None:
        """Give the memory back. The GPU must have finished all work on it."""
        del self.tensors
        self._pool = None
