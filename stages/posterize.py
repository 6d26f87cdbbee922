"""posterize: keeps the highest bits of each level."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from gpuflow.arrays import Bytes
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Probability, TableAdjustment


@s.stage_class
class Posterize(TableAdjustment):
    """Keep the highest bits of each level, as torchvision's posterize does.

    Args:
        bits: how many bits of 8 are kept.
        probability: the probability of changing an image.

    Examples:
        >>> Posterize(bits=2).levels()[[0, 63, 64, 255]].tolist()
        [0, 0, 64, 192]
    """

    stage_name = "posterize"
    other_names = ("RandomPosterize",)
    other_keys = {"num_bits": "bits"}

    bits: Annotated[int, s.Bounds(least=0, most=8)]
    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Posterize, ...]:
        return (cls(bits=3), cls(bits=1), cls(bits=5, probability=0.5))

    @property
    def random(self) -> bool:
        return super().random and self.bits < 8

    def levels(self) -> Bytes:
        dropped = 8 - self.bits
        return (np.arange(256) >> dropped << dropped).astype(np.uint8)
