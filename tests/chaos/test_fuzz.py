"""Hostile input of every kind: only gpuflow's own exceptions, in bounded time and memory.

One seed; `make chaos` takes as many as one likes. To replay one: `python -m tests.chaos.rounds fuzz-tars 0`.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.fuzzing import TARGETS, fuzz, mutated


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*ends without the zeros that end a tar:UserWarning")
@pytest.mark.parametrize("target", TARGETS)
def test_only_errors_of_ours(target: str, directory: Path) -> None:
    assert fuzz(target, 0, directory)["inputs"] == TARGETS[target][1]


def test_a_seed_makes_the_same_input() -> None:
    data = bytes(range(256)) * 4
    first, second = ([mutated(random.Random(seed), data) for seed in range(50)] for _ in range(2))
    assert first == second
    assert len(set(first)) > 40
