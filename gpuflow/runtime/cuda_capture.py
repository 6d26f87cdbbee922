"""Captures work on a GPU as CUDA graphs, which one call each replays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_CAPTURE = threading.Lock()  # a capture begins with a device synchronization, which CUDA refuses during another capture
_failed: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed. torch's allocators may still refer to them, so they are never freed."""


class CudaCapture:
    """Captures on one stream of a device. The graphs share the memory that captured work allocates, so that one of them
    runs at a time.

    stream: by default a new one.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._stream = stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def __call__(self, work: Callable[[], T], *, runs_before: int) -> tuple[Callable[[], None], T]:
        """What replays `work` on the stream that is current then, and what `work` returned while it was captured.

        Waits for the GPU. Raises what `work` raises, and RuntimeError where CUDA cannot capture it.

        runs_before: how often `work` runs before, so that it has compiled, loaded and chosen its kernels.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with _CAPTURE, torch.cuda.stream(self._stream):
            for _ in range(runs_before):
                work()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    result = work()
            except BaseException:
                self._abandon(graph)
                raise
        return graph.replay, result

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Tell torch's allocator that a failed capture is over.

        Some versions of torch, such as 2.11, do not: the allocator then never reuses memory that two streams have used,
        so that each batch would take more.
        """
        _failed.append(graph)
        pool, self._pool = self._pool, None
        with suppress(RuntimeError):  # this version of torch ends it itself
            torch._C._cuda_endAllocateToPool(self._device.index or 0, pool)
