"""Where the targets of images go: boxes, keypoints and masks follow the moves that a pipeline's geometry stages draw.

Everything is mapped move by move, for all boxes of all samples at once, as torchvision v2 does with TVTensors: the four
corners of a box are mapped, and the result is the box around them, clamped to the image after each crop, pad and warp.
Coordinates are those of `moves`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from gpuflow.errors import Key, Problem
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.moves import Crop, Flip, Matrices, Move, Pad, Resize, Warp, forward
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.records import Field, Ragged

__all__ = [
    "MappedBoxes",
    "MaskMap",
    "PlacedMove",
    "TargetRules",
    "boxes_at_fault",
    "carry_problem",
    "keypoints_at_fault",
    "map_boxes",
    "map_keypoints",
    "mask_maps",
    "moves_of",
]

_HORIZON = 1e-6
"""The least third coordinate of a mapped point. Points behind a projective map's horizon go far outside instead."""

Floats = NDArray[np.float64]


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
    """A move of N samples, and the sizes [N] of the images that it gets and gives."""

    move: Move
    before: tuple[s.Ints, s.Ints]
    matrix: Matrices
    after: tuple[s.Ints, s.Ints]

    @property
    def clips(self) -> s.Bools | None:
        """For which samples boxes are clamped after it, [N]; None for no sample."""
        match self.move:
            case Crop() | Pad():
                return np.ones(len(self.matrix), bool)
            case Warp():
                return np.ones(len(self.matrix), bool) if self.move.active is None else self.move.active
            case Flip() | Resize():
                return None
            case _:
                assert_never(self.move)


def moves_of(program: Program, keys: s.Keys, sizes: s.Ints) -> list[PlacedMove]:
    """The moves of N samples, in order, drawn again from the same keys. sizes [N, 2]: of the upright images."""
    pipeline, placed = program.pipeline, list[PlacedMove]()
    height, width = sizes[:, 0], sizes[:, 1]
    for stage, occurrence in zip(pipeline.stages, pipeline.occurrences(), strict=True):
        if isinstance(stage, s.Geometry):
            for move in stage.draw(keys.stage(stage.stage_name, occurrence), height, width):
                matrix, *after = forward(move, height, width)
                placed.append(PlacedMove(move, (height, width), matrix, (after[0], after[1])))
                height, width = after
    return placed


def carry_problem(program: Program, fields: Sequence[Field], at: tuple[Key, ...] = ()) -> Problem | None:
    """Why a pipeline cannot carry these fields: the first stage that may move pixels without saying where to.

    at: the keys that lead to the list of stages.
    """
    names = [field.name for field in fields if field.type in ("boxes", "keypoints", "mask")]
    if not names:
        return None
    for i, stage in enumerate(program.pipeline.stages):
        if (isinstance(stage, s.Opaque) and stage.moves_pixels) or (
            isinstance(stage, s.Decoder) and stage.library is not None
        ):
            rule = f"may move pixels, and {', '.join(names)} cannot follow"
            action = "use a geometry stage of gpuflow, or leave the field out of source.fields"
            return Problem.of((*at, i, stage.stage_name), rule, action=action, code="stage.order")
    return None


# --- records at fault -------------------------------------------------------------------------------------------------


def boxes_at_fault(name: str, boxes: Ragged, sizes: s.Ints) -> Iterator[tuple[int, str]]:
    """Samples with a box that is none, or that lies outside its image of these sizes [N, 2], and why."""
    x1, y1, x2, y2 = boxes.values.astype(np.float64).T
    height, width = sizes[samples_of(boxes)].T
    unknown = ~np.isfinite(boxes.values).all(axis=1)
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


def keypoints_at_fault(name: str, keypoints: Ragged) -> Iterator[tuple[int, str]]:
    """Samples with a keypoint whose coordinates are not numbers, and why."""
    for row in np.flatnonzero(~np.isfinite(keypoints.values).all(axis=(1, 2))).tolist():
        sample, number = _place(keypoints, row)
        yield sample, f"{name}[{number}] must have finite numbers"


def _place(rows: Ragged, row: int) -> tuple[int, int]:
    sample = int(np.searchsorted(rows.offsets, row, side="right")) - 1
    return sample, row - int(rows.offsets[sample])


def _numbers(values: NDArray[np.float32]) -> str:
    return f"[{', '.join(f'{value:g}' for value in values.tolist())}]"


# --- boxes and keypoints ----------------------------------------------------------------------------------------------


def samples_of(rows: Ragged) -> s.Ints:
    """The sample that each row belongs to."""
    return np.repeat(np.arange(len(rows)), np.diff(rows.offsets))


