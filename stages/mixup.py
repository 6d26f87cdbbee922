"""mixup: blends each sample of a batch with another one, or replaces a box of it by the other's, as timm does.

The draw is that of timm's `timm.data.Mixup`, from counter-based numbers instead of numpy's generator.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np

from gpuflow.arrays import Bools, Floats, Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Probability

MixMode = Literal["batch", "pair", "elem"]
"""Which samples share their random numbers: all of a batch, a sample and its partner, or none."""


@s.stage_class
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

    Examples:
        >>> keys = s.Keys(0, 0, np.arange(4)).stage("mixup", 0)
        >>> mixture = Mixup(alpha=0.2).draw(keys, 224, 224, np.ones(4, bool))
        >>> mixture.partners.tolist(), len(set(mixture.weights.tolist()))
        ([3, 2, 1, 0], 1)
    """

    stage_name = "mixup"
    other_keys = {"mixup_alpha": "alpha", "switch_prob": "switch_probability"}

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
        super().output(spec)
        if spec.dtype == "uint8":
            raise ValueError("takes pixels of a float type but gets uint8; put normalize before mixup")
        return spec

    def draw(self, keys: s.StageKeys, height: int, width: int, valid: Bools) -> s.Mixture:
        own = np.arange(len(valid))
        partners = np.arange(len(valid))
        rows = np.flatnonzero(valid)
        partners[rows] = rows[::-1]
        # The row whose random numbers each sample uses: the first one of those that share them.
        drawn_by = {"batch": np.zeros_like(own), "pair": np.minimum(own, partners), "elem": own}
        numbers = keys.uniform(6)[drawn_by[self.mode]]
        mixed = (numbers[:, 0] < self.probability) & (partners != own)
        boxed = (numbers[:, 1] < self.switch_probability) & (self.cutmix_alpha > 0)
        drawn = symmetric_beta(np.where(boxed, self.cutmix_alpha, self.alpha), numbers[:, 2], numbers[:, 3])
        weights = np.where(mixed, drawn.astype(np.float32).astype(np.float64), 1.0)
        boxed &= mixed
        boxes = np.where(boxed[:, None], _boxes(weights, height, width, numbers[:, 4], numbers[:, 5]), 0)
        outside = 1 - boxes[:, 2] * boxes[:, 3] / (height * width)
        return s.Mixture(
            partners=np.where(mixed, partners, own),
            weights=np.where(boxed, 1.0, weights),
            boxes=boxes,
            shares=np.where(boxed & self.correct_lambda, outside, weights),
        )


def symmetric_beta(alpha: Floats, first: Floats, second: Floats) -> Floats:
    """Draw numbers from Beta(alpha, alpha) for any alpha > 0, each from two uniform numbers in [0, 1).

    Exact, without rejection: if T has Student's distribution with 2 * alpha degrees of freedom, which Bailey's polar
    method gives, then (1 + T / sqrt(2 * alpha + T^2)) / 2 has the distribution Beta(alpha, alpha) (Devroye, "Random
    variate generation in one line of code", WSC 1996).
    """
    cosine = np.cos(2 * np.pi * second)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        square = np.expm1(-np.log1p(-first) / alpha) * cosine**2
        distance: Floats = np.sqrt(1 / (1 + 1 / square))
    signed: Floats = np.copysign(distance, cosine)
    return signed / 2 + 0.5


def _boxes(shares: Floats, height: int, width: int, row: Floats, column: Floats) -> Ints:
    """Return boxes [N, 4] that cover 1 - share of the image, around a uniform pixel, clipped to the image."""
    side = np.sqrt(1 - shares)
    ends = []
    for size, number in ((height, row), (width, column)):
        length = (size * side).astype(np.int64)
        centre = (number * size).astype(np.int64)
        ends.append((np.maximum(centre - length // 2, 0), np.minimum(centre + (length + 1) // 2, size)))
    (top, bottom), (left, right) = ends
    return np.stack([top, left, bottom - top, right - left], axis=1)
