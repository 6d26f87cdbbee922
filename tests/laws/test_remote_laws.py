"""Laws of files behind URLs: every sample arrives, or an error is raised."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import gpuflow
from gpuflow.errors import ServerFault
from gpuflow.sources import KINDS, open_source, source_spec
from gpuflow.sources.storage import time_limit
from tests.datasets import jpeg, nothing_left_behind, write_config
from tests.sources.conftest import FileServer, tar_bytes

SAMPLES = 10
Answer = Callable[[BaseHTTPRequestHandler], bool]


def photos() -> dict[str, bytes]:
    return {f"/photos/{'ab'[i % 2]}/{i}.jpg": jpeg(i % 2, i) for i in range(SAMPLES)}


def shard(numbers: range) -> bytes:
    return tar_bytes([m for i in numbers for m in ((f"{i}.jpg", jpeg(i % 2, i)), (f"{i}.cls", str(i % 2).encode()))])


def files() -> dict[str, bytes]:
    """Each kind of source on a server."""
    rows = "".join(f"{path[1:]},{i % 2}\n" for i, path in enumerate(photos()))
    images = [{"id": i, "file_name": path[8:]} for i, path in enumerate(photos())]
    documents = {"/list.csv": rows, "/coco.json": json.dumps({"images": images, "annotations": [], "categories": []})}
    shards = {f"/{i}.tar": shard(range(5 * i, 5 * i + 5)) for i in (0, 1)}
    return {**photos(), **shards, **{path: text.encode() for path, text in documents.items()}}


BLOCKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "folder": lambda url: {"folder": f"{url}/photos"},
    "listing": lambda url: {"listing": f"{url}/list.csv"},
    "tar": lambda url: {"tar": f"{url}/{{0..1}}.tar"},
    "coco": lambda url: {"coco": f"{url}/coco.json", "images": f"{url}/photos"},
    "mix": lambda url: {"mix": [{"source": {"folder": f"{url}/photos"}}]},
}
REMOTE = [kind for kind in KINDS if kind != "hf"]
"""The others read local files alone."""
CACHED = [kind for kind in REMOTE if "cache" in KINDS[kind].key_fields()]


def status(code: int, **headers: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> bool:
        handler.send_response(code)
        for name, value in {"Content-Length": "0", **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        return True

    return answer


def stalled(handler: BaseHTTPRequestHandler) -> bool:
    """Accepts, and sends nothing."""
    time.sleep(5)
    handler.close_connection = True
    return True


def cut_body(handler: BaseHTTPRequestHandler) -> bool:
    if handler.command == "HEAD":  # which has no body
        return False
    handler.send_response(206 if handler.headers.get("Range") else 200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"x" * 10)
    handler.close_connection = True
    return True


def stalled_body(handler: BaseHTTPRequestHandler) -> bool:
    return cut_body(handler) and stalled(handler)


def no_http(handler: BaseHTTPRequestHandler) -> bool:
    handler.wfile.write(b"go away\r\n\r\n")
    handler.close_connection = True
    return True


FAULTS: dict[str, Answer | None] = {
    "429": status(429),
    "429, Retry-After in seconds": status(429, Retry_After="1"),
    "503, Retry-After as a time": lambda handler: status(503, Retry_After=formatdate(time.time() + 1, usegmt=True))(
        handler
    ),
    "503, Retry-After for ever": status(503, Retry_After="99999999999"),
    "429, Retry-After without sense": status(429, Retry_After="soon"),
    **{str(code): status(code) for code in (408, 425, 500, 501, 502, 503, 504, 520)},
    "stalled": stalled,
    "stalled body": stalled_body,
    "cut body": cut_body,
    "not HTTP": no_http,
    "refused": None,
}


def in_first(seconds: float, fault: Answer) -> Answer:
    until = time.monotonic() + seconds
    return lambda handler: time.monotonic() < until and fault(handler)


@contextmanager
def outage(server: FileServer, fault: Answer | None, seconds: float) -> Iterator[None]:
    """The server has a fault for this time, or is not there; at least until the block ends, if it lasts longer."""
    if fault is None:
        back: list[FileServer] = []
        ended = threading.Event()
        server.close()

        def come_back() -> None:
            if not ended.wait(seconds):
                back.append(FileServer(int(server.url.rpartition(":")[2])))
                back[0].files, back[0].tags = server.files, server.tags

        thread = threading.Thread(target=come_back)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            for other in back:
                other.close()
        return
    server.outage = in_first(seconds, fault)
    yield


@pytest.fixture
def server() -> Iterator[FileServer]:
    running = FileServer()
    running.files, running.tags = files(), True
    yield running
    running.close()


def config_of(tmp_path: Path, source: dict[str, Any], timeout: float, **run: Any) -> Path:
    return write_config(tmp_path / "x.yaml", "", source=source, run={"timeout_s": timeout, **run})


def samples(loader: gpuflow.Loader) -> int:
    return sum(len(batch.indices) for batch in loader)


QUICK = {"listing": ("502", "503, Retry-After as a time", "stalled", "refused")}
"""Faults that are tried in every run of the tests; with other kinds of sources one of them."""
CASES = [
    pytest.param(kind, fault, marks=[] if fault in QUICK.get(kind, ("502",)) else pytest.mark.slow)
    for kind in (*REMOTE, *(f"{kind}, cached" for kind in CACHED))
    for fault in FAULTS
]


def source_of(kind: str, server: FileServer, tmp_path: Path) -> dict[str, Any]:
    kind, _, cached = kind.partition(", ")
    cache = {"cache": {"dir": str(tmp_path / "cache"), "size": "16MiB"}} if cached else {}
    return {**BLOCKS[kind](server.url), **cache}


@pytest.mark.parametrize(("kind", "fault"), CASES)
def test_after_a_fault_of_a_server_every_sample_arrives(
    server: FileServer, kind: str, fault: str, tmp_path: Path
) -> None:
    path = config_of(tmp_path, source_of(kind, server, tmp_path), 6.0)
    with outage(server, FAULTS[fault], 0.5), gpuflow.load(path, "val", device="cpu") as loader:
        if (answer := FAULTS[fault]) is not None:
            server.outage = in_first(0.5, answer)
        assert samples(loader) == SAMPLES
        assert loader.stats()["bad"] == 0


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize(("kind", "fault"), CASES)
def test_a_fault_of_a_server_that_lasts_is_raised(
    server: FileServer, kind: str, fault: str, opened: bool, tmp_path: Path
) -> None:
    path = config_of(tmp_path, source_of(kind, server, tmp_path), 1.5)
    with ExitStack() as stack:
        if not opened:
            stack.enter_context(outage(server, FAULTS[fault], 60))
        try:
            with gpuflow.load(path, "val", device="cpu") as loader:
                stack.enter_context(outage(server, FAULTS[fault], 60))
                assert samples(loader) == SAMPLES
        except ServerFault as raised:
            text = str(raised)
        else:
            assert opened and kind == "tar, cached", "which has read the whole shards for their index"
            text = f"{server.url} run.timeout_s"
        assert server.url in text and "run.timeout_s" in text


@pytest.mark.parametrize("end", ["close", "break"])
def test_a_wait_for_a_server_does_not_hold_up_the_end(
    server: FileServer, end: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked, throttled = threading.Event(), status(503, Retry_After="30")

    def answer(handler: BaseHTTPRequestHandler) -> bool:
        asked.set()
        return throttled(handler)

    path = config_of(tmp_path, BLOCKS["listing"](server.url), 60.0)
    with nothing_left_behind(), gpuflow.load(path, "val", device="cpu") as loader:
        batches = iter(loader)
        next(batches)
        server.outage = answer
        epoch = iter(loader)
        assert asked.wait(30)
        time.sleep(0.5)  # after which it waits for 30 s
        if end == "close":
            loader.close()
        else:
            del epoch, batches
            iter(loader)  # which ends the epoch before
        assert not [text for text in caplog.messages if "stays behind" in text]


class Unavailable(Exception):
    """As a library of a cloud raises it."""

    status_code = 0

    def __init__(self, code: int) -> None:
        self.status_code = code


@pytest.mark.parametrize(
    ("fault", "is_of_the_sample"),
    [
        (ConnectionResetError(), False),
        (TimeoutError(), False),
        (OSError(errno.EIO, "why"), False),
        (RuntimeError("no credit"), False),
        (Unavailable(503), False),
        (Unavailable(429), False),
        (Unavailable(404), True),
        (Unavailable(403), True),
        (FileNotFoundError("x"), True),
        (PermissionError("x"), True),
        (OSError(errno.ENAMETOOLONG, "why"), True),
        (ValueError("no such name"), True),
    ],
    ids=repr,
)
def test_what_is_the_fault_of_a_sample_on_other_file_systems(
    memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch, fault: Exception, is_of_the_sample: bool
) -> None:
    memory.pipe(photos())
    with time_limit(0.5):
        source = open_source(source_spec(folder="memory://photos"))
    real = type(memory).cat_file

    def fail(self: Any, path: str, **start_and_end: Any) -> Any:
        if path.endswith("/4.jpg"):
            raise fault
        return real(self, path, **start_and_end)

    monkeypatch.setattr(type(memory), "cat_file", fail)
    if is_of_the_sample:
        errors = source.read(range(SAMPLES), lambda size: np.empty(size, np.uint8)).errors
        assert [source.path(i)[-6:] for i, error in enumerate(errors) if error] == ["/4.jpg"]
    else:
        with pytest.raises(ServerFault):
            source.read(range(SAMPLES), lambda size: np.empty(size, np.uint8))
