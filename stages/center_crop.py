"""center_crop: crops the centre of the image. A smaller image is centred on black, as in torchvision."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gpuflow.arrays import Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Size, of_size, size_pair


@dataclass(frozen=True, kw_only=True, repr=False)
class CenterCrop(s.Geometry):
    """Crop the centre of an image. An image that is smaller than the crop, on either side, is centred on black.

    Args:
        size: the result in pixels: the side of a square, or [height, width].
        rounding: where an odd number of pixels is cut off: half of it is rounded to the `nearest` even number for the
            top and the left, as torchvision and timm do, or `down`, as transformers and Albumentations do.

    Examples:
        >>> str(CenterCrop(size=(192, 256)).output(s.ImageSpec(shape=(None, None, 3))))
        'uint8 192x256x3 hwc'
    """

    stage_name = "center_crop"
    late_fields = ("rounding",)

    size: Size
    rounding: Literal["nearest", "down"] = "nearest"

    @classmethod
    def examples(cls) -> tuple[CenterCrop, ...]:
        return (
            cls(size=32),
            cls(size=(20, 160)),
            cls(size=(21, 32), rounding="down"),
        )

    @property
    def pads(self) -> bool:
        return True

    def pads_image(self, spec: s.ImageSpec) -> bool:
        """Return True if the crop may be larger than the image."""
        sides = zip(size_pair(self.size), spec.shape[:2], strict=True)
        return any(side is None or crop > side for crop, side in sides)

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        s.require_pixels(self, spec)
        return of_size(spec, self.size)

    def torchvision(self) -> Any:
        from torchvision.transforms import v2

        if self.rounding == "down":
            return functools.partial(_cut_by_torchvision, size_pair(self.size))
        return v2.CenterCrop(size_pair(self.size))

    def draw(self, keys: s.StageKeys, height: Ints, width: Ints) -> tuple[s.Move, ...]:
        crop_height, crop_width = size_pair(self.size)

        def start(length: Ints, crop: int) -> Ints:
            half = (length - crop) / 2
            inside = (np.rint(half) if self.rounding == "nearest" else np.floor(half)).astype(np.int64)
            return np.where(length >= crop, inside, -((crop - length) // 2))

        full = np.full_like
        y, x = start(height, crop_height), start(width, crop_width)
        return (s.Crop(y, x, full(height, crop_height), full(width, crop_width), margin=max(crop_height, crop_width)),)


def _cut_by_torchvision(size: tuple[int, int], image: Any) -> Any:
    """Return a crop whose place is rounded down, so that torchvision's center_crop has nothing to round."""
    from torchvision.transforms.v2 import functional

    height, width = functional.get_size(image)
    box = min(height, size[0]), min(width, size[1])
    cut = functional.crop(image, (height - box[0]) // 2, (width - box[1]) // 2, *box)
    return functional.center_crop(cut, list(size))
