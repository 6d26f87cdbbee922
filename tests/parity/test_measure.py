"""Differences in levels, exact on constructed arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gpuflow.decode.preset import Preset
from gpuflow.errors import GpuflowError
from gpuflow.parity.measure import Levels, Scale, Tally, differences, levels_apart
from gpuflow.stages import CenterCrop, Decode, Normalize, Torchvision
from tests.running import program_of

PLAIN = Scale.of(program_of(Decode(color="gray"), CenterCrop(size=4)))


def test_levels_of_pixels() -> None:
    a = torch.tensor([[[0, 255], [7, 9]]], dtype=torch.uint8)
    b = torch.tensor([[[255, 0], [9, 7]]], dtype=torch.uint8)
    assert levels_apart(a, b, PLAIN).tolist() == [[[255, 255], [2, 2]]]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("mean", "std"), [("imagenet", "imagenet"), ((0.1, 0.5, 0.9), (0.2, 0.25, 2.0)), ((0, 0.5, 1), (1, 0.01, 9))]
)
def test_levels_of_normalized_values_are_those_of_their_pixels(mean: Any, std: Any, dtype: str) -> None:
    stage = Normalize(mean=mean, std=std, dtype=dtype)  # type: ignore[arg-type]
    scale = Scale.of(program_of(Decode(), CenterCrop(size=4), stage))
    table = torch.from_numpy(stage.table())
    table = table if dtype == "float32" else table.view(getattr(torch, dtype))
    for levels in (1, 2, 56):
        apart = levels_apart(table[:, :-levels, None], table[:, levels:, None], scale)
        assert np.abs(apart - levels).max() <= scale.noise
    assert scale.noise < {"float32": 1e-3, "float16": 0.5, "bfloat16": 5}[dtype]
    whole = scale.levels(table[:, :, None])
    assert np.abs(whole[..., 0, :].astype(int) - np.arange(256)[:, None]).max() <= scale.noise


def test_results_that_a_dtype_cannot_hold_have_a_scale() -> None:
    stage = Normalize(mean=(0.5,) * 3, std=(5e-6,) * 3, dtype="float16")
    scale = Scale.of(program_of(Decode(), CenterCrop(size=4), stage))
    assert scale.unit.isfinite().all() and 0 < scale.noise < 1
    infinite = torch.full((3, 1, 1), torch.inf, dtype=torch.float16)
    assert levels_apart(infinite, infinite, scale).max() == 0 and levels_apart(infinite, -infinite, scale).min() == 255


def test_levels_of_a_stage_that_only_scales() -> None:
    stage = Torchvision(name="ToDtype", parameters=(("dtype", "float32"), ("scale", True)))
    scale = Scale.of(program_of(Decode(), CenterCrop(size=4), stage))
    assert scale.unit.flatten().tolist() == pytest.approx([1 / 255] * 3)
    assert levels_apart(torch.ones(3, 1, 1), torch.zeros(3, 1, 1), scale).flatten().tolist() == [255] * 3


def test_a_preset_of_the_gpu_is_measured_without_one() -> None:
    scale = Scale.of(program_of(Preset(name="torchpipe_gpu", height=4, width=5), Normalize()))
    assert scale.unit.flatten().tolist() == pytest.approx([1 / 255 / std for std in (0.229, 0.224, 0.225)])


def test_nan_and_infinity_are_255_levels_from_any_number() -> None:
    nan, inf = float("nan"), float("inf")
    a, b = torch.tensor([nan, nan, inf, inf, 1.0]), torch.tensor([nan, 0.0, inf, 0.0, 1.0])
    assert levels_apart(a[None, None], b[None, None], PLAIN).flatten().tolist() == [0, 255, 0, 255, 0]


def test_an_absurd_number_is_a_million_levels_away() -> None:
    """Such as the largest bfloat16, where a picture is not one at all; in float32 it could not be counted."""
    scale = Scale(torch.zeros(1, 1, 1).double(), torch.full((1, 1, 1), 0.01).double(), 0.0)
    (apart,) = levels_apart(torch.full((1, 1, 1), 3e38, dtype=torch.bfloat16), torch.zeros(1, 1, 1), scale).flatten()
    assert apart == 1e6
    tally = Tally()
    tally.add(np.array([apart]))
    found = tally.result()
    assert found is not None and found.max == 1e6


def test_differences_of_what_is_no_number() -> None:
    nan, inf = float("nan"), float("inf")
    a, b = torch.tensor([nan, nan, inf, inf, 1.0]), torch.tensor([nan, 0.0, inf, 0.0, 1.5])
    assert differences(a, b).tolist() == [0, inf, 0, inf, 0.5]
    assert differences(torch.tensor([3], dtype=torch.uint8), torch.tensor([5], dtype=torch.uint8)).tolist() == [2]


def test_a_stage_that_takes_no_plain_image() -> None:
    pad = Torchvision(name="Pad", parameters=(("padding", 9), ("padding_mode", "reflect")))
    scaled = Torchvision(name="ToDtype", parameters=(("dtype", "float32"), ("scale", True)))
    with pytest.raises(GpuflowError, match="parity: a plain image of 8x8 pixels cannot be preprocessed: torchvision: "):
        Scale.of(program_of(Decode(), pad, CenterCrop(size=4), scaled))


def test_a_tally_of_pixels() -> None:
    tally = Tally()
    levels = np.zeros((3, 20, 50), np.uint8)  # 3,000 values: 3 of them are 0.1%
    levels[0, 0, :3] = 9, 40, 200
    tally.add(levels)
    assert tally.result() == Levels(max=200, mean=249 / 3000, p999=0)
    levels[0, 0, 3] = 5  # 7 of 9,000 values are above 0
    tally.add(np.zeros_like(levels))
    tally.add(levels)
    assert tally.result() == Levels(max=200, mean=(249 + 254) / 9000, p999=0)
    assert (tally.images, tally.differ) == (3, 2)
    many = Tally()
    levels[0, 0, :10] = range(10, 20)
    many.add(levels)
    assert many.result() == Levels(max=19, mean=145 / 3000, p999=16)  # 3 of 3,000 values are above


def test_a_tally_of_fractions() -> None:
    tally = Tally()
    tally.add(np.array([0.25, 0.5, 300.5], np.float32))
    third: Any = pytest.approx(301.25 / 3)
    assert tally.result() == Levels(max=300.5, mean=third, p999=255)
    rounded_up = Tally()
    rounded_up.add(np.full(2000, 0.99 / 64, np.float32))
    found = rounded_up.result()
    assert found is not None and found.p999 == found.max < 1 / 64, "a percentile is never above the maximum"
    tiny = Tally()
    tiny.add(np.full(2000, 1e-6, np.float32))
    millionth: Any = pytest.approx(1e-6)
    assert tiny.result() == Levels(max=millionth, mean=millionth, p999=0)
    assert tiny.differ == 1


def test_an_empty_tally() -> None:
    assert Tally().result() is None
