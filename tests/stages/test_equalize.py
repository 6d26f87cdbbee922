"""equalize: equals torchvision's function, for as many samples as its probability says."""

from __future__ import annotations

from torchvision.transforms.v2 import functional as tv

from gpuflow.stages import Equalize
from tests.stages.operations import check_changes_nothing, check_draws, check_equals, check_refuses


def test_equals_torchvision_bit_for_bit() -> None:
    check_equals(Equalize(probability=0.6), lambda image, _: tv.equalize(image))
    check_equals(Equalize(), lambda image, _: tv.equalize(image), count=1)


def test_its_probability() -> None:
    check_draws(Equalize(), 1.0)
    check_draws(Equalize(probability=0.2), 0.2)
    check_changes_nothing(Equalize(probability=0))


def test_errors() -> None:
    check_refuses("equalize.probability config.range, got -0.1", Equalize, probability=-0.1)
