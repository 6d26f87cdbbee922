"""equalize: equalizes the histogram of each channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Probability
from gpuflow.stages.adjustment import Adjustment


@dataclass(frozen=True, kw_only=True, repr=False)
class Equalize(Adjustment):
    """Equalize the histogram of each channel, as torchvision's equalize does.

    Args:
        probability: the probability of changing an image.
    """

    stage_name: ClassVar[str] = "equalize"
    operation: ClassVar[s.Operation] = s.Operation.EQUALIZE
    other_names: ClassVar[tuple[str, ...]] = ("RandomEqualize",)

    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Equalize, ...]:
        return (cls(), cls(probability=0.5))

    def torchvision(self) -> Any:
        from torchvision.transforms import v2

        return v2.RandomEqualize(self.probability)
