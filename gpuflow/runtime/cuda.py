"""Sets how many hardware queues CUDA uses, and captures work on a GPU as CUDA graphs."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
QUEUES_VARIABLE, QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 32
"""CUDA's variable, whose default is 8, and its largest value. Work in a queue waits for the work before it, also for
that of other streams. nvJPEG, the loader, a training and NCCL have more streams
than 8. With 8 queues a call of nvJPEG next to a training took up to 38 ms, with 32 up to 21 (measured in
experiments/ranks/NOTES.md)."""
_late = False


def request_queues() -> None:
    """Have CUDA use as many hardware queues as it can, if the environment does not say how many.

    To be called when gpuflow is imported: CUDA reads the variable once, when the process first uses a GPU.
    """
    global _late
    torch = sys.modules.get("torch")
    if QUEUES_VARIABLE in os.environ:
        return
    if torch is not None and torch.cuda.is_initialized():
        _late = True
    else:
        os.environ[QUEUES_VARIABLE] = str(QUEUES)


def warn_if_late() -> None:
    """Log once that this process used the GPU before it imported gpuflow, what that costs, and how to avoid it."""
    global _late
    if _late:
        _late = False
        _LOG.warning(
            "this process used the GPU before it imported gpuflow, so CUDA has 8 hardware queues, and decoding and "
            "training may wait for each other: a ResNet-18 under DDP on two H200 kept 0.69 of its speed, with %d "
            "queues 0.94; put `import gpuflow` before the first use of CUDA, or begin the script with "
            'import os; os.environ["%s"] = "%d"',
            QUEUES,
            QUEUES_VARIABLE,
            QUEUES,
        )


_CAPTURE = threading.Lock()  # a capture begins with a device synchronization, which CUDA refuses during another capture
_failed: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed. torch's allocators may still refer to them, so they are never freed."""


class CudaCapture:
    """Captures on one stream of a device. The graphs share the memory that captured work allocates, so that one of them
    runs at a time.

    stream: by default a new one.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        import torch

        self._device = device
        self._stream = stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def __call__(self, work: Callable[[], T], *, runs_before: int) -> tuple[Callable[[], None], T]:
        """Return what replays `work` on the stream that is current then, and what `work` returned while it was
        captured.

        Waits for the GPU. Raises what `work` raises, and RuntimeError where CUDA cannot capture it.

        runs_before: how often `work` runs before, so that it has compiled, loaded and chosen its kernels.
        """
        import torch

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
        import torch

        _failed.append(graph)
        pool, self._pool = self._pool, None
        with suppress(RuntimeError):  # this version of torch ends it itself
            torch._C._cuda_endAllocateToPool(self._device.index or 0, pool)
