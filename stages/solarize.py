"""solarize: inverts all levels from a threshold on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from gpuflow.arrays import Floats, Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Probability, drawn_factors, is_random


@dataclass(frozen=True, kw_only=True, repr=False)
class Solarize(s.Pointwise):
    """Invert the levels that are not below a threshold, as torchvision's RandomSolarize does.

    Args:
        threshold: the lowest level that is inverted.
        probability: the probability of changing an image.
    """

    stage_name: ClassVar[str] = "solarize"
    other_names: ClassVar[tuple[str, ...]] = ("RandomSolarize",)

    threshold: Annotated[float, s.Bounds(least=0, most=255)] = 128.0
    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Solarize, ...]:
        return (cls(), cls(threshold=60.5), cls(probability=0.5))

    @property
    def random(self) -> bool:
        return is_random(self.probability)

    def torchvision(self) -> Any:
        from torchvision.transforms import v2

        return v2.RandomSolarize(self.threshold, self.probability)

    def draw(self, keys: s.StageKeys) -> Floats:
        return drawn_factors(keys, self.probability)

    def operations(self, coefficients: Floats, height: Ints, width: Ints) -> s.Operations:
        levels = np.arange(256, dtype=np.uint8)
        table = np.where(levels >= self.threshold, 255 - levels, levels)
        return s.Operations.table(coefficients[:, 0] > 0, table[None, None])
