"""The three sources on remote file systems: in memory, and on a server that may fail."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec
import numpy as np
import pytest
from numpy.typing import NDArray

from gpuflow.errors import ServerFault, SourceError
from gpuflow.sources import is_read_remotely, open_source, source_spec, subset
from gpuflow.sources.storage import RemoteStorage, time_limit
from gpuflow.sources.storage.http import TimeLimits, delay_before, options_of
from gpuflow.sources.storage.remote import RequestLimit
from tests.sources.conftest import FileServer, ReadAll
from tests.texts import outline

MakeTar = Callable[..., bytes]

FILES = {"/photos/b/2.jpg": b"b2", "/photos/a/1.jpg": b"a1", "/photos/a/z/3.png": b"a3", "/photos/a/note.txt": b"x"}


@pytest.fixture(autouse=True)
def short_limit() -> Iterator[None]:
    with time_limit(2.0):
        yield


def new_array(size: int) -> NDArray[np.uint8]:
    return np.empty(size, np.uint8)


def raised(**fields: object) -> SourceError:
    with pytest.raises(SourceError) as caught:
        open_source(source_spec(**fields))
    return caught.value


def refused(**fields: object) -> str:
    return outline(raised(**fields))


def test_chained_file_systems_are_refused() -> None:
    url = "zip://photos::memory://x.zip"
    assert refused(folder=url) == url


def test_a_file_system_that_cannot_be_connected_to() -> None:
    """fsspec's connects while it is made, and its errors have no common base."""
    assert str(raised(folder="ftp://127.0.0.1:1/photos")).startswith("ftp://127.0.0.1:1/photos cannot be opened: ")


# In memory.


def test_folder_in_memory(memory: fsspec.AbstractFileSystem, read_all: ReadAll) -> None:
    memory.pipe({**FILES, "/photos/top.jpg": b"no class"})
    source = open_source(source_spec(folder="memory://photos/"))
    assert [source.path(i) for i in range(3)] == [
        f"memory://photos/{name}" for name in ("a/1.jpg", "a/z/3.png", "b/2.jpg")
    ]
    assert source.labels.tolist() == [0, 0, 1]
    assert source.classes == ("a", "b")
    assert read_all(source, [2, 0, 1]) == [b"b2", b"a1", b"a3"]
    unlabelled = open_source(source_spec(folder="memory://photos", fields={"image": {}}))
    assert read_all(unlabelled, [0, 1, 2, 3]) == [b"no class", b"a1", b"a3", b"b2"]
    memory.rm("/photos/a/1.jpg")
    memory.pipe("/photos/b/2.jpg", b"")
    assert read_all(source) == ["no such file", b"a3", "empty file"]
    assert read_all(source, []) == []
    source.close()


def test_folder_errors_in_memory(memory: fsspec.AbstractFileSystem) -> None:
    assert refused(folder="memory://none") == "memory://none, got none (0 files)"
    memory.pipe({"/photos/1.jpg": b"x"})
    assert refused(folder="memory://photos") == "memory://photos, got none (1 files)"
    memory.pipe({"/photos/a/1.txt": b"x"})
    assert refused(folder="memory://photos") == "memory://photos/a, got none"


