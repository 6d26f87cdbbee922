"""invert: equals torchvision's function, for as many samples as its probability says."""

from __future__ import annotations

from torchvision.transforms.v2 import functional as tv

from gpuflow.stages import Invert
from tests.stages.operations import check_changes_nothing, check_draws, check_equals, check_refuses


def test_equals_torchvision_bit_for_bit() -> None:
    check_equals(Invert(probability=0.6), lambda image, _: tv.invert(image))
    check_equals(Invert(), lambda image, _: tv.invert(image), count=1)


def test_its_probability() -> None:
    check_draws(Invert(), 1.0)
    check_draws(Invert(probability=0.2), 0.2)
    check_changes_nothing(Invert(probability=0))


def test_errors() -> None:
    check_refuses("invert.probability config.range, got -0.1", Invert, probability=-0.1)
