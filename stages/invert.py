"""invert: photographic negative."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gpuflow.arrays import Floats, Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Probability
from gpuflow.stages.adjustment import Adjustment


@dataclass(frozen=True, kw_only=True, repr=False)
class Invert(Adjustment):
    """Invert all levels, as torchvision's invert does.

    Args:
        probability: the probability of changing an image.
    """

    stage_name: ClassVar[str] = "invert"
    operation: ClassVar[s.Operation] = s.Operation.TABLE
    other_names: ClassVar[tuple[str, ...]] = ("RandomInvert", "InvertImg")

    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Invert, ...]:
        return (cls(), cls(probability=0.5))

    def torchvision(self) -> Any:
        from torchvision.transforms import v2

        return v2.RandomInvert(self.probability)

    def operations(self, coefficients: Floats, height: Ints, width: Ints) -> s.Operations:
        levels = np.arange(256, dtype=np.uint8)
        return s.Operations.table(coefficients[:, 0] > 0, 255 - levels[None, None])
