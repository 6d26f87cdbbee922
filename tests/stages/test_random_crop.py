"""random_crop: a fixed size at a random place, with or without a black border first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as tv

from gpuflow.errors import ConfigError
from gpuflow.pipeline import stage as s
from gpuflow.stages import CenterCrop, Decode, Flip, Normalize, RandomCrop, Resize
from tests.images import jpeg, photo, png
from tests.running import RGB, by_torchvision, decoded, images, keys_of, program_of, run
from tests.texts import outline

COUNT = 4000


def places(stage: RandomCrop, height: int, width: int) -> tuple[list[int], list[int]]:
    sizes = np.full(COUNT, height), np.full(COUNT, width)
    (move,) = stage.draw(keys_of(COUNT).stage("random_crop", 0), *sizes)
    assert isinstance(move, s.Crop)
    return move.y.tolist(), move.x.tolist()


@pytest.mark.parametrize("padding", [0, 3, 40])
def test_pixels_are_those_of_torchvision(padding: int) -> None:
    stage = RandomCrop(size=(21, 30), padding=padding)
    program = program_of(Decode(), stage)
    inside = program_of(Decode(), stage, Normalize())
    for data in (jpeg(photo(75, 101)), png(photo(30, 33)), jpeg(photo(21, 30), "4:4:4")):
        keys = keys_of(12)
        batch = images(program, [data] * 12, keys)
        padded = tv.pad_image(decoded(data), [padding] * 4)
        height, width = (np.full(12, side) for side in decoded(data).shape[1:])
        (move,) = stage.draw(keys.stage("random_crop", 0), height, width)
        assert isinstance(move, s.Crop)
        for i, image in enumerate(batch):
            y, x = int(move.y[i]) + padding, int(move.x[i]) + padding
            assert torch.equal(image, tv.crop_image(padded, y, x, 21, 30))
        expected = torch.stack([Normalize().torchvision()(image) for image in batch])
        assert torch.equal(images(inside, [data] * 12, keys), expected)


PADDED = (
    RandomCrop(size=(21, 30), padding=(3, 5)),
    RandomCrop(size=(21, 30), padding=(1, 2, 30, 4), fill=(9, 200, 50)),
    RandomCrop(size=(21, 30), padding=9, fill=114),
    RandomCrop(size=(21, 30), padding=9, border="edge"),
    RandomCrop(size=(21, 30), padding=(0, 9, 4, 1), border="reflect"),
    RandomCrop(size=(21, 30), padding=(7, 1, 0, 8), border="symmetric"),
    RandomCrop(size=(60, 90), pad_if_needed=True),
    RandomCrop(size=(60, 90), padding=3, pad_if_needed=True),
    RandomCrop(size=(60, 90), padding=(1, 2, 3, 4), pad_if_needed=True, fill=7),
    RandomCrop(size=(60, 90), pad_if_needed=True, border="edge"),
    RandomCrop(size=(41, 52), pad_if_needed=True, border="reflect"),
)


@pytest.mark.parametrize("stage", PADDED, ids=repr)
def test_padding_is_that_of_torchvision(stage: RandomCrop) -> None:
    """What is padded, and the range of places, are what torchvision's transform computes for the image."""
    theirs, count = stage.torchvision(), 300
    torch.manual_seed(0)
    for size in ((40, 51), (21, 30), (59, 200), (70, 89)):
        pad, crop = stage.draw(keys_of(count).stage("random_crop", 0), *(np.full(count, side) for side in size))
        assert isinstance(pad, s.Pad) and isinstance(crop, s.Crop)
        drawn = [theirs.make_params([torch.empty(3, *size)]) for _ in range(count)]
        sides = [side.tolist() for side in (pad.left, pad.top, pad.right, pad.bottom)]
        assert [set(side) for side in sides] == [{side} for side in drawn[0]["padding"]]
        for ours, key in ((crop.y, "top"), (crop.x, "left")):
            others = np.array([params[key] for params in drawn])
            assert abs(ours.mean() - others.mean()) <= 0.2 * max(others.max(), ours.max())
            assert abs(int(ours.max()) - int(others.max())) <= 0.1 * others.max()


@pytest.mark.parametrize("color", ["rgb", "gray"])
@pytest.mark.parametrize("stage", PADDED, ids=repr)
def test_pixels_of_padded_images_are_those_of_torchvision(stage: RandomCrop, color: Any) -> None:
    if color == "gray" and isinstance(stage.fill, tuple):
        return
    keys = keys_of(12)
    for data in (jpeg(photo(75, 101)), png(photo(40, 51)), png(photo(60, 33))):
        batch = images(program_of(Decode(color=color), stage), [data] * 12, keys)
        for i, image in enumerate(batch):
            expected = by_torchvision(stage, decoded(data, color), keys[i].stage("random_crop", 0))
            assert torch.equal(image, expected)


def test_padding_between_other_stages() -> None:
    keys, data = keys_of(12), png(photo(40, 57))
    for crop in PADDED:
        stages = (Resize(height=33, width=50), Flip(horizontal=0.5), crop, Flip(vertical=0.5), CenterCrop(size=70))
        batch = images(program_of(Decode(), *stages), [data] * 12, keys)
        for i, image in enumerate(batch):
            expected = decoded(data)
            for stage, turn in zip(stages, (0, 0, 0, 1, 0), strict=True):
                expected = by_torchvision(stage, expected, keys[i].stage(stage.stage_name, turn))
            assert torch.equal(image, expected), crop


