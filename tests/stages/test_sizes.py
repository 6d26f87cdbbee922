"""What stages make of images of which only one side is known."""

from __future__ import annotations

import pytest

from gpuflow.stages import Resize
from tests.running import RGB


@pytest.mark.parametrize("shape", [(30, None, 3), (None, 30, 3), (None, None, 3)])
def test_the_size_after_resizing_one_side_is_not_known_before(shape: tuple[int | None, int | None, int]) -> None:
    after = Resize(shorter=24).output(RGB.replace(shape=shape))
    assert after.shape == (None, None, 3)
    assert after.shorter == 24
    assert Resize(height=5, width=6).output(RGB.replace(shape=shape)).shape == (5, 6, 3)
