"""cover_resize: resamples a whole image so that it just covers a box, with a random zoom and a random stretch."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from gpuflow.arrays import Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Interpolation, Probability, Ratio, ResizingStage, Size, size_pair


@s.stage_class
class CoverResize(ResizingStage):
    """Resample an image so that it covers a box, zoomed and stretched at random, as timm's crop modes rkrc and rkrr do.

    The shorter side, measured in sides of the box, fits the box. Some images are zoomed further, and some are
    stretched, which may leave one side shorter than the box by a few percent. A crop follows: for rkrc
    `center_crop: {size: 224, border: reflect}`, for rkrr
    `random_crop: {size: 224, pad_if_needed: true, border: reflect}`.

    Args:
        size: the box in pixels: the side of a square, or [height, width].
        scale: the range of the box's area as a fraction of the zoomed image's, for an image of the box's shape.
        ratio: the range of the change of width / height; drawn uniformly in the logarithm.
        probability: of zooming an image, and of stretching it; both are drawn independently.
        interpolation: how pixels are resampled.
        antialias: widen the filter with the scale when the image shrinks, as PIL and torchvision do.
    """

    stage_name = "cover_resize"
    other_names = ("ResizeKeepRatio",)

    size: Size
    scale: Annotated[tuple[float, float], s.Bounds(least=0.001, limit=1000, ascending=True)] = (0.8, 1.0)
    ratio: Ratio = (0.9, 1 / 0.9)
    probability: Probability = 0.5
    interpolation: Interpolation = "bilinear"
    antialias: bool = True

    @classmethod
    def examples(cls) -> tuple[CoverResize, ...]:
        return (
            cls(size=24),
            cls(
                size=(20, 28),
                scale=(0.2, 0.5),
                ratio=(1.0, 2.0),
                probability=0.9,
                interpolation="bicubic",
                antialias=False,
            ),
        )

    @property
    def random(self) -> bool:
        return self.probability > 0

    def draw(self, keys: s.StageKeys, height: Ints, width: Ints) -> tuple[s.Move, ...]:
        zooms, area, stretches, turn = keys.uniform(4).T
        box_height, box_width = size_pair(self.size)
        (least, most), (low, high) = self.scale, np.log(self.ratio)
        fitted = np.minimum(height / box_height, width / box_width)
        zoom = np.where(zooms < self.probability, 1 / np.sqrt(least + area * (most - least)), 1.0) / fitted
        stretch = np.where(stretches < self.probability, np.exp((low + turn * (high - low)) / 2), 1.0)
        exact = height * zoom / stretch, width * zoom * stretch
        tall, wide = (np.maximum(np.rint(side), 1).astype(np.int64) for side in exact)
        return (self.resize(tall, wide),)
