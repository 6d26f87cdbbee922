"""Which files are complete, remembered between runs: by their bytes, by several processes, whatever the disk does."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpuflow.execute import complete_contents
from gpuflow.execute.complete_contents import CompleteContents, path_of
from gpuflow.runtime.files import atomic_write
from gpuflow.sources import Payload
from tests.datasets import nothing_left_behind


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "gpuflow" / "complete-files-1-test"


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings so far, which are forgotten."""

    def take() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        caplog.clear()
        return found

    return take


def numbers(*values: int) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)


def added(path: Path, *values: int) -> None:
    contents = CompleteContents(path)
    contents.add(numbers(*values))
    contents.close()


def known(path: Path, *values: int) -> list[bool]:
    return [bool(one) for one in CompleteContents(path).known(numbers(*values))]


def stored(path: Path) -> list[int]:
    return [int(value) for value in CompleteContents(path)._held]


def names(path: Path) -> list[str]:
    """Of the files next to that of the hashes, without its lock."""
    return sorted(name for name in os.listdir(path.parent) if not name.endswith(".lock"))


def forked(run: Callable[[], None]) -> int:
    """Run this in a forked child, and return its process id. The child ends with 0 unless the call raises."""
    child = os.fork()
    if child == 0:
        try:
            run()
            os._exit(0)
        finally:
            os._exit(1)
    return child


# --- what is remembered -----------------------------------------------------------------------------------------------


def test_files_are_known_by_their_bytes_alone() -> None:
    files = [b"first" * 30, b"", b"second", b"first" * 30, b"First" + b"first" * 29, bytes(200_000)]
    payload = Payload.of(files, lambda size: np.full(size, 0xAB, np.uint8))
    other = Payload.of(files[2:], lambda size: np.full(size, 0xCD, np.uint8))
    hashes = CompleteContents.hashes(payload, np.arange(6))
    assert hashes.dtype == np.uint64 and len(set(hashes.tolist())) == 5 and hashes[0] == hashes[3]
    assert np.array_equal(CompleteContents.hashes(other, np.array([3, 0])), hashes[[5, 2]])
    assert len(CompleteContents.hashes(payload, np.empty(0, np.int64))) == 0


def test_later_runs_know_the_files_of_all_earlier_ones(path: Path, warnings: Callable[[], list[str]]) -> None:
    assert known(path, 1, 2) == [False, False]
    added(path, 9, 2, 2**64 - 1, 2)
    added(path, 5, 9)
    assert known(path, 0, 2, 3, 5, 9, 2**64 - 1) == [False, True, False, True, True, True]
    assert stored(path) == [2, 5, 9, 2**64 - 1] and names(path) == [path.name]
    before = path.stat().st_ino
    added(path, 9)
    CompleteContents(path).close()
    assert path.stat().st_ino == before, "nothing new, nothing written"
    assert warnings() == []


def test_each_decoder_has_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = path_of("hardware", "nvjpeg 13.0.1", "NVIDIA H200/../x", "rgb")
    assert path == tmp_path / "gpuflow" / "complete-files-1-hardware-nvjpeg-13.0.1-nvidia-h200-..-x-rgb"
    added(path, 1)
    assert known(path, 1) == [True]
    other = path_of("cuda", "nvjpeg 13.0.1", "NVIDIA H200", "rgb")
    assert known(other, 1) == [False]
    assert path_of("hardware", "nvjpeg 13.0.2") != path_of("hardware", "nvjpeg 13.0.1")


def test_no_more_files_than_there_is_room_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complete_contents, "MAX_FILES", 4)
    added(path, 1, 2, 3)
    added(path, 7, 8)
    assert len(stored(path)) == 4 and known(path, 7, 8) == [True, True]
    added(path, *range(20, 30))
    assert len(stored(path)) == 4 and min(stored(path)) >= 20


# --- threads and processes --------------------------------------------------------------------------------------------


def test_it_is_saved_in_the_background_and_no_thread_is_left(path: Path) -> None:
    with nothing_left_behind():
        contents = CompleteContents(path)
        contents.save_soon()
        assert not path.exists()
        for number in range(20):
            contents.add(numbers(number))
            contents.save_soon()
        contents.close()
    assert stored(path) == list(range(20))


def test_the_thread_that_saves_may_be_the_one_that_closes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the garbage collector runs on it and finds the loader."""
    closed = threading.Event()

    def unique(array: NDArray[np.uint64]) -> NDArray[np.uint64]:
        contents.close()
        closed.set()
        return np.sort(array)

    contents = CompleteContents(path)
    monkeypatch.setattr(np, "unique", unique)
    contents.add(numbers(3, 1))
    with nothing_left_behind():
        contents.save_soon()
        assert closed.wait(20)
        contents.close()
    assert stored(path) == [1, 3]


def test_without_another_thread_it_is_saved_at_the_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    contents = CompleteContents(path)
    contents.add(numbers(1))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    contents.save_soon()
    contents.close()
    assert stored(path) == [1]


def test_processes_that_write_at_once_lose_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the ranks of a training do."""
    monkeypatch.setattr(complete_contents, "_LOCK_SECONDS", 60.0)

    def write(rank: int) -> None:
        contents = CompleteContents(path)
        for number in range(10):
            contents.add(numbers(100 * rank + number, number))
            contents.save()

    children = [forked(lambda rank=rank: write(rank)) for rank in range(1, 4)]  # type: ignore[misc]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 3
    expected = {100 * rank + number for rank in range(4) for number in range(10)}
    assert stored(path) == sorted(expected) and names(path) == [path.name]


