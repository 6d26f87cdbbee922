"""Helpers for the tests of sources: a small HTTP server that can fail, and functions that read payloads."""

from __future__ import annotations

import io
import json
import tarfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpuflow.sources import Source

ReadAll = Callable[..., list[bytes | str]]
WriteTar = Callable[..., Path]


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory for every test."""
    home = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@pytest.fixture
def read_all() -> ReadAll:
    """Reads samples: for each its bytes or its error text. Checks the payload's layout."""

    def read(source: Source, indices: Sequence[int] | None = None) -> list[bytes | str]:
        wanted = range(len(source)) if indices is None else indices
        asked: list[int] = []

        def allocate(size: int) -> NDArray[np.uint8]:
            asked.append(size)
            return np.full(size + 7, 255, dtype=np.uint8)

        payload = source.read(wanted, allocate)
        assert len(asked) == 1
        assert len(payload) == len(payload.offsets) == len(payload.errors) == len(wanted)
        results: list[bytes | str] = []
        for i, error in enumerate(payload.errors):
            assert payload.offsets[i] + payload.sizes[i] <= asked[0]
            assert error is None or payload.sizes[i] == 0
            results.append(payload.sample(i).tobytes() if error is None else error)
        return results

    return read


def tar_bytes(members: Sequence[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as archive:
        for name, data in members:
            header = tarfile.TarInfo(name)
            header.size = len(data)
            archive.addfile(header, io.BytesIO(data))
    return stream.getvalue()


def with_columns(kind: str, folder: Path, columns: dict[str, list[Any]]) -> dict[str, Any]:
    """The keys of a source of a kind, csv, jsonl, tar, coco or hf, whose samples have label 0 and these columns."""
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    match kind:
        case "csv":
            lines = ["path,label," + ",".join(columns)]
            lines += [f"{i}.jpg,0," + ",".join(map(str, row.values())) for i, row in enumerate(rows)]
            (folder / "l.csv").write_text("\n".join(lines) + "\n")
            return {"listing": str(folder / "l.csv")}
        case "jsonl":
            lines = [json.dumps({"path": f"{i}.jpg", "label": 0, **row}) for i, row in enumerate(rows)]
            (folder / "l.jsonl").write_text("\n".join(lines))
            return {"listing": str(folder / "l.jsonl")}
        case "tar":
            members = []
            for i, row in enumerate(rows):
                members += [(f"{i}.jpg", b"i"), (f"{i}.json", json.dumps({"label": 0, **row}).encode())]
            (folder / "s.tar").write_bytes(tar_bytes(members))
            return {"tar": str(folder / "s.tar")}
        case "coco":
            images = [{"id": i, "file_name": f"{i}.jpg", **row} for i, row in enumerate(rows)]
            content = {"images": images, "annotations": [], "categories": [{"id": 1, "name": "a"}]}
            (folder / "c.json").write_text(json.dumps(content))
            return {"coco": str(folder / "c.json"), "images": str(folder)}
        case _:
            pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
            parquet = pytest.importorskip("pyarrow.parquet")
            cells = [{"bytes": b"i", "path": f"{i}.jpg"} for i in range(len(rows))]
            parquet.write_table(pa.table({"image": cells, "label": [0] * len(rows), **columns}), folder / "t.parquet")
            return {"hf": str(folder / "t.parquet")}


@pytest.fixture
def make_tar() -> Callable[..., bytes]:
    return tar_bytes


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # a connection that finds a full queue comes again a second later


class FileServer:
    """Serves `files` on loopback, with ranges and directory pages.

    `failures[path]` answers are `status` with the headers `asks` before the file is served; `requests` counts what was
    asked for. Each answer takes `seconds`; `most_at_once` is the most that were under way. Links to files in `gone` are
    dead, and a directory `up` lies in `endless` and in each other directory `up`. With `tags` each file has an ETag of
    its content. An answer to a GET of more than a byte of a file in `held` stops in the middle: it sets `reached`, and
    waits until `go_on` is set. A GET of a file in `replaced` gets what is there, as from a proxy. Links on pages begin
    with `start`, and stand below `above`. `outage` answers requests in place of the server while it returns True.

    port: one that is free; by default any.
    """

    def __init__(self, port: int = 0) -> None:
        self.outage: Callable[[BaseHTTPRequestHandler], bool] = lambda handler: False
        self.files: dict[str, bytes] = {}
        self.failures: dict[str, int] = {}
        self.status = 500
        self.asks: dict[str, str] = {}
        self.gone: set[str] = set()
        self.endless = "nowhere"
        self.start = self.above = ""
        self.ranges = True
        self.tags = False
        self.held: set[str] = set()
        self.replaced: dict[str, bytes] = {}
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.requests: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.seconds, self.most_at_once, self._under_way = 0.0, 0, 0
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with owner.counted():
                    self._serve()

            def _serve(self) -> None:
                if owner.outage(self):
                    return None
                counter = owner.asked if self.command == "HEAD" else owner.requests
                counter[self.path] += 1
                if owner.failures.get(self.path, 0) > 0:
                    owner.failures[self.path] -= 1
                    return self._answer(owner.status, b"", owner.asks)
                data = owner.files.get(self.path)
                if self.path in owner.gone:
                    return self._answer(404, b"")
                if data is None:
                    page = owner.page(self.path)
                    return self._answer(200 if page else 404, page, {"Content-Type": "text/html"})
                if self.command == "GET" and self.path in owner.replaced:
                    return self._answer(200, owner.replaced[self.path])
                tag = {"ETag": f'"{zlib.crc32(data)}"'} if owner.tags else {}
                span = self.headers.get("Range")
                if span is None or not owner.ranges:
                    return self._answer(200, data, tag)
                first, last = (int(end) for end in span.removeprefix("bytes=").split("-"))
                part = data[first : last + 1]
                if not part:
                    return self._answer(416, b"")
                extra = {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(data)}", **tag}
                return self._answer(206, part, extra)

            do_HEAD = do_GET

            def _answer(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET" and self.path in owner.held and len(data) > 1:
                    self.wfile.write(data[: len(data) // 2])
                    self.wfile.flush()
                    owner.reached.set()
                    owner.go_on.wait(60)
                    data = data[len(data) // 2 :]
                if self.command == "GET":
                    with suppress(ConnectionError):  # of a client that was killed
                        self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: the tests' output is not a log."""

        self._server = _Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @contextmanager
    def counted(self) -> Iterator[None]:
        with self._lock:
            self._under_way += 1
            self.most_at_once = max(self.most_at_once, self._under_way)
        time.sleep(self.seconds)
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1

    def page(self, path: str) -> bytes:
        """Links to what lies right below a directory; nothing where there is no such directory."""
        if path.startswith(self.endless):
            return b'<a href="up/">up</a>'
        root = path.rstrip("/") + "/"
        below = sorted({name[len(root) :].partition("/")[::2] for name in self.files if name.startswith(root)})
        links = dict.fromkeys(
            f'<a href="{self.start}{escape(name, quote=False)}{"/" if rest else ""}">{name}</a>' for name, rest in below
        )
        return f"<html><body>{self.above}{''.join(links)}</body></html>".encode() if links else b""

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[FileServer]:
    running = FileServer()
    yield running
    running.close()
