"""Passes on images that the caller holds, in Triton's interpreter: see interpret_images.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.execute.kernels.interpreted import lines_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines_of("interpret_images.py")]


def test_pixels_and_faults_are_those_of_the_cpu(cases: list[dict[str, Any]]) -> None:
    assert len(cases) == 5 * 2 * 4 + 5 * 2
    for case in cases:
        assert case["difference"] <= 1, case
        assert case["faults"] == case["rights"], case


def test_launches_do_not_depend_on_the_number_of_images(cases: list[dict[str, Any]]) -> None:
    launches = {(case["case"], case["count"]): case["launches"] for case in cases}
    assert {case: launches[case, 3] for case, count in launches if count == 3} == {
        case: launches[case, 6] for case, count in launches if count == 6
    }
    assert launches["crop, interleaved", 6] == {"resample_all": 1}
    assert launches["crop, planes", 6] == {"resample_all": 1, "interleave": 1}
    assert launches["two resamplings, mixed", 6] == {"resample_all": 2, "interleave": 1}
    assert launches["warps, interleaved", 6] == {"warp_all": 1, "resample_all": 1}
    assert launches["a warp to other sizes, interleaved", 6] == {"warp_all": 1, "resample_all": 1}
    assert launches["three other sizes, interleaved", 6] == {"warp_all": 1, "resample_all": 3}
    assert launches["a warp that expands, interleaved", 6] == {"warp_all": 1, "resample_all": 1}
    assert launches["crops of padded images, interleaved", 6] == {"warp_all": 2, "resample_all": 1}
    assert launches["misfits, planes", 6] == {"interleave": 1}, "no pass is queued if a stage cannot take an image"
