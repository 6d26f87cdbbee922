"""perspective: torchvision's perspective transform with corners of torchvision's distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as tv

from gpuflow.errors import ConfigError
from gpuflow.pipeline.stage import Warp
from gpuflow.stages import CenterCrop, Decode, Perspective
from tests.images import photo, png
from tests.running import decoded, images, keys_of, program_of
from tests.stages.warps import apart_from, warp_of
from tests.texts import outline


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("fill", [0, (9, 200, 50)])
@pytest.mark.parametrize("scale", [0.2, 0.7])
def test_pixels_are_those_of_torchvision(scale: float, fill: Any, interpolation: Any) -> None:
    stage = Perspective(distortion_scale=scale, probability=1.0, fill=fill, interpolation=interpolation)
    for size in ((150, 211), (60, 60), (31, 8)):
        image = photo(*size)
        for position in range(3):
            keys = keys_of(1, first=position)
            matrix = warp_of(stage, 1, *size, keys).matrix[0]
            expected = tv.perspective_image(
                torch.from_numpy(image).permute(2, 0, 1),
                None,
                None,
                InterpolationMode(interpolation),
                fill=list(fill) if isinstance(fill, tuple) else fill,
                coefficients=(matrix / matrix[2, 2]).reshape(-1)[:8].tolist(),
            )
            assert apart_from(expected, image, stage, keys) <= (interpolation == "bilinear")


@pytest.mark.parametrize(
    "stage", [Perspective(probability=0.0), Perspective(distortion_scale=0.0, probability=1.0)], ids=repr
)
def test_without_distortion_no_pixel_changes(stage: Perspective) -> None:
    data = png(photo(40, 57))
    batch = images(program_of(Decode(), stage, CenterCrop(size=(40, 57))), [data] * 8)
    assert all(torch.equal(image, decoded(data)) for image in batch)
    assert not stage.random


def test_what_is_not_warped_keeps_its_pixels() -> None:
    data, keys = png(photo(40, 57)), keys_of(40)
    active = warp_of(Perspective(), 40, 40, 57, keys).active
    assert active is not None and 8 < active.sum() < 32
    batch = images(program_of(Decode(), Perspective(), CenterCrop(size=(40, 57))), [data] * 40, keys)
    assert [torch.equal(image, decoded(data)) for image in batch] == (~active).tolist()


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (2, 2), (3, 2)])
def test_corners_on_a_line_leave_the_image_as_it_is(size: tuple[int, int]) -> None:
    move = warp_of(Perspective(distortion_scale=1.0, probability=1.0), 200, *size)
    assert move.active is not None and not move.active.all()
    assert np.isfinite(move.matrix).all() and (np.abs(np.linalg.det(move.matrix)) > 1e-9).all()


def test_an_upper_left_pixel_from_infinitely_far_leaves_the_image_as_it_is() -> None:
    """Such a map has no matrix whose last number is 1."""
    stage, count, size = Perspective(distortion_scale=0.5, probability=1.0), 20_000, np.full(20_000, 4)
    (warp,) = stage.draw(keys_of(count).stage("perspective", 0), size, size)
    assert isinstance(warp, Warp) and warp.active is not None
    left = warp.matrix[~warp.active]
    assert 100 < len(left) < count / 5 and (left == np.eye(3)).all()
    assert np.abs(warp.matrix).max() < 1e6
    data = png(photo(4, 4))
    assert torch.isfinite(images(program_of(Decode(), stage, CenterCrop(size=4)), [data] * 300).float()).all()


def test_corners_have_torchvisions_distribution() -> None:
    count, height, width = 3000, 41, 60
    matrix = warp_of(Perspective(distortion_scale=0.4, probability=1.0), count, height, width).matrix
    theirs = v2.RandomPerspective(0.4, 1.0)
    torch.manual_seed(0)
    drawn = [theirs.make_params([torch.empty(3, height, width)])["coefficients"] for _ in range(count)]
    start = np.array([[0, width - 1, width - 1, 0], [0, 0, height - 1, height - 1], [1, 1, 1, 1]])
    corners = []
    for maps in (matrix, np.concatenate([np.array(drawn), np.ones((count, 1))], axis=1).reshape(-1, 3, 3)):
        points = np.linalg.inv(maps) @ start
        corners.append((points[:, :2] / points[:, 2:]).round().astype(int).reshape(count, 8))
    for found, expected in zip(*(side.T for side in corners), strict=True):
        assert found.min() == expected.min() and found.max() == expected.max()
        assert abs(found.mean() - expected.mean()) < 0.5
        assert np.abs(np.bincount(found) - np.bincount(expected)).max() < 0.06 * count


def test_torchvision_has_no_other_border() -> None:
    assert isinstance(Perspective().torchvision(), v2.RandomPerspective)
    with pytest.raises(NotImplementedError):
        Perspective(border="reflect").torchvision()


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"distortion_scale": 1.5}, "perspective.distortion_scale config.range, got 1.5"),
        ({"probability": -0.5}, "perspective.probability config.range, got -0.5"),
    ],
    ids=str,
)
def test_errors(parameters: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Perspective(**parameters)
    assert outline(caught.value) == expected
