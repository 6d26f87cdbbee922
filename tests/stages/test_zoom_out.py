"""zoom_out: torchvision's canvas for the same numbers, with boxes and masks; its statistics; errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from gpuflow.errors import ConfigError
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.moves import Pad
from gpuflow.stages import CenterCrop, Decode, ZoomOut
from tests.images import photo, png
from tests.running import decoded, images, keys_of, program_of
from tests.texts import outline

COUNT, SIZE = 300, (61, 97)


def drawn(stage: ZoomOut, keys: s.StageKeys) -> Any:
    (pad,) = stage.draw(keys, np.full(COUNT, SIZE[0]), np.full(COUNT, SIZE[1]))
    assert isinstance(pad, Pad)
    return np.stack([pad.left, pad.top, pad.right, pad.bottom], axis=1)


def test_canvases_are_those_of_torchvision_for_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = ZoomOut(scale=(1.2, 3.5), probability=0.4)
    keys = keys_of(COUNT).stage("zoom_out", 0)
    found = drawn(stage, keys)
    for numbers, sides in zip(keys.uniform(4), found, strict=True):
        if numbers[0] >= 0.4:
            assert not sides.any()
            continue
        parts = iter([torch.from_numpy(numbers[1:2]), torch.from_numpy(numbers[2:])])
        monkeypatch.setattr(torch, "rand", lambda count, parts=parts: next(parts))
        padding = stage.torchvision().make_params([torch.zeros(3, *SIZE)])["padding"]
        assert sides.tolist() == padding
    assert 0.3 < found.any(axis=1).mean() < 0.5


def test_statistics_are_those_of_torchvision() -> None:
    ours = drawn(ZoomOut(probability=1.0), keys_of(COUNT, seed=1).stage("zoom_out", 0))
    transform, image = v2.RandomZoomOut(p=1.0), torch.zeros(3, *SIZE)
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    theirs = np.array([transform.make_params([image])["padding"] for _ in range(COUNT)])
    torch.random.set_rng_state(state)
    spread = np.sqrt((ours.var(axis=0) + theirs.var(axis=0)) / COUNT)
    assert (np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) < 5 * spread).all()


def test_the_image_stands_on_the_fill() -> None:
    stage, keys = ZoomOut(scale=(2.0, 2.0), fill=(9, 200, 50), probability=1.0), keys_of(6)
    data = png(photo(*SIZE))
    batch = images(program_of(Decode(), stage, CenterCrop(size=(122, 194))), [data] * 6, keys)
    sides = keys.stage("zoom_out", 0)
    (pad,) = stage.draw(sides, np.full(6, SIZE[0]), np.full(6, SIZE[1]))
    assert isinstance(pad, Pad)
    for i, result in enumerate(batch):
        padding = [int(side[i]) for side in (pad.left, pad.top, pad.right, pad.bottom)]
        assert torch.equal(result, v2.functional.pad(decoded(data), padding, fill=[9, 200, 50]))


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"scale": (0.5, 2.0)}, "zoom_out.scale config.range, got [0.5, 2.0]"),
        ({"scale": (3.0, 2.0)}, "zoom_out.scale config.range, got [3.0, 2.0]"),
        ({"fill": 256}, "zoom_out.fill config.range, got 256"),
        ({"probability": 1.5}, "zoom_out.probability config.range, got 1.5"),
    ],
)
def test_errors(parameters: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ZoomOut(**parameters)
    assert outline(caught.value) == expected
