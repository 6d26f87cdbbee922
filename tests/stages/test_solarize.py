"""solarize: inverts what is not below the threshold, for as many samples as its probability says."""

from __future__ import annotations

import pytest
import torch
from torchvision.transforms.v2 import functional as tv

from gpuflow.errors import ConfigError
from gpuflow.stages import CenterCrop, Decode, Solarize
from tests.images import photo, png
from tests.running import alone, decoded, images, keys_of, program_of
from tests.texts import outline

DATA = png(photo(40, 30))


@pytest.mark.parametrize("threshold", [0.0, 1.0, 99.5, 128.0, 255.0])
def test_every_threshold(threshold: float) -> None:
    stages = Decode(), CenterCrop(size=30), Solarize(threshold=threshold)
    (result,) = images(program_of(*stages), [DATA])
    assert torch.equal(result, tv.solarize(tv.center_crop(decoded(DATA), [30, 30]), threshold))


def test_its_probability_is_the_share_of_changed_samples() -> None:
    stage, count = Solarize(probability=0.3), 4000
    drawn = stage.draw(keys_of(count).stage("solarize", 0))
    assert abs(drawn[:, 0].mean() - 0.3) < 0.03
    crop = CenterCrop(size=30)
    batch = images(program_of(Decode(), crop, stage), [DATA] * 20)
    plain = alone(crop, DATA)
    for result, changed in zip(batch, drawn[:20, 0], strict=True):
        assert torch.equal(result, tv.solarize(plain, 128) if changed else plain)
    (same,) = images(program_of(Decode(), crop, Solarize(probability=0)), [DATA])
    assert torch.equal(same, plain)


@pytest.mark.parametrize("threshold", [-1.0, 256.0, float("nan")])
def test_a_threshold_that_is_no_level_is_refused(threshold: float) -> None:
    with pytest.raises(ConfigError) as caught:
        Solarize(threshold=threshold)
    assert outline(caught.value) == f"solarize.threshold config.range, got {threshold}"
