"""How a GPU's kernels find the pixels of an image in memory, also of one that EXIF data turn.

The eight EXIF orientations differ only in where the upper left pixel of the upright image is stored, and in how far the
next row's and the next column's pixels are from there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpuflow.decode.header import FLIPPED_X, FLIPPED_Y, SWAPPED

__all__ = ["pixel_steps"]


def pixel_steps(
    sizes: NDArray[np.int64], channels: int, orientations: NDArray[np.integer] | None = None
) -> NDArray[np.int64]:
    """How to read interleaved uint8 images upright, [n, 3], in bytes: from the first byte to the upper left pixel, and
    from there to the next row's and the next column's.

    sizes [n, 2]: height and width as stored, one row after the other. orientations [n]: as EXIF counts them; by default
    nothing is turned.
    """
    stored = np.column_stack([sizes[:, 1] * channels, np.full(len(sizes), channels)])
    if orientations is None:
        return np.column_stack([np.zeros(len(sizes), np.int64), stored])
    swapped = orientations >= SWAPPED
    steps = np.where(swapped[:, None], stored[:, ::-1], stored)
    ends = np.where(swapped[:, None], sizes[:, ::-1], sizes) - 1  # the last row and column of the upright image
    flips = np.column_stack([np.isin(orientations, FLIPPED_Y), np.isin(orientations, FLIPPED_X)])
    starts = (ends * steps * flips).sum(axis=1)
    return np.column_stack([starts, np.where(flips, -steps, steps)])
