"""Fixtures of the serving tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.serve.models import Models, make_models


@pytest.fixture(autouse=True)
def _torch_threads() -> Iterator[None]:
    """Restore torch's number of threads, which an engine that runs on a test's own thread changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A tiny trained model in every file format."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    made = make_models(tmp_path_factory.mktemp("models"))
    torch.set_num_threads(before)
    return made
