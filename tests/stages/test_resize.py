"""resize: sizes and pixels equal those of torchvision."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms.v2 import functional as tv

from gpuflow.errors import ConfigError
from gpuflow.pipeline import stage as s
from gpuflow.stages import CenterCrop, Decode, Normalize, Resize
from tests.images import jpeg, photo, png
from tests.running import RGB, alone, decoded, images, keys_of, levels_apart, program_of, resized, size_of
from tests.texts import outline

NATIVE = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
"""On other CPUs torchvision resizes bilinear images as floats, which rounds differently."""
_ROUNDINGS: tuple[Literal["nearest", "down"], ...] = ("nearest", "down")
SOURCES = [(40, 40), (37, 61), (64, 23), (1, 1), (1, 9), (300, 7)]
TARGETS = [(20, 20), (40, 40), (7, 11), (1, 1), (90, 133), (41, 60), (9, 200)]

modes = pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
smooth = pytest.mark.parametrize("antialias", [True, False], ids=["antialias", "sharp"])


@modes
@smooth
@pytest.mark.parametrize("color", ["rgb", "bgr", "gray"])
def test_pixels_are_those_of_torchvision(interpolation: Any, antialias: bool, color: str) -> None:
    worst = 0
    for source in SOURCES:
        data = png(photo(*source))
        for height, width in TARGETS:
            stage = Resize(height=height, width=width, interpolation=interpolation, antialias=antialias)
            expected = resized(decoded(data, color), (height, width), interpolation, antialias)
            worst = max(worst, levels_apart(alone(stage, data, color=color), expected))
    assert worst == 0 if NATIVE or interpolation != "bilinear" else worst <= 1


@modes
def test_pixels_inside_a_pipeline(interpolation: Any, photo_bytes: bytes) -> None:
    stage = Resize(height=33, width=47, interpolation=interpolation)
    (result,) = images(program_of(Decode(), stage, Normalize()), [photo_bytes])
    assert torch.equal(result, Normalize().torchvision()(alone(stage, photo_bytes)))


@pytest.mark.parametrize(("size", "side"), [((30, 47), 40), ((40, 61), 40), ((61, 41), 30), ((9, 1), 3)])
def test_rounding_to_the_nearest_number(size: tuple[int, int], side: int) -> None:
    given = RGB.replace(shape=(*size, 3))
    nearest, down = (Resize(shorter=side, rounding=how).output(given).shape[:2] for how in _ROUNDINGS)
    exact = [side * length / min(size) for length in size]
    assert list(nearest) == [max(round(length), 1) for length in exact]
    assert list(down) == [max(int(length), 1) for length in exact]


@given(height=st.integers(1, 700), width=st.integers(1, 700), side=st.integers(1, 700), shorter=st.booleans())
def test_sizes_are_those_of_torchvision(height: int, width: int, side: int, shorter: bool) -> None:
    stage = Resize(shorter=side) if shorter else Resize(longer=side)
    after = stage.output(RGB.replace(shape=(height, width, 3)))
    sizes = ([side], None) if shorter else (None, side)
    expected = tv._geometry._compute_resized_output_size((height, width), size=sizes[0], max_size=sizes[1])
    # torchvision's longer side leaves nothing of a thin image; here a side has one pixel at least.
    assert after.shape == (*(max(n, 1) for n in expected), 3)
    (move,) = stage.draw(keys_of(1).stage("resize", 0), *size_of(torch.empty(3, height, width)))
    assert isinstance(move, s.Resize)
    assert (int(move.height[0]), int(move.width[0])) == after.shape[:2]


@given(height=st.integers(1, 700), width=st.integers(1, 700), side=st.integers(1, 500), more=st.integers(1, 400))
def test_sizes_with_max_size_are_those_of_torchvision(height: int, width: int, side: int, more: int) -> None:
    stage = Resize(shorter=side, max_size=side + more)
    expected = tv._geometry._compute_resized_output_size((height, width), size=[side], max_size=side + more)
    expected = [max(n, 1) for n in expected]  # of thin images torchvision leaves nothing
    assert list(stage.output(RGB.replace(shape=(height, width, 3))).shape[:2]) == expected
    (move,) = stage.draw(keys_of(1).stage("resize", 0), *size_of(torch.empty(3, height, width)))
    assert isinstance(move, s.Resize)
    assert [int(move.height[0]), int(move.width[0])] == expected


def test_pixels_with_max_size_are_those_of_torchvision() -> None:
    stage = Resize(shorter=30, max_size=40)
    for size in ((60, 70), (60, 200), (200, 61), (50, 50)):
        data = png(photo(*size))
        expected = stage.torchvision()(decoded(data))
        (found,) = images(program_of(Decode(), stage, CenterCrop(size=tuple(expected.shape[1:]))), [data])
        assert levels_apart(found, expected) <= (not NATIVE)


def test_max_size_and_rounding_to_the_nearest_number() -> None:
    stage = Resize(shorter=29, max_size=40, rounding="nearest")
    assert stage.output(RGB.replace(shape=(60, 100, 3))).shape == (24, 40, 3)
    assert stage.output(RGB.replace(shape=(60, 77, 3))).shape == (29, 37, 3)


def test_sizes_in_a_pipeline() -> None:
    for size, expected in [((30, 60), (10, 20)), ((60, 30), (20, 10)), ((31, 31), (10, 10)), ((1, 400), (10, 4000))]:
        program = program_of(Decode(), Resize(shorter=10), Resize(height=4, width=4))
        images(program, [jpeg(photo(*size))])
        assert Resize(shorter=10).output(RGB.replace(shape=(*size, 3))).shape[:2] == expected


def test_a_thin_image_keeps_one_pixel() -> None:
    assert Resize(longer=10).output(RGB.replace(shape=(1, 400, 3))).shape == (1, 10, 3)


def test_shorter_is_known_although_the_shape_is_not() -> None:
    assert Resize(shorter=9).output(RGB) == RGB.replace(shape=(None, None, 3), shorter=9)
    assert Resize(longer=9).output(RGB) == Resize(shorter=9, max_size=20).output(RGB) == RGB


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, "resize config.conflict"),
        ({"height": 3}, "resize config.conflict"),
        ({"width": 3}, "resize config.conflict"),
        ({"shorter": 3, "longer": 3}, "resize config.conflict"),
        ({"height": 3, "width": 3, "shorter": 3}, "resize config.conflict"),
        ({"longer": 3, "max_size": 9}, "resize.max_size config.conflict"),
        ({"shorter": 9, "max_size": 9}, "resize.max_size config.conflict, got 9"),
        ({"shorter": 0}, "resize.shorter config.range, got 0"),
        ({"longer": -2}, "resize.longer config.range, got -2"),
        ({"height": 0, "width": -1}, "resize.height config.range, got 0\nresize.width config.range, got -1"),
    ],
)
def test_errors(parameters: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Resize(**parameters)
    assert outline(caught.value) == expected