def test_listing_in_memory(memory: fsspec.AbstractFileSystem, read_all: ReadAll, tmp_path: Path) -> None:
    memory.pipe({**FILES, "/photos/list.csv": b"b/2.jpg,1\nmemory://photos/a/1.jpg,0\n"})
    source = open_source(source_spec(listing="memory://photos/list.csv"))
    assert [source.path(0), source.path(1)] == ["memory://photos/b/2.jpg", "memory://photos/a/1.jpg"]
    assert read_all(source) == [b"b2", b"a1"]
    memory.pipe({"/list.csv": b"photos/b/2.jpg,1\n"})
    source = open_source(source_spec(listing="memory://list.csv"))
    assert source.path(0) == "memory://photos/b/2.jpg"
    assert read_all(source) == [b"b2"]
    (tmp_path / "list.csv").write_text("b/2.jpg,1\n")
    source = open_source(source_spec(listing=str(tmp_path / "list.csv"), root="memory://photos"))
    assert read_all(source) == [b"b2"]
    assert refused(listing="memory://photos/lst.csv") == "memory://photos/lst.csv"
    memory.pipe("/photos/list.csv", b"b/2.jpg,1\nb/2.jpg,-1\n")
    assert refused(listing="memory://photos/list.csv") == "memory://photos/list.csv:2, got -1"


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
    source = open_source(source_spec(tar="memory://shards/{0..2}.tar"))
    assert len(list((cache_home / "gpuflow").iterdir())) == 1
    assert source.shard_sizes == (4, 4, 4)
    assert source.path(5) == "memory://shards/1.tar/1.jpg"
    assert read_all(source, [11, 0, 5]) == [b"2/3", b"0/0", b"1/1"]
    assert open_source(source_spec(tar="memory://shards/{0..2}.tar")).labels.tolist() == source.labels.tolist()
    memory.pipe("/shards/1.tar", memory.cat("/shards/1.tar")[:1538])
    memory.rm("/shards/2.tar")
    assert read_all(source, [4, 8, 0]) == [b"1/0", "no such file", b"0/0"]
    with pytest.raises(SourceError) as caught:
        read_all(source, [5])
    assert outline(caught.value) == "memory://shards/1.tar"
    assert refused(tar="memory://shards/{0..2}.tar") == "memory://shards/2.tar"


# On a server.


def test_folder_on_a_server(server: FileServer, read_all: ReadAll) -> None:
    server.files.update(FILES)
    source = open_source(source_spec(folder=f"{server.url}/photos"))
    assert [source.path(i) for i in range(3)] == [
        f"{server.url}/photos/{name}" for name in ("a/1.jpg", "a/z/3.png", "b/2.jpg")
    ]
    assert read_all(source, [2, 1, 0]) == [b"b2", b"a3", b"a1"]


@pytest.mark.parametrize("start", ["", "./"])
def test_a_folder_on_a_server_whose_pages_link_in_other_ways(start: str, server: FileServer, read_all: ReadAll) -> None:
    """Caddy's pages link to `./1.jpg` and to all directories above, those of npm's http-server to `./../`."""
    server.files.update(FILES)
    server.start = start
    server.above = (
        '<a href="../../">up</a><a href="./../">up</a><a href="./">here</a><a href="?sort=name">by name</a>'
        f"<A class=x HREF='{server.url}/photos/a/'>a</A><a href=/photos/b/>b</a><link href=/photos/c/>"
    )
    source = open_source(source_spec(folder=f"{server.url}/photos"))
    assert [source.path(i) for i in range(3)] == [
        f"{server.url}/photos/{name}" for name in ("a/1.jpg", "a/z/3.png", "b/2.jpg")
    ]
    assert read_all(source, [2, 1, 0]) == [b"b2", b"a3", b"a1"]


def test_a_folder_on_a_server_has_the_labels_of_the_same_folder_here(
    server: FileServer, read_all: ReadAll, tmp_path: Path
) -> None:
    """A server's pages name files percent-encoded, in another order; Apache encodes no apostrophes or ampersands."""
    names = [
        *("Zoo/1.jpg", "a b/1.jpg", "a+b/1.jpg", "a/1.jpg", "z/1.jpg", "\u00e9t\u00e9/1.jpg", "\u732b/1.jpg"),
        *("z/\u00e9/1.jpg", "z/zz/1.jpg", "z/100%.jpg", "z/#1?.jpg", "z/\u00e9.JPG", "caf\udce9/1.jpg"),
        *("salt & pepper/1.jpg", "salt & pepper/a&b.jpg", "z/&amp;.jpg", "child's toy/it's 1.jpg"),
    ]
    for name in names:
        file = tmp_path / "photos" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.fsencode(name))
        server.files["/photos/" + quote(os.fsencode(name), safe="/&;'")] = os.fsencode(name)
    here = open_source(source_spec(folder=str(tmp_path / "photos")))
    there = open_source(source_spec(folder=f"{server.url}/photos"))
    assert there.classes == here.classes
    assert there.labels.tolist() == here.labels.tolist()
    assert read_all(there) == read_all(here)
    assert there.path(len(there) - 1) == f"{server.url}/photos/%E7%8C%AB/1.jpg"


