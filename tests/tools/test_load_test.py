"""The load test against real servers: percentiles, counting of answers and errors, requests, resource use."""

from __future__ import annotations

import csv
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from python_multipart import parse_form
from rich.console import Console

from gpuflow.cli import main
from gpuflow.errors import GpuflowError
from gpuflow.tools import load_test as loadtest
from gpuflow.tools.bench import COLUMNS
from gpuflow.tools.load_test import Latency, Load, Point, choose_files, measure
from tests.commands import command_here, document_of
from tests.datasets import deadline, make_photos
from tests.serve.fakes import FakeEngine
from tests.serve.services import served

OK, FULL = (200, b'{"predictions": []}'), (503, b"full")


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(100):
        yield


# --- a server ---------------------------------------------------------------------------------------------------------


@final
class Scripted(ThreadingHTTPServer):
    """Answers request n with `script(n, body, content type)`: status and content; None breaks the connection."""

    daemon_threads = True

    def __init__(self, script: Callable[[int, bytes, str], tuple[int, bytes] | None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script, self.lock = script, threading.Lock()
        self.requests = self.connections = 0
        self.targets: set[str] = set()
        self.bodies: set[bytes] = set()
        self.types: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Scripted

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.connections += 1

    def do_POST(self) -> None:
        body, kind = self.rfile.read(int(self.headers["Content-Length"])), self.headers["Content-Type"]
        with self.server.lock:
            number = self.server.requests
            self.server.requests += 1
            self.server.targets.add(self.path)
            self.server.bodies.add(body)
            self.server.types.add(kind)
        answer = self.server.script(number, body, kind)
        if answer is None:
            self.close_connection = True
            return
        status, content = answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextmanager
def scripted(script: Callable[[int, bytes, str], tuple[int, bytes] | None]) -> Iterator[Scripted]:
    with Scripted(script) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join(20)
        server.server_close()  # so that a later connection is refused


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("load") / "photos"
    make_photos(root, classes=2, each=2)
    return root


@pytest.fixture(scope="module")
def files(photos: Path) -> tuple[str, ...]:
    return choose_files(photos)


def short(url: str, clients: int = 1, **changes: Any) -> Load:
    return Load(**{"url": url, "clients": clients, "seconds": 0.4, "warm_up_s": 0.1, "timeout_s": 5.0, **changes})


def measured(
    script: Callable[[int, bytes, str], tuple[int, bytes] | None],
    files: tuple[str, ...],
    enough: Callable[[Point], bool],
    clients: int = 1,
    **changes: Any,
) -> tuple[Scripted, Point]:
    """Measure a server; on a machine that is too busy for enough answers another one, for longer."""
    for seconds in (0.8, 3.2, 12.8):
        with scripted(script) as server:
            point = measure(short(server.url, clients, seconds=seconds, **changes), files)
        if enough(point):
            return server, point
    raise AssertionError("too few answers, also in the longest time")


# --- values -----------------------------------------------------------------------------------------------------------


def test_percentiles_of_known_latencies() -> None:
    latencies = [float(n) for n in range(1, 201)]
    random.Random(0).shuffle(latencies)
    assert Latency.of(latencies) == Latency(mean_ms=100.5, tp50_ms=100.0, tp90_ms=180.0, tp99_ms=198.0)
    assert Latency.of([3.0]) == Latency(mean_ms=3.0, tp50_ms=3.0, tp90_ms=3.0, tp99_ms=3.0)
    assert Latency.of([]) is None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_a_percentile_is_the_least_latency_that_so_many_do_not_exceed(latencies: list[float]) -> None:
    found = Latency.of(latencies)
    assert found is not None
    for percent, value in ((50, found.tp50_ms), (90, found.tp90_ms), (99, found.tp99_ms)):
        assert value in latencies
        assert 100 * sum(latency <= value for latency in latencies) >= percent * len(latencies)
        assert 100 * sum(latency < value for latency in latencies) < percent * len(latencies)
    assert min(latencies) <= found.mean_ms * (1 + 1e-9)
    assert found.mean_ms <= max(latencies) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"url": "127.0.0.1:8888"}, "--url: must be like http://127.0.0.1:8888, got '127.0.0.1:8888'"),
        ({"url": "http://x:port"}, "--url: must be like http://127.0.0.1:8888, got 'http://x:port'"),
        ({"url": "http://x/a b"}, "--url: must be like http://127.0.0.1:8888, got 'http://x/a b'"),
        ({"url": "http://x/\u00fc"}, "--url: must be like http://127.0.0.1:8888, got 'http://x/\u00fc'"),
    ],
)
def test_a_load_is_checked(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Load(**{"url": "http://x", "clients": 1, **changes})
    assert str(caught.value) == text


def test_what_is_asked_for() -> None:
    assert (Load(url="http://x:81", clients=1).target, Load(url="http://x:81/", clients=1).port) == ("/predict", 81)
    other = Load(url="https://x/predict?top_k=3", clients=1)
    assert (other.host, other.port, other.target) == ("x", 443, "/predict?top_k=3")


def test_images_are_found_below_and_evenly_chosen(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--data: must be a directory of images"):
        choose_files(tmp_path)
    for number in range(600):
        path = tmp_path / f"class_{number % 2}" / f"{number // 2:03}.JPG"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / "notes.txt").touch()
    chosen = choose_files(tmp_path)
    assert len(set(chosen)) == 256
    assert [sum(f"class_{label}" in path for path in chosen) for label in (0, 1)] == [128, 128]


# --- measuring --------------------------------------------------------------------------------------------------------


def test_what_is_sent_and_measured(files: tuple[str, ...]) -> None:
    """Four clients of a server that takes 20 ms: fixed connections, the files' own bytes, latencies no shorter."""
    lock = threading.Lock()
    most = [0, 0]

    def script(number: int, body: bytes, kind: str) -> tuple[int, bytes]:
        with lock:
            most[0] += 1
            most[1] = max(most)
        time.sleep(0.02)
        with lock:
            most[0] -= 1
        return OK

    begun = time.monotonic()
    server, point = measured(script, files, lambda point: point.qps * point.load.seconds > 40, clients=4)
    elapsed_ms = 1000 * (time.monotonic() - begun)
    assert server.connections == 1 + 4, "that of the check, and one a client"
    assert server.bodies == {Path(file).read_bytes() for file in files}
    assert (server.types, server.targets) == ({"application/octet-stream"}, {"/predict"})
    assert most[1] == 4, "no client asks before it has its answer"
    assert point.latency is not None
    assert 20.0 <= point.latency.tp50_ms <= point.latency.tp90_ms <= point.latency.tp99_ms < elapsed_ms
    assert point.qps <= 4 / 0.02
    assert 0.5 * 4000 / point.latency.mean_ms < point.qps < 1.5 * 4000 / point.latency.mean_ms, "Little's law"
    assert point.images_per_s == point.qps
    assert point.errors == {}
    assert 0 < point.clients_cpu_percent < 400


def test_errors_are_counted_by_kind_and_have_no_latency(files: tuple[str, ...]) -> None:
    """One request of the client is answered, the first one after that of the check: there is one latency."""
    errors = [FULL, (500, b"no"), None]

    def script(number: int, body: bytes, kind: str) -> tuple[int, bytes] | None:
        return OK if number < 2 else errors[number % 3]

    def enough(point: Point) -> bool:
        return point.latency is not None and len(point.errors) == 3

    _, point = measured(script, files, enough, warm_up_s=0.0)
    assert list(point.errors) == ["500", "503", "connection"]
    seconds, count = point.load.seconds, sum(point.errors.values())
    assert count <= 1 + seconds / loadtest._PAUSE_SECONDS, "a client rests after a failure"
    assert point.latency is not None
    assert (point.qps * seconds, point.latency.tp50_ms) == (1.0, point.latency.mean_ms)
    [line] = [row for row in loadtest.rows([point], arm="a", workload="w") if row["metric"] == "errors"]
    assert float(line["value"]) == count


def test_an_answer_that_does_not_come(files: tuple[str, ...]) -> None:
    over = threading.Event()

    def script(number: int, body: bytes, kind: str) -> tuple[int, bytes]:
        if number:
            over.wait(60)
        return OK

    with scripted(script) as server:
        point = measure(short(server.url, 2, seconds=3.0, timeout_s=1.0), files)
        over.set()
    assert set(point.errors) == {"timeout"}
    assert (point.qps, point.latency) == (0.0, None)
    written = {row["metric"] for row in loadtest.rows([point], arm="a", workload="w")}
    assert "qps" in written
    assert "tp50_ms" not in written


def test_forms_hold_several_images(files: tuple[str, ...]) -> None:
    """Three images a request, of four: the second form is filled up from the start. One result of each is an error."""
    seen: list[list[bytes]] = []

    def script(number: int, body: bytes, kind: str) -> tuple[int, bytes]:
        found: list[bytes] = []

        def keep(file: Any) -> None:
            assert file.field_name == b"image"
            assert file.file_name is not None
            file.file_object.seek(0)
            found.append(file.file_object.read())

        headers = {"Content-Type": kind.encode(), "Content-Length": str(len(body)).encode()}
        parse_form(headers, BytesIO(body), lambda field: None, keep)
        seen.append(found)
        return 200, b'{"results": [{"predictions": []}, {"error": {}}, {"predictions": []}]}'

    with scripted(script) as server:
        point = measure(short(server.url, request_batch=3), files)
    images = [Path(file).read_bytes() for file in files]
    assert {tuple(form) for form in seen} == {tuple(images[:3]), (images[3], *images[:2])}
    assert point.images_per_s == pytest.approx(2 * point.qps)
    assert point.errors == {"bad image": round(point.qps * 0.4)}


def test_our_own_service_answers(files: tuple[str, ...]) -> None:
    with served(FakeEngine()) as live:
        one = measure(short(live.url, 2), files)
        three = measure(short(live.url, 2, request_batch=3), files)
    for point in (one, three):
        assert point.errors == {}
        assert point.qps > 1
    assert three.images_per_s == pytest.approx(3 * three.qps)


def test_what_the_service_takes(files: tuple[str, ...]) -> None:
    """The server is in this process, which its port tells; NVML is asked where there is one."""

    def busy(number: int, body: bytes, kind: str) -> tuple[int, bytes]:
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return OK

    def enough(point: Point) -> bool:
        """The clocks tick every 10 ms, so that a short time is not measured exactly."""
        return point.cpu_percent is not None and point.cpu_percent > point.qps * 0.9

    _, point = measured(busy, files, enough, clients=2)
    with scripted(busy) as server:
        unknown = measure(short(server.url, 1, seconds=0.2), files, pids=[])
        gone = measure(short(server.url, 1, seconds=0.2), files, pids=[2**22 + 1])
    assert point.pss_mb is not None
    assert point.pss_mb > 50, "Python with torch"
    for other in (unknown, gone):
        assert (other.cpu_percent, other.pss_mb, other.gpu_percent) == (None,) * 3


# --- errors -----------------------------------------------------------------------------------------------------------


def test_no_service_answers(files: tuple[str, ...]) -> None:
    with scripted(lambda *_: OK) as server:
        url = server.url
    with pytest.raises(GpuflowError) as caught:
        measure(short(url), files)
    reason = "[Errno 111] Connection refused"
    assert str(caught.value) == f"{url}: no service answers ({reason}); start a service with gpuflow serve FILE"


def test_something_else_answers(files: tuple[str, ...]) -> None:
    with scripted(lambda *_: (404, b"no such page")) as server, pytest.raises(GpuflowError) as caught:
        measure(short(server.url), files)
    assert str(caught.value) == f"{server.url}: answers 404 to {files[0]}: no such page"


def test_answers_to_forms_that_are_no_services(files: tuple[str, ...]) -> None:
    with scripted(lambda *_: (200, b"<html>busy</html>")) as server, pytest.raises(GpuflowError) as caught:
        measure(short(server.url, request_batch=2), files)
    assert str(caught.value) == f"{server.url}: answers 200 without results to {files[0]}: <html>busy</html>"
    ok = b'{"results": [{}, {}]}'
    with scripted(lambda number, *_: (200, b"{}" if number % 5 == 3 else ok)) as server:
        point = measure(short(server.url, request_batch=2), files)
    assert set(point.errors) == {"200 without results"} and point.qps > 0


def test_a_client_process_that_fails(files: tuple[str, ...], tmp_path: Path) -> None:
    with scripted(lambda *_: OK) as server, pytest.raises(GpuflowError) as caught:
        measure(short(server.url), [*files, str(tmp_path / "gone.jpg")])
    assert str(caught.value).startswith("load-test: a client process failed:\nTraceback")
    assert "gone.jpg" in str(caught.value)


# --- results ----------------------------------------------------------------------------------------------------------


def made_up(clients: int, **changes: Any) -> Point:
    figures: dict[str, Any] = {
        "load": Load(url="http://x", clients=clients),
        "qps": 1234.5,
        "images_per_s": 1234.5,
        "latency": Latency(mean_ms=8.25, tp50_ms=7.0, tp90_ms=12.34, tp99_ms=123.4),
        "errors": {},
        "clients_cpu_percent": 1.0,
        "cpu_percent": 150.0,
        "pss_mb": 900.0,
    }
    return Point(**{**figures, **changes})


def test_rows_are_those_of_a_results_file() -> None:
    rows = loadtest.rows([made_up(5, gpu_percent=87.0)], arm="service", workload="photos")
    assert all(list(row) == [*dict.fromkeys([*row])] and set(row) == set(COLUMNS) for row in rows)
    assert {(row["arm"], row["workload"], row["repeats"]) for row in rows} == {
        ("service", "photos; batch=1; clients=5", 1)
    }
    figures = {row["metric"]: (row["value"], row["unit"]) for row in rows}
    assert figures == {
        "qps": ("1234", "requests/s"),
        "images_per_s": ("1234", "images/s"),
        "mean_ms": ("8.25", "ms"),
        "tp50_ms": ("7", "ms"),
        "tp90_ms": ("12.34", "ms"),
        "tp99_ms": ("123.4", "ms"),
        "errors": ("0", "errors"),
        "cpu_percent": ("150", "%"),
        "pss_mb": ("900", "MB"),
        "gpu_percent": ("87", "%"),
        "clients_cpu_percent": ("1", "%"),
    }


def test_the_table_fits_a_narrow_terminal() -> None:
    stream = StringIO()
    points = [made_up(1), made_up(20, errors={"503": 3}, cpu_percent=None, pss_mb=None, latency=None)]
    Console(file=stream, width=80).print(loadtest.render(points))
    lines = [line.split() for line in stream.getvalue().splitlines()]
    assert lines[1] == ["1", "1,234", "8.2", "7", "12.3", "123", "0", "150", "900", "-", "1"]
    assert lines[2] == ["20", "1,234", "-", "-", "-", "-", "3", "-", "-", "-", "1"]
    assert lines[4][:2] == ["MB:", "PSS,"], "and what the units are"


def test_notes() -> None:
    cores = len(os.sched_getaffinity(0))
    assert loadtest.notes([made_up(5)]) == []
    hungry = made_up(5, errors={"503": 3, "timeout": 1}, clients_cpu_percent=5.0 * cores + 1)
    assert loadtest.notes([hungry]) == [
        "5 clients, errors: 503: 3, timeout: 1",
        f"the clients took up to {5 * cores + 1}% of the {100 * cores}% that they share with the service; "
        "with a machine or cores of their own they would leave it more",
    ]
    assert loadtest.notes([made_up(5)], gpus_asked=False) == [
        "GPU % is left out: nvidia-ml-py is not installed; pip install 'gpuflow[gpu]'"
    ]
    far = made_up(5, cpu_percent=None, pss_mb=None, clients_cpu_percent=90.0 * cores)
    assert loadtest.notes([far]) == [
        "CPU, memory and GPU of the service are left out: no process here is known to be it (--pid)"
    ]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted(lambda *_: OK) as server:
        arguments = ["--url", server.url, "--data", photos, "--clients", "1,2", "--seconds", "0.2", "--name", "mine"]
        monkeypatch.setattr(sys, "argv", ["gpuflow", "load-test", *map(str, arguments), "--out", str(tmp_path)])
        with pytest.raises(SystemExit) as end:
            main()
    out = capsys.readouterr().out
    assert not end.value.code
    assert out.split()[:3] == ["clients", "req/s", "mean"]
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["1", "2"]
    assert f"wrote {tmp_path / 'load_test.png'}" in out
    assert (tmp_path / "load_test.svg").stat().st_size > 1000
    with (tmp_path / "load_test.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == COLUMNS
    assert {row["arm"] for row in rows} == {"mine"}
    assert {row["workload"] for row in rows} == {f"photos; batch=1; clients={n}" for n in (1, 2)}
    command = command_here(monkeypatch, capsys, "load-test", "--data", photos, "--clients", "1", "--seconds", "0.2")
    with scripted(lambda number, *_: FULL if number % 2 else OK) as server:
        document = document_of("load-test", command("--url", server.url, "--out", tmp_path, "--json"))
    [result] = document["results"]
    assert (result["load"]["clients"], list(result["errors"])) == (1, ["503"])
    assert result["qps"] > 0 and result["latency"]["tp99_ms"] > 0
    assert document["notes"][0].startswith("1 clients, errors: 503: ")
    assert str(tmp_path / "load_test.csv") in document["files"]


def test_what_was_measured_is_written_when_the_service_ends(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(load: Load, *_: Any, **__: Any) -> Point:
        if load.clients > 1:
            raise GpuflowError(f"{load.url}: no service answers")
        return made_up(load.clients)

    monkeypatch.setattr("gpuflow.tools.load_test.measure", measured)
    arguments = ["--data", photos, "--clients", "1,2", "--out", tmp_path]
    monkeypatch.setattr(sys, "argv", ["gpuflow", "load-test", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    captured = capsys.readouterr()
    assert captured.err.endswith("error: http://127.0.0.1:8888: no service answers\n")
    assert f"wrote {tmp_path / 'load_test.csv'}" in captured.out and (tmp_path / "load_test.png").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--clients", "5,x"], "error: --clients: must be numbers >= 1 separated by commas, each once, got '5,x'"),
        (["--url", "localhost"], "error: --url: must be like http://127.0.0.1:8888, got 'localhost'"),
    ],
)
def test_what_the_command_does_not_take(
    arguments: list[str],
    text: str,
    photos: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpuflow", "load-test", "--data", str(photos), *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert text in capsys.readouterr().err
