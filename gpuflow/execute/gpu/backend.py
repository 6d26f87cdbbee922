"""Selects the GPU decoder that runs a program: JPEG engines, CUDA kernels, or none, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from gpuflow.decode.nvjpeg import BACKENDS, BatchedDecoder, NvjpegError, NvjpegLibrary, find_nvjpeg, for_chunks_of
from gpuflow.errors import MissingExtra
from gpuflow.execute.gpu.decode_buffers import BUFFERS
from gpuflow.execute.gpu.passes import Pass, passes_of_each
from gpuflow.pipeline.program import OpaqueStep
from gpuflow.pipeline.stage import Opaque
from gpuflow.pipeline.views import AnyProgram, ViewsProgram

if TYPE_CHECKING:
    from gpuflow.execute.gpu.device_stream import ChunkRunner, DeviceStream


DECODE_BYTES = 1 << 27
"""The largest size of one buffer for decoded pixels, in bytes, unless run.memory_limit asks for less."""

CPU_ASKED_FOR = "its decode.backend is cpu"
_ENGINES = "hardware"
_KERNELS_NOT_ASKED_FOR = "its CUDA kernels decode only if decode.backend is gpu"


class Placement(NamedTuple):
    """Where a program runs.

    device_stream: the stream of the GPU that batches go to, or None. gpu: the runner that decodes there, or None.
    reason: a text that says what decodes, or why the CPU does.
    """

    device_stream: DeviceStream | None
    gpu: ChunkRunner | None
    reason: str


def gpu_passes_and_library(program: AnyProgram) -> tuple[tuple[tuple[Pass, ...], ...], NvjpegLibrary] | str:
    """Return the passes and the library to run a program on a GPU, or why no GPU can, as text. Opens no GPU.

    The passes are those of each of `programs_of(program)`.
    """
    if program.decoder.backend == "cpu":
        return CPU_ASKED_FOR
    passes = passes_of_each(program)
    if isinstance(passes, str):
        return passes
    try:
        return passes, find_nvjpeg()
    except MissingExtra as error:
        return str(error)


def gpu_decodes(program: AnyProgram) -> bool:
    """Return True if this machine's GPU decodes a program, by the rule of `place_on_gpu`. May open the GPU."""
    found = gpu_passes_and_library(program)
    if isinstance(found, str):
        return False
    if program.decoder.backend == "gpu":
        return True
    try:
        BatchedDecoder(found[1], program.decoder.color, _ENGINES)
    except NvjpegError:
        return False
    return True


def passes_text(program: AnyProgram, passes: Sequence[Sequence[Pass]]) -> str:
    """Return how many passes there are, with views how often each is drawn, and which stages are calls of Python."""
    python = [one.step for one in chain(*passes) if isinstance(one.step, OpaqueStep)]
    calls = "".join(dict.fromkeys(f", {_call_text(step)}" for step in python))
    if not isinstance(program, ViewsProgram):
        return f"{len(passes[0])} batched pass(es){calls}"
    views = [f"{view.name} {view.count} x {len(own)}" for view, own in zip(program.pipeline.views, passes, strict=True)]
    return f"batched passes for each view: {', '.join(views)}{calls}"


def _call_text(step: OpaqueStep) -> str:
    """Return where a stage runs that calls Python code, and how often."""
    stage = step.stage
    where = "GPU" if stage.on_gpu else "CPU"
    by_apply = type(stage).apply_batch is Opaque.apply_batch
    batched = not by_apply or (stage.takes_batches and not stage.random)
    return f"{stage.stage_name} on the {where} by a call for each {'batch' if batched else 'image'}"


def place_on_gpu(
    program: AnyProgram,
    device_stream: DeviceStream,
    decode_bytes: int = DECODE_BYTES,
    *,
    images: int,
    buffers: int = BUFFERS,
    later_images: int = 0,
    threads: int = 1,
    decoder_calls: int | Literal["auto"] = "auto",
) -> Placement:
    """Create the runner for a program on the stream's GPU, on its engines; or say why none can run it.

    A GPU without engines decodes with CUDA kernels if `decode.backend` is gpu. Otherwise the CPU decodes, because that
    is faster where a GPU has several cores (measured in experiments/real_data/NOTES.md), and the training has the GPU
    for itself.

    images: the largest number of images in a chunk. Kernels decode chunks of few images in another way.
    decode_bytes, buffers, later_images, threads, decoder_calls: see `GpuRunner`.
    """
    found = gpu_passes_and_library(program)
    if isinstance(found, str):
        return Placement(device_stream, None, found)
    from gpuflow.execute.gpu.runner import GpuRunner

    passes, library = found
    refusals = []
    for backend, description in BACKENDS.items():
        if backend != _ENGINES and program.decoder.backend != "gpu":
            refusals.append(_KERNELS_NOT_ASKED_FOR)
            continue
        try:
            gpu = GpuRunner(
                program,
                passes,
                device_stream,
                library,
                backend=for_chunks_of(images, backend),
                decode_bytes=decode_bytes,
                buffers=buffers,
                later_images=later_images,
                threads=threads,
                decoder_calls=decoder_calls,
            )
        except NvjpegError as error:
            refusals.append(f"{description}: {error}")
            continue
        where = f"{description} of {torch.cuda.get_device_name(device_stream.device)} (libnvjpeg {library.version})"
        because = f"; no {'; no '.join(refusals)}" if refusals else ""
        return Placement(device_stream, gpu, f"{where}, then {passes_text(program, passes)}{because}")
    return Placement(device_stream, None, "; ".join(refusals))
