"""noise_erasing: boxes of normal noise in normalized images."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpuflow.stages import NoiseErasing, Normalize, RandomErasing
from tests.running import RGB
from tests.stages.operations import check_refuses

COUNT = 300


def erased(stage: NoiseErasing) -> torch.Tensor:
    """What is written into black images of NaN."""
    return stage.apply_batch(torch.full((COUNT, 3, 40, 50), float("nan")), np.arange(COUNT))


def test_noise_is_normal_in_each_pixel_or_one_number_for_each_box() -> None:
    scale, ratio = (0.1, 0.2), (0.5, 2.0)
    pixels = erased(NoiseErasing(probability=1.0, scale=scale, ratio=ratio))
    values = pixels[~pixels.isnan()]
    assert abs(values.mean()) < 0.01 and abs(values.std() - 1) < 0.01
    boxes = erased(NoiseErasing(probability=1.0, scale=scale, ratio=ratio, noise="box"))
    for image in boxes:
        inside = ~image.isnan()
        assert 0.09 < inside.float().mean() < 0.22
        assert [len(set(channel[known].tolist())) for channel, known in zip(image, inside, strict=True)] == [1, 1, 1]
    assert abs(boxes.nanmean(dim=(1, 2, 3)).mean()) < 0.15


def test_boxes_have_equal_parts_of_the_area() -> None:
    keys = {"probability": 1.0, "scale": (0.3, 0.3), "ratio": (1.0, 1.0)}
    images = erased(NoiseErasing(**keys, noise="box", count=3))  # type: ignore[arg-type]
    numbers = [len(set(image[0][~image[0].isnan()].tolist())) for image in images]
    assert {1, 2, 3} == set(numbers)
    for image, number in zip(images, numbers, strict=True):
        area = (~image[0].isnan()).float().mean()
        assert area < 0.33 and (area > 0.27 if number == 1 else area > 0.08)


def test_an_image_that_is_not_drawn_stays_and_no_image_is_written_to() -> None:
    images = torch.zeros(COUNT, 3, 40, 50)
    found = NoiseErasing(probability=0.25).apply_batch(images, np.arange(COUNT))
    assert (found == 0).all(dim=(1, 2, 3)).float().mean() == pytest.approx(0.75, abs=0.08)
    assert not images.any() and not NoiseErasing(probability=0.0).random


def test_levels_get_noise_about_the_mean_of_imagenet() -> None:
    images = NoiseErasing(probability=1.0).apply_batch(
        torch.zeros(COUNT, 3, 40, 50, dtype=torch.uint8), np.arange(COUNT)
    )
    values = images[images > 0].float()
    assert images.dtype == torch.uint8 and values.mean() == pytest.approx(115, abs=3) and values.max() == 255


def test_bounds_are_those_of_random_erasing() -> None:
    assert NoiseErasing().output(Normalize().output(RGB.replace(shape=(9, 9, 3)))).dtype == "float32"
    for stage, name in ((NoiseErasing, "noise_erasing"), (RandomErasing, "random_erasing")):
        check_refuses(f"{name}.count config.range, got 0", stage, count=0)
