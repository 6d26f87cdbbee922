"""random_erasing: boxes as torchvision draws them, filled with one colour."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as tv

from gpuflow.pipeline import stage as s
from gpuflow.stages import RandomErasing
from tests.images import photo
from tests.running import RGB, keys_of
from tests.stages.operations import check_refuses, run_all

COUNT = 4000


def drawn_boxes(stage: RandomErasing, height: int, width: int) -> tuple[Any, Any]:
    """Which samples are changed, and y, x, height, width, colour of their boxes."""
    drawn = stage.draw(keys_of(COUNT).stage("random_erasing", 0))
    found = stage.operations(drawn, np.full(COUNT, height), np.full(COUNT, width))
    return found.codes[:, 0] == s.Operation.ERASE, found.values[:, :7]


@pytest.mark.parametrize("value", [0, 200, (1, 2, 250), "imagenet", "random"])
def test_a_box_equals_torchvisions_erase(value: Any) -> None:
    stage, image = RandomErasing(value=value, probability=0.8), photo(50, 64)
    plain = torch.from_numpy(image).permute(2, 0, 1)
    _, results = run_all(stage, image, 30)
    changed, boxes = drawn_boxes(stage, 50, 64)
    assert 0 < (~changed[:30]).sum() < 20
    for result, active, (y, x, height, width, *color) in zip(
        results, changed, boxes.astype(int).tolist(), strict=False
    ):
        expected = tv.erase(plain, y, x, height, width, torch.tensor(color)[:, None, None]) if active else plain
        assert torch.equal(result, expected)
        if active and value != "random":
            assert color == {0: [0] * 3, 200: [200] * 3, "imagenet": [124, 116, 104]}.get(value, [1, 2, 250])


def test_boxes_are_drawn_as_torchvision_draws_them() -> None:
    """Small boxes always fit: areas and the logarithms of ratios are uniform, and so are places."""
    scale, ratio, side = (0.02, 0.1), (0.5, 2.0), 2000
    stage = RandomErasing(probability=1.0, scale=scale, ratio=ratio, value="random")
    _, boxes = drawn_boxes(stage, side, side)
    changed, some = drawn_boxes(replace(stage, probability=0.25), side, side)
    assert abs(changed.mean() - 0.25) < 0.04
    assert (some[changed] == boxes[changed]).all()
    y, x, height, width = boxes[:, :4].T
    numbers = [
        (height * width / side**2 - scale[0]) / (scale[1] - scale[0]),
        np.log(height / width) / np.log(4) + 0.5,
        (y + 0.5) / (side - height + 1),
        (x + 0.5) / (side - width + 1),
        *((boxes[:, 4:].T + 0.5) / 256),
    ]
    for column in numbers:
        assert np.abs(np.sort(column) - (np.arange(COUNT) + 0.5) / COUNT).max() < 2.5 / np.sqrt(COUNT) + 0.01
    assert np.abs(np.corrcoef(numbers) - np.eye(len(numbers))).max() < 0.1


def test_boxes_lie_inside_and_what_never_fits_changes_nothing() -> None:
    changed, boxes = drawn_boxes(RandomErasing(probability=1.0, scale=(0.3, 1.0)), 30, 90)
    y, x, height, width = boxes[changed, :4].T
    assert 0.5 < changed.mean() <= 1
    assert (np.minimum(y, x) >= 0).all() and (y + height <= 30).all() and (x + width <= 90).all()
    assert (height < 30).all() and (width < 90).all()
    assert not drawn_boxes(RandomErasing(probability=1.0, scale=(1.0, 1.0)), 30, 30)[0].any()
    assert not drawn_boxes(RandomErasing(probability=0.0), 30, 30)[0].any()
    assert not RandomErasing(probability=0.0).random


def test_errors() -> None:
    check_refuses("random_erasing.value config.range, got 256", RandomErasing, value=256)
    check_refuses("random_erasing.value config.range, got [0, -1, 3]", RandomErasing, value=(0, -1, 3))
    check_refuses(
        "random_erasing.scale config.range, got [0.1, 1.5]",
        RandomErasing,
        scale=(0.1, 1.5),
    )
    check_refuses(
        "random_erasing.ratio config.range, got [0.0, 1.0]",
        RandomErasing,
        ratio=(0.0, 1.0),
    )


@pytest.mark.parametrize(
    ("value", "spec", "text"),
    [
        ((1, 2), RGB, "has 2 levels of value but gets 3 channel(s); give 1 or 3"),
        ("imagenet", RGB.replace(color="bgr"), "knows imagenet in the order rgb but gets bgr images; give the levels"),
    ],
)
def test_values_that_do_not_go_with_the_images(value: Any, spec: s.ImageSpec, text: str) -> None:
    with pytest.raises(ValueError, match="value" if isinstance(value, tuple) else "imagenet") as caught:
        RandomErasing(value=value).output(spec)
    assert str(caught.value) == text
