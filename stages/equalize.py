"""equalize: equalizes the histogram of each channel."""

from __future__ import annotations

from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Adjustment, Probability


@s.stage_class
class Equalize(Adjustment):
    """Equalize the histogram of each channel, as torchvision's equalize does.

    Args:
        probability: the probability of changing an image.
    """

    stage_name = "equalize"
    operation = s.Operation.EQUALIZE
    other_names = ("RandomEqualize",)

    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Equalize, ...]:
        return (cls(), cls(probability=0.5))
