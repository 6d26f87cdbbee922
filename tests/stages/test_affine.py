"""affine: torchvision's affine transform with parameters of torchvision's distributions."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as tv
from torchvision.transforms.v2.functional._geometry import _get_inverse_affine_matrix

from gpuflow.errors import ConfigError
from gpuflow.pipeline.parameters import Border
from gpuflow.stages import Affine, CenterCrop, Decode
from tests.images import photo, png
from tests.running import decoded, images, keys_of, program_of
from tests.stages.warps import apart_from, warp_of
from tests.texts import outline

SIZES = ((150, 211), (60, 60), (31, 8), (1, 1))
FIXED: tuple[tuple[float, float, tuple[float, float]], ...] = (
    (17.3, 1.0, (0.0, 0.0)),
    (3.0, 0.41, (13.0, 0.0)),
    (-71.0, 1.7, (-20.0, 33.0)),
)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("fill", [0, (9, 200, 50)])
@pytest.mark.parametrize(("angle", "scale", "shear"), FIXED, ids=str)
def test_pixels_are_those_of_torchvision(
    angle: float, scale: float, shear: tuple[float, float], fill: Any, interpolation: Any
) -> None:
    x, y = shear
    stage = Affine(
        degrees=(angle, angle), scale=(scale, scale), shear=(x, x, y, y), fill=fill, interpolation=interpolation
    )
    assert not stage.random
    for size in SIZES:
        image = photo(*size)
        expected = tv.affine_image(
            torch.from_numpy(image).permute(2, 0, 1),
            angle,
            [0, 0],
            scale,
            list(shear),
            InterpolationMode(interpolation),
            fill=list(fill) if isinstance(fill, tuple) else fill,
        )
        assert apart_from(expected, image, stage) <= (interpolation == "bilinear")


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("center", [(0.0, 0.0), (10.25, 77.0), (-30.0, 400.5)], ids=str)
def test_another_center_is_torchvisions(center: tuple[float, float], interpolation: Any) -> None:
    stage = Affine(degrees=(17.3, 17.3), scale=(0.9, 0.9), shear=(7, 7), center=center, interpolation=interpolation)
    for size in SIZES:
        image, mode = photo(*size), InterpolationMode(interpolation)
        planes = torch.from_numpy(image).permute(2, 0, 1)
        expected = tv.affine_image(planes, 17.3, [0, 0], 0.9, [7.0, 0.0], mode, fill=0, center=list(center))
        assert apart_from(expected, image, stage) <= (interpolation == "bilinear")


def test_shifts_are_of_whole_pixels_and_torchvisions() -> None:
    image, stage = photo(60, 80), Affine(translate=(0.2, 0.4), fill=7)
    for position in range(5):
        keys = keys_of(1, first=position)
        matrix = warp_of(stage, 1, 60, 80, keys).matrix[0]
        shift = (-matrix[:2, 2]).tolist()
        assert shift == [round(side) for side in shift]
        expected = tv.affine_image(
            torch.from_numpy(image).permute(2, 0, 1), 0.0, shift, 1.0, [0.0, 0.0], InterpolationMode.BILINEAR, fill=7
        )
        assert apart_from(expected, image, stage, keys) == 0


@pytest.mark.parametrize("border", get_args(Border))
def test_the_defaults_change_no_pixel(border: Any) -> None:
    data = png(photo(40, 57))
    (image,) = images(program_of(Decode(), Affine(border=border), CenterCrop(size=(40, 57))), [data])
    assert torch.equal(image, decoded(data))


def test_parameters_have_torchvisions_distributions() -> None:
    count, height, width = 4000, 400, 600
    stage = Affine(degrees=(-5.0, 40.0), translate=(0.1, 0.3), scale=(0.5, 2.0), shear=(-10.0, 10.0, 5.0, 20.0))
    matrix = warp_of(stage, count, height, width).matrix
    theirs = v2.RandomAffine(stage.degrees, stage.translate, stage.scale, stage.shear)
    torch.manual_seed(0)
    drawn = [theirs.make_params([torch.empty(3, height, width)]) for _ in range(count)]
    center = [width / 2, height / 2]
    expected = np.array(
        [_get_inverse_affine_matrix(center, p["angle"], p["translate"], p["scale"], list(p["shear"])) for p in drawn]
    )
    for found, wanted in zip(matrix[:, :2].reshape(-1, 6).T, expected.T, strict=True):
        low, high = np.quantile(wanted, [0.01, 0.99])
        share = np.linspace(0.02, 0.98, 50)
        assert np.abs(np.quantile(found, share) - np.quantile(wanted, share)).max() < 0.06 * (high - low)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"translate": (0.1, 1.5)}, "affine.translate config.range, got [0.1, 1.5]"),
        ({"scale": (0.0, 1.0)}, "affine.scale config.range, got [0.0, 1.0]"),
        ({"shear": 90.0}, "affine.shear config.range, got 90.0"),
        ({"shear": (0.0, 1.0, 3.0, 2.0)}, "affine.shear config.range, got [0.0, 1.0, 3.0, 2.0]"),
        ({"shear": (2.0, 1.0)}, "affine.shear config.range, got [2.0, 1.0]"),
        ({"shear": (-91.0, 2.0)}, "affine.shear config.range, got [-91.0, 2.0]"),
    ],
    ids=str,
)
def test_errors(parameters: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Affine(**parameters)
    assert outline(caught.value) == expected
