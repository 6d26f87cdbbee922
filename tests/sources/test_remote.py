"""The three sources on remote file systems: in memory, and on a server that may fail."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from gpuflow.errors import SourceError
from gpuflow.sources import SourceSpec, open_source
from tests.sources.conftest import FileServer, ReadAll

MakeTar = Callable[..., bytes]

FILES = {"/photos/b/2.jpg": b"b2", "/photos/a/1.jpg": b"a1", "/photos/a/z/3.png": b"a3", "/photos/a/note.txt": b"x"}


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    def clear() -> None:
        system.store.clear()
        system.pseudo_dirs[:] = [""]

    system = fsspec.filesystem("memory")
    clear()  # of what other files' tests left there
    yield system
    clear()


def refused(**fields: object) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(SourceSpec(**fields))  # type: ignore[arg-type]
    return str(caught.value)


# In memory.


def test_folder_in_memory(memory: fsspec.AbstractFileSystem, read_all: ReadAll) -> None:
    memory.pipe({**FILES, "/photos/top.jpg": b"no class"})
    source = open_source(SourceSpec(folder="memory://photos/"))
    assert [source.path(i) for i in range(3)] == [
        f"memory://photos/{name}" for name in ("a/1.jpg", "a/z/3.png", "b/2.jpg")
    ]
    assert source.labels.tolist() == [0, 0, 1]
    assert source.classes == ("a", "b")
    assert read_all(source, [2, 0, 1]) == [b"b2", b"a1", b"a3"]
    memory.rm("/photos/a/1.jpg")
    memory.pipe("/photos/b/2.jpg", b"")
    assert read_all(source) == ["no such file", b"a3", "empty file"]
    assert read_all(source, []) == []
    source.close()


def test_folder_errors_in_memory(memory: fsspec.AbstractFileSystem) -> None:
    assert refused(folder="memory://none") == (
        "memory://none: must hold one directory per class, got none (0 files); check the address"
    )
    memory.pipe({"/photos/1.jpg": b"x"})
    assert refused(folder="memory://photos") == (
        "memory://photos: must hold one directory per class, got none (1 files); check the address"
    )
    memory.pipe({"/photos/a/1.txt": b"x"})
    assert refused(folder="memory://photos").startswith("memory://photos/a: a class directory must hold an image (.jpg")


def test_listing_in_memory(memory: fsspec.AbstractFileSystem, read_all: ReadAll, tmp_path: Path) -> None:
    memory.pipe({**FILES, "/photos/list.csv": b"b/2.jpg,1\nmemory://photos/a/1.jpg,0\n"})
    source = open_source(SourceSpec(listing="memory://photos/list.csv"))
    assert [source.path(0), source.path(1)] == ["memory://photos/b/2.jpg", "memory://photos/a/1.jpg"]
    assert read_all(source) == [b"b2", b"a1"]
    memory.pipe({"/list.csv": b"photos/b/2.jpg,1\n"})
    source = open_source(SourceSpec(listing="memory://list.csv"))
    assert source.path(0) == "memory://photos/b/2.jpg"
    assert read_all(source) == [b"b2"]
    (tmp_path / "list.csv").write_text("b/2.jpg,1\n")
    source = open_source(SourceSpec(listing=str(tmp_path / "list.csv"), root="memory://photos"))
    assert read_all(source) == [b"b2"]
    assert refused(listing="memory://photos/lst.csv") == "memory://photos/lst.csv: no such file; check the address"
    memory.pipe("/photos/list.csv", b"b/2.jpg,1\nb/2.jpg,-1\n")
    assert refused(listing="memory://photos/list.csv") == (
        "memory://photos/list.csv:2: label must be >= 0, got -1; number the classes from 0"
    )


def test_tar_in_memory(
    memory: fsspec.AbstractFileSystem, make_tar: MakeTar, read_all: ReadAll, cache_home: Path
) -> None:
    for shard in range(3):
        members = [
            member
            for i in range(4)
            for member in ((f"{i}.jpg", f"{shard}/{i}".encode()), (f"{i}.cls", str(i).encode()))
        ]
        memory.pipe(f"/shards/{shard}.tar", make_tar(members))
    source = open_source(SourceSpec(tar="memory://shards/{0..2}.tar"))
    assert len(list((cache_home / "gpuflow").iterdir())) == 1
    assert source.shard_sizes == (4, 4, 4)
    assert source.path(5) == "memory://shards/1.tar/1.jpg"
    assert read_all(source, [11, 0, 5]) == [b"2/3", b"0/0", b"1/1"]
    assert open_source(SourceSpec(tar="memory://shards/{0..2}.tar")).labels.tolist() == source.labels.tolist()
    memory.pipe("/shards/1.tar", memory.cat("/shards/1.tar")[:1538])
    memory.rm("/shards/2.tar")
    assert read_all(source, [4, 5, 8, 0]) == [
        *(b"1/0", "empty file", "no such file", b"0/0"),
    ]
    assert refused(tar="memory://shards/{0..2}.tar") == (
        "memory://shards/2.tar: no such file (1 of 3 shards cannot be read); check source.tar"
    )


# On a server.


def test_folder_on_a_server(server: FileServer, read_all: ReadAll) -> None:
    server.files.update(FILES)
    source = open_source(SourceSpec(folder=f"{server.url}/photos"))
    assert [source.path(i) for i in range(3)] == [
        f"{server.url}/photos/{name}" for name in ("a/1.jpg", "a/z/3.png", "b/2.jpg")
    ]
    assert read_all(source, [2, 1, 0]) == [b"b2", b"a3", b"a1"]


def test_a_server_that_fails_for_a_while(server: FileServer, read_all: ReadAll) -> None:
    server.files.update({f"/{i}.jpg": str(i).encode() for i in range(20)})
    server.files["/list.csv"] = "".join(f"{i}.jpg,0\n" for i in range(20)).encode()
    server.failures.update({"/list.csv": 2, "/3.jpg": 1, "/5.jpg": 3})
    source = open_source(SourceSpec(listing=f"{server.url}/list.csv"))
    assert read_all(source) == [str(i).encode() for i in range(20)]
    assert (server.requests["/3.jpg"], server.requests["/5.jpg"], server.requests["/6.jpg"]) == (2, 4, 1)


def test_a_server_that_fails_for_good(server: FileServer, read_all: ReadAll) -> None:
    server.files.update({f"/{i}.jpg": str(i).encode() for i in range(6)})
    server.files["/list.csv"] = "".join(f"{i}.jpg,0\n" for i in range(6)).encode()
    source = open_source(SourceSpec(listing=f"{server.url}/list.csv"))
    server.failures["/2.jpg"] = 1000
    del server.files["/4.jpg"]
    start = time.monotonic()
    results = read_all(source)
    assert time.monotonic() - start < 30
    assert results == [
        *(b"0", b"1"),
        f"ClientResponseError: 500, message='Internal Server Error', url='{server.url}/2.jpg'; tried 4 times",
        *(b"3", "no such file", b"5"),
    ]
    assert (server.requests["/2.jpg"], server.requests["/4.jpg"], server.requests["/0.jpg"]) == (4, 1, 1)


def test_a_server_that_is_gone(server: FileServer, read_all: ReadAll) -> None:
    server.files.update({"/1.jpg": b"1", "/list.csv": b"1.jpg,0\n"})
    source = open_source(SourceSpec(listing=f"{server.url}/list.csv"))
    server.close()
    [result] = read_all(source)
    assert isinstance(result, str)
    assert "Cannot connect to host" in result or "Server disconnected" in result
    assert result.endswith("; tried 4 times")


def test_tar_on_a_server(server: FileServer, make_tar: MakeTar, read_all: ReadAll) -> None:
    members = [("1.jpg", b"one" * 500), ("1.cls", b"0"), ("2.jpg", b"two" * 500), ("2.cls", b"1")]
    server.files.update({"/0.tar": make_tar(members), "/1.tar": make_tar(members)})
    source = open_source(SourceSpec(tar=f"{server.url}/{{0..1}}.tar"))
    assert source.shard_sizes == (2, 2)
    assert read_all(source, [3, 0]) == [b"two" * 500, b"one" * 500]
    server.failures["/1.tar"] = 2
    assert read_all(source) == [b"one" * 500, b"two" * 500] * 2
    server.files["/0.tar"] = server.files["/0.tar"][:4000]
    assert read_all(source)[1] == "its shard ends after 416 of 1500 bytes; it shrank since it was indexed"
    server.ranges = False
    assert read_all(source)[2] == (
        f"its server sent {len(server.files['/1.tar'])} bytes for a range of 1500; it must support range requests"
    )


def test_a_damaged_tar_on_a_server(server: FileServer, make_tar: MakeTar) -> None:
    server.files["/0.tar"] = make_tar([("1.jpg", b"one")])
    assert refused(tar=f"{server.url}/0.tar") == (
        f"{server.url}/0.tar/1.jpg: image must have a label, got none; "
        'add 1.cls, or 1.json with the key "label" or "cls"'
    )
    server.files["/0.tar"] = b"compressed" * 100
    assert refused(tar=f"{server.url}/0.tar") == (
        f"{server.url}/0.tar: must be an uncompressed tar, got a file that starts with b'compress'; "
        "unpack or replace it"
    )


# What is not there.


def test_unknown_scheme() -> None:
    message = refused(folder="nosuch://photos")
    assert message.startswith("nosuch://photos cannot be opened: Protocol not known: nosuch")
    assert message.endswith("; check its scheme and what it needs")


def test_without_fsspec() -> None:
    script = """
import sys
sys.modules["fsspec"] = None
from gpuflow.errors import MissingExtra
from gpuflow.sources import SourceSpec, open_source
try:
    open_source(SourceSpec(folder="memory://photos"))
except MissingExtra as missing:
    assert str(missing) == (
        "reading memory://photos needs fsspec, which is not installed; pip install 'gpuflow[remote]'"
    ), missing
else:
    raise AssertionError("nothing was raised")
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])
