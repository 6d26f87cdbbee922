"""The kernels of local stages in Triton's interpreter, which needs numpy < 2.4 and its own process."""

from __future__ import annotations

import pytest

from gpuflow.pipeline.stage import Local
from gpuflow.stages import STAGES
from tests.execute.kernels.interpreted import differences_of


@pytest.mark.slow
def test_kernels_equal_their_reference() -> None:
    """Sharpening bit for bit, blurring within a level; two launches for any number of images."""
    differences = differences_of("interpret_local.py")
    examples = [example for stage in STAGES.values() for example in stage.examples() if isinstance(example, Local)]
    assert len(differences) == 2 * 2 * 7 + len(examples) + 2
    allowed = {name: 1.0 if name.startswith("gaussian_blur") else 0.0 for name in differences}
    assert {name: value for name, value in differences.items() if value > allowed[name]} == {}
