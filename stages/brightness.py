"""brightness: multiplies levels by a factor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gpuflow.arrays import Floats, Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Factor, Probability, adjustment, drawn_factors, is_random, range_of


@dataclass(frozen=True, kw_only=True, repr=False)
class Brightness(s.Pointwise):
    """Multiply levels by a factor, as torchvision's adjust_brightness does.

    Args:
        amount: the factor is drawn from [max(0, 1 - v), 1 + v] for a number v, or from [low, high].
        probability: the probability of changing an image.
    """

    stage_name: ClassVar[str] = "brightness"
    other_names: ClassVar[tuple[str, ...]] = ("RandomBrightness", "AdjustBrightness")
    other_keys: ClassVar[Mapping[str, str]] = {"brightness": "amount", "brightness_factor": "amount"}

    amount: Factor
    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Brightness, ...]:
        return (cls(amount=0.4), cls(amount=(1.25, 1.25)), cls(amount=(0.5, 0.5), probability=0.5))

    @property
    def random(self) -> bool:
        return is_random(self.probability, range_of(self.amount))

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        s.require_pixels(self, spec)
        return spec

    def torchvision(self) -> Any:
        return adjustment("brightness", range_of(self.amount), self.probability)

    def draw(self, keys: s.StageKeys) -> Floats:
        return drawn_factors(keys, self.probability, range_of(self.amount))

    def operations(self, coefficients: Floats, height: Ints, width: Ints) -> s.Operations:
        return s.Operations.one(s.Operation.BRIGHTNESS, coefficients[:, 0] > 0, coefficients[:, 1])
