"""auto_augment: applies one of 25 pairs of operations, drawn for each sample (AutoAugment's policies for ImageNet)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import numpy as np

from gpuflow.errors import Problem
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Fill, WarpInterpolation
from gpuflow.stages.policy_parts import (
    MAGNITUDES,
    OPERATIONS,
    AugmentPolicy,
    Choice,
    MagnitudeTable,
    uniform_places,
)
from gpuflow.stages.timm_parts import ORIGINAL, RESEARCH, SLOPES, Levels, blur_levels, choice_at

_BINS = 10
SubPolicy = tuple[tuple[str, float, int], ...]
"""Operations that run one after the other: each with its probability and the bin of its magnitude."""


def _sets(text: str) -> tuple[SubPolicy, ...]:
    """Read a policy: a set on each line."""
    lines = ([one.split() for one in line.split(",")] for line in text.strip().splitlines())
    return tuple(tuple((name, float(chance), int(place)) for name, chance, place in line) for line in lines)


_IMAGENET = _sets(
    """
    Posterize 0.4 8, Rotate 0.6 9
    Solarize 0.6 5, AutoContrast 0.6 0
    Equalize 0.8 0, Equalize 0.6 0
    Posterize 0.6 7, Posterize 0.6 6
    Equalize 0.4 0, Solarize 0.2 4
    Equalize 0.4 0, Rotate 0.8 8
    Solarize 0.6 3, Equalize 0.6 0
    Posterize 0.8 5, Equalize 1 0
    Rotate 0.2 3, Solarize 0.6 8
    Equalize 0.6 0, Posterize 0.4 6
    Rotate 0.8 8, Color 0.4 0
    Rotate 0.4 9, Equalize 0.6 0
    Equalize 0 0, Equalize 0.8 0
    Invert 0.6 0, Equalize 1 0
    Color 0.6 4, Contrast 1 8
    Rotate 0.8 8, Color 1 2
    Color 0.8 8, Solarize 0.8 7
    Sharpness 0.4 7, Invert 0.6 0
    ShearX 0.6 5, Equalize 1 0
    Color 0.4 0, Equalize 0.6 0
    Equalize 0.4 0, Solarize 0.2 4
    Solarize 0.6 5, AutoContrast 0.6 0
    Invert 0.6 0, Equalize 1 0
    Color 0.6 4, Contrast 1 8
    Equalize 0.8 0, Equalize 0.6 0
    """
)
"""As torchvision lists them. timm's have the same numbers, where an operation has a magnitude."""
_V0 = _sets(
    """
    Equalize 0.8 1, ShearY 0.8 4
    Color 0.4 9, Equalize 0.6 3
    Color 0.4 1, Rotate 0.6 8
    Solarize 0.8 3, Equalize 0.4 7
    Solarize 0.4 2, Solarize 0.6 2
    Color 0.2 0, Equalize 0.8 8
    Equalize 0.4 8, SolarizeAdd 0.8 3
    ShearX 0.2 9, Rotate 0.6 8
    Color 0.6 1, Equalize 1 2
    Invert 0.4 9, Rotate 0.6 0
    Equalize 1 9, ShearY 0.6 3
    Color 0.4 7, Equalize 0.6 0
    Posterize 0.4 6, AutoContrast 0.4 7
    Solarize 0.6 8, Color 0.6 9
    Solarize 0.2 4, Rotate 0.8 9
    Rotate 1 7, TranslateY 0.8 9
    ShearX 0 0, Solarize 0.8 4
    ShearY 0.8 0, Color 0.6 4
    Color 1 0, Rotate 0.6 2
    Equalize 0.8 4, Equalize 0 8
    Equalize 1 4, AutoContrast 0.6 2
    ShearY 0.4 7, SolarizeAdd 0.6 7
    Posterize 0.8 2, Solarize 0.6 10
    Solarize 0.6 8, Equalize 0.6 1
    Color 0.8 6, Rotate 0.4 5
    """
)
"""As timm lists them."""
_THREE = _sets(
    """
    Solarize 1 5
    Desaturate 1 10
    GaussianBlur 1 10
    """
)
_POLICIES: dict[str, tuple[tuple[SubPolicy, ...], MagnitudeTable]] = {
    "torchvision": (_IMAGENET, MAGNITUDES),
    "original": (_IMAGENET, Levels(ORIGINAL)),
    "originalr": (_IMAGENET, Levels(RESEARCH)),
    "v0": (_V0, Levels(SLOPES)),
    "v0r": (_V0, Levels(RESEARCH)),
    "3a": (_THREE, Levels(SLOPES)),
}
"""Sets of operations, and their magnitudes, by timm's names."""


