"""hue: equals torchvision's function, by shifts from its range."""

from __future__ import annotations

from torchvision.transforms.v2 import functional as tv

from gpuflow.stages import Hue
from tests.stages.operations import check_changes_nothing, check_draws, check_equals, check_refuses, check_refuses_bgr


def test_equals_torchvision_bit_for_bit() -> None:
    check_equals(Hue(amount=0.5, probability=0.8), tv.adjust_hue)
    for shift in (-0.5, -1 / 3, 1e-9, 0.25, 0.5):
        check_equals(Hue(amount=(shift, shift)), tv.adjust_hue, count=1)


def test_its_shifts_and_its_probability() -> None:
    check_draws(Hue(amount=0.1), 1.0, -0.1, 0.1)
    check_draws(Hue(amount=(-0.2, 0.4), probability=0.3), 0.3, -0.2, 0.4)


def test_a_shift_of_0_is_not_random_and_a_probability_of_0_changes_nothing() -> None:
    """torchvision's function changes some colours by a level at a shift of 0."""
    assert not Hue(amount=0).random
    check_equals(Hue(amount=0), tv.adjust_hue, count=1)
    check_changes_nothing(Hue(amount=0.5, probability=0))


def test_errors() -> None:
    check_refuses("hue.amount config.range, got 0.6", Hue, amount=0.6)
    check_refuses("hue.amount config.range, got [0.2, 0.1]", Hue, amount=(0.2, 0.1))
    check_refuses_bgr(Hue(amount=0.1))
