"""A web server on loopback that serves files badly: late, in part, not at all, or not for a while."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, Self, final

Fault = Literal["unavailable", "error", "close", "reset", "cut", "slow"]
FAULTS: tuple[Fault, ...] = ("unavailable", "error", "close", "reset", "cut", "slow")
"""503; 500; the connection closed or reset without an answer; closed in the middle of the body; late by up to 0.3 s."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: clients that close their connection are expected."""


@final
class FaultyStore:
    """Serves `files` with ranges and directory pages. Requests meet faults while `faults_left` allows them.

    faults_left: how many faults each path has left. gone: paths that are not there. down: all of them
    meet a 503. served: requests by what they met.
    """

    def __init__(self, seed: int, files: dict[str, bytes]) -> None:
        self.files = files
        self.faults_left: Counter[str] = Counter()
        self.gone: set[str] = set()
        self.down = False
        self.served: Counter[str] = Counter()
        self._rng, self._lock = random.Random(seed), threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                owner.answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                """Nothing: the tests' output is not a log."""

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="faulty store", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        fault = self._fault(handler.path)
        with self._lock:
            self.served[fault or "sound"] += 1
        if fault == "slow":
            time.sleep(self._rng.uniform(0.0, 0.3))
        if fault in ("close", "reset"):
            handler.close_connection = True
            if fault == "reset":
                handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                handler.connection.close()
            return
        if fault in ("unavailable", "error"):
            return self._send(handler, 503 if fault == "unavailable" else 500, b"")
        data = self.files.get(handler.path)
        if handler.path in self.gone:
            return self._send(handler, 404, b"")
        if data is None:
            page = self._page(handler.path)
            return self._send(handler, 200 if page else 404, page, {"Content-Type": "text/html"})
        status, extra = 200, {"ETag": f'"{hash(data):x}"'}
        if (span := handler.headers.get("Range")) is not None:
            first, last = span.removeprefix("bytes=").split("-")
            start, whole = int(first), len(data)
            data = data[start : int(last) + 1 if last else whole]
            status, extra = 206, {**extra, "Content-Range": f"bytes {start}-{start + len(data) - 1}/{whole}"}
        self._send(handler, status, data, extra, cut=fault == "cut")

    def _fault(self, path: str) -> Fault | None:
        with self._lock:
            if self.down:
                return "unavailable"
            if self.faults_left[path] > 0 and self._rng.random() < 0.7:
                self.faults_left[path] -= 1
                return self._rng.choice(FAULTS)
        return None

    def _send(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        data: bytes,
        headers: dict[str, str] | None = None,
        *,
        cut: bool = False,
    ) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(data)), "Accept-Ranges": "bytes", **(headers or {})}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(data[: len(data) // 2] if cut else data)
        handler.close_connection |= cut

    def _page(self, path: str) -> bytes:
        """Links to what lies right below a directory; nothing where there is no such directory."""
        root = path.rstrip("/") + "/"
        below = sorted({name[len(root) :].partition("/")[::2] for name in self.files if name.startswith(root)})
        links = dict.fromkeys(f'<a href="{name}{"/" if rest else ""}">{name}</a>' for name, rest in below)
        return f"<html><body>{''.join(links)}</body></html>".encode() if links else b""
