"""Checks a pipeline before anything runs (`trace`), and folds it into a program of few steps (`fold`).

A run of geometry stages becomes one resampling or warp, and a run of pointwise stages one pass.

Crops, flips and one resize become one resampling. A crop before the resize clamps the filter at the crop's edge; a crop
after it does not, and only selects from the resized grid. A second resize, or a resize after a crop that may pad,
starts a new resampling.

Warps become one warp, with the crops and flips that surround them: one matrix, the region of the image that crops
before the first warp left, and the size after the last one. What is seen outside that region is the border of this one
warp, also where a crop between two warps would have cut it off. A resize before the warps is a separate resampling, one
after them starts a new resampling; warps that look pixels up in another way, and warps after a padded warp, start a new
warp.

Pointwise stages in a row become one pass, which clamps and rounds between them; a stage that changes the dtype ends it.

Other stages are a step each. The steps are values: every lowering runs the same steps. Mixing stages are no steps, as
they run on whole batches: the loader runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

import numpy as np

from gpuflow.arrays import Array, Bools, Ints
from gpuflow.errors import BadSampleError, Code, ConfigError, Key, Problem
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.moves import MIRRORS, boxes_around, forward


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why a stage cannot run on some of N samples: a crop does not fit into the image, or a result is too large.

    where [N]: these samples. sizes [N, 2]: heights and widths that the error names, of the image or of the result.
    max_pixels: the limit that the result exceeds; None if what `larger` names is larger than the image.
    """

    stage: str
    where: Bools
    sizes: Ints
    max_pixels: int | None = None
    larger: str = "crop"

    def fault(self, i: int) -> BadSampleError | None:
        """Return why sample i is bad, or None."""
        if not self.where[i]:
            return None
        height, width = self.sizes[i].tolist()
        if self.max_pixels is None:
            reason = f"the {self.larger} is larger than the image, which has {height}x{width} pixels here"
            return BadSampleError(self.stage, reason)
        return too_large(self.stage, height, width, self.max_pixels)


def too_large(stage: str, height: int, width: int, max_pixels: int) -> BadSampleError:
    """Return the error of a sample whose resized image would have more than `max_pixels` pixels."""
    reason = (
        f"the resized image would have {width}x{height} = {width * height:,} pixels, "
        f"more than max_pixels = {max_pixels:,}"
    )
    return BadSampleError(stage, reason, "sample.too_large")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resampling:
    """The geometry of one resampling for N samples, in pixels.

    box [N, 4]: y, x, height, width of the region of the image that is resampled; no pixel outside it is read.
    mirrors [N, 2]: whether to mirror the box top-bottom, left-right before resampling. Only `nearest` uses it, because
        only there the result depends on the order of mirroring and resampling.
    grid [N, 2]: height, width that the box is resampled to.
    shown [N, 4]: y, x, height, width of the part of the grid that earlier crops kept; the rest of it is filled.
    window [N, 4]: y, x, height, width of the part of the grid that is the result; outside the grid it is filled.
    flips [N, 2]: whether to mirror the window top-bottom, left-right.
    misfits: the samples that this resampling cannot be run on, and why.
    fill: the levels that pixels outside the image have, one for all channels or one for each; black by default.
    """

    box: Ints
    mirrors: Bools
    grid: Ints
    shown: Ints
    window: Ints
    flips: Bools
    misfits: tuple[Misfit, ...]
    interpolation: str
    antialias: bool
    fill: tuple[float, ...] = (0,)

    @property
    def size(self) -> tuple[Ints, Ints]:
        """Return height and width [N] of the results."""
        return self.window[:, 2], self.window[:, 3]


@dataclass(frozen=True, kw_only=True, slots=True)
class Warping:
    """The geometry of one warp for N samples, in pixels.

    box [N, 4]: y, x, height, width of the region of the image that is warped; no pixel outside it is read.
    matrix [N, 3, 3]: maps a point of the result to the point of the box that is seen there.
    height, width [N]: of the result.
    shown [N, 4]: y, x, height, width of the part of the result that crops did not pad; the rest of it is black.
    misfits: the samples that this warp cannot be run on, and why.
    lookup: how pixels are looked up.
    """

    box: Ints
    matrix: s.Matrices
    height: Ints
    width: Ints
    shown: Ints
    misfits: tuple[Misfit, ...]
    lookup: s.Lookup

    @property
    def size(self) -> tuple[Ints, Ints]:
        """Return height and width [N] of the results."""
        return self.height, self.width


