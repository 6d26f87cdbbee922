"""Rounds in which a service is attacked, loses workers and is drained, all at once. See rounds.py.

Honest clients send pictures whose mean colour says which picture it is, so that an answer shows whose it is.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import statistics
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from tests.chaos.accounting import LIMIT_SECONDS, Report, descendants, is_alive, wait_for
from tests.chaos.service import MAX_BODY_BYTES
from tests.chaos.training import Command
from tests.images import encode, jpeg, patch_jpeg, photo, png_bytes, tiny_jpeg

TIMEOUT_S = 30.0
HONEST, REQUESTS = 4, 40
"""Clients at a time, and requests of each before the service is drained."""
_MOST_GROWTH_KIB = 900_000
"""How much memory a process of the service may take beyond what it had when it was ready. The narrow PNG takes 0.24 GB
while it is resized, and each of two threads of a process may be at one, with the bodies of all requests in flight."""
_MOST_LOG_BYTES = 2_000_000
_REFUSED = (400, 408, 413, 415, 422)
_TOLERANCE = 1e-4


# --- pictures and bombs -----------------------------------------------------------------------------------------------


def pictures() -> list[bytes]:
    """Sixteen pictures, no two of one mean colour, in three formats."""
    found = []
    for number in range(16):
        colour = (40 + number % 4 * 55, 40 + number // 4 * 55, 128)
        pixels = np.empty((48, 64, 3), np.uint8)
        pixels[:] = colour
        found.append(jpeg(pixels) if number % 3 == 0 else encode(pixels, ("PNG", "WEBP")[number % 3 - 1]))
    return found


def bombs() -> dict[str, tuple[bytes, dict[str, str]]]:
    """Bodies that claim to be, or would become, much more than they are, and their headers."""
    sound = jpeg(photo(64, 64))
    zeros = zlib.compressobj(9, zlib.DEFLATED, 31)
    gzip = zeros.compress(bytes(50_000_000)) + zeros.flush()
    boundary = "b" * 60
    parts = f'--{boundary}\r\nContent-Disposition: form-data; name="f"; filename="1.jpg"\r\n\r\nx\r\n' * 3000
    return {
        "narrow PNG": (png_bytes(1, 65_500, bytes(4 * 65_500)), {}),
        "huge PNG": (png_bytes(60_000, 60_000, bytes(1000)), {}),
        "huge JPEG": (patch_jpeg(sound, width=65_500, height=65_500), {}),
        "large JPEG": (patch_jpeg(sound, width=3000, height=3000), {}),
        "many components": (tiny_jpeg(64, 64, [(4, 4), (4, 4), (4, 4), (4, 4)]), {}),
        "wide BMP": (b"BM" + struct.pack("<IHHIIiiHH", 1000, 0, 0, 62, 40, 1 << 21, 1 << 9, 1, 1) + bytes(1000), {}),
        "gzip": (gzip, {"Content-Encoding": "gzip"}),
        "form of 3,000 files": (
            f"{parts}--{boundary}--".encode(),
            {"Content-Type": f"multipart/form-data; boundary={boundary}"},
        ),
        "too long": (bytes(MAX_BODY_BYTES + 1), {}),
        "empty": (b"", {}),
    }


# --- requests ---------------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """Status, lower-case headers, the body as JSON."""

    status: int
    headers: dict[str, str]
    content: Any


def head(size: int, headers: dict[str, str] | None = None, path: str = "/predict", method: str = "POST") -> bytes:
    fields = {"Host": "x", "Content-Type": "image/jpeg", "Content-Length": str(size), "Connection": "close"}
    lines = [f"{name}: {value}" for name, value in (fields | (headers or {})).items()]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=3 * TIMEOUT_S)


def answer_on(connection: socket.socket) -> Answer:
    """Read until the service closes the connection. Raises ConnectionError if it does so before the answer is whole."""
    data = b""
    while piece := connection.recv(65_536):
        data += piece
    first, _, body = data.partition(b"\r\n\r\n")
    lines = first.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    if not body or len(body) != int(headers.get("content-length", -1)):
        raise ConnectionError(f"closed after {len(data)} bytes: {data[:200]!r}")
    content = json.loads(body) if headers.get("content-type", "").startswith("application/json") else body
    return Answer(int(lines[0].split()[1]), headers, content)


def ask(port: int, body: bytes, headers: dict[str, str] | None = None, **fields: str) -> Answer:
    with connect(port) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):  # refused before it is sent: the answer is there
            connection.sendall(head(len(body), headers, **fields) + body)
        return answer_on(connection)


def probabilities(answer: Answer) -> list[float]:
    """By the model's output."""
    found = {entry["index"]: entry["probability"] for entry in answer.content["predictions"]}
    return [found[index] for index in range(3)]