@pytest.mark.parametrize("form", ["local", "remote", "with an absolute row", "with fields", "coco"])
def test_relative_paths_of_a_listing_are_names_of_files_on_a_server(
    form: str, server: FileServer, read_all: ReadAll, tmp_path: Path
) -> None:
    """The marks that would end a URL's path, or begin an escape, are percent-encoded; a URL stays as written."""
    names = ["a/#1?.jpg", "a/100%.jpg", "a/b%20c.jpg", "a b+\u00e9&.jpg"]
    for name in names:
        server.files["/photos/" + quote(name, safe="/&+")] = name.encode()
    rows = "".join(f"{name},0\n" for name in names)
    kinds: dict[str, Any]
    if form == "remote":
        server.files["/photos/list.csv"] = rows.encode()
        kinds = {"listing": f"{server.url}/photos/list.csv"}
    elif form == "coco":
        images = [{"id": i, "file_name": name, "width": 1, "height": 1} for i, name in enumerate(names)]
        file = tmp_path / "instances.json"
        file.write_text(json.dumps({"images": images, "annotations": [], "categories": []}))
        kinds = {"coco": str(file), "images": f"{server.url}/photos"}
    else:
        whole = form == "with an absolute row"
        rows += f"{server.url}/photos/a/b%2520c.jpg,0\n" * whole
        names += ["a/b%20c.jpg"] * whole
        (tmp_path / "list.csv").write_text("path,label\n" + rows)
        fields = {"image": {"column": "path"}, "label": None} if form == "with fields" else {}
        kinds = {"listing": str(tmp_path / "list.csv"), "root": f"{server.url}/photos/", "fields": fields}
    source = open_source(source_spec(**kinds))
    assert read_all(source) == [name.encode() for name in names]
    assert source.path(0) == f"{server.url}/photos/a/%231%3F.jpg"


def test_names_on_other_file_systems_are_taken_as_they_are(memory: fsspec.AbstractFileSystem) -> None:
    memory.pipe({"/photos/%C3%A9/1.jpg": b"x", "/photos/z/1.jpg": b"x"})
    assert open_source(source_spec(folder="memory://photos")).classes == ("%C3%A9", "z")


def test_a_directory_that_a_server_does_not_list_is_an_error(server: FileServer) -> None:
    """Without it, its images would be missing without an error."""
    server.files.update(FILES)
    server.status = 403
    server.failures["/photos/a/z"] = 1000
    assert refused(folder=f"{server.url}/photos") == f"{server.url}/photos/a/z"
    server.failures.clear()
    server.gone.add("/photos/a/z")
    assert refused(folder=f"{server.url}/photos") == f"{server.url}/photos/a/z"


def test_directories_of_a_server_without_end(server: FileServer) -> None:
    """As a link to its own parent makes them."""
    server.files.update(FILES)
    server.endless = "/photos/a"
    assert refused(folder=f"{server.url}/photos").startswith(f"{server.url}/photos/a/up/up/up")


def test_requests_to_a_server_begin_few_at_a_time(server: FileServer) -> None:
    """A server with a short queue of connections drops what comes all at once, and each is tried again much later."""
    server.files.update({f"/{i}.jpg": b"x" for i in range(128)})
    server.files["/list.csv"] = "".join(f"{i}.jpg,0\n" for i in range(128)).encode()
    source = open_source(source_spec(listing=f"{server.url}/list.csv"))
    server.seconds = 0.02
    with ThreadPoolExecutor(8) as threads:
        payloads = list(threads.map(lambda i: source.read(range(i, 128, 8), new_array), range(8)))
    assert all(payload.errors == [None] * 16 for payload in payloads)
    assert server.most_at_once <= 16 + 128 // 16, "16 at first, and one more each time that as many were answered"


def test_the_limit_of_requests_grows_with_answers_and_halves_under_overload() -> None:
    limit = RequestLimit()
    for expected in (17, 18, 19):
        with limit.requests(limit.limit) as (count, failed):
            assert count == limit.limit
        assert limit.limit == expected
    with limit.requests(10) as (some, _), limit.requests(100) as (rest, failed):
        assert (some, rest) == (10, 9)
        failed.append(TimeoutError())
    assert limit.limit == 10, "9, and one more for the 10 that were answered"
    for _ in range(10):
        with limit.requests(1) as (_, failed):
            failed.append(ConnectionRefusedError())
    assert limit.limit == 1
    for _ in range(100):
        with limit.requests(1000):
            pass
    assert limit.limit == 101
    with pytest.raises(KeyError), limit.requests(1):
        raise KeyError
    with limit.requests(1000) as (count, _):
        assert count == limit.limit


