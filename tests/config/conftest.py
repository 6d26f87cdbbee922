"""Every test of the configuration runs in a separate directory."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files are named as from their directory, so that messages are short."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
