"""random_crop: crops a box of fixed size at a random place, optionally after padding the image."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuflow.arrays import Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import (
    Border,
    Bordered,
    Fill,
    Padding,
    Size,
    check_mirrors,
    of_size,
    sides_of,
    size_pair,
)


@s.stage_class
class RandomCrop(Bordered):
    """Crop a box at a random place, as torchvision's RandomCrop does.

    An image that is smaller than the box even with padding is a bad sample, unless it is padded as needed.

    Args:
        size: the box in pixels: the side of a square, or [height, width].
        padding: the number of pixels that are added before the crop on each side, [left and right, top and bottom], or
            [left, top, right, bottom].
        pad_if_needed: whether an image that is smaller than the box is padded further: by the difference, on both of
            the sides concerned.
        border: what is added: `constant` levels, the pixel at the `edge`, or the image as in a mirror, without the
            pixel at the edge: `reflect`, which takes less padding than the image has pixels; or with it: `symmetric`,
            which takes as much.
        fill: the level of a constant border, or [red, green, blue].

    Examples:
        >>> RandomCrop(size=32, padding=4).output(s.ImageSpec(shape=(28, 28, 3))).shape
        (32, 32, 3)
    """

    stage_name = "random_crop"
    late_fields = ("pad_if_needed", "border", "fill")
    random = True

    size: Size
    padding: Padding = 0
    pad_if_needed: bool = False
    border: Border = "constant"
    fill: Fill = 0

    @classmethod
    def examples(cls) -> tuple[RandomCrop, ...]:
        return (
            cls(size=(24, 30)),
            cls(size=30, padding=7),
            cls(size=30, padding=(3, 0, 9, 5), fill=(9, 200, 50)),
            cls(size=(70, 90), pad_if_needed=True),
            cls(size=(50, 60), padding=(4, 9), pad_if_needed=True, border="reflect"),
            cls(size=40, padding=12, border="edge"),
            cls(size=(40, 50), padding=(9, 3), border="symmetric"),
        )

    @property
    def adds_pixels(self) -> bool:
        return self.pad_if_needed or any(sides_of(self.padding))

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        spec = super().output(spec)
        check_mirrors(self.border, self._padding_of(spec), spec)
        if not self.pad_if_needed:
            _check_fits(size_pair(self.size), spec, sides_of(self.padding))
        return of_size(spec, *size_pair(self.size))

    def _padding_of(self, spec: s.ImageSpec) -> tuple[int, int, int, int]:
        """Return left, top, right, bottom for images of this spec, without what unknown sides may need."""
        known = (np.array([side or max(size_pair(self.size))]) for side in spec.shape[:2])
        left, top, right, bottom = (int(side[0]) for side in self._sides(*known))
        return left, top, right, bottom

    def _sides(self, height: Ints, width: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Return left, top, right, bottom of the padding of images of these sizes [N]."""
        left, top, right, bottom = (np.full_like(height, side) for side in sides_of(self.padding))
        if self.pad_if_needed:
            crop_height, crop_width = size_pair(self.size)
            more_y = np.maximum(crop_height - (height + top + bottom), 0)
            more_x = np.maximum(crop_width - (width + left + right), 0)
            left, top, right, bottom = left + more_x, top + more_y, right + more_x, bottom + more_y
        return left, top, right, bottom

    def torchvision(self) -> Any:
        from torchvision.transforms import v2

        padding = list(sides_of(self.padding)) if any(sides_of(self.padding)) else None
        return v2.RandomCrop(size_pair(self.size), padding, self.pad_if_needed, self.fill, self.border)

    def draw(self, keys: s.StageKeys, height: Ints, width: Ints) -> tuple[s.Move, ...]:
        left, top, right, bottom = self._sides(height, width)
        crop_height, crop_width = size_pair(self.size)
        place = keys.uniform(2)
        y = (place[:, 0] * (np.maximum(height + top + bottom - crop_height, 0) + 1)).astype(np.int64)
        x = (place[:, 1] * (np.maximum(width + left + right - crop_width, 0) + 1)).astype(np.int64)
        box = np.full_like(height, crop_height), np.full_like(width, crop_width)
        if not self.adds_pixels:
            return (s.Crop(y, x, *box),)
        if isinstance(self.padding, int) and not self.pad_if_needed and self.pads and not any(self.padding_fill):
            return (s.Crop(y - top, x - left, *box, margin=self.padding),)
        return s.Pad(top, bottom, left, right, self.border, self.padding_fill), s.Crop(y, x, *box)


def _check_fits(size: tuple[int, int], spec: s.ImageSpec, padding: tuple[int, int, int, int]) -> None:
    """Raise ValueError if no image of this spec, with this padding on its sides, can hold a crop of `size`."""
    left, top, right, bottom = padding
    height, width = (side - more for side, more in zip(size, (top + bottom, left + right), strict=True))
    if any(side is not None and crop > side for side, crop in zip(spec.shape[:2], (height, width), strict=True)):
        image = f"of {spec.shape[0]}x{spec.shape[1]}"
    elif spec.shorter is not None and min(height, width) > spec.shorter:
        image = f"whose shorter side is {spec.shorter}"
    else:
        return
    raise ValueError(f"crops {size[0]}x{size[1]} from an image {image}, which is smaller; crop less or resize to more")
