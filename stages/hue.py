"""hue: shifts hues on the colour circle."""

from __future__ import annotations

from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import FactorAdjustment, Probability, Shift


@s.stage_class
class Hue(FactorAdjustment):
    """Shift hues, as torchvision's adjust_hue does. Gray images do not change.

    Args:
        amount: the shift is drawn from [-v, v] for a number v, or from [low, high], in turns of the colour circle.
        probability: the probability of changing an image.
    """

    stage_name = "hue"
    operation = s.Operation.HUE
    weighs_colors = True
    neutral = 0.0
    other_names = ("AdjustHue",)
    other_keys = {"hue": "amount", "hue_factor": "amount"}

    amount: Shift
    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Hue, ...]:
        return (cls(amount=0.2), cls(amount=(-0.3, -0.3)), cls(amount=(0.25, 0.25), probability=0.5))
