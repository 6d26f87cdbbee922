"""rotate: turns an image about its centre by a random angle. The image keeps its size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from gpuflow.pipeline import stage as s

__all__ = [
    "Angle",
    "Border",
    "Fill",
    "Rotate",
    "WarpInterpolation",
    "about_center",
    "angle_range",
    "check_fill",
    "lookup_of",
    "rotation",
]

Angle = (
    Annotated[float, s.Bounds(least=0, words=">= 0 or [low, high]")]
    | Annotated[tuple[float, float], s.Bounds(ascending=True)]
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


@dataclass(frozen=True, kw_only=True, repr=False)
class Rotate(s.Geometry):
    """Turn an image about its centre, counterclockwise, as torchvision's RandomRotation does.

    Args:
        degrees: the angle is drawn from [-v, v] for a number v, or from [low, high].
        interpolation: how pixels are resampled, without antialiasing.
        border: what is seen outside the image: `constant` levels, the pixel at the `edge`, or the image again, as in a
            mirror: `reflect`.
        fill: the level of a constant border, or [red, green, blue].
    """

    stage_name: ClassVar[str] = "rotate"
    tolerance: ClassVar[float] = 1.0

    degrees: Angle
    interpolation: WarpInterpolation = "bilinear"
    border: Border = "constant"
    fill: Fill = 0

    @classmethod
    def examples(cls) -> tuple[Rotate, ...]:
        return (
            cls(degrees=30),
            cls(degrees=(20, 20), fill=(9, 200, 50)),
            cls(degrees=(-50, 90), interpolation="nearest"),
            cls(degrees=40, border="reflect"),
            cls(degrees=15, fill=114),
        )

    @property
    def random(self) -> bool:
        low, high = angle_range(self.degrees)
        return low != high

    @property
    def warps(self) -> s.Lookup:
        return lookup_of(self.interpolation, self.border, self.fill)

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        s.require_pixels(self, spec)
        check_fill(self.fill, spec)
        return spec

    def torchvision(self) -> Any:
        if self.border != "constant":
            raise NotImplementedError
        from torchvision.transforms import InterpolationMode, v2

        mode = InterpolationMode(self.interpolation)
        return v2.RandomRotation(angle_range(self.degrees), mode, fill=self.fill)

    def draw(self, keys: s.StageKeys, height: s.Ints, width: s.Ints) -> tuple[s.Move, ...]:
        low, high = angle_range(self.degrees)
        degrees = low + keys.uniform(1)[:, 0] * (high - low)
        return (s.Warp(rotation(degrees, height, width), height, width, *self.warps),)
