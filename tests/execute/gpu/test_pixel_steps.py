"""Where kernels find the pixels of images that EXIF data turn: read by these steps, each image is upright."""

from __future__ import annotations

import numpy as np
import pytest

from gpuflow.decode.header import stored, upright
from gpuflow.execute.gpu.chunk_scan import pixel_steps, regions_around, rows_are_short


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


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("outputs", [1, 3])
def test_a_part_of_an_image_has_all_pixels_of_the_boxes_and_is_read_upright(channels: int, outputs: int) -> None:
    rng, count = np.random.default_rng(outputs), 160
    orientations = np.arange(1, 9).repeat(count // 8)
    sizes = rng.integers(1, 12, (count, 2))
    files = [rng.integers(0, 256, (*size, channels), dtype=np.uint8) for size in sizes]
    images = [upright(file, turn) for file, turn in zip(files, orientations.tolist(), strict=True)]
    first = [np.array([rng.integers(0, image.shape[:2]) for image in images]) for _ in range(outputs)]
    spans = [np.array([image.shape[:2] for image in images]) - one for one in first]
    boxes = [np.column_stack([one, rng.integers(1, span + 1)]) for one, span in zip(first, spans, strict=True)]
    regions, steps = regions_around(boxes, sizes, channels, orientations)
    for i, (file, image) in enumerate(zip(files, images, strict=True)):
        x, y, width, height = regions[i]
        start, down, across = steps[i]
        part = file[y : y + height, x : x + width].reshape(-1)
        least = np.min([box[i, :2] for box in boxes], axis=0)
        most = np.max([box[i, :2] + box[i, 2:] for box in boxes], axis=0)
        assert len(part) == (most - least).prod() * channels, "and no more than that"
        for top, left, rows, columns in (box[i] for box in boxes):
            places = start + down * np.arange(top, top + rows)[:, None] + across * np.arange(left, left + columns)
            assert places.min() >= 0
            found = part[places[..., None] + np.arange(channels)]
            assert np.array_equal(found, image[top : top + rows, left : left + columns])


def test_a_part_has_a_pixel_at_least_and_none_outside() -> None:
    sizes, boxes = np.array([[5, 7]] * 3), np.array([[2, 3, 0, 0], [-2, 4, 20, 20], [9, 9, 2, 2]])
    regions, _ = regions_around([boxes], sizes, 3, np.ones(3, np.uint8))
    assert regions.tolist() == [[3, 2, 1, 1], [4, 0, 3, 5], [6, 4, 1, 1]]
    assert regions_around([boxes[:0]], sizes[:0], 3, np.ones(0, np.uint8))[1].shape == (0, 3)


def test_all_of_an_image() -> None:
    sizes, orientations = np.array([[5, 7], [6, 1]]), np.array([6, 3])
    regions, steps = regions_around([np.array([[0, 0, 7, 5], [0, 0, 6, 1]])], sizes, 3, orientations)
    assert regions.tolist() == [[0, 0, 7, 5], [0, 0, 1, 6]]
    assert np.array_equal(steps, pixel_steps(sizes, 3, orientations))
