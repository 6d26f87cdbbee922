"""Runs the colour operations of one sample on the CPU: the reference for the GPU's kernel.

Most operations are torchvision v2's, to the bit. Planes are uint8 tensors [C, H, W]; C is 1, or 3: red, green, blue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, assert_never

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.pipeline.pointwise import Operation, Operations

__all__ = ["run_pointwise"]

_STRIP_PIXELS = 2**15
"""So many pixels are computed at a time: their float32 planes stay in a core's cache."""
_LEVELS = torch.arange(256, dtype=torch.uint8)


def run_pointwise(
    image: NDArray[np.uint8],
    operations: Operations,
    i: int,
    table: NDArray[Any] | None,
    *,
    planes: bool,
    out: NDArray[Any] | None,
) -> NDArray[Any]:
    """Run sample i's operations on its image [H, W, C], then look levels up in a table, if there is one.

    Args:
        image: is not changed. operations: of all samples.
        table: [C, 256] in the result's dtype. planes: the result of the table is [C, H, W], and [H, W, C] otherwise.
        out: receives the result, if given.
    """
    changed = [at for at, code in enumerate(operations.codes[i].tolist()) if code != Operation.NONE]
    parts = cv2.split(image) if changed or planes else []
    if changed:
        result = torch.from_numpy(np.stack(parts))
        for at in changed:
            result = _operate(result, operations, i, at)
        parts = list(result.numpy())
    if table is None:
        return cv2.merge(parts, dst=out).reshape(image.shape) if changed else image
    if planes:
        out = np.empty((len(parts), *image.shape[:2]), table.dtype) if out is None else out
        for part, row, target in zip(parts, table, out, strict=True):
            cv2.LUT(part, row, dst=target)
        return out
    merged = cv2.merge(parts).reshape(image.shape) if changed else image
    return cv2.LUT(merged, table.T[None], dst=out).reshape(image.shape)


def _operate(planes: torch.Tensor, operations: Operations, i: int, at: int) -> torch.Tensor:
    """The operation number `at` of sample i, which is not NONE."""
    factor, operation = float(operations.factors[i, at]), Operation(int(operations.codes[i, at]))
    match operation:
        case Operation.BRIGHTNESS:
            return _look_up(planes, _LEVELS.mul(factor))
        case Operation.CONTRAST:
            return _look_up(planes, _LEVELS.mul(factor).add_(_luma(planes).mean(), alpha=1.0 - factor))
        case Operation.SATURATION:
            return planes if len(planes) == 1 else _in_strips(planes, lambda part: _saturate(part, factor))
        case Operation.HUE:
            return _in_strips(planes, lambda part: _hue(part, factor))
        case Operation.GRAYSCALE:
            return planes if len(planes) == 1 else _luma(planes).to(torch.uint8).expand(planes.shape).contiguous()
        case Operation.TABLE:
            return _by_channel(planes, operations.tables[int(factor)])
        case Operation.MATRIX:
            rows = operations.values[int(factor)].reshape(3, 4).tolist()
            return _in_strips(planes, lambda part: _matrix(part, rows))
        case Operation.ERASE:
            return _erase(planes, operations.values[int(factor)])
        case Operation.AUTOCONTRAST:
            return _by_channel(planes, [_stretch(plane) for plane in planes.numpy()])
        case Operation.EQUALIZE:
            return _by_channel(planes, [_equalize(plane) for plane in planes.numpy()])
        case Operation.NONE:
            return planes
        case _:
            assert_never(operation)


def _in_strips(planes: torch.Tensor, operation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """An operation that changes each pixel for itself, on some rows after the other."""
    rows = max(1, _STRIP_PIXELS // planes.shape[2])
    if rows >= planes.shape[1]:
        return operation(planes)
    result = torch.empty_like(planes)
    for first in range(0, planes.shape[1], rows):
        result[:, first : first + rows] = operation(planes[:, first : first + rows])
    return result


def _saturate(planes: torch.Tensor, factor: float) -> torch.Tensor:
    return _to_levels(planes.mul(factor).add_(_luma(planes), alpha=1.0 - factor))


def _to_levels(values: torch.Tensor) -> torch.Tensor:
    return values.clamp_(0, 255).to(torch.uint8)


def _luma(planes: torch.Tensor) -> torch.Tensor:
    """Rec. 601 luma rounded down, float32 [1, H, W]."""
    if len(planes) == 1:
        return planes.to(torch.float32)
    r, g, b = planes
    luma: torch.Tensor = r.mul(0.2989).add_(g, alpha=0.587).add_(b, alpha=0.114)
    return luma.floor_()[None]


def _look_up(planes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Each level's value, clamped and truncated; one table for all channels."""
    table = _to_levels(values).reshape(256).numpy()
    return torch.from_numpy(cv2.LUT(planes.numpy().reshape(-1, planes.shape[-1]), table)).view(planes.shape)


def _by_channel(planes: torch.Tensor, tables: Any) -> torch.Tensor:
    """Look up each channel's levels in that channel's table, uint8 [256]."""
    return torch.from_numpy(np.stack([cv2.LUT(plane, row) for plane, row in zip(planes.numpy(), tables, strict=False)]))


def _hue(planes: torch.Tensor, shift: float) -> torch.Tensor:
    from torchvision.transforms.v2.functional import adjust_hue_image

    return adjust_hue_image(planes, shift)  # type: ignore[no-any-return]


def _matrix(planes: torch.Tensor, rows: list[list[float]]) -> torch.Tensor:
    r, g, b = planes if len(planes) == 3 else planes.expand(3, -1, -1)
    sums = [r.mul(x).add_(g, alpha=y).add_(b, alpha=z).add_(rest + 0.5) for x, y, z, rest in rows[: len(planes)]]
    return _to_levels(torch.stack(sums))


def _erase(planes: torch.Tensor, values: NDArray[np.float64]) -> torch.Tensor:
    (y, x, height, width), color = values[:4].astype(int).tolist(), values[4 : 4 + len(planes)].astype(np.uint8)
    planes[:, y : y + height, x : x + width] = torch.from_numpy(color)[:, None, None]
    return planes


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
