"""Where the targets of images go: boxes, keypoints and masks follow the moves that a pipeline's geometry stages draw.

Everything is mapped move by move, for all boxes of all samples at once, as torchvision v2 does with TVTensors: the four
corners of a box are mapped, and the result is the box around them, clamped to the image after each crop, pad and warp.
Warps in a row, with the crops and flips between them, are one move, as they are for pixels: what one of them moves out
of the image, the next one may move back. Coordinates are those of `moves`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from gpuflow.arrays import Bools, Floats, Ints
from gpuflow.errors import Key, Problem
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.moves import Crop, Flip, Matrices, Move, Pad, Resize, Warp, boxes_around, forward, map_points
from gpuflow.pipeline.program import Program, ResamplingStep, WarpStep, keys_at
from gpuflow.pipeline.records import GEOMETRIC, Field, Ragged, offsets_of

Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetRules:
    """Which boxes a batch keeps; one without area is never kept. The labels, masks and keypoints of others go, too.

    min_area: the least area of a box in pixels of the result.
    min_visibility: the least part of a box, 0 to 1, that crops, pads and warps leave inside the image.
    """

    min_area: float = 1.0
    min_visibility: float = 0.0


@dataclass(frozen=True, slots=True)
class PlacedMove:
    """A move of N samples.

    move: None if these are several that run as one warp. matrix: where it takes points, see `moves.forward`.
    after: the heights and widths [N] that it gives. clips [N]: for which samples boxes are clamped after it.
    mirrors [N]: which samples it flips horizontally. centers [N]: see `Crop`.
    """

    move: Move | None
    matrix: Matrices
    after: tuple[Ints, Ints]
    clips: Bools
    mirrors: Bools
    centers: Bools

    @classmethod
    def of(cls, move: Move, height: Ints, width: Ints) -> PlacedMove:
        """Return a move of images of these sizes [N]."""
        matrix, *after = forward(move, height, width)
        none = clips = mirrors = centers = np.zeros(len(height), bool)
        match move:
            case Crop():
                clips, centers = ~none, none if move.centers is None else move.centers
            case Pad():
                clips = ~none
            case Warp():
                clips = ~none if move.active is None else move.active
            case Flip():
                mirrors = move.horizontal
            case Resize():
                pass
            case _:
                assert_never(move)
        return cls(move, matrix, (after[0], after[1]), clips, mirrors, centers)

    @property
    def warps(self) -> bool:
        """Return True if the move looks pixels up; other moves select pixels, or resize them."""
        return isinstance(self.move, Warp) or (isinstance(self.move, Pad) and self.move.border != "constant")


def moves_of(program: Program, keys: s.Keys, sizes: Ints) -> list[PlacedMove]:
    """Draw the moves of N samples again, in order, from the same keys. sizes [N, 2]: of the upright images."""
    placed: list[PlacedMove] = []
    height, width = sizes.T
    for step in program.steps:
        if isinstance(step, ResamplingStep | WarpStep):
            moves = moves_of_stages(zip(step.stages, step.occurrences, strict=True), keys, height, width)
            placed += moves if isinstance(step, ResamplingStep) else _with_one_warp(moves)
            height, width = moves[-1].after if moves else (height, width)
    return placed


def _with_one_warp(moves: Sequence[PlacedMove]) -> list[PlacedMove]:
    """Join the moves of a `WarpStep` from its first warp to its last one."""
    warps = [i for i, placed in enumerate(moves) if placed.warps]
    if len(warps) < 2:
        return list(moves)
    first = warps[0]
    end = warps[-1] + 1
    joined = moves[first:end]
    matrix: Matrices = reduce(lambda total, placed: placed.matrix @ total, joined[1:], joined[0].matrix)
    clips = np.logical_or.reduce([placed.clips for placed in joined])
    mirrors = np.logical_xor.reduce([placed.mirrors for placed in joined])
    centers = np.logical_or.reduce([placed.centers for placed in joined])
    return [*moves[:first], PlacedMove(None, matrix, joined[-1].after, clips, mirrors, centers), *moves[end:]]


def moves_of_stages(stages: Iterable[tuple[s.Stage, int]], keys: s.Keys, height: Ints, width: Ints) -> list[PlacedMove]:
    """Draw the moves of stages on images of these sizes [N].

    stages: each with its occurrence, the number of stages of the same name before it.
    """
    placed: list[PlacedMove] = []
    sizes = height, width
    for stage, occurrence in stages:
        if isinstance(stage, s.Geometry):
            stage_keys = keys_at(stage, occurrence, keys, [one.move for one in placed if one.move is not None], sizes)
            for move in stage.draw(stage_keys, height, width):
                placed.append(PlacedMove.of(move, height, width))
                height, width = placed[-1].after
    return placed


def carry_problem(program: Program, fields: Sequence[Field], at: tuple[Key, ...] = ()) -> Problem | None:
    """Return why a pipeline cannot carry these fields: the first stage that may move pixels without saying where to.

    at: the keys that lead to the list of stages.
    """
    names, place = _geometric(fields), unsaid_move(program.pipeline)
    if not names or place is None:
        return None
    rule = f"may move pixels, and {names} cannot follow"
    action = "use a geometry stage of gpuflow, or leave the field out of source.fields"
    name = program.pipeline.stages[place].stage_name
    return Problem.of((*at, place, name), rule, action=action, code="stage.order")


def _geometric(fields: Sequence[Field]) -> str:
    """Return the names of the fields that follow the pixels, as text."""
    return ", ".join(field.name for field in fields if field.type in GEOMETRIC)


def unsaid_move(pipeline: s.Pipeline) -> int | None:
    """Return the place of the first stage that may move pixels without saying where to; None if there is none."""
    for i, stage in enumerate(pipeline.stages):
        if (isinstance(stage, s.Opaque) and stage.moves_pixels) or (
            isinstance(stage, s.Decoder) and stage.library is not None
        ):
            return i
    return None


def views_carry_problem(fields: Sequence[Field]) -> Problem | None:
    """Return why a pipeline with views cannot carry these fields: each view moves the pixels elsewhere."""
    if not (names := _geometric(fields)):
        return None
    rule = f"move the pixels in several ways, and {names} cannot follow"
    action = "use stages in place of views, or a source without these fields"
    return Problem.of("views", rule, action=action, code="config.conflict")


# --- records at fault -------------------------------------------------------------------------------------------------


def sizes_at_fault(given: Ints, sizes: Ints, *, upright: bool) -> Iterator[tuple[int, str]]:
    """Yield samples whose image has another size [N, 2] than the source's file gives, and why: their boxes lie
    elsewhere.

    given: these sizes, zeros where there is none. upright: whether `decode` applies orientations.
    """
    for i in np.flatnonzero(given.any(axis=1) & (given != sizes).any(axis=1)).tolist():
        (height, width), found = given[i].tolist(), sizes[i].tolist()
        turned = f"set decode: {{orientation: {'ignore' if upright else 'apply'}}}"
        action = turned if found == [width, height] else "correct its width and height"
        yield i, f"image must have {height}x{width} pixels as its entry says, got {found[0]}x{found[1]}; {action}"


def boxes_at_fault(name: str, boxes: Ragged, sizes: Ints) -> Iterator[tuple[int, str]]:
    """Yield samples with a box that is none, or that lies outside its image of these sizes [N, 2], and why."""
    x1, y1, x2, y2 = boxes.values.astype(np.float64).T
    height, width = sizes[_samples_of(boxes)].T
    unknown: Bools = ~np.all(np.isfinite(boxes.values), axis=1)
    with np.errstate(invalid="ignore"):
        empty = ~((x1 < x2) & (y1 < y2))
        outside = (x1 >= width) | (y1 >= height) | (x2 <= 0) | (y2 <= 0)
    for row in np.flatnonzero(unknown | empty | outside).tolist():
        rule = (
            "must have finite numbers"
            if unknown[row]
            else "must have x1 < x2 and y1 < y2"
            if empty[row]
            else f"lies outside the image of {height[row]}x{width[row]} pixels"
        )
        sample, number = _place(boxes, row)
        yield sample, f"{name}[{number}] {rule}, got {_numbers(boxes.values[row])}"


def keypoints_at_fault(name: str, keypoints: Ragged, flip_pairs: Pairs = ()) -> Iterator[tuple[int, str]]:
    """Yield samples with a keypoint whose coordinates are not numbers, or without one of the pairs, and why."""
    needed = 1 + max(chain((-1,), *flip_pairs))
    count = keypoints.values.shape[1]
    if needed > count:
        for sample in np.flatnonzero(np.diff(keypoints.offsets)).tolist():
            yield sample, f"{name} must have at least {needed} keypoints, which its flip_pairs name, got {count}"
    for row in np.flatnonzero(~np.isfinite(keypoints.values).all(axis=(1, 2))).tolist():
        sample, number = _place(keypoints, row)
        yield sample, f"{name}[{number}] must have finite numbers"


def _place(rows: Ragged, row: int) -> tuple[int, int]:
    sample = int(np.searchsorted(rows.offsets, row, side="right")) - 1
    return sample, row - int(rows.offsets[sample])


def _numbers(values: NDArray[np.float32]) -> str:
    return f"[{', '.join(f'{value:g}' for value in values.tolist())}]"


# --- boxes and keypoints ----------------------------------------------------------------------------------------------


def _samples_of(rows: Ragged) -> Ints:
    """Return the sample that each row belongs to."""
    return np.repeat(np.arange(len(rows)), np.diff(rows.offsets))


@dataclass(frozen=True, slots=True)
class MappedBoxes:
    """Boxes in the results of N samples.

    boxes: those that are kept. kept [M]: which of the M boxes that were mapped these are. offsets [N + 1]: of those.
    """

    boxes: Ragged
    kept: Bools
    offsets: Ints

    def kept_of(self, i: int) -> Bools:
        """Return which boxes of sample i are kept."""
        kept: Bools = self.kept[self.offsets[i] : self.offsets[i + 1]]
        return kept

    def select(self, rows: Ragged) -> Ragged:
        """Return what belongs to the kept boxes, of a column with a row for each of the M boxes."""
        return Ragged(rows.values[self.kept], self.boxes.offsets)


def map_boxes(boxes: Ragged, moves: Sequence[PlacedMove], sizes: Ints, rules: TargetRules) -> MappedBoxes:
    """Map boxes [M, 4] of N samples by their moves. sizes [N, 2]: of the images before the first move."""
    sample = _samples_of(boxes)
    now, visible = boxes.values.astype(np.float64), np.ones(len(sample))
    height, width = sizes[:, 0], sizes[:, 1]
    for placed in moves:
        now = boxes_around(placed.matrix[sample], now)
        height, width = placed.after
        centre, size = (now[:, :2] + now[:, 2:]) / 2, np.stack([width, height], axis=1)[sample]
        now[placed.centers[sample] & ~((centre > 0) & (centre < size)).all(axis=1)] = 0
        now, visible = _clamp(now, visible, height[sample], width[sample], placed.clips[sample])
    now, visible = _clamp(now, visible, height[sample], width[sample], np.ones(len(sample), bool))
    area = _area(now)
    kept = (area > 0) & (area >= rules.min_area) & (visible >= rules.min_visibility)
    offsets = offsets_of(np.bincount(sample[kept], minlength=len(boxes)))
    return MappedBoxes(Ragged(now[kept].astype(np.float32), offsets), kept, boxes.offsets)


def map_keypoints(keypoints: Ragged, moves: Sequence[PlacedMove], sizes: Ints, flip_pairs: Pairs = ()) -> Ragged:
    """Map keypoints [M, K, 3] of N samples by their moves. One that leaves the image gets the visibility 0.

    flip_pairs: keypoints that change places in horizontal flips.
    """
    sample = _samples_of(keypoints)
    points, visibility = keypoints.values[..., :2].astype(np.float64), keypoints.values[..., 2].copy()

    def hide(height: Ints, width: Ints) -> None:
        limits = np.stack([width, height], axis=1)[sample][:, None]
        visibility[~((points >= 0) & (points <= limits)).all(axis=2)] = 0

    hide(sizes[:, 0], sizes[:, 1])
    for placed in moves:
        points = map_points(placed.matrix[sample], points, is_shape=False)
        if placed.clips.any():
            hide(*placed.after)
        mirrored = np.flatnonzero(placed.mirrors[sample])[:, None]
        for pair in flip_pairs if len(mirrored) else ():
            points[mirrored, pair] = points[mirrored, pair[::-1]]
            visibility[mirrored, pair] = visibility[mirrored, pair[::-1]]
    return Ragged(np.concatenate([points, visibility[..., None]], axis=2).astype(np.float32), keypoints.offsets)


def _clamp(now: Floats, visible: Floats, height: Ints, width: Ints, where: Bools) -> tuple[Floats, Floats]:
    """Clamp boxes to their images where [M] says so. Return them, and the part of each that is visible then."""
    before = _area(now)
    limits = np.stack([width, height, width, height], axis=1)
    now = np.where(where[:, None], np.clip(now, 0, limits), now)
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.where(before > 0, _area(now) / before, 0.0)
    return now, visible * part


def _area(boxes: Floats) -> Floats:
    area: Floats = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    return area
