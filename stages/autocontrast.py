"""autocontrast: stretches each channel to all levels."""

from __future__ import annotations

from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Adjustment, Probability


@s.stage_class
class Autocontrast(Adjustment):
    """Stretch each channel to the levels 0-255, as torchvision's autocontrast does.

    Args:
        probability: the probability of changing an image.
    """

    stage_name = "autocontrast"
    operation = s.Operation.AUTOCONTRAST
    other_names = ("RandomAutocontrast",)

    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Autocontrast, ...]:
        return (cls(), cls(probability=0.5))
