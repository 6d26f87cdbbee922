"""Where kernels find the pixels of images that EXIF data turn: read by these steps, each image is upright."""

from __future__ import annotations

import numpy as np
import pytest

from gpuflow.decode.header import stored, upright
from gpuflow.execute.pixel_steps import pixel_steps, rows_are_short


@pytest.mark.parametrize("channels", [1, 3])
def test_every_orientation_is_read_upright(channels: int) -> None:
    rng = np.random.default_rng(0)
    orientations = np.arange(1, 9).repeat(2)
    sizes = np.array([(5, 7), (6, 1)] * 8)
    files = [rng.integers(0, 256, (*size, channels), dtype=np.uint8) for size in sizes]
    steps = pixel_steps(sizes, channels, orientations)
    for file, turn, (start, down, across) in zip(files, orientations.tolist(), steps.tolist(), strict=True):
        expected = upright(file, turn)
        height, width, _ = expected.shape
        places = start + down * np.arange(height)[:, None] + across * np.arange(width)
        assert np.array_equal(file.reshape(-1)[places[..., None] + np.arange(channels)], expected)
        assert np.array_equal(upright(stored(expected, turn), turn), expected)


def test_nothing_is_turned_by_default() -> None:
    sizes = np.array([[5, 7], [6, 1]])
    assert pixel_steps(sizes, 3).tolist() == [[0, 21, 3], [0, 3, 3]]
    assert np.array_equal(pixel_steps(sizes, 3, np.array([1, 1])), pixel_steps(sizes, 3))
    assert pixel_steps(sizes[:0], 3).shape == (0, 3)


def test_huge_images_are_read_only_as_they_are_stored() -> None:
    sizes = np.array([(20_000, 30_000), (30_000, 30_000), (65_535, 65_535)])
    assert rows_are_short(sizes, np.array([6, 4, 1])).tolist() == [True, True, True]
    assert rows_are_short(sizes, np.array([8, 5, 7])).tolist() == [True, False, False]
