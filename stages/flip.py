"""flip: mirrors left-right or top-bottom, each with its own probability."""

from __future__ import annotations

from typing import Any

from gpuflow.arrays import Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Probability


@s.stage_class
class Flip(s.Geometry):
    """Mirror an image at random.

    Args:
        horizontal: the probability of mirroring left and right.
        vertical: the probability of mirroring top and bottom.

    Examples:
        >>> flips = Flip(horizontal=1.0)
        >>> flips, flips.random
        (flip(horizontal=1.0), False)
    """

    stage_name = "flip"
    other_names = (
        "RandomHorizontalFlip",
        "RandomVerticalFlip",
        "HorizontalFlip",
        "VerticalFlip",
        "HFlip",
        "VFlip",
    )
    other_keys = {"p": "horizontal"}

    horizontal: Probability = 0.0
    vertical: Probability = 0.0

    @classmethod
    def examples(cls) -> tuple[Flip, ...]:
        return (
            cls(),
            cls(horizontal=0.5),
            cls(vertical=1.0),
            cls(horizontal=0.5, vertical=0.25),
        )

    @property
    def random(self) -> bool:
        return self.horizontal not in (0, 1) or self.vertical not in (0, 1)

    def torchvision(self) -> Any:
        from torchvision.transforms import v2

        return v2.Compose([v2.RandomHorizontalFlip(self.horizontal), v2.RandomVerticalFlip(self.vertical)])

    def draw(self, keys: s.StageKeys, height: Ints, width: Ints) -> tuple[s.Move, ...]:
        chance = keys.uniform(2)
        return (s.Flip(chance[:, 0] < self.horizontal, chance[:, 1] < self.vertical),)
