"""Marks all tests of this folder as `integrations`: they run gpuflow with a real library, at length.

Warnings are shown and are no errors, because most are the libraries' own. `make test` leaves these tests out and
`make test-integrations` runs them. A module begins with `pytest.importorskip`, with the
reason, so that it is skipped where its library is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.elastic import resume_scripts

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.integrations)
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def scripts() -> Iterator[Any]:
    """The modules of experiments/resume."""
    with resume_scripts() as modules:
        yield modules


@pytest.fixture(scope="session")
def cluster(scripts: Any) -> Iterator[Any]:
    """The head of the cluster of Ray that all tests share; `scripts.launch.second_node` adds a node."""
    with scripts.launch.ray_cluster() as cluster:
        yield cluster
