"""Resamples an image, or only the part of the result that is needed, as torchvision v2 does on uint8 tensors.

torch resamples the rows first, rounds to uint8, and then resamples the columns. A part of the result is computed in the
same two passes, strip by strip, so its pixels are those of the whole result and the rest of it is never in memory. With
`nearest` only the pixels of the part are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Scratch", "resample", "resample_part"]

Scratch = Callable[[str, tuple[int, ...]], NDArray[np.uint8]]
"""Memory for intermediate pixels, by name and shape. Its content is undefined."""

_STRIP_BYTES = 1 << 20
"""The size of a strip, unless fewer lines than these are larger."""
_STRIP_LINES, _LONG_STRIP_BYTES = 16, 1 << 25
"""As many lines are in a strip if this size holds them, however long: torch computes the weights along a line anew for
each strip, which takes as long as 16 lines."""
_COLUMNS_BYTES = 1 << 26
"""The largest size of what the first pass gives. A larger one is made and used in several parts."""
_REACH = {"bilinear": 1, "bicubic": 2}
"""How far from a pixel's centre a filter reads at most, in pixels of the smaller image."""


def resample(
    image: NDArray[np.uint8], size: Sequence[int], interpolation: str, antialias: bool, out: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Resample a uint8 HWC image to size = (height, width) into `out`, as torchvision v2 does on uint8 tensors.

    It calls the same operators as torchvision, with their results written in place: fixed-point weights, rounded to
    uint8. `out` must be contiguous, because they ignore other strides.
    """
    height, width = size
    if image.shape[:2] == (height, width):
        np.copyto(out, image)
        return out
    nn: Any = torch._C._nn
    source = torch.from_numpy(image).permute(2, 0, 1)[None]
    target = torch.from_numpy(out).permute(2, 0, 1)[None]
    if interpolation == "nearest":
        nn.upsample_nearest2d(source, (height, width), None, None, out=target)
    elif antialias:
        smooth = {"bilinear": nn._upsample_bilinear2d_aa, "bicubic": nn._upsample_bicubic2d_aa}
        smooth[interpolation](source, (height, width), False, None, None, out=target)
    else:
        sharp = {"bilinear": nn.upsample_bilinear2d, "bicubic": nn.upsample_bicubic2d}
        sharp[interpolation](source, (height, width), False, None, None, out=target)
    return out


def resample_part(
    image: NDArray[np.uint8],
    grid: Sequence[int],
    part: tuple[int, int, int, int],
    interpolation: str,
    antialias: bool,
    out: NDArray[np.uint8],
    scratch: Scratch,
) -> None:
    """Write the part (y, x, height, width) of what `resample` to `grid` gives into `out`, bit for bit.

    Takes no more memory than a strip of the whole result, and a part of the image as wide as the result.
    """
    (y, x, height, width), channels = part, image.shape[2]
    whole = (height, width) == tuple(grid) and image.shape[0] * width * channels <= _COLUMNS_BYTES
    if whole and out.flags.c_contiguous:
        resample(image, grid, interpolation, antialias, out)
        return
    if image.shape[:2] == tuple(grid):
        np.copyto(out, image[y : y + height, x : x + width])
        return
    if interpolation == "nearest":
        _pick(image, grid, part, out)
        return
    filters = interpolation, antialias
    rows = _rows_read(image.shape[0], grid[0], y, height, interpolation)
    step = max(1, _COLUMNS_BYTES // (image.shape[0] * channels))
    for left in range(0, width, step):
        count = min(step, width - left)
        columns = _across(image, rows, grid[1], (x + left, count), filters, scratch)
        _down(columns, grid[0], (y, height), filters, out[:, left : left + count], scratch)


def _pick(
    image: NDArray[np.uint8], grid: Sequence[int], part: tuple[int, int, int, int], out: NDArray[np.uint8]
) -> None:
    """As `resample_part` with `nearest`."""
    y, x, height, width = part
    rows = _nearest(image.shape[0], grid[0])[y : y + height]
    columns = _nearest(image.shape[1], grid[1])[x : x + width]
    lines = _lines(image.shape[1] * image.shape[2])
    for top in range(0, height, lines):
        np.copyto(out[top : top + lines], image[rows[top : top + lines]][:, columns])


def _nearest(length: int, grid: int) -> NDArray[np.uint32]:
    """The place in a line of `length` pixels from which torch takes each of `grid` pixels."""
    places = np.arange(length, dtype=np.uint32).view(np.uint8).reshape(1, length, 4)
    return resample(places, (1, grid), "nearest", False, np.empty((1, grid, 4), np.uint8)).view(np.uint32).reshape(grid)


def _lines(line_bytes: int) -> int:
    """How many lines of this size make a strip."""
    return max(1, _STRIP_BYTES // line_bytes, min(_STRIP_LINES, _LONG_STRIP_BYTES // line_bytes))


def _across(
    image: NDArray[np.uint8],
    rows: tuple[int, int],
    grid_width: int,
    columns: tuple[int, int],
    filters: tuple[str, bool],
    scratch: Scratch,
) -> NDArray[np.uint8]:
    """The first pass: each of `rows` (start, stop) resampled to `grid_width`, of which (x, count) columns are kept.

    Returns [image height, count, C]; other rows than these are undefined.
    """
    height, width, channels = image.shape
    x, count = columns
    if grid_width == width:
        return image[:, x : x + count]
    kept = scratch("columns", (height, count, channels))
    start, stop = rows
    lines = min(_lines(grid_width * channels), stop - start)
    strip = scratch("strip", (lines, grid_width, channels))
    for top in range(start, stop, lines):
        bottom = min(top + lines, stop)
        resampled = resample(image[top:bottom], (bottom - top, grid_width), *filters, strip[: bottom - top])
        np.copyto(kept[top:bottom], resampled[:, x : x + count])
    return kept


def _down(
    columns: NDArray[np.uint8],
    grid_height: int,
    rows: tuple[int, int],
    filters: tuple[str, bool],
    out: NDArray[np.uint8],
    scratch: Scratch,
) -> None:
    """The second pass: each column resampled to `grid_height`, of which (y, count) rows are written to `out`."""
    height, width, channels = columns.shape
    y, count = rows
    if grid_height == height:
        np.copyto(out, columns[y : y + count])
        return
    wide = min(_lines(grid_height * channels), width)
    for left in range(0, width, wide):
        right = min(left + wide, width)
        strip = scratch("strip", (grid_height, right - left, channels))
        resample(columns[:, left:right], (grid_height, right - left), *filters, strip)
        np.copyto(out[:, left:right], strip[y : y + count])


def _rows_read(height: int, grid_height: int, y: int, count: int, interpolation: str) -> tuple[int, int]:
    """A range (start, stop) of the image's rows that holds all that the rows [y, y + count) of the result depend on."""
    if grid_height == height:
        return y, y + count
    scale = height / grid_height
    reach = _REACH[interpolation] * max(scale, 1.0) + 2
    start, stop = math.floor((y + 0.5) * scale - reach), math.ceil((y + count - 0.5) * scale + reach)
    return max(0, start), min(height, stop)
