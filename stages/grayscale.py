"""grayscale: replaces colours by gray, in as many channels."""

from __future__ import annotations

from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Adjustment, Probability


@s.stage_class
class Grayscale(Adjustment):
    """Replace the colours of an image by its gray, in all three channels, as torchvision's RandomGrayscale does.

    Gray images do not change. For images of one channel, decode with `color: gray`.

    Args:
        probability: the probability of changing an image.
    """

    stage_name = "grayscale"
    tolerance = 1.0
    operation = s.Operation.GRAYSCALE
    weighs_colors = True
    other_names = ("RandomGrayscale", "ToGray", "Greyscale")

    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Grayscale, ...]:
        return (cls(), cls(probability=0.5))
