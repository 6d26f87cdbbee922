"""CUDA graphs: captures a model's work on batches of one size, and compares its replay with the plain run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["Captured", "CudaGraphs", "GraphMaker", "difference", "tolerance"]

_RUNS_BEFORE_CAPTURE = 3
_CAPTURE = threading.Lock()  # a capture begins with a device synchronization, which CUDA refuses during another capture
_TOLERANCES = {torch.float16: 0.05, torch.bfloat16: 0.05}
_FLOAT32_TOLERANCE = 5e-3  # torch lets convolutions round to TF32
_failed: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed. torch's allocators may still refer to them, so they are never freed."""


@dataclass(frozen=True, slots=True)
class Captured:
    """The work on batches of one size. images: its input [N, C, H, W]. replay: runs it. logits: its output [N, K]."""

    images: torch.Tensor
    replay: Callable[[], object]
    logits: torch.Tensor


class GraphMaker(Protocol):
    """Captures what a model does with images of this shape, after a few runs that allocate and select kernels."""

    def __call__(self, module: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor) -> Captured: ...


class CudaGraphs:
    """Captures on one stream. The graphs share memory: one runs at a time, and its logits are copied before the next
    one runs."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device, self._stream = device, stream
        self._pool: Any = None

    def __call__(self, module: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor) -> Captured:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with _CAPTURE, torch.cuda.stream(self._stream):
            for _ in range(_RUNS_BEFORE_CAPTURE):
                module(images)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    logits = module(images)
            except BaseException:
                self._abandon(graph)
                raise
        return Captured(images, graph.replay, logits)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Tell torch's allocator that a failed capture is over.

        Some versions of torch, such as 2.11, do not: the allocator then never reuses memory that two streams have used,
        so that each batch would take more.
        """
        _failed.append(graph)
        pool, self._pool = self._pool, None
        with suppress(RuntimeError):  # this version of torch ends it itself
            torch._C._cuda_endAllocateToPool(self._device.index or 0, pool)


def tolerance(dtype: torch.dtype, logits: torch.Tensor) -> float:
    """How far a replay's logits may be from those of a plain run of a model in this dtype."""
    finite = logits[logits.isfinite()]
    return _TOLERANCES.get(dtype, _FLOAT32_TOLERANCE) * max(1.0, float(finite.abs().max()) if len(finite) else 0.0)


def difference(replayed: torch.Tensor, plain: torch.Tensor) -> float:
    """The largest difference of two tensors of logits; infinite where only one of them is infinite or no number."""
    if replayed.shape != plain.shape:
        return float("inf")
    same = (replayed == plain) | (replayed.isnan() & plain.isnan())
    apart = (replayed - plain).abs()[~same]
    return float(apart.nan_to_num(nan=float("inf"), posinf=float("inf")).max()) if len(apart) else 0.0
