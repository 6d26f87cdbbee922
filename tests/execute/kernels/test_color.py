"""The colour kernels in Triton's interpreter, which needs numpy < 2.4 and its own process; the stages' operations."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from gpuflow.pipeline.stage import Keys, Operation, Operations, Pointwise, StageKeys
from gpuflow.stages import STAGES, ColorJitter, Normalize
from tests.execute.kernels.interpreted import differences_of

ADJUSTMENTS = (Operation.BRIGHTNESS, Operation.CONTRAST, Operation.SATURATION, Operation.HUE)


@pytest.mark.slow
def test_kernels_equal_their_references_bit_for_bit() -> None:
    differences = differences_of("interpret_color.py")
    examples = [example for stage in STAGES.values() for example in stage.examples()]
    pointwise = [example for example in examples if isinstance(example, Pointwise) and example.table() is None]
    assert len(differences) == 32 + 4 + 2 + 2 + 48 + 1 + 48 + 4 + 16 + len(pointwise) + 1
    assert {name: difference for name, difference in differences.items() if difference} == {}


def drawn(count: int) -> StageKeys:
    return Keys(0, 0, np.arange(count)).stage("color_jitter", 0)


def operations_of(stage: ColorJitter, count: int) -> tuple[NDArray[np.float64], Operations]:
    coefficients = stage.draw(drawn(count))
    return coefficients, stage.operations(coefficients, np.full(count, 5), np.full(count, 5))


def test_a_jitter_gives_its_operations_in_each_samples_order() -> None:
    coefficients, found = operations_of(ColorJitter(brightness=0.4, contrast=0.5, saturation=0.6, hue=0.1), 500)
    assert len({tuple(row) for row in found.codes.tolist()}) == 24
    for operation, column in zip(ADJUSTMENTS, coefficients[:, 4:8].T, strict=True):
        assert np.array_equal(found.factors[found.codes == operation], column)


def test_a_jitter_gives_only_operations_that_are_set() -> None:
    _, found = operations_of(ColorJitter(contrast=(0.5, 0.5), hue=0.1), 50)
    assert {tuple(row) for row in found.codes.tolist()} == {
        (Operation.CONTRAST, Operation.HUE),
        (Operation.HUE, Operation.CONTRAST),
    }
    assert (found.factors[found.codes == Operation.CONTRAST] == 0.5).all()
    assert found.kinds == {Operation.CONTRAST, Operation.HUE} and found.statistics == 1
    _, nothing = operations_of(ColorJitter(), 50)
    assert nothing.codes.shape == nothing.factors.shape == (50, 0)
    assert (nothing.kinds, nothing.statistics) == (frozenset(), 0)


def test_the_form_is_known_before_anything_is_drawn() -> None:
    stage = ColorJitter(brightness=0.4, hue=0.1)
    _, found = operations_of(stage, 0)
    assert found.codes.shape == found.factors.shape == (0, 2)
    assert found.kinds == {Operation.BRIGHTNESS, Operation.HUE}
    assert stage.table() is None
    assert Normalize().table().shape == (3, 256)
    assert Normalize().operations(np.empty((0, 0)), np.empty(0, int), np.empty(0, int)) is None