def misfits_of(draws: Iterable[Any]) -> list[Misfit]:
    """Return why samples do not fit a step, of all draws that are resamplings or warps."""
    return [misfit for draw in draws if isinstance(draw, Resampling | Warping) for misfit in draw.misfits]


def any_misfit(draws: Iterable[Any], count: int) -> Bools:
    """Return which of `count` samples do not fit a step, [count]."""
    where = np.zeros(count, bool)
    for misfit in misfits_of(draws):
        where |= misfit.where
    return where


def add_misfits(draws: Iterable[Any], faults: list[BadSampleError | None]) -> None:
    """Write to the faults [N] of samples that have none yet why they do not fit a step."""
    for misfit in misfits_of(draws):
        for i in np.flatnonzero(misfit.where).tolist():
            faults[i] = faults[i] or misfit.fault(i)


@dataclass(frozen=True, slots=True)
class ResamplingStep:
    """Geometry stages that run as one resampling.

    occurrences: for each stage, how many of the same name precede it. max_pixels: of a resized image.
    """

    stages: tuple[s.Geometry, ...]
    occurrences: tuple[int, ...]
    max_pixels: int

    def draw(self, keys: s.Keys, height: Ints, width: Ints) -> Resampling:
        """Draw the resampling for samples whose images have these sizes [N]."""
        builder = _ResamplingBuilder(height, width, self.max_pixels)
        _add_moves(self, keys, builder)
        return builder.resampling()


@dataclass(frozen=True, slots=True)
class WarpStep:
    """Geometry stages that run as one warp: see `ResamplingStep`. lookup: the one of all of its warps."""

    stages: tuple[s.Geometry, ...]
    occurrences: tuple[int, ...]
    max_pixels: int
    lookup: s.Lookup

    def draw(self, keys: s.Keys, height: Ints, width: Ints) -> Warping:
        """Draw the warp for samples whose images have these sizes [N]."""
        builder = _WarpBuilder(height, width, self.max_pixels)
        _add_moves(self, keys, builder)
        return builder.warping(self.lookup)


@dataclass(frozen=True, slots=True)
class PointwiseStep:
    """Pointwise stages that run as one pass: operations, then the table of the last stage if that has one.

    occurrences: for each stage, how many of the same name precede it. after: the spec of the result.
    """

    stages: tuple[s.Pointwise, ...]
    occurrences: tuple[int, ...]
    after: s.ImageSpec

    @property
    def table(self) -> Array | None:
        """Return the table of the last stage, see `Pointwise.table`; None if it has none."""
        return self.stages[-1].table()

    def draw(self, keys: s.Keys, height: Ints, width: Ints) -> s.Operations:
        """Draw the operations of samples whose images have these sizes [N]."""
        parts = []
        for stage, occurrence in zip(self.stages, self.occurrences, strict=True):
            drawn = stage.draw(keys.stage(stage.key_name, occurrence))
            if (operations := stage.operations(drawn, height, width)) is not None:
                parts.append(operations)
        return s.Operations.join(len(keys.positions), parts)


@dataclass(frozen=True, slots=True)
class LocalStep:
    """One local stage."""

    stage: s.Local
    occurrence: int

    def draw(self, keys: s.Keys, *sizes: Ints) -> s.Filters:
        """Draw the filters of each sample. sizes: are not used."""
        return self.stage.filters(self.stage.draw(keys.stage(self.stage.key_name, self.occurrence)))


@dataclass(frozen=True, slots=True)
class OpaqueStep:
    """One opaque stage, with the specs of its input and its output. max_pixels: of its result, where sizes vary."""

    stage: s.Opaque
    occurrence: int
    before: s.ImageSpec
    after: s.ImageSpec
    max_pixels: int

    def draw(self, keys: s.Keys, *sizes: Ints) -> Ints:
        """Draw a 62-bit seed for each sample, [N]. sizes: are not used."""
        halves = (keys.stage(self.stage.key_name, self.occurrence).uniform(2) * 2.0**31).astype(np.int64)
        return halves[:, 0] << 31 | halves[:, 1]


