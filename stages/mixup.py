"""mixup: blends each sample of a batch with another one, or replaces a box of it by the other's, as timm does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from gpuflow.arrays import Bools
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.mixture import MixMode, draw_mixture
from gpuflow.pipeline.parameters import Probability


@dataclass(frozen=True, kw_only=True, repr=False)
class Mixup(s.Mixing):
    """Blend each sample with its partner in the same batch, or now and then put a box of the partner's into it.

    As timm's Mixup: the partner of sample i of n is sample n - 1 - i. Wrapped and skipped samples, and the middle one
    of an odd number, stay as they are. Labels become probabilities of the classes, float32 [N, classes].

    Args:
        alpha: the share of own pixels is drawn from Beta(alpha, alpha).
        cutmix_alpha: the same for boxes, as in `cutmix`; 0 puts in no boxes.
        probability: that a batch, pair or sample is mixed.
        switch_probability: that a mixed one gets a box instead of being blended, where cutmix_alpha is above 0.
        mode: what shares its random numbers: a `batch`, a `pair` of partners, or nothing (`elem`).
        label_smoothing: each label is 1 minus this for its class plus this share spread over all classes.
        correct_lambda: whether the label's share is that of the pixels outside a box that the image's edge cuts.
    """

    stage_name: ClassVar[str] = "mixup"
    other_keys: ClassVar[Mapping[str, str]] = {"mixup_alpha": "alpha", "switch_prob": "switch_probability"}

    alpha: Annotated[float, s.Bounds(above=0, limit=1000)] = 1.0
    cutmix_alpha: Annotated[float, s.Bounds(least=0, limit=1000)] = 0.0
    probability: Probability = 1.0
    switch_probability: Probability = 0.5
    mode: MixMode = "batch"
    label_smoothing: Probability = 0.0
    correct_lambda: bool = True

    @classmethod
    def examples(cls) -> tuple[Mixup, ...]:
        return (
            cls(),
            cls(alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1),
            cls(alpha=0.2, probability=0.5, mode="elem"),
            cls(cutmix_alpha=0.3, switch_probability=0.9, mode="pair", correct_lambda=False),
        )

    @property
    def random(self) -> bool:
        return self.probability > 0

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        s.require_one_size(self, spec)
        if spec.dtype == "uint8":
            raise ValueError("takes pixels of a float type but gets uint8; put normalize before mixup")
        return spec

    def torchvision(self) -> Any:
        raise NotImplementedError("torchvision's MixUp takes another partner and the number of classes")

    def draw(self, keys: s.StageKeys, height: int, width: int, valid: Bools) -> s.Mixture:
        return draw_mixture(
            keys,
            height,
            width,
            valid,
            mode=self.mode,
            probability=self.probability,
            blend_alpha=self.alpha,
            box_alpha=self.cutmix_alpha,
            box_probability=self.switch_probability if self.cutmix_alpha > 0 else 0.0,
            share_of_area=self.correct_lambda,
        )
