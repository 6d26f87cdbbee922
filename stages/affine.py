"""affine: turns, shifts, scales and shears an image about a point at random. The image keeps its size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np

from gpuflow.arrays import Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import (
    Angle,
    Border,
    Center,
    Fill,
    WarpingStage,
    WarpInterpolation,
    about_center,
    range_of,
)

_Shear = (
    Annotated[float, s.Bounds(least=0, most=89, words="within [0, 89], [low, high] or [x low, x high, y low, y high]")]
    | Annotated[tuple[float, float] | tuple[float, float, float, float], s.Bounds(least=-89, most=89)]
)


@s.stage_class
class Affine(WarpingStage):
    """Turn, shift, scale and shear an image about its centre or another point, as torchvision's RandomAffine does.

    Args:
        degrees: the angle, clockwise, is drawn from [-v, v] for a number v, or from [low, high].
        translate: the largest shift to the right and down, as fractions of the width and the height; in whole pixels.
        scale: the scale is drawn from [low, high].
        shear: the angle of the shear along x is drawn from [-v, v] for a number v, or from [low, high]; along y too,
            from the last two of [x low, x high, y low, y high].
        center: the point [x, y] that stays in its place, in pixels from the left and the top edge; by default the
            centre of the image.
        interpolation: how pixels are resampled, without antialiasing.
        border: what is seen outside the image: `constant` levels, the pixel at the `edge`, or the image again, as in a
            mirror: `reflect` without the pixel at the edge, `symmetric` with it.
        fill: the level of a constant border, or [red, green, blue].
    """

    stage_name = "affine"
    late_fields = ("center",)
    other_names = ("RandomAffine", "ShiftScaleRotate", "Shear", "Translate")
    other_keys = {"rotate": "degrees", "scale_limit": "scale", "shift_limit": "translate"}

    degrees: Angle = 0.0
    translate: Annotated[tuple[float, float], s.Bounds(least=0, most=1, words="fractions within [0, 1]")] = (0.0, 0.0)
    scale: Annotated[tuple[float, float], s.Bounds(least=0.001, limit=1000, ascending=True)] = (1.0, 1.0)
    shear: _Shear = 0.0
    center: Center | None = None
    interpolation: WarpInterpolation = "bilinear"
    border: Border = "constant"
    fill: Fill = 0

    @classmethod
    def examples(cls) -> tuple[Affine, ...]:
        return (
            cls(),
            cls(degrees=20, translate=(0.1, 0.2), scale=(0.5, 1.5), shear=(-20.0, 30.0, 5.0, 15.0), fill=114),
            cls(degrees=(10, 10), scale=(1.3, 1.3), shear=(8, 8)),
            cls(scale=(0.3, 2.0), border="edge", interpolation="nearest"),
            cls(degrees=(30, 30), scale=(0.8, 0.8), shear=(5, 5), center=(11.5, 40.0)),
        )

    def faults(self) -> Iterator[tuple[Any, ...]]:
        if isinstance(self.shear, tuple) and any(low > high for low, high in self._ranges()[2:]):
            yield "shear", "must have each low <= high", list(self.shear)

    def _ranges(self) -> tuple[tuple[float, float], ...]:
        """Return [low, high] of the angle, the scale and the two shears."""
        shear = self.shear if isinstance(self.shear, tuple) else (-self.shear, self.shear)
        along_x, along_y = (shear[:2], shear[2:]) if len(shear) == 4 else (shear, (0.0, 0.0))
        return range_of(self.degrees, neutral=0.0), self.scale, along_x, along_y

    @property
    def random(self) -> bool:
        return any(self.translate) or any(low != high for low, high in self._ranges())

    def other_parameters(self) -> dict[str, Any]:
        degrees, scale, along_x, along_y = self._ranges()
        moved = {"degrees": degrees, "translate": self.translate, "scale": scale, "shear": (*along_x, *along_y)}
        return {**moved, "center": self.center and list(self.center)}

    def draw(self, keys: s.StageKeys, height: Ints, width: Ints) -> tuple[s.Move, ...]:
        numbers = keys.uniform(6)
        low, high = np.array(self._ranges()).T
        angle, scale, shear_x, shear_y = (low + numbers[:, [0, 3, 4, 5]] * (high - low)).T
        angle, shear_x, shear_y = np.radians(angle), np.radians(shear_x), np.radians(shear_y)
        reach = np.stack([width * self.translate[0], height * self.translate[1]], axis=1)
        shift = np.rint((2 * numbers[:, 1:3] - 1) * reach)
        # The map of the image's points turns and shears, with determinant 1; the warp's is its inverse.
        a, c = np.cos(angle - shear_y) / np.cos(shear_y), np.sin(angle - shear_y) / np.cos(shear_y)
        b, d = -(a * np.tan(shear_x) + np.sin(angle)), np.cos(angle) - c * np.tan(shear_x)
        linear = np.stack([d, -b, -c, a], axis=1).reshape(-1, 2, 2) / scale[:, None, None]
        matrix = about_center(linear, height, width, self.center)
        matrix[:, :2, 2] -= (linear @ shift[:, :, None])[:, :, 0]
        return (s.Warp(matrix, height, width, *self.warps),)
