"""Services for tests: in this process behind a real socket, or as separate processes that get real signals."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, final

import requests

from gpuflow import cli
from gpuflow.config import ModelSpec
from gpuflow.engines import Engine
from gpuflow.serve.http.app import RequestLimits, Service, create_app
from gpuflow.serve.http.server import make_server, run
from gpuflow.serve.predictor import Predictor
from gpuflow.torchpipe.graph import PREDICT, chain
from tests.datasets import VAL, Entries, program
from tests.serve.fakes import CLASSES, FakeEngine, Gate, Nap

ROOT = Path(__file__).parents[2]
SECONDS = 60.0


def predictor_of(
    engine: Engine,
    *,
    stages: Entries = VAL,
    classes: tuple[str, ...] | None = CLASSES,
    threads: int = 1,
    one_node: bool = False,
    timeout_ms: float = 2.0,
) -> Predictor:
    """A predictor around a fake engine. one_node: preprocessing and model are one node, as on a GPU."""
    folded = program(stages)
    model = ModelSpec(file="x.pt", batch=engine.batch, timeout_ms=timeout_ms)
    graph = chain(folded, model, origin="x.yaml", threads=threads, device="cpu")
    if one_node:
        first, last = graph.nodes.values()
        together = {**first, **last, "backend": PREDICT, "patience": str(round(timeout_ms))}
        graph = replace(graph, nodes={"serve": together})
    return Predictor(graph, [engine], image=folded.result, pipeline=folded.pipeline, classes=classes)


@final
@dataclass(frozen=True, kw_only=True)
class Live:
    """A running service."""

    url: str
    service: Service
    predictor: Predictor | None = None

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ask(self, data: Any, path: str = "/predict", **headers: str) -> requests.Response:
        """Post a body."""
        sent = {"Content-Type": "image/jpeg"} | {name.replace("_", "-"): value for name, value in headers.items()}
        return requests.post(self.url + path, data=data, headers=sent, timeout=SECONDS)

    def form(self, *files: bytes, path: str = "/predict") -> requests.Response:
        """Post a form of files."""
        parts = [(f"file{i}", (f"{i}.jpg", data)) for i, data in enumerate(files)]
        return requests.post(self.url + path, files=parts, timeout=SECONDS)

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=SECONDS)

    def connect(self, text: str = "", body: bytes = b"") -> socket.socket:
        """A connection on which the lines of a request, and part of its body, have been sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)
        if text:
            lines = [*text.strip().split("\n"), "Host: x", "", ""]
            connection.sendall("\r\n".join(lines).encode() + body)
        return connection

    @property
    def queue_length(self) -> float:
        """By HTTP, because another thread could count an image twice."""
        return queue_length(self.url)


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition was never true"
        time.sleep(0.005)


def queue_length(url: str) -> float:
    lines = requests.get(f"{url}/metrics", timeout=SECONDS).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("gpuflow_queue_length "))


@contextmanager
def served(
    predictor: Predictor | Future[Predictor] | Engine,
    limits: RequestLimits | None = None,
    *,
    cors: Sequence[str] = (),
) -> Iterator[Live]:
    """A service on a thread, behind uvicorn. For an engine a predictor is made, and closed at the end."""
    own = None
    if not isinstance(predictor, (Predictor, Future)):
        predictor = own = predictor_of(predictor)
    app = create_app(predictor, limits if limits is not None else RequestLimits(), cors=cors)
    server = make_server(app, access_log=False, log_config=None)
    server.config.timeout_graceful_shutdown = 2
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    wait(lambda: server.started)
    port = listener.getsockname()[1]
    try:
        known = predictor if isinstance(predictor, Predictor) else None
        yield Live(url=f"http://127.0.0.1:{port}", service=app.state.service, predictor=known)
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        assert not thread.is_alive()
        if own is not None:
            own.close()


