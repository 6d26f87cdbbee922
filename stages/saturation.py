"""saturation: blends an image with its gray."""

from __future__ import annotations

from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Factor, FactorAdjustment, Probability


@s.stage_class
class Saturation(FactorAdjustment):
    """Blend an image with its gray, as torchvision's adjust_saturation does. Gray images do not change.

    Args:
        amount: the factor is drawn from [max(0, 1 - v), 1 + v] for a number v, or from [low, high].
        probability: the probability of changing an image.
    """

    stage_name = "saturation"
    tolerance = 1.0
    operation = s.Operation.SATURATION
    weighs_colors = True
    other_names = ("Color", "AdjustSaturation")
    other_keys = {"saturation": "amount", "saturation_factor": "amount"}

    amount: Factor
    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Saturation, ...]:
        return (cls(amount=0.4), cls(amount=(1.3, 1.3)), cls(amount=(0.5, 0.5), probability=0.5))
