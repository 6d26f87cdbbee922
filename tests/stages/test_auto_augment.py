"""auto_augment: torchvision's policy for ImageNet."""

from __future__ import annotations

from collections import defaultdict

import pytest
from torchvision.transforms import v2

from gpuflow.errors import ConfigError
from gpuflow.stages import AutoAugment
from gpuflow.stages.auto_augment import _BINS, _IMAGENET
from gpuflow.stages.policy_parts import RANGES
from tests.stages.policies import check_draws, check_magnitudes, frequencies
from tests.texts import outline


def test_the_table_is_that_of_torchvision() -> None:
    theirs = v2.AutoAugment()._policies
    assert [tuple((name, chance, place or 0) for name, chance, place in pair) for pair in theirs] == list(_IMAGENET)
    check_magnitudes(RANGES, v2.AutoAugment._AUGMENTATION_SPACE, _BINS)


@pytest.mark.parametrize("stage", [AutoAugment(), AutoAugment(fill=(9, 99, 199))], ids=repr)
def test_each_sample_gets_what_is_drawn_for_it(stage: AutoAugment) -> None:
    check_draws(stage)


@pytest.mark.parametrize("turn", [0, 1])
def test_operations_are_drawn_with_their_probabilities(turn: int) -> None:
    expected: defaultdict[str, float] = defaultdict(float)
    for pair in _IMAGENET:
        name, chance, _ = pair[turn]
        expected[name] += chance / len(_IMAGENET)
        expected["Identity"] += (1 - chance) / len(_IMAGENET)
    for name, share in frequencies(AutoAugment(), turn).items():
        assert share == pytest.approx(expected[name], abs=0.015), name


def test_noise_is_of_timms_policies() -> None:
    with pytest.raises(ConfigError) as caught:
        AutoAugment(noise=0.5)
    assert outline(caught.value) == "auto_augment.noise config.conflict, got 0.5"
