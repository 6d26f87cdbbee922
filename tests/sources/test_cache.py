"""The cache of files behind URLs: same bytes, bounded, shared by processes, sound after kills and on full disks."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from gpuflow.errors import ConfigError, SourceError
from gpuflow.runtime.files import lock_within
from gpuflow.sources import Source, SourceSpec, open_source, source_spec
from gpuflow.sources.storage import CachedStorage, CacheSpec, cached, disk_cache, time_limit
from gpuflow.sources.storage.disk_cache import DiskCache
from tests.datasets import deadline
from tests.sources.conftest import FileServer, ReadAll
from tests.texts import outline

MakeTar = Callable[..., bytes]

ROOT = Path(__file__).parents[2]
ENTRY = 100_000
ENTRY_ON_DISK = 102_400
"""With its header, in units of 4096 bytes."""
SIZE = 16 << 20


@pytest.fixture(autouse=True)
def short_limit() -> Iterator[None]:
    with time_limit(20.0):
        yield


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no wait for the disk, which takes milliseconds and shows only after a loss of power."""
    monkeypatch.setattr(cached, "BLOCK_BYTES", 16384)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def bytes_of(number: int, size: int) -> bytes:
    return np.random.default_rng(number).bytes(size)


def shard(make_tar: MakeTar, number: int, samples: int = 12) -> bytes:
    members = []
    for i in range(samples):
        members += [(f"{i}.jpg", bytes_of(100 * number + i, 500 + 977 * i)), (f"{i}.cls", b"0")]
    return make_tar(members)


def spec_of(kind: str, url: str, folder: Path | None, size: int = SIZE) -> SourceSpec:
    where = {"tar": f"{url}/{{0..1}}.tar", "folder": f"{url}/photos", "listing": f"{url}/list.csv"}[kind]
    cache = None if folder is None else CacheSpec(dir=str(folder), size=size)
    return source_spec(**{kind: where}, cache=cache)


def opened(kind: str, url: str, folder: Path, size: int = SIZE) -> tuple[Source, CachedStorage]:
    source = open_source(spec_of(kind, url, folder, size))
    assert isinstance(source.storage, CachedStorage)
    return source, source.storage


def files(make_tar: MakeTar) -> dict[str, bytes]:
    photos = {f"/photos/{'ab'[i % 2]}/{i}.jpg": bytes_of(i, 700 * i) for i in range(10)}  # one of them empty
    listing = "".join(f"{path[1:]},0\n" for path in photos) + "photos/a/none.jpg,1\n"
    return {**photos, "/list.csv": listing.encode(), "/0.tar": shard(make_tar, 0), "/1.tar": shard(make_tar, 1)}


def nothing_is_downloaded_again(read_all: ReadAll, folder: Path, expected: list[bytes | str]) -> None:
    """The files of memory:/photos are read through the cache twice, the second time from it alone."""
    assert read_all(opened("folder", "memory:/", folder)[0]) == expected
    source, storage = opened("folder", "memory:/", folder)
    assert read_all(source) == expected
    assert storage.counts()["misses"] == 0


def held(folder: Path) -> list[Path]:
    """The entries and downloads of a cache."""
    return [path for name in ("entries", "partial") for path in sorted((folder / name).rglob("*")) if path.is_file()]


def used(folder: Path) -> int:
    return int((folder / "used").read_text().split()[0])


def on_disk(folder: Path) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in held(folder))


def put(cache: DiskCache, name: str, data: bytes, version: bytes = bytes(16)) -> None:
    claim = cache.claim(name)
    assert claim is not None
    cache.store(claim, data, version, 0)
    cache.release(claim)


# The same bytes.


