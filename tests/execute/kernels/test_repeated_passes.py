"""The passes of one batch after another, in Triton's interpreter: see interpret_repeated.py."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tests.execute.kernels.interpreted import lines_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cases() -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in lines_of("interpret_repeated.py")]
    return {case["case"]: case for case in found}


def test_results_and_faults_are_those_of_single_batches(cases: dict[str, dict[str, Any]]) -> None:
    assert [case["passes"] for case in cases.values()] == [8, 4, 3, 1, 2]
    for name, case in cases.items():
        for number, (difference, plain, repeated, _) in enumerate(case["batches"]):
            assert difference == 0 and repeated == plain, (name, number)
    faults = [plain for _, plain, _, _ in cases["a warp at the end"]["batches"] if set(plain) > {"None"}]
    assert len(faults) == 1 and "the crop is larger than the image" in faults[0][1]


def test_later_batches_are_drawn_ahead_where_their_positions_follow(cases: dict[str, dict[str, Any]]) -> None:
    """Three at once here, of two samples each, by the first pass and by the later ones, once they followed twice."""
    for name, case in cases.items():
        samples = [drawn for *_, drawn in case["batches"]]
        assert samples[:9] == [0, 0, 4, 8, 20, 20, 20, 32, 32], name


def test_nothing_is_drawn_ahead_for_single_images_in_any_order(cases: dict[str, dict[str, Any]]) -> None:
    """Any two positions are apart by a constant number. Images of other sizes only draw the first pass anew."""
    for name, case in cases.items():
        samples = [drawn for *_, drawn in case["batches"]]
        drawn = [after - before for before, after in itertools.pairwise(samples)]
        assert drawn[-17:-9] == [0, 0, 2, 2, 2, 2, 2, 2], name
        assert drawn[-9:] == [2, 6, 1, 1, 6, 1, 1, 6, 1], name


def test_kernels_are_captured_once_for_each_place_of_a_result(cases: dict[str, dict[str, Any]]) -> None:
    """Of the two for each size of a batch; the first capture for the second size fails, and no other is tried."""
    assert {name: case["captured"] for name, case in cases.items()} == dict.fromkeys(cases, 2 + 1 + 2)
