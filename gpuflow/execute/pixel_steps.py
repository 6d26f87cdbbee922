"""Computes where a GPU's kernels find the pixels of an image in memory, also of one that EXIF data turn.

The eight EXIF orientations differ only in where the upper left pixel of the upright image is stored, and in how far the
next row's and the next column's pixels are from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuflow.decode.header import FLIPPED_X, FLIPPED_Y, SWAPPED
from gpuflow.execute.tables import table_of

__all__ = ["ROW_BYTES", "Regions", "pixel_steps", "rows_are_short"]

ROW_BYTES = (1 << 31) - 1
"""The most bytes from the first to the last pixel of an upright row: kernels compute them in 32 bits."""
_FLIPS = np.array([(turn in FLIPPED_Y, turn in FLIPPED_X) for turn in range(9)])
"""[9, 2]: for each orientation whether rows, and whether columns, are in reverse order."""


def rows_are_short(sizes: NDArray[np.int64], orientations: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Whether kernels can read interleaved images upright, [n], see `ROW_BYTES`. Arguments: as of `pixel_steps`.

    They cannot if an image of more than 700 million pixels is turned by 90 degrees: an upright row then has a pixel of
    each stored one.
    """
    short: NDArray[np.bool_] = (orientations < SWAPPED) | (3 * sizes.prod(axis=1) <= ROW_BYTES)
    return short


def pixel_steps(
    sizes: NDArray[np.int64], channels: int, orientations: NDArray[np.integer] | None = None
) -> NDArray[np.int64]:
    """How to read interleaved uint8 images upright, [n, 3], in bytes: from the first byte to the upper left pixel, and
    from there to the next row's and the next column's.

    sizes [n, 2]: height and width as stored, one row after the other. orientations [n]: as EXIF counts them; by default
    nothing is turned.
    """
    if orientations is None or (orientations == 1).all():
        return table_of(len(sizes), [0, sizes[:, 1] * channels, channels])
    stored = table_of(len(sizes), [sizes[:, 1] * channels, channels])
    swapped = orientations >= SWAPPED
    steps = np.where(swapped[:, None], stored[:, ::-1], stored)
    ends = np.where(swapped[:, None], sizes[:, ::-1], sizes) - 1  # the last row and column of the upright image
    flips = _FLIPS[orientations]
    starts = (ends * steps * flips).sum(axis=1)
    return np.column_stack([starts, np.where(flips, -steps, steps)])


class Regions(NamedTuple):
    """The part of each image that is decoded, of n images.

    x, y, width, height [n]: of the part in the stored image. steps [n, 3]: how to read the upright image if memory
    holds this part alone, see `pixel_steps`; the upper left pixel may be outside.
    """

    x: NDArray[np.int64]
    y: NDArray[np.int64]
    width: NDArray[np.int64]
    height: NDArray[np.int64]
    steps: NDArray[np.int64]

    @classmethod
    def whole(cls, sizes: NDArray[np.int64], channels: int, orientations: NDArray[np.integer]) -> Regions:
        """All of each image. Arguments: as of `pixel_steps`."""
        zeros = np.zeros(len(sizes), np.int64)
        return cls(zeros, zeros, sizes[:, 1], sizes[:, 0], pixel_steps(sizes, channels, orientations))

    @classmethod
    def around(
        cls,
        boxes: Sequence[NDArray[np.int64]],
        sizes: NDArray[np.int64],
        channels: int,
        orientations: NDArray[np.integer],
    ) -> Regions:
        """The smallest part that has all pixels of some boxes, and one pixel at least.

        boxes: each [n, 4], y, x, height, width in the upright images. Other arguments: as of `pixel_steps`.
        """
        stored = sizes.T
        swapped, is_turned = orientations >= SWAPPED, bool((orientations != 1).any())
        upright = np.where(swapped, stored[::-1], stored) if is_turned else stored
        starts, ends = [], []
        for axis in (0, 1):
            start, end = boxes[0][:, axis], boxes[0][:, axis] + boxes[0][:, axis + 2]
            for box in boxes[1:]:
                start, end = np.minimum(start, box[:, axis]), np.maximum(end, box[:, axis] + box[:, axis + 2])
            starts.append(np.maximum(np.minimum(start, upright[axis] - 1), 0))
            ends.append(np.maximum(np.minimum(end, upright[axis]), starts[axis] + 1))
        (top, left), (bottom, right) = starts, ends
        y, x, height, width = top, left, bottom - top, right - left
        if is_turned:
            flipped_y, flipped_x = _FLIPS[orientations].T
            y, x = np.where(flipped_y, upright[0] - bottom, top), np.where(flipped_x, upright[1] - right, left)
            y, x = np.where(swapped, x, y), np.where(swapped, y, x)
            height, width = np.where(swapped, width, height), np.where(swapped, height, width)
        parts = table_of(len(sizes), [height, width])
        steps = pixel_steps(parts, channels, orientations if is_turned else None)
        steps[:, 0] -= top * steps[:, 1] + left * steps[:, 2]
        return cls(x, y, width, height, steps)
