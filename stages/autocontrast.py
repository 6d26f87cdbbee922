"""autocontrast: stretches each channel to all levels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Probability
from gpuflow.stages.adjustment import Adjustment


@dataclass(frozen=True, kw_only=True, repr=False)
class Autocontrast(Adjustment):
    """Stretch each channel to the levels 0-255, as torchvision's autocontrast does.

    Args:
        probability: the probability of changing an image.
    """

    stage_name: ClassVar[str] = "autocontrast"
    operation: ClassVar[s.Operation] = s.Operation.AUTOCONTRAST
    other_names: ClassVar[tuple[str, ...]] = ("RandomAutocontrast",)

    probability: Probability = 1.0

    @classmethod
    def examples(cls) -> tuple[Autocontrast, ...]:
        return (cls(), cls(probability=0.5))

    def torchvision(self) -> Any:
        from torchvision.transforms import v2

        return v2.RandomAutocontrast(self.probability)
