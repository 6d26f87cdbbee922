"""contrast: equals torchvision's function, by factors from its range."""

from __future__ import annotations

from torchvision.transforms.v2 import functional as tv

from gpuflow.stages import Contrast
from tests.stages.operations import check_changes_nothing, check_draws, check_equals, check_refuses, check_refuses_bgr


def test_equals_torchvision_bit_for_bit() -> None:
    check_equals(Contrast(amount=(0.0, 3.0), probability=0.8), tv.adjust_contrast)
    check_equals(Contrast(amount=(0.0, 0.0)), tv.adjust_contrast, count=1)


def test_its_factors_and_its_probability() -> None:
    check_draws(Contrast(amount=0.4), 1.0, 0.6, 1.4)
    check_draws(Contrast(amount=3.0, probability=0.3), 0.3, 0.0, 4.0)
    check_draws(Contrast(amount=(0.5, 0.5), probability=0.0), 0.0, 0.5, 0.5)


def test_a_factor_of_1_and_a_probability_of_0_change_nothing() -> None:
    check_changes_nothing(
        Contrast(amount=0), Contrast(amount=(1.0, 1.0), probability=0.5), Contrast(amount=0.9, probability=0)
    )


def test_errors() -> None:
    check_refuses("contrast.amount config.range, got -0.1", Contrast, amount=-0.1)
    check_refuses("contrast.amount config.range, got [0.5, 0.4]", Contrast, amount=(0.5, 0.4))
    check_refuses("contrast.probability config.range, got 1.1", Contrast, amount=1, probability=1.1)
    check_refuses_bgr(Contrast(amount=0.4))
