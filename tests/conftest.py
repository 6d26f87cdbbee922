"""Fixtures and settings that every test may use."""

from __future__ import annotations

import sys
from pathlib import Path

import hypothesis
import pytest

from gpuflow.sources import Source, SourceSpec, open_source
from tests.images import jpeg, photo

hypothesis.settings.register_profile(
    "stable", deadline=None, derandomize=True, database=None, max_examples=50, print_blob=False
)
hypothesis.settings.load_profile("stable")


@pytest.fixture(scope="session")
def photo_bytes() -> bytes:
    """A photograph of 75x101 pixels (height x width), a JPEG with 4:2:0 chroma."""
    return jpeg(photo(75, 101))


@pytest.fixture
def source(folder: Path) -> Source:
    """The photographs of a test's own fixture `folder`."""
    return open_source(SourceSpec(folder=str(folder)))


def pytest_unconfigure() -> None:
    """Exit at once: torchpipe would wait 0.1 s for each thread of each graph that a test has made."""
    if "gpuflow.torchpipe.adapter" in sys.modules:
        sys.modules["gpuflow.torchpipe.adapter"].skip_cleanup()
