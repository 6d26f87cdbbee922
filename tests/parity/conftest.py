"""Fixtures of the parity tests."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from gpuflow.config import Config, read_config
from gpuflow.stages import STAGES
from tests.datasets import VAL, Entries, make_photos, write_config


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve photographs of three classes."""
    root = tmp_path_factory.mktemp("parity") / "photos"
    make_photos(root, classes=3, each=4)
    return root


@pytest.fixture
def config(photos: Path, tmp_path: Path) -> Path:
    """A file whose val and serve have the same stages, written twice."""
    return write_config(tmp_path / "x.yaml", photos, val=VAL, serve={"stages": copy.deepcopy(list(VAL))})


def read(photos: Path, folder: Path, val: Entries = VAL, serve: Entries | None = None) -> Config:
    """A configuration with these stages, without a block serve if `serve` is None."""
    blocks = {} if serve is None else {"serve": {"stages": list(serve)}}
    return read_config(write_config(folder / "y.yaml", photos, val=val, **blocks), STAGES)
