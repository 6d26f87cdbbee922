"""posterize: equals torchvision's function for every number of bits."""

from __future__ import annotations

import pytest
from torchvision.transforms.v2 import functional as tv

from gpuflow.stages import Posterize
from tests.stages.operations import check_changes_nothing, check_draws, check_equals, check_refuses


@pytest.mark.parametrize("bits", range(9))
def test_equals_torchvision_bit_for_bit(bits: int) -> None:
    check_equals(Posterize(bits=bits, probability=0.6), lambda image, _: tv.posterize(image, bits), count=4)


def test_its_probability() -> None:
    check_draws(Posterize(bits=2), 1.0)
    check_draws(Posterize(bits=2, probability=0.2), 0.2)
    check_changes_nothing(Posterize(bits=2, probability=0), Posterize(bits=8))


@pytest.mark.parametrize("bits", [-1, 9])
def test_errors(bits: int) -> None:
    check_refuses(f"posterize.bits config.range, got {bits}", Posterize, bits=bits)
