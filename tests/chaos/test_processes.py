"""Processes run out of descriptors and disk, are killed and resumed, and serve while they are attacked.

A seed of each round; `make chaos` takes as many as one likes. To replay one: `python -m tests.chaos.rounds service 0`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.limits import in_child
from tests.chaos.serving import service
from tests.chaos.training import training


@pytest.mark.slow
def test_no_file_can_be_opened(directory: Path) -> None:
    assert in_child("descriptors", 0, directory)["kept"] == 48


@pytest.mark.slow
def test_the_disk_is_full(directory: Path) -> None:
    assert in_child("disk", 0, directory)["steps"] > 4


@pytest.mark.slow
def test_a_training_is_killed_and_resumed(directory: Path) -> None:
    assert training(0, directory)["kills"] > 0


def test_a_service_is_attacked_and_drained(directory: Path) -> None:
    found = service(0, directory)
    assert found["answered"] >= 160
    assert {"bombs", "floods", "disconnects", "probes"} <= set(found)