def test_a_process_killed_while_it_writes_leaves_the_old_file(path: Path, warnings: Callable[[], list[str]]) -> None:
    added(path, 1, 2)

    def write() -> None:
        with pytest.MonkeyPatch.context() as patch:  # the last call before the file is replaced
            patch.setattr(os, "fsync", lambda descriptor: os.kill(os.getpid(), signal.SIGKILL))
            added(path, *range(3, 900))

    assert os.WTERMSIG(os.waitpid(forked(write), 0)[1]) == signal.SIGKILL
    assert len(names(path)) == 2 and stored(path) == [1, 2]
    added(path, 3)
    assert names(path) == [path.name], "what it left behind is removed"
    assert stored(path) == [1, 2, 3] and warnings() == []


@pytest.fixture
def held(path: Path) -> Iterator[Any]:
    """The lock of the file, held by another process as it were."""
    path.parent.mkdir(parents=True)
    with path.with_name(f"{path.name}.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def test_a_file_that_another_process_holds_is_written_next_time(
    path: Path, held: Any, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(complete_contents, "_LOCK_SECONDS", 0.02)
    contents = CompleteContents(path)
    contents.add(numbers(4))
    contents.save()
    assert not path.exists()
    fcntl.flock(held, fcntl.LOCK_UN)
    contents.close()
    assert stored(path) == [4] and warnings() == []


def test_a_file_system_without_locks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, seconds: float) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(complete_contents, "lock_within", refuse)
    added(path, 4)
    assert stored(path) == [4]


# --- what the disk does -----------------------------------------------------------------------------------------------


def changed(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[:-3], id="cut off"),
        pytest.param(lambda data: data[:-8], id="cut off between hashes"),
        pytest.param(lambda data: data[:30], id="cut off in its head"),
        pytest.param(lambda data: changed(data, len(data) - 1), id="a changed hash"),
        pytest.param(lambda data: changed(data, 3), id="a changed head"),
        pytest.param(lambda data: changed(data, len(data) - 30), id="a changed checksum"),
        pytest.param(lambda data: data + bytes(8), id="longer"),
        pytest.param(lambda data: data.replace(b"-test\n", b"-tesu\n"), id="of another decoder"),
        pytest.param(lambda data: np.random.default_rng(0).bytes(5000), id="something else"),
    ],
)
def test_a_damaged_or_foreign_file_is_not_used_and_written_anew(
    damage: Callable[[bytes], bytes], path: Path, warnings: Callable[[], list[str]]
) -> None:
    added(path, 1, 2, 3)
    path.write_bytes(damage(path.read_bytes()))
    contents = CompleteContents(path)
    assert not contents.known(numbers(1, 2, 3)).any()
    assert warnings() == [f"{path} is damaged, or not gpuflow's; it is not used, and written anew"]
    contents.add(numbers(7))
    contents.close()
    warnings()
    assert stored(path) == [7] and warnings() == []


def test_a_huge_file_is_not_read_to_its_end(
    path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    added(path, 1)
    os.truncate(path, 1 << 40)  # without any blocks on the disk
    monkeypatch.setattr(complete_contents, "MAX_FILES", 1000)
    assert known(path, 1) == [False] and len(warnings()) == 1


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    (tmp_path / "file").write_bytes(b"no folder")
    path = tmp_path / "file" / "gpuflow" / "complete"
    contents = CompleteContents(path)
    for _ in range(3):
        contents.add(numbers(1))
        contents.save_soon()
    contents.close()
    (text,) = warnings()
    assert text.startswith(f"which files are complete cannot be kept for later runs in {path.parent}: Not a director")
    assert text.endswith("set XDG_CACHE_HOME to another folder, or set run.remember_complete_files: false")


def test_a_file_that_cannot_be_read_is_one_warning(path: Path, warnings: Callable[[], list[str]]) -> None:
    path.mkdir(parents=True)
    contents = CompleteContents(path)
    contents.add(numbers(1))
    contents.close()
    assert [": Is a directory; make room" in text for text in warnings()] == [True] and path.is_dir()


def test_a_full_disk_is_one_warning_and_the_old_file_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    def full(target: Path) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    added(path, 1)
    monkeypatch.setattr(complete_contents, "atomic_write", full)
    contents = CompleteContents(path)
    for number in (2, 3):
        contents.add(numbers(number))
        contents.save()
    assert [": No space left on device; make room there" in text for text in warnings()] == [True]
    assert contents.known(numbers(1)).all()
    monkeypatch.setattr(complete_contents, "atomic_write", atomic_write)
    contents.close()
    assert stored(path) == [1], "a run that could not write does not try again"