@dataclass(frozen=True, slots=True)
class MappedBoxes:
    """Boxes in the results of N samples.

    boxes: those that are kept. kept [M]: which of the M boxes that were mapped these are. offsets [N + 1]: of those.
    """

    boxes: Ragged
    kept: s.Bools
    offsets: s.Ints

    def kept_of(self, i: int) -> s.Bools:
        """Which boxes of sample i are kept."""
        kept: s.Bools = self.kept[self.offsets[i] : self.offsets[i + 1]]
        return kept

    def select(self, rows: Ragged) -> Ragged:
        """What belongs to the kept boxes, of a column with a row for each of the M boxes."""
        return Ragged(rows.values[self.kept], self.boxes.offsets)


def map_boxes(boxes: Ragged, moves: Sequence[PlacedMove], sizes: s.Ints, rules: TargetRules) -> MappedBoxes:
    """Boxes [M, 4] of N samples through their moves. sizes [N, 2]: of the images before the first move."""
    sample = samples_of(boxes)
    now, visible = boxes.values.astype(np.float64), np.ones(len(sample))
    height, width = sizes[:, 0], sizes[:, 1]
    for placed in moves:
        corners = now[:, [[0, 1], [2, 1], [2, 3], [0, 3]]]
        mapped = _map_points(placed.matrix[sample], corners)
        now = np.concatenate([mapped.min(axis=1), mapped.max(axis=1)], axis=1)
        height, width = placed.after
        if (clips := placed.clips) is not None:
            now, visible = _clamp(now, visible, height[sample], width[sample], clips[sample])
    now, visible = _clamp(now, visible, height[sample], width[sample], np.ones(len(sample), bool))
    area = _area(now)
    kept = (area > 0) & (area >= rules.min_area) & (visible >= rules.min_visibility)
    offsets = np.zeros(len(boxes) + 1, np.int64)
    np.cumsum(np.bincount(sample[kept], minlength=len(boxes)), out=offsets[1:])
    return MappedBoxes(Ragged(now[kept].astype(np.float32), offsets), kept, boxes.offsets)


def map_keypoints(keypoints: Ragged, moves: Sequence[PlacedMove], sizes: s.Ints) -> Ragged:
    """Keypoints [M, K, 3] of N samples through their moves. One that leaves the image gets the visibility 0."""
    sample = samples_of(keypoints)
    points, visibility = keypoints.values[..., :2].astype(np.float64), keypoints.values[..., 2].copy()

    def hide(height: s.Ints, width: s.Ints) -> None:
        limits = np.stack([width, height], axis=1)[sample][:, None]
        visibility[~((points >= 0) & (points <= limits)).all(axis=2)] = 0

    hide(sizes[:, 0], sizes[:, 1])
    for placed in moves:
        points = _map_points(placed.matrix[sample], points)
        if placed.clips is not None:
            hide(*placed.after)
    return Ragged(np.concatenate([points, visibility[..., None]], axis=2).astype(np.float32), keypoints.offsets)


def _map_points(matrix: Matrices, points: Floats) -> Floats:
    """Points [M, K, 2] through a map each, [M, 3, 3]."""
    mapped = np.einsum("mij,mkj->mki", matrix[:, :, :2], points) + matrix[:, None, :, 2]
    result: Floats = mapped[..., :2] / np.maximum(mapped[..., 2:], _HORIZON)
    return result


def _clamp(now: Floats, visible: Floats, height: s.Ints, width: s.Ints, where: s.Bools) -> tuple[Floats, Floats]:
    """Boxes clamped to their images where [M] says so, and the part of each that is visible after that."""
    before = _area(now)
    limits = np.stack([width, height, width, height], axis=1)
    now = np.where(where[:, None], np.clip(now, 0, limits), now)
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.where(before > 0, _area(now) / before, 0.0)
    return now, visible * part


def _area(boxes: Floats) -> Floats:
    area: Floats = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    return area


