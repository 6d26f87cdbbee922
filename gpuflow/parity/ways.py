"""A way is one implementation of a pipeline: its protocol, the prefixes that any way can run, training and serving.

A prefix is the pipeline up to one of its stages. If images still differ in size after it, all of them are placed on a
canvas of one size.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from gpuflow.arrays import Ints
from gpuflow.config import BatchSpec, Config, PipelineSpec
from gpuflow.decode.codecs import decoder_description
from gpuflow.decode.preset import Preset
from gpuflow.errors import BadSampleError
from gpuflow.execute.cpu.runner import header_of
from gpuflow.loader.assemble import build_loader
from gpuflow.loader.plan import explain_gpu
from gpuflow.parity.images import Encoded, InMemory
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import OpaqueStep, Program, ResamplingStep, Step, WarpStep, fold, trace
from gpuflow.sources import Folder
from gpuflow.torchpipe.adapter import missing_operators, missing_scheduler

LARGEST_CANVAS = 1024
"""The largest canvas side in pixels; `decode.max_pixels` may allow less. Of larger images, only the part from the upper
left corner is compared."""

Size = tuple[int, int]


@dataclass(frozen=True, kw_only=True, repr=False)
class Canvas(s.Geometry):
    """Keep height x width pixels from the upper left corner; black where the image is smaller."""

    stage_name: ClassVar[str] = "canvas"

    height: int
    width: int

    @property
    def pads(self) -> bool:
        return True

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        s.require_pixels(self, spec)
        return spec.replace(shape=(self.height, self.width, spec.shape[2]))

    def torchvision(self) -> Any:
        from torchvision.transforms.v2 import functional

        return functools.partial(functional.crop, top=0, left=0, height=self.height, width=self.width)

    def draw(self, keys: s.StageKeys, height: Ints, width: Ints) -> tuple[s.Move, ...]:
        corner = np.zeros_like(height)
        size = np.full_like(height, self.height), np.full_like(width, self.width)
        return (s.Crop(corner, corner, *size, margin=max(self.height, self.width)),)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Holds the first `count` stages of a pipeline. program: these stages, plus a canvas if images differ in size.

    sizes: for each sample the numbers of rows and columns to compare; None for a sample that cannot be decoded.
    """

    count: int
    program: Program
    sizes: tuple[Size | None, ...]

    def is_of(self, program: Program) -> bool:
        """Return True if the prefix has all stages of a program, and no canvas."""
        return self.program.pipeline.stages == program.pipeline.stages


def prefixes_of(program: Program, samples: Sequence[Encoded], *, seed: int = 0) -> Iterator[Prefix]:
    """Yield every prefix, the shortest first, except those whose image sizes are not known before they have run.

    Mixing stages are in none: they work on batches, not on images.

    Args:
        program: the whole pipeline.
        samples: in the order in which they will run, from position 0 on.
        seed: seed of the random keys.
    """
    stages, name = program.pipeline.stages, program.pipeline.name
    decoded = [_decoded_size(program.decoder, data) for data in samples]
    for count in range(1, len(stages) + 1):
        if isinstance(stages[count - 1], s.Mixing):
            return
        spec, pipeline = program.specs[count], s.Pipeline(name, stages[:count])
        if spec.fixed:
            height, width, _ = spec.shape
            assert height is not None and width is not None
            sizes = [size and (height, width) for size in decoded]
        else:
            steps = fold(pipeline, program.specs[: count + 1]).steps
            if spec.dtype != "uint8" or any(isinstance(step, OpaqueStep) for step in steps):
                continue
            keys = [s.Keys(seed, 0, np.array([i])) for i in range(len(decoded))]
            after = [size and _size_after(steps, size, one) for size, one in zip(decoded, keys, strict=True)]
            canvas = _canvas([size for size in after if size is not None], program.decoder.max_pixels)
            sizes = [size and (min(size[0], canvas.height), min(size[1], canvas.width)) for size in after]
            pipeline = s.Pipeline(name, (*stages[:count], canvas))
        yield Prefix(count, fold(pipeline, trace(pipeline)), tuple(sizes))


