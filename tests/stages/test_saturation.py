"""saturation: equals torchvision's function, by factors from its range."""

from __future__ import annotations

from torchvision.transforms.v2 import functional as tv

from gpuflow.stages import Saturation
from tests.stages.operations import check_changes_nothing, check_draws, check_equals, check_refuses, check_refuses_bgr


def test_equals_torchvision_bit_for_bit() -> None:
    check_equals(Saturation(amount=(0.0, 3.0), probability=0.8), tv.adjust_saturation)
    check_equals(Saturation(amount=(0.0, 0.0)), tv.adjust_saturation, count=1)


def test_its_factors_and_its_probability() -> None:
    check_draws(Saturation(amount=0.4), 1.0, 0.6, 1.4)
    check_draws(Saturation(amount=3.0, probability=0.3), 0.3, 0.0, 4.0)
    check_draws(Saturation(amount=(0.5, 0.5), probability=0.0), 0.0, 0.5, 0.5)


def test_a_factor_of_1_and_a_probability_of_0_change_nothing() -> None:
    check_changes_nothing(
        Saturation(amount=0), Saturation(amount=(1.0, 1.0), probability=0.5), Saturation(amount=0.9, probability=0)
    )


def test_errors() -> None:
    check_refuses("saturation.amount config.range, got -0.1", Saturation, amount=-0.1)
    check_refuses("saturation.amount config.range, got [0.5, 0.4]", Saturation, amount=(0.5, 0.4))
    check_refuses("saturation.probability config.range, got 1.1", Saturation, amount=1, probability=1.1)
    check_refuses_bgr(Saturation(amount=0.4))
