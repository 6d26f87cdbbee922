"""trivial_augment: the operations and magnitudes of torchvision's TrivialAugmentWide."""

from __future__ import annotations

import numpy as np
import pytest
from torchvision.transforms import v2

from gpuflow.stages import TrivialAugment
from gpuflow.stages.policy_parts import LISTED, OPERATIONS
from gpuflow.stages.trivial_augment import _RANGES
from tests.running import keys_of
from tests.stages.policies import check_draws, check_magnitudes, check_nearest, frequencies


def test_the_magnitudes_are_those_of_torchvision() -> None:
    assert list(LISTED) == list(v2.TrivialAugmentWide._AUGMENTATION_SPACE)
    for bins in (2, 11, 31):
        check_magnitudes(_RANGES, v2.TrivialAugmentWide._AUGMENTATION_SPACE, bins)


def test_nearest_pixels_are_those_of_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    check_nearest(_RANGES, 31, monkeypatch)


@pytest.mark.parametrize("stage", [TrivialAugment(), TrivialAugment(bins=5, fill=(9, 99, 199))], ids=repr)
def test_each_sample_gets_what_is_drawn_for_it(stage: TrivialAugment) -> None:
    check_draws(stage)


def test_operations_and_magnitudes_are_drawn_alike() -> None:
    for name, share in frequencies(TrivialAugment()).items():
        assert share == pytest.approx(1 / 14 if name in LISTED else 0, abs=0.01)
    count = 50_000
    drawn = TrivialAugment(bins=5).drawn(keys_of(count).stage("trivial_augment", 0), 0)
    turned = drawn.magnitude[drawn.operation == OPERATIONS.index("Rotate")]
    values, counts = np.unique(turned, return_counts=True)
    assert values.tolist() == [-135.0, -101.25, -67.5, -33.75, 0.0, 33.75, 67.5, 101.25, 135.0]
    assert counts / len(turned) == pytest.approx([0.1] * 4 + [0.2] + [0.1] * 4, abs=0.02)
