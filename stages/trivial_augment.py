"""trivial_augment: applies one operation at one magnitude, both drawn for each sample (TrivialAugment Wide)."""

from __future__ import annotations

from typing import Annotated, Any

from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Fill, WarpInterpolation
from gpuflow.stages.policy_parts import (
    LISTED,
    RANGES,
    AugmentPolicy,
    Choice,
    Magnitudes,
    Range,
    of_both_signs,
    uniform_places,
)

_RANGES = {
    **dict.fromkeys(("ShearX", "ShearY"), of_both_signs(0.99)),
    **dict.fromkeys(("TranslateX", "TranslateY"), of_both_signs(32.0)),
    "Rotate": of_both_signs(135.0),
    **dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), of_both_signs(0.99)),
    "Posterize": Range(8.0, 2.0, whole=True),
    "Solarize": RANGES["Solarize"],
}
"""The magnitudes of torchvision's TrivialAugmentWide."""


@s.stage_class
class TrivialAugment(AugmentPolicy):
    """Apply one operation at a magnitude that is drawn, too, as torchvision's TrivialAugmentWide does.

    Müller and Hutter, "TrivialAugment: Tuning-free Yet State-of-the-Art Data Augmentation", ICCV 2021.

    With `interpolation: nearest`, all pixels are torchvision's, as in `rand_augment`.

    Args:
        bins: into how many magnitudes the range of each operation is divided.
        interpolation: how pixels are resampled.
        fill: the level outside the image, or [red, green, blue].
    """

    stage_name = "trivial_augment"
    magnitudes = Magnitudes(_RANGES)
    rounds = 1
    other_names = ("TrivialAugmentWide",)
    other_keys = {"num_magnitude_bins": "bins"}

    bins: Annotated[int, s.Bounds(least=2, limit=1000)] = 31
    interpolation: WarpInterpolation = "nearest"
    fill: Fill = 0

    @classmethod
    def examples(cls) -> tuple[TrivialAugment, ...]:
        return (cls(), cls(bins=11, interpolation="bilinear", fill=127))

    def choose(self, keys: s.StageKeys, turn: int) -> Choice:
        numbers = keys.uniform(3)
        operation, place = uniform_places(numbers[:, 0], len(LISTED)), uniform_places(numbers[:, 1], self.bins)
        return Choice(operation, place, numbers[:, 2] < 0.5, self.bins)

    def torchvision(self) -> Any:
        return self.transform("TrivialAugmentWide", num_magnitude_bins=self.bins)
