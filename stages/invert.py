"""invert: photographic negative."""

from __future__ import annotations

import numpy as np

from gpuflow.arrays import Bytes
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Probability, TableAdjustment


@s.stage_class
class Invert(TableAdjustment):
    """Invert all levels, as torchvision's invert does.

    Args:
        probability: the probability of changing an image.
    """

    stage_name = "invert"
    other_names = ("RandomInvert", "InvertImg")

    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Invert, ...]:
        return (cls(), cls(probability=0.5))

    def levels(self) -> Bytes:
        levels = np.arange(256, dtype=np.uint8)
        return 255 - levels
