"""Fixtures of the tests of the HTTP service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.datasets import deadline
from tests.serve.fakes import FakeEngine
from tests.serve.services import Live, served


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(60):
        yield


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    """A service whose logits are the mean colour of the image, one for each module."""
    with served(FakeEngine(batch=8)) as service:
        yield service
