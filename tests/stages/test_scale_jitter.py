"""scale_jitter: torchvision's sizes for the same numbers, its pixels, and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gpuflow.errors import ConfigError
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.moves import Resize
from gpuflow.stages import Decode, RandomCrop, ScaleJitter
from tests.images import jpeg, photo
from tests.running import images, keys_of, program_of
from tests.texts import outline

COUNT = 200


def sizes(stage: ScaleJitter, keys: s.StageKeys, height: int, width: int) -> Any:
    (move,) = stage.draw(keys, np.full(COUNT, height), np.full(COUNT, width))
    assert isinstance(move, Resize)
    return np.stack([move.height, move.width], axis=1)


@pytest.mark.parametrize(("height", "width"), [(64, 97), (200, 31), (50, 50)])
@pytest.mark.parametrize("size", [80, (40, 130)])
def test_sizes_are_those_of_torchvision_for_the_same_numbers(
    size: int | tuple[int, int], height: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, keys = ScaleJitter(size=size), keys_of(COUNT).stage("scale_jitter", 0)
    found = sizes(stage, keys, height, width)
    for (number,), ours in zip(keys.uniform(1), found.tolist(), strict=True):
        monkeypatch.setattr(torch, "rand", lambda count, number=number: torch.tensor([number]))
        theirs = stage.torchvision().make_params([torch.zeros(3, height, width)])["size"]
        assert tuple(ours) == tuple(max(side, 1) for side in theirs)
    assert len(np.unique(found[:, 0])) > 20


def test_a_padding_crop_makes_one_size_of_it() -> None:
    program = program_of(Decode(), ScaleJitter(size=50), RandomCrop(size=50, pad_if_needed=True))
    assert images(program, [jpeg(photo(64, 97))] * 20, keys_of(20)).shape == (20, 3, 50, 50)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"size": 0}, "scale_jitter.size config.range, got 0"),
        ({"scale": (0.0, 1.0)}, "scale_jitter.scale config.range, got [0.0, 1.0]"),
        ({"scale": (2.0, 1.0)}, "scale_jitter.scale config.range, got [2.0, 1.0]"),
    ],
)
def test_errors(parameters: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ScaleJitter(**{"size": 8, **parameters})
    assert outline(caught.value) == expected