@dataclass(frozen=True, slots=True)
class MixingStep:
    """One mixing stage, on whole batches of images of one size."""

    stage: s.Mixing
    occurrence: int
    height: int
    width: int

    def draw(self, keys: s.Keys, valid: Bools) -> s.Mixture:
        """Draw the mixture of a batch. valid [N]: false where a sample was wrapped around."""
        stage_keys = keys.stage(self.stage.key_name, self.occurrence)
        return self.stage.draw(stage_keys, self.height, self.width, valid)


Step = ResamplingStep | WarpStep | PointwiseStep | LocalStep | OpaqueStep
NativeStep = ResamplingStep | WarpStep | PointwiseStep | LocalStep
"""Steps that C code runs on the CPU, for all images of a chunk by one call."""


def _add_moves(step: ResamplingStep | WarpStep, keys: s.Keys, builder: _ResamplingBuilder | _WarpBuilder) -> None:
    """Draw the moves of a step's stages in order, each stage's for the sizes that the moves before it leave."""
    before, sizes = list[s.Move](), builder.size
    for stage, occurrence in zip(step.stages, step.occurrences, strict=True):
        for move in stage.draw(keys_at(stage, occurrence, keys, before, sizes), *builder.size):
            before.append(move)
            match move:
                case s.Crop():
                    builder.crop(move, stage)
                case s.Flip():
                    builder.flip(move)
                case s.Resize():
                    builder.resize(move, stage)
                case s.Pad():
                    builder.pad(move, stage)
                case s.Warp():
                    builder.warp(move, stage)
                case _:
                    assert_never(move)


def keys_at(
    stage: s.Geometry, occurrence: int, keys: s.Keys, before: Sequence[s.Move], sizes: tuple[Ints, Ints]
) -> s.StageKeys:
    """Return the keys of a stage. Boxes among their values are those in the images that it gets.

    before: the moves that these images have had. sizes: their heights and widths [N] before the first move.
    """
    stage_keys, moved = keys.stage(stage.key_name, occurrence), dict[s.RecordValue, Any]()
    for value in stage.record_values.values():
        if value.form != "boxes":
            continue
        (height, width), boxes = sizes, stage_keys.values[value]
        for move in before:
            matrix, height, width = forward(move, height, width)
            each = np.repeat(matrix, boxes.shape[1], axis=0)
            boxes = boxes_around(each, boxes.reshape(-1, 4)).reshape(boxes.shape)
            limits = np.stack([width, height, width, height], axis=1)[:, None]
            boxes = np.clip(boxes, 0, limits)
        moved[value] = boxes
    return replace(stage_keys, values={**stage_keys.values, **moved}) if moved else stage_keys


class _Builder:
    """Combines the moves of N samples into one step, and notes the samples that do not fit.

    A box [N, 4] is y, x, height, width.
    """

    def __init__(self, max_pixels: int) -> None:
        self._max_pixels = max_pixels
        self._misfits: list[Misfit] = []

    def _refuse(self, where: Bools, stage: s.Geometry, height: Ints, width: Ints, **reason: Any) -> None:
        """Note where [N] samples do not fit a stage. reason: fields of `Misfit`."""
        if where.any():
            self._misfits.append(Misfit(stage.key_name, where, np.array([height, width]).T, **reason))

    def _refuse_large(self, stage: s.Geometry, height: Ints, width: Ints) -> None:
        """Note the samples whose results of these sizes [N] have more pixels than allowed."""
        large = height.astype(np.float64) * width > self._max_pixels
        self._refuse(large, stage, height, width, max_pixels=self._max_pixels)

    def _refuse_outside(self, move: s.Crop, stage: s.Geometry, height: Ints, width: Ints) -> None:
        """Note the samples whose images, of these sizes [N], are too small for a crop."""
        outside_y = (move.y < -move.margin) | (move.y + move.height > height + move.margin)
        outside_x = (move.x < -move.margin) | (move.x + move.width > width + move.margin)
        self._refuse(outside_y | outside_x, stage, height, width)

    def _as_crop(self, move: s.Pad, stage: s.Geometry, height: Ints, width: Ints) -> s.Crop:
        """Return the crop, which extends outside images of these sizes [N], that equals a padding of them."""
        margin = max(int(side.max(initial=1)) for side in (move.top, move.bottom, move.left, move.right))
        size = height + move.top + move.bottom, width + move.left + move.right
        self._refuse_large(stage, *size)
        return s.Crop(-move.top, -move.left, *size, margin=margin)