# --- masks ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class MaskMap:
    """Which pixel of a mask each pixel of the result shows, by nearest sampling.

    rows [H, 1 or W], columns [1 or H, W]: the pixel's row and column; a negative one lies outside, where the result is
    0. Crops, flips, resizes and pads move rows and columns separately, which two vectors describe.
    """

    rows: s.Ints
    columns: s.Ints

    @classmethod
    def identity(cls, height: int, width: int) -> MaskMap:
        return cls(np.arange(height)[:, None], np.arange(width)[None])

    def select(self, rows: s.Ints, columns: s.Ints) -> None:
        """Keep these rows and columns, [h] and [w], of the result so far; negative ones are outside."""
        across, down = self.rows.shape[1] > 1, len(self.columns) > 1
        self.rows = _taken(self.rows, rows, 0)
        self.columns = _taken(self.columns, columns, 1)
        if across:
            self.rows = _taken(self.rows, columns, 1)
        if down:
            self.columns = _taken(self.columns, rows, 0)

    def warp(self, matrix: Floats, height: int, width: int, border: str) -> None:
        """Sample the result so far at the pixels' centres, which `matrix` [3, 3] takes from the output there."""
        shape = len(self.rows), self.columns.shape[1]
        x, y = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
        seen = matrix @ np.stack([x.ravel(), y.ravel(), np.ones(x.size)])
        depth = np.where(np.abs(seen[2]) < _HORIZON, _HORIZON, seen[2])
        column, row = (
            _bordered(np.floor(np.clip(line / depth, -1e9, 1e9)).astype(np.int64), side, border).reshape(height, width)
            for line, side in ((seen[0], shape[1]), (seen[1], shape[0]))
        )
        outside = (row < 0) | (column < 0)
        inner_rows, inner_columns = np.broadcast_to(self.rows, shape), np.broadcast_to(self.columns, shape)
        self.rows = np.where(outside, -1, inner_rows[row, column])
        self.columns = np.where(outside, -1, inner_columns[row, column])

    def apply(self, mask: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The result of a mask [h, w]."""
        result: NDArray[np.uint8] = mask[self.rows, self.columns]
        if (self.rows < 0).any() or (self.columns < 0).any():
            result[np.broadcast_to((self.rows < 0) | (self.columns < 0), result.shape)] = 0
        return result


def mask_maps(moves: Sequence[PlacedMove], sizes: s.Ints) -> list[MaskMap]:
    """How each sample's mask, of the size [N, 2] of its image, follows the moves.

    Warps in a row, with crops and flips between them, are one sampling, as they are for the image.
    """
    return [_mask_map(moves, i, *size) for i, size in enumerate(sizes.tolist())]


def _mask_map(moves: Sequence[PlacedMove], i: int, height: int, width: int) -> MaskMap:
    result = MaskMap.identity(height, width)
    waiting: tuple[Floats, str] | None = None  # the map of the warps so far, which are not sampled yet, and the border
    size = height, width
    for placed in moves:
        move, after = placed.move, (int(placed.after[0][i]), int(placed.after[1][i]))
        if isinstance(move, Warp):
            if move.active is None or move.active[i]:
                if waiting is not None and waiting[1] != move.border:
                    result.warp(waiting[0], *size, waiting[1])
                    waiting = None
                matrix = move.matrix[i] if waiting is None else waiting[0] @ move.matrix[i]
                waiting = matrix, move.border
        elif waiting is not None and isinstance(move, (Crop, Flip)):
            waiting = waiting[0] @ np.linalg.inv(placed.matrix[i]), waiting[1]
        else:
            if waiting is not None:
                result.warp(waiting[0], *size, waiting[1])
                waiting = None
            result.select(*_selected(move, i, *size))
        size = after
    if waiting is not None:
        result.warp(waiting[0], *size, waiting[1])
    return result


def _selected(move: Crop | Flip | Resize | Pad, i: int, height: int, width: int) -> tuple[s.Ints, s.Ints]:
    """Which rows and columns of sample i's mask a move shows; negative ones are outside."""
    match move:
        case Crop():
            return (
                _bordered(np.arange(move.height[i]) + move.y[i], height, "constant"),
                _bordered(np.arange(move.width[i]) + move.x[i], width, "constant"),
            )
        case Flip():
            rows, columns = np.arange(height), np.arange(width)
            return rows[::-1] if move.vertical[i] else rows, columns[::-1] if move.horizontal[i] else columns
        case Resize():
            return _nearest(height, int(move.height[i])), _nearest(width, int(move.width[i]))
        case Pad():
            return (
                _bordered(np.arange(-move.top[i], height + move.bottom[i]), height, move.border),
                _bordered(np.arange(-move.left[i], width + move.right[i]), width, move.border),
            )
        case _:
            assert_never(move)


def _nearest(size: int, result: int) -> s.Ints:
    """The pixels that torch's nearest resampling takes, which computes in float32."""
    scale = np.float32(size) / np.float32(result)
    pixels: s.Ints = np.minimum(np.floor(np.arange(result, dtype=np.float32) * scale).astype(np.int64), size - 1)
    return pixels


def _bordered(places: s.Ints, size: int, border: str) -> s.Ints:
    """Places along a side, where those outside it stand for others; -1 for those that stand for none."""
    if border == "constant":
        return np.where((places >= 0) & (places < size), places, -1)
    if border == "edge":
        return np.clip(places, 0, size - 1)
    assert border == "reflect"
    turn = max(2 * (size - 1), 1)
    within: s.Ints = places % turn
    return np.minimum(within, turn - within) if size > 1 else np.zeros_like(places)


def _taken(values: s.Ints, places: s.Ints, axis: int) -> s.Ints:
    """Values at these places of an axis, negative where the place is."""
    return np.where(np.expand_dims(places, 1 - axis) < 0, -1, values.take(places, axis))
