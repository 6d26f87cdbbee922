"""timm's training recipes: the stages draw what timm's own transforms draw, with the same probabilities.

Each statistic of 2,000 draws with fixed seeds is compared with timm's by the test of Kolmogorov and Smirnov (two
samples, alpha 0.001). It is conservative for statistics of whole numbers.
"""

from __future__ import annotations

import random
from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gpuflow.arrays import Floats
from gpuflow.pipeline.stage import Crop, Pad, Resize
from gpuflow.stages import (
    AutoAugment,
    CenterCrop,
    CoverResize,
    Decode,
    NoiseErasing,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
)
from gpuflow.stages.policy_parts import OPERATIONS, AugmentPolicy
from tests.images import photo, png
from tests.running import images, keys_of, program_of

timm_augment = pytest.importorskip("timm.data.auto_augment", reason="timm is not installed")

COUNT = 2000
HEIGHT, WIDTH = 97, 131
CRITICAL = np.sqrt(-np.log(0.001 / 2) / 2)
Draws = dict[str, list[list[float]]]


def check_equal(name: str, ours: Any, theirs: Any) -> None:
    """That two samples may be of one distribution."""
    a, b = np.sort(np.asarray(ours, float)), np.sort(np.asarray(theirs, float))
    assert len(a) and len(b), f"{name}: {len(a)} and {len(b)} draws"
    places = np.concatenate([a, b])
    shares = (np.searchsorted(one, places, side="right") / len(one) for one in (a, b))
    distance = np.abs(np.subtract(*shares)).max()
    assert distance < CRITICAL * np.sqrt((len(a) + len(b)) / (len(a) * len(b))), (name, distance, len(a), len(b))


def seed_timm() -> None:
    random.seed(3)
    np.random.seed(3)


def plain(name: str) -> str:
    """timm's name of an operation as gpuflow's."""
    for ending in ("Increasing", "Original", "Rel", "Rand"):
        name = name.removesuffix(ending)
    return name


def of_timm(transform: Any) -> Draws:
    """The arguments of each operation, for each of `COUNT` images a list of those that it gets."""
    drawn: Draws = defaultdict(lambda: [[] for _ in range(COUNT)])
    row = 0

    def note(name: str, image: Any, *arguments: float, **_: Any) -> Any:
        value = float(arguments[0]) if arguments else 0.0
        value = max(value, 0.0) if name.startswith("Posterize") else value  # Pillow makes a black image of fewer, too
        value = random.uniform(0.1, 2.0 * value) if name == "GaussianBlurRand" else value
        drawn[plain(name)][row].append(value)
        return image

    policy = getattr(transform, "policy", None)
    for op in transform.ops if policy is None else [op for one in policy for op in one]:
        op.aug_fn = partial(note, op.name)
    image = Image.new("RGB", (WIDTH, HEIGHT))
    seed_timm()
    for row in range(COUNT):  # noqa: B007
        transform(image)
    return drawn


def of_policy(policy: AugmentPolicy) -> Draws:
    """As `of_timm`, in timm's units."""
    drawn: Draws = defaultdict(lambda: [[] for _ in range(COUNT)])
    keys = keys_of(COUNT, seed=5).stage(policy.stage_name, 0)
    for turn in range(policy.rounds):
        found = policy.drawn_for(keys, turn, np.full(COUNT, HEIGHT), np.full(COUNT, WIDTH))
        for row, (number, magnitude) in enumerate(zip(found.operation.tolist(), found.magnitude.tolist(), strict=True)):
            if (name := OPERATIONS[number]) != "Identity":
                drawn[name][row].append(_in_units_of_timm(name, magnitude))
    return drawn


def _in_units_of_timm(name: str, magnitude: float) -> float:
    match name:
        case "Color" | "Contrast" | "Brightness" | "Sharpness":
            return 1 + magnitude
        case "Desaturate":
            return -magnitude
        case "Solarize":
            return round(255 * magnitude)
        case "TranslateX" | "TranslateY":
            return magnitude / (WIDTH if name == "TranslateX" else HEIGHT)
    return magnitude


