"""Laws of random draws: each number has its documented distribution and is independent of every other one.

Those of mixing stages, which draw for a batch, are in test_mixing_laws.py.

`INDEPENDENT` holds what stages that draw several numbers draw, as independent numbers that are uniform on [0, 1).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import OpaqueStep, ResamplingStep
from gpuflow.stages import (
    STAGES,
    Affine,
    ColorJitter,
    Decode,
    Flip,
    Perspective,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    Rotate,
    Torchvision,
)
from tests.images import photo, png
from tests.running import keys_of, program_of, run

Numbers = NDArray[np.float64]
COUNT = 5000
HEIGHT, WIDTH = 4000, 6000
CORRELATION = 5 / np.sqrt(COUNT)
"""Five standard deviations of the correlation of independent numbers."""


def moves(stage: s.Geometry, keys: s.StageKeys) -> tuple[Any, ...]:
    count = len(keys.positions)
    return stage.draw(keys, np.full(count, HEIGHT), np.full(count, WIDTH))


def of_random_crop(keys: s.StageKeys) -> Numbers:
    (crop,) = moves(RandomCrop(size=(500, 700), padding=9), keys)
    return np.stack([(crop.y + 9.5) / (HEIGHT - 500 + 19), (crop.x + 9.5) / (WIDTH - 700 + 19)], axis=1)


def of_random_resized_crop(keys: s.StageKeys) -> Numbers:
    """The first box fits at these scales and ratios."""
    low, high, ratio = 0.1, 0.3, (0.8, 1.25)
    crop, _ = moves(RandomResizedCrop(size=24, scale=(low, high), ratio=ratio), keys)
    area = (crop.height * crop.width / (HEIGHT * WIDTH) - low) / (high - low)
    logs = (np.log(crop.width / crop.height) - np.log(ratio[0])) / np.log(ratio[1] / ratio[0])
    y, x = (crop.y + 0.5) / (HEIGHT - crop.height + 1), (crop.x + 0.5) / (WIDTH - crop.width + 1)
    return np.stack([area, logs, y, x], axis=1)


def of_flip(keys: s.StageKeys) -> Numbers:
    """Whether a sample is flipped at each of several probabilities says between which of them its number is."""
    chances = np.linspace(0, 1, 101)[1:]
    flips = [moves(Flip(horizontal=chance, vertical=chance), keys)[0] for chance in chances]
    return np.stack([1 - np.mean([getattr(f, way) for f in flips], axis=0) for way in ("horizontal", "vertical")], 1)


def of_rotate(keys: s.StageKeys) -> Numbers:
    (warp,) = moves(Rotate(degrees=(-40.0, 100.0)), keys)
    angle = np.degrees(np.arctan2(warp.matrix[:, 1, 0], warp.matrix[:, 0, 0]))
    return np.asarray((angle[:, None] + 40) / 140)


def of_affine(keys: s.StageKeys) -> Numbers:
    """Without shears, which are drawn as the angle is, and from more numbers than a matrix shows at once."""
    (warp,) = moves(Affine(degrees=(-40.0, 100.0), translate=(0.5, 0.25), scale=(0.5, 2.5)), keys)
    out = np.linalg.inv(warp.matrix)
    angle = np.degrees(np.arctan2(out[:, 1, 0], out[:, 0, 0]))
    x, y, _ = (out @ np.array([WIDTH / 2, HEIGHT / 2, 1])).T
    shift = (x - WIDTH / 2) / (0.5 * WIDTH), (y - HEIGHT / 2) / (0.25 * HEIGHT)
    scale = np.sqrt(np.linalg.det(out))
    return np.stack([(angle + 40) / 140, (shift[0] + 1) / 2, (shift[1] + 1) / 2, (scale - 0.5) / 2], axis=1)


def of_perspective(keys: s.StageKeys) -> Numbers:
    """How far each corner moves."""
    (warp,) = moves(Perspective(distortion_scale=0.5, probability=1.0), keys)
    corners = np.array([[0, WIDTH - 1, WIDTH - 1, 0], [0, 0, HEIGHT - 1, HEIGHT - 1], [1, 1, 1, 1]])
    x, y, third = np.moveaxis(np.linalg.inv(warp.matrix) @ corners, 1, 0)
    inwards = np.abs(np.stack([x / third - corners[0], y / third - corners[1]], axis=1))
    inwards = (inwards + 0.5) / np.array([[WIDTH // 4 + 1], [HEIGHT // 4 + 1]])
    return np.concatenate([*inwards.transpose(1, 0, 2)], axis=1)


def of_color_jitter(keys: s.StageKeys) -> Numbers:
    low, high = np.array([[0.6, 1.4], [0.3, 1.1], [0.8, 2.0], [-0.2, 0.3]]).T
    ranges = [tuple(pair) for pair in zip(low.tolist(), high.tolist(), strict=True)]
    brightness, contrast, saturation, hue = ranges
    jitter = ColorJitter(brightness=brightness, contrast=contrast, saturation=saturation, hue=hue)
    drawn = jitter.draw(keys)
    orders = list(itertools.permutations(range(4)))
    order = np.array([orders.index(tuple(row)) for row in drawn[:, :4].astype(int).tolist()])
    return np.concatenate([(order[:, None] + 0.5) / 24, (drawn[:, 4:8] - low) / (high - low)], axis=1)


def of_opaque(keys: s.Keys, occurrence: int) -> Numbers:
    """The two halves of an opaque stage's seed."""
    seeds = OpaqueStep(STAGE_OF["torchvision"], occurrence, s.ENCODED, s.ENCODED, 1).draw(keys)  # type: ignore[arg-type]
    return np.stack([seeds >> 31, seeds & (1 << 31) - 1], axis=1) / 2.0**31


