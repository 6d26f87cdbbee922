"""trivial_augment: applies one operation at one magnitude, both drawn for each sample (TrivialAugment Wide)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Fill, WarpInterpolation
from gpuflow.stages.policy_parts import AugmentPolicy, Choice, Magnitudes, Range, of_both_signs, uniform_places

_SPACE: dict[str, Range | None] = {
    "Identity": None,
    "ShearX": of_both_signs(0.99),
    "ShearY": of_both_signs(0.99),
    "TranslateX": of_both_signs(32.0),
    "TranslateY": of_both_signs(32.0),
    "Rotate": of_both_signs(135.0),
    "Brightness": of_both_signs(0.99),
    "Color": of_both_signs(0.99),
    "Contrast": of_both_signs(0.99),
    "Sharpness": of_both_signs(0.99),
    "Posterize": Range(8.0, 2.0, whole=True),
    "Solarize": Range(1.0, 0.0),
    "AutoContrast": None,
    "Equalize": None,
}
"""torchvision's TrivialAugmentWide, in its order."""


@dataclass(frozen=True, kw_only=True, repr=False)
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
    torchvision_magnitudes = Magnitudes(_SPACE)
    other_names = ("TrivialAugmentWide",)
    other_keys = {"num_magnitude_bins": "bins"}

    bins: Annotated[int, s.Bounds(least=2, limit=1000)] = 31
    interpolation: WarpInterpolation = "nearest"
    fill: Fill = 0

    @classmethod
    def examples(cls) -> tuple[TrivialAugment, ...]:
        return (cls(), cls(bins=11, interpolation="bilinear", fill=127))

    @property
    def rounds(self) -> int:
        return 1

    def choose(self, keys: s.StageKeys, turn: int) -> Choice:
        numbers = keys.uniform(3)
        operation, place = uniform_places(numbers[:, 0], len(_SPACE)), uniform_places(numbers[:, 1], self.bins)
        return Choice(operation, place, numbers[:, 2] < 0.5, self.bins)

    def torchvision(self) -> Any:
        from torchvision.transforms import InterpolationMode, v2

        mode = InterpolationMode(self.interpolation)
        return v2.TrivialAugmentWide(self.bins, interpolation=mode, fill=self.fill)
