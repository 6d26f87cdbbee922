"""random_resized_crop: crops a box of random area and aspect ratio and resamples it (the Inception crop)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from gpuflow.arrays import Bools, Floats, Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Ratio, Size, box_sides, of_size, size_pair
from gpuflow.stages.resize import Interpolation

_ATTEMPTS = 10


@dataclass(frozen=True, kw_only=True, repr=False)
class RandomResizedCrop(s.Geometry):
    """Crop a box of random area and aspect ratio, and resample it to a fixed size, as torchvision does.

    Ten boxes are drawn; if none fits, the result is the centre of the image at the nearest allowed ratio. The algorithm
    is that of torchvision's RandomResizedCrop.

    Args:
        size: the result in pixels: the side of a square, or [height, width].
        scale: the box's area as a fraction of the image's, [low, high].
        ratio: the box's width divided by its height, [low, high]; drawn uniformly in the logarithm.
        interpolation: how pixels are resampled.
        antialias: widen the filter with the scale when the image shrinks, as PIL and torchvision do.
    """

    stage_name = "random_resized_crop"
    tolerance = 1.0
    resizes = True
    other_names = ("RandomSizedCrop", "RandomResizedCropAndInterpolation")

    size: Size
    scale: Annotated[tuple[float, float], s.Bounds(above=0, most=1, ascending=True)] = (0.08, 1.0)
    ratio: Ratio = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"
    antialias: bool = True

    @classmethod
    def examples(cls) -> tuple[RandomResizedCrop, ...]:
        return (
            cls(size=24),
            cls(size=(20, 28), scale=(0.2, 0.5), ratio=(1.0, 2.0), interpolation="bicubic", antialias=False),
        )

    @property
    def random(self) -> bool:
        return True

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        s.require_pixels(self, spec)
        return of_size(spec, self.size)

    def torchvision(self) -> Any:
        from torchvision.transforms import InterpolationMode, v2

        mode = InterpolationMode(self.interpolation)
        return v2.RandomResizedCrop(size_pair(self.size), self.scale, self.ratio, mode, antialias=self.antialias)

    def draw(self, keys: s.StageKeys, height: Ints, width: Ints) -> tuple[s.Move, ...]:
        numbers = keys.uniform(2 * _ATTEMPTS + 2)
        h, w, fits = self._boxes(numbers, 0, 1, height, width)
        again = np.flatnonzero(~fits)  # for most images the first box fits
        if len(again):
            some = self._boxes(numbers[again], 1, _ATTEMPTS, height[again], width[again])
            h[again], w[again], fits[again] = some
        y = (numbers[:, -2] * (height - h + 1)).astype(np.int64)
        x = (numbers[:, -1] * (width - w + 1)).astype(np.int64)

        if not fits.all():
            none, whole_ratio = ~fits, width / height
            h = np.where(none, np.where(whole_ratio < self.ratio[0], np.rint(width / self.ratio[0]), height), h)
            w = np.where(none, np.where(whole_ratio > self.ratio[1], np.rint(height * self.ratio[1]), width), w)
            h, w = np.clip(h.astype(np.int64), 1, height), np.clip(w.astype(np.int64), 1, width)
            y, x = np.where(none, (height - h) // 2, y), np.where(none, (width - w) // 2, x)
        out_height, out_width = size_pair(self.size)
        full = np.full_like
        resize = s.Resize(full(h, out_height), full(w, out_width), self.interpolation, self.antialias)
        return (s.Crop(y, x, h, w), resize)

    def _boxes(self, numbers: Floats, first: int, last: int, height: Ints, width: Ints) -> tuple[Ints, Ints, Bools]:
        """Return the first of each image's drawn boxes, from `first` up to `last`, that fits.

        That is its height and width, and whether any fits, [N] each.
        """
        H, W = height[:, None], width[:, None]
        areas, ratios = numbers[:, first:last], numbers[:, _ATTEMPTS + first : _ATTEMPTS + last]
        box_w, box_h = box_sides(H * W, areas, ratios, self.scale, self.ratio)
        fits = (box_w > 0) & (box_w <= W) & (box_h > 0) & (box_h <= H)
        rows, chosen = np.arange(len(height)), fits.argmax(axis=1)
        h, w = box_h[rows, chosen].astype(np.int64), box_w[rows, chosen].astype(np.int64)
        return h, w, fits[rows, chosen]
