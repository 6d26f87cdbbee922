"""Which of a GPU's decoders runs a program: its JPEG engines, CUDA kernels, or none, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gpuflow.decode.nvjpeg import BACKENDS, Library, NvjpegError, find_library
from gpuflow.errors import MissingExtra
from gpuflow.execute.decode_buffers import BUFFERS
from gpuflow.pipeline.program import Program

if TYPE_CHECKING:
    from gpuflow.execute.device_stream import ChunkRunner, Delivery
    from gpuflow.execute.gpu import Pass

__all__ = ["CPU_ASKED_FOR", "DECODE_BYTES", "Placement", "means_on_gpu", "on_gpu"]

DECODE_BYTES = 1 << 29
"""Decoded pixels that one buffer holds at most, unless run.memory_limit asks for less."""

CPU_ASKED_FOR = "its decode.backend is cpu"


@dataclass(frozen=True, slots=True)
class Placement:
    """delivery: to the GPU that batches are for, or None. gpu: what decodes there, or None.

    reason: in words, what decodes, or why the CPU does.
    """

    delivery: Delivery | None
    gpu: ChunkRunner | None
    reason: str


def means_on_gpu(program: Program) -> tuple[tuple[Pass, ...], Library] | str:
    """What a GPU decodes a program with, or in words why none does. The GPU itself is not asked."""
    if program.decoder.backend == "cpu":
        return CPU_ASKED_FOR
    from gpuflow.execute.gpu import passes_of  # Triton, which CPU builds of torch lack

    passes = passes_of(program)
    if isinstance(passes, str):
        return passes
    try:
        return passes, find_library()
    except MissingExtra as error:
        return str(error)


def on_gpu(
    program: Program, delivery: Delivery, decode_bytes: int = DECODE_BYTES, *, buffers: int = BUFFERS
) -> Placement:
    """What decodes a program on the delivery's GPU, engines or kernels, see `GpuRunner`, or why nothing does."""
    means = means_on_gpu(program)
    if isinstance(means, str):
        return Placement(delivery, None, means)
    from gpuflow.execute.gpu import GpuRunner

    passes, library = means
    refusals = []
    for backend, what in BACKENDS.items():
        try:
            gpu = GpuRunner(
                program, passes, delivery, library, backend=backend, decode_bytes=decode_bytes, buffers=buffers
            )
        except NvjpegError as error:
            refusals.append(f"{what}: {error}")
            continue
        where = f"{what} of {torch.cuda.get_device_name(delivery.device)} (libnvjpeg {library.version})"
        because = f"; no {'; no '.join(refusals)}" if refusals else ""
        return Placement(delivery, gpu, f"{where}, then {len(passes)} batched pass(es){because}")
    return Placement(delivery, None, "; ".join(refusals))
