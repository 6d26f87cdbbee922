"""flip: equals torchvision's flips, each with its declared probability."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as tv

from gpuflow.errors import ConfigError
from gpuflow.pipeline import stage as s
from gpuflow.stages import CenterCrop, Decode, Flip, Normalize
from tests.images import jpeg, photo
from tests.running import alone, decoded, images, keys_of, program_of
from tests.texts import outline


@pytest.mark.parametrize(("horizontal", "vertical"), [(0.5, 0.0), (0.5, 1.0), (0.0, 0.5), (1.0, 0.5), (0.2, 0.3)])
def test_either_direction_may_be_drawn(horizontal: float, vertical: float) -> None:
    assert Flip(horizontal=horizontal, vertical=vertical).random


@pytest.mark.parametrize("color", ["rgb", "bgr", "gray"])
@pytest.mark.parametrize("horizontal", [0.0, 1.0])
@pytest.mark.parametrize("vertical", [0.0, 1.0])
def test_pixels_are_those_of_torchvision(horizontal: float, vertical: float, color: str) -> None:
    stage = Flip(horizontal=horizontal, vertical=vertical)
    for size in ((75, 101), (1, 1), (1, 8), (8, 1)):
        data = jpeg(photo(*size), "4:4:4")
        image = decoded(data, color)
        expected = tv.horizontal_flip(image) if horizontal else image
        expected = tv.vertical_flip(expected) if vertical else expected
        stages = (Decode(color=color), stage, CenterCrop(size=size))  # type: ignore[arg-type]
        assert torch.equal(images(program_of(*stages), [data])[0], expected)
    assert not stage.random


def test_inside_a_pipeline(photo_bytes: bytes) -> None:
    stages = (CenterCrop(size=40), Flip(horizontal=0.5, vertical=0.5), Normalize())
    keys = keys_of(16)
    batch = images(program_of(Decode(), *stages), [photo_bytes] * 16, keys)
    (move,) = stages[1].draw(keys.stage("flip", 0), np.full(16, 40), np.full(16, 40))
    assert isinstance(move, s.Flip)
    crop = alone(stages[0], photo_bytes)
    for i, result in enumerate(batch):
        expected = tv.horizontal_flip(crop) if move.horizontal[i] else crop
        expected = tv.vertical_flip(expected) if move.vertical[i] else expected
        assert torch.equal(result, Normalize().torchvision()(expected))
    assert len({(bool(h), bool(v)) for h, v in zip(move.horizontal, move.vertical, strict=True)}) == 4


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_flips_have_their_declared_probabilities_and_are_independent(chance: float) -> None:
    count = 10_000
    sizes = np.ones(count, np.int64)
    (move,) = Flip(horizontal=chance, vertical=0.5).draw(keys_of(count).stage("flip", 0), sizes, sizes)
    assert isinstance(move, s.Flip)
    assert abs(move.horizontal.mean() - chance) < 0.02
    assert abs(move.vertical[move.horizontal].mean() - 0.5) < 0.05


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"horizontal": 1.5}, "flip.horizontal config.range, got 1.5"),
        ({"vertical": -0.1}, "flip.vertical config.range, got -0.1"),
        ({"vertical": float("nan")}, "flip.vertical config.range, got nan"),
    ],
)
def test_errors(parameters: dict[str, float], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Flip(**parameters)
    assert outline(caught.value) == expected
