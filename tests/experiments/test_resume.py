"""experiments/resume: what its counts notice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.elastic import resume_scripts

Steps = Sequence[tuple[int, list[int], int]]
"""Of one process: step, samples, and what their pixels are."""


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    with resume_scripts() as modules:
        yield modules


def outcome(scripts: Any, folder: Path, first: Steps, start: int, second: Steps) -> tuple[int, ...]:
    """The counts of an attempt and of the next one, of an epoch of four samples."""
    for attempt, (begin, steps) in enumerate([(0, first), (start, second)]):
        log = scripts.law.Log(folder, attempt=attempt, rank=0, ranks=2 - attempt, start=begin)
        for step, indices, value in steps:
            log.step(0, step, indices, torch.full((len(indices), 3, 2, 2), value))
    found = scripts.law.outcome(folder, samples=4, epochs=1)
    assert found.ranks == (2, 1)
    return found.missing, found.repeated, found.replayed, found.changed


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ([(2, [1], 1), (3, [2, 3], 1)], (0, 0, 1, 0)),
        ([(2, [1], 2), (3, [2, 3], 1)], (0, 0, 1, 1)),
        ([(2, [2], 1), (3, [3], 1)], (1, 0, 1, 1)),
        ([(2, [0, 1], 1), (3, [2, 3], 1)], (0, 1, 1, 0)),
        ([(2, [1], 1)], (2, 0, 1, 0)),
    ],
    ids=["exact", "other pixels", "lost", "doubled", "ended early"],
)
def test_counts(second: Steps, expected: tuple[int, ...], scripts: Any, tmp_path: Path) -> None:
    """The first attempt makes a step after its checkpoint of step 1."""
    assert outcome(scripts, tmp_path, [(1, [0], 1), (2, [1], 1)], 1, second) == expected


def test_steps_of_one_attempt_on_two_ranks_are_all_counted(scripts: Any, tmp_path: Path) -> None:
    for rank, indices in enumerate([[0, 1], [2, 3]]):
        log = scripts.law.Log(tmp_path, attempt=0, rank=rank, ranks=2, start=0)
        log.step(0, 1, indices, torch.zeros(2, 3, 2, 2))
    found = scripts.law.outcome(tmp_path, samples=4, epochs=1)
    assert (found.missing, found.repeated, found.replayed, found.ranks) == (0, 0, 0, (2,))
