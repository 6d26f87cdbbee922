"""rotate: turns an image about its centre by a random angle. The image keeps its size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gpuflow.pipeline import stage as s
from gpuflow.pipeline.warp_parameters import (
    Angle,
    Border,
    Fill,
    WarpInterpolation,
    angle_range,
    check_fill,
    lookup_of,
    rotation,
)

__all__ = ["Rotate"]


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
    other_names: ClassVar[tuple[str, ...]] = ("RandomRotation", "SafeRotate")

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
