"""grayscale: replaces colours by gray, in as many channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Probability
from gpuflow.stages.adjustment import Adjustment


@dataclass(frozen=True, kw_only=True, repr=False)
class Grayscale(Adjustment):
    """Replace the colours of an image by its gray, in all three channels, as torchvision's RandomGrayscale does.

    Gray images do not change. For images of one channel, decode with `color: gray`.

    Args:
        probability: the probability of changing an image.
    """

    stage_name: ClassVar[str] = "grayscale"
    tolerance: ClassVar[float] = 1.0
    operation: ClassVar[s.Operation] = s.Operation.GRAYSCALE
    weighs_colors: ClassVar[bool] = True
    other_names: ClassVar[tuple[str, ...]] = ("RandomGrayscale", "ToGray", "Greyscale")

    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Grayscale, ...]:
        return (cls(), cls(probability=0.5))

    def torchvision(self) -> Any:
        from torchvision.transforms import v2

        return v2.RandomGrayscale(self.probability)
