"""Masks follow a program's steps without interpolation: which pixel of a mask each pixel of the result shows.

A resampling step moves a mask move by move, as torchvision v2 does. A warp step samples it once, at the points that the
image is sampled at. What a step fills in, such as a constant border, has one level in a mask, by default 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never

import cv2
import numpy as np
from numpy.typing import NDArray

from gpuflow.execute.jit import loops_of
from gpuflow.execute.warp import REMAPPED, TIE, fold_back, look_up_by_loops, seen_points
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import (
    ApplyStep,
    LocalStep,
    OpaqueStep,
    PointwiseStep,
    Program,
    ResamplingStep,
    Warping,
    WarpStep,
)
from gpuflow.pipeline.targets import PlacedMove, moves_of_stages

__all__ = ["MaskMap", "mask_maps"]


class MaskMap:
    """Which pixel of one sample's mask each pixel of the result shows.

    Crops, flips, resizes and pads move rows and columns separately, so two vectors describe them: the row of each row,
    and the column of each column. From the first warp on there is a place for each pixel: its column and its row in one
    number, and of these places two vectors choose again. A negative row, column or place lies outside the mask.
    """

    def __init__(self, height: int, width: int) -> None:
        self._rows, self._columns = np.arange(height), np.arange(width)
        self._places: NDArray[Any] | None = None
        self._chosen: tuple[s.Ints, s.Ints] | None = None
        """The rows and the columns of places that are left; None: all."""
        self._small = max(height, width) < REMAPPED

    def apply(self, mask: NDArray[np.uint8], fill: int = 0) -> NDArray[np.uint8]:
        """The result of a mask [h, w]. fill: its level outside the mask."""
        result: NDArray[np.uint8]
        if self._places is None:
            result = mask.take(self._rows, 0, mode="clip").take(self._columns, 1, mode="clip")
            result[self._rows < 0] = fill
            result[:, self._columns < 0] = fill
            return result
        pairs = self._pairs(self._with_chosen(self._places))
        if self._small and max(pairs.shape[:2]) < REMAPPED:
            no_more, constant = np.empty(0, np.int16), cv2.BORDER_CONSTANT
            return np.asarray(
                cv2.remap(
                    np.ascontiguousarray(mask), pairs, no_more, cv2.INTER_NEAREST, borderMode=constant, borderValue=fill
                )
            )
        result = mask[pairs[..., 1], pairs[..., 0]]
        result[pairs[..., 0] < 0] = fill
        return result

    def _pairs(self, places: NDArray[Any]) -> NDArray[Any]:
        """Places [H, W] as columns and rows, [H, W, 2]."""
        return places.view(np.int16 if self._small else np.int32).reshape(*places.shape, 2)

    def move(self, move: s.Crop | s.Flip | s.Resize | s.Pad, i: int) -> None:
        """Continue with sample i's move."""
        height, width = self._shape()
        match move:
            case s.Crop():
                rows, columns = np.arange(move.height[i]) + move.y[i], np.arange(move.width[i]) + move.x[i]
            case s.Flip():
                rows, columns = np.arange(height), np.arange(width)
                rows = rows[::-1] if move.vertical[i] else rows
                columns = columns[::-1] if move.horizontal[i] else columns
            case s.Resize():
                rows, columns = _nearest(height, int(move.height[i])), _nearest(width, int(move.width[i]))
            case s.Pad():
                assert move.border == "constant", "a Pad of another border is a warp"
                rows = np.arange(-move.top[i], height + move.bottom[i])
                columns = np.arange(-move.left[i], width + move.right[i])
            case _:
                assert_never(move)
        self._select(_inside(rows, height), _inside(columns, width))

    def warp(self, warping: Warping, i: int) -> None:
        """Continue with sample i's warp."""
        y, x, height, width = warping.box[i].tolist()
        self._select(np.arange(y, y + height), np.arange(x, x + width))
        shape = [int(side[i]) for side in warping.size]
        matrix, lookup, constant = warping.matrix[i], warping.lookup, warping.lookup.border == "constant"
        loops = loops_of("mask_loops")
        if loops is not None and constant and self._places is None:
            self._places = np.empty(shape, np.int32 if self._small else np.int64)
            pairs = self._pairs(self._places)
            first = np.zeros(2, np.int64)
            look_up_by_loops(loops, matrix, lookup, self._rows, self._columns, warping.shown[i], first, pairs)
            return
        points = (np.arange(side, dtype=np.float64) + 0.5 for side in shape)
        down, across = next(points)[:, None], next(points)[None]
        is_short = self._small and constant and max(height, width) < np.iinfo(np.int16).max
        numbers: type[np.int16 | np.int32] = np.int16 if is_short else np.int32
        seen = seen_points(matrix, across, down, (height, width), lookup)
        columns, rows = (_floors(line, numbers) for line in seen)
        if constant:
            outside = _is_outside(rows, height) | _is_outside(columns, width)
        else:
            rows, columns = (fold_back(at, side, lookup.border) for at, side in ((rows, height), (columns, width)))
            outside = np.zeros(shape, bool)
        y, x, shown_height, shown_width = warping.shown[i].tolist()
        outside[:y] = outside[y + shown_height :] = outside[:, :x] = outside[:, x + shown_width :] = True
        if self._places is None:
            places = np.empty(shape, np.int32 if self._small else np.int64)
            pairs = self._pairs(places)
            for axis, (inner, at) in enumerate(((self._columns, columns), (self._rows, rows))):
                pairs[..., axis] = at if _is_range(inner) else inner.take(at, mode="clip")
            if (self._rows < 0).any() or (self._columns < 0).any():
                outside |= (pairs[..., 0] < 0) | (pairs[..., 1] < 0)
        else:
            at = np.clip(rows, 0, height - 1).astype(np.int64) * width + np.clip(columns, 0, width - 1)
            places = self._with_chosen(self._places).reshape(-1).take(at)
        np.putmask(places, outside, -1)
        self._places = places

    def _shape(self) -> tuple[int, ...]:
        """Height and width of the result so far."""
        if self._places is not None and self._chosen is None:
            return self._places.shape
        rows, columns = (self._rows, self._columns) if self._chosen is None else self._chosen
        return len(rows), len(columns)

    def _select(self, rows: s.Ints, columns: s.Ints) -> None:
        """Keep these rows and columns, [h] and [w], of the result so far; negative ones are outside."""
        if self._places is None:
            self._rows, self._columns = _taken(self._rows, rows), _taken(self._columns, columns)
        elif self._chosen is None:
            self._chosen = rows, columns
        else:
            self._chosen = _taken(self._chosen[0], rows), _taken(self._chosen[1], columns)

    def _with_chosen(self, places: NDArray[Any]) -> NDArray[Any]:
        """Places, of which only the chosen rows and columns are left."""
        if self._chosen is not None:
            rows, columns = self._chosen
            places = places.take(rows, 0, mode="clip").take(columns, 1, mode="clip")
            places[rows < 0] = -1
            places[:, columns < 0] = -1
            self._places, self._chosen = places, None
        return places


