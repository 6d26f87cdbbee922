"""letterbox: the whole image at its aspect ratio, centred in a box of fixed size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from gpuflow.errors import ConfigError
from gpuflow.pipeline.moves import forward
from gpuflow.pipeline.stage import ImageSpec
from gpuflow.stages import CenterCrop, Decode, Flip, Letterbox
from tests.images import photo, png
from tests.running import decoded, images, keys_of, program_of
from tests.texts import outline


@pytest.mark.parametrize(
    ("size", "box", "inner", "corner"),
    [
        ((40, 80), (64, 64), (32, 64), (16, 0)),
        ((80, 40), (64, 64), (64, 32), (0, 16)),
        ((33, 50), (64, 64), (42, 64), (11, 0)),
        ((10, 10), (30, 51), (30, 30), (0, 10)),
        ((1, 130), (30, 40), (1, 40), (14, 0)),
        ((50, 60), (50, 60), (50, 60), (0, 0)),
    ],
)
@pytest.mark.parametrize("fill", [114, (9, 200, 50)])
def test_pixels_are_those_of_torchvision(size: Any, box: Any, inner: Any, corner: Any, fill: Any) -> None:
    data, stage = png(photo(*size)), Letterbox(size=box, fill=fill)
    (found,) = images(program_of(Decode(), stage), [data])
    resized = tv.resize_image(decoded(data), list(inner), InterpolationMode.BILINEAR)
    (y, x), levels = corner, torch.tensor(fill if isinstance(fill, tuple) else [fill] * 3, dtype=torch.uint8)
    expected = levels[:, None, None].repeat(1, *box)
    expected[:, y : y + inner[0], x : x + inner[1]] = resized
    assert torch.equal(found, expected)
    assert torch.equal(stage.torchvision()(decoded(data)), expected)


def test_it_is_one_resampling_with_the_crops_and_flips_around_it() -> None:
    stages = (Flip(horizontal=1.0), Letterbox(size=48, fill=0), Flip(vertical=1.0), CenterCrop(size=40))
    program = program_of(Decode(), *stages)
    assert len(program.steps) == 1
    data = png(photo(30, 70))
    expected = decoded(data)
    for stage in stages:
        expected = stage.torchvision()(expected)
    assert torch.equal(images(program, [data])[0], expected)


def test_a_fill_of_three_values_needs_three_channels() -> None:
    gray = ImageSpec(shape=(None, None, 1), color="gray")
    assert Letterbox(size=9, fill=3).output(gray).shape == (9, 9, 1)
    with pytest.raises(ValueError, match="fills with 3 levels"):
        Letterbox(size=9, fill=(1, 2, 3)).output(gray)


def test_points_follow() -> None:
    matrix, sizes = np.eye(3), (np.array([40]), np.array([80]))
    for move in Letterbox(size=64).draw(keys_of(1).stage("letterbox", 0), *sizes):
        step, *rest = forward(move, *sizes)
        matrix, sizes = step[0] @ matrix, (rest[0], rest[1])
    assert (matrix @ [0, 0, 1]).tolist() == [0, 16, 1]
    assert (matrix @ [80, 40, 1]).tolist() == [64, 48, 1]
    assert [int(side[0]) for side in sizes] == [64, 64]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"size": 0}, "letterbox.size config.range, got 0"),
        ({"size": 9, "fill": -1}, "letterbox.fill config.range, got -1"),
    ],
    ids=str,
)
def test_errors(parameters: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Letterbox(**parameters)
    assert outline(caught.value) == expected
