"""Parameters that geometry stages share: angles, borders and fills; and warps about the centre of an image."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np

from gpuflow.arrays import Floats, Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.moves import MIRRORS

Angle = (
    Annotated[float, s.Bounds(least=0, limit=3600, words=">= 0 or [low, high]")]
    | Annotated[tuple[float, float], s.Bounds(limit=3600, ascending=True)]
)
"""Degrees: v stands for [-v, v]."""
Center = Annotated[tuple[float, float], s.Bounds(limit=1_000_000)]
"""A point [x, y] in pixels from the left and the top edge of the image."""
WarpInterpolation = Literal["nearest", "bilinear"]
Border = Literal["constant", "edge", "reflect", "symmetric"]
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


class Warping(s.Geometry):
    """A stage that warps, by default to images of the same size: what is seen outside them, and how it resamples."""

    tolerance: ClassVar[float] = 1.0

    interpolation: WarpInterpolation
    border: Border
    fill: Fill

    @property
    def warps(self) -> s.Lookup:
        return lookup_of(self.interpolation, self.border, self.fill)

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        s.require_pixels(self, spec)
        check_fill(self.fill, spec)
        return spec


class Bordered(s.Geometry):
    """A stage that may add pixels around an image: constant levels, or pixels of the image by a nearest warp."""

    border: Border
    fill: Fill

    @property
    def adds_pixels(self) -> bool:
        """Return False if its parameters add none."""
        return True

    @property
    def pads(self) -> bool:
        return self.adds_pixels and self.border == "constant"

    @property
    def padding_fill(self) -> tuple[float, ...]:
        return levels_of(self.fill)

    @property
    def warps(self) -> s.Lookup | None:
        return s.Lookup("nearest", self.border, (0,)) if self.adds_pixels and not self.pads else None

    @property
    def mirrors(self) -> bool:
        return self.adds_pixels and self.border in MIRRORS


def check_fill(fill: int | tuple[int, int, int], spec: s.ImageSpec) -> None:
    """Raise ValueError if the fill has another number of levels than the image has channels."""
    if isinstance(fill, tuple) and len(fill) != spec.shape[2]:
        raise ValueError(f"fills with {len(fill)} levels but gets {spec}; give one level")


def levels_of(fill: int | tuple[int, int, int]) -> tuple[int, ...]:
    """The levels of a padding; black is one level, so that a padding with it and a crop beyond the image are alike."""
    levels = fill if isinstance(fill, tuple) else (fill,)
    return levels if any(levels) else (0,)


def check_mirrors(border: str, padding: tuple[int, int, int, int], spec: s.ImageSpec) -> None:
    """Raise ValueError if an image of this spec has too few pixels to be mirrored for this padding on its sides."""
    left, top, right, bottom = padding
    for side, most in zip(spec.shape[:2], (max(top, bottom), max(left, right)), strict=True):
        if border not in MIRRORS or side is None:
            continue
        if most > (limit := side - MIRRORS[border]):
            raise ValueError(f"mirrors {most} of {side} pixels; pad at most {limit}, or with border: edge")


def about_center(linear: Floats, height: Ints, width: Ints, center: tuple[float, float] | None = None) -> s.Matrices:
    """Linear maps [N, 2, 2] of the vectors from a point, by default the centres of images of these sizes, as maps of
    points [N, 3, 3]."""
    matrix = np.zeros((len(linear), 3, 3))
    matrix[:, :2, :2], matrix[:, 2, 2] = linear, 1
    fixed = np.stack([width, height], axis=1) / 2 if center is None else np.broadcast_to(center, (len(linear), 2))
    matrix[:, :2, 2] = fixed - (linear @ fixed[:, :, None])[:, :, 0]
    return matrix


def rotation(degrees: Floats, height: Ints, width: Ints, center: tuple[float, float] | None = None) -> s.Matrices:
    """Maps [N, 3, 3] from the output to the input of images of these sizes that are turned by these angles [N]."""
    angle = np.radians(degrees)
    cos, sin = np.cos(angle), np.sin(angle)
    return about_center(np.stack([cos, -sin, sin, cos], axis=1).reshape(-1, 2, 2), height, width, center)


def expanded_rotation(degrees: Floats, height: Ints, width: Ints) -> tuple[s.Matrices, Ints, Ints]:
    """As `rotation`, to results that just hold the whole turned images, as torchvision computes them.

    Returns:
        the maps, and the heights and widths of the results [N].
    """
    matrix = rotation(degrees, height, width)
    half = np.stack([width, height], axis=1) / 2
    corners = half[:, None] * np.array([[-1, -1], [-1, 1], [1, 1], [1, -1]])
    ends = corners @ matrix[:, :2, :2].swapaxes(1, 2) + half[:, None]
    low, high = (np.trunc(end * _STEPS) / _STEPS for end in (ends.min(axis=1), ends.max(axis=1)))
    size = (np.ceil(high) - np.floor(low)).astype(np.int64)
    quarter = np.mod(degrees, 180) == 90
    size[quarter] = np.stack([height, width], axis=1)[quarter]
    matrix[:, :2, 2] = half - (matrix[:, :2, :2] @ (size[:, :, None] / 2))[:, :, 0]
    return matrix, size[:, 1], size[:, 0]


_STEPS = 10_000
"""Corners are cut to this part of a pixel, so that rounding errors add no pixel."""
