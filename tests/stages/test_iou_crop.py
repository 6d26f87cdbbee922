"""iou_crop: torchvision's crops and boxes for the same numbers, where its boxes come from, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import tv_tensors

from gpuflow.errors import ConfigError
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.moves import Crop
from gpuflow.pipeline.program import ResamplingStep
from gpuflow.pipeline.records import Ragged
from gpuflow.pipeline.targets import TargetRules, map_boxes, moves_of
from gpuflow.stages import CenterCrop, ColorJitter, Decode, Flip, IouCrop, Resize, ScaleJitter, ZoomOut
from tests.records import random_boxes
from tests.running import program_of
from tests.texts import outline

OBJECTS = s.RecordValue("boxes", "boxes")
COUNT, SIZE = 60, (90, 120)
STAGES = (IouCrop(), IouCrop(scale=(0.2, 0.7), ratio=(0.8, 1.25), overlaps=(0.2, 0.4, 1.0), trials=7))


def objects() -> Ragged:
    """Return none to four boxes for each sample."""
    rng = np.random.default_rng(0)
    return Ragged.of([random_boxes(rng, i % 5, *SIZE) for i in range(COUNT)], np.empty((0, 4), np.float32))


def with_boxes(boxes: Ragged, seed: int = 0) -> s.Keys:
    return s.Keys(seed, 1, np.arange(len(boxes)), values={OBJECTS: OBJECTS.read(boxes)})


def torchvisions(stage: IouCrop, keys: s.StageKeys, i: int, boxes: Any) -> dict[str, Any]:
    """What torchvision draws for sample i from the stage's numbers: for each round an overlap, then its boxes' four."""
    rounds = iter(keys.uniform(50 * (1 + 4 * stage.trials))[i].reshape(50, -1))
    places: Iterator[torch.Tensor] = iter(())
    low, high = stage.scale

    def numbers_of(block: Any) -> Iterator[torch.Tensor]:
        for side_x, side_y, x, y in block[1:].reshape(-1, 4):
            yield torch.tensor([side_x, side_y])
            width, height = int(SIZE[1] * (low + side_x * (high - low))), int(SIZE[0] * (low + side_y * (high - low)))
            if stage.ratio[0] <= width / height <= stage.ratio[1]:  # torchvision draws a place for these alone
                yield torch.tensor([x, y])

    def randint(low: int, high: int, size: Any) -> torch.Tensor:
        nonlocal places
        block = next(rounds)
        places = numbers_of(block)
        return torch.tensor([int(block[0] * high)])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randint", randint)
        patch.setattr(torch, "rand", lambda count: next(places))
        image = tv_tensors.Image(torch.zeros(3, *SIZE))
        found: dict[str, Any] = stage.torchvision().make_params([image, boxes])
    return found


@pytest.mark.parametrize("stage", STAGES, ids=["defaults", "others"])
def test_crops_and_boxes_are_those_of_torchvision_for_the_same_numbers(stage: IouCrop) -> None:
    boxes, sizes = objects(), np.array([SIZE] * COUNT)
    keys = with_boxes(boxes)
    stage_keys = keys.stage("iou_crop", 0)
    (crop,) = stage.draw(stage_keys, *sizes.T)
    assert isinstance(crop, Crop) and crop.centers is not None
    program = program_of(Decode(), stage, Resize(height=40, width=50))
    mapped = map_boxes(boxes, moves_of(program, keys, sizes)[:1], sizes, TargetRules(min_area=0.0))
    lost = 0
    for i in range(COUNT):
        given = tv_tensors.BoundingBoxes(torch.from_numpy(boxes[i]).double(), format="XYXY", canvas_size=SIZE)
        params = torchvisions(stage, stage_keys, i, given)
        drawn = [int(side[i]) for side in (crop.y, crop.x, crop.height, crop.width)]
        if not params:
            assert (drawn, crop.centers[i]) == ([0, 0, *SIZE], False)
            assert mapped.kept_of(i).all()
            continue
        assert drawn == [params[name] for name in ("top", "left", "height", "width")] and crop.centers[i]
        moved = stage.torchvision().transform(given, params).as_subclass(torch.Tensor)
        expected = moved[(moved[:, 2:] > moved[:, :2]).all(dim=1)]
        np.testing.assert_allclose(mapped.boxes[i], expected.numpy(), atol=1e-4)
        lost += len(boxes[i]) - len(expected)
    assert 10 < crop.centers.sum() < COUNT - 12 and lost > 5


def test_statistics_are_those_of_torchvision() -> None:
    count, stage = 600, IouCrop()
    one = np.array([[10, 20, 60, 70], [50, 5, 110, 80]], np.float32)
    keys = with_boxes(Ragged.of([one] * count, np.empty((0, 4), np.float32)), seed=4).stage("iou_crop", 0)
    (crop,) = stage.draw(keys, np.full(count, SIZE[0]), np.full(count, SIZE[1]))
    assert isinstance(crop, Crop)
    ours = np.stack([crop.y, crop.x, crop.height, crop.width], axis=1)
    given = tv_tensors.BoundingBoxes(torch.from_numpy(one), format="XYXY", canvas_size=SIZE)
    image, transform = tv_tensors.Image(torch.zeros(3, *SIZE)), stage.torchvision()
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    drawn = [transform.make_params([image, given]) or {"top": 0, "left": 0, "height": 90, "width": 120} for _ in ours]
    torch.random.set_rng_state(state)
    theirs = np.array([[found[name] for name in ("top", "left", "height", "width")] for found in drawn])
    spread = np.sqrt((ours.var(axis=0) + theirs.var(axis=0)) / count)
    assert (np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) < 5 * spread).all()
    assert (np.abs(ours.std(axis=0) / theirs.std(axis=0) - 1) < 0.15).all()


def test_boxes_are_those_in_the_image_that_the_stage_gets() -> None:
    """After moves in the same step, crops hold an object's centre, which they would not by the source's coordinates."""
    boxes, sizes = objects(), np.array([SIZE] * COUNT)
    keys = with_boxes(boxes, seed=2)
    first = ZoomOut(scale=(3.0, 4.0), probability=1.0), Flip(horizontal=0.5)
    program = program_of(Decode(), ColorJitter(brightness=0.5), *first, IouCrop(overlaps=(0.0,)), CenterCrop(size=9))
    step = program.steps[1]
    assert isinstance(step, ResamplingStep) and len(step.stages) == 4
    moves = moves_of(program, keys, sizes)
    found = map_boxes(boxes, moves[:3], sizes, TargetRules(min_area=0.0))
    crop = moves[2].move
    assert isinstance(crop, Crop) and crop.centers is not None
    assert crop.centers.tolist() == [len(boxes[i]) > 0 for i in range(COUNT)]
    assert all(len(found.boxes[i]) > 0 for i in range(COUNT) if len(boxes[i]))
    window = step.draw(keys, *sizes.T).window
    assert (window[:, 2:] == 9).all(), "pixels and boxes have one draw"
    y, x = crop.y + np.rint((crop.height - 9) / 2), crop.x + np.rint((crop.width - 9) / 2)
    pad, flip = moves[0].move, moves[1].move
    before = np.where(flip.horizontal, pad.right, pad.left), pad.top  # type: ignore[union-attr]
    mirrored = np.where(flip.horizontal, SIZE[1] - (x - before[0]) - 9, x - before[0])  # type: ignore[union-attr]
    np.testing.assert_array_equal(window[:, :2], np.stack([y - before[1], mirrored], axis=1))


@pytest.mark.parametrize("between", [ColorJitter(brightness=0.5), Resize(shorter=50)], ids=["colours", "two resizes"])
def test_moves_in_an_earlier_step_are_refused(between: s.Stage) -> None:
    with pytest.raises(ConfigError) as caught:
        program_of(Decode(), ScaleJitter(size=60), between, IouCrop(), CenterCrop(size=9))
    assert outline(caught.value) == "test[3].iou_crop stage.order"


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"scale": (0.0, 1.0)}, "iou_crop.scale config.range, got [0.0, 1.0]"),
        ({"scale": (0.5, 1.5)}, "iou_crop.scale config.range, got [0.5, 1.5]"),
        ({"ratio": (2.0, 1.0)}, "iou_crop.ratio config.range, got [2.0, 1.0]"),
        ({"overlaps": (-0.1, 1.0)}, "iou_crop.overlaps config.range, got [-0.1, 1.0]"),
        ({"overlaps": ()}, "iou_crop.overlaps config.range"),
        ({"trials": 0}, "iou_crop.trials config.range, got 0"),
    ],
)
def test_errors(parameters: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        IouCrop(**parameters)
    assert outline(caught.value) == expected
