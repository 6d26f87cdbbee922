"""pad: adds rows and columns of a level, of the pixels at the edge, or of the mirrored image."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuflow.arrays import Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Border, Bordered, Fill, Padding, check_mirrors, sides_of


@s.stage_class
class Pad(Bordered):
    """Add rows and columns to an image, as torchvision's Pad does.

    Args:
        padding: the number of pixels on each side, [left and right, top and bottom], or [left, top, right, bottom].
        border: `constant` levels, the pixel at the `edge`, or the image as in a mirror, without the pixel at the edge:
            `reflect`, which takes less padding than the image has pixels; or with it: `symmetric`, which takes as much.
        fill: the level of a constant border, or [red, green, blue].

    Examples:
        >>> str(Pad(padding=(8, 2)).output(s.ImageSpec(shape=(28, 28, 1))))
        'uint8 32x44x1 hwc'
    """

    stage_name = "pad"

    padding: Padding
    border: Border = "constant"
    fill: Fill = 0

    @classmethod
    def examples(cls) -> tuple[Pad, ...]:
        return (
            cls(padding=5),
            cls(padding=(3, 0)),
            cls(padding=(0, 4, 9, 2), fill=(9, 200, 50)),
            cls(padding=6, border="edge"),
            cls(padding=(1, 2, 3, 4), border="reflect"),
            cls(padding=5, fill=114),
            cls(padding=(4, 0, 3, 7), border="symmetric"),
        )

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        spec = super().output(spec)
        left, top, right, bottom = sides_of(self.padding)
        height, width, channels = spec.shape
        check_mirrors(self.border, (left, top, right, bottom), spec)
        padded = (height and height + top + bottom, width and width + left + right)
        shorter = spec.shorter + 2 * left if spec.shorter is not None and left == top == right == bottom else None
        return spec.replace(shape=(*padded, channels), shorter=shorter)

    def torchvision(self) -> Any:
        from torchvision.transforms import v2

        return v2.Pad(list(sides_of(self.padding)), self.fill, self.border)

    def draw(self, keys: s.StageKeys, height: Ints, width: Ints) -> tuple[s.Move, ...]:
        left, top, right, bottom = (np.full_like(height, side) for side in sides_of(self.padding))
        return (s.Pad(top, bottom, left, right, self.border, self.padding_fill if self.pads else (0,)),)
