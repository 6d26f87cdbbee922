"""posterize: keeps the highest bits of each level."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from gpuflow.arrays import Floats, Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Probability
from gpuflow.stages.adjustment import Adjustment


@dataclass(frozen=True, kw_only=True, repr=False)
class Posterize(Adjustment):
    """Keep the highest bits of each level, as torchvision's posterize does.

    Args:
        bits: how many bits of 8 are kept.
        probability: the probability of changing an image.
    """

    stage_name: ClassVar[str] = "posterize"
    operation: ClassVar[s.Operation] = s.Operation.TABLE
    other_names: ClassVar[tuple[str, ...]] = ("RandomPosterize",)
    other_keys: ClassVar[Mapping[str, str]] = {"num_bits": "bits"}

    bits: Annotated[int, s.Bounds(least=0, most=8)]
    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Posterize, ...]:
        return (cls(bits=3), cls(bits=1), cls(bits=5, probability=0.5))

    @property
    def random(self) -> bool:
        return super().random and self.bits < 8

    def torchvision(self) -> Any:
        from torchvision.transforms import v2

        return v2.RandomPosterize(self.bits, self.probability)

    def operations(self, coefficients: Floats, height: Ints, width: Ints) -> s.Operations:
        levels = np.arange(256, dtype=np.uint8)
        kept = (levels >> (8 - self.bits) << (8 - self.bits)).astype(np.uint8)
        return s.Operations.table(coefficients[:, 0] > 0, kept[None, None])
