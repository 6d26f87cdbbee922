"""Loaders lose workers, files and their store while epochs run, and account for every sample.

A few seeds of each round; `make chaos` takes as many as one likes. To replay one:
`python -m tests.chaos.rounds kills 0`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.loading import files, kills, shards, store


@pytest.mark.parametrize("seed", [1, 4])
def test_workers_are_killed_and_stopped(seed: int, directory: Path) -> None:
    found = kills(seed, directory)
    assert found.get("kills", 0) + found.get("pauses", 0) > 0


@pytest.mark.parametrize("seed", [0, 1, 2], ids=["replace", "skip", "raise"])
def test_files_change(seed: int, directory: Path) -> None:
    found = files(seed, directory)
    assert found["epochs"] >= 3


@pytest.mark.parametrize("seed", [0, 1])
def test_shards_change(seed: int, directory: Path) -> None:
    found = shards(seed, directory)
    assert found.get("replaced", 0) + found.get("errors", 0) > 0


@pytest.mark.parametrize("seed", [0, 1, 2], ids=["folder", "listing", "tar"])
def test_a_store_fails(seed: int, directory: Path) -> None:
    found = store(seed, directory)
    assert found["outages"] == 1
