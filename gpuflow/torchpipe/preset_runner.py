"""Runs a preset on a GPU in training: images by the operators of the serving graph, then random crops and flips."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from gpuflow.arrays import Bytes
from gpuflow.errors import BadSampleError, LoaderTimeout
from gpuflow.execute.gpu.device_stream import DeviceStream, allocate_slots
from gpuflow.pipeline.program import Program, Resampling, ResamplingStep, fold
from gpuflow.pipeline.stage import Geometry, Keys, Mixing, Pipeline
from gpuflow.pipeline.validate import trace
from gpuflow.sources import Payload
from gpuflow.torchpipe.graph import chain
from gpuflow.torchpipe.request_queue import unchanged
from gpuflow.torchpipe.running_graph import RunningGraph


@dataclass(frozen=True, slots=True)
class _Prepared:
    """images: of each sample, [C, H, W] as a served model gets it, or why it is bad. draws: its crops and flips."""

    images: Sequence[torch.Tensor | BadSampleError]
    draws: Sequence[Resampling]


class PresetRunner:
    """Runs a program that begins with a preset, with the interface of `GpuRunner`. Any thread may call any method.

    Crops and flips run after the pointwise stages here: these are modules in the graph, and treat each pixel alike.

    Args:
        program: its stages pass `Preset.refuses`.
        device_stream: to the device that the preset's operators run on.
        origin: the configuration's file.
        threads: instances of the operators.
        timeout_seconds: limit for each image.

    Raises:
        MissingExtra: torchpipe is not installed. PredictorError: it does not take the operators.
    """

    def __init__(
        self, program: Program, device_stream: DeviceStream, *, origin: str, threads: int, timeout_seconds: float
    ) -> None:
        self._program, self._device_stream, self._timeout = program, device_stream, timeout_seconds
        served = tuple(stage for stage in program.pipeline.stages if not isinstance(stage, Geometry | Mixing))
        pipeline = Pipeline(program.pipeline.name, served)
        graph = fold(pipeline, trace(pipeline))
        self._graph = RunningGraph(chain(graph, None, origin=origin, threads=threads, device=device_stream.device.type))
        self._moves = [step for step in program.steps if isinstance(step, ResamplingStep)]
        self._lock = threading.Lock()
        self.engine_images, self.cpu_images = 0, 0
        """torchpipe does not say which images it decoded on the CPU instead; all are counted as the GPU's."""

    def check(self) -> None:
        """Decode gpuflow's own test image by torchpipe's operators. Raises DecoderError if that fails."""
        self._graph.check()

    def set_gpu_wait(self, share: float) -> None:
        """Does nothing: no work is delayed here."""

    def share_checks(self, samples: int, memory_of: Callable[[int], Bytes | None]) -> None:
        """Does nothing: torchpipe checks no files."""

    def prepare(self, payload: Payload, keys: Keys, indices: object = None) -> _Prepared:
        """Run everything but the crops and flips, and wait for it."""
        waiting: list[Future[torch.Tensor] | BadSampleError] = [
            BadSampleError("read", error)
            if (error := payload.errors[i]) is not None
            else self._graph.submit(payload.sample(i).tobytes(), wrap=unchanged, wants_image=True)
            for i in range(len(payload))
        ]
        height, width, _ = self._program.specs[1].shape
        assert height is not None and width is not None
        sizes = np.full(len(payload), height), np.full(len(payload), width)
        draws = []
        for step in self._moves:
            draws.append(step.draw(keys, *sizes))
            sizes = draws[-1].box[:, 2], draws[-1].box[:, 3]
        images = [self._image(one) for one in waiting]
        with self._lock:
            self.engine_images += sum(isinstance(image, torch.Tensor) for image in images)
        return _Prepared(images, draws)

    def _image(self, waiting: Future[torch.Tensor] | BadSampleError) -> torch.Tensor | BadSampleError:
        if isinstance(waiting, BadSampleError):
            return waiting
        try:
            return waiting.result(self._timeout)
        except BadSampleError as fault:
            return fault
        except TimeoutError:
            raise LoaderTimeout(
                f"torchpipe gave no image within run.timeout_s = {self._timeout:g} s; raise that if it is too short"
            ) from None

    def slots(self, count: int) -> torch.Tensor:
        """Memory on the device for `count` results: [count, C, H, W] in the result's dtype and memory format."""
        return allocate_slots(self._device_stream, count, self._program.result)

    def launch(
        self, chunk: _Prepared, slots: torch.Tensor, ahead: Sequence[_Prepared] = ()
    ) -> list[BadSampleError | None]:
        """Queue the crops and flips, into the slots [N, C, H, W]; returns None, or why it is bad, for each sample."""
        with self._device_stream.queued():
            for i, image in enumerate(chunk.images):
                if isinstance(image, BadSampleError):
                    continue
                if image.is_cuda:
                    image.record_stream(torch.cuda.current_stream(image.device))
                for draw in chunk.draws:
                    image = _crop_and_flip(image, draw, i)
                slots[i].copy_(image)
        return [image if isinstance(image, BadSampleError) else None for image in chunk.images]

    def close(self) -> None:
        """Does nothing: the graph ends with this."""


def _crop_and_flip(image: torch.Tensor, resampling: Resampling, i: int) -> torch.Tensor:
    """Sample i's crop and flips applied to an image [C, H, W], without resampling."""
    y, x, height, width = resampling.box[i].tolist()
    dims = [dim for dim, flip in zip((1, 2), resampling.flips[i].tolist(), strict=True) if flip]
    cropped = image[:, y : y + height, x : x + width]
    return cropped.flip(dims) if dims else cropped
