"""autocontrast: equals torchvision's function, for as many samples as its probability says."""

from __future__ import annotations

from torchvision.transforms.v2 import functional as tv

from gpuflow.stages import Autocontrast
from tests.stages.operations import check_changes_nothing, check_draws, check_equals, check_refuses


def test_equals_torchvision_bit_for_bit() -> None:
    check_equals(Autocontrast(probability=0.6), lambda image, _: tv.autocontrast(image))
    check_equals(Autocontrast(), lambda image, _: tv.autocontrast(image), count=1)


def test_its_probability() -> None:
    check_draws(Autocontrast(), 1.0)
    check_draws(Autocontrast(probability=0.2), 0.2)
    check_changes_nothing(Autocontrast(probability=0))


def test_errors() -> None:
    check_refuses("autocontrast.probability config.range, got -0.1", Autocontrast, probability=-0.1)