class _ResamplingBuilder(_Builder):
    """Combines the moves of N samples into one resampling."""

    def __init__(self, height: Ints, width: Ints, max_pixels: int) -> None:
        super().__init__(max_pixels)
        self._box = _whole(height, width)
        self._grid: Ints | None = None
        self._shown = self._window = self._box
        self._mirrors = self._flips = np.zeros((len(height), 2), bool)
        self._filter = ("bilinear", True)
        self._fill: tuple[float, ...] = (0,)

    @property
    def size(self) -> tuple[Ints, Ints]:
        return self._window[:, 2], self._window[:, 3]

    def crop(self, move: s.Crop, stage: s.Geometry) -> None:
        height, width = self.size
        self._refuse_outside(move, stage, height, width)
        if move.margin and self._grid is None:
            self._fix_grid(height, width)
        y = np.where(self._flips[:, 0], height - move.y - move.height, move.y)
        x = np.where(self._flips[:, 1], width - move.x - move.width, move.x)
        self._window = np.array([self._window[:, 0] + y, self._window[:, 1] + x, move.height, move.width]).T
        if self._grid is None:
            self._box = self._window
        else:
            self._shown = _overlap(self._shown, self._window)

    def flip(self, move: s.Flip) -> None:
        self._flips = self._flips ^ np.array([move.vertical, move.horizontal]).T

    def resize(self, move: s.Resize, stage: s.Geometry) -> None:
        assert self._grid is None, "a second resize starts a new resampling"
        self._refuse_large(stage, move.height, move.width)
        self._filter = (move.interpolation, move.antialias)
        if move.interpolation == "nearest":
            self._mirrors = self._flips
            self._flips = np.zeros_like(self._flips)
        self._fix_grid(move.height, move.width)

    def pad(self, move: s.Pad, stage: s.Geometry) -> None:
        assert move.border == "constant", "a Pad of another border is a warp"
        self.crop(self._as_crop(move, stage, *self.size), stage)
        self._fill = move.fill

    def warp(self, move: s.Warp, stage: s.Geometry) -> None:
        raise TypeError(f"{stage!r} returns a warp, which its `warps` does not declare")

    def _fix_grid(self, height: Ints, width: Ints) -> Ints:
        self._grid = grid = np.array([height, width]).T
        self._shown = self._window = _whole(height, width)
        return grid

    def resampling(self) -> Resampling:
        grid = self._fix_grid(*self.size) if self._grid is None else self._grid
        interpolation, antialias = self._filter
        return Resampling(
            box=self._box,
            mirrors=self._mirrors,
            grid=grid,
            shown=self._shown,
            window=self._window,
            flips=self._flips,
            misfits=tuple(self._misfits),
            interpolation=interpolation,
            antialias=antialias,
            fill=self._fill,
        )