def check_policy(policy: AugmentPolicy, transform: Any) -> None:
    """Compare how many operations an image gets, how often each, and the magnitudes of each."""
    ours, theirs = of_policy(policy), of_timm(transform)
    assert set(ours) == set(theirs)
    counts = [np.sum([[len(row) for row in rows] for rows in draws.values()], axis=0) for draws in (ours, theirs)]
    check_equal("operations", *counts)
    for name in ours:
        check_equal(f"{name}: count", *([len(row) for row in draws[name]] for draws in (ours, theirs)))
        values: list[Floats] = [np.concatenate([np.array(row) for row in draws[name]]) for draws in (ours, theirs)]
        check_equal(name, *(np.round(one, 9) for one in values))


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("rand-m9-mstd0.5-inc1", {"space": "timm_increasing", "magnitude": 9, "noise": 0.5, "probability": 0.5}),
        ("rand-m7-n3-p0.8", {"space": "timm", "magnitude": 7, "operations": 3, "probability": 0.8}),
        ("rand-m9-mstd101-inc1", {"space": "timm_increasing", "noise": "uniform", "probability": 0.5}),
        ("rand-m12-mstd3-mmax14-inc1", {"space": "timm_increasing", "magnitude": 12, "noise": 3, "limit": 14}),
        ("rand-m12-mstd3-mmax14", {"space": "timm", "magnitude": 12, "noise": 3, "limit": 14}),
        ("rand-m6-mstd1-tweights", {"space": "timm_weights", "magnitude": 6, "noise": 1}),
        ("rand-m6-mstd1-t3a", {"space": "timm_3a", "magnitude": 6, "noise": 1}),
        ("rand-m6-n4-mstd1-t3aw", {"space": "timm_3aw", "magnitude": 6, "noise": 1, "operations": 4}),
    ],
)
def test_rand_augment_draws_as_timm(text: str, keys: dict[str, Any]) -> None:
    check_policy(RandAugment(**{"probability": 0.5, **keys}), timm_augment.rand_augment_transform(text))


@pytest.mark.parametrize("name", ["original", "originalr", "v0", "v0r", "3a"])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_auto_augment_draws_as_timm(name: Any, noise: float) -> None:
    text = f"{name}-mstd{noise}" if noise else name
    check_policy(AutoAugment(policy=name, noise=noise), timm_augment.auto_augment_transform(text))


# --- crops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{}, {"scale": (0.3, 0.9), "ratio": (0.5, 1.6)}])
def test_random_resized_crops_are_timms(keys: dict[str, Any]) -> None:
    transforms = pytest.importorskip("timm.data.transforms")
    stage = RandomResizedCrop(size=64, **keys)
    moves = stage.draw(keys_of(COUNT).stage("random_resized_crop", 0), np.full(COUNT, HEIGHT), np.full(COUNT, WIDTH))
    crop = moves[0]
    assert isinstance(crop, Crop)
    image = Image.new("RGB", (WIDTH, HEIGHT))
    seed_timm()
    get = transforms.RandomResizedCropAndInterpolation.get_params
    y, x, height, width = np.array([get(image, stage.scale, stage.ratio) for _ in range(COUNT)]).T
    check_equal("area", crop.height * crop.width, height * width)
    check_equal("ratio", crop.width / crop.height, width / height)
    check_equal("y", crop.y / (HEIGHT - crop.height + 1), y / (HEIGHT - height + 1))
    check_equal("x", crop.x / (WIDTH - crop.width + 1), x / (WIDTH - width + 1))