def _size_after(steps: Sequence[Step], size: Size, keys: s.Keys) -> Size:
    """Return the size of an image after steps that draw by these keys. size: the one before them."""
    for step in steps:
        if isinstance(step, ResamplingStep | WarpStep):
            rows, columns = step.draw(keys, *np.array(size)[:, None]).size
            size = int(rows[0]), int(columns[0])
    return size


def _canvas(sizes: Sequence[Size], max_pixels: int) -> Canvas:
    """Return the smallest canvas for images of these sizes, within LARGEST_CANVAS a side and `max_pixels` pixels."""
    height, width = (min(max(sides), LARGEST_CANVAS) for sides in zip(*sizes, strict=True)) if sizes else (1, 1)
    side = math.isqrt(max_pixels)
    height = min(height, max(side, max_pixels // width))
    return Canvas(height=height, width=min(width, max_pixels // height))


def _decoded_size(decoder: s.Decoder, data: Encoded) -> Size | None:
    """Return (height, width) of the decoded image, read from the header only; None if the header is bad."""
    if decoder.library is not None:
        height, width, _ = decoder.output(s.ENCODED).shape
        assert height is not None and width is not None
        return height, width
    try:
        return header_of(data, decoder).upright_size
    except BadSampleError:
        return None


Result = torch.Tensor | BadSampleError
"""An image [C, H, W], or the reason why there is none."""
Results = Generator[Result, None, None]
BATCH = 16
"""The batch size of training, and the number of concurrent requests to a graph."""


class Way(ABC):
    """Turns encoded bytes into a tensor: one implementation of a pipeline."""

    @abstractmethod
    def describe(self) -> str:
        """Return the libraries that decode and resize, with versions."""

    @abstractmethod
    def missing(self) -> str | None:
        """Return why this way cannot run on this machine; None if it can."""

    def refuses(self, prefix: Prefix) -> str | None:
        """Return why this way cannot run this prefix of the pipeline; None if it can, as most ways can."""
        return None

    @abstractmethod
    def run(self, prefix: Prefix, images: Sequence[Encoded]) -> Results:
        """Yield one result per image, in order, with the spec `prefix.program.result`."""

    def causes(self, prefix: Prefix, data: Encoded) -> Iterator[tuple[str, Result | None]]:
        """Yield what may make the results for an image differ, and this way's result without that.

        None stands for a cause that no result needs to prove, and for the last one, an unknown cause.
        """
        yield from ()


def missing_gpu(device: str) -> str | None:
    """Return why the device, `cpu` or `cuda`, is missing; None if it is there."""
    return "torch sees no NVIDIA GPU here" if device == "cuda" and not torch.cuda.is_available() else None


def missing_torchpipe(*, preset: bool) -> str | None:
    """Return what of torchpipe is missing to serve; None if nothing is."""
    missing = missing_operators("a preset") if preset else missing_scheduler()
    return None if missing is None else str(missing)


def served(config: Config, program: Program, device: str, images: Sequence[Encoded]) -> Results:
    """Run a program's serving graph, without a model, on the images."""
    from gpuflow.serve.predictor import Predictor, chain_here

    graph = chain_here(config, program, None, device=device)
    with Predictor(graph, image=program.result, timeout_seconds=config.run.timeout_s) as predictor:

        def ask(data: Encoded) -> Result:
            try:
                return predictor.preprocess(data.tobytes())
            except BadSampleError as fault:
                return fault

        with ThreadPoolExecutor(BATCH, thread_name_prefix="gpuflow_parity") as clients:
            for start in range(0, len(images), BATCH):
                yield from clients.map(ask, images[start : start + BATCH])


@dataclass(frozen=True, slots=True)
class Training(Way):
    """Runs the loader of a pipeline, with batches as in training."""

    config: Config
    name: str
    device: str

    def describe(self) -> str:
        if self.device == "cuda":
            return explain_gpu(self.config, self.name)
        decoder = self.config.programs[self.name].decoder
        return decoder.library or decoder_description()

    def missing(self) -> str | None:
        decoder = self.config.programs[self.name].decoder
        by_torchpipe = decoder.needs_gpu
        if self.device == "cpu" and (by_torchpipe or decoder.backend == "gpu"):
            return f"{decoder!r} runs only on a GPU"
        return missing_gpu(self.device) or (missing_torchpipe(preset=True) if by_torchpipe else None)

    def run(self, prefix: Prefix, images: Sequence[Encoded]) -> Results:
        """Run the loader. It replaces bad samples, and its list of bad samples gives the reason for each."""
        with tempfile.TemporaryDirectory(prefix="gpuflow_") as folder:
            listed = Path(folder) / "bad.jsonl"
            stages = PipelineSpec(stages=(), batch=BatchSpec(size=BATCH), on_error="replace")
            config = replace(
                self.config,
                source_block=Folder(folder="", seed=self.config.source.seed),  # the samples are in memory
                pipelines={self.name: stages},
                programs={self.name: prefix.program},
                run=self.config.run.model_copy(
                    update={"bad_file": str(listed), "max_bad": None, "memory_limit": None, "audit": None}
                ),
            )
            source = InMemory(images)
            with build_loader(config, self.name, rank=0, world_size=1, device=self.device, whole=source) as loader:
                batches, done = iter(loader), 0
                while done < len(images):
                    # Many samples are bad on purpose, and each is warned of.
                    with warnings.catch_warnings(action="ignore", category=UserWarning):
                        batch = next(batches)
                    for i, index in enumerate(batch.indices.tolist(), start=done):
                        if index == i:
                            yield batch.images[i - done]
                            continue
                        rows = map(json.loads, listed.read_text(encoding="utf-8").splitlines())
                        yield next(BadSampleError(row["stage"], row["reason"]) for row in rows if row["index"] == i)
                    done += len(batch.indices)


@dataclass(frozen=True, slots=True)
class Serving(Way):
    """Runs the graph of the block `serve`, with as many concurrent requests as training has images in a batch."""

    config: Config
    name: str
    device: str

    def describe(self) -> str:
        decoder = self.config.programs["serve"].decoder
        if isinstance(decoder, Preset):
            return f"torchpipe {importlib.metadata.version('torchpipe')}: {decoder.operators}"
        description = explain_gpu(self.config, "serve") if self.device == "cuda" else decoder_description()
        return f"omniback {importlib.metadata.version('omniback')}: {description}"

    def missing(self) -> str | None:
        if self.config.serve is None:
            return f"{self.config.path} has no block serve"
        decoder = self.config.programs["serve"].decoder
        if self.device == "cpu" and decoder.needs_gpu:
            return f"{decoder!r} runs only on a GPU"
        return missing_torchpipe(preset=isinstance(decoder, Preset)) or missing_gpu(self.device)

    def refuses(self, prefix: Prefix) -> str | None:
        program = self._program(prefix)
        if isinstance(program, str):
            return program
        fixed = prefix.program.specs[prefix.count].fixed
        return None if fixed else "a graph gives images of one size, and after this stage they differ"

    def _program(self, prefix: Prefix) -> Program | str:
        """Return the program that the graph runs for a prefix, or a text that says why the graph has no such prefix.

        If serving and training differ, the whole of serving is compared with the whole of training. This is not so if
        serving lacks the last stage alone, and a model can contain that one; `missing_stage` checks that it does. Where
        a stage runs, such as `decode.backend`, is no such difference.
        """
        serve, pipeline = self.config.programs["serve"], self.config.programs[self.name].pipeline
        served, wanted, count = serve.pipeline.lines, pipeline.lines, prefix.count
        if served == wanted[:count]:
            return serve
        if count == len(wanted):
            may_be_in_model = served == wanted[:-1] and pipeline.stages[-1].module() is not None
            return "serving ends before this stage, which a model can contain" if may_be_in_model else serve
        if served[:count] == wanted[:count]:
            return prefix.program
        lines = zip(serve.pipeline.stages, served, wanted, strict=False)
        other = next((stage for stage, line, want in lines if line != want), None)
        return "serving ends before this stage" if other is None else f"serving has {other!r} at this stage"

    def run(self, prefix: Prefix, images: Sequence[Encoded]) -> Results:
        program = self._program(prefix)
        assert isinstance(program, Program)
        yield from served(self.config, program, self.device, images)
