"""The resampling kernel in Triton's interpreter, which needs numpy < 2.4 and its own process."""

from __future__ import annotations

from tests.execute.kernels.interpreted import differences_of


def test_kernel_equals_its_reference() -> None:
    differences = differences_of("interpret_resample.py")
    assert len(differences) >= 44
    assert {name: levels for name, levels in differences.items() if levels > 1} == {}