def mask_maps(program: Program, keys: s.Keys, sizes: s.Ints) -> list[MaskMap]:
    """How the masks of N samples follow a program. sizes [N, 2]: of the upright images, and so of their masks."""
    maps = [MaskMap(*size) for size in sizes.tolist()]
    height, width = sizes[:, 0], sizes[:, 1]
    for step in program.steps:
        match step:
            case ResamplingStep():
                placed = moves_of_stages(zip(step.stages, step.occurrences, strict=True), keys, height, width)
                _move(maps, placed)
                height, width = placed[-1].after if placed else (height, width)
            case WarpStep():
                warping = step.draw(keys, height, width)
                for i, one in enumerate(maps):
                    one.warp(warping, i)
                height, width = warping.size
            case PointwiseStep() | LocalStep() | ApplyStep() | OpaqueStep():
                continue
            case _:
                assert_never(step)
    return maps


def _move(maps: Sequence[MaskMap], placed: Sequence[PlacedMove]) -> None:
    for one in placed:
        assert one.move is not None and not isinstance(one.move, s.Warp), "warps are no resampling step"
        for i, each in enumerate(maps):
            each.move(one.move, i)


def _taken(line: s.Ints, at: s.Ints) -> s.Ints:
    """The numbers of `line` at these places; -1 at negative ones."""
    return np.where(at < 0, -1, line.take(at, mode="clip"))


def _inside(places: s.Ints, size: int) -> s.Ints:
    """Places along a side; -1 for those outside."""
    return np.where((places >= 0) & (places < size), places, -1)


def _nearest(size: int, result: int) -> s.Ints:
    """The pixels that torch's nearest resampling takes, which computes in float32."""
    scale = np.float32(size) / np.float32(result)
    pixels: s.Ints = np.minimum(np.floor(np.arange(result, dtype=np.float32) * scale).astype(np.int64), size - 1)
    return pixels


def _is_range(values: s.Ints) -> bool:
    """Whether they are 0, 1, 2 and so on."""
    return bool((values == np.arange(len(values))).all())


def _floors(coordinates: NDArray[np.float64], numbers: type[np.int16 | np.int32]) -> NDArray[Any]:
    """Coordinates [H, W], which are changed, as the numbers of pixels; those far outside stay outside."""
    far = np.iinfo(numbers).max - 1
    np.clip(coordinates, -far, far, out=coordinates)
    coordinates += TIE
    return np.floor(coordinates, out=coordinates).astype(numbers)


def _is_outside(numbers: NDArray[Any], side: int) -> NDArray[np.bool_]:
    """Which numbers of pixels [H, W] are negative or not below a side. Without a sign negative ones are high ones."""
    without_sign = numbers.view(f"u{numbers.itemsize}")
    outside: NDArray[np.bool_] = without_sign >= side
    return outside
