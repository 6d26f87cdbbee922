"""random_crop: crops a box of fixed size at a random place, optionally after padding the image with black."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import LONGEST, Size, size_pair

__all__ = ["RandomCrop"]


@dataclass(frozen=True, kw_only=True, repr=False)
class RandomCrop(s.Geometry):
    """Crop a box at a random place. An image that is smaller than the box even with padding is a bad sample.

    Args:
        size: the box in pixels: the side of a square, or [height, width].
        padding: black pixels that are added on every side before the crop.
    """

    stage_name: ClassVar[str] = "random_crop"

    size: Size
    padding: Annotated[int, s.Bounds(least=0, limit=LONGEST)] = 0

    @classmethod
    def examples(cls) -> tuple[RandomCrop, ...]:
        return (
            cls(size=(24, 30)),
            cls(size=30, padding=7),
        )

    @property
    def random(self) -> bool:
        return True

    @property
    def pads(self) -> bool:
        return self.padding > 0

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        s.require_pixels(self, spec)
        _check_fits(size_pair(self.size), spec, self.padding)
        return spec.replace(shape=(*size_pair(self.size), spec.shape[2]))

    def torchvision(self) -> Any:
        from torchvision.transforms import v2

        return v2.RandomCrop(size_pair(self.size), padding=self.padding or None)

    def draw(self, keys: s.StageKeys, height: s.Ints, width: s.Ints) -> tuple[s.Move, ...]:
        crop_height, crop_width = size_pair(self.size)
        place = keys.uniform(2)
        choices_y = np.maximum(height + 2 * self.padding - crop_height, 0) + 1
        choices_x = np.maximum(width + 2 * self.padding - crop_width, 0) + 1
        y = (place[:, 0] * choices_y).astype(np.int64) - self.padding
        x = (place[:, 1] * choices_x).astype(np.int64) - self.padding
        full = np.full_like
        return (s.Crop(y, x, full(height, crop_height), full(width, crop_width), margin=self.padding),)


def _check_fits(size: tuple[int, int], spec: s.ImageSpec, margin: int = 0) -> None:
    """Raise ValueError if no image of this spec, with `margin` pixels added on each side, can hold a crop of `size`."""
    height, width = size
    too_tall = spec.shape[0] is not None and height > spec.shape[0] + 2 * margin
    too_wide = spec.shape[1] is not None and width > spec.shape[1] + 2 * margin
    if too_tall or too_wide:
        raise ValueError(
            f"crops {height}x{width} from an image of {spec.shape[0]}x{spec.shape[1]}, which is smaller; "
            "crop less or resize to more"
        )
    if spec.shorter is not None and min(size) > spec.shorter + 2 * margin:
        raise ValueError(
            f"crops {height}x{width} from an image whose shorter side is {spec.shorter}, which is smaller; "
            "crop less or resize to more"
        )
