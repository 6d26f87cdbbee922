"""Marks all tests of this folder as `integrations`: they run gpuflow with a real library, at length.

`make test` leaves them out and `make test-integrations` runs them. A module begins with `pytest.importorskip`, with the
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