def answer_of(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer on a connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _more(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    while len(body) < int(headers["content-length"]):
        body += _more(connection)
    return int(first.split()[1]), headers, body


def _more(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    assert data, "the connection was closed before the answer was whole"
    return data


# --- processes --------------------------------------------------------------------------------------------------------


@final
class ServiceStarter:
    """Starts services as separate processes, quickly: a parent process that has imported everything forks them."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._children = directory, 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "tests.serve.services"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, *command: str) -> Process:
        """Run `gpuflow` with these arguments, or one of SERVICES."""
        self._children += 1
        log = self._directory / f"{self._children}.log"
        log.touch()
        pid = self._send(command=command, log=str(log))
        return Process(pid, log, lambda: self._send(wait=pid))

    def _send(self, **order: Any) -> int:
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.write(json.dumps(order) + "\n")
        self._parent.stdin.flush()
        return int(self._parent.stdout.readline())

    def close(self) -> None:
        self._parent.communicate(timeout=SECONDS)


@final
class Process:
    """A service as a process. Its first line has its address."""

    def __init__(self, pid: int, log: Path, wait: Callable[[], int]) -> None:
        self._pid, self._log, self._wait = pid, log, wait
        self._code: int | None = None

    @property
    def lines(self) -> list[str]:
        """Its lines on stdout and stderr."""
        return self._log.read_text().splitlines()

    @property
    def url(self) -> str:
        """Its address; waits until it listens."""
        wait(lambda: "\n" in self._log.read_text())
        assert " at http://" in self.lines[0], self.lines
        return self.lines[0].partition(" at ")[2].partition(";")[0]

    def ready(self) -> Self:
        wait(lambda: requests.get(f"{self.url}/readyz", timeout=SECONDS).ok)
        return self

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        os.kill(self._pid, number)

    def wait(self) -> int:
        """The exit code."""
        if self._code is None:
            self._code = self._wait()
        return self._code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the process if a test failed before it ended."""
        if self._code is None:
            self.signal(signal.SIGKILL)
            self.wait()


def _slow_model() -> Predictor:
    return predictor_of(FakeEngine(before=Nap(0.15), batch=8))


def _hanging_model() -> Predictor:
    return predictor_of(FakeEngine(before=Gate()))


GATE = Gate()
"""Of the model that waits: SIGUSR1 opens it."""


def _waiting_model() -> Predictor:
    return predictor_of(FakeEngine(before=GATE, batch=8))


def _endless_load() -> Predictor:
    time.sleep(600)
    raise AssertionError


SERVICES: dict[str, tuple[Callable[[], Predictor], RequestLimits]] = {
    "model that waits for SIGUSR1": (_waiting_model, RequestLimits(max_body_bytes=1_000_000)),
    "slow model": (_slow_model, RequestLimits()),
    "hanging model": (_hanging_model, RequestLimits()),
    "hanging model, timeout 1 s": (_hanging_model, RequestLimits(timeout_s=1.0)),
    "endless load": (_endless_load, RequestLimits()),
    "endless load under nohup": (_endless_load, RequestLimits()),
    "few files": (_slow_model, RequestLimits()),
    "slow model, log of one line": (_slow_model, RequestLimits()),
}


class _Report:
    """Prints lines. most: how many; further ones fail as on a full disk."""

    def __init__(self, most: int | None) -> None:
        self._left = most

    def __call__(self, text: str) -> None:
        if self._left is not None:
            if self._left == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            self._left -= 1
        print(text, flush=True)


FILES = {"few files": 160}
"""How many files some services may open."""


def parent() -> None:
    """Read orders from stdin, write numbers to stdout. Forks children; those that run the command `gpuflow` return."""
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            _, status = os.waitpid(order["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        if (pid := os.fork()) == 0:
            log = os.open(order["log"], os.O_WRONLY | os.O_APPEND)
            for descriptor in (1, 2):
                os.dup2(log, descriptor)
            signal.signal(signal.SIGUSR1, lambda *_: GATE.open())
            sys.argv = ["gpuflow", *order["command"]]
            nohup = sys.argv[1].endswith("under nohup")
            signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
            if sys.argv[1] in SERVICES:
                load, limits = SERVICES[sys.argv[1]]
                if sys.argv[1] in FILES:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES[sys.argv[1]],) * 2)
                most = 1 if sys.argv[1].endswith("log of one line") else None
                run(load, name="x.yaml", port=0, limits=limits, report=_Report(most))
            return cli.main()
        print(pid, flush=True)


if __name__ == "__main__":
    parent()
