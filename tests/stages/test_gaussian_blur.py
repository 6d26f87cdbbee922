"""gaussian_blur: equals torchvision's function within a level, by sigmas from its range."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as tv

from gpuflow.execute.cpu.native_chunk import run_filters
from gpuflow.stages import GaussianBlur
from tests.images import photo
from tests.running import keys_of, levels_apart
from tests.stages.operations import check_draws, check_refuses, pictures


@pytest.mark.parametrize("kernel_size", [1, 3, 9, 23])
def test_equals_torchvision_within_a_level(kernel_size: int) -> None:
    """Sums that lie close to a half are rounded to either level: fewer than one in a thousand."""
    stage = GaussianBlur(kernel_size=kernel_size, sigma=(0.1, 4.0), probability=0.8)
    drawn = stage.draw(keys_of(10).stage("gaussian_blur", 0))
    filters = stage.filters(drawn)
    apart = total = 0
    for channels in (1, 3):
        for image in pictures(channels):
            if min(image.shape[:2]) <= kernel_size // 2:
                continue  # torchvision does not pad these
            plain = torch.from_numpy(image).permute(2, 0, 1)
            for i, (active, sigma) in enumerate(drawn.tolist()):
                result = torch.from_numpy(run_filters(image, filters, i)).permute(2, 0, 1)
                expected = tv.gaussian_blur(plain, [kernel_size] * 2, [sigma] * 2) if active else plain
                assert levels_apart(result, expected) <= 1
                apart, total = apart + int((result != expected).sum()), total + result.numel()
    assert apart < 0.001 * total


def test_columns_and_rows_of_their_own_are_in_torchvisions_order() -> None:
    stage, image = GaussianBlur(kernel_size=(3, 9), sigma=2), photo(40, 50)
    filters = stage.filters(np.array([[1.0, 2.0]]))
    assert filters.columns.shape == (1, 3) and filters.rows.shape == (1, 9)
    result = torch.from_numpy(run_filters(image, filters, 0)).permute(2, 0, 1)
    plain = torch.from_numpy(image).permute(2, 0, 1)
    assert levels_apart(result, tv.gaussian_blur(plain, [3, 9], [2.0, 2.0])) <= 1
    assert levels_apart(result, tv.gaussian_blur(plain, [9, 3], [2.0, 2.0])) > 1
    assert not GaussianBlur(kernel_size=(1, 1)).random and GaussianBlur(kernel_size=(1, 3)).random


def test_an_image_that_is_smaller_than_the_kernel() -> None:
    """It is mirrored repeatedly, so that one colour stays as it is."""
    filters = GaussianBlur(kernel_size=23, sigma=5).filters(np.array([[1.0, 5.0]]))
    for shape in ((1, 1, 3), (3, 40, 1), (2, 5, 3)):
        image = np.full(shape, 77, np.uint8)
        assert np.array_equal(run_filters(image, filters, 0), image)


@pytest.mark.parametrize("sigma", [1e-3, 1e-200, 5e-324])
def test_a_tiny_sigma_leaves_the_image_as_it_is(sigma: float) -> None:
    filters = GaussianBlur(kernel_size=5, sigma=sigma).filters(np.array([[1.0, sigma]]))
    assert filters.rows.tolist() == filters.columns.tolist() == [[0, 0, 1, 0, 0]]
    image = photo(20, 31)
    assert np.array_equal(run_filters(image, filters, 0), image)


def test_its_sigmas_and_its_probability() -> None:
    check_draws(GaussianBlur(kernel_size=9, probability=0.5), 0.5, 0.1, 2.0)
    check_draws(GaussianBlur(kernel_size=9, sigma=3), 1.0, 3.0, 3.0)
    assert not GaussianBlur(kernel_size=9, sigma=3).random and not GaussianBlur(kernel_size=9, probability=0).random


def test_errors() -> None:
    check_refuses("gaussian_blur.kernel_size config.range, got 4", GaussianBlur, kernel_size=4)
    check_refuses("gaussian_blur.kernel_size config.range, got [3, 4]", GaussianBlur, kernel_size=(3, 4))
    check_refuses("gaussian_blur.kernel_size config.range, got 0", GaussianBlur, kernel_size=0)
    check_refuses("gaussian_blur.sigma config.range, got 0.0", GaussianBlur, kernel_size=3, sigma=0.0)
    check_refuses(
        "gaussian_blur.sigma config.range, got [2.0, 1.0]",
        GaussianBlur,
        kernel_size=3,
        sigma=(2.0, 1.0),
    )
