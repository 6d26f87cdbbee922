"""random_crop: a fixed size at a random place, with or without a black border first."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as tv

from gpuflow.errors import ConfigError
from gpuflow.pipeline import stage as s
from gpuflow.stages import Decode, Normalize, RandomCrop
from tests.images import jpeg, photo, png
from tests.running import RGB, decoded, images, keys_of, program_of, run

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
    assert torch.equal(batch[0][:, 1:-1, 1:-1], decoded(png(photo(28, 28)))) or batch[0].any()


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"size": 0}, "random_crop.size must be >= 1, got 0"),
        ({"size": (4, -1)}, "random_crop.size must be >= 1, got [4, -1]"),
        ({"size": 4, "padding": -1}, "random_crop.padding must be >= 0, got -1"),
    ],
)
def test_errors(parameters: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RandomCrop(**parameters)
    assert str(caught.value) == text


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
