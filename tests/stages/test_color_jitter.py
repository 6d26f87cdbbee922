"""color_jitter: equals torchvision's adjustments bit for bit, in every order."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torchvision.transforms.v2 import functional as tv

from gpuflow.errors import ConfigError
from gpuflow.execute.cpu.native_chunk import run_pointwise
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import trace
from gpuflow.stages import CenterCrop, ColorJitter, Decode, Normalize
from tests.images import jpeg, photo, png
from tests.running import RGB, alone, decoded, images, keys_of, program_of
from tests.texts import outline

ALL = ColorJitter(brightness=0.9, contrast=0.9, saturation=0.9, hue=0.5)
ADJUST = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)
ORDERS = list(itertools.permutations(range(4)))

factors = st.tuples(st.floats(0, 3), st.floats(0, 3), st.floats(0, 3), st.floats(-0.5, 0.5))


def by_torchvision(image: torch.Tensor, order: tuple[int, ...], values: tuple[float, ...]) -> torch.Tensor:
    for turn in order:
        image = ADJUST[turn](image, values[turn])
    return image


def apply(pixels: np.ndarray[Any, Any], order: tuple[int, ...], values: tuple[float, ...]) -> torch.Tensor:
    one = np.array([1])
    operations = ALL.operations(np.array([[*order, *values, 1]], np.float64), one, one)
    out = run_pointwise(pixels, operations, 0, None, planes=False)
    return torch.from_numpy(out).permute(2, 0, 1)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_every_order(order: tuple[int, ...]) -> None:
    pixels = photo(33, 47)
    for values in ((0.6, 1.4, 1.7, 0.2), (1.9, 0.2, 0.0, -0.5), (0.0, 0.0, 2.0, 0.1), (1.0, 1.0, 1.0, 0.0)):
        expected = by_torchvision(torch.from_numpy(pixels).permute(2, 0, 1), order, values)
        assert torch.equal(apply(pixels, order, values), expected)


@given(order=st.sampled_from(ORDERS), values=factors, height=st.integers(1, 40), width=st.integers(1, 40))
def test_any_factors_and_sizes(order: tuple[int, ...], values: tuple[float, ...], height: int, width: int) -> None:
    pixels = photo(height, width)
    before = pixels.copy()
    expected = by_torchvision(torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), order, values)
    assert torch.equal(apply(pixels, order, values), expected)
    assert np.array_equal(pixels, before)


@given(order=st.sampled_from(ORDERS), values=factors)
def test_saturation_and_hue_do_not_change_gray_images(order: tuple[int, ...], values: tuple[float, ...]) -> None:
    pixels = photo(21, 30)[..., :1]
    expected = by_torchvision(torch.from_numpy(pixels.copy()).permute(2, 0, 1), order, values)
    assert torch.equal(apply(pixels, order, values), expected)


@pytest.mark.parametrize("color", ["rgb", "gray"])
def test_inside_a_pipeline(color: Any, photo_bytes: bytes) -> None:
    stage = ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)
    keys = keys_of(12)
    drawn = stage.draw(keys.stage("color_jitter", 0))
    tail = Normalize() if color == "rgb" else Normalize(mean=(0.5,), std=(0.5,))
    plain = images(program_of(Decode(color=color), CenterCrop(size=40), stage), [photo_bytes] * 12, keys)
    normalized = images(program_of(Decode(color=color), CenterCrop(size=40), stage, tail), [photo_bytes] * 12, keys)
    crop = alone(CenterCrop(size=40), photo_bytes, color=color)
    for i in range(12):
        order, values = drawn[i, :4].astype(int), drawn[i, 4:8]
        expected = by_torchvision(crop, tuple(order.tolist()), tuple(values.tolist()))
        assert torch.equal(plain[i], expected)
        assert torch.equal(normalized[i], tail.torchvision()(expected))


def test_factors_lie_in_their_ranges_and_orders_are_equally_likely() -> None:
    count = 4800
    stage = ColorJitter(brightness=0.4, contrast=(0.5, 0.7), saturation=3.0, hue=(-0.2, 0.1))
    drawn = stage.draw(keys_of(count).stage("color_jitter", 0))
    for column, (low, high) in zip(drawn[:, 4:8].T, [(0.6, 1.4), (0.5, 0.7), (0.0, 4.0), (-0.2, 0.1)], strict=True):
        assert low <= column.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < column.max() < high
        assert abs(column.mean() - (low + high) / 2) < 0.02 * (high - low)
    counts = np.unique(drawn[:, :4] @ [64, 16, 4, 1], return_counts=True)[1]
    assert len(counts) == 24
    assert ((counts - count / 24) ** 2 / (count / 24)).sum() < 72


@given(probability=st.floats(0, 1))
@example(0.0)
@example(1.0)
def test_an_image_that_is_not_drawn_stays_and_the_others_draw_as_before(probability: float) -> None:
    pixels = png(photo(30, 30))
    keys, always = keys_of(40), ColorJitter(brightness=(0.2, 0.5), hue=(0.1, 0.3))
    stage = dataclasses.replace(always, probability=probability)
    plain, drawn = (one.draw(keys.stage("color_jitter", 0)) for one in (always, stage))
    assert np.array_equal(plain[:, :8], drawn[:, :8])
    chosen = keys.stage("color_jitter", 0).uniform(9)[:, 8] < probability
    every, some = (
        images(program_of(Decode(), CenterCrop(size=30), one), [pixels] * 40, keys) for one in (always, stage)
    )
    for i, changed in enumerate(chosen.tolist()):
        assert torch.equal(some[i], every[i] if changed else decoded(pixels))
    assert stage.random == (probability > 0)


def test_the_probability_of_1_is_not_in_the_fingerprint() -> None:
    def fingerprint(stage: ColorJitter) -> str:
        return program_of(Decode(), CenterCrop(size=30), stage).pipeline.fingerprint

    assert "probability" not in ColorJitter(brightness=0.4).params()
    assert fingerprint(ColorJitter(brightness=0.4)) == fingerprint(ColorJitter(brightness=0.4, probability=1.0))
    assert fingerprint(ColorJitter(brightness=0.4)) != fingerprint(ColorJitter(brightness=0.4, probability=0.5))


def test_adjustments_that_are_not_set_change_nothing() -> None:
    data = png(photo(30, 30))
    stages = (Decode(), CenterCrop(size=30), ColorJitter())
    assert torch.equal(images(program_of(*stages), [data])[0], decoded(data))
    assert not ColorJitter().random
    assert not ColorJitter(brightness=(0.5, 0.5)).random
    halved = ColorJitter(brightness=(0.5, 0.5), hue=(0.0, 0.0))
    assert torch.equal(alone2(halved, data), tv.adjust_brightness(decoded(data), 0.5))


def test_two_adjustments_by_fixed_factors_are_random_because_their_order_is() -> None:
    fixed = ColorJitter(brightness=(1.6, 1.6), contrast=(0.5, 0.5))
    batch = images(program_of(Decode(), CenterCrop(size=30), fixed), [png(photo(30, 30))] * 20, keys_of(20))
    assert len({image.numpy().tobytes() for image in batch}) == 2
    assert fixed.random
    assert not dataclasses.replace(fixed, probability=0.0).random
    with pytest.raises(ConfigError, match=r"serve\[2\].color_jitter is random and cannot serve"):
        trace(s.Pipeline("serve", (Decode(), CenterCrop(size=30), fixed)), serving=True)


def alone2(stage: ColorJitter, data: bytes) -> torch.Tensor:
    return images(program_of(Decode(), CenterCrop(size=30), stage), [data])[0]


def test_a_jpeg_region_is_jittered_like_the_whole_images_crop() -> None:
    data = jpeg(photo(120, 160))
    stage = ColorJitter(contrast=(1.5, 1.5))
    (result,) = images(program_of(Decode(), CenterCrop(size=24), stage), [data])
    assert torch.equal(result, tv.adjust_contrast(tv.center_crop(decoded(data), [24, 24]), 1.5))


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"brightness": -0.1}, "color_jitter.brightness config.range, got -0.1"),
        ({"contrast": (0.5, 0.4)}, "color_jitter.contrast config.range, got [0.5, 0.4]"),
        ({"saturation": (-1.0, 1.0)}, "color_jitter.saturation config.range, got [-1.0, 1.0]"),
        ({"hue": 0.6}, "color_jitter.hue config.range, got 0.6"),
        ({"hue": -0.1}, "color_jitter.hue config.range, got -0.1"),
        ({"hue": (0.2, 0.1)}, "color_jitter.hue config.range, got [0.2, 0.1]"),
        ({"brightness": float("nan")}, "color_jitter.brightness config.range, got nan"),
        ({"probability": 1.5}, "color_jitter.probability config.range, got 1.5"),
        ({"contrast": float("inf")}, "color_jitter.contrast config.range, got inf"),
    ],
)
def test_errors(parameters: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ColorJitter(**parameters)
    assert outline(caught.value) == expected


def test_bgr_is_refused() -> None:
    with pytest.raises(ValueError, match="weighs") as caught:
        ALL.output(RGB.replace(color="bgr"))
    assert str(caught.value) == "weighs red, green and blue but gets bgr images; decode with color: rgb"
