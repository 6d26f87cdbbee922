"""hue: shifts hues on the colour circle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Probability, Shift
from gpuflow.stages.adjustment import FactorAdjustment


@dataclass(frozen=True, kw_only=True, repr=False)
class Hue(FactorAdjustment):
    """Shift hues, as torchvision's adjust_hue does. Gray images do not change.

    Args:
        amount: the shift is drawn from [-v, v] for a number v, or from [low, high], in turns of the colour circle.
        probability: the probability of changing an image.
    """

    stage_name: ClassVar[str] = "hue"
    operation: ClassVar[s.Operation] = s.Operation.HUE
    weighs_colors: ClassVar[bool] = True
    neutral: ClassVar[float] = 0.0
    other_names: ClassVar[tuple[str, ...]] = ("AdjustHue",)
    other_keys: ClassVar[Mapping[str, str]] = {"hue": "amount", "hue_factor": "amount"}

    amount: Shift
    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Hue, ...]:
        return (cls(amount=0.2), cls(amount=(-0.3, -0.3)), cls(amount=(0.25, 0.25), probability=0.5))
