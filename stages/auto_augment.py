"""auto_augment: applies one of 25 pairs of operations, drawn for each sample (AutoAugment's policy for ImageNet)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Fill, WarpInterpolation
from gpuflow.stages.policy_parts import (
    OPERATIONS,
    AugmentPolicy,
    Choice,
    Magnitudes,
    Range,
    of_both_signs,
    uniform_places,
)

_SPACE: dict[str, Range | None] = {
    "ShearX": of_both_signs(0.3),
    "Rotate": of_both_signs(30.0),
    "Color": of_both_signs(0.9),
    "Contrast": of_both_signs(0.9),
    "Sharpness": of_both_signs(0.9),
    "Posterize": Range(8.0, 4.0, whole=True),
    "Solarize": Range(1.0, 0.0),
    "AutoContrast": None,
    "Equalize": None,
    "Invert": None,
}
_BINS = 10
_IMAGENET = (
    (("Posterize", 0.4, 8), ("Rotate", 0.6, 9)),
    (("Solarize", 0.6, 5), ("AutoContrast", 0.6, 0)),
    (("Equalize", 0.8, 0), ("Equalize", 0.6, 0)),
    (("Posterize", 0.6, 7), ("Posterize", 0.6, 6)),
    (("Equalize", 0.4, 0), ("Solarize", 0.2, 4)),
    (("Equalize", 0.4, 0), ("Rotate", 0.8, 8)),
    (("Solarize", 0.6, 3), ("Equalize", 0.6, 0)),
    (("Posterize", 0.8, 5), ("Equalize", 1.0, 0)),
    (("Rotate", 0.2, 3), ("Solarize", 0.6, 8)),
    (("Equalize", 0.6, 0), ("Posterize", 0.4, 6)),
    (("Rotate", 0.8, 8), ("Color", 0.4, 0)),
    (("Rotate", 0.4, 9), ("Equalize", 0.6, 0)),
    (("Equalize", 0.0, 0), ("Equalize", 0.8, 0)),
    (("Invert", 0.6, 0), ("Equalize", 1.0, 0)),
    (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
    (("Rotate", 0.8, 8), ("Color", 1.0, 2)),
    (("Color", 0.8, 8), ("Solarize", 0.8, 7)),
    (("Sharpness", 0.4, 7), ("Invert", 0.6, 0)),
    (("ShearX", 0.6, 5), ("Equalize", 1.0, 0)),
    (("Color", 0.4, 0), ("Equalize", 0.6, 0)),
    (("Equalize", 0.4, 0), ("Solarize", 0.2, 4)),
    (("Solarize", 0.6, 5), ("AutoContrast", 0.6, 0)),
    (("Invert", 0.6, 0), ("Equalize", 1.0, 0)),
    (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
    (("Equalize", 0.8, 0), ("Equalize", 0.6, 0)),
)
"""Pairs of (operation, probability, bin of the magnitude), as torchvision lists them."""


@dataclass(frozen=True, kw_only=True, repr=False)
class AutoAugment(AugmentPolicy):
    """Apply a pair of operations that is drawn for each sample, as torchvision's AutoAugment does for ImageNet.

    Cubuk et al., "AutoAugment: Learning Augmentation Strategies from Data", CVPR 2019.

    Args:
        interpolation: how pixels are resampled.
        fill: the level outside the image, or [red, green, blue].
    """

    stage_name = "auto_augment"
    magnitudes = Magnitudes(_SPACE)

    interpolation: WarpInterpolation = "nearest"
    fill: Fill = 0

    @classmethod
    def examples(cls) -> tuple[AutoAugment, ...]:
        return (cls(), cls(interpolation="bilinear", fill=(9, 99, 199)))

    @property
    def rounds(self) -> int:
        return 2

    def choose(self, keys: s.StageKeys, turn: int) -> Choice:
        numbers = keys.uniform(5)
        pair = uniform_places(numbers[:, 0], len(_IMAGENET))
        chance, sign = numbers[:, 1 + 2 * turn], numbers[:, 2 + 2 * turn]
        names, probabilities, bins = zip(*(one[turn] for one in _IMAGENET), strict=True)
        operation = np.array([OPERATIONS.index(name) for name in names])[pair]
        operation[chance >= np.array(probabilities)[pair]] = OPERATIONS.index("Identity")
        return Choice(operation, np.array(bins)[pair], sign < 0.5, _BINS)

    def torchvision(self) -> Any:
        from torchvision.transforms import InterpolationMode, v2

        return v2.AutoAugment(interpolation=InterpolationMode(self.interpolation), fill=self.fill)
