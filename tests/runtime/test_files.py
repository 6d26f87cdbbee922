"""Files that are written whole or not at all, and where cached files are kept."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpuflow.config import ModelSpec, TensorrtSpec
from gpuflow.engines.tensorrt import cache_directory
from gpuflow.errors import ConfigError
from gpuflow.runtime.files import atomic_write, cache_folder, locked_folder
from tests.datasets import deadline, python


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


def test_what_is_no_text_is_escaped(tmp_path: Path) -> None:
    with atomic_write(tmp_path / "file.txt", text=True) as file:
        file.write(os.fsdecode(b"\xff.jpg"))
    assert (tmp_path / "file.txt").read_bytes() == b"\\udcff.jpg"


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


@pytest.mark.parametrize("old", [None, b"old"], ids=["leads nowhere", "leads to a file"])
def test_a_link_stays_and_the_file_that_it_leads_to_is_replaced(old: bytes | None, tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "files").mkdir()
    link, file = tmp_path / "links" / "link", tmp_path / "files" / "file"
    (tmp_path / "links" / "next").symlink_to("../files/file")
    link.symlink_to("next")
    if old is not None:
        file.write_bytes(old)
    with atomic_write(link) as new:
        assert Path(new.name).parent == file.parent  # a file is renamed within one file system
        new.write(b"new")
        assert not file.exists() if old is None else file.read_bytes() == old
    assert (link.is_symlink(), file.read_bytes()) == (True, b"new")
    assert (names(link.parent), names(file.parent)) == (["link", "next"], ["file"])


def test_a_link_that_leads_to_itself(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(OSError, match="Too many levels of symbolic links"), atomic_write(tmp_path / "link"):
        pytest.fail("there is nothing to write to")
    assert names(tmp_path) == ["link"]


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


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # every longer file fails as on a full disk
    try:
        with pytest.raises(OSError, match="File too large") as caught, atomic_write(path) as file:
            file.write(bytes(100_001))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(path)
    assert names(tmp_path) == []


def test_a_place_that_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError), atomic_write(tmp_path / "file") as file:
        file.write(b"new")
    assert names(tmp_path) == ["file"]


def test_a_place_that_is_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="is a device or a pipe, which no file may replace"), atomic_write(path):
        pass
    assert path.is_fifo()
    assert names(tmp_path) == ["pipe"]


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


def test_without_a_home_directory_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`~` then stands for itself, which would be a directory of that name in the working directory."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    folder = cache_folder()
    assert folder.is_absolute()
    with pytest.raises(NotADirectoryError):
        folder.mkdir(parents=True)
    with pytest.raises(ConfigError, match="must name a directory for built engines, because this user has no home"):
        cache_directory(ModelSpec(file="m.onnx"))
    assert cache_directory(ModelSpec(file="m.onnx", tensorrt=TensorrtSpec(cache="kept"))) == Path("kept")


# --- a folder of one process ------------------------------------------------------------------------------------------


def test_a_folder_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    with locked_folder(tmp_path / "a" / "b"):
        with pytest.raises(BlockingIOError), locked_folder(tmp_path / "a" / "b"):
            pass
        with locked_folder(tmp_path / "c"):
            pass
    with locked_folder(tmp_path / "a" / "b"):
        assert names(tmp_path / "a" / "b") == [".lock"]


def test_a_killed_process_holds_no_folder(tmp_path: Path) -> None:
    code = """
import sys, threading
from pathlib import Path
from gpuflow.runtime.files import locked_folder
with locked_folder(Path(sys.argv[1])):
    print("held", flush=True)
    threading.Event().wait()
"""
    with (
        deadline(120),
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process,
    ):
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            with pytest.raises(BlockingIOError), locked_folder(tmp_path):
                pass
        finally:
            process.send_signal(signal.SIGKILL)
        process.wait(60)
        with locked_folder(tmp_path):
            pass


def test_a_folder_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError), locked_folder(tmp_path / "file" / "x"):
        pass
    with pytest.raises(FileNotFoundError), locked_folder(Path("/proc/self")):  # as whoever may write anywhere
        pass
