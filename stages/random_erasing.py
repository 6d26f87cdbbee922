"""random_erasing: fills a random box of an image with one colour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from gpuflow.arrays import Bools, Floats, Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Probability, Ratio, box_sides

_ATTEMPTS = 10
_IMAGENET = (124, 116, 104)
"""The level nearest to normalize's mean: imagenet, so that it becomes nearly 0."""


@dataclass(frozen=True, kw_only=True, repr=False)
class RandomErasing(s.Pointwise):
    """Fill a random box with a colour, as torchvision's RandomErasing does: up to 10 boxes are drawn until one fits.

    It runs on uint8 pixels. timm and torchvision's recipes erase after normalize, where 0 is the mean colour: that is
    `value: imagenet` here. `random` is one colour for each sample, every level equally likely; torchvision's and timm's
    noise for each pixel has no form here.

    Args:
        probability: of erasing a box of an image.
        scale: the range of the box's area, as a part of the image's.
        ratio: the range of height / width, drawn with a uniform logarithm.
        value: the level, or one for each channel; `imagenet`: the mean colour of ImageNet; `random`: drawn.
    """

    stage_name = "random_erasing"
    other_names = ("Erasing", "CoarseDropout", "Cutout")

    probability: Probability = 0.5
    scale: Annotated[tuple[float, float], s.Bounds(least=0, most=1, ascending=True)] = (0.02, 0.33)
    ratio: Ratio = (0.3, 3.3)
    value: (
        Literal["imagenet", "random"]
        | Annotated[int, s.Bounds(least=0, most=255)]
        | Annotated[tuple[int, ...], s.Bounds(least=0, most=255)]
    ) = 0

    @classmethod
    def examples(cls) -> tuple[RandomErasing, ...]:
        return (
            cls(),
            cls(probability=1.0, scale=(0.1, 0.4), ratio=(0.5, 1.5), value="imagenet"),
            cls(probability=0.9, value="random"),
            cls(probability=0.9, value=(10, 20, 250)),
        )

    @property
    def random(self) -> bool:
        return self.probability > 0

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        s.require_pixels(self, spec)
        if isinstance(self.value, tuple) and len(self.value) not in (1, spec.shape[2]):
            channels = spec.shape[2]
            raise ValueError(
                f"has {len(self.value)} levels of value but gets {channels} channel(s); give 1 or {channels}"
            )
        if self.value == "imagenet" and spec.color != "rgb":
            raise ValueError(f"knows imagenet in the order rgb but gets {spec.color} images; give the levels")
        return spec

    def draw(self, keys: s.StageKeys) -> Floats:
        """Draw for a sample whether it is changed, the box's place, the colour, and each box's area and ratio."""
        return keys.uniform(6 + 2 * _ATTEMPTS)

    def operations(self, coefficients: Floats, height: Ints, width: Ints) -> s.Operations:
        erased = np.flatnonzero(coefficients[:, 0] < self.probability)
        fits, some_boxes = self._boxes(coefficients[erased], height[erased], width[erased])
        active, boxes = np.zeros(len(coefficients), bool), np.zeros((len(coefficients), 4), np.int64)
        active[erased], boxes[erased] = fits, some_boxes
        colors: Any = np.floor(coefficients[:, 3:6] * 256)
        if self.value != "random":
            levels: Any = _IMAGENET if self.value == "imagenet" else self.value
            colors = np.atleast_2d(np.asarray(levels, np.float64))
        return s.Operations.erase(active, boxes, colors)

    def _boxes(self, coefficients: Floats, height: Ints, width: Ints) -> tuple[Bools, Ints]:
        """Return for images of these sizes [N] whether a drawn box fits, [N], and the first that does, [N, 4]."""
        areas, ratios = coefficients[:, 6 : 6 + _ATTEMPTS], coefficients[:, 6 + _ATTEMPTS :]
        tall, wide = box_sides((height * width)[:, None], areas, ratios, self.scale, self.ratio)
        fits = (tall < height[:, None]) & (wide < width[:, None])
        first = fits.argmax(axis=1)[:, None]
        size = np.concatenate([np.take_along_axis(side, first, 1) for side in (tall, wide)], axis=1)
        room = np.array([height, width]).T - size + 1
        boxes = np.concatenate([np.floor(coefficients[:, 1:3] * room), size], axis=1)
        return np.asarray(fits.any(axis=1)), boxes.astype(np.int64)