@pytest.mark.parametrize("keys", [{}, {"scale": (0.08, 1.0), "ratio": (0.75, 4 / 3)}])
@pytest.mark.parametrize("mode", ["rkrc", "rkrr"])
def test_crops_that_keep_the_ratio_are_timms(mode: str, keys: dict[str, Any]) -> None:
    transforms = pytest.importorskip("timm.data.transforms")
    size = (64, 80)
    stage = CoverResize(size=size, **keys)
    drawn, image = keys_of(COUNT).stage("cover_resize", 0), Image.new("RGB", (WIDTH, HEIGHT))
    resize = stage.draw(drawn, np.full(COUNT, HEIGHT), np.full(COUNT, WIDTH))[0]
    assert isinstance(resize, Resize)
    seed_timm()
    resizing = transforms.ResizeKeepRatio.get_params
    sizes = [resizing(image, size, 0.0, 0.5, stage.scale, True, 0.5, stage.ratio) for _ in range(COUNT)]
    height, width = np.array(sizes).T
    check_equal("area", resize.height * resize.width, height * width)
    check_equal("ratio", resize.width / resize.height, width / height)
    if mode == "rkrr":
        cropping = RandomCrop(size=size, pad_if_needed=True, border="reflect")
        pad, crop = cropping.draw(keys_of(COUNT).stage("random_crop", 0), resize.height, resize.width)
        assert isinstance(pad, Pad) and isinstance(crop, Crop)
        y, x = crop.y - pad.top, crop.x - pad.left
        seed_timm()
        shapes = [Image.new("1", (int(w), int(h))) for h, w in sizes]
        their_y, their_x = np.array([transforms.RandomCropOrPad.get_params(one, size) for one in shapes]).T
        check_equal("y", y, their_y)
        check_equal("x", x, their_x)


@pytest.mark.parametrize("shape", [(50, 70), (49, 71), (30, 91), (61, 83)])
def test_a_centred_crop_that_mirrors_is_timms(shape: tuple[int, int]) -> None:
    transforms = pytest.importorskip("timm.data.transforms")
    pixels, size = photo(*shape), (52, 72)
    ours = images(program_of(Decode(), CenterCrop(size=size, border="reflect")), [png(pixels)])[0]
    theirs = transforms.center_crop_or_pad(Image.fromarray(pixels), size, padding_mode="reflect")
    assert (ours.permute(1, 2, 0).numpy() == np.asarray(theirs)).all()


# --- erasing ----------------------------------------------------------------------------------------------------------


def erased(image: torch.Tensor) -> list[float]:
    """Of an image [1, H, W] of NaN: the erased part, its rows and columns as parts, and the mean of what is in it."""
    inside = ~image[0].isnan()
    rows, columns = (inside.any(dim=axis).float().mean().item() for axis in (1, 0))
    return [inside.float().mean().item(), rows, columns, image.nanmean().nan_to_num(0).item()]


@pytest.mark.parametrize(("mode", "noise"), [("rand", "box"), ("pixel", "pixel")])
@pytest.mark.parametrize("count", [1, 3])
def test_noise_is_erased_as_by_timm(mode: str, noise: Any, count: int) -> None:
    from timm.data.random_erasing import RandomErasing as TimmErasing

    images = torch.full((COUNT, 1, HEIGHT, WIDTH), float("nan"))
    stage = NoiseErasing(probability=0.8, scale=(0.02, 1 / 3), ratio=(0.3, 1 / 0.3), noise=noise, count=count)
    ours = [erased(image) for image in stage.apply_batch(images, np.arange(COUNT))]
    seed_timm()
    torch.manual_seed(3)
    theirs = [erased(image) for image in TimmErasing(0.8, mode=mode, max_count=count, device="cpu")(images)]
    for name, *both in zip(("area", "rows", "columns", "mean"), zip(*ours), zip(*theirs), strict=True):  # noqa: B905
        check_equal(name, *both)


@pytest.mark.parametrize("count", [1, 4])
def test_constant_boxes_are_timms(count: int) -> None:
    from timm.data.random_erasing import RandomErasing as TimmErasing

    stage = RandomErasing(probability=0.8, scale=(0.02, 1 / 3), ratio=(0.3, 1 / 0.3), count=count)
    numbers = stage.draw(keys_of(COUNT).stage("random_erasing", 0))
    found = stage.operations(numbers, np.full(COUNT, HEIGHT), np.full(COUNT, WIDTH))
    ours, images = [], torch.full((COUNT, 1, HEIGHT, WIDTH), float("nan"))
    for image, codes, rows in zip(images.clone(), found.codes, found.factors.astype(int), strict=True):
        for y, x, height, width in found.values[rows[codes >= 0], :4].astype(int).tolist():
            image[:, y : y + height, x : x + width] = 0
        ours.append(erased(image)[:3])
    seed_timm()
    theirs = [erased(image)[:3] for image in TimmErasing(0.8, max_count=count, device="cpu")(images)]
    for name, *both in zip(("area", "rows", "columns"), zip(*ours), zip(*theirs), strict=True):  # noqa: B905
        check_equal(name, *both)