def test_an_overloaded_server_gets_fewer_requests(server: FileServer, read_all: ReadAll) -> None:
    server.files.update({f"/{i}.jpg": b"x" for i in range(16)})
    server.files["/list.csv"] = "".join(f"{i}.jpg,0\n" for i in range(16)).encode()
    source = open_source(source_spec(listing=f"{server.url}/list.csv"))
    assert isinstance(source.storage, RemoteStorage)
    server.status = 503
    server.failures["/3.jpg"] = 1
    assert read_all(source) == [b"x"] * 16
    assert source.storage._limit.limit == 8
    server.status = 500
    server.failures["/3.jpg"] = 1
    assert read_all(source) == [b"x"] * 16
    assert source.storage._limit.limit == 10, "a 500 for one file is no overload"


def test_a_connection_has_a_limit_of_time_under_the_users_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    timeout = options_of(TimeLimits(120.0))["client_kwargs"]["timeout"]
    assert (timeout.sock_connect, timeout.sock_read, timeout.total) == (5, 30, 300)
    assert options_of(TimeLimits(8.0))["client_kwargs"]["timeout"].sock_read == 2
    monkeypatch.setitem(fsspec.config.conf, "https", {"client_kwargs": {"timeout": 7, "trust_env": True}})
    assert options_of(TimeLimits(8.0)) == {"client_kwargs": {"timeout": 7, "trust_env": True}}


def test_a_server_that_fails_for_a_while(server: FileServer, read_all: ReadAll) -> None:
    server.files.update({f"/{i}.jpg": str(i).encode() for i in range(20)})
    server.files["/list.csv"] = "".join(f"{i}.jpg,0\n" for i in range(20)).encode()
    server.failures.update({"/list.csv": 2, "/3.jpg": 1, "/5.jpg": 3})
    source = open_source(source_spec(listing=f"{server.url}/list.csv"))
    assert read_all(source) == [str(i).encode() for i in range(20)]
    assert (server.requests["/3.jpg"], server.requests["/5.jpg"], server.requests["/6.jpg"]) == (2, 4, 1)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (400, "its server answered 400 Bad Request"),
        (401, "its server answered 401 Unauthorized"),
        (403, "its server answered 403 Forbidden"),
        (404, "no such file"),
        (410, "no such file"),
        (451, "its server answered 451 Unavailable For Legal Reasons"),
    ],
)
def test_what_a_server_forbids_or_does_not_have_is_not_asked_for_again(
    server: FileServer, make_tar: MakeTar, read_all: ReadAll, status: int, reason: str
) -> None:
    """Neither images, nor listings, nor shards, nor the pages of directories."""
    server.files.update({"/photos/a/1.jpg": b"1", "/list.csv": b"photos/a/1.jpg,0\n", "/0.tar": make_tar([])})
    source = open_source(source_spec(listing=f"{server.url}/list.csv"))
    server.requests.clear()
    server.status = status
    server.failures.update(dict.fromkeys(("/photos/a/1.jpg", "/list.csv", "/0.tar", "/photos/a"), 1000))
    assert read_all(source) == [reason]
    for kind, name, path in (("listing", "list.csv", ""), ("tar", "0.tar", ""), ("folder", "photos", "/a")):
        error = raised(**{kind: f"{server.url}/{name}"})
        assert outline(error) == f"{server.url}/{name}{path}" and f": {reason};" in str(error)
    paths = ("/photos/a/1.jpg", "/list.csv", "/0.tar", "/photos/a")
    assert [server.requests[path] for path in paths] == [1] * 4


def test_a_server_that_is_gone_is_no_fault_of_a_sample(server: FileServer, make_tar: MakeTar) -> None:
    server.files.update({"/1.jpg": b"1", "/list.csv": b"1.jpg,0\n"})
    source = open_source(source_spec(listing=f"{server.url}/list.csv"))
    server.close()
    for read in (
        lambda: source.read([0], new_array),
        lambda: open_source(source_spec(listing=f"{server.url}/list.csv")),
        lambda: open_source(source_spec(tar=f"{server.url}/0.tar")),
        lambda: open_source(source_spec(folder=f"{server.url}/photos")),
    ):
        begun = time.monotonic()
        with pytest.raises(
            ServerFault, match=rf"{server.url}: .*Cannot connect.*; tried for 1.* as run.timeout_s = 2 "
        ):
            read()
        assert 1.4 <= time.monotonic() - begun < 2


