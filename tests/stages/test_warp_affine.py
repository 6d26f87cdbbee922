"""warp_affine: cv2.warpAffine's result for a matrix and for three pairs of points."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest
import torch

from gpuflow.errors import ConfigError
from gpuflow.stages import CenterCrop, Decode, WarpAffine
from tests.images import photo, png
from tests.reference.warping import opencv_5
from tests.running import decoded, images, program_of
from tests.texts import outline

MATRIX = ((0.9, 0.25, 3.5), (-0.15, 1.1, 4.25))
POINTS: Any = ((0.0, 0.0), (40.0, 0.0), (0.0, 40.0)), ((5.0, 10.0), (43.0, 2.0), (9.0, 50.0))
BORDERS = {"edge": cv2.BORDER_REPLICATE, "reflect": cv2.BORDER_REFLECT_101, "symmetric": cv2.BORDER_REFLECT}


def warped(stage: WarpAffine, image: Any, size: tuple[int, int]) -> Any:
    (found,) = images(program_of(Decode(), stage, CenterCrop(size=size)), [png(image)])
    return found.permute(1, 2, 0).numpy().astype(int)


@opencv_5
@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("inverse_map", [False, True])
@pytest.mark.parametrize("by_points", [False, True])
def test_pixels_are_those_of_opencv(by_points: bool, inverse_map: bool, border: Any) -> None:
    given: dict[str, Any] = {"source": POINTS[0], "target": POINTS[1]} if by_points else {"matrix": MATRIX}
    stage = WarpAffine(**given, inverse_map=inverse_map, size=(48, 57), border=border)
    matrix = cv2.getAffineTransform(*np.array(POINTS, np.float32)) if by_points else np.array(MATRIX)
    flags = cv2.INTER_LINEAR | (cv2.WARP_INVERSE_MAP if inverse_map else 0)
    image = photo(60, 80)
    expected = cv2.warpAffine(image, matrix, (57, 48), flags=flags, borderMode=BORDERS[border])
    assert np.abs(warped(stage, image, (48, 57)) - expected).max() <= 1


@opencv_5
def test_inside_the_image_the_constant_border_is_opencvs() -> None:
    image = photo(60, 80)
    expected = cv2.warpAffine(image, np.array(MATRIX), (80, 60), borderValue=(114, 114, 114))
    found = warped(WarpAffine(matrix=MATRIX, fill=114), image, (60, 80))
    seen = cv2.warpAffine(np.full_like(image, 255), np.array(MATRIX), (80, 60))
    apart = np.abs(found - expected)
    assert apart[seen == 255].max() <= 1 and apart[seen == 0].max() == 0


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_the_identity_changes_no_pixel(interpolation: Any) -> None:
    data = png(photo(60, 80))
    for given in ({"matrix": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))}, {"source": POINTS[1], "target": POINTS[1]}):
        stage = WarpAffine(**given, interpolation=interpolation, border="edge")
        (image,) = images(program_of(Decode(), stage, CenterCrop(size=(60, 80))), [data])
        assert torch.equal(image, decoded(data))


ON_A_LINE = ((0.0, 0.0), (1.0, 2.0), (2.0, 4.0))


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, "warp_affine config.conflict"),
        ({"source": POINTS[0]}, "warp_affine config.conflict"),
        ({"matrix": MATRIX, "source": POINTS[0], "target": POINTS[1]}, "warp_affine config.conflict"),
        (
            {"matrix": ((1.0, 2.0, 0.0), (2.0, 4.0, 0.0))},
            "warp_affine.matrix config.range, got [[1.0, 2.0, 0.0], [2.0, 4.0, 0.0]]",
        ),
        (
            {"source": POINTS[0], "target": ON_A_LINE},
            "warp_affine.target config.range, got [[0.0, 0.0], [1.0, 2.0], [2.0, 4.0]]",
        ),
    ],
    ids=str,
)
def test_errors(parameters: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        WarpAffine(**parameters)
    assert outline(caught.value) == expected