INDEPENDENT: Mapping[str, Callable[[s.Keys, int], Numbers]] = {
    "random_crop": lambda keys, turn: of_random_crop(keys.stage("random_crop", turn)),
    "random_resized_crop": lambda keys, turn: of_random_resized_crop(keys.stage("random_resized_crop", turn)),
    "flip": lambda keys, turn: of_flip(keys.stage("flip", turn)),
    "rotate": lambda keys, turn: of_rotate(keys.stage("rotate", turn)),
    "affine": lambda keys, turn: of_affine(keys.stage("affine", turn)),
    "perspective": lambda keys, turn: of_perspective(keys.stage("perspective", turn)),
    "color_jitter": lambda keys, turn: of_color_jitter(keys.stage("color_jitter", turn)),
    "torchvision": of_opaque,
}
STAGE_OF: Mapping[str, s.Stage] = {
    "random_crop": RandomCrop(size=30),
    "random_resized_crop": RandomResizedCrop(size=40),
    "flip": Flip(horizontal=0.5),
    "rotate": Rotate(degrees=30),
    "affine": Affine(degrees=30),
    "perspective": Perspective(probability=1.0),
    "color_jitter": ColorJitter(brightness=0.4, contrast=0.4),
    "torchvision": Torchvision(name="RandomHorizontalFlip", parameters=(("p", 0.5),)),
}


def numbers(name: str, *, seed: int = 0, epoch: int = 0, first: int = 0, occurrence: int = 0) -> Numbers:
    return INDEPENDENT[name](keys_of(COUNT, seed=seed, epoch=epoch, first=first), occurrence)


every_random_stage = pytest.mark.parametrize("name", INDEPENDENT)


def test_the_stages_here_are_random() -> None:
    """The others test their draws in separate files."""
    assert set(INDEPENDENT) == set(STAGE_OF) <= set(STAGES)
    assert all(stage.random for stage in STAGE_OF.values())


@every_random_stage
def test_each_number_is_uniform(name: str) -> None:
    """By the test of Kolmogorov and Smirnov at a level of one in 10^5, with the step of numbers that are rounded."""
    for column in numbers(name).T:
        steps = 0.01 if name == "flip" else 1 / 24 if name == "color_jitter" else 0.002
        distance = np.abs(np.sort(column) - (np.arange(COUNT) + 0.5) / COUNT).max()
        assert distance < 2.5 / np.sqrt(COUNT) + steps


def uncorrelated(*columns: Numbers) -> None:
    for a, b in itertools.combinations(np.concatenate(columns, axis=1).T, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < CORRELATION
        assert abs(np.corrcoef((a - 0.5) ** 2, (b - 0.5) ** 2)[0, 1]) < CORRELATION


@every_random_stage
def test_the_numbers_of_a_sample_are_independent(name: str) -> None:
    uncorrelated(numbers(name))


@every_random_stage
@pytest.mark.parametrize("other", [{"seed": 1}, {"epoch": 1}, {"first": 1}, {"occurrence": 1}], ids=str)
def test_the_numbers_of_other_keys_are_independent(name: str, other: dict[str, int]) -> None:
    uncorrelated(numbers(name), numbers(name, **other))


def test_stages_of_different_names_are_independent() -> None:
    for a, b in itertools.combinations(INDEPENDENT, 2):
        uncorrelated(numbers(a), numbers(b))


@every_random_stage
def test_namesakes_in_a_program_draw_from_keys_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Side by side in one resampling, and apart in several steps."""
    asked: list[tuple[str, int]] = []
    stage_keys = s.Keys.stage

    def stage(self: s.Keys, name: str, occurrence: int) -> s.StageKeys:
        keys = stage_keys(self, name, occurrence)
        asked.append((name, keys.key))
        return keys

    monkeypatch.setattr(s.Keys, "stage", stage)
    twin, apart = STAGE_OF[name], ColorJitter(hue=0.1) if name != "color_jitter" else Flip(vertical=0.5)
    between = Resize(height=50, width=60)
    stages = (between, twin, between, twin, twin, apart, between, twin)
    program = program_of(Decode(), *stages)
    _, faults = run(program, [png(photo(70, 80))])
    assert faults == [None]
    mine = {key for drawn, key in asked if drawn == name}
    assert len(mine) == 4
    assert len({key for _, key in asked}) == len(mine) + 1 + 3, "each stage of the program has a key of its own"


def test_namesakes_in_one_resampling_give_different_boxes() -> None:
    """Half of a crop's freedom each: with one key for both, y of the second would follow from y of the first."""
    program = program_of(Decode(), RandomCrop(size=2100), RandomCrop(size=100))
    (step,) = program.steps
    assert isinstance(step, ResamplingStep)
    first = ResamplingStep(step.stages[:1], step.occurrences[:1], step.max_pixels)
    keys, size = keys_of(COUNT), np.full(COUNT, 4100)
    whole, half = step.draw(keys, size, size).box, first.draw(keys, size, size).box
    uncorrelated(half[:, :2] / 2001, (whole - half)[:, :2] / 2001)
