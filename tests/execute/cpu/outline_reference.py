"""The pixels inside an outline by numpy, as pycocotools' rleFrPoly finds them: a reference for native/mask.c."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["filled"]

_SCALE = 5
"""pycocotools draws outlines on a grid that is finer than the pixels by this factor."""


def filled(outline: NDArray[np.float64], height: int, width: int) -> NDArray[np.uint8]:
    """Return the pixels of a closed outline [n, 2], 0 or 1, [height, width]."""
    turns = _turns((_SCALE * outline + 0.5).astype(np.int64), height, width)
    inside = np.zeros(width * height, np.uint8)
    np.bitwise_xor.at(inside, turns[turns < height * width], 1)
    return np.bitwise_xor.accumulate(inside).reshape(width, height).T


def _turns(points: NDArray[np.int64], height: int, width: int) -> NDArray[np.int64]:
    """Where, counting pixels column by column, the inside of a closed outline begins or ends.

    points [n, 2]: x and y of its corners, on the finer grid.
    """
    x, y = points[:, 0], points[:, 1]
    x_end, y_end = np.roll(x, -1), np.roll(y, -1)
    dx, dy = np.abs(x - x_end), np.abs(y - y_end)
    flat = dx >= dy
    backwards = np.where(flat, x > x_end, y > y_end)
    x_start, x_end = np.where(backwards, x_end, x), np.where(backwards, x, x_end)
    y_start, y_end = np.where(backwards, y_end, y), np.where(backwards, y, y_end)
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.where(flat, (y_end - y_start) / dx, (x_end - x_start) / dy)
    slope = np.nan_to_num(slope)
    length = np.maximum(dx, dy)
    edge = np.repeat(np.arange(len(length)), length + 1)
    step = np.arange(len(edge)) - np.repeat(np.cumsum(length + 1) - (length + 1), length + 1)
    step = np.where(backwards[edge], length[edge] - step, step)
    across = np.where(flat, x_start, y_start)[edge] + step
    other = (np.where(flat, y_start, x_start)[edge] + slope[edge] * step + 0.5).astype(np.int64)
    u, v = np.where(flat[edge], across, other), np.where(flat[edge], other, across)
    crossing = u[1:] != u[:-1]
    column = (np.where(u[1:] < u[:-1], u[1:], u[1:] - 1)[crossing] + 0.5) / _SCALE - 0.5
    row = (np.minimum(v[1:], v[:-1])[crossing] + 0.5) / _SCALE - 0.5
    inside = (np.floor(column) == column) & (column >= 0) & (column <= width - 1)
    row = np.ceil(np.clip(row, 0, height))
    turns: NDArray[np.int64] = (column * height + row)[inside].astype(np.int64)
    return turns