def test_a_crop_without_padding_is_one_move_whatever_its_fill() -> None:
    size = np.array([40]), np.array([50])
    for stage in (RandomCrop(size=9), RandomCrop(size=9, fill=7), RandomCrop(size=9, border="reflect", padding=(0, 0))):
        (move,) = stage.draw(keys_of(1).stage("random_crop", 0), *size)
        assert isinstance(move, s.Crop) and move.margin == 0 and not stage.pads and stage.warps is None


def test_more_padding_than_an_image_has_pixels_to_reflect() -> None:
    stage = RandomCrop(size=30, pad_if_needed=True, border="reflect")
    _, faults = run(program_of(Decode(), stage), [png(photo(15, 40)), png(photo(16, 40))])
    assert str(faults[0]) == "random_crop: the padding is larger than the image, which has 15x40 pixels here"
    assert faults[1] is None
    with pytest.raises(ValueError, match=r"mirrors 15 of 15 pixels; pad at most 14, or with border: edge"):
        stage.output(RGB.replace(shape=(15, None, 3)))
    assert stage.output(RGB.replace(shape=(16, None, 3))).shape == (30, 30, 3)
    assert stage.output(RGB.replace(shape=(None, 17, 3))).shape == (30, 30, 3)
    stage = RandomCrop(size=30, pad_if_needed=True, border="symmetric")
    assert run(program_of(Decode(), stage), [png(photo(15, 40))])[1] == [None]
    assert stage.output(RGB.replace(shape=(15, None, 3))).shape == (30, 30, 3)


def test_an_image_that_is_too_small_with_padding_on_some_sides_is_a_bad_sample() -> None:
    for stage in (RandomCrop(size=30, padding=(1, 0, 1, 2)), RandomCrop(size=30, padding=1, fill=9)):
        _, faults = run(program_of(Decode(), stage), [png(photo(28, 28)), png(photo(27, 28)), png(photo(28, 27))])
        assert [fault is None for fault in faults] == [True, False, False]
        assert str(faults[1]) == "random_crop: the crop is larger than the image, which has 29x30 pixels here"


def test_every_place_is_reached_equally_often() -> None:
    for padding, low in ((0, 0), (2, -2)):
        ys, xs = places(RandomCrop(size=10, padding=padding), 13, 15)
        for found, room in ((ys, 4 + 2 * padding), (xs, 6 + 2 * padding)):
            counts = np.bincount(np.array(found) - low)
            assert len(counts) == room
            assert ((counts - COUNT / room) ** 2 / (COUNT / room)).sum() < 60
    assert places(RandomCrop(size=10), 10, 10) == ([0] * COUNT, [0] * COUNT)


def test_an_image_that_is_too_small_is_a_bad_sample() -> None:
    program = program_of(Decode(), RandomCrop(size=30, padding=1))
    batch, faults = run(program, [png(photo(28, 28)), png(photo(27, 90)), png(photo(90, 27)), png(photo(40, 40))])
    text = "random_crop: the crop is larger than the image, which has {} pixels here"
    assert [str(fault) if fault else None for fault in faults] == [
        None,
        text.format("27x90"),
        text.format("90x27"),
        None,
    ]
    padded = tv.pad_image(decoded(png(photo(28, 28))), [1] * 4)
    assert torch.equal(batch[0], padded), "the crop is the whole image with its border"


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"size": 0}, "random_crop.size config.range, got 0"),
        ({"size": (4, -1)}, "random_crop.size config.range, got [4, -1]"),
        ({"size": 4, "padding": -1}, "random_crop.padding config.range, got -1"),
        ({"size": 4, "padding": (1, 2, 3, -4)}, "random_crop.padding config.range, got [1, 2, 3, -4]"),
        ({"size": 4, "fill": 256}, "random_crop.fill config.range, got 256"),
    ],
)
def test_errors(parameters: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RandomCrop(**parameters)
    assert outline(caught.value) == expected


def test_padding_counts_when_fitting() -> None:
    assert RandomCrop(size=10, padding=1).output(RGB.replace(shape=(8, 8, 3))).shape == (10, 10, 3)
    with pytest.raises(ValueError, match="crops") as caught:
        RandomCrop(size=11, padding=1).output(RGB.replace(shape=(8, 8, 3)))
    assert str(caught.value) == "crops 11x11 from an image of 8x8, which is smaller; crop less or resize to more"
    with pytest.raises(ValueError, match="crops") as caught:
        RandomCrop(size=(12, 30), padding=1).output(RGB.replace(shorter=9))
    assert str(caught.value) == (
        "crops 12x30 from an image whose shorter side is 9, which is smaller; crop less or resize to more"
    )
    assert RandomCrop(size=(11, 30), padding=1).output(RGB.replace(shorter=9)).shape == (11, 30, 3)
    assert RandomCrop(size=99, pad_if_needed=True).output(RGB.replace(shape=(8, 8, 3))).shape == (99, 99, 3)
    one_side = RandomCrop(size=(11, 9), padding=(0, 3, 0, 0))
    assert one_side.output(RGB.replace(shape=(8, 9, 3))).shape == (11, 9, 3)
    with pytest.raises(ValueError, match="crops 11x9 from an image of 7x9, which is smaller"):
        one_side.output(RGB.replace(shape=(7, 9, 3)))
    with pytest.raises(ValueError, match="fills with 3 levels"):
        RandomCrop(size=3, padding=1, fill=(1, 2, 3)).output(s.ImageSpec(shape=(9, 9, 1), color="gray"))
