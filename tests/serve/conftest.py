"""Fixtures of the serving tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _torch_threads() -> Iterator[None]:
    """An engine that runs on a test's own thread leaves it with that engine's share of the cores."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
