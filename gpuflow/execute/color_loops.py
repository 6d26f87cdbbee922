"""Colour arithmetic as loops that numba compiles: to the bit what `gpuflow.execute.colors` computes with PyTorch.

PyTorch adds a product in one rounding (fused multiply-add), and so do these loops: in float64 such a sum is exact, and
it is rounded to float32 once. Importing this needs numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import float32, float64, uint8
from numpy.typing import NDArray

from gpuflow.execute.jit import compiled

__all__ = ["adjust_hue", "adjust_saturation", "luma", "multiply_colors"]


@compiled
def _add_product(x: Any, y: Any, total: Any) -> Any:
    return float32(float64(x) * float64(y) + float64(total))


@compiled
def _level(value: Any) -> Any:
    return uint8(min(max(value, float32(0)), float32(255)))


@compiled
def _gray(r: Any, g: Any, b: Any) -> Any:
    red = float32(float32(r) * float32(0.2989))
    return np.floor(_add_product(b, float32(0.114), _add_product(g, float32(0.587), red)))


@compiled
def luma(planes: Any, out: Any) -> None:
    """See `gpuflow.execute.colors.luma`."""
    reds, greens, blues = planes[0], planes[1], planes[2]
    for i in range(reds.size):
        out[i] = _gray(reds[i], greens[i], blues[i])


@compiled
def _saturation_loop(planes: Any, factor: Any, rest: Any) -> None:
    reds, greens, blues = planes[0], planes[1], planes[2]
    for i in range(reds.size):
        r, g, b = reds[i], greens[i], blues[i]
        gray = _gray(r, g, b)
        reds[i] = _level(_add_product(gray, rest, float32(float32(r) * factor)))
        greens[i] = _level(_add_product(gray, rest, float32(float32(g) * factor)))
        blues[i] = _level(_add_product(gray, rest, float32(float32(b) * factor)))


@compiled
def _hue_loop(planes: Any, shift: Any) -> None:
    one, zero, unit, top = float32(1), float32(0), float32(1 / 255), float32(255 + 1 - 1e-3)
    reds, greens, blues = planes[0], planes[1], planes[2]
    for i in range(reds.size):
        r, g, b = float32(reds[i]) * unit, float32(greens[i]) * unit, float32(blues[i]) * unit
        highest, lowest = max(max(r, g), b), min(min(r, g), b)
        spread = highest - lowest
        gray = highest == lowest
        saturation = spread / (one if gray else highest)
        divisor = one if gray else spread
        from_r, from_g, from_b = (highest - r) / divisor, (highest - g) / divisor, (highest - b) / divisor
        if highest == r:
            hue = from_b - from_g
        elif highest == g:
            hue = (from_r + float32(2)) - from_b
        else:
            hue = (from_g + float32(4)) - from_r
        hue = float32(hue * float32(1 / 6)) + one
        hue = float32(hue - np.floor(hue)) + shift
        if hue >= one:
            hue = hue - one
        if hue < zero:
            hue = hue + one
        sixths = hue * float32(6)
        sector = np.floor(sixths)
        part = saturation * (sixths - sector)
        rest = one - saturation
        falling = min(max((one - part) * highest, zero), one)
        rising = min(max((part + rest) * highest, zero), one)
        low = min(max(rest * highest, zero), one)
        if sector == 0 or sector == 6:
            r, g, b = highest, rising, low
        elif sector == 1:
            r, g, b = falling, highest, low
        elif sector == 2:
            r, g, b = low, highest, rising
        elif sector == 3:
            r, g, b = low, falling, highest
        elif sector == 4:
            r, g, b = rising, low, highest
        else:
            r, g, b = highest, low, falling
        reds[i], greens[i], blues[i] = uint8(r * top), uint8(g * top), uint8(b * top)


@compiled
def _matrix_loop(planes: Any, rows: Any) -> None:
    reds, greens, blues = planes[0], planes[1], planes[2]
    for i in range(reds.size):
        r, g, b = reds[i], greens[i], blues[i]
        reds[i] = _weighted(r, g, b, rows[0, 0], rows[0, 1], rows[0, 2], rows[0, 3])
        greens[i] = _weighted(r, g, b, rows[1, 0], rows[1, 1], rows[1, 2], rows[1, 3])
        blues[i] = _weighted(r, g, b, rows[2, 0], rows[2, 1], rows[2, 2], rows[2, 3])


@compiled
def _weighted(r: Any, g: Any, b: Any, x: Any, y: Any, z: Any, rest: Any) -> Any:
    return _level(float32(_add_product(b, z, _add_product(g, y, float32(float32(r) * x))) + rest))


# --- what `gpuflow.execute.colors` calls: planes are uint8 [3, N], contiguous, and are changed ------------------------


def adjust_saturation(planes: NDArray[np.uint8], factor: float) -> None:
    """See `gpuflow.execute.colors.adjust_saturation`."""
    _saturation_loop(planes, float32(factor), float32(1.0 - factor))


def adjust_hue(planes: NDArray[np.uint8], shift: float) -> None:
    """See `gpuflow.execute.colors.adjust_hue`."""
    _hue_loop(planes, float32(shift))


def multiply_colors(planes: NDArray[np.uint8], rows: NDArray[np.float64]) -> None:
    """See `gpuflow.execute.colors.multiply_colors`."""
    weights = rows.copy()
    weights[:, 3] += 0.5
    _matrix_loop(planes, weights.astype(np.float32))
