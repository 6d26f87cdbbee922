"""grayscale: replaces colours by gray, in as many channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gpuflow.arrays import Floats, Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Probability, drawn_factors, is_random


@dataclass(frozen=True, kw_only=True, repr=False)
class Grayscale(s.Pointwise):
    """Replace the colours of an image by its gray, in all three channels, as torchvision's RandomGrayscale does.

    Gray images do not change. For images of one channel, decode with `color: gray`.

    Args:
        probability: the probability of changing an image.
    """

    stage_name: ClassVar[str] = "grayscale"
    tolerance: ClassVar[float] = 1.0
    other_names: ClassVar[tuple[str, ...]] = ("RandomGrayscale", "ToGray", "Greyscale")

    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Grayscale, ...]:
        return (cls(), cls(probability=0.5))

    @property
    def random(self) -> bool:
        return is_random(self.probability)

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        s.require_rgb(self, spec)
        return spec

    def torchvision(self) -> Any:
        from torchvision.transforms import v2

        return v2.RandomGrayscale(self.probability)

    def draw(self, keys: s.StageKeys) -> Floats:
        return drawn_factors(keys, self.probability)

    def operations(self, coefficients: Floats, height: Ints, width: Ints) -> s.Operations:
        return s.Operations.one(s.Operation.GRAYSCALE, coefficients[:, 0] > 0)
