"""random_erasing: fills a random box of an image, or a few, with one colour each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import numpy as np

from gpuflow.arrays import Bools, Floats, Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Probability, Ratio, box_sides

_ATTEMPTS = 10
NUMBERS = 6 + 2 * _ATTEMPTS
"""Random numbers of a box: whether there is any, or how many; its place; its colour; areas and ratios."""
Count = Annotated[int, s.Bounds(least=1, most=16)]
_IMAGENET = (124, 116, 104)
"""The level nearest to normalize's mean: imagenet, so that it becomes nearly 0."""


class Erasing(s.Stage):
    """A stage that fills boxes of an image, which are drawn at random."""

    probability: Probability
    scale: tuple[float, float]
    ratio: Ratio
    count: Count

    @property
    def random(self) -> bool:
        return self.probability > 0

    def drawn_boxes(self, coefficients: Floats, height: Ints, width: Ints) -> Iterator[tuple[Bools, Ints, Floats]]:
        """Yield for each box which samples [N] have it, its y, x, height and width [N, 4], and numbers of a colour.

        A box that fits none of its attempts is left out. The numbers of a colour are [N, 3].

        coefficients: random, [N, NUMBERS * count].
        """
        counts = np.ones(len(coefficients), np.int64)
        if self.count > 1:
            counts += np.minimum((coefficients[:, NUMBERS] * self.count).astype(np.int64), self.count - 1)
        for place in range(self.count):
            numbers = coefficients[:, NUMBERS * place : NUMBERS * (place + 1)]
            erased = np.flatnonzero((coefficients[:, 0] < self.probability) & (place < counts))
            area = (height * width / counts)[erased]
            fits, some_boxes = self._boxes(numbers[erased], height[erased], width[erased], area)
            active, boxes = np.zeros(len(coefficients), bool), np.zeros((len(coefficients), 4), np.int64)
            active[erased], boxes[erased] = fits, some_boxes
            yield active, boxes, numbers[:, 3:6]

    def _boxes(self, numbers: Floats, height: Ints, width: Ints, area: Floats) -> tuple[Bools, Ints]:
        """Return for images of these sizes [N] whether a drawn box fits, [N], and the first that does, [N, 4].

        area [N]: the pixels that `scale` is a part of.
        """
        areas, ratios = numbers[:, 6 : 6 + _ATTEMPTS], numbers[:, 6 + _ATTEMPTS :]
        tall, wide = box_sides(area[:, None], areas, ratios, self.scale, self.ratio)
        fits = (tall < height[:, None]) & (wide < width[:, None])
        first = fits.argmax(axis=1)[:, None]
        size = np.concatenate([np.take_along_axis(side, first, 1) for side in (tall, wide)], axis=1)
        room = np.array([height, width]).T - size + 1
        boxes = np.concatenate([np.floor(numbers[:, 1:3] * room), size], axis=1)
        return np.asarray(fits.any(axis=1)), boxes.astype(np.int64)


@s.stage_class
class RandomErasing(Erasing, s.Pointwise):
    """Fill a random box with a colour, as torchvision's RandomErasing does: up to 10 boxes are drawn until one fits.

    It runs on uint8 pixels. timm and torchvision's recipes erase after normalize, where 0 is the mean colour: that is
    `value: imagenet` here. `random` is one colour for each box, every level equally likely; torchvision's and timm's
    normally distributed noise is the stage `noise_erasing`, after normalize.

    Args:
        probability: of erasing a box of an image.
        scale: the range of the box's area, as a part of the image's.
        ratio: the range of height / width, drawn with a uniform logarithm.
        value: the level, or one for each channel; `imagenet`: the mean colour of ImageNet; `random`: drawn.
        count: the most boxes. Their number is drawn from 1 to `count`, and each gets that part of the area, as in timm.
    """

    stage_name = "random_erasing"
    late_fields = ("count",)
    other_names = ("Erasing", "CoarseDropout", "Cutout")
    other_keys = {"max_count": "count"}

    probability: Probability = 0.5
    scale: Annotated[tuple[float, float], s.Bounds(least=0, most=1, ascending=True)] = (0.02, 0.33)
    ratio: Ratio = (0.3, 3.3)
    value: (
        Literal["imagenet", "random"]
        | Annotated[int, s.Bounds(least=0, most=255)]
        | Annotated[tuple[int, ...], s.Bounds(least=0, most=255)]
    ) = 0
    count: Count = 1

    @classmethod
    def examples(cls) -> tuple[RandomErasing, ...]:
        return (
            cls(),
            cls(probability=1.0, scale=(0.1, 0.4), ratio=(0.5, 1.5), value="imagenet"),
            cls(probability=0.9, value="random"),
            cls(probability=0.9, value=(10, 20, 250)),
            cls(probability=0.9, value="random", count=3),
        )

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
        """Draw the numbers of each box; see `Erasing.drawn_boxes`."""
        return keys.uniform(NUMBERS * self.count)

    def operations(self, coefficients: Floats, height: Ints, width: Ints) -> s.Operations:
        parts = []
        for active, boxes, numbers in self.drawn_boxes(coefficients, height, width):
            colors: Any = np.floor(numbers * 256)
            if self.value != "random":
                levels: Any = _IMAGENET if self.value == "imagenet" else self.value
                colors = np.atleast_2d(np.asarray(levels, np.float64))
            parts.append(s.Operations.erase(active, boxes, colors))
        return s.Operations.join(len(coefficients), parts)
