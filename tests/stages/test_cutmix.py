"""cutmix: draws boxes as timm's Mixup does, from its own numbers."""

from __future__ import annotations

import numpy as np
import pytest

from gpuflow.pipeline.stage import Mixing
from gpuflow.stages import CenterCrop, Cutmix, Decode, Mixup
from tests.mixing import timm_box
from tests.running import keys_of, program_of
from tests.stages.test_mixup import COUNT, HEIGHT, WIDTH, draw


def test_boxes_are_those_of_timm_around_uniform_pixels() -> None:
    """The centre is drawn from the fifth and sixth number of a sample; the share from Beta, exact in float32."""
    drawn, plain = draw(Cutmix(mode="elem")), draw(Cutmix(mode="elem", correct_lambda=False))
    centres = keys_of(COUNT).stage("cutmix", 0).uniform(6)[:, 4:]
    for i in range(COUNT):
        y, x = int(centres[i, 0] * HEIGHT), int(centres[i, 1] * WIDTH)
        box, share = timm_box(HEIGHT, WIDTH, float(plain.shares[i]), y, x)
        assert drawn.boxes[i].tolist() == list(box)
        assert drawn.shares[i] == pytest.approx(share, abs=1e-12)
    assert (drawn.boxes == plain.boxes).all()
    assert (drawn.weights == 1).all()


def test_a_corrected_share_is_that_of_the_pixels_outside_the_box() -> None:
    mixture = draw(Cutmix(mode="pair", alpha=0.5))
    outside = 1 - mixture.boxes[:, 2] * mixture.boxes[:, 3] / (HEIGHT * WIDTH)
    assert np.array_equal(mixture.shares, outside)
    first = mixture.boxes[: COUNT // 2]
    assert (first == mixture.boxes[COUNT // 2 :][::-1]).all()


def test_centres_are_uniform() -> None:
    boxes = draw(Cutmix(mode="elem", alpha=200.0), 8000).boxes
    whole = boxes[(boxes[:, 0] > 0) & (boxes[:, 0] + boxes[:, 2] < HEIGHT)]
    centres = np.bincount(whole[:, 0] + whole[:, 2] // 2, minlength=HEIGHT)
    inner = centres[24:36]
    assert inner.min() > 0.6 * inner.mean() and inner.max() < 1.4 * inner.mean()


def test_mixup_with_boxes_only_draws_as_cutmix() -> None:
    one: Mixing = Mixup(cutmix_alpha=0.4, switch_probability=1.0, mode="elem")
    keys, valid = keys_of(64).stage("any", 0), np.ones(64, bool)
    a, b = (stage.draw(keys, HEIGHT, WIDTH, valid) for stage in (one, Cutmix(alpha=0.4, mode="elem")))
    assert (a.boxes == b.boxes).all() and (a.shares == b.shares).all()


def test_uint8_is_taken() -> None:
    assert program_of(Decode(), CenterCrop(size=8), Cutmix()).result.dtype == "uint8"