def test_tar_on_a_server(server: FileServer, make_tar: MakeTar, read_all: ReadAll) -> None:
    members = [("1.jpg", b"one" * 500), ("1.cls", b"0"), ("2.jpg", b"two" * 500), ("2.cls", b"1")]
    server.files.update({"/0.tar": make_tar(members), "/1.tar": make_tar(members)})
    source = open_source(source_spec(tar=f"{server.url}/{{0..1}}.tar"))
    assert source.shard_sizes == (2, 2)
    assert read_all(source, [3, 0]) == [b"two" * 500, b"one" * 500]
    server.failures["/1.tar"] = 2
    assert read_all(source) == [b"one" * 500, b"two" * 500] * 2
    whole = server.files["/0.tar"]
    server.files["/0.tar"] = whole[:4000]
    with pytest.raises(SourceError) as caught:
        read_all(source)
    assert outline(caught.value) == f"{server.url}/0.tar"
    server.files["/0.tar"] = whole
    server.ranges = False
    with pytest.raises(SourceError) as caught:
        read_all(source)
    assert outline(caught.value) == f"{server.url}/0.tar, got the whole file for a part of it"
    assert refused(tar=f"{server.url}/{{0..1}}.tar") == f"{server.url}/0.tar, got the whole file for a part of it"


def test_a_damaged_tar_on_a_server(server: FileServer, make_tar: MakeTar) -> None:
    server.files["/0.tar"] = make_tar([("1.jpg", b"one")])
    assert refused(tar=f"{server.url}/0.tar") == f"{server.url}/0.tar/1.jpg, got none"
    server.files["/0.tar"] = b"compressed" * 100
    assert refused(tar=f"{server.url}/0.tar") == f"{server.url}/0.tar, got a file that starts with b'compress'"


# Processes.


def test_the_opened_source_says_whether_it_is_read_remotely(memory: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    memory.pipe(FILES)
    (tmp_path / "list.csv").write_text("a/1.jpg,0\nb/2.jpg,1\n")
    (tmp_path / "urls.csv").write_text("memory://photos/a/1.jpg,0\nmemory://photos/b/2.jpg,1\n")
    here, urls = str(tmp_path / "list.csv"), str(tmp_path / "urls.csv")
    for spec, expected in (
        (source_spec(listing=here), False),
        (source_spec(listing=here, root="memory://photos"), True),
        (source_spec(listing=urls, split={"train": 0.5}), True),
        (source_spec(folder="memory://photos"), True),
    ):
        source = open_source(spec)
        assert is_read_remotely(source) == expected
        assert is_read_remotely(subset(source, spec, "train")) == expected


def test_a_remote_storage_does_not_go_to_another_process(memory: fsspec.AbstractFileSystem) -> None:
    memory.pipe(FILES)
    with pytest.raises(TypeError, match="are read by the process that opened them"):
        pickle.dumps(open_source(source_spec(folder="memory://photos")))


# What is not there.


def test_unknown_scheme() -> None:
    message = str(raised(folder="nosuch://photos"))
    assert message.startswith("nosuch://photos cannot be opened: Protocol not known: nosuch")
    assert message.endswith("; check its scheme and what it needs")


def test_processes_wait_for_a_server_for_different_times_which_grow() -> None:
    for attempt, longest in ((1, 0.1), (3, 0.4), (50, 5.0)):
        found = {delay_before(attempt) for _ in range(50)}
        assert len(found) > 40
        assert longest / 2 <= min(found) <= max(found) <= longest


def test_without_fsspec() -> None:
    script = """
import sys
sys.modules["fsspec"] = None
from gpuflow.errors import MissingExtra
from gpuflow.sources import open_source, source_spec
try:
    open_source(source_spec(folder="memory://photos"))
except MissingExtra as missing:
    assert str(missing) == (
        "reading memory://photos needs fsspec, which is not installed; pip install 'gpuflow[remote]'"
    ), missing
else:
    raise AssertionError("nothing was raised")
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])
