"""rand_augment: each operation equals torchvision's, and each sample gets its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from gpuflow.errors import ConfigError
from gpuflow.pipeline.program import LocalStep, PointwiseStep, WarpStep
from gpuflow.stages import (
    CenterCrop,
    ColorJitter,
    Decode,
    Flip,
    GaussianBlur,
    Normalize,
    RandAugment,
    Rotate,
    Saturation,
    Solarize,
)
from gpuflow.stages.policy_parts import LISTED, OPERATIONS, RANGES
from tests.images import photo, png
from tests.running import decoded, images, keys_of, program_of
from tests.stages.policies import FEW, Fixed, by_torchvision, check_draws, check_magnitudes, check_nearest, frequencies
from tests.texts import outline

EXACT = ("Identity", "Brightness", "Color", "Contrast", "Sharpness", "Posterize", "Solarize")
STATISTICS = ("AutoContrast", "Equalize")
MOVES = ("ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")


def test_the_magnitudes_are_those_of_torchvision() -> None:
    assert list(v2.RandAugment._AUGMENTATION_SPACE) == list(LISTED)
    for bins in (2, 10, 31):
        check_magnitudes(RANGES, v2.RandAugment._AUGMENTATION_SPACE, bins)


@pytest.mark.parametrize("name", [*EXACT, *STATISTICS, "Invert"])
def test_colours_are_those_of_torchvision(name: str) -> None:
    magnitudes = {"Posterize": (4, 5, 8), "Solarize": (0.0, 0.3333333432674408, 0.4, 1.0)}.get(
        name, (-0.9, 0.0, 0.27, 0.9)
    )
    for pixels in (photo(33, 47), photo(20, 20)[..., :1].repeat(3, axis=2)):
        data, size = png(pixels), CenterCrop(size=(pixels.shape[0], pixels.shape[1]))
        for magnitude in map(float, magnitudes):
            (found,) = images(program_of(Decode(), Fixed(name=name, magnitude=magnitude), size), [data])
            assert torch.equal(found, by_torchvision(decoded(data), name, magnitude, "nearest", 0))


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("name", MOVES)
def test_moves_are_those_of_torchvision(name: str, interpolation: Any) -> None:
    pixels = photo(151, 203)
    data, size = png(pixels), CenterCrop(size=(151, 203))
    for magnitude, fill in ((0.27, 0), (-0.173, (9, 99, 199)), (0.0, 5)):
        magnitude *= {"TranslateX": 90, "TranslateY": 90, "Rotate": 100}.get(name, 1)
        stage = Fixed(name=name, magnitude=magnitude, interpolation=interpolation, fill=fill)
        (found,) = images(program_of(Decode(), stage, size), [data])
        expected = by_torchvision(decoded(data), name, magnitude, interpolation, fill)
        apart = (found.int() - expected.int()).abs().amax(dim=0)
        assert (apart > 0).float().mean() < FEW if interpolation == "nearest" else apart.max() <= 1


def test_nearest_pixels_are_those_of_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    check_nearest(RANGES, 31, monkeypatch)


@pytest.mark.parametrize(
    "stage",
    [RandAugment(), RandAugment(operations=3, magnitude=17, fill=(9, 99, 199))],
    ids=repr,
)
def test_each_sample_gets_what_is_drawn_for_it(stage: RandAugment) -> None:
    check_draws(stage)


def test_operations_are_drawn_alike_and_independently_in_each_round() -> None:
    stage = RandAugment(operations=2)
    for turn in range(2):
        for name, share in frequencies(stage, turn).items():
            assert share == pytest.approx(1 / 14 if name in LISTED else 0, abs=0.01)
    count = 20_000
    keys = keys_of(count).stage("rand_augment", 0)
    first, second = (stage.drawn(keys, turn) for turn in range(2))
    assert abs(np.corrcoef(first.operation, second.operation)[0, 1]) < 0.03
    turned = first.magnitude[first.operation == OPERATIONS.index("Rotate")]
    assert (turned > 0).mean() == pytest.approx(0.5, abs=0.05)
    assert set(np.abs(turned)) == {9.0}


def test_the_steps_are_the_same_whatever_is_drawn_and_are_not_folded() -> None:
    program = program_of(
        Decode(),
        CenterCrop(size=20),
        Flip(horizontal=0.5),
        RandAugment(),
        Rotate(degrees=9),
        ColorJitter(),
        Normalize(),
    )
    kinds = [type(step) for step in program.steps[1:]]
    assert kinds == [*[WarpStep, PointwiseStep, LocalStep] * 2, WarpStep, PointwiseStep]
    assert [len(step.stages) for step in program.steps if isinstance(step, WarpStep)] == [1, 1, 1]
    assert program.ends == (3, *[4] * 6, 5, 7)


def test_a_list_with_weights_is_drawn_without_repetition() -> None:
    stage = RandAugment(space="timm_3aw", operations=14)
    keys = keys_of(500).stage("rand_augment", 0)
    drawn = np.stack([stage.drawn(keys, turn).operation for turn in range(14)], axis=1)
    assert (np.sort(drawn, axis=1) == np.sort(drawn[0])).all() and len(set(drawn[0].tolist())) == 14


@pytest.mark.parametrize(
    ("name", "magnitude", "expected"),
    [
        ("SolarizeAdd", 100.0, lambda image: np.where(image < 128, np.minimum(image.astype(int) + 100, 255), image)),
        ("Solarize", 256 / 255, lambda image: image),
        ("Solarize", 128 / 255, lambda image: np.where(image < 128, image, 255 - image)),
        ("Posterize", 0.0, np.zeros_like),
    ],
)
def test_levels_of_timms_operations(name: str, magnitude: float, expected: Any) -> None:
    pixels = photo(33, 47)
    (found,) = images(
        program_of(Decode(), Fixed(name=name, magnitude=magnitude), CenterCrop(size=(33, 47))), [png(pixels)]
    )
    assert (found.permute(1, 2, 0).numpy() == expected(pixels)).all()


def test_timms_grayscale_and_blur_are_those_of_the_stages() -> None:
    """Also that a space without warps makes no warp."""
    data, keys = png(photo(61, 83)), keys_of(40)
    stage, size = RandAugment(space="timm_3a", operations=1, magnitude=5), CenterCrop(size=(61, 83))
    program = program_of(Decode(), stage, size)
    assert not any(isinstance(step, WarpStep) for step in program.steps)
    drawn = stage.drawn(keys.stage("rand_augment", 0), 0)
    batch = images(program, [data] * 40, keys)
    others = {
        "Desaturate": Saturation(amount=(0.25, 0.25)),
        "GaussianBlur": GaussianBlur(kernel_size=13, sigma=1.05),
        "Solarize": Solarize(threshold=128),
    }
    expected = {name: images(program_of(Decode(), other, size), [data])[0] for name, other in others.items()}
    for image, number in zip(batch, drawn.operation.tolist(), strict=True):
        assert torch.equal(image, expected[OPERATIONS[number]])


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"magnitude": 31}, "rand_augment.magnitude config.conflict, got 31"),
        ({"operations": 0}, "rand_augment.operations config.range, got 0"),
        ({"bins": 1, "magnitude": 0}, "rand_augment.bins config.range, got 1"),
        ({"fill": 256}, "rand_augment.fill config.range, got 256"),
        ({"noise": 0.5}, "rand_augment.noise config.conflict, got 0.5"),
        ({"limit": 12}, "rand_augment.limit config.conflict, got 12"),
        ({"probability": 0.5}, "rand_augment.probability config.conflict, got 0.5"),
        ({"space": "timm", "bins": 11}, "rand_augment.bins config.conflict, got 11"),
        ({"space": "timm_weights", "operations": 16}, "rand_augment.operations config.conflict, got 16"),
    ],
)
def test_parameters_out_of_range_are_located(parameters: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RandAugment(**parameters)
    assert outline(caught.value) == expected
