"""What the tests of training share: photographs, and one thread of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.datasets import make_photos, one_torch_thread


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread of PyTorch, for five minutes at most."""
    with one_torch_thread(seconds=300):
        yield


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve photographs of three classes."""
    root = tmp_path_factory.mktemp("training") / "photos"
    make_photos(root, classes=3, each=4)
    return root
