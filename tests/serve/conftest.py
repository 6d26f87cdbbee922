"""Fixtures of the serving tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _torch_threads() -> Iterator[None]:
    """Restore torch's number of threads, which an engine that runs on a test's own thread changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
