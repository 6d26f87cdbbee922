"""Storages alone: what becomes of files that vanish, and of file systems that fail as a whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gpuflow.errors import ServerFault, SourceError
from gpuflow.sources import open_source, source_spec
from gpuflow.sources.storage import local, time_limit
from gpuflow.sources.storage.base import Shard, Shards
from gpuflow.sources.storage.local import LocalStorage
from gpuflow.sources.storage.remote import RemoteStorage, read_in_blocks
from tests.texts import outline


class Failing(MemoryFileSystem):  # type: ignore[misc]
    """A file system whose library raises its own error at each request."""

    protocol = "failing"
    cachable = False

    def cat_ranges(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no credentials")

    cat_file = find = ls = info = cat_ranges


@pytest.fixture
def failing() -> RemoteStorage:
    fsspec.register_implementation("failing", Failing, clobber=True)
    with time_limit(0.5):
        return RemoteStorage("failing://a")


@pytest.mark.parametrize("request_of", ["read", "load", "find", "inspect"])
def test_an_error_of_a_librarys_own_is_no_fault_of_a_sample(failing: RemoteStorage, request_of: str) -> None:
    """Nobody knows what it means, so it is tried again, and then raised."""
    requests: dict[str, Callable[[], object]] = {
        "read": lambda: failing.read([b"failing://a", b"failing://b"], lambda size: np.zeros(size, np.uint8)),
        "load": lambda: failing.load("failing://a"),
        "find": lambda: failing.find("failing://a"),
        "inspect": lambda: failing.inspect(["failing://a"]),
    }
    with pytest.raises(
        ServerFault, match=r"^failing://[ab]: RuntimeError: no credentials; tried for 0\.\d s, as run\.timeout_s"
    ):
        requests[request_of]()


class Versioned(MemoryFileSystem):  # type: ignore[misc]
    """A file system whose files have versions, as those of S3 do."""

    protocol = "versioned"
    store: ClassVar[dict[str, Any]] = {}
    cachable = False

    def cat_file(
        self, path: str, version_id: str | None = None, start: int | None = None, end: int | None = None
    ) -> Any:
        assert version_id is None
        return super().cat_file(path, start=start, end=end)


def test_a_range_is_asked_for_by_name() -> None:
    fsspec.register_implementation("versioned", Versioned, clobber=True)
    Versioned().pipe_file("versioned://a.tar", bytes(range(100)))
    storage = RemoteStorage("versioned://a.tar")
    [shard] = storage.inspect(["versioned://a.tar"])
    assert isinstance(shard, Shard)
    payload = storage.read_ranges([shard], [10], [5], lambda size: np.zeros(size, np.uint8))
    assert bytes(payload.sample(0)) == bytes(range(10, 15)) and storage.load("versioned://a.tar") == bytes(range(100))


def test_a_shard_that_vanishes_before_it_is_scanned_is_named() -> None:
    shard = Shard(path="absent.tar", size=1, stamp="")
    with pytest.raises(SourceError) as caught:
        list(LocalStorage().scan([shard], lambda shard, read: read(0, 1)))
    assert outline(caught.value) == "absent.tar"


@pytest.mark.parametrize("function", ["stat", "open", "pread"])
def test_opening_and_scanning_a_shard_is_retried(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network mount that answers late."""
    path, real, left = str(tmp_path / "x.tar"), getattr(os, function), [3]
    (tmp_path / "x.tar").write_bytes(b"data")

    def fail(*arguments: Any, **options: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error", path)
        return real(*arguments, **options)

    monkeypatch.setattr(local, "LOCAL_DELAYS", (0.0, 0.001, 0.001, 0.001))
    monkeypatch.setattr(os, function, fail)
    [shard] = LocalStorage().inspect([path])
    assert isinstance(shard, Shard)
    assert list(LocalStorage().scan([shard], lambda shard, read: read(0, 9))) == [b"data"]
    assert left == [0]
    left[0] = 4
    if function == "stat":
        assert LocalStorage().inspect([path]) == ["input/output error; tried 4 times"]
    else:
        with pytest.raises(SourceError) as caught:
            list(LocalStorage().scan([shard], lambda shard, read: read(0, 9)))
        assert outline(caught.value) == f"{path}"


def open_descriptors(path: Path) -> int:
    """How many descriptors of this process are open on a file."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            count += os.readlink(link) == str(path)
    return count


def test_a_shard_that_cannot_be_read_is_closed(tmp_path: Path) -> None:
    """A directory can be opened, and reading from it fails."""
    status, storage = tmp_path.stat(), LocalStorage()
    shard = Shard(path=str(tmp_path), size=status.st_size, stamp=str(status.st_mtime_ns))
    payload = storage.read_ranges([shard], [0], [10], lambda size: np.zeros(size, np.uint8))
    assert payload.errors == ["is a directory"]
    assert open_descriptors(tmp_path) == 0
    storage.close()


def test_a_file_that_comes_in_parts_is_read_to_its_end() -> None:
    """As from some network file systems, and as any file of more than 2 GiB does; this one gives a page at a time."""
    path = Path("/sys/kernel/btf/vmlinux")
    if not os.access(path, os.R_OK):
        pytest.skip(f"{path} cannot be read here")
    expected = path.read_bytes()
    [shard] = LocalStorage().inspect([str(path)])
    assert isinstance(shard, Shard)
    payload = LocalStorage().read([os.fsencode(path)], lambda size: np.zeros(size, np.uint8))
    ranges = LocalStorage().read_ranges([shard], [7], [9000], lambda size: np.zeros(size, np.uint8))
    assert (payload.errors, payload.sample(0).tobytes()) == ([None], expected)
    assert (ranges.errors, ranges.sample(0).tobytes()) == ([None], expected[7:9007])


def test_thirty_two_shards_stay_open(tmp_path: Path) -> None:
    storage, paths = LocalStorage(), [tmp_path / f"{number}.tar" for number in range(40)]
    for path in paths:
        path.write_bytes(b"x")
    shards = [shard for shard in storage.inspect(list(map(str, paths))) if isinstance(shard, Shard)]
    for shard in shards:
        assert storage.read_ranges([shard], [0], [1], lambda size: np.zeros(size, np.uint8)).errors == [None]
    assert [open_descriptors(path) for path in paths] == [0] * 8 + [1] * 32
    storage.close()
    assert not any(map(open_descriptors, paths))
    read = [storage.read_ranges([shard], [0], [1], lambda size: np.zeros(size, np.uint8)) for shard in shards]
    assert [payload.errors for payload in read] == [[None]] * 40, "by a thread of an epoch that is being ended"
    assert not any(map(open_descriptors, paths)), "none stays open after the storage was closed"


def test_remote_classes_and_images_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the file system lists them: find promises no order."""
    find = MemoryFileSystem.find

    def backwards(system: MemoryFileSystem, path: str, **kwargs: Any) -> Any:
        found = find(system, path, **kwargs)
        names = sorted(found, reverse=True)
        return {name: found[name] for name in names} if kwargs.get("detail") else names

    monkeypatch.setattr(MemoryFileSystem, "find", backwards)
    names = [f"{name}/{number}.jpg" for name in "abc" for number in range(3)]
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/unordered/{name}": b"x" for name in names})
    try:
        source = open_source(source_spec(folder="memory://unordered"))
        assert source.classes == ("a", "b", "c")
        assert [source.path(i).removeprefix("memory://unordered/") for i in range(9)] == names
    finally:
        memory.rm("/unordered", recursive=True)


def test_a_relative_path_is_inspected_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.tar").write_bytes(b"data")
    monkeypatch.chdir(tmp_path)
    storage = LocalStorage()
    before = storage.inspect(["x.tar"])
    monkeypatch.chdir("/")
    assert storage.inspect(["x.tar"]) == before and isinstance(before[0], Shard)
    assert storage.place("x.tar") == str(tmp_path / "x.tar") and storage.place("/y") == "/y"


def test_a_sample_has_the_shard_that_it_lies_in_and_its_number_there() -> None:
    """Of shards with 2, 0, 3 and 1 samples."""
    files = tuple(Shard(path=name, size=1, stamp="") for name in "abcd")
    shards = Shards(files, np.array([2, 2, 5, 6]))
    places = [(files[at], number) for at, count in enumerate((2, 0, 3, 1)) for number in range(count)]
    assert [shards.place(i) for i in range(6)] == places
    assert shards.of(np.arange(6)) == [file for file, _ in places]


def test_a_shard_is_read_ahead_in_blocks() -> None:
    """Or a server would be asked for each header of a shard's members."""
    content, asked = bytes(range(100)), list[tuple[int, int]]()

    def read(start: int, size: int) -> bytes:
        asked.append((start, size))
        return content[start : start + size]

    read_at = read_in_blocks(Shard(path="x.tar", size=100, stamp=""), read, unit=8, ahead=32)
    for offset, size in ((0, 4), (4, 4), (28, 4), (30, 4), (40, 50), (95, 10), (100, 1)):
        assert read_at(offset, size) == content[offset : offset + size]
    assert asked == [(0, 32), (24, 32), (40, 50), (88, 12)]
