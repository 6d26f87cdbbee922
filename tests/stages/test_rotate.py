"""rotate: torchvision's rotation by angles of torchvision's distribution."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as tv

from gpuflow.errors import ConfigError
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Border
from gpuflow.stages import CenterCrop, Decode, Letterbox, Normalize, Rotate
from tests.images import photo, png
from tests.running import RGB, by_torchvision, decoded, images, keys_of, levels_apart, program_of, run
from tests.stages.warps import apart_from, warp_of
from tests.texts import outline

SIZES = ((150, 211), (60, 60), (31, 8), (1, 1))


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("fill", [0, 114, (9, 200, 50)])
@pytest.mark.parametrize("angle", [17.3, -133.0, 45.0, 90.0, 180.0, 270.0])
def test_pixels_are_those_of_torchvision(angle: float, fill: int | tuple[int, int, int], interpolation: str) -> None:
    stage = Rotate(degrees=(angle, angle), interpolation=interpolation, fill=fill)  # type: ignore[arg-type]
    levels = list(fill) if isinstance(fill, tuple) else fill
    for size in SIZES:
        image = photo(*size)
        expected = tv.rotate_image(
            torch.from_numpy(image).permute(2, 0, 1), angle, InterpolationMode(interpolation), fill=levels
        )
        assert apart_from(expected, image, stage, special=angle % 45 == 0) <= (interpolation == "bilinear")


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("center", [(0.0, 0.0), (10.25, 77.0), (-30.0, 400.5)], ids=str)
@pytest.mark.parametrize("angle", [17.3, -133.0])
def test_another_center_is_torchvisions(angle: float, center: tuple[float, float], interpolation: str) -> None:
    stage = Rotate(degrees=(angle, angle), center=center, interpolation=interpolation, fill=9)  # type: ignore[arg-type]
    for size in SIZES:
        image, mode = photo(*size), InterpolationMode(interpolation)
        planes = torch.from_numpy(image).permute(2, 0, 1)
        expected = tv.rotate_image(planes, angle, mode, center=list(center), fill=9)
        assert apart_from(expected, image, stage) <= (interpolation == "bilinear")


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("angle", [0.0, 17.3, -133.0, 45.0, 90.0, 180.0, 270.0, 30.0])
def test_expanded_results_are_torchvisions(angle: float, interpolation: str) -> None:
    stage = Rotate(degrees=(angle, angle), expand=True, interpolation=interpolation, fill=114)  # type: ignore[arg-type]
    for size in SIZES:
        image = photo(*size)
        planes = torch.from_numpy(image).permute(2, 0, 1)
        expected = tv.rotate_image(planes, angle, InterpolationMode(interpolation), expand=True, fill=114)
        known = stage.output(RGB.replace(shape=(*size, 3))).shape
        assert known == (*expected.shape[1:], 3)
        assert apart_from(expected, image, stage, special=angle % 30 == 0) <= (interpolation == "bilinear")


@pytest.mark.slow
def test_expanded_sizes_are_torchvisions() -> None:
    """But where a corner is so near the edge of a pixel that torchvision's float32 takes it to the other side."""
    rng, count, far = np.random.default_rng(0), 100, 0
    for height, width in ((224, 224), (333, 500), (1, 640), (7, 5)):
        angles = np.concatenate([rng.uniform(-200, 200, count), np.arange(-360, 361, 15)])
        for angle in angles.tolist():
            move = warp_of(Rotate(degrees=(angle, angle), expand=True), 1, height, width)
            expected = tv.rotate_image(torch.empty((1, height, width), device="meta"), angle, expand=True)
            cos, sin = abs(math.cos(math.radians(angle))), abs(math.sin(math.radians(angle)))
            ends = np.array([height + height * cos + width * sin, width + width * cos + height * sin]) / 2
            away = np.abs(ends - ends.round())
            near = (away > 1e-9) & (away < 2e-4)  # 640 in float32 and the next number are 6e-5 apart
            apart = np.abs(np.concatenate([move.height, move.width]) - expected.shape[1:])
            assert (apart <= near).all(), (angle, height, width)
            far += not near.any()
    assert far > 400


def test_each_expanded_sample_has_its_own_size() -> None:
    count = 12
    move = warp_of(Rotate(degrees=60, expand=True), count, 40, 90)
    assert len({*zip(move.height.tolist(), move.width.tolist(), strict=True)}) > 6
    spec = RGB.replace(shape=(40, 90, 3), shorter=None)
    assert Rotate(degrees=60, expand=True).output(spec).shape == (None, None, 3)
    assert Rotate(degrees=(90, 90), expand=True).output(RGB).shape == (None, None, 3)
    rotate, letterbox = Rotate(degrees=60, expand=True, fill=114), Letterbox(size=30)
    program = program_of(Decode(), rotate, letterbox, Normalize())
    assert [type(step).__name__ for step in program.steps] == ["WarpStep", "ResamplingStep", "PointwiseStep"]
    data, keys = png(photo(40, 90)), keys_of(count)
    batch = images(program_of(Decode(), rotate, letterbox), [data] * count, keys)
    for i in range(count):
        turned = by_torchvision(rotate, decoded(data), keys[i].stage("rotate", 0))
        assert levels_apart(batch[i], letterbox.torchvision()(turned)) <= 1


