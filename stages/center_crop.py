"""center_crop: crops the centre of the image. A smaller image is centred on black or on its mirror image."""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np

from gpuflow.arrays import Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Bordered, Size, check_mirrors, moved_by_torchvision, of_size, size_pair


@s.stage_class
class CenterCrop(Bordered):
    """Crop the centre of an image. An image that is smaller than the crop, on either side, is centred on a border.

    Args:
        size: the result in pixels: the side of a square, or [height, width].
        rounding: where an odd number of pixels is cut off: half of it is rounded to the `nearest` even number for the
            top and the left, as torchvision and timm do, or `down`, as transformers and Albumentations do.
        border: what surrounds a smaller image: `constant` black, as in torchvision, or the image as in a mirror,
            without the pixel at the edge: `reflect`, which takes less padding than the image has pixels.

    Examples:
        >>> str(CenterCrop(size=(192, 256)).output(s.ImageSpec(shape=(None, None, 3))))
        'uint8 192x256x3 hwc'
    """

    stage_name = "center_crop"
    late_fields = ("rounding", "border")
    fill = 0

    size: Size
    rounding: Literal["nearest", "down"] = "nearest"
    border: Literal["constant", "reflect"] = "constant"

    @classmethod
    def examples(cls) -> tuple[CenterCrop, ...]:
        return (
            cls(size=32),
            cls(size=(20, 160)),
            cls(size=(21, 32), rounding="down"),
            cls(size=(20, 70), border="reflect"),
        )

    def pads_image(self, spec: s.ImageSpec) -> bool:
        """Return True if the crop may be larger than the image."""
        sides = zip(size_pair(self.size), spec.shape[:2], strict=True)
        return self.pads and any(side is None or crop > side for crop, side in sides)

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        spec, size = super().output(spec), size_pair(self.size)
        rows, columns = (max(crop - (side or crop), 0) for crop, side in zip(size, spec.shape, strict=False))
        more = (columns + 1) // 2, (rows + 1) // 2
        check_mirrors(self.border, (*more, *more), spec)
        return of_size(spec, *size)

    def torchvision(self) -> Any:
        from torchvision.transforms import v2

        if not self.pads:
            raise NotImplementedError("torchvision centres a smaller image on black")
        if self.rounding == "down":
            return functools.partial(moved_by_torchvision, self)
        return v2.CenterCrop(size_pair(self.size))

    def draw(self, keys: s.StageKeys, height: Ints, width: Ints) -> tuple[s.Move, ...]:
        crop_height, crop_width = size_pair(self.size)

        def start(length: Ints, crop: int) -> Ints:
            half = (length - crop) / 2
            inside = (np.rint(half) if self.rounding == "nearest" else np.floor(half)).astype(np.int64)
            return np.where(length >= crop, inside, -((crop - length) // 2))

        y, x = start(height, crop_height), start(width, crop_width)
        box = np.full_like(height, crop_height), np.full_like(width, crop_width)
        if self.pads:
            return (s.Crop(y, x, *box, margin=max(crop_height, crop_width)),)
        top, left = np.maximum(-y, 0), np.maximum(-x, 0)
        bottom, right = np.maximum(box[0] - height - top, 0), np.maximum(box[1] - width - left, 0)
        return s.Pad(top, bottom, left, right, self.border), s.Crop(np.maximum(y, 0), np.maximum(x, 0), *box)
