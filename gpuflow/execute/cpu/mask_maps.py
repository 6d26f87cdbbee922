"""Masks follow a program's steps without interpolation: which pixel of a mask each pixel of the result shows.

A resampling step moves a mask move by move, as torchvision v2 does. A warp step samples it once, at the points that the
image is sampled at. What a step fills in, such as a constant border, has one level in a mask, by default 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from gpuflow.arrays import Bytes, Ints
from gpuflow.execute.warp import BORDERS
from gpuflow.native.library import INTEGER, POINTER, function
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

_apply = function("gpuflow_apply_mask_map", POINTER, POINTER, INTEGER, POINTER)
_warp = function("gpuflow_warp_mask_map", POINTER, POINTER, INTEGER, INTEGER, POINTER, INTEGER, INTEGER, POINTER)
_KINDS = {np.int32: 1, np.int64: 2}
"""What C calls the types of places."""
_MOST_IN_INT32 = 2**31


class MaskMap:
    """Which pixel of one sample's mask each pixel of the result shows.

    Crops, flips, resizes and pads move rows and columns separately, so two vectors describe them: the row of each row,
    and the column of each column. A warp makes a place for each pixel, its number in the mask, and of these places two
    vectors choose again. A negative row, column or place lies outside the mask.
    """

    def __init__(self, height: int, width: int) -> None:
        self._rows, self._columns = np.arange(height), np.arange(width)
        self._width = width
        self._places: NDArray[np.int32 | np.int64] | None = None
        self._number: type[np.int32 | np.int64] = np.int32 if height * width < _MOST_IN_INT32 else np.int64

    def apply(self, mask: Bytes, fill: int = 0) -> Bytes:
        """The result of a mask [h, w]. fill: its level outside the mask."""
        mask, described = np.ascontiguousarray(mask), self._described()
        result = np.empty((len(self._rows), len(self._columns)), np.uint8)
        _apply(described.ctypes.data, mask.ctypes.data, fill, result.ctypes.data)
        return result

    def _described(self) -> Ints:
        """Return the fields of C's `mask_map`."""
        kind, places = _KINDS[self._number], (0, self._width, 0)
        if self._places is not None:
            places = self._places.ctypes.data, self._places.shape[1], kind
        lines = (line.ctypes.data for line in (self._rows, self._columns))
        return np.array([*lines, len(self._rows), len(self._columns), *places, kind], np.int64)

    def move(self, move: s.Crop | s.Flip | s.Resize | s.Pad, i: int) -> None:
        """Continue with sample i's move."""
        height, width = len(self._rows), len(self._columns)
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
        height, width = (int(side[i]) for side in warping.size)
        lookup, places = warping.lookup, np.empty((height, width), self._number)
        matrix, shown = np.ascontiguousarray(warping.matrix[i]), np.ascontiguousarray(warping.shown[i])
        described = self._described()
        way = BORDERS[lookup.border], lookup.as_torchvision
        address, size = shown.ctypes.data, (height, width)
        _warp(described.ctypes.data, matrix.ctypes.data, *way, address, *size, places.ctypes.data)
        self._places, self._rows, self._columns = places, np.arange(height), np.arange(width)

    def _select(self, rows: Ints, columns: Ints) -> None:
        """Keep these rows and columns, [h] and [w], of the result so far; negative ones are outside."""
        self._rows, self._columns = _taken(self._rows, rows), _taken(self._columns, columns)


def mask_maps(program: Program, keys: s.Keys, sizes: Ints) -> list[MaskMap]:
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


def _taken(line: Ints, at: Ints) -> Ints:
    """The numbers of `line` at these places; -1 at negative ones."""
    return np.where(at < 0, -1, line.take(at, mode="clip"))


def _inside(places: Ints, size: int) -> Ints:
    """Places along a side; -1 for those outside."""
    return np.where((places >= 0) & (places < size), places, -1)


def _nearest(size: int, result: int) -> Ints:
    """The pixels that torch's nearest resampling takes, which computes in float32."""
    scale = np.float32(size) / np.float32(result)
    pixels: Ints = np.minimum(np.floor(np.arange(result, dtype=np.float32) * scale).astype(np.int64), size - 1)
    return pixels
