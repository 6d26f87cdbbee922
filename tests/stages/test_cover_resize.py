"""cover_resize: the size of each sample, and what a crop makes of it. What timm draws: tests/integrations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpuflow.pipeline import stage as s
from gpuflow.stages import CenterCrop, CoverResize, Decode, RandomCrop
from tests.images import jpeg, photo
from tests.running import images, keys_of, program_of

COUNT = 400


def sizes(stage: CoverResize, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    keys = keys_of(COUNT).stage("cover_resize", 0)
    (move,) = stage.draw(keys, np.full(COUNT, height), np.full(COUNT, width))
    assert isinstance(move, s.Resize)
    return move.height, move.width


@pytest.mark.parametrize(("size", "expected"), [(50, (50, 75)), ((50, 90), (60, 90)), ((300, 10), (300, 450))])
def test_without_draws_the_image_covers_the_box(size: int | tuple[int, int], expected: tuple[int, int]) -> None:
    height, width = sizes(CoverResize(size=size, probability=0.0), 100, 150)
    assert {*zip(height.tolist(), width.tolist(), strict=True)} == {expected}


def test_zoom_and_stretch_keep_within_their_ranges() -> None:
    height, width = sizes(CoverResize(size=200, scale=(0.5, 0.8), ratio=(0.5, 1.0), probability=1.0), 400, 400)
    area, ratio = 200**2 / (height * width), width / height
    assert 0.49 < area.min() < 0.51 and 0.79 < area.max() < 0.81
    assert 0.49 < ratio.min() < 0.51 and 0.98 < ratio.max() < 1.01
    some = sizes(CoverResize(size=200, scale=(0.5, 0.8), probability=0.25), 400, 400)[0]
    assert (some == 200).mean() == pytest.approx(0.75**2, abs=0.08)


@pytest.mark.parametrize("crop", [CenterCrop, RandomCrop])
def test_a_crop_makes_one_size_of_it(crop: type[CenterCrop] | type[RandomCrop]) -> None:
    more: dict[str, Any] = {"pad_if_needed": True} if crop is RandomCrop else {}
    stage = CoverResize(size=40, ratio=(0.5, 2.0), probability=1.0)
    program = program_of(Decode(), stage, crop(size=40, border="reflect", **more))
    assert images(program, [jpeg(photo(64, 97))] * 20, keys_of(20)).shape == (20, 3, 40, 40)
