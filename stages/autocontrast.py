"""autocontrast: stretches each channel to all levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gpuflow.arrays import Floats, Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Probability, drawn_factors, is_random


@dataclass(frozen=True, kw_only=True, repr=False)
class Autocontrast(s.Pointwise):
    """Stretch each channel to the levels 0-255, as torchvision's autocontrast does.

    Args:
        probability: the probability of changing an image.
    """

    stage_name: ClassVar[str] = "autocontrast"
    other_names: ClassVar[tuple[str, ...]] = ("RandomAutocontrast",)

    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Autocontrast, ...]:
        return (cls(), cls(probability=0.5))

    @property
    def random(self) -> bool:
        return is_random(self.probability)

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        s.require_pixels(self, spec)
        return spec

    def torchvision(self) -> Any:
        from torchvision.transforms import v2

        return v2.RandomAutocontrast(self.probability)

    def draw(self, keys: s.StageKeys) -> Floats:
        return drawn_factors(keys, self.probability)

    def operations(self, coefficients: Floats, height: Ints, width: Ints) -> s.Operations:
        return s.Operations.one(s.Operation.AUTOCONTRAST, coefficients[:, 0] > 0)
