"""Runs the operations of pointwise stages on images of many kinds, for the tests of these stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpuflow.errors import ConfigError
from gpuflow.execute.cpu.native_chunk import run_pointwise
from gpuflow.pipeline import stage as s
from tests.images import photo
from tests.running import RGB, keys_of
from tests.texts import outline

Function = Callable[[torch.Tensor, float], torch.Tensor]


def pictures(channels: int = 3) -> Iterator[NDArray[np.uint8]]:
    """Random levels, few levels, a photograph, one colour, levels that lie close together, one pixel: [H, W, C]."""
    rng = np.random.default_rng(channels)
    yield rng.integers(0, 256, (67, 83, channels), dtype=np.uint8)
    yield rng.choice(np.array([0, 1, 100, 254, 255], np.uint8), (31, 40, channels))
    yield photo(90, 70)[..., :channels]
    yield np.full((20, 21, channels), 77, np.uint8)
    yield 100 + rng.integers(0, 9, (33, 20, channels), dtype=np.uint8)
    yield rng.integers(0, 256, (1, 1, channels), dtype=np.uint8)


def run_all(stage: s.Pointwise, image: NDArray[np.uint8], count: int) -> tuple[NDArray[np.float64], torch.Tensor]:
    """The coefficients of `count` samples and their results on one image, [count, C, H, W]."""
    drawn = stage.draw(keys_of(count).stage(stage.stage_name, 0))
    operations = stage.operations(drawn, *(np.full(count, side) for side in image.shape[:2]))
    assert operations is not None
    results = [run_pointwise(image.copy(), operations, i, None, planes=False) for i in range(count)]
    return drawn, torch.from_numpy(np.stack(results)).permute(0, 3, 1, 2)


def check_equals(stage: s.Pointwise, function: Function, *, count: int = 12) -> None:
    """Each sample equals torchvision's function with the sample's factor, or the image where it is not changed."""
    for channels in (1, 3):
        for image in pictures(channels):
            plain = torch.from_numpy(image).permute(2, 0, 1).contiguous()
            for row, result in zip(*run_all(stage, image, count), strict=True):
                expected = function(plain.clone(), row[1].item()) if row[0] else plain
                assert torch.equal(result, expected)


def check_draws(stage: s.Pointwise | s.Local, probability: float, low: float = 0.0, high: float = 0.0) -> None:
    """Samples are changed with this probability, by factors that are uniform within the bounds."""
    count = 8000
    drawn = stage.draw(keys_of(count).stage(stage.stage_name, 0))
    changed, factor = drawn.T
    assert set(changed.tolist()) <= {0.0, 1.0}
    assert abs(changed.mean() - probability) < 5 * np.sqrt(max(probability * (1 - probability), 1e-9) / count)
    assert low <= factor.min() <= factor.max() <= high
    share = (np.sort(factor) - low) / (high - low) if high > low else (np.arange(count) + 0.5) / count
    assert np.abs(share - (np.arange(count) + 0.5) / count).max() < 2.5 / np.sqrt(count)
    if high > low and 0 < probability < 1:
        assert abs(np.corrcoef(changed, factor)[0, 1]) < 5 / np.sqrt(count)


def check_changes_nothing(*stages: s.Pointwise) -> None:
    for stage in stages:
        assert not stage.random
        for image in pictures():
            _, (result,) = run_all(stage, image, 1)
            assert torch.equal(result, torch.from_numpy(image).permute(2, 0, 1))


def check_refuses(expected: str, kind: type[s.Stage], **parameters: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**parameters)
    assert outline(caught.value) == expected


def check_refuses_bgr(stage: s.Stage) -> None:
    with pytest.raises(ValueError, match="weighs") as caught:
        stage.output(RGB.replace(color="bgr"))
    assert str(caught.value) == "weighs red, green and blue but gets bgr images; decode with color: rgb"
