"""Marks all tests of this folder as `integrations`: they run gpuflow with a real library, at length.

Warnings are shown and are no errors, because most are the libraries' own. `make test` leaves these tests out and
`make test-integrations` runs them. A module begins with `pytest.importorskip`, with the
reason, so that it is skipped where its library is not installed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.integrations)
            item.add_marker(pytest.mark.filterwarnings("default"))
