"""Fixtures of the rounds: a limit of time and an empty cache folder for each."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.datasets import deadline


@pytest.fixture(autouse=True)
def _bounded(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    caplog.set_level(logging.ERROR, "gpuflow")  # a warning that is kept keeps a batch's memory through its exception
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    with deadline(400):
        yield


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An empty folder for a round."""
    return tmp_path
