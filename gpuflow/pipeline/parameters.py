"""Parameters that several stages share: their types, and how they are drawn for each sample."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from gpuflow.arrays import Floats
from gpuflow.pipeline.bounds import Bounds
from gpuflow.pipeline.rng import StageKeys

LONGEST = 65_535
"""The largest side of an image that a stage makes, and the most padding, in pixels: as long as a JPEG's can be."""
Side = Annotated[int, Bounds(least=1, limit=LONGEST)]
"""A length in pixels."""
Size = Annotated[int | tuple[int, int], Bounds(least=1, limit=LONGEST)]
"""A side in pixels, or [height, width]."""
_Padded = Bounds(least=0, limit=LONGEST)
Padding = Annotated[int, _Padded] | Annotated[tuple[int, int], _Padded] | Annotated[tuple[int, int, int, int], _Padded]
"""Pixels on every side, [left and right, top and bottom], or [left, top, right, bottom]."""
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
"""What `imagenet` stands for, in units of 0 to 1."""
Ratio = Annotated[tuple[float, float], Bounds(least=0.001, limit=1000, ascending=True)]
"""The range of an aspect ratio."""

OTHER_KEYS: Mapping[str, str] = {
    "p": "probability",
    "prob": "probability",
    "angle": "degrees",
    "degree": "degrees",
    "rotation": "degrees",
    "resample": "interpolation",
    "padding_mode": "border",
    "border_mode": "border",
    "fillcolor": "fill",
    "fill_value": "fill",
    "factor": "amount",
}
"""What torchvision, timm and Albumentations call parameters that several stages have, and their names here."""

Probability = Annotated[float, Bounds(least=0, most=1, words="a probability within [0, 1]")]
Factor = (
    Annotated[float, Bounds(least=0, limit=1000, words=">= 0 or [low, high]")]
    | Annotated[tuple[float, float], Bounds(least=0, limit=1000, ascending=True)]
)
"""How far factors are from 1, or the range that they are drawn from."""
Shift = (
    Annotated[float, Bounds(least=0, most=0.5, words="within [0, 0.5] or [low, high]")]
    | Annotated[tuple[float, float], Bounds(least=-0.5, most=0.5, ascending=True)]
)
"""How far hues are shifted at most, in turns of the colour circle, or the range of the shift."""


def size_pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) from an int or [height, width]."""
    return (size, size) if isinstance(size, int) else size


def sides_of(padding: int | tuple[int, int] | tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of a `Padding`."""
    if isinstance(padding, int):
        return (padding,) * 4
    x, y, *rest = padding
    return (x, y, rest[0], rest[1]) if rest else (x, y, x, y)


def range_of(value: float | tuple[float, float], *, neutral: float = 1.0) -> tuple[float, float]:
    """The range that a `Factor` or, with `neutral` 0, a `Shift` is drawn from, as torchvision's ColorJitter has it."""
    if isinstance(value, tuple):
        return value
    return (max(neutral - value, 0.0) if neutral else -value), neutral + value


def is_random(probability: float, bounds: tuple[float, float] | None = None, *, neutral: float = 1.0) -> bool:
    """Whether an operation is random: it changes only some samples, or its factor varies."""
    low, high = bounds if bounds is not None else (0.0, 0.0)
    changes = bounds is None or not low == high == neutral
    return probability > 0 and (low != high or (probability < 1 and changes))


def drawn_factors(keys: StageKeys, probability: float, bounds: tuple[float, float] = (0, 0)) -> Floats:
    """For N samples whether each is changed, 1 or 0, and its factor, uniform within the bounds: [N, 2]."""
    numbers = keys.uniform(2)
    low, high = bounds
    return np.array([numbers[:, 0] < probability, low + numbers[:, 1] * (high - low)]).T


def adjustment(name: str, bounds: tuple[float, float], probability: float) -> Any:
    """torchvision's transform for a stage of this name, whose function is adjust_<name>."""
    from torchvision.transforms import v2
    from torchvision.transforms.v2 import functional

    low, high = bounds
    adjust = functools.partial(getattr(functional, f"adjust_{name}"), **{f"{name}_factor": low})
    # ColorJitter rounds a factor to float32, which a fixed one is not here
    return with_probability(v2.Lambda(adjust) if low == high else v2.ColorJitter(**{name: bounds}), probability)


def with_probability(transform: Any, probability: float) -> Any:
    """torchvision's transform, applied with this probability."""
    from torchvision.transforms import v2

    return transform if probability == 1 else v2.RandomApply([transform], p=probability)
