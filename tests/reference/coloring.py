"""Colour operations by PyTorch, torchvision and numpy, and tables of levels."""

from __future__ import annotations

from typing import Any, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision.transforms.v2 import functional

from gpuflow.pipeline.pointwise import Operation, Operations

__all__ = ["colored", "looked_up"]

Pixels = NDArray[np.uint8]
LEVELS = np.arange(256, dtype=np.float32)


def colored(image: Pixels, operations: Operations) -> Pixels:
    """Return sample 0's image [H, W, C] after its operations."""
    planes = np.ascontiguousarray(image.transpose(2, 0, 1))
    for code, factor in zip(operations.codes[0].tolist(), operations.factors[0].tolist(), strict=True):
        planes = _operated(planes, Operation(code), factor, operations)
    return planes.transpose(1, 2, 0)


def looked_up(image: Pixels, table: NDArray[Any], *, planes: bool) -> NDArray[Any]:
    """Return the entries [C, H, W], or [H, W, C], of a table [C, 256] for the levels of an image."""
    result = np.stack([row[image[..., channel]] for channel, row in enumerate(table)])
    return result if planes else result.transpose(1, 2, 0)


def _operated(planes: Pixels, operation: Operation, factor: float, operations: Operations) -> Pixels:
    """Return planes [C, H, W] after one operation."""
    count = len(planes)
    match operation:
        case Operation.BRIGHTNESS:
            return _levels(LEVELS * np.float32(factor))[planes]
        case Operation.CONTRAST:
            mean = float(torch.from_numpy(_luma(planes)).mean())
            rest = np.float64(np.float32(1.0 - factor)) * mean  # PyTorch adds this product in one rounding
            return _levels((LEVELS * np.float32(factor) + rest).astype(np.float32))[planes]
        case Operation.SATURATION if count == 3:
            floats, gray = torch.from_numpy(planes).to(torch.float32), torch.from_numpy(_luma(planes))
            return _levels(floats.mul_(factor).add_(gray, alpha=1.0 - factor).numpy())
        case Operation.HUE if count == 3:
            found: torch.Tensor = functional.adjust_hue_image(torch.from_numpy(planes), factor)
            return found.numpy()
        case Operation.GRAYSCALE if count == 3:
            return np.stack([_luma(planes).astype(np.uint8)] * 3)
        case Operation.TABLE:
            table = operations.tables[int(factor)]
            return np.stack([row[plane] for row, plane in zip(table, planes, strict=False)])
        case Operation.MATRIX:
            return _multiplied(planes, operations.values[int(factor)].reshape(3, 4))
        case Operation.ERASE:
            values = operations.values[int(factor)]
            y, x, height, width = values[:4].astype(int)
            erased = planes.copy()
            erased[:, y : y + height, x : x + width] = values[4 : 4 + count, None, None]
            return erased
        case Operation.AUTOCONTRAST:
            return np.stack([_stretched(plane) for plane in planes])
        case Operation.EQUALIZE:
            return np.stack([_equalized(plane) for plane in planes])
        case Operation.SATURATION | Operation.HUE | Operation.GRAYSCALE | Operation.NONE:
            return planes
        case _:
            assert_never(operation)


def _levels(values: NDArray[np.float32]) -> Pixels:
    """Return values clamped to 0-255 and truncated."""
    return np.clip(values, 0, 255).astype(np.uint8)


def _luma(planes: Pixels) -> NDArray[np.float32]:
    """Return the Rec. 601 luma [N] of planes, rounded down; of a gray image its levels."""
    if len(planes) == 1:
        return planes.reshape(-1).astype(np.float32)
    r, g, b = torch.from_numpy(planes).to(torch.float32)
    gray: torch.Tensor = r.mul_(0.2989).add_(g, alpha=0.587).add_(b, alpha=0.114)
    return gray.floor_().numpy()


def _multiplied(planes: Pixels, rows: NDArray[np.float64]) -> Pixels:
    """Return planes multiplied by a colour matrix in float32, rounded to levels, a half up."""
    r, g, b = torch.from_numpy(np.broadcast_to(planes, (3, *planes.shape[1:])).copy()).to(torch.float32)
    sums = [r.mul(x).add_(g, alpha=y).add_(b, alpha=z).add_(rest + 0.5) for x, y, z, rest in rows.tolist()]
    return np.stack([_levels(total.numpy()) for total in sums[: len(planes)]])


def _stretched(plane: Pixels) -> Pixels:
    """Return a channel that torchvision's autocontrast stretches to 0-255."""
    low, high = np.float32(plane.min()), np.float32(plane.max())
    if low == high:
        return plane
    return _levels((LEVELS - low) / ((high - low) * np.float32(1 / 255)))[plane]


def _equalized(plane: Pixels) -> Pixels:
    """Return a channel whose histogram torchvision equalizes."""
    counts = np.bincount(plane.reshape(-1), minlength=256)
    step = int(plane.size - counts[plane.max()]) // 255
    if step == 0:
        return plane
    below = np.cumsum(counts) - counts
    table: Pixels = np.minimum((below + step // 2) // step, 255).astype(np.uint8)
    return table[plane]
