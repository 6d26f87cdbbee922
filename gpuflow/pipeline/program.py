"""Folds a pipeline into a program of few steps: a sampling for each run of geometry stages, a pass for pointwise ones.

Crops, flips and one resize become one sampling. A crop before the resize clamps the filter at the crop's edge; a crop
after it does not, and only selects from the resized grid. A second resize, or a resize after a crop that may pad,
starts a new sampling. Pointwise stages in a row become one pass, which clamps and rounds between them; a stage that
changes the dtype ends it. Other stages are a step each. The steps are values: every lowering runs the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from gpuflow.errors import BadSampleError
from gpuflow.pipeline import stage as s

__all__ = [
    "ApplyStep",
    "LocalStep",
    "Misfit",
    "OpaqueStep",
    "PointwiseStep",
    "Program",
    "Sampling",
    "SamplingStep",
    "Step",
    "fold",
    "too_large",
]


@dataclass(frozen=True, slots=True)
class Misfit:
    """Samples of whose images a stage cannot make what it should: [N] true for each, with the sizes [N, 2] to name.

    max_pixels: None if a crop is larger than the image, whose size it names; else the limit that a resized image, whose
    size it names, exceeds.
    """

    stage: str
    where: s.Bools
    sizes: s.Ints
    max_pixels: int | None = None

    def fault(self, i: int) -> BadSampleError | None:
        """Why sample i is bad, or None."""
        if not self.where[i]:
            return None
        height, width = self.sizes[i].tolist()
        if self.max_pixels is None:
            reason = f"the crop is larger than the image, which has {height}x{width} pixels here"
            return BadSampleError(self.stage, reason)
        return too_large(self.stage, height, width, self.max_pixels)


def too_large(stage: str, height: int, width: int, max_pixels: int) -> BadSampleError:
    """Why a sample is bad whose resized image would have more than `max_pixels` pixels."""
    reason = (
        f"the resized image would have {width}x{height} = {width * height:,} pixels, "
        f"more than max_pixels = {max_pixels:,}"
    )
    return BadSampleError(stage, reason, "sample.too_large")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """The geometry of one sampling for N samples, in pixels.

    box [N, 4]: y, x, height, width of the region of the image that is resampled; no pixel outside it is read.
    mirrors [N, 2]: whether to mirror the box top-bottom, left-right before resampling. Only `nearest` uses it, because
        only there the result depends on the order of mirroring and resampling.
    grid [N, 2]: height, width that the box is resampled to.
    shown [N, 4]: y, x, height, width of the part of the grid that earlier crops kept; the rest of it is black.
    window [N, 4]: y, x, height, width of the part of the grid that is the result; outside the grid it is black.
    flips [N, 2]: whether to mirror the window top-bottom, left-right.
    misfits: the samples that this sampling cannot be run on, and why.
    """

    box: s.Ints
    mirrors: s.Bools
    grid: s.Ints
    shown: s.Ints
    window: s.Ints
    flips: s.Bools
    misfits: tuple[Misfit, ...]
    interpolation: str
    antialias: bool


@dataclass(frozen=True, slots=True)
class SamplingStep:
    """Geometry stages that run as one sampling.

    occurrences: for each stage, how many of the same name precede it. max_pixels: of a resized image.
    """

    stages: tuple[s.Geometry, ...]
    occurrences: tuple[int, ...]
    max_pixels: int

    def draw(self, keys: s.Keys, height: s.Ints, width: s.Ints) -> Sampling:
        """The sampling for samples whose images have these sizes [N]."""
        builder = _SamplingBuilder(height, width)
        for stage, occurrence in zip(self.stages, self.occurrences, strict=True):
            for move in stage.draw(keys.stage(stage.stage_name, occurrence), *builder.size):
                match move:
                    case s.Crop():
                        builder.crop(move, stage.stage_name)
                    case s.Flip():
                        builder.flip(move)
                    case s.Resize():
                        builder.resize(move, stage.stage_name, self.max_pixels)
                    case _:
                        assert_never(move)
        return builder.sampling()


@dataclass(frozen=True, slots=True)
class PointwiseStep:
    """Pointwise stages that run as one pass: operations, then the table of the last stage if that has one.

    occurrences: for each stage, how many of the same name precede it. after: the spec of the result.
    """

    stages: tuple[s.Pointwise, ...]
    occurrences: tuple[int, ...]
    after: s.ImageSpec

    @property
    def table(self) -> NDArray[Any] | None:
        """See `Pointwise.table`; None if the pass has no table."""
        return self.stages[-1].table()

    def draw(self, keys: s.Keys, height: s.Ints, width: s.Ints) -> s.Operations:
        """The operations of samples whose images have these sizes [N]."""
        parts = []
        for stage, occurrence in zip(self.stages, self.occurrences, strict=True):
            drawn = stage.draw(keys.stage(stage.stage_name, occurrence))
            if (operations := stage.operations(drawn, height, width)) is not None:
                parts.append(operations)
        return s.Operations.join(len(keys.positions), parts)


@dataclass(frozen=True, slots=True)
class ApplyStep:
    """A pointwise stage that has neither operations nor a table. after: the spec of its result."""

    stage: s.Pointwise
    occurrence: int
    after: s.ImageSpec

    def draw(self, keys: s.Keys) -> NDArray[np.float64]:
        """The coefficients of each sample, [N, K]."""
        return self.stage.draw(keys.stage(self.stage.stage_name, self.occurrence))


@dataclass(frozen=True, slots=True)
class LocalStep:
    """One local stage."""

    stage: s.Local
    occurrence: int

    def draw(self, keys: s.Keys) -> s.Filters:
        """The filters of each sample."""
        return self.stage.filters(self.stage.draw(keys.stage(self.stage.stage_name, self.occurrence)))


@dataclass(frozen=True, slots=True)
class OpaqueStep:
    """One opaque stage, with the specs of its input and its output. max_pixels: of its result, where sizes vary."""

    stage: s.Opaque
    occurrence: int
    before: s.ImageSpec
    after: s.ImageSpec
    max_pixels: int

    def draw(self, keys: s.Keys) -> s.Ints:
        """A 62-bit seed for each sample, [N]."""
        halves = (keys.stage(self.stage.stage_name, self.occurrence).uniform(2) * 2.0**31).astype(np.int64)
        return halves[:, 0] << 31 | halves[:, 1]


Step = SamplingStep | PointwiseStep | LocalStep | ApplyStep | OpaqueStep


class _SamplingBuilder:
    """Combines the moves of N samples into one sampling. Every [N, 4] is y, x, height, width."""

    def __init__(self, height: s.Ints, width: s.Ints) -> None:
        self._box = np.stack([np.zeros_like(height), np.zeros_like(width), height, width], axis=1)
        self._grid: s.Ints | None = None
        self._shown = self._window = self._box
        self._mirrors = self._flips = np.zeros((len(height), 2), bool)
        self._misfits: list[Misfit] = []
        self._filter = ("bilinear", True)

    @property
    def size(self) -> tuple[s.Ints, s.Ints]:
        return self._window[:, 2], self._window[:, 3]

    def crop(self, move: s.Crop, stage: str) -> None:
        height, width = self.size
        outside_y = (move.y < -move.margin) | (move.y + move.height > height + move.margin)
        outside_x = (move.x < -move.margin) | (move.x + move.width > width + move.margin)
        if (outside := outside_y | outside_x).any():
            self._misfits.append(Misfit(stage, outside, self._window[:, 2:]))
        if move.margin and self._grid is None:
            self._fix_grid(height, width)
        y = np.where(self._flips[:, 0], height - move.y - move.height, move.y)
        x = np.where(self._flips[:, 1], width - move.x - move.width, move.x)
        self._window = np.stack([self._window[:, 0] + y, self._window[:, 1] + x, move.height, move.width], axis=1)
        if self._grid is None:
            self._box = self._window
        else:
            self._shown = _overlap(self._shown, self._window)

    def flip(self, move: s.Flip) -> None:
        self._flips = self._flips ^ np.stack([move.vertical, move.horizontal], axis=1)

    def resize(self, move: s.Resize, stage: str, max_pixels: int) -> None:
        assert self._grid is None, "a second resize starts a new sampling"
        if (large := move.height.astype(np.float64) * move.width > max_pixels).any():
            self._misfits.append(Misfit(stage, large, np.stack([move.height, move.width], axis=1), max_pixels))
        self._filter = (move.interpolation, move.antialias)
        if move.interpolation == "nearest":
            self._mirrors, self._flips = self._flips, np.zeros_like(self._flips)
        self._fix_grid(move.height, move.width)

    def _fix_grid(self, height: s.Ints, width: s.Ints) -> None:
        self._grid = np.stack([height, width], axis=1)
        self._shown = self._window = np.stack([np.zeros_like(height), np.zeros_like(width), height, width], axis=1)

    def sampling(self) -> Sampling:
        if self._grid is None:
            self._fix_grid(*self.size)
        assert self._grid is not None
        interpolation, antialias = self._filter
        return Sampling(
            box=self._box,
            mirrors=self._mirrors,
            grid=self._grid,
            shown=self._shown,
            window=self._window,
            flips=self._flips,
            misfits=tuple(self._misfits),
            interpolation=interpolation,
            antialias=antialias,
        )


def _overlap(a: s.Ints, b: s.Ints) -> s.Ints:
    """The intersection of boxes [N, 4]; its sides are 0 if it is empty."""
    start = np.maximum(a[:, :2], b[:, :2])
    end = np.minimum(a[:, :2] + a[:, 2:], b[:, :2] + b[:, 2:])
    return np.concatenate([start, np.maximum(end - start, 0)], axis=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A pipeline folded into steps, with the specs between its stages.

    specs[0] is the encoded input; specs[-1] is the spec of the images in a batch.
    """

    pipeline: s.Pipeline
    specs: tuple[s.ImageSpec, ...]
    decoder: s.Decoder
    steps: tuple[Step, ...]

    @property
    def result(self) -> s.ImageSpec:
        return self.specs[-1]


