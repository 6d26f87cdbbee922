"""grayscale: equals torchvision's function, for as many samples as its probability says."""

from __future__ import annotations

from torchvision.transforms.v2 import functional as tv

from gpuflow.stages import Grayscale
from tests.stages.operations import check_changes_nothing, check_draws, check_equals, check_refuses, check_refuses_bgr


def test_equals_torchvision_bit_for_bit() -> None:
    check_equals(Grayscale(probability=0.6), lambda image, _: tv.rgb_to_grayscale(image, len(image)))
    check_equals(Grayscale(), lambda image, _: tv.rgb_to_grayscale(image, len(image)), count=1)


def test_its_probability() -> None:
    check_draws(Grayscale(), 1.0)
    check_draws(Grayscale(probability=0.2), 0.2)
    check_changes_nothing(Grayscale(probability=0))


def test_errors() -> None:
    check_refuses("grayscale.probability config.range, got -0.1", Grayscale, probability=-0.1)
    check_refuses_bgr(Grayscale())
