"""The kernel of warps in Triton's interpreter, which needs numpy < 2.4 and its own process."""

from __future__ import annotations

import pytest

from tests.execute.kernels.interpreted import differences_of


@pytest.mark.slow
def test_kernel_equals_the_cpus_form() -> None:
    differences = differences_of("interpret_warp.py")
    assert len(differences) >= 40
    assert {name: levels for name, levels in differences.items() if levels > 1} == {}
