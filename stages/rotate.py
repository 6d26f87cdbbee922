"""rotate: turns an image by a random angle. The image keeps its size, or grows with `expand`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gpuflow.arrays import Floats, Ints
from gpuflow.errors import Problem
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import (
    Angle,
    Border,
    Center,
    Fill,
    WarpingStage,
    WarpInterpolation,
    expanded_rotation,
    of_size,
    range_of,
    rotation,
)


@s.stage_class
class Rotate(WarpingStage):
    """Turn an image about its centre or another point, counterclockwise, as torchvision's RandomRotation does.

    Args:
        degrees: the angle is drawn from [-v, v] for a number v, or from [low, high].
        center: the point [x, y] that stays in its place, in pixels from the left and the top edge; by default the
            centre of the image.
        expand: whether the result is as large as the whole turned image needs, so that its size depends on the angle.
            It is torchvision's size, unless a corner lies within 2/10,000 of a pixel of a pixel's edge: torchvision
            computes it in float32 and may give one row or column more.
        interpolation: how pixels are resampled, without antialiasing.
        border: what is seen outside the image: `constant` levels, the pixel at the `edge`, or the image again, as in a
            mirror: `reflect` without the pixel at the edge, `symmetric` with it.
        fill: the level of a constant border, or [red, green, blue].

    Examples:
        >>> Rotate(degrees=(90, 90), expand=True).output(s.ImageSpec(shape=(20, 30, 3))).shape
        (30, 20, 3)
    """

    stage_name = "rotate"
    late_fields = ("center", "expand")
    other_names = ("RandomRotation", "SafeRotate")

    degrees: Angle
    center: Center | None = None
    expand: bool = False
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
            cls(degrees=(25, 25), center=(10.0, 33.5)),
            cls(degrees=(30, 30), expand=True, fill=114),
            cls(degrees=70, expand=True, interpolation="nearest"),
        )

    def faults(self) -> Iterator[Problem]:
        if self.expand and self.center is not None:
            rule = "does not go with expand, which moves the whole turned image into the result"
            yield Problem.of("center", rule, action="remove one of them", code="config.conflict")

    @property
    def random(self) -> bool:
        low, high = self._range()
        return low != high

    def _range(self) -> tuple[float, float]:
        return range_of(self.degrees, neutral=0.0)

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        spec = super().output(spec)
        if not self.expand:
            return spec
        height, width, _ = spec.shape
        if self.random or height is None or width is None:
            return of_size(spec, None, None)
        degrees = np.array([self._range()[0]])
        _, *size = self._warp(degrees, np.array([height]), np.array([width]))
        return of_size(spec, *(int(side[0]) for side in size))

    def other_parameters(self) -> dict[str, Any]:
        return {"degrees": self._range(), "expand": self.expand, "center": self.center and list(self.center)}

    def draw(self, keys: s.StageKeys, height: Ints, width: Ints) -> tuple[s.Move, ...]:
        low, high = self._range()
        degrees = low + keys.uniform(1)[:, 0] * (high - low)
        matrix, height, width = self._warp(degrees, height, width)
        return (s.Warp(matrix, height, width, *self.warps),)

    def _warp(self, degrees: Floats, height: Ints, width: Ints) -> tuple[s.Matrices, Ints, Ints]:
        """Return the maps [N, 3, 3] of rotations by these angles [N], and the heights and widths of the results [N]."""
        if self.expand:
            return expanded_rotation(degrees, height, width)
        return rotation(degrees, height, width, self.center), height, width
