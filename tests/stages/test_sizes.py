"""Sizes: of images of which only one side is known, of what reaches the edge of the image, and the largest."""

from __future__ import annotations

import numpy as np
import pytest

from gpuflow.execute.cpu.runner import CpuRunner
from gpuflow.sources import Payload
from gpuflow.stages import CenterCrop, Decode, RandomCrop, Resize
from tests.images import photo, png
from tests.running import RGB, images, keys_of, program_of


@pytest.mark.parametrize("shape", [(30, None, 3), (None, 30, 3), (None, None, 3)])
def test_the_size_after_resizing_one_side_is_not_known_before(shape: tuple[int | None, int | None, int]) -> None:
    after = Resize(shorter=24).output(RGB.replace(shape=shape))
    assert after.shape == (None, None, 3)
    assert after.shorter == 24
    assert Resize(height=5, width=6).output(RGB.replace(shape=shape)).shape == (5, 6, 3)


def test_the_largest_image() -> None:
    assert Decode().max_pixels == 179_000_000


def test_what_lies_outside_of_an_image_is_black_whatever_its_memory_held() -> None:
    """In each of 100 places: a crop hangs over each edge, over a corner, or over none."""
    program = program_of(Decode(), RandomCrop(size=20, padding=12))
    data, keys = png(np.maximum(photo(20, 20), 1)), keys_of(100)
    expected = images(program, [data] * 100, keys).permute(0, 2, 3, 1).numpy()
    slots = np.full((100, 20, 20, 3), 255, np.uint8)
    assert CpuRunner(program).run(Payload.of([data] * 100), keys, slots) == [None] * 100
    assert np.array_equal(slots, expected)
    rows, columns = (~(expected == 0).all(axis=(axis, 3)) for axis in (2, 1))
    assert {tuple(side) for side in np.stack([rows[:, 0], rows[:, -1], columns[:, 0], columns[:, -1]], 1).tolist()} >= {
        (False, True, False, True),
        (True, False, True, False),
        (True, False, False, True),
        (False, True, True, False),
    }


@pytest.mark.parametrize(("height", "width"), [(24, 24), (24, 25), (25, 24)])
def test_a_crop_may_be_as_large_as_the_image_and_its_padding(height: int, width: int) -> None:
    spec, sizes = RGB.replace(shape=(20, 20, 3)), (height, width)
    if sizes == (24, 24):
        assert RandomCrop(size=sizes, padding=2).output(spec).shape == (24, 24, 3)
        assert RandomCrop(size=20).output(spec).shape == CenterCrop(size=20).output(spec).shape == (20, 20, 3)
    else:
        with pytest.raises(ValueError, match=f"crops {height}x{width} from"):
            RandomCrop(size=sizes, padding=2).output(spec)
        with pytest.raises(ValueError, match=f"crops {height - 4}x{width - 4} from"):
            RandomCrop(size=(height - 4, width - 4)).output(spec)
