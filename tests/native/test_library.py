"""The C library: what happens if it is missing, damaged or that of another version."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuflow.errors import NativeLibraryError
from gpuflow.native import library

WHOLE = Path(library._LIBRARY._name).read_bytes()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "gpuflow's C library is missing; "),
        (b"none", "gpuflow's C library cannot be loaded: "),
        (WHOLE[:50_000], "gpuflow's C library is incomplete; "),
        (WHOLE[:-1], "gpuflow's C library is incomplete; "),
    ],
    ids=["missing", "no library", "the first part", "all but a byte"],
)
def test_a_missing_or_damaged_library_is_an_error_that_says_what_to_do(
    content: bytes | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = None
    if content is not None:
        (tmp_path / "library.so").write_bytes(content)
        found = SimpleNamespace(origin=str(tmp_path / "library.so"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(NativeLibraryError, match=r"install it again: pip install --force-reinstall .*gpuflow") as error:
        library._load()
    assert str(error.value).startswith(reason)


def test_a_function_that_is_not_there_is_that_of_another_version() -> None:
    with pytest.raises(NativeLibraryError, match="has no function gpuflow_none, so it is that of another version"):
        library.function("gpuflow_none")
