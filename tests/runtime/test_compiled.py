"""A C file is compiled once for all processes, and its absence never stops anything."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpuflow.runtime.compiled import compiled

CODE = "int seven(void) { return 7; }\n"


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process of a user with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    compiled.cache_clear()
    yield
    compiled.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "number.c"
    path.write_text(CODE)
    return path


def seven(source: Path) -> int:
    library = compiled(source)
    assert library is not None
    result: int = library.seven()
    return result


def test_the_next_process_needs_no_compiler(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert seven(source) == 7
    (kept,) = (tmp_path / "cache" / "gpuflow" / "compiled").iterdir()
    assert kept.name.startswith("number-") and kept.suffix == ".so"
    compiled.cache_clear()
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert seven(source) == 7
    source.write_text(CODE.replace("7;", "8;"))
    compiled.cache_clear()
    with caplog.at_level(logging.INFO, "gpuflow"):
        assert compiled(source) is None, "other code is compiled anew"
    assert "number.c is not compiled, so Python code does its work: " in caplog.text
    assert "/nowhere/cc" in caplog.text


def test_an_empty_name_of_the_compiler_is_the_default(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "")
    assert seven(source) == 7


def test_a_name_of_the_compiler_that_is_no_command(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "cc 'x")
    with caplog.at_level(logging.INFO, "gpuflow"):
        assert compiled(source) is None
    assert "number.c is not compiled, so Python code does its work: No closing quotation" in caplog.text


def test_code_that_the_compiler_refuses(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source.write_text("int seven(void) { return eight; }\n")
    with caplog.at_level(logging.INFO, "gpuflow"):
        assert compiled(source) is None
    assert "eight" in caplog.text, "what the compiler says"
    assert list((tmp_path / "cache" / "gpuflow" / "compiled").iterdir()) == []


def test_without_a_folder_for_the_cache(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert seven(source) == 7


def test_a_cache_that_other_users_can_write_to_is_not_used(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache" / "gpuflow" / "compiled"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with caplog.at_level(logging.INFO, "gpuflow"):
        assert seven(source) == 7
    assert "nothing compiled is kept: " in caplog.text and "other users may write to this folder" in caplog.text
    assert list(folder.iterdir()) == []


def test_a_file_in_the_cache_that_is_no_library(source: Path, tmp_path: Path) -> None:
    assert seven(source) == 7
    (kept,) = (tmp_path / "cache" / "gpuflow" / "compiled").iterdir()
    kept.unlink()  # and not changed in place: this process has it in its memory
    kept.write_bytes(b"")
    compiled.cache_clear()
    assert seven(source) == 7


def test_threads_that_need_it_at_the_same_time_compile_it_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow-cc"
    slow.write_text(f'#!/bin/sh\necho call >> {tmp_path}/calls\nsleep 0.3\nexec cc "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("CC", str(slow))
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(seven, [source] * 4, timeout=60)) == [7] * 4
    assert (tmp_path / "calls").read_text() == "call\n"


def test_a_header_that_changes_is_compiled_anew(source: Path) -> None:
    header = source.with_name("number.h")
    source.write_text('#include "number.h"\nint seven(void) { return NUMBER; }\n')
    for number in (7, 8):
        header.write_text(f"#define NUMBER {number}\n")
        compiled.cache_clear()
        assert seven(source) == number