# --- the round --------------------------------------------------------------------------------------------------------


@final
class Attack:
    """What all threads of a round share: the service, what is expected of it, what it did."""

    def __init__(self, command: Command, port: int, rng: random.Random) -> None:
        self.command, self.port, self.rng = command, port, rng
        self.pictures = pictures()
        self.expected = [probabilities(ask(port, picture)) for picture in self.pictures]
        self.counts: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.draining, self.over = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def check(self, number: int, answer: Answer) -> None:
        """The answer to a picture: its own, or a refusal that says when to try again."""
        if answer.status == 503:
            assert "retry-after" in answer.headers, answer
            return self.count("refused")
        assert answer.status == 200, f"picture {number}: {answer}"
        apart = max(abs(a - b) for a, b in zip(probabilities(answer), self.expected[number], strict=True))
        assert apart < _TOLERANCE, f"picture {number} has another picture's answer: {answer.content}"
        self.count("answered")

    def honest(self, seed: int) -> None:
        """A client that sends one picture after the other, until the service is drained."""
        rng = random.Random(seed)
        sent = 0
        while not self.over.is_set():
            number, before = rng.randrange(len(self.pictures)), self.draining.is_set()
            start = time.monotonic()
            try:
                answer = ask(self.port, self.pictures[number])
            except OSError as error:
                if not before and not (self.draining.is_set() and isinstance(error, ConnectionRefusedError)):
                    raise AssertionError(f"picture {number} was not answered") from error
                return  # the port is closed by now
            self.check(number, answer)
            if answer.status == 200 and not before:
                with self._lock:
                    self.seconds.append(time.monotonic() - start)
            sent += 1
            if sent == REQUESTS:
                self.count("clients done")
            time.sleep(rng.uniform(0.0, 0.02) if answer.status == 200 else 0.1)

    def flood(self) -> None:
        """Forty connections at once, a picture on each; every one is answered."""
        numbers = [self.rng.randrange(len(self.pictures)) for _ in range(40)]
        with many(self.port, len(numbers)) as connections:
            for number, connection in zip(numbers, connections, strict=True):
                connection.sendall(head(len(self.pictures[number])) + self.pictures[number])
            for number, connection in zip(numbers, connections, strict=True):
                self.check(number, answer_on(connection))
        self.count("floods")

    def bomb(self) -> None:
        """Every bomb once: refused, or decoded within bounds, and nothing else."""
        for name, (body, headers) in bombs().items():
            answer = ask(self.port, body, headers)
            within_limits = (200,) if name in ("narrow PNG", "large JPEG") else ()
            assert answer.status in (*_REFUSED, *within_limits, 503), f"{name}: {answer}"
            self.count("bombs")

    def disconnect(self) -> None:
        """Requests whose clients do not wait for the answer."""
        with many(self.port, 10) as connections:
            for connection in connections:
                connection.sendall(head(len(self.pictures[0])) + self.pictures[0][: self.rng.choice((10, 10**6))])
                if self.rng.random() < 0.5:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.count("disconnects")

    def disturb_worker(self) -> None:
        """Kill a worker process, or stop it for a moment."""
        workers = sorted(descendants(self.command.pid))
        if not workers:
            return
        pid = self.rng.choice(workers)
        with suppress(ProcessLookupError):
            if self.rng.random() < 0.5:
                os.kill(pid, signal.SIGKILL)
                self.count("kills")
            else:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(self.rng.uniform(0.05, 0.5))
                os.kill(pid, signal.SIGCONT)
                self.count("pauses")

    def probe(self) -> None:
        """The service always says that it is alive."""
        assert ask(self.port, b"", path="/healthz", method="GET").status == 200
        self.count("probes")


@contextmanager
def many(port: int, count: int) -> Iterator[list[socket.socket]]:
    """Connections, closed at the end."""
    connections: list[socket.socket] = []
    try:
        for _ in range(count):
            connections.append(connect(port))
        yield connections
    finally:
        for connection in connections:
            connection.close()


