"""Runs the colour operations of one sample on the CPU: the reference for the GPU's kernel.

Most operations are torchvision v2's, to the bit. Planes are uint8 arrays [C, H, W]; C is 1, or 3: red, green, blue.
"""

from __future__ import annotations

from typing import Any, assert_never

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.execute import colors
from gpuflow.execute.resample import Scratch
from gpuflow.pipeline.pointwise import Operation, Operations

__all__ = ["compile_operations", "run_pointwise"]

_LEVELS = np.arange(256, dtype=np.float32)
_LOOPS = {
    Operation.CONTRAST: "luma",
    Operation.GRAYSCALE: "luma",
    Operation.SATURATION: "adjust_saturation",
    Operation.HUE: "adjust_hue",
    Operation.MATRIX: "multiply_colors",
}
"""The function of `gpuflow.execute.colors` that an operation calls."""


def compile_operations(operations: Operations) -> None:
    """Compile the loops that run these operations."""
    for code in np.unique(operations.codes).tolist():
        if (name := _LOOPS.get(Operation(code))) is not None:
            colors.compile_loop(name)


def _new_memory(_: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return np.empty(shape, np.uint8)


def run_pointwise(
    image: NDArray[np.uint8],
    operations: Operations,
    i: int,
    table: NDArray[Any] | None,
    *,
    planes: bool,
    out: NDArray[Any] | None,
    scratch: Scratch = _new_memory,
) -> NDArray[Any]:
    """Run sample i's operations on its image [H, W, C], then look levels up in a table, if there is one.

    Args:
        image: is not changed.
        operations: of all samples.
        table: [C, 256] in the result's dtype.
        planes: the result of the table is [C, H, W], and [H, W, C] otherwise.
        out: receives the result, if given.
    """
    height, width, channels = image.shape
    changed = [at for at, code in enumerate(operations.codes[i].tolist()) if code != Operation.NONE]
    parts = scratch("planes", (channels, height, width)) if changed or (planes and table is not None) else None
    if parts is not None:
        cv2.split(image, list(parts))
        for at in changed:
            _operate(parts, operations, i, at, scratch)
    if table is None:
        return image if parts is None else cv2.merge(list(parts), dst=out).reshape(image.shape)
    if planes:
        assert parts is not None
        out = np.empty((channels, height, width), table.dtype) if out is None else out
        for part, row, target in zip(parts, table, out, strict=True):
            cv2.LUT(part, row, dst=target)
        return out
    merged = image if parts is None else cv2.merge(list(parts)).reshape(image.shape)
    return cv2.LUT(merged, table.T[None], dst=out).reshape(image.shape)


def _operate(planes: NDArray[np.uint8], operations: Operations, i: int, at: int, scratch: Scratch) -> None:
    """Change planes [C, H, W] by the operation number `at` of sample i, which is not NONE."""
    factor, operation = float(operations.factors[i, at]), Operation(int(operations.codes[i, at]))
    pixels, colored = planes.reshape(len(planes), -1), len(planes) == 3
    match operation:
        case Operation.BRIGHTNESS:
            _look_up(planes, [_to_levels(_LEVELS * np.float32(factor))])
        case Operation.CONTRAST:
            mean = float(torch.from_numpy(_luma(pixels, scratch)).mean())
            rest = np.float64(np.float32(1.0 - factor)) * mean  # PyTorch adds this product in one rounding
            _look_up(planes, [_to_levels((_LEVELS * np.float32(factor) + rest).astype(np.float32))])
        case Operation.SATURATION if colored:
            colors.adjust_saturation(pixels, factor)
        case Operation.HUE if colored:
            colors.adjust_hue(pixels, factor)
        case Operation.GRAYSCALE if colored:
            np.copyto(pixels, _luma(pixels, scratch), casting="unsafe")
        case Operation.TABLE:
            _look_up(planes, operations.tables[int(factor)])
        case Operation.MATRIX:
            _multiply(pixels, operations.values[int(factor)].reshape(3, 4))
        case Operation.ERASE:
            _erase(planes, operations.values[int(factor)])
        case Operation.AUTOCONTRAST:
            _look_up(planes, [_stretch(plane) for plane in planes])
        case Operation.EQUALIZE:
            _look_up(planes, [_equalize(plane) for plane in planes])
        case Operation.SATURATION | Operation.HUE | Operation.GRAYSCALE | Operation.NONE:
            pass  # gray images stay as they are
        case _:
            assert_never(operation)


def _to_levels(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Clamped and truncated."""
    levels: NDArray[np.uint8] = np.minimum(np.maximum(values, 0), 255).astype(np.uint8)
    return levels


def _luma(pixels: NDArray[np.uint8], scratch: Scratch) -> NDArray[np.float32]:
    """Rec. 601 luma of [C, N] rounded down; of a gray image its levels."""
    luma = scratch("luma", (4 * pixels.shape[1],)).view(np.float32)
    if len(pixels) == 3:
        colors.luma(pixels, luma)
    else:
        luma[:] = pixels[0]
    return luma


def _look_up(planes: NDArray[np.uint8], tables: Any) -> None:
    """Look up levels in each channel's table, uint8 [256], or in one table for all channels."""
    if len(tables) == 1:
        rows = planes.reshape(-1, planes.shape[2])
        cv2.LUT(rows, tables[0], dst=rows)
        return
    for plane, table in zip(planes, tables, strict=False):
        cv2.LUT(plane, table, dst=plane)


def _multiply(pixels: NDArray[np.uint8], rows: NDArray[np.float64]) -> None:
    if len(pixels) == 3:
        colors.multiply_colors(pixels, rows)
        return
    same = np.repeat(pixels, 3, axis=0)  # equal red, green and blue
    colors.multiply_colors(same, rows)
    pixels[0] = same[0]


def _erase(planes: NDArray[np.uint8], values: NDArray[np.float64]) -> None:
    (y, x, height, width), color = values[:4].astype(int).tolist(), values[4 : 4 + len(planes)].astype(np.uint8)
    planes[:, y : y + height, x : x + width] = color[:, None, None]


def _stretch(plane: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The table by which torchvision's autocontrast stretches a channel to 0-255."""
    low, high = np.float32(plane.min()), np.float32(plane.max())
    scale = (high - low) * np.float32(1 / 255)
    levels = np.arange(256, dtype=np.float32)
    stretched: NDArray[np.float32] = np.clip((levels - low) / scale, 0, 255) if high > low else levels
    return stretched.astype(np.uint8)


def _equalize(plane: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The table by which torchvision equalizes a channel's histogram."""
    counts = np.bincount(plane.reshape(-1), minlength=256)
    step = int(plane.size - counts[plane.max()]) // 255
    if step == 0:
        return np.arange(256, dtype=np.uint8)
    below = np.cumsum(counts) - counts
    return np.asarray(np.minimum((below + step // 2) // step, 255), np.uint8)
