"""What rand_augment and auto_augment have of timm: its operations with levels of 0 to 10, its lists and its policies.

A level may be any number, because timm adds noise to it. Each sample draws its levels, operations and signs with the
probabilities of timm 1.0.31, but not with its random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, final

import numpy as np

from gpuflow.arrays import Bools, Floats, Ints
from gpuflow.stages.policy_parts import OPERATIONS, Choice, Drawn, MagnitudeTable

_BINS = 11
"""Levels 0, 1, ... 10 as bins."""
Noise = Literal["uniform"] | float


@dataclass(frozen=True, slots=True)
class Slope:
    """The magnitudes of an operation: a straight line from level 0 to level 10, and on from there.

    of: `height` or `width` if they are fractions of that. whole: the part above `low` is cut to a whole number.
    both_signs: each is negated for half of the samples. least, most: limits of the result. unit: what it is divided by.
    """

    low: float
    high: float
    both_signs: bool = False
    of: Literal["", "height", "width"] = ""
    whole: bool = False
    least: float = -math.inf
    most: float = math.inf
    unit: float = 1.0

    def at(self, levels: Floats, negated: Bools, side: Ints | int) -> Floats:
        """Return the magnitudes of levels [N]. side: what they are fractions of, in pixels, if they are."""
        part = levels / 10 * (self.high - self.low)
        found = self.low + (np.trunc(part) if self.whole else part)
        found = np.where(negated & self.both_signs, -found, found)
        return np.clip(found, self.least, self.most) * side / self.unit


_COLORS = ("Color", "Contrast", "Brightness", "Sharpness")
_SHEAR = Slope(0.0, 0.3, both_signs=True)
SLOPES: dict[str, Slope | None] = {
    "AutoContrast": None,
    "Equalize": None,
    "Invert": None,
    "Rotate": Slope(0.0, 30.0, both_signs=True),
    "Posterize": Slope(0.0, 4.0, whole=True, most=8.0),
    "Solarize": Slope(0.0, 256.0, whole=True, most=256.0, unit=255.0),
    "SolarizeAdd": Slope(0.0, 110.0, whole=True, most=128.0),
    **dict.fromkeys(_COLORS, Slope(-0.9, 0.9)),
    "ShearX": _SHEAR,
    "ShearY": _SHEAR,
    "TranslateX": Slope(0.0, 0.45, both_signs=True, of="width"),
    "TranslateY": Slope(0.0, 0.45, both_signs=True, of="height"),
    "Desaturate": Slope(-0.5, -1.0, least=-1.0, most=-0.5),
    "GaussianBlur": Slope(0.1, 2.0, least=0.1, most=2.0),
}
"""timm's operations as they are. A magnitude of SolarizeAdd is a number of levels, of GaussianBlur one of pixels; the
others have the units of `policy_parts`."""
INCREASING: dict[str, Slope | None] = {
    **SLOPES,
    "Posterize": Slope(4.0, 0.0, whole=True, least=0.0),
    "Solarize": Slope(256.0, 0.0, whole=True, least=0.0, unit=255.0),
    **dict.fromkeys(_COLORS, Slope(0.0, 0.9, both_signs=True, least=-0.9)),
}
"""timm's `Increasing` operations, which change an image more the higher the level is."""
ORIGINAL = {**SLOPES, "Posterize": Slope(4.0, 8.0, whole=True, most=8.0)}
RESEARCH = {**SLOPES, "Posterize": INCREASING["Posterize"]}
_LIST = tuple(SLOPES)[:-2]
"""All but Desaturate and GaussianBlur, in timm's order, which is that of the draws."""
_THREE = ("Solarize", "Desaturate", "GaussianBlur")
_WEIGHTS = {
    "Rotate": 3.0,
    **dict.fromkeys(("ShearX", "ShearY"), 2.0),
    **dict.fromkeys(("TranslateX", "TranslateY"), 1.0),
    **dict.fromkeys(("Color", "Sharpness", "AutoContrast"), 0.25),
    **dict.fromkeys(("Solarize", "SolarizeAdd", "Contrast", "Brightness", "Equalize", "Posterize", "Invert"), 0.05),
}
_THREE_WEIGHTS = {
    **dict.fromkeys(_THREE, 6.0),
    "Rotate": 3.0,
    **dict.fromkeys(("ShearX", "ShearY"), 2.0),
    **dict.fromkeys(("Posterize", "AutoContrast", "Color", "Sharpness", "Contrast"), 1.0),
    **dict.fromkeys(("Brightness", "Equalize", "Invert"), 1.0),
}


