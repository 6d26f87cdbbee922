"""center_crop: the same box as torchvision, and the same black border around small images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms.v2 import functional as tv

from gpuflow.errors import ConfigError
from gpuflow.stages import CenterCrop, Decode, Flip, Normalize, Resize
from tests.images import jpeg, photo, png
from tests.running import RGB, alone, decoded, images, program_of
from tests.texts import outline


@given(
    height=st.integers(1, 40), width=st.integers(1, 40), crop_height=st.integers(1, 44), crop_width=st.integers(1, 44)
)
def test_equals_torchvision_inside_and_outside(height: int, width: int, crop_height: int, crop_width: int) -> None:
    data = png(photo(height, width))
    result = alone(CenterCrop(size=(crop_height, crop_width)), data)
    assert torch.equal(result, tv.center_crop(decoded(data), [crop_height, crop_width]))


@pytest.mark.parametrize("size", [(24, 24), (25, 26), (26, 27), (27, 25)])
def test_rounding_down_is_that_of_transformers_and_albumentations(size: tuple[int, int]) -> None:
    data = png(photo(*size))
    (top, left) = ((side - 22) // 2 for side in size)
    result = alone(CenterCrop(size=22, rounding="down"), data)
    assert torch.equal(result, decoded(data)[:, top : top + 22, left : left + 22])


@pytest.mark.parametrize("color", ["rgb", "bgr", "gray"])
def test_decoding_only_a_region_changes_no_pixel(color: str) -> None:
    for size in ((75, 101), (64, 64), (33, 200)):
        data = jpeg(photo(*size))
        assert torch.equal(
            alone(CenterCrop(size=31), data, color=color), tv.center_crop(decoded(data, color), [31, 31])
        )


def test_inside_a_pipeline(photo_bytes: bytes) -> None:
    stages = (Resize(shorter=40), CenterCrop(size=(32, 30)), Flip(horizontal=1.0), Normalize())
    (result,) = images(program_of(Decode(), *stages), [photo_bytes])
    image = decoded(photo_bytes)
    for stage in stages:
        image = stage.torchvision()(image)
    assert torch.equal(result, image)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, "center_crop.size config.range, got 0"),
        ((3, 0), "center_crop.size config.range, got [3, 0]"),
    ],
)
def test_errors(size: int | tuple[int, int], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CenterCrop(size=size)
    assert outline(caught.value) == expected


@pytest.mark.parametrize("color", ["rgb", "gray"])
@pytest.mark.parametrize("resize", [Resize(height=8, width=20), Resize(shorter=8)], ids=repr)
def test_an_image_of_known_size_is_centred_on_black_as_well(resize: Resize, color: Any, photo_bytes: bytes) -> None:
    """As torchvision does, whether the size is known before anything runs or not."""
    for size in ((9, 9), (8, 21), (30, 7)):
        crop = CenterCrop(size=size)
        (result,) = images(program_of(Decode(color=color), resize, crop), [photo_bytes])
        assert torch.equal(result, crop.torchvision()(resize.torchvision()(decoded(photo_bytes, color))))


def test_specs() -> None:
    assert CenterCrop(size=9).output(RGB.replace(shape=(8, 20, 3))).shape == (9, 9, 3)
    assert CenterCrop(size=(12, 30)).output(RGB.replace(shorter=10)).shape == (12, 30, 3)
