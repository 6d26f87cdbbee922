"""rand_augment: applies a few operations, drawn for each sample, at one magnitude (RandAugment)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from gpuflow.errors import Problem
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
    "Identity": None,
    "ShearX": of_both_signs(0.3),
    "ShearY": of_both_signs(0.3),
    "TranslateX": of_both_signs(150.0 / 331.0, of="width"),
    "TranslateY": of_both_signs(150.0 / 331.0, of="height"),
    "Rotate": of_both_signs(30.0),
    "Brightness": of_both_signs(0.9),
    "Color": of_both_signs(0.9),
    "Contrast": of_both_signs(0.9),
    "Sharpness": of_both_signs(0.9),
    "Posterize": Range(8.0, 4.0, whole=True),
    "Solarize": Range(1.0, 0.0),
    "AutoContrast": None,
    "Equalize": None,
}
"""torchvision's RandAugment, in its order."""


@dataclass(frozen=True, kw_only=True, repr=False)
class RandAugment(AugmentPolicy):
    """Apply operations that are drawn for each sample, as torchvision's RandAugment does.

    Cubuk et al., "RandAugment: Practical automated data augmentation with a reduced search space", 2019.

    With `interpolation: nearest`, all pixels are those of torchvision on a GPU, on every device. Where a point lies
    exactly between two pixels, torchvision's rounding errors in float32 choose one of them. Shears have whole rows or
    columns of such points, at 4 of 31 magnitudes. Torchvision itself may take others of these pixels on a processor
    that adds up float32 products in another way than GPUs and Intel's processors do, such as one of AMD.

    Args:
        operations: how many operations a sample gets, one after the other.
        magnitude: the number of the bin that all magnitudes are taken from, from 0.
        bins: into how many bins the range of each magnitude is divided.
        interpolation: how pixels are resampled.
        fill: the level outside the image, or [red, green, blue].
    """

    stage_name = "rand_augment"
    magnitudes = Magnitudes(_SPACE)
    other_keys = {"num_ops": "operations", "num_magnitude_bins": "bins"}

    operations: Annotated[int, s.Bounds(least=1, limit=16)] = 2
    magnitude: Annotated[int, s.Bounds(least=0, limit=999)] = 9
    bins: Annotated[int, s.Bounds(least=2, limit=1000)] = 31
    interpolation: WarpInterpolation = "nearest"
    fill: Fill = 0

    @classmethod
    def examples(cls) -> tuple[RandAugment, ...]:
        return (cls(), cls(operations=1, magnitude=20, bins=25, interpolation="bilinear", fill=(9, 99, 199)))

    def faults(self) -> Iterator[Problem]:
        if self.magnitude >= self.bins:
            rule = f"must be less than bins = {self.bins}"
            yield Problem.of("magnitude", rule, self.magnitude, code="config.conflict")

    @property
    def rounds(self) -> int:
        return self.operations

    def choose(self, keys: s.StageKeys, turn: int) -> Choice:
        numbers = keys.uniform(2 * (turn + 1))[:, 2 * turn :]
        operation = uniform_places(numbers[:, 0], len(_SPACE))
        return Choice(operation, np.full_like(operation, self.magnitude), numbers[:, 1] < 0.5, self.bins)

    def torchvision(self) -> Any:
        from torchvision.transforms import InterpolationMode, v2

        mode = InterpolationMode(self.interpolation)
        return v2.RandAugment(self.operations, self.magnitude, self.bins, interpolation=mode, fill=self.fill)


assert list(_SPACE) == list(OPERATIONS[: len(_SPACE)])
