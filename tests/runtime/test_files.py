"""Files that are written whole or not at all, and where cached files are kept."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from gpuflow.runtime.files import atomic_write, cache_folder
from tests.datasets import python


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [None, b"an old file that is longer than the new one"], ids=["new", "replaced"])
def test_bytes(old: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    if old is not None:
        path.write_bytes(old)
    with atomic_write(path) as file:
        file.write(b"\0new\n")
    assert path.read_bytes() == b"\0new\n"
    assert names(tmp_path) == ["file.bin"]


def test_text_is_utf8_with_newlines_as_written(tmp_path: Path) -> None:
    with atomic_write(str(tmp_path / "file.txt"), text=True) as file:
        file.write("größer\r\nthan\n")
    assert (tmp_path / "file.txt").read_bytes() == "größer\r\nthan\n".encode()


def test_the_old_file_is_there_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with atomic_write(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_a_writer_may_open_the_temporary_file_by_its_name(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "model.onnx", suffix=".onnx") as file:
        partial = Path(file.name)
        assert (partial.parent, partial.suffix) == (tmp_path, ".onnx")
        partial.write_bytes(b"by its name")
    assert (tmp_path / "model.onnx").read_bytes() == b"by its name"
    assert names(tmp_path) == ["model.onnx"]


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError("disk full"), ValueError("wrong"), KeyboardInterrupt(), GeneratorExit()])
@pytest.mark.parametrize("old", [None, b"old"], ids=["new", "replaced"])
def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(
    error: BaseException, old: bytes | None, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    if old is not None:
        path.write_bytes(old)

    def write() -> None:
        with atomic_write(path) as file:
            file.write(b"half of the new fi")
            raise error

    with pytest.raises(type(error)) as caught:
        write()
    assert caught.value is error
    assert names(tmp_path) == ([] if old is None else ["file"])
    assert old is None or path.read_bytes() == old


def test_a_writer_that_ends_the_process_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    code = """
import os, sys
from gpuflow.runtime.files import atomic_write
with atomic_write(sys.argv[1]) as file:
    file.write(b"half of the new fi")
    file.flush()
    os._exit(9)
"""
    assert python(code, str(path)).returncode == 9
    assert path.read_bytes() == b"old"


def test_a_place_that_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError), atomic_write(tmp_path / "file") as file:
        file.write(b"new")
    assert names(tmp_path) == ["file"]


def test_a_directory_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent/\.file\."), atomic_write(tmp_path / "absent" / "file"):
        pytest.fail("there is nothing to write to")
    assert names(tmp_path) == []


# --- several writers --------------------------------------------------------------------------------------------------


def test_writers_at_once_do_not_mix(tmp_path: Path) -> None:
    """What is read meanwhile is what one of them wrote, from the first byte to the last."""
    path, size, start = tmp_path / "file", 300_000, threading.Barrier(4)
    path.write_bytes(bytes(size))
    done = threading.Event()
    torn: list[bytes] = []

    def write(number: int) -> None:
        start.wait()
        for _ in range(10):
            with atomic_write(path) as file:
                for _ in range(3):
                    file.write(bytes([number]) * (size // 3))

    def read() -> None:
        start.wait()
        while not done.is_set():
            data = path.read_bytes()
            if data != data[:1] * size:
                torn.append(data[:1])

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(number,)) for number in (1, 2, 3)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert not torn
    assert path.read_bytes() in [bytes([number]) * size for number in (1, 2, 3)]
    assert names(tmp_path) == ["file"]


# --- permissions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_permissions_of_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        with atomic_write(tmp_path / "file") as file:
            file.write(b"new")
    finally:
        os.umask(before)
    assert mode(tmp_path / "file") == 0o666 & ~umask


@pytest.mark.parametrize("permissions", [0o600, 0o640, 0o664, 0o444])
def test_a_replaced_file_keeps_its_permissions(permissions: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(permissions)
    with atomic_write(path) as file:
        file.write(b"new")
        assert mode(Path(file.name)) == 0o600, "before it is complete nobody else reads it"
    assert path.read_bytes() == b"new"
    assert mode(path) == permissions


# --- cached files -----------------------------------------------------------------------------------------------------


def test_cached_files_are_kept_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache" / "gpuflow"
    for none in ("", "relative/folder"):  # the specification says that a relative path is ignored
        monkeypatch.setenv("XDG_CACHE_HOME", none)
        assert cache_folder() == tmp_path / "home" / ".cache" / "gpuflow"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == tmp_path / "home" / ".cache" / "gpuflow"
    assert not list(tmp_path.iterdir()), "asking for the folder makes none"
