"""Cuts a pipeline after each of its stages into programs that any way can run.

If images still differ in size after a stage, all of them are placed on a canvas of one size.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gpuflow.errors import BadSampleError
from gpuflow.execute.cpu import header_of
from gpuflow.parity.images import Encoded
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import ApplyStep, LocalStep, PointwiseStep, Program, ResamplingStep, WarpStep, fold
from gpuflow.pipeline.validate import trace

__all__ = ["LARGEST_CANVAS", "Canvas", "Prefix", "prefixes_of"]

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

    def draw(self, keys: s.StageKeys, height: s.Ints, width: s.Ints) -> tuple[s.Move, ...]:
        corner = np.zeros_like(height)
        size = np.full_like(height, self.height), np.full_like(width, self.width)
        return (s.Crop(corner, corner, *size, margin=max(self.height, self.width)),)


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first `count` stages of a pipeline. program: these stages, plus a canvas if images differ in size.

    sizes: for each sample the numbers of rows and columns to compare; None for a sample that cannot be decoded.
    """

    count: int
    program: Program
    sizes: tuple[Size | None, ...]


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
        spec = program.specs[count]
        if spec.fixed:
            height, width, _ = spec.shape
            assert height is not None and width is not None
            pipeline = s.Pipeline(name, stages[:count])
            sizes = [size and (height, width) for size in decoded]
            yield Prefix(count, fold(pipeline, trace(pipeline)), tuple(sizes))
            continue
        steps = fold(s.Pipeline(name, stages[:count]), program.specs[: count + 1]).steps
        if spec.dtype != "uint8" or not all(
            isinstance(step, ResamplingStep | WarpStep | PointwiseStep | LocalStep | ApplyStep) for step in steps
        ):
            continue
        sizes = []
        for i, size in enumerate(decoded):
            keys = s.Keys(seed, 0, np.array([i]))
            for step in steps:
                if size is not None and isinstance(step, ResamplingStep | WarpStep):
                    rows, columns = step.draw(keys, *np.array(size)[:, None]).size
                    size = int(rows[0]), int(columns[0])
            sizes.append(size)
        canvas = _canvas([size for size in sizes if size is not None], program.decoder.max_pixels)
        pipeline = s.Pipeline(name, (*stages[:count], canvas))
        seen = [size and (min(size[0], canvas.height), min(size[1], canvas.width)) for size in sizes]
        yield Prefix(count, fold(pipeline, trace(pipeline)), tuple(seen))


def _canvas(sizes: Sequence[Size], max_pixels: int) -> Canvas:
    """The smallest canvas for images of these sizes, but of at most LARGEST_CANVAS a side and `max_pixels` pixels."""
    height, width = (min(max(sides), LARGEST_CANVAS) for sides in zip(*sizes, strict=True)) if sizes else (1, 1)
    side = math.isqrt(max_pixels)
    height = min(height, max(side, max_pixels // width))
    return Canvas(height=height, width=min(width, max_pixels // height))


def _decoded_size(decoder: s.Decoder, data: Encoded) -> Size | None:
    """(height, width) of the decoded image, read from the header only; None if the header is bad."""
    if decoder.library is not None:
        height, width, _ = decoder.output(s.ENCODED).shape
        assert height is not None and width is not None
        return height, width
    try:
        return header_of(data, decoder).upright_size
    except BadSampleError:
        return None