class _WarpBuilder(_Builder):
    """Combines the moves of N samples into one warp."""

    def __init__(self, height: Ints, width: Ints, max_pixels: int) -> None:
        super().__init__(max_pixels)
        self.size = height, width
        self._matrix: s.Matrices | None = None  # no move so far
        self._shown = _whole(height, width)
        self._box: Ints | None = None

    def _select(self, move: s.Crop | s.Flip) -> None:
        """Select or mirror pixels; what crops have padded so far moves with them."""
        moved, height, width = forward(move, *self.size)
        self.size = height, width
        back = np.linalg.inv(moved).round().astype(np.float64)
        self._matrix = back if self._matrix is None else self._matrix @ back
        self._shown = _overlap(_moved(self._shown, moved), _whole(height, width))

    def crop(self, move: s.Crop, stage: s.Geometry) -> None:
        self._refuse_outside(move, stage, *self.size)
        self._select(move)

    def flip(self, move: s.Flip) -> None:
        self._select(move)

    def resize(self, move: s.Resize, stage: s.Geometry) -> None:
        raise TypeError(f"{stage!r} returns a resize and warps, which no one step can do")

    def pad(self, move: s.Pad, stage: s.Geometry) -> None:
        height, width = self.size
        if move.border == "constant":
            assert not any(move.fill), "a Pad of another fill starts a new resampling"
            self.crop(self._as_crop(move, stage, height, width), stage)
            return
        if move.border in MIRRORS:
            rows, columns = height - MIRRORS[move.border], width - MIRRORS[move.border]
            short = (np.maximum(move.top, move.bottom) > rows) | (np.maximum(move.left, move.right) > columns)
            self._refuse(short, stage, height, width, larger="padding")
        moved, height, width = forward(move, *self.size)
        back: s.Matrices = np.linalg.inv(moved).round().astype(np.float64)
        self.warp(s.Warp(back, height, width), stage)

    def warp(self, move: s.Warp, stage: s.Geometry) -> None:
        self._refuse_large(stage, move.height, move.width)
        self._fix_box()
        before = self._matrices()
        matrix = np.ascontiguousarray(move.matrix, np.float64)  # one layout, so that products round in one way
        matrix = matrix if self._matrix is None else before @ matrix
        height, width = move.height, move.width
        if move.active is not None:
            matrix = np.where(move.active[:, None, None], matrix, before)
            height, width = (np.where(move.active, *sides) for sides in zip((height, width), self.size, strict=True))
        self._matrix = matrix
        self.size = (height, width)
        self._shown = _whole(height, width)

    def _matrices(self) -> s.Matrices:
        """Return the maps [N, 3, 3] of all moves so far, from the result to the box; without one, to the image."""
        return np.broadcast_to(np.eye(3), (len(self._shown), 3, 3)) if self._matrix is None else self._matrix

    def _fix_box(self) -> Ints:
        """Return the region that was cropped before the first warp; the matrix refers to it from the first call on."""
        if self._box is None:
            self._box = _whole(*self.size)
            if self._matrix is not None:
                self._box = _moved(self._box, self._matrix)
                self._matrix[:, :2, 2] -= self._box[:, 1::-1]
        return self._box

    def warping(self, lookup: s.Lookup) -> Warping:
        box = self._fix_box()
        height, width = self.size
        return Warping(
            box=box,
            matrix=self._matrices(),
            height=height,
            width=width,
            shown=self._shown,
            misfits=tuple(self._misfits),
            lookup=lookup,
        )


def _whole(height: Ints, width: Ints) -> Ints:
    """Return whole images of these sizes [N] as boxes [N, 4]."""
    return np.array([np.zeros_like(height), np.zeros_like(width), height, width]).T


def _moved(boxes: Ints, matrix: s.Matrices) -> Ints:
    """Map boxes [N, 4] by matrices that mirror and shift whole pixels."""
    y, x, height, width = boxes.T
    corners = np.array([[x, x + width], [y, y + height], [np.ones_like(x)] * 2], np.float64)
    ends = np.sort(np.einsum("nij,jkn->nik", matrix, corners).astype(np.int64), axis=2)
    starts = ends[:, 1::-1, 0]
    return np.concatenate([starts, ends[:, 1::-1, 1] - starts], axis=1)


