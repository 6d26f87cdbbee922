"""random_resized_crop: crops a box of random area and aspect ratio and resamples it (the Inception crop)."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

from gpuflow.arrays import Bools, Floats, Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import (
    Interpolation,
    Ratio,
    ResizingStage,
    Size,
    box_sides,
    of_size,
    resampling_transform,
    size_pair,
)

_ATTEMPTS = 10


@s.stage_class
class RandomResizedCrop(ResizingStage):
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
    random = True
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

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        return of_size(super().output(spec), *size_pair(self.size))

    def torchvision(self) -> Any:
        box: dict[str, Any] = {"size": size_pair(self.size), "scale": self.scale, "ratio": self.ratio}
        return resampling_transform("RandomResizedCrop", self.interpolation, antialias=self.antialias, **box)

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
        return s.Crop(y, x, h, w), self.resize(*(np.full_like(h, side) for side in size_pair(self.size)))

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
