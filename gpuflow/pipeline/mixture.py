"""How the samples of a batch are mixed with one another: a value for each batch, and the draw that mixing stages share.

The draw is that of timm's `timm.data.Mixup`, from counter-based numbers instead of numpy's generator.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, assert_never

import numpy as np

from gpuflow.arrays import Bools, Floats, Ints
from gpuflow.pipeline.rng import StageKeys

MixMode = Literal["batch", "pair", "elem"]
"""Which samples share their random numbers: all of a batch, a sample and its partner, or none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """What each of the N samples of a batch takes from its partner.

    Pixels become weight * own + (1 - weight) * the partner's; then the box is copied from the partner's image. Labels,
    as probabilities of the classes, become share * own + (1 - share) * the partner's. "The partner's" are those from
    before mixing.

    partners [N]: the row of each sample's partner; its own row if it stays as it is.
    weights [N]: of its own pixels, in [0, 1] and exact in float32. 1 for a sample that stays as it is.
    boxes [N, 4]: y, x, height, width in pixels; zeros for none.
    shares [N]: of its own label, in [0, 1].
    """

    partners: Ints
    weights: Floats
    boxes: Ints
    shares: Floats

    @property
    def changed(self) -> Bools:
        """Return which samples have other pixels than before, [N]."""
        takes: Bools = (self.weights != 1) | self.boxes[:, 2:].all(axis=1)
        other: Bools = self.partners != np.arange(len(takes))
        return np.logical_and(takes, other)

    def among(self, kept: Bools) -> Mixture:
        """Return the mixture in which a sample stays as it is if it, or its partner, is not among `kept` [N]."""
        own = np.arange(len(kept))
        stays = ~(kept & kept[self.partners]) | (self.partners == own)
        return dataclasses.replace(
            self,
            partners=np.where(stays, own, self.partners),
            weights=np.where(stays, 1.0, self.weights),
            boxes=np.where(stays[:, None], 0, self.boxes),
            shares=np.where(stays, 1.0, self.shares),
        )


def draw_mixture(
    keys: StageKeys,
    height: int,
    width: int,
    valid: Bools,
    *,
    mode: MixMode,
    probability: float,
    blend_alpha: float,
    box_alpha: float,
    box_probability: float,
    share_of_area: bool,
) -> Mixture:
    """Draw a mixture of one rank's batch, as `timm.data.Mixup` does.

    The partner of valid sample i of n is valid sample n - 1 - i. Samples that are not valid, and the middle one of an
    odd number, stay as they are.

    Args:
        keys: of the batch's samples (N).
        height, width: of the images.
        valid [N]: false where a sample was wrapped around to fill the last step of several ranks.
        mode: which samples share their numbers: those of a batch are its first sample's, those of a pair its first's.
        probability: that a sample, pair or batch is mixed.
        blend_alpha: the weight of blended pixels is drawn from Beta(alpha, alpha).
        box_alpha: the share of the image outside the box is.
        box_probability: of a box instead of blending.
        share_of_area: whether a label's share is that of the pixels outside the clipped box, instead of the drawn one.
    """
    own = np.arange(len(valid))
    partners = np.arange(len(valid))
    rows = np.flatnonzero(valid)
    partners[rows] = rows[::-1]
    numbers = keys.uniform(6)[_drawn_by(mode, own, partners)]
    mixed = (numbers[:, 0] < probability) & (partners != own)
    boxed = numbers[:, 1] < box_probability
    drawn = symmetric_beta(np.where(boxed, box_alpha, blend_alpha), numbers[:, 2], numbers[:, 3])
    weights = np.where(mixed, drawn.astype(np.float32).astype(np.float64), 1.0)
    boxed &= mixed
    boxes = np.where(boxed[:, None], _boxes(weights, height, width, numbers[:, 4], numbers[:, 5]), 0)
    outside = 1 - boxes[:, 2] * boxes[:, 3] / (height * width)
    return Mixture(
        partners=np.where(mixed, partners, own),
        weights=np.where(boxed, 1.0, weights),
        boxes=boxes,
        shares=np.where(boxed & share_of_area, outside, weights),
    )


def _drawn_by(mode: MixMode, own: Ints, partners: Ints) -> Ints:
    """Return the row whose random numbers each sample uses."""
    match mode:
        case "batch":
            return np.zeros_like(own)
        case "pair":
            return np.minimum(own, partners)
        case "elem":
            return own
        case _:
            assert_never(mode)


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