@s.stage_class
class AutoAugment(AugmentPolicy):
    """Apply a pair of operations that is drawn for each sample, as AutoAugment of torchvision or timm for ImageNet.

    Cubuk et al., "AutoAugment: Learning Augmentation Strategies from Data", CVPR 2019. `3a` is the 3-Augment of
    Touvron et al., "DeiT III: Revenge of the ViT", ECCV 2022: solarizing, grayscale or a blur. Pixels of timm's
    operations are as near to timm's as in `rand_augment`.

    Args:
        interpolation: how pixels are resampled.
        fill: the level outside the image, or [red, green, blue].
        policy: `torchvision`, or one of timm's, by timm's names: `original`, `originalr`, `v0`, `v0r` or `3a`.
        noise: the standard deviation of a level of timm's policies (timm's `mstd`). Levels stay within 0 and 10.
    """

    stage_name = "auto_augment"
    late_fields = ("policy", "noise")
    other_keys = {"magnitude_std": "noise"}

    interpolation: WarpInterpolation = "nearest"
    fill: Fill = 0
    policy: Literal["torchvision", "original", "originalr", "v0", "v0r", "3a"] = "torchvision"
    noise: Annotated[float, s.Bounds(least=0, limit=1000)] = 0.0

    @classmethod
    def examples(cls) -> tuple[AutoAugment, ...]:
        return (
            cls(),
            cls(interpolation="bilinear", fill=(9, 99, 199)),
            cls(interpolation="bilinear", policy="original", noise=0.5),
            cls(interpolation="bilinear", policy="v0r"),
            cls(policy="3a", noise=2.0),
        )

    def faults(self) -> Iterator[Problem]:
        if self.policy == "torchvision" and self.noise:
            action = "set policy: original"
            yield Problem.of("noise", "is only of timm's policies", self.noise, action, code="config.conflict")

    @property
    def _policy(self) -> tuple[SubPolicy, ...]:
        return _POLICIES[self.policy][0]

    @property
    def timm_names(self) -> tuple[str, ...]:
        return () if self.policy == "torchvision" else tuple({name for one in self._policy for name, _, _ in one})

    @property
    def magnitudes(self) -> MagnitudeTable:
        return _POLICIES[self.policy][1]

    @property
    def rounds(self) -> int:
        return len(self._policy[0])

    def choose(self, keys: s.StageKeys, turn: int) -> Choice:
        numbers = keys.uniform(5 if self.policy == "torchvision" else 10)
        pair = uniform_places(numbers[:, 0], len(self._policy))
        chance, sign = numbers[:, 1 + 2 * turn], numbers[:, 2 + 2 * turn]
        names, probabilities, bins = zip(*(one[turn] for one in self._policy), strict=True)
        operation = np.array([OPERATIONS.index(name) for name in names])[pair]
        operation[chance >= np.array(probabilities)[pair]] = OPERATIONS.index("Identity")
        level = np.array(bins)[pair]
        if self.policy == "torchvision":
            return Choice(operation, level, sign < 0.5, _BINS)
        choice = choice_at(operation, level, self.noise, 10, np.column_stack([numbers[:, 5 + 2 * turn :][:, :2], sign]))
        if self.policy != "3a":
            return choice
        blurs = operation == OPERATIONS.index("GaussianBlur")
        drawn = blur_levels(choice.place, numbers[:, 9])
        return dataclasses.replace(choice, place=np.where(blurs, drawn, choice.place))

    def torchvision(self) -> Any:
        return self.transform("AutoAugment")
