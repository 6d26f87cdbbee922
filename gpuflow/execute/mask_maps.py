"""Masks follow a program's steps by nearest sampling: which pixel of a mask each pixel of the result shows.

A sampling step moves a mask move by move, as torchvision v2 does. A warp step samples it once, at the points that the
image is sampled at. What a step fills in, such as a constant border, is 0 in a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from gpuflow.execute.warp import TIE, TINY, fold_back
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import (
    ApplyStep,
    LocalStep,
    OpaqueStep,
    PointwiseStep,
    Program,
    SamplingStep,
    Warping,
    WarpStep,
)
from gpuflow.pipeline.targets import PlacedMove, moves_of_stages

__all__ = ["MaskMap", "mask_maps"]

_FAR = 2.0**31


class MaskMap:
    """Which pixel of one sample's mask each pixel of the result shows.

    Rows [H, 1 or W] and columns [1 or H, W] of these pixels; a negative one lies outside, where the result is 0. Crops,
    flips, resizes and pads move rows and columns separately, so that two vectors describe them.
    """

    def __init__(self, height: int, width: int) -> None:
        self._rows: s.Ints = np.arange(height)[:, None]
        self._columns: s.Ints = np.arange(width)[None]

    def apply(self, mask: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The result of a mask [h, w]."""
        result: NDArray[np.uint8] = mask[self._rows, self._columns]
        if (self._rows < 0).any() or (self._columns < 0).any():
            result[np.broadcast_to((self._rows < 0) | (self._columns < 0), result.shape)] = 0
        return result

    def move(self, move: s.Crop | s.Flip | s.Resize | s.Pad, i: int) -> None:
        """Continue with sample i's move."""
        height, width = len(self._rows), self._columns.shape[1]
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
        at_x, at_y = np.meshgrid(np.arange(shape[1]) + 0.5, np.arange(shape[0]) + 0.5)
        seen = warping.matrix[i] @ np.stack([at_x.ravel(), at_y.ravel(), np.ones(at_x.size)])
        third = np.where(np.abs(seen[2]) < TINY, TINY, seen[2])
        columns, rows = (
            np.floor(np.clip(line / third, -_FAR, _FAR) + TIE).astype(np.int64).reshape(shape) for line in seen[:2]
        )
        if warping.lookup.border == "constant":
            rows, columns = _inside(rows, height), _inside(columns, width)
        else:
            rows, columns = (
                fold_back(at, side, warping.lookup.border) for at, side in ((rows, height), (columns, width))
            )
        outside = (rows < 0) | (columns < 0)
        y, x, shown_height, shown_width = warping.shown[i].tolist()
        outside[:y] = outside[y + shown_height :] = outside[:, :x] = outside[:, x + shown_width :] = True
        inner_rows, inner_columns = np.broadcast_arrays(self._rows, self._columns)
        self._rows = np.where(outside, -1, inner_rows[rows, columns])
        self._columns = np.where(outside, -1, inner_columns[rows, columns])

    def _select(self, rows: s.Ints, columns: s.Ints) -> None:
        """Keep these rows and columns, [h] and [w], of the result so far; negative ones are outside."""
        across, down = self._rows.shape[1] > 1, len(self._columns) > 1
        self._rows = _taken(self._rows, rows, 0)
        self._columns = _taken(self._columns, columns, 1)
        if across:
            self._rows = _taken(self._rows, columns, 1)
        if down:
            self._columns = _taken(self._columns, rows, 0)


def mask_maps(program: Program, keys: s.Keys, sizes: s.Ints) -> list[MaskMap]:
    """How the masks of N samples follow a program. sizes [N, 2]: of the upright images, and so of their masks."""
    maps = [MaskMap(*size) for size in sizes.tolist()]
    height, width = sizes[:, 0], sizes[:, 1]
    for step in program.steps:
        match step:
            case SamplingStep():
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
        assert not isinstance(one.move, s.Warp), "warps are no sampling step"
        for i, each in enumerate(maps):
            each.move(one.move, i)


def _inside(places: s.Ints, size: int) -> s.Ints:
    """Places along a side; -1 for those outside."""
    return np.where((places >= 0) & (places < size), places, -1)


def _nearest(size: int, result: int) -> s.Ints:
    """The pixels that torch's nearest resampling takes, which computes in float32."""
    scale = np.float32(size) / np.float32(result)
    pixels: s.Ints = np.minimum(np.floor(np.arange(result, dtype=np.float32) * scale).astype(np.int64), size - 1)
    return pixels


def _taken(values: s.Ints, places: s.Ints, axis: int) -> s.Ints:
    """Values at these places of an axis, negative where the place is."""
    return np.where(np.expand_dims(places, 1 - axis) < 0, -1, values.take(places, axis))