def test_a_result_above_max_pixels_is_a_bad_sample() -> None:
    program = program_of(Decode(max_pixels=60 * 60), Rotate(degrees=(45, 45), expand=True), CenterCrop(size=60))
    _, faults = run(program, [png(photo(60, 60)), png(photo(30, 30))])
    assert str(faults[0]).startswith("rotate: the resized image would have 86x86 = 7,396 pixels")
    assert faults[1] is None


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("border", get_args(Border))
def test_no_turn_changes_no_pixel(border: str, interpolation: str) -> None:
    data = png(photo(40, 57))
    stage = Rotate(degrees=0, border=border, interpolation=interpolation)  # type: ignore[arg-type]
    (image,) = images(program_of(Decode(), stage, CenterCrop(size=(40, 57))), [data])
    assert torch.equal(image, decoded(data))
    assert not stage.random


def test_quarter_turns_are_exact() -> None:
    data = png(photo(48, 48))
    for turns in range(4):
        stage = Rotate(degrees=(90.0 * turns, 90.0 * turns))
        (image,) = images(program_of(Decode(), stage, CenterCrop(size=48)), [data])
        assert torch.equal(image, torch.rot90(decoded(data), turns, dims=(1, 2)))


@pytest.mark.parametrize("degrees", [25.0, (-10.0, 70.0), (300.0, 400.0)])
def test_angles_have_torchvisions_distribution(degrees: float | tuple[float, float]) -> None:
    count = 4000
    matrix = warp_of(Rotate(degrees=degrees), count, 40, 60).matrix
    angles = np.degrees(np.arctan2(matrix[:, 1, 0], matrix[:, 0, 0]))
    torch.manual_seed(0)
    theirs = v2.RandomRotation(degrees)
    expected = np.array([theirs.make_params([])["angle"] for _ in range(count)])
    low, high = theirs.degrees
    angles += 360 * np.round(((low + high) / 2 - angles) / 360)
    for found in (angles, expected):
        assert low <= found.min() + 1e-9 and found.max() <= high + 1e-9
    share = np.linspace(0, 1, 101)
    assert np.abs(np.quantile(angles, share) - np.quantile(expected, share)).max() < 0.05 * (high - low)


def test_fill_and_channels() -> None:
    gray = RGB.replace(shape=(20, 20, 1), color="gray")
    assert Rotate(degrees=9, fill=3).output(gray) == gray
    with pytest.raises(ValueError, match="fills") as caught:
        Rotate(degrees=9, fill=(1, 2, 3)).output(gray)
    assert str(caught.value) == "fills with 3 levels but gets uint8 20x20x1 hwc; give one level"


def test_torchvision_has_no_other_borders() -> None:
    with pytest.raises(NotImplementedError):
        Rotate(degrees=9, border="edge").torchvision()
    assert levels_apart(Rotate(degrees=0).torchvision()(decoded(png(photo(9, 9)))), decoded(png(photo(9, 9)))) == 0


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"degrees": -3}, "rotate.degrees config.range, got -3"),
        ({"degrees": (5.0, -3.0)}, "rotate.degrees config.range, got [5.0, -3.0]"),
        ({"degrees": float("inf")}, "rotate.degrees config.range, got inf"),
        ({"degrees": 3, "expand": True, "center": (1.0, 2.0)}, "rotate.center config.conflict"),
        ({"degrees": 3, "center": (1.0, 1e7)}, "rotate.center config.range, got [1.0, 10000000.0]"),
        ({"degrees": 3, "fill": 256}, "rotate.fill config.range, got 256"),
        ({"degrees": 3, "fill": (0, -1, 0)}, "rotate.fill config.range, got [0, -1, 0]"),
    ],
    ids=str,
)
def test_errors(parameters: dict[str, float], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Rotate(**parameters)  # type: ignore[arg-type]
    assert outline(caught.value) == expected


def test_a_warp_keeps_the_size_that_is_known() -> None:
    spec = s.ImageSpec(shape=(20, None, 3))
    assert Rotate(degrees=9).output(spec) == spec
    assert len(warp_of(Rotate(degrees=9), 3, 5, 6).height) == len(keys_of(3).positions)
