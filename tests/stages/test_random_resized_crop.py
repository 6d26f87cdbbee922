"""random_resized_crop: the same boxes as torchvision's algorithm for the same numbers, and its statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as tv

from gpuflow.errors import ConfigError
from gpuflow.pipeline import stage as s
from gpuflow.stages import Decode, Normalize, RandomResizedCrop
from tests.images import jpeg, photo, png
from tests.running import decoded, images, keys_of, levels_apart, program_of
from tests.texts import outline

Box = tuple[int, int, int, int]


def boxes(stage: RandomResizedCrop, keys: s.StageKeys, height: int, width: int) -> list[Box]:
    """(y, x, height, width) of every sample."""
    count = len(keys.positions)
    crop, _ = stage.draw(keys, np.full(count, height), np.full(count, width))
    assert isinstance(crop, s.Crop)
    return list(zip(crop.y.tolist(), crop.x.tolist(), crop.height.tolist(), crop.width.tolist(), strict=True))


def reference(stage: RandomResizedCrop, numbers: Sequence[float], height: int, width: int) -> Box:
    """torchvision's RandomResizedCrop.make_params, line by line, with given uniform numbers."""
    areas, ratios, (at_y, at_x) = numbers[:10], numbers[10:20], numbers[20:]
    area = height * width
    low, high = math.log(stage.ratio[0]), math.log(stage.ratio[1])
    for a, r in zip(areas, ratios, strict=True):
        target_area = area * (stage.scale[0] + a * (stage.scale[1] - stage.scale[0]))
        aspect_ratio = math.exp(low + r * (high - low))
        w = round(math.sqrt(target_area * aspect_ratio))
        h = round(math.sqrt(target_area / aspect_ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(at_y * (height - h + 1)), int(at_x * (width - w + 1)), h, w
    in_ratio = width / height
    if in_ratio < min(stage.ratio):
        w = width
        h = round(w / min(stage.ratio))
    elif in_ratio > max(stage.ratio):
        h = height
        w = round(h * max(stage.ratio))
    else:
        w, h = width, height
    h, w = max(h, 1), max(w, 1)  # torchvision takes a box of no pixels from a thin image, and fails
    return (height - h) // 2, (width - w) // 2, h, w


scales = st.tuples(st.floats(0.01, 1.0), st.floats(0.01, 1.0)).map(lambda pair: (min(pair), max(pair)))
ratios = st.tuples(st.floats(0.2, 5.0), st.floats(0.2, 5.0)).map(lambda pair: (min(pair), max(pair)))


@given(height=st.integers(1, 500), width=st.integers(1, 500), scale=scales, ratio=ratios, seed=st.integers(0, 2**32))
def test_boxes_are_those_of_the_scalar_algorithm(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], seed: int
) -> None:
    stage = RandomResizedCrop(size=8, scale=scale, ratio=ratio)
    keys = keys_of(20, seed=seed).stage("random_resized_crop", 0)
    expected = [reference(stage, row, height, width) for row in keys.uniform(22).tolist()]
    assert boxes(stage, keys, height, width) == expected
    for y, x, h, w in expected:
        assert y >= 0 and x >= 0 and h >= 1 and w >= 1 and y + h <= height and x + w <= width


@pytest.mark.parametrize(
    ("size", "ratio", "box"),
    [
        ((100, 10), (1.0, 2.0), (45, 0, 10, 10)),
        ((10, 100), (0.5, 1.0), (0, 45, 10, 10)),
        ((1, 1), (0.75, 4 / 3), (0, 0, 1, 1)),
    ],
)
def test_if_no_box_fits_the_centre_is_cropped(size: tuple[int, int], ratio: tuple[float, float], box: Box) -> None:
    stage = RandomResizedCrop(size=8, scale=(1.0, 1.0), ratio=ratio)
    assert set(boxes(stage, keys_of(50).stage("random_resized_crop", 0), *size)) == {box}


@pytest.mark.parametrize("size", [(375, 500), (64, 48), (30, 200)])
def test_statistics_are_those_of_torchvision(size: tuple[int, int]) -> None:
    count = 4000
    ours = np.array(boxes(RandomResizedCrop(size=8), keys_of(count).stage("random_resized_crop", 0), *size), float)
    transform = v2.RandomResizedCrop(8)
    image = torch.empty(3, *size)
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    params = [transform.make_params([image]) for _ in range(count)]
    torch.random.set_rng_state(state)
    theirs = np.array([[p["top"], p["left"], p["height"], p["width"]] for p in params], float)

    def figures(found: Any) -> list[Any]:
        y, x, h, w = found.T
        return [h * w, np.log(w / h), y / np.maximum(size[0] - h, 1), x / np.maximum(size[1] - w, 1)]

    for a, b in zip(figures(ours), figures(theirs), strict=True):
        spread = math.sqrt((a.var() + b.var()) / count)
        assert abs(a.mean() - b.mean()) < 5 * spread + 1e-9
        assert abs(a.std() - b.std()) < 0.1 * b.std() + 1e-9
        below = np.abs(np.quantile(a, [0.1, 0.5, 0.9]) - np.quantile(b, [0.1, 0.5, 0.9]))
        assert (below < 0.12 * (b.max() - b.min()) + 1e-9).all()


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [True, False], ids=["antialias", "sharp"])
@pytest.mark.parametrize("size", [24, (31, 17), (150, 130)])
def test_pixels_are_those_of_torchvision(interpolation: Any, antialias: bool, size: int | tuple[int, int]) -> None:
    stage = RandomResizedCrop(size=size, interpolation=interpolation, antialias=antialias)
    program, inside = program_of(Decode(), stage), program_of(Decode(), stage, Normalize())
    keys = keys_of(8)
    target = [size, size] if isinstance(size, int) else list(size)
    for data in (jpeg(photo(75, 101)), png(photo(60, 41)), jpeg(photo(1, 1), "4:4:4")):
        image = decoded(data)
        batch = images(program, [data] * 8, keys)
        found = boxes(stage, keys.stage("random_resized_crop", 0), *image.shape[1:])
        for result, box in zip(batch, found, strict=True):
            expected = tv.resized_crop(image, *box, target, InterpolationMode(interpolation), antialias)
            assert levels_apart(result, expected) <= (0 if interpolation != "bilinear" or NATIVE else 1)
        expected = torch.stack([Normalize().torchvision()(result) for result in batch])
        assert torch.equal(images(inside, [data] * 8, keys), expected)


NATIVE = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"size": 0}, "random_resized_crop.size config.range, got 0"),
        ({"scale": (0.0, 1.0)}, "random_resized_crop.scale config.range, got [0.0, 1.0]"),
        ({"scale": (0.5, 0.2)}, "random_resized_crop.scale config.range, got [0.5, 0.2]"),
        ({"scale": (0.5, 2.0)}, "random_resized_crop.scale config.range, got [0.5, 2.0]"),
        ({"ratio": (0.0, 1.0)}, "random_resized_crop.ratio config.range, got [0.0, 1.0]"),
        ({"ratio": (2.0, 1.0)}, "random_resized_crop.ratio config.range, got [2.0, 1.0]"),
    ],
)
def test_errors(parameters: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RandomResizedCrop(**{"size": 8, **parameters})
    assert outline(caught.value) == expected
