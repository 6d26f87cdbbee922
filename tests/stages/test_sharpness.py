"""sharpness: equals torchvision's function, by factors from its range."""

from __future__ import annotations

import numpy as np
import torch
from torchvision.transforms.v2 import functional as tv

from gpuflow.execute.cpu.native_chunk import run_filters
from gpuflow.stages import Sharpness
from tests.running import keys_of
from tests.stages.operations import check_draws, check_refuses, pictures


def test_equals_torchvision_bit_for_bit() -> None:
    stage = Sharpness(amount=(0.0, 3.0), probability=0.8)
    drawn = stage.draw(keys_of(12).stage("sharpness", 0))
    drawn[0], drawn[1], drawn[2] = (1, 0), (1, 1), (1, 2)
    filters = stage.filters(drawn)
    for channels in (1, 3):
        for image in (*pictures(channels), np.full((2, 9, channels), 3, np.uint8)):
            plain, before = torch.from_numpy(image).permute(2, 0, 1), image.copy()
            for i, (active, factor) in enumerate(drawn.tolist()):
                result = torch.from_numpy(run_filters(image, filters, i)).permute(2, 0, 1)
                assert torch.equal(result, tv.adjust_sharpness(plain, factor) if active else plain)
            assert np.array_equal(image, before)


def test_its_factors_and_its_probability() -> None:
    check_draws(Sharpness(amount=0.4), 1.0, 0.6, 1.4)
    check_draws(Sharpness(amount=3.0, probability=0.3), 0.3, 0.0, 4.0)
    assert not Sharpness(amount=0).random and not Sharpness(amount=2, probability=0).random


def test_errors() -> None:
    check_refuses("sharpness.amount config.range, got -0.1", Sharpness, amount=-0.1)
    check_refuses("sharpness.probability config.range, got 1.1", Sharpness, amount=1, probability=1.1)
