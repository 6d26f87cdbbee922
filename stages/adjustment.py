"""What the stages share that run one colour operation of torchvision, with a probability and maybe by a factor."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from gpuflow.arrays import Floats, Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Factor, Probability, Shift, drawn_factors, is_random, range_of, with_probability


class Adjustment(s.Pointwise):
    """Runs one operation on the images that are drawn with a probability.

    weighs_colors: whether it weighs red, green and blue, and so refuses the order blue, green, red.
    neutral: the factor that changes nothing.
    """

    operation: ClassVar[s.Operation]
    weighs_colors: ClassVar[bool] = False
    neutral: ClassVar[float] = 1.0

    probability: Probability

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The range that the factor is drawn from; None for an operation without one."""
        return None

    @property
    def random(self) -> bool:
        return is_random(self.probability, self.bounds, neutral=self.neutral)

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        if self.weighs_colors:
            s.require_rgb(self, spec)
        return super().output(spec)

    def draw(self, keys: s.StageKeys) -> Floats:
        return drawn_factors(keys, self.probability, self.bounds or (0, 0))

    def operations(self, coefficients: Floats, height: Ints, width: Ints) -> s.Operations:
        return s.Operations.one(self.operation, coefficients[:, 0] > 0, coefficients[:, 1])


class FactorAdjustment(Adjustment):
    """Runs an operation by a factor, as torchvision's function adjust_<stage_name> does."""

    amount: Factor | Shift

    @property
    def bounds(self) -> tuple[float, float]:
        return range_of(self.amount, neutral=self.neutral)

    def torchvision(self) -> Any:
        from torchvision.transforms import v2
        from torchvision.transforms.v2 import functional

        name, (low, high) = self.stage_name, self.bounds
        adjust = functools.partial(getattr(functional, f"adjust_{name}"), **{f"{name}_factor": low})
        # ColorJitter rounds a factor to float32, which a fixed one is not here
        transform = v2.Lambda(adjust) if low == high else v2.ColorJitter(**{name: self.bounds})
        return with_probability(transform, self.probability)
