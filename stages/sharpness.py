"""sharpness: blends an image with a smoothed one, or away from it."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuflow.arrays import Floats
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import DrawnFactor, Factor, Probability, range_of


@s.stage_class
class Sharpness(DrawnFactor, s.Local):
    """Sharpen or smooth an image, as torchvision's adjust_sharpness does. Pixels at its border do not change.

    The CPU and the GPU give the same levels: the smoothed level is a sum of whole numbers, divided by 13, so it is
    never near a half.

    Args:
        amount: the factor is drawn from [max(0, 1 - v), 1 + v] for a number v, or from [low, high]; 0 gives the
            smoothed image and 2 a sharper one.
        probability: the probability of changing an image.
    """

    stage_name = "sharpness"
    other_names = ("RandomAdjustSharpness", "AdjustSharpness", "Sharpen")
    other_keys = {"sharpness": "amount", "sharpness_factor": "amount"}

    amount: Factor
    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Sharpness, ...]:
        return (cls(amount=0.9), cls(amount=(2.0, 2.0)), cls(amount=(0.0, 0.0), probability=0.5))

    @property
    def bounds(self) -> tuple[float, float]:
        return range_of(self.amount)

    def torchvision(self) -> Any:
        from torchvision.transforms import v2

        low, high = self.bounds
        if low != high:
            raise NotImplementedError("torchvision's RandomAdjustSharpness has one factor")
        return v2.RandomAdjustSharpness(low, self.probability)

    def filters(self, coefficients: Floats) -> s.Filters:
        ones = np.ones((len(coefficients), 3))
        return s.Filters(
            rows=ones,
            columns=ones / 13,
            centre=np.full(len(coefficients), 4 / 13),
            factor=coefficients[:, 1],
            active=coefficients[:, 0] > 0,
            border="keep",
        )
