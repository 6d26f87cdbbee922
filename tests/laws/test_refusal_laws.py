"""Laws of what a stage takes: encoded bytes go to a decoder alone, and pixels to everything else."""

from __future__ import annotations

import pytest

from gpuflow.pipeline import stage as s
from tests.laws.test_stage_laws import EXAMPLES
from tests.running import RGB

FLOATS = s.ImageSpec(shape=(200, 200, 3), dtype="float32", layout="nchw")

every_example = pytest.mark.parametrize("stage", EXAMPLES, ids=repr)


@every_example
def test_only_a_decoder_takes_encoded_bytes(stage: s.Stage) -> None:
    if isinstance(stage, s.Decoder):
        assert stage.output(s.ENCODED).dtype == "uint8"
        with pytest.raises(ValueError, match="takes encoded bytes but gets"):
            stage.output(RGB)
    else:
        with pytest.raises(ValueError, match="takes an image but gets encoded bytes; put decode before"):
            stage.output(s.ENCODED)


@pytest.mark.parametrize("stage", [stage for stage in EXAMPLES if isinstance(stage, s.Geometry)], ids=repr)
def test_geometry_takes_no_floats(stage: s.Stage) -> None:
    with pytest.raises(ValueError, match="takes uint8 pixels but gets"):
        stage.output(FLOATS)


@pytest.mark.parametrize("stage", [stage for stage in EXAMPLES if isinstance(stage, s.Pointwise)], ids=repr)
def test_pointwise_stages_take_no_floats(stage: s.Stage) -> None:
    with pytest.raises(ValueError, match="takes uint8 pixels but gets"):
        stage.output(FLOATS)