@final
class Levels:
    """Looks up the magnitudes of operations at levels, as `Magnitudes` does at bins."""

    def __init__(self, slopes: Mapping[str, Slope | None]) -> None:
        self._slopes = {OPERATIONS.index(name): slope for name, slope in slopes.items() if slope is not None}

    def of(self, choice: Choice, sizes: tuple[Ints, Ints] | None = None) -> Drawn:
        """Return the chosen operations and their magnitudes; see `Magnitudes.of`. A choice's place is its level."""
        magnitude = np.zeros(len(choice.operation))
        for number, slope in self._slopes.items():
            rows = np.flatnonzero(choice.operation == number)
            side: Ints | int = 1
            if slope.of:
                side = 0 if sizes is None else sizes[slope.of == "width"][rows]
            magnitude[rows] = slope.at(choice.place[rows], choice.negated[rows], side)
        return Drawn(choice.operation, magnitude)


@dataclass(frozen=True, slots=True)
class Space:
    """A list of a RandAugment: the operations, and their weights if they are drawn without repetition."""

    names: tuple[str, ...]
    magnitudes: MagnitudeTable
    weights: tuple[float, ...] = ()


_LEVELS = Levels(INCREASING)
SPACES = {
    "timm": Space(_LIST, Levels(SLOPES)),
    "timm_increasing": Space(_LIST, _LEVELS),
    "timm_weights": Space(tuple(_WEIGHTS), _LEVELS, tuple(_WEIGHTS.values())),
    "timm_3a": Space(_THREE, _LEVELS),
    "timm_3aw": Space(tuple(_THREE_WEIGHTS), _LEVELS, tuple(_THREE_WEIGHTS.values())),
}


def choice_at(operation: Ints, levels: Ints | int, noise: Noise, limit: float, numbers: Floats) -> Choice:
    """Return a round's choice: levels with noise, within 0 and `limit`.

    noise: `uniform` draws from 0 to the level; a number is the standard deviation. numbers: random, [N, 3].
    """
    mean = np.broadcast_to(np.asarray(levels, np.float64), operation.shape)
    if noise == "uniform":
        mean = mean * numbers[:, 0]
    elif noise > 0:
        mean = mean + noise * np.sqrt(-2 * np.log1p(-numbers[:, 0])) * np.cos(2 * np.pi * numbers[:, 1])
    return Choice(operation, np.clip(mean, 0, limit), numbers[:, 2] < 0.5, _BINS)


def blur_levels(levels: Floats, numbers: Floats) -> Floats:
    """Return the levels of GaussianBlur whose sigmas are drawn, by numbers [N], as timm's GaussianBlurRand does.

    Those are uniform from 0.1 to the sigma of the level.
    """
    sigma = 0.1 + numbers * (2.0 * levels / 10 - 0.1)
    return (sigma - 0.1) / 0.19


def ordered_by_weight(numbers: Floats, weights: Collection[float], turn: int) -> Ints:
    """Return for random numbers [N, K] the place [N] of weight that comes next after `turn` others, without repetition.

    Each next one is drawn by the weights of those that are left.
    """
    waits = -np.log1p(-numbers) / np.array(weights)
    places: Ints = np.argsort(waits, axis=1)[:, turn]
    return places
