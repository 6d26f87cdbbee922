"""What `gpuflow import` writes gives the pixels that the transforms give, wherever these convert to floats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torchvision.transforms import InterpolationMode, v2

import gpuflow
from gpuflow.migration.from_torchvision import read_transform
from gpuflow.migration.sources import to_yaml
from gpuflow.stages import STAGES
from tests.images import photo

HEIGHT, WIDTH = 30, 40
FLOATS = v2.ToDtype(torch.float32, scale=True)
Maker = Callable[[Random, float], Any]
"""Makes a transform. The second argument is how many levels a 1 is in the images that it gets."""
LEVELS = (0, 7, 128, 255)
ROUNDING = 4.0
"""Levels that three transforms may be apart, as each rounds where torchvision's keep floats."""


def resize(draw: Random, unit: float) -> Any:
    mode = draw.choice([InterpolationMode.NEAREST, InterpolationMode.BILINEAR, InterpolationMode.BICUBIC])
    return v2.Resize((draw.randint(20, 50), draw.randint(20, 50)), mode, antialias=draw.random() < 0.5)


def rotate(draw: Random, unit: float) -> Any:
    angle, mode = draw.uniform(-30, 30), draw.choice([InterpolationMode.NEAREST, InterpolationMode.BILINEAR])
    return v2.RandomRotation((angle, angle), mode, fill=fill(draw, unit))


def affine(draw: Random, unit: float) -> Any:
    angle, mode = draw.uniform(-30, 30), draw.choice([InterpolationMode.NEAREST, InterpolationMode.BILINEAR])
    return v2.RandomAffine((angle, angle), scale=(0.8, 0.8), interpolation=mode, fill=fill(draw, unit))


def fill(draw: Random, unit: float) -> Any:
    """Levels in the units that the image has."""
    one, *_ = several = [draw.choice(LEVELS) / unit for _ in range(3)]
    return one if draw.random() < 0.5 else several


def jitter(draw: Random, unit: float) -> Any:
    factor = draw.uniform(0.7, 1.3)
    return v2.ColorJitter(**{draw.choice(["brightness", "contrast", "saturation"]): (factor, factor)})


GEOMETRY: tuple[Maker, ...] = (
    resize,
    lambda draw, unit: v2.CenterCrop((20, 20)),
    lambda draw, unit: v2.RandomHorizontalFlip(1.0),
    lambda draw, unit: v2.Pad([1, 2, 3, 4], fill=fill(draw, unit)),
)
COLOURS: tuple[Maker, ...] = (
    jitter,
    lambda draw, unit: v2.Grayscale(3),
    lambda draw, unit: v2.RandomInvert(1.0),
    lambda draw, unit: v2.RandomAdjustSharpness(0.5, 1.0),
    lambda draw, unit: v2.GaussianBlur(3, (0.9, 0.9)),
)
THRESHOLDS: tuple[Maker, ...] = (
    lambda draw, unit: v2.RandomSolarize(draw.choice(LEVELS) / unit, p=1.0),
    lambda draw, unit: v2.RandomPosterize(draw.randint(1, 8), p=1.0),
    lambda draw, unit: v2.RandomEqualize(1.0),
)
"""Rounded levels before these differ by more than a level behind them, so they come first."""


@pytest.mark.parametrize("seed", range(60))
def test_transforms_that_convert_to_floats_at_any_place(seed: int, tmp_path: Path) -> None:
    draw = Random(seed)
    makers = [draw.choice(THRESHOLDS)] * draw.randint(0, 1)
    makers += [draw.choice((*GEOMETRY, *COLOURS, *[draw.choice((rotate, affine))])) for _ in range(2)]
    if sum(maker in (rotate, affine) for maker in makers) > 1:
        makers.pop()  # two warps in a row run as one
    place = draw.randint(0, len(makers))
    before, after = (
        [maker(draw, unit) for maker in part] for unit, part in ((1, makers[:place]), (255, makers[place:]))
    )
    transform = v2.Compose([v2.ToImage(), v2.CenterCrop((HEIGHT, WIDTH)), *before, FLOATS, *after])
    image = torch.from_numpy(photo(HEIGHT, WIDTH, seed=seed)).permute(2, 0, 1).contiguous()
    wanted = transform(image).as_subclass(torch.Tensor)
    found = read_transform(transform, "user:transform", STAGES, tensor=True)
    assert found.gaps == ()
    file = tmp_path / "x.yaml"
    file.write_text(to_yaml([found]))
    with gpuflow.transform(file, next(iter(found.pipelines))) as ours:
        (given,) = ours([image], epoch=0, positions=[0])
    assert given.shape == wanted.shape
    levels = (given - wanted).abs() * 255
    assert levels.max() <= ROUNDING, f"{transform}\n{file.read_text()}"