def service(seed: int, directory: Path) -> Report:
    """Slow heads, slow bodies, bombs, floods, lost clients and workers, and a drain in the middle of all.

    Every honest request is answered with its own picture's answer or a 503 that says when to try again; memory and the
    log stay bounded; the process ends with code 0 and leaves none behind.
    """
    rng = random.Random(seed)
    with Command(directory / "service.log", "-m", "tests.chaos.service", TIMEOUT_S) as command:
        wait_for(
            lambda: "ready after" in command.text or not command.running, "the service is ready", 4 * LIMIT_SECONDS
        )
        assert command.running, command.text
        attack = Attack(command, int(command.text.partition("http://127.0.0.1:")[2].partition(";")[0]), rng)
        assert len({tuple(round(p, 2) for p in found) for found in attack.expected}) == len(attack.pictures)
        memory = Memory(command.pid)
        started = descendants(command.pid)
        with many(attack.port, 30) as heads, many(attack.port, 10) as bodies, ThreadPoolExecutor(HONEST + 2) as pool:
            for connection in bodies:
                connection.sendall(head(100_000) + bytes(1000))
            watch = pool.submit(memory.watch, attack.over)
            slow = pool.submit(_send_slowly, heads, attack.over)
            clients = [pool.submit(attack.honest, rng.randrange(1 << 30)) for _ in range(HONEST)]
            try:
                _attacks(attack, rng)
                wait_for(
                    lambda: attack.counts["clients done"] == HONEST or any(client.done() for client in clients),
                    "honest clients are answered",
                    4 * LIMIT_SECONDS,
                )
                started |= descendants(command.pid)
                attack.draining.set()
                command.signal(signal.SIGTERM)
                time.sleep(rng.uniform(0.0, 0.3))
                for connection in (*heads, *bodies):
                    connection.close()
                code = command.wait()
            finally:
                attack.draining.set()
                attack.over.set()
            for task in (*clients, watch, slow):
                task.result(LIMIT_SECONDS)
        assert code == 0, command.text[-3000:]
        assert "all requests answered" in command.text, command.text[-3000:]
        assert "Traceback" not in command.text, command.text[-3000:]
        assert command.log.stat().st_size < _MOST_LOG_BYTES
        wait_for(lambda: not any(map(is_alive, started)), "the service's processes end")
        assert memory.growth_kib < _MOST_GROWTH_KIB, f"a process grew by {memory.growth_kib / 1024:.0f} MiB"
    quantiles = statistics.quantiles(attack.seconds, n=100)
    latency = {"tp50_ms": 1000 * quantiles[49], "tp99_ms": 1000 * quantiles[98], "worst_ms": 1000 * max(attack.seconds)}
    counts = {name.replace(" ", "_"): float(count) for name, count in attack.counts.items()}
    return {**counts, **latency, "growth_mb": memory.growth_kib * 1024 / 1e6}


def _attacks(attack: Attack, rng: random.Random) -> None:
    """Each attack a few times, in any order."""
    acts: list[Callable[[], None]] = [attack.bomb, attack.disconnect, attack.probe, attack.flood]
    acts = [*acts * 2, *[attack.disturb_worker] * 3]
    rng.shuffle(acts)
    for act in acts:
        act()


def _send_slowly(heads: list[socket.socket], over: threading.Event) -> None:
    """A byte of a request's head now and then on each connection, as long as the service leaves them open."""
    text = head(10)
    for byte in text[:-2]:
        for connection in heads:
            with suppress(OSError):
                connection.sendall(bytes((byte,)))
        if over.wait(0.2):
            return


@final
class Memory:
    """The most memory that the processes of a service took, beyond what they had at first.

    One that is started later, in place of a lost one, is compared with the largest at first: it may be seen before it
    has imported anything.
    """

    def __init__(self, root: int) -> None:
        self._root, self._first = root, dict[int, int]()
        self._usual = self.growth_kib = 0
        self._look()
        self._usual = max(self._first.values())

    def watch(self, over: threading.Event) -> None:
        while not over.wait(0.2):
            self._look()

    def _look(self) -> None:
        for pid in (self._root, *descendants(self._root)):
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                sizes = {line.partition(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
                if "VmHWM" in sizes:  # a process that has ended has none
                    peak = int(sizes["VmHWM"])
                    first = self._first.setdefault(pid, max(peak, self._usual))
                    self.growth_kib = max(self.growth_kib, peak - first)
