"""contrast: blends an image with its mean gray."""

from __future__ import annotations

from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Factor, FactorAdjustment, Probability


@s.stage_class
class Contrast(FactorAdjustment):
    """Blend an image with its mean gray, as torchvision's adjust_contrast does.

    Args:
        amount: the factor is drawn from [max(0, 1 - v), 1 + v] for a number v, or from [low, high].
        probability: the probability of changing an image.
    """

    stage_name = "contrast"
    tolerance = 1.0
    operation = s.Operation.CONTRAST
    weighs_colors = True
    other_names = ("RandomContrast", "AdjustContrast")
    other_keys = {"contrast": "amount", "contrast_factor": "amount"}

    amount: Factor
    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Contrast, ...]:
        return (cls(amount=0.4), cls(amount=(1.25, 1.25)), cls(amount=(0.5, 0.5), probability=0.5))
