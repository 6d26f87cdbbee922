"""Resamples an image as torchvision v2 does on uint8 tensors: the whole grid by torch, of which a window is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.pipeline.program import Resampling

__all__ = ["resampled"]

Pixels = NDArray[np.uint8]


def resampled(image: Pixels, drawn: Resampling) -> Pixels:
    """Return sample 0's window of its image [H, W, C]."""
    y, x, height, width = drawn.box[0]
    box = _mirrored(image[y : y + height, x : x + width], drawn.mirrors[0])
    grid = _resized(box, tuple(drawn.grid[0].tolist()), drawn.interpolation, drawn.antialias)
    (y, x, height, width), (top, left, rows, columns) = drawn.window[0], drawn.shown[0]
    window = np.empty((height, width, image.shape[2]), np.uint8)
    window[...] = drawn.fill
    y0, x0, y1, x1 = max(y, top), max(x, left), min(y + height, top + rows), min(x + width, left + columns)
    if y0 < y1 and x0 < x1:
        window[y0 - y : y1 - y, x0 - x : x1 - x] = grid[y0:y1, x0:x1]
    return _mirrored(window, drawn.flips[0])


def _mirrored(image: Pixels, flips: NDArray[np.bool_]) -> Pixels:
    vertical, horizontal = flips
    return image[:: -1 if vertical else 1, :: -1 if horizontal else 1].copy()


def _resized(image: Pixels, size: tuple[int, ...], interpolation: str, antialias: bool) -> Pixels:
    """Call torchvision's operators. They write to channels_last memory, as torch 2.11 fails on planes of one pixel."""
    if image.shape[:2] == size:
        return image
    result = np.empty((*size, image.shape[2]), np.uint8)
    operators: Any = torch._C._nn
    source = torch.from_numpy(image).permute(2, 0, 1)[None]
    target = torch.from_numpy(result).permute(2, 0, 1)[None]
    if interpolation == "nearest":
        operators.upsample_nearest2d(source, size, None, None, out=target)
    elif antialias:
        operator = getattr(operators, f"_upsample_{interpolation}2d_aa")
        operator(source, size, False, None, None, out=target)
    else:
        operator = getattr(operators, f"upsample_{interpolation}2d")
        operator(source, size, False, None, None, out=target)
    return result
