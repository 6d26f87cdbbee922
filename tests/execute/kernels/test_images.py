"""Passes on images that the caller holds, in Triton's interpreter: see interpret_images.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def cases() -> list[dict[str, Any]]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).parent / "interpret_images.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_pixels_and_faults_are_those_of_the_cpu(cases: list[dict[str, Any]]) -> None:
    assert len(cases) == 5 * 2 * 4 + 2 * 2
    for case in cases:
        assert case["difference"] <= 1, case
        assert case["faults"] == case["rights"], case


def test_launches_do_not_depend_on_the_number_of_images(cases: list[dict[str, Any]]) -> None:
    launches = {(case["case"], case["count"]): case["launches"] for case in cases}
    assert {case: launches[case, 3] for case, count in launches if count == 3} == {
        case: launches[case, 6] for case, count in launches if count == 6
    }
    assert launches["crop, interleaved", 6] == {"sample": 1}
    assert launches["crop, planes", 6] == {"sample": 1, "interleave": 1}
    assert launches["two samplings, mixed", 6] == {"sample": 2, "interleave": 1}
    assert launches["warps, interleaved", 6] == {"warp_all": 1, "sample": 1}
    assert launches["a warp to other sizes, interleaved", 6] == {"warp_all": 1, "sample": 1}
    assert launches["three other sizes, interleaved", 6] == {"warp_all": 1, "sample": 3}
    assert launches["misfits, planes", 6] == {"interleave": 1}, "no pass is queued if a stage cannot take an image"
