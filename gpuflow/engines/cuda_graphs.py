"""CUDA graphs: captures a model's work on batches of one size, and compares its replay with the plain run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from gpuflow.runtime.cuda_capture import CudaCapture

_RUNS_BEFORE_CAPTURE = 3
_TOLERANCES = {torch.float16: 0.05, torch.bfloat16: 0.05}
_FLOAT32_TOLERANCE = 5e-3  # torch lets convolutions round to TF32


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
        self._capture = CudaCapture(device, stream)

    def __call__(self, module: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor) -> Captured:
        replay, logits = self._capture(lambda: module(images), runs_before=_RUNS_BEFORE_CAPTURE)
        return Captured(images, replay, logits)


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
