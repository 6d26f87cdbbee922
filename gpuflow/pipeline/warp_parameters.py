"""Parameters that geometry stages share: angles, borders and fills; and warps about the centre of an image."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from gpuflow.pipeline import stage as s

__all__ = [
    "Angle",
    "Border",
    "Fill",
    "WarpInterpolation",
    "about_center",
    "angle_range",
    "check_fill",
    "lookup_of",
    "rotation",
]

Angle = (
    Annotated[float, s.Bounds(least=0, limit=3600, words=">= 0 or [low, high]")]
    | Annotated[tuple[float, float], s.Bounds(limit=3600, ascending=True)]
)
"""Degrees: v stands for [-v, v]."""
WarpInterpolation = Literal["nearest", "bilinear"]
Border = Literal["constant", "edge", "reflect"]
Level = Annotated[int, s.Bounds(least=0, most=255)]
Fill = Level | Annotated[tuple[int, int, int], s.Bounds(least=0, most=255)]
"""The levels of pixels outside the image, one for all channels or one for each."""


def angle_range(value: float | tuple[float, float]) -> tuple[float, float]:
    """[low, high] of an angle in degrees."""
    return value if isinstance(value, tuple) else (-value, value)


def lookup_of(interpolation: str, border: str, fill: int | tuple[int, int, int]) -> s.Lookup:
    """The filter of a warp; its fill counts only where the border is constant."""
    levels = fill if isinstance(fill, tuple) else (fill,)
    return s.Lookup(interpolation, border, levels if border == "constant" else (0,))


def check_fill(fill: int | tuple[int, int, int], spec: s.ImageSpec) -> None:
    """Raise ValueError if the fill has another number of levels than the image has channels."""
    if isinstance(fill, tuple) and len(fill) != spec.shape[2]:
        raise ValueError(f"fills with {len(fill)} levels but gets {spec}; give one level")


def about_center(linear: NDArray[np.float64], height: s.Ints, width: s.Ints) -> s.Matrices:
    """Linear maps [N, 2, 2] of the vectors from the centres of images of these sizes, as maps of points [N, 3, 3]."""
    matrix = np.zeros((len(linear), 3, 3))
    matrix[:, :2, :2], matrix[:, 2, 2] = linear, 1
    center = np.stack([width, height], axis=1) / 2
    matrix[:, :2, 2] = center - (linear @ center[:, :, None])[:, :, 0]
    return matrix


def rotation(degrees: NDArray[np.float64], height: s.Ints, width: s.Ints) -> s.Matrices:
    """Maps [N, 3, 3] from the output to the input of images of these sizes that are turned by these angles [N]."""
    angle = np.radians(degrees)
    cos, sin = np.cos(angle), np.sin(angle)
    return about_center(np.stack([cos, -sin, sin, cos], axis=1).reshape(-1, 2, 2), height, width)