def fold(pipeline: s.Pipeline, specs: Sequence[s.ImageSpec]) -> Program:
    """Fold a pipeline that `validate.trace` accepted, given the specs that `trace` returned."""
    decoder, *rest = pipeline.stages
    assert isinstance(decoder, s.Decoder)
    assert decoder.library is None or specs[1].fixed, "a decoder with its own library gives images of one size"
    steps: list[Step] = []
    moving: list[tuple[s.Geometry, int]] = []
    coloring: list[tuple[s.Pointwise, int]] = []
    fixed = False

    def flush(done: int) -> None:
        """End the step that the stages before number `done` form."""
        if moving:
            stages, occurrences = zip(*moving, strict=True)
            steps.append(SamplingStep(stages, occurrences, decoder.max_pixels))
            moving.clear()
        if coloring:
            passed, occurrences = zip(*coloring, strict=True)
            steps.append(PointwiseStep(passed, occurrences, specs[done]))
            coloring.clear()

    counts = pipeline.occurrences()
    for i, stage in enumerate(rest, start=1):
        if isinstance(stage, s.Geometry):
            if coloring or (stage.resizes and fixed):
                flush(i)
                fixed = False
            fixed = fixed or stage.resizes or stage.pads
            moving.append((stage, counts[i]))
        elif isinstance(stage, s.Pointwise) and (ends := stage.table() is not None) | _has_operations(stage):
            if moving:
                flush(i)
                fixed = False
            coloring.append((stage, counts[i]))
            if ends:
                flush(i + 1)
        else:
            flush(i)
            fixed = False
            if isinstance(stage, s.Pointwise):
                steps.append(ApplyStep(stage, counts[i], specs[i + 1]))
            elif isinstance(stage, s.Local):
                steps.append(LocalStep(stage, counts[i]))
            elif isinstance(stage, s.Opaque):
                steps.append(OpaqueStep(stage, counts[i], specs[i], specs[i + 1], decoder.max_pixels))
            else:
                raise TypeError(
                    f"{stage!r} is of no kind of stage; derive it from Geometry, Pointwise, Local or Opaque"
                )
    flush(len(pipeline.stages))
    return Program(pipeline=pipeline, specs=tuple(specs), decoder=decoder, steps=tuple(steps))


def _has_operations(stage: s.Pointwise) -> bool:
    none = np.empty(0, np.int64)
    return stage.operations(stage.draw(s.Keys(0, 0, none).stage(stage.stage_name, 0)), none, none) is not None
