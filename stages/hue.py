"""hue: shifts hues on the colour circle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gpuflow.arrays import Floats, Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Probability, Shift, adjustment, drawn_factors, is_random, range_of


@dataclass(frozen=True, kw_only=True, repr=False)
class Hue(s.Pointwise):
    """Shift hues, as torchvision's adjust_hue does. Gray images do not change.

    Args:
        amount: the shift is drawn from [-v, v] for a number v, or from [low, high], in turns of the colour circle.
        probability: the probability of changing an image.
    """

    stage_name: ClassVar[str] = "hue"
    other_names: ClassVar[tuple[str, ...]] = ("AdjustHue",)
    other_keys: ClassVar[Mapping[str, str]] = {"hue": "amount", "hue_factor": "amount"}

    amount: Shift
    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Hue, ...]:
        return (cls(amount=0.2), cls(amount=(-0.3, -0.3)), cls(amount=(0.25, 0.25), probability=0.5))

    @property
    def random(self) -> bool:
        return is_random(self.probability, range_of(self.amount, neutral=0.0), neutral=0.0)

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        s.require_rgb(self, spec)
        return spec

    def torchvision(self) -> Any:
        return adjustment("hue", range_of(self.amount, neutral=0.0), self.probability)

    def draw(self, keys: s.StageKeys) -> Floats:
        return drawn_factors(keys, self.probability, range_of(self.amount, neutral=0.0))

    def operations(self, coefficients: Floats, height: Ints, width: Ints) -> s.Operations:
        return s.Operations.one(s.Operation.HUE, coefficients[:, 0] > 0, coefficients[:, 1])