@pytest.mark.parametrize("kind", ["folder", "listing", "tar"])
def test_what_is_read_is_the_same_with_a_cache(
    server: FileServer, make_tar: MakeTar, read_all: ReadAll, folder: Path, kind: str
) -> None:
    server.tags = True
    server.files.update(files(make_tar))
    expected = read_all(open_source(spec_of(kind, server.url, None)))
    assert len(expected) >= 10
    source, storage = opened(kind, server.url, folder)
    assert read_all(source) == expected
    server.requests.clear()
    server.asked.clear()
    assert read_all(source, range(len(source) - 1, -1, -1)) == expected[::-1]
    faulty = {path for path in server.requests if path.endswith(("/0.jpg", "/none.jpg"))}
    assert set(server.requests) == faulty, "an empty file and one that is not there"
    assert set(server.asked) <= faulty
    counts = storage.counts()
    assert counts["hits"] >= sum(isinstance(answer, bytes) for answer in expected)
    assert counts["damaged"] == 0
    again, storage = opened(kind, server.url, folder)
    assert read_all(again) == expected
    assert storage.counts()["downloaded_bytes"] == 0


def test_a_listing_of_the_server_has_the_versions(
    memory: fsspec.AbstractFileSystem,
    make_tar: MakeTar,
    read_all: ReadAll,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory.pipe(files(make_tar))
    expected = read_all(open_source(spec_of("folder", "memory:/", None)))
    nothing_is_downloaded_again(read_all, folder, expected)
    monkeypatch.setattr(type(memory), "info", None)  # which is asked for after a download
    source, storage = opened("folder", "memory:/", folder)
    assert read_all(source) == expected and storage.counts()["misses"] == 0


def test_a_file_that_is_not_listed_is_asked_for_once_a_run(
    server: FileServer, make_tar: MakeTar, read_all: ReadAll, folder: Path
) -> None:
    server.tags = True
    server.files.update(files(make_tar))
    first, _ = opened("listing", server.url, folder)
    second, _ = opened("listing", server.url, folder)
    read_all(first, [3])
    assert (server.asked["/photos/b/3.jpg"], server.requests["/photos/b/3.jpg"]) == (1, 1)
    read_all(first, [3])
    read_all(second, [3])
    assert (server.asked["/photos/b/3.jpg"], server.requests["/photos/b/3.jpg"]) == (1, 1)
    later, _ = opened("listing", server.url, folder)
    for _ in range(2):
        read_all(later, [3])
    assert (server.asked["/photos/b/3.jpg"], server.requests["/photos/b/3.jpg"]) == (2, 1)


@pytest.mark.parametrize("kind", ["folder", "listing", "tar"])
def test_a_changed_file_is_downloaded_again(
    server: FileServer, make_tar: MakeTar, read_all: ReadAll, folder: Path, kind: str
) -> None:
    server.tags = True
    server.files.update(files(make_tar))
    before = read_all(opened(kind, server.url, folder)[0])
    size = used(folder)
    server.files["/photos/b/3.jpg"] = bytes_of(77, 2100)
    server.files["/0.tar"] = shard(make_tar, 5)
    source, storage = opened(kind, server.url, folder)
    expected = read_all(open_source(spec_of(kind, server.url, None)))
    assert read_all(source) == expected != before
    assert storage.counts()["misses"] >= 1
    assert used(folder) == on_disk(folder) == size, "the new copy takes the place of the old one"


@pytest.mark.parametrize("kind", ["folder", "listing"])
def test_an_answer_of_another_length_is_not_kept(
    server: FileServer, make_tar: MakeTar, read_all: ReadAll, folder: Path, kind: str
) -> None:
    server.tags = True
    server.files.update(files(make_tar))
    expected = read_all(open_source(spec_of(kind, server.url, None)))
    server.replaced["/photos/b/3.jpg"] = b"<html>please log in</html>"
    found = read_all(opened(kind, server.url, folder)[0])
    (wrong,) = [i for i, answer in enumerate(found) if answer != expected[i]]
    assert found[wrong] == server.replaced.pop("/photos/b/3.jpg")
    source, storage = opened(kind, server.url, folder)
    assert read_all(source) == expected
    assert storage.counts()["misses"] == 1 and read_all(opened(kind, server.url, folder)[0]) == expected


def test_files_whose_size_a_listing_does_not_say_are_kept(
    memory: fsspec.AbstractFileSystem,
    make_tar: MakeTar,
    read_all: ReadAll,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory.pipe(files(make_tar))
    expected = read_all(open_source(spec_of("folder", "memory:/", None)))
    find = type(memory).find

    def without_sizes(self: Any, *arguments: Any, **named: Any) -> Any:
        return {path: {**info, "size": None} for path, info in find(self, *arguments, **named).items()}

    monkeypatch.setattr(type(memory), "find", without_sizes)
    nothing_is_downloaded_again(read_all, folder, expected)


def test_files_of_a_server_that_names_no_version_are_not_kept(
    server: FileServer, make_tar: MakeTar, read_all: ReadAll, folder: Path
) -> None:
    server.files.update(files(make_tar))
    for kind, place in (("tar", "/0.tar"), ("listing", "/photos/b/1.jpg")):
        expected = read_all(open_source(spec_of(kind, server.url, None)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            source, _ = opened(kind, server.url, folder)
            assert read_all(source, range(1, 9)) == expected[1:9]
            assert read_all(source) == expected
        assert [str(warning.message) for warning in caught] == [
            f"{server.url}{place}: its server gives no ETag and no time of change, so source.cache does not keep it; "
            "remove source.cache, or use a server that does"
        ]
    assert held(folder) == []


def test_a_shard_that_changes_while_it_is_open(
    server: FileServer, make_tar: MakeTar, read_all: ReadAll, folder: Path
) -> None:
    server.tags = True
    server.files.update(files(make_tar))
    source, _ = opened("tar", server.url, folder)
    for path in held(folder):
        path.unlink()
    server.files["/1.tar"] = server.files["/1.tar"][:5000]
    with pytest.raises(
        SourceError, match=r"1.tar: shard must stay as it was indexed, but has changed \(\d+ bytes then"
    ):
        read_all(source)


def test_a_cache_without_room_for_a_window_is_a_warning(
    memory: fsspec.AbstractFileSystem, make_tar: MakeTar, folder: Path
) -> None:
    memory.pipe({f"/{i}.tar": make_tar([("1.jpg", bytes(10_000_000)), ("1.cls", b"0")]) for i in range(2)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opened("tar", "memory:/", folder)
    assert [str(warning.message) for warning in caught] == [
        "source.cache.size must hold the 8,192 samples of source.window (20 MB), got 17 MB: shuffled batches will "
        "download blocks more than once; raise it, or lower source.window"
    ]


# The bound.


def test_a_relative_folder_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cache = DiskCache("kept", SIZE)
    monkeypatch.chdir("/")
    assert cache.folder == tmp_path / "kept"


def test_the_entries_that_were_not_used_for_the_longest_time_make_room(folder: Path) -> None:
    cache = DiskCache(str(folder), 10 * ENTRY_ON_DISK)
    names = [f"{i:032x}" for i in range(14)]
    for i, name in enumerate(names[:10]):
        put(cache, name, bytes_of(i, ENTRY))
    assert used(folder) == on_disk(folder) == cache.size
    assert cache.read(names[0], bytes(16)) == bytes_of(0, ENTRY)
    for i, name in enumerate(names[10:], start=10):
        put(cache, name, bytes_of(i, ENTRY))
        assert used(folder) == on_disk(folder) <= cache.size
    assert [i for i, name in enumerate(names) if cache.read(name, bytes(16)) is not None] == [0, *range(5, 14)]
    put(cache, "f" * 32, bytes(2 * cache.size))
    assert len(held(folder)) == 10, "what is larger than the cache removes nothing"


def test_a_part_of_an_entry_is_checked_without_the_rest(folder: Path) -> None:
    cache = DiskCache(str(folder), SIZE)
    data = bytes_of(1, 300_000)
    put(cache, "a" * 32, data)
    for start, size in ((0, 1), (65_535, 2), (65_536, 65_536), (200_000, 100_000), (299_999, 1), (0, 300_000)):
        assert cache.read("a" * 32, bytes(16), start, size) == data[start : start + size]
    [path] = held(folder)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert cache.read("a" * 32, bytes(16), 0, 100) == data[:100]
    assert cache.read("a" * 32, bytes(16), 299_990, 10) is None
    assert cache.damaged == 1
    assert (held(folder), used(folder)) == ([], 0)


def run(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A process that runs Python code."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stdin=subprocess.PIPE)


def test_several_processes_stay_within_the_size(folder: Path) -> None:
    code = """
import sys
from gpuflow.sources.storage.disk_cache import DiskCache
folder, size, process = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
cache = DiskCache(folder, size)
def total():
    with cache._locked():
        return sum(-(-held // 4096) * 4096 for *_, held in cache._files()), cache._bytes_used()
for i in range(30):
    name = f"{(process * 7 + i) % 25:032x}"
    claim = cache.claim(name)
    if claim is not None:
        cache.store(claim, name.encode() * 1000, bytes(16), 0)
        cache.release(claim)
    found, said = total()
    assert found <= said <= size, (found, said, size)
    data = cache.read(name, bytes(16))
    assert data in (None, name.encode() * 1000)
assert cache.damaged == 0 and cache.writing
"""
    processes = [run(code, folder, 300_000, number) for number in range(3)]
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert used(folder) == on_disk(folder) <= 300_000
    assert not any((folder / "partial").iterdir())


READ = """
import json, sys
import numpy as np
from gpuflow.sources import SourceSpec, open_source, source_spec
from gpuflow.sources.storage import CacheSpec, cached
cached.BLOCK_BYTES, cached._AT_ONCE = 16384, 2
source = open_source(source_spec(**json.loads(sys.argv[1]), cache=CacheSpec(dir=sys.argv[2], size=16 << 20)))
print(len(source), flush=True)
sys.stdin.readline()
payload = source.read(range(len(source)), lambda size: np.zeros(size, np.uint8))
print([error for error in payload.errors if error])
"""


def test_one_process_downloads_and_the_others_wait(server: FileServer, make_tar: MakeTar, folder: Path) -> None:
    server.tags = True
    server.files.update(files(make_tar))
    given = json.dumps({"listing": f"{server.url}/list.csv"})
    processes = [run(READ, given, folder) for _ in range(2)]
    server.held.add("/photos/b/9.jpg")
    for process in processes:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "11\n"
        process.stdin.write("\n")
        process.stdin.flush()
    assert server.reached.wait(30)
    server.go_on.set()
    ends = [process.communicate(timeout=60)[0] for process in processes]
    assert ends == ["['empty file', 'no such file']\n"] * 2
    assert {path: server.requests[path] for path in server.files if path.endswith(".jpg") and "0" not in path} == {
        f"/photos/{'ab'[i % 2]}/{i}.jpg": 1 for i in range(1, 10)
    }


def test_threads_that_need_the_same_block_download_it_once(
    server: FileServer, make_tar: MakeTar, read_all: ReadAll, folder: Path
) -> None:
    server.tags = True
    server.files.update(files(make_tar))
    expected = read_all(open_source(spec_of("tar", server.url, None)))
    source, _ = opened("tar", server.url, folder)
    for path in held(folder):
        path.unlink()
    server.requests.clear()
    server.seconds = 0.01
    with ThreadPoolExecutor(6) as threads:
        for found in threads.map(lambda _: read_all(source), range(6)):
            assert found == expected
    blocks = sum(-(-len(server.files[path]) // 16384) for path in ("/0.tar", "/1.tar"))
    assert server.requests["/0.tar"] + server.requests["/1.tar"] <= blocks


def test_a_process_that_waits_too_long_downloads_by_itself(
    server: FileServer, make_tar: MakeTar, read_all: ReadAll, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached, "_WAIT_SECONDS", 0.02)
    server.tags = True
    server.files.update(files(make_tar))
    source, storage = opened("listing", server.url, folder)
    other = DiskCache(str(folder), SIZE)
    claim = other.claim(cached._digest(source.path(5)).hex())
    assert claim is not None
    assert read_all(source, [4, 5]) == [server.files["/photos/a/4.jpg"], server.files["/photos/b/5.jpg"]]
    assert len(held(folder)) == 2, "one entry, and what the other one holds"
    other.release(claim)
    assert read_all(source, [5]) == [server.files["/photos/b/5.jpg"]]
    assert storage.counts()["misses"] == 3
    assert len(held(folder)) == 2


# Kills, damage, full disks, other folders.


def test_a_process_that_is_killed_while_it_downloads(
    server: FileServer, make_tar: MakeTar, read_all: ReadAll, folder: Path
) -> None:
    server.tags = True
    server.files.update(files(make_tar))
    expected = read_all(open_source(spec_of("tar", server.url, None)))
    server.held.add("/1.tar")
    process = run(READ, json.dumps({"tar": f"{server.url}/{{0..1}}.tar"}), folder)
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert server.reached.wait(60)
    before = [path for path in held(folder) if path.parent.name != "partial"]
    assert len(before) == 6
    assert len(held(folder)) == 8
    process.kill()
    process.communicate(timeout=60)
    server.held.clear()
    server.go_on.set()
    source, storage = opened("tar", server.url, folder)
    assert not any((folder / "partial").iterdir()), "what was left over is removed"
    assert read_all(source) == expected
    assert storage.counts()["damaged"] == 0
    assert storage.counts()["misses"] == len(held(folder)) - 6, "what was there before the kill is used"
    assert used(folder) == on_disk(folder)
    assert set(before) < set(held(folder))


@pytest.mark.parametrize("call", ["ftruncate", "pwrite", "replace"])
def test_a_process_that_is_killed_while_it_writes(folder: Path, call: str) -> None:
    """At each system call that adds an entry."""
    code = f"""
import os, pathlib, signal, sys
from gpuflow.sources.storage import disk_cache
cache = disk_cache.DiskCache(sys.argv[1], 1 << 20)
def put(name):
    claim = cache.claim(name * 32)
    cache.store(claim, name.encode() * 100_000, bytes(16), 0)
    cache.release(claim)
put("a")
place = pathlib.Path if {call!r} == "replace" else os
original = getattr(place, {call!r})
def last(*arguments):
    if {call!r} != "pwrite" or len(arguments[1]) > 1000:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments)
setattr(place, {call!r}, last)
put("b")
"""
    process = run(code, folder)
    process.communicate(timeout=60)
    assert process.returncode == -9
    assert len(held(folder)) == 2
    cache = DiskCache(str(folder), 1 << 20)
    assert cache.read("a" * 32, bytes(16)) == b"a" * 100_000
    assert cache.read("b" * 32, bytes(16)) is None
    assert len(held(folder)) == 1
    put(cache, "b" * 32, b"b" * 100_000)
    assert cache.read("b" * 32, bytes(16)) == b"b" * 100_000
    assert on_disk(folder) <= used(folder) <= on_disk(folder) + ENTRY_ON_DISK
    for i in range(30):
        put(cache, f"{i:032x}", bytes(ENTRY))
    assert used(folder) == on_disk(folder) <= cache.size


@pytest.mark.parametrize("damage", ["page", "head", "table", "short"])
def test_a_damaged_entry_is_downloaded_again(
    server: FileServer, make_tar: MakeTar, read_all: ReadAll, folder: Path, damage: str
) -> None:
    server.tags = True
    server.files.update(files(make_tar))
    source, storage = opened("listing", server.url, folder)
    expected = read_all(source, [5])
    [path] = held(folder)
    content = bytearray(path.read_bytes())
    match damage:
        case "page":
            content[1000] ^= 4
        case "head":
            content[9] ^= 4
        case "table":
            content[37] ^= 4
        case _:
            del content[-1:]
    path.write_bytes(content)
    assert read_all(source, [5]) == expected
    assert (storage.counts()["misses"], storage.counts()["damaged"]) == (2, 1)
    assert read_all(source, [5]) == expected
    assert storage.counts()["misses"] == 2


def test_after_a_loss_of_power_the_files_are_counted_again(folder: Path) -> None:
    cache = DiskCache(str(folder), SIZE)
    put(cache, "a" * 32, bytes(ENTRY))
    for text in ("", "00000000000000000000 of-an-earlier-start\n", "gibberish\n" * 3):
        (folder / "used").write_text(text)
        put(cache, "b" * 32, bytes(ENTRY))
        assert used(folder) == on_disk(folder) == 2 * ENTRY_ON_DISK


def test_a_full_disk_is_one_warning_and_nothing_is_lost(
    server: FileServer, make_tar: MakeTar, read_all: ReadAll, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.tags = True
    server.files.update(files(make_tar))
    expected = read_all(open_source(spec_of("listing", server.url, None)))
    source, storage = opened("listing", server.url, folder)
    read_all(source, [1, 2])

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_cache, "_write", full)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert read_all(source) == expected
    assert [str(warning.message) for warning in caught] == [
        f"source.cache.dir {str(folder)!r}: No space left on device; nothing more is added to it, and what it lacks is "
        "read from the server; free disk space, or lower source.cache.size"
    ]
    assert storage.counts()["hits"] == 4, "what is there is used"
    assert len(held(folder)) == 2
    assert used(folder) == on_disk(folder)


def test_a_disk_that_is_full_from_the_start(
    server: FileServer, make_tar: MakeTar, read_all: ReadAll, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.tags = True
    server.files.update(files(make_tar))

    def full(*arguments: object, **keywords: object) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_cache, "atomic_write", full)
    with pytest.warns(UserWarning, match="No space left on device; nothing more is added to it"):
        source, storage = opened("tar", server.url, folder)
    assert read_all(source) == read_all(open_source(spec_of("tar", server.url, None)))
    assert storage.counts()["hits"] == 0
    source.close()


def refused(folder: Path | str) -> str:
    with pytest.raises(SourceError) as caught:
        DiskCache(str(folder), SIZE)
    return outline(caught.value)


def test_a_cache_of_another_version_is_left_alone(folder: Path) -> None:
    DiskCache(str(folder), SIZE).close()
    (folder / "gpuflow-cache").write_text("gpuflow cache, format 2\n")
    (folder / "used").write_text("its own")
    assert refused(folder) == f"source.cache.dir, got {str(folder)!r} with 'gpuflow cache, format 2'"
    assert (folder / "used").read_text() == "its own"


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    assert refused(tmp_path) == f"source.cache.dir, got {str(tmp_path)!r} with 'thesis.tex' in it"
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_a_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    assert refused(tmp_path / "file" / "below") == (f"source.cache.dir, got '{tmp_path}/file/below': Not a directory")

    def without_locks(*arguments: object) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(disk_cache, "lock_within", without_locks)
    assert refused(tmp_path / "cache") == f"source.cache.dir, got '{tmp_path}/cache'"


def test_a_size_that_is_too_small_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        source_spec(tar="memory://1.tar", cache=CacheSpec(dir="x", size=5))
    assert outline(caught.value) == "source.cache.size config.range, got 5"


def test_closing_leaves_no_descriptor_open(
    server: FileServer, make_tar: MakeTar, read_all: ReadAll, folder: Path
) -> None:
    server.tags = True
    server.files.update(files(make_tar))
    source, _ = opened("tar", server.url, folder)
    read_all(source)
    source.close()
    with pytest.raises(SourceError) as caught:
        open_source(source_spec(tar=f"{server.url}/7.tar", cache=CacheSpec(dir=str(folder), size=SIZE)))
    assert outline(caught.value) == f"{server.url}/7.tar"
    del caught  # whose traceback holds the source
    gc.collect()
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()]
    assert not [link for link in links if link.startswith(str(folder))]


@pytest.mark.parametrize("fields", [{}, {"image": {"column": "path"}, "label": {}}])
def test_a_listing_of_local_files_takes_no_cache(tmp_path: Path, folder: Path, fields: dict[str, Any]) -> None:
    (tmp_path / "list.csv").write_text("path,label\n1.jpg,a\n")
    cache = CacheSpec(dir=str(folder), size=SIZE)
    with pytest.raises(SourceError) as caught:
        open_source(source_spec(listing=str(tmp_path / "list.csv"), cache=cache, fields=fields))
    assert (
        outline(caught.value)
        == f"source.cache, got '{tmp_path}/list.csv', which lists local files, and these are not copied"
    )
    assert not folder.exists()


def test_who_finds_an_entry_claimed_does_not_wait_for_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def lock(file: int, seconds: float) -> bool:
        waited.append(seconds)
        return lock_within(file, seconds)

    monkeypatch.setattr(disk_cache, "lock_within", lock)
    first, second = DiskCache(str(folder), SIZE), DiskCache(str(folder), SIZE)
    claim = first.claim("a" * 32)
    waited.clear()
    assert claim is not None and second.claim("a" * 32) is None
    assert waited == [0]
    first.release(claim)


def test_a_cache_that_is_closed_while_it_is_read_says_nothing(folder: Path) -> None:
    cache = DiskCache(str(folder), SIZE)
    claim = cache.claim("a" * 32)
    assert claim is not None
    thread = threading.Thread(target=cache.close)
    thread.start()
    thread.join(10)
    cache.store(claim, b"x", bytes(16), 0)
    cache.release(claim)
    assert cache.claim("b" * 32) is None
    assert held(folder) == []


# What others put into the folder.

PLACES = ("gpuflow-cache", "used", "partial", "entries", "partial/{}", "entries/{0:.2}", "entry")
THINGS: dict[str, Callable[[Path, Path], object]] = {
    "a link to a file": lambda place, victim: place.symlink_to(victim),
    "a link to nothing": lambda place, victim: place.symlink_to(victim.with_name("none")),
    "a link to a folder": lambda place, victim: place.symlink_to(victim.parent),
    "another name of a file": lambda place, victim: place.hardlink_to(victim),
    "a pipe": lambda place, victim: os.mkfifo(place),
    "an empty folder": lambda place, victim: place.mkdir(),
    "a folder": lambda place, victim: (place / "held").mkdir(parents=True),
    "a file": lambda place, victim: place.write_bytes(b"no entry" * 1000),
}


@pytest.mark.filterwarnings("ignore:source.cache.dir")
@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize(
    "place", ["gpuflow-cache", "used", "partial", "entries", "partial/{}", "entries/{0:.2}", "entry"]
)
def test_nothing_that_others_put_into_the_folder_hangs_a_run_or_leads_out_of_it(
    server: FileServer, make_tar: MakeTar, read_all: ReadAll, folder: Path, tmp_path: Path, place: str, thing: str
) -> None:
    """Files and folders elsewhere stay as they are, and every sample arrives, or the folder is refused."""
    server.tags = True
    server.files.update(files(make_tar))
    expected = read_all(open_source(spec_of("listing", server.url, None)))
    victim = tmp_path / "own" / ("0" * 30)
    victim.parent.mkdir()
    victim.write_text("precious " * 20)
    before = sorted((path, path.read_bytes()) for path in victim.parent.iterdir())
    name = cached._digest(f"{server.url}/photos/b/3.jpg").hex()
    read_all(opened("listing", server.url, folder)[0], range(5))
    target = folder / (f"entries/{name[:2]}/{name[2:]}" if place == "entry" else place.format(name))
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
    THINGS[thing](target, victim)
    with deadline(20):
        try:
            for _ in range(2):
                source, _ = opened("listing", server.url, folder, size=SIZE)
                assert read_all(source) == expected
                source.close()
        except SourceError as refused:
            said = str(refused)
        else:
            said = "source.cache.dir"
        assert "source.cache.dir" in said
    assert sorted((path, path.read_bytes()) for path in victim.parent.iterdir()) == before


def test_room_is_made_in_the_folder_alone(folder: Path, tmp_path: Path) -> None:
    """A link to a folder with files that look like entries, and whose times are old."""
    cache = DiskCache(str(folder), 3 * ENTRY_ON_DISK)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "file").write_bytes(b"precious")
    os.utime(tmp_path / "own" / "file", (0, 0))
    (folder / "entries" / "aa").symlink_to(tmp_path / "own")
    for number in range(8):
        put(cache, f"{number:032x}", bytes_of(number, ENTRY))
    assert (tmp_path / "own" / "file").read_bytes() == b"precious"
    assert len(held(folder)) <= 3


@pytest.mark.parametrize(("mode", "said"), [(0o777, "refused"), (0o1777, "refused"), (0o775, "warned"), (0o755, "")])
def test_who_may_write_to_the_folder(folder: Path, mode: int, said: str) -> None:
    folder.mkdir()
    folder.chmod(mode)
    if said == "refused":
        with pytest.raises(SourceError) as caught:
            DiskCache(str(folder), SIZE)
        assert outline(caught.value) == f"source.cache.dir, got '{folder}', where any user can replace the images"
        return
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        DiskCache(str(folder), SIZE).close()
    assert ["can be written by its group" in str(warning.message) for warning in found] == [True] * (said == "warned")


def test_a_new_folder_is_for_its_user_alone(folder: Path) -> None:
    before = os.umask(0)
    try:
        cache = DiskCache(str(folder), SIZE)
        put(cache, "0" * 32, b"x")
    finally:
        os.umask(before)
    made = [folder, *folder.rglob("*")]
    assert [path for path in made if path.name != "gpuflow-cache" and path.stat().st_mode & 0o022] == []


def test_a_time_in_the_future_is_not_believed(folder: Path) -> None:
    cache = DiskCache(str(folder), 3 * ENTRY_ON_DISK)
    later = time.time_ns() + 10**16
    for number in range(2):
        put(cache, f"{number:032x}", bytes_of(number, ENTRY))
    cache.confirm("0" * 32, time.time_ns())
    assert cache.read("0" * 32, None) is not None
    for path in held(folder):
        os.utime(path, ns=(later, later))
    assert cache.read(f"{1:032x}", None) is None, "its server is asked again"
    put(cache, f"{2:032x}", bytes_of(2, ENTRY))
    put(cache, f"{3:032x}", bytes_of(3, ENTRY))
    assert cache.read(f"{1:032x}", bytes(16)) is None, "it is the first to make room"


def test_what_is_kept_is_of_the_version_that_the_answer_names(
    server: FileServer, read_all: ReadAll, folder: Path
) -> None:
    """The server's answer to HEAD is of another version than that to GET, as while copies of a server change."""
    old, new, is_old = b"old" * 100, b"new" * 100, [True]

    def answer(handler: BaseHTTPRequestHandler) -> bool:
        if handler.path != "/1.jpg":
            return False
        data = old if handler.command == "GET" and is_old[0] else new
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.send_header("ETag", f'"{data[:3].decode()}"')
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(data)
        return True

    server.outage = answer
    server.files["/list.csv"] = b"1.jpg,0\n"
    found = []
    for is_old[0] in (True, False, False):
        source, storage = opened("listing", server.url, folder)
        found += [*read_all(source), storage.counts()["hits"]]
        source.close()
    assert found == [old, 0, new, 0, new, 1]


def test_on_other_file_systems_what_changes_meanwhile_is_not_kept(
    memory: fsspec.AbstractFileSystem, read_all: ReadAll, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe({"/photos/a/1.jpg": b"old" * 100})
    real = type(memory).cat_file

    def change(self: Any, path: str, **start_and_end: Any) -> Any:
        data = real(self, path, **start_and_end)
        memory.pipe({"/photos/a/1.jpg": b"new" * 100})
        return data

    monkeypatch.setattr(type(memory), "cat_file", change)
    source, _ = opened("folder", "memory:/", folder)
    assert read_all(source) == [b"old" * 100]
    assert held(folder) == []
