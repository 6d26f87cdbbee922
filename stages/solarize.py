"""solarize: inverts all levels from a threshold on."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from gpuflow.arrays import Bytes
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Probability, TableAdjustment


@s.stage_class
class Solarize(TableAdjustment):
    """Invert the levels that are not below a threshold, as torchvision's RandomSolarize does.

    Args:
        threshold: the lowest level that is inverted.
        probability: the probability of changing an image.

    Examples:
        >>> Solarize(threshold=128).levels()[[100, 127, 128, 255]].tolist()
        [100, 127, 127, 0]
    """

    stage_name = "solarize"
    other_names = ("RandomSolarize",)

    threshold: Annotated[float, s.Bounds(least=0, most=255)] = 128.0
    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Solarize, ...]:
        return (cls(), cls(threshold=60.5), cls(probability=0.5))

    def levels(self) -> Bytes:
        levels = np.arange(256, dtype=np.uint8)
        return np.where(levels >= self.threshold, 255 - levels, levels)
