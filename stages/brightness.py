"""brightness: multiplies levels by a factor."""

from __future__ import annotations

from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Factor, FactorAdjustment, Probability


@s.stage_class
class Brightness(FactorAdjustment):
    """Multiply levels by a factor, as torchvision's adjust_brightness does.

    Args:
        amount: the factor is drawn from [max(0, 1 - v), 1 + v] for a number v, or from [low, high].
        probability: the probability of changing an image.

    Examples:
        >>> Brightness(amount=0.4).bounds
        (0.6, 1.4)
    """

    stage_name = "brightness"
    operation = s.Operation.BRIGHTNESS
    other_names = ("RandomBrightness", "AdjustBrightness")
    other_keys = {"brightness": "amount", "brightness_factor": "amount"}

    amount: Factor
    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Brightness, ...]:
        return (cls(amount=0.4), cls(amount=(1.25, 1.25)), cls(amount=(0.5, 0.5), probability=0.5))