def _overlap(a: Ints, b: Ints) -> Ints:
    """Return the intersection of boxes [N, 4]; its sides are 0 if it is empty."""
    start = np.maximum(a[:, :2], b[:, :2])
    end = np.minimum(a[:, :2] + a[:, 2:], b[:, :2] + b[:, 2:])
    return np.concatenate([start, np.maximum(end - start, 0)], axis=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A pipeline folded into steps, with the specs between its stages.

    specs[0] is the encoded input; specs[-1] is the spec of the images in a batch. steps: on each image. ends: for each
    step, how many stages have begun with it, so that its result has the spec specs[end]. mixings: on a batch of
    finished images and their labels; where there are any, labels are float32 [N, classes].
    """

    pipeline: s.Pipeline
    specs: tuple[s.ImageSpec, ...]
    decoder: s.Decoder
    steps: tuple[Step, ...]
    ends: tuple[int, ...]
    mixings: tuple[MixingStep, ...] = ()

    @property
    def result(self) -> s.ImageSpec:
        return self.specs[-1]

    @property
    def record_values(self) -> tuple[s.RecordValue, ...]:
        """Return what its stages take from each sample's record, without repetitions."""
        return tuple(dict.fromkeys(self.pipeline.record_values.values()))


class _Run:
    """Geometry stages in a row that run as one step."""

    def __init__(self, max_pixels: int) -> None:
        self._max_pixels = max_pixels
        self._stages: list[tuple[s.Geometry, int]] = []
        self._filter: s.Lookup | None = None
        self._fill: tuple[float, ...] | None = None
        self._resized = self._padded = self._mirrored = False

    def takes(self, stage: s.Geometry) -> bool:
        """Return True if this stage can be part of the run."""
        if self._stages and not (stage.folds and self._stages[-1][0].folds):
            return False
        if stage.warps is not None:
            mirrored = self._mirrored or (stage.mirrors and self._filter is not None)
            return not (self._resized or self._padded or mirrored) and self._filter in (None, stage.warps)
        if self._filter is not None:
            return not stage.resizes and not (stage.pads and stage.padding_fill != (0,))
        if stage.resizes:
            return not self._resized and not self._padded
        return not stage.pads or self._fill in (None, stage.padding_fill)

    def add(self, stage: s.Geometry, occurrence: int, before: s.ImageSpec) -> None:
        """Add a stage to the run. before: the spec of its input."""
        self._stages.append((stage, occurrence))
        self._resized |= stage.resizes
        self._mirrored |= stage.mirrors
        self._filter = self._filter or stage.warps
        if stage.pads and (self._filter is None or stage.pads_image(before)):
            self._padded = True
            self._fill = stage.padding_fill

    def steps(self) -> list[Step]:
        """Return the step of the run; an empty list if it has no stages."""
        if not self._stages:
            return []
        stages, occurrences = zip(*self._stages, strict=True)
        if self._filter is None:
            return [ResamplingStep(stages, occurrences, self._max_pixels)]
        return [WarpStep(stages, occurrences, self._max_pixels, self._filter)]


def trace(pipeline: s.Pipeline, *, at: tuple[Key, ...] | None = None, serving: bool = False) -> list[s.ImageSpec]:
    """Return the specs between the stages: the input of the first stage, then the output of each stage.

    Args:
        pipeline: the stages, beginning with encoded bytes.
        at: the keys that lead to the list of stages, for problems; by default the pipeline's name.
        serving: also refuse random stages, mixing stages and those that take numbers from records.

    Raises:
        ConfigError: a stage cannot take its input, follows a mixing stage, makes larger images than the decoder may
            give, or the result has no fixed size.

    Examples:
        >>> from gpuflow.stages import Decode, Normalize, Resize
        >>> stages = Decode(), Resize(height=224, width=224), Normalize()
        >>> [str(spec) for spec in trace(s.Pipeline("val", stages))][2:]
        ['uint8 224x224x3 hwc', 'float32 224x224x3 nchw']
    """
    at = (pipeline.name,) if at is None else at

    def fault(i: int, rule: str, action: str = "", *, code: Code = "stage.order") -> ConfigError:
        return ConfigError([Problem.of((*at, i, pipeline.stages[i].stage_name), rule, action=action, code=code)])

    if not pipeline.stages:
        rule = "must name at least one stage, got an empty list"
        raise ConfigError([Problem.of(at, rule, action="start with decode: {}", code="stage.order")])
    specs, decoder = [s.ENCODED], pipeline.stages[0]
    if not isinstance(decoder, s.Decoder):
        raise fault(0, "takes an image but gets encoded bytes", "start the list with decode: {color: rgb}")
    for i, stage in enumerate(pipeline.stages):
        if i > 0 and isinstance(stage, s.Decoder):
            raise fault(i, "must be the first stage and stand once", "remove this one")
        if i > 0 and isinstance(mixing := pipeline.stages[i - 1], s.Mixing) and not isinstance(stage, s.Mixing):
            rule = f"works on one image but stands after {mixing.stage_name}, which mixes whole batches"
            raise fault(i, rule, f"put {stage.stage_name} before {mixing.stage_name}")
        if serving and (isinstance(stage, s.Mixing) or stage.random):
            rule = "mixes the samples of a batch" if isinstance(stage, s.Mixing) else "is random"
            action = "name the stages that pipelines.val uses"
            raise fault(i, f"{rule} and cannot serve", action, code="stage.random")
        if serving and stage.record_values:
            rule = f"takes {' and '.join(stage.record_values)} from a sample's record, which no request has"
            raise fault(i, rule, "give numbers in place of the field, or remove the stage", code="config.conflict")
        try:
            specs.append(stage.output(specs[-1]))
        except ValueError as error:
            raise fault(i, str(error)) from error
        height, width, _ = specs[-1].shape
        if i == 0 or specs[-1].shape == specs[-2].shape or height is None or width is None:
            continue
        if (pixels := height * width) > decoder.max_pixels:
            rule = f"makes {height}x{width} = {pixels:,} pixels of every image, more than max_pixels"
            action = f"raise {decoder.stage_name}.max_pixels, which is {decoder.max_pixels:,}, or resize to less"
            raise fault(i, rule, action, code="config.conflict")
    if not specs[-1].fixed:
        raise fault(
            len(pipeline.stages) - 1,
            f"leaves images of varying size ({specs[-1]}), which no batch can hold",
            "add center_crop, random_crop, random_resized_crop, letterbox or resize with height and width",
            code="stage.size",
        )
    moving = [step for step in fold(pipeline, specs).steps if isinstance(step, ResamplingStep | WarpStep)]
    for stage in (stage for step in moving[1:] for stage in step.stages):
        if any(value.form == "boxes" for value in stage.record_values.values()):
            rule = "takes boxes, which follow no stages before it that run as another step"
            raise fault(pipeline.stages.index(stage), rule, "put it before the other stages that move pixels")
    return specs


def fold(pipeline: s.Pipeline, specs: Sequence[s.ImageSpec]) -> Program:
    """Fold a pipeline, given the specs that `trace` returned.

    Examples:
        >>> from gpuflow.stages import CenterCrop, Decode, Flip, Normalize, Resize
        >>> stages = Decode(), Resize(shorter=256), CenterCrop(size=224), Flip(horizontal=0.5), Normalize()
        >>> pipeline = s.Pipeline("train", stages)
        >>> [type(step).__name__ for step in fold(pipeline, trace(pipeline)).steps]
        ['ResamplingStep', 'PointwiseStep']
    """
    decoder = pipeline.stages[0]
    assert isinstance(decoder, s.Decoder)
    assert decoder.library is None or specs[1].fixed, "a decoder with its own library gives images of one size"
    steps: list[Step] = []
    ends: list[int] = []
    mixings: list[MixingStep] = []
    moving = _Run(decoder.max_pixels)
    coloring: list[tuple[s.Pointwise, int]] = []
    added = 1

    def flush() -> None:
        """End the step that the last stages form."""
        nonlocal moving
        steps.extend(moving.steps())
        moving = _Run(decoder.max_pixels)
        if coloring:
            passed, occurrences = zip(*coloring, strict=True)
            steps.append(PointwiseStep(passed, occurrences, specs[added]))
            coloring.clear()
        ends.extend([added] * (len(steps) - len(ends)))

    for i, stage, occurrence in pipeline.parts()[1:]:
        if isinstance(stage, s.Geometry):
            if coloring or not moving.takes(stage):
                flush()
            moving.add(stage, occurrence, specs[i])
            added = i + 1
            continue
        if isinstance(stage, s.Pointwise):
            has_table = stage.table() is not None
            if not has_table and not _has_operations(stage):
                raise TypeError(f"{stage!r} must define operations or table; if it has neither, derive it from Opaque")
            if not coloring:
                flush()
            coloring.append((stage, occurrence))
            added = i + 1
            if has_table:
                flush()
            continue
        flush()
        added = i + 1
        if isinstance(stage, s.Local):
            steps.append(LocalStep(stage, occurrence))
        elif isinstance(stage, s.Opaque):
            steps.append(OpaqueStep(stage, occurrence, specs[i], specs[added], decoder.max_pixels))
        elif isinstance(stage, s.Mixing):
            height, width, _ = specs[i].shape
            assert height is not None and width is not None, "mixing stages take images of one size"
            mixings.append(MixingStep(stage, occurrence, height, width))
        else:
            kinds = "Geometry, Pointwise, Local, Policy, Opaque or Mixing"
            raise TypeError(f"{stage!r} is of no kind of stage; derive it from {kinds}")
        flush()
    flush()
    return Program(
        pipeline=pipeline,
        specs=tuple(specs),
        decoder=decoder,
        steps=tuple(steps),
        ends=tuple(ends),
        mixings=tuple(mixings),
    )


def _has_operations(stage: s.Pointwise) -> bool:
    none = np.empty(0, np.int64)
    return stage.operations(stage.draw(s.Keys(0, 0, none).stage(stage.key_name, 0)), none, none) is not None
