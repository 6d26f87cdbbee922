"""`gpuflow serve` as a process, from its first line to its exit code, with real signals and busy clients."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import requests
from typer.testing import CliRunner

import gpuflow.serve
from gpuflow.cli import app
from gpuflow.serve.http.limits import RequestLimits
from gpuflow.serve.http.server import _written_or_left_out, run
from gpuflow.serve.predictor import Predictor
from tests.datasets import jpeg
from tests.serve.models import Models
from tests.serve.services import ServiceStarter, answer_of, queue_length, wait

PHOTO = jpeg(0, 0)
POST = "POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\n"
TERM = "SIGTERM: new requests are refused, {} still to answer; send it again to exit at once"


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceStarter]:
    made = ServiceStarter(tmp_path_factory.mktemp("services"))
    yield made
    made.close()


def post(url: str, data: bytes = PHOTO, kind: str = "image/jpeg") -> requests.Response:
    return requests.post(f"{url}/predict", data=data, headers={"Content-Type": kind}, timeout=20)


def admitted(pool: ThreadPoolExecutor, url: str) -> Future[requests.Response]:
    """A request that the service has admitted, and that is the only one."""
    answer = pool.submit(post, url)
    wait(lambda: queue_length(url) == 1)
    return answer


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_from_start_to_end(models: Models, starter: ServiceStarter) -> None:
    with starter.start("serve", str(models.config), "--port", "0", "--access-log") as process:
        url = process.url
        assert url.startswith("http://127.0.0.1:")
        assert requests.get(f"{url}/healthz", timeout=20).ok
        process.ready()
        photo = next(models.photos.rglob("*.jpg")).read_bytes()
        with gpuflow.serve.load(models.config) as predictor:
            expected = predictor(photo, top_k=5)
        found = post(url, photo).json()["predictions"]
        assert [entry["label"] for entry in found] == [label for label, _ in expected]
        assert [entry["probability"] for entry in found] == pytest.approx([p for _, p in expected], abs=1e-5)
        with requests.Session() as session:
            times = [time.monotonic()]
            for _ in range(50):
                assert session.get(f"{url}/healthz", timeout=20).ok
                times.append(time.monotonic())
            fastest = min(end - begun for begun, end in pairwise(times))
            assert fastest < 0.03, "each answer waits 0.04 s for an acknowledgement: Nagle's algorithm"
        process.signal()
        assert process.wait() == 0
        served = [line for line in process.lines if " HTTP/1.1" in line]
        assert sum('"POST /predict HTTP/1.1" 200' in line for line in served) == 1
        first, ready, *last = [line for line in process.lines if line not in served]
    assert first == f"serving {models.config} at {url}; loading the model"
    assert ready.startswith("ready after ")
    assert ready.endswith(f" s: the model gets float32 32x32x3 nchw, preprocessing {predictor.preprocessing}")
    assert last == [TERM.format(0), "stopped; all requests answered"]


def test_a_model_file_that_is_missing(models: Models, starter: ServiceStarter) -> None:
    with starter.start("serve", str(models.config), "--port", "0", "serve.model.file=absent.onnx") as process:
        assert process.wait() == 1
        error = process.lines[-1]
    assert error.startswith("error: ")
    assert "absent.onnx" in error


@pytest.mark.parametrize(
    "option",
    [
        "--max-queue=0",
        "--max-body-mb=0",
        "--max-body-mb=inf",
        "--max-megapixels=0",
        "--timeout-s=inf",
        "--max-connections=0",
        "--timeout-s=-1",
        "--port=70000",
    ],
)
def test_options_out_of_range(option: str) -> None:
    done = CliRunner().invoke(app, ["serve", "x.yaml", option])
    assert done.exit_code == 2
    assert option.partition("=")[0] in done.output


def test_options_become_limits(monkeypatch: pytest.MonkeyPatch, models: Models) -> None:
    """A megabyte has 10^6 bytes, as in the metrics and in `docs/service_limits.md`."""
    given: dict[str, Any] = {}
    monkeypatch.setattr("gpuflow.serve.http.server.run", lambda load, **options: given.update(options))
    options = ["--max-body-mb=1.5", "--max-queue=3", "--max-megapixels=2", "--timeout-s=2", "--max-connections=7"]
    origins = ["--cors=https://a.org", "--cors=http://b.org:8080"]
    done = CliRunner().invoke(app, ["serve", str(models.config), *options, *origins])
    assert done.exit_code == 0, done.output
    assert given["limits"] == RequestLimits(
        max_body_bytes=1_500_000, max_queue=3, max_pixels=2_000_000, timeout_s=2.0, max_connections=7
    )
    assert given["cors"] == ["https://a.org", "http://b.org:8080"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), BrokenPipeError(), SystemExit(1)])
def test_a_line_that_cannot_be_written_is_left_out(error: BaseException) -> None:
    """A full disk, or a pipe whose reader has ended; otherwise no signal would end the service."""
    asked = []

    def report(text: str) -> None:
        asked.append(text)
        raise error

    _written_or_left_out(report)("ready")
    assert asked == ["ready"]


# --- signals ----------------------------------------------------------------------------------------------------------


def test_no_admitted_request_is_lost(starter: ServiceStarter) -> None:
    """The signal arrives while fifty requests are in progress, bad ones among them."""

    def client(number: int) -> int:
        bodies = {7: b"", 8: b"nothing", 9: bytes(3_000_000)}
        return post(url, bodies.get(number % 10, PHOTO)).status_code

    with starter.start("model that waits for SIGUSR1") as process, ThreadPoolExecutor(51) as pool:
        url = process.ready().url
        answers = [pool.submit(client, number) for number in range(50)]
        wait(lambda: queue_length(url) >= 20)
        process.signal()
        wait(lambda: requests.get(f"{url}/readyz", timeout=20).json() == {"status": "draining", "ready": False})
        refused = post(url)
        assert (refused.status_code, refused.json()["error"]["kind"]) == (503, "draining")
        assert (refused.headers["Retry-After"], refused.headers["Connection"]) == ("5", "close")
        assert requests.get(f"{url}/healthz", timeout=20).ok
        process.signal(signal.SIGUSR1)
        codes = [answer.result(timeout=20) for answer in answers]
        assert process.wait() == 0
        assert process.lines[-1] == "stopped; all requests answered"
    expected = {7: 422, 8: 422, 9: 413}
    taken = [number for number in range(50) if codes[number] != 503]
    assert [codes[number] for number in taken] == [expected.get(number % 10, 200) for number in taken]
    assert len(taken) >= 20


def test_a_second_signal_exits_at_once(starter: ServiceStarter) -> None:
    with starter.start("hanging model") as process, ThreadPoolExecutor(1) as pool:
        url = process.ready().url
        lost = admitted(pool, url)
        process.signal()
        wait(lambda: requests.get(f"{url}/readyz", timeout=20).json() == {"status": "draining", "ready": False})
        process.signal(signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT
        assert isinstance(lost.exception(timeout=20), requests.ConnectionError)
        assert process.lines[-2:] == [TERM.format(1), "SIGINT again: exiting at once, 1 requests unanswered"]


def test_a_model_that_hangs_does_not_keep_the_process(starter: ServiceStarter) -> None:
    with starter.start("hanging model, timeout 1 s") as process, ThreadPoolExecutor(1) as pool:
        url = process.ready().url
        late = admitted(pool, url)
        process.signal(signal.SIGINT)
        time.sleep(0.6)
        assert post(url).status_code == 503, "other requests are still refused"
        assert late.result(timeout=20).status_code == 504
        assert process.wait() == 0
        assert process.lines[-1] == "stopped; all requests answered"


def test_clients_that_do_not_read_do_not_keep_the_process(starter: ServiceStarter) -> None:
    with starter.start("slow model") as process, socket.socket() as client:
        host, port = process.ready().url.removeprefix("http://").split(":")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(0.5)
        client.connect((host, int(port)))
        with contextlib.suppress(TimeoutError):
            while True:
                client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 200)
        process.signal()
        assert process.wait() == 0
        assert process.lines[1:] == [process.lines[1], TERM.format(0), "stopped; all requests answered"]


def test_a_signal_while_the_model_is_loaded(starter: ServiceStarter) -> None:
    with starter.start("endless load") as process:
        answer = post(process.url)
        assert (answer.status_code, answer.json()["error"]["kind"]) == (503, "loading")
        process.signal()
        assert process.wait() == 0
        assert process.lines[1:] == [TERM.format(0), "stopped; all requests answered"]


def test_a_service_whose_log_is_full_answers_and_ends(starter: ServiceStarter) -> None:
    with starter.start("slow model, log of one line") as process, ThreadPoolExecutor(1) as pool:
        url = process.ready().url
        late = admitted(pool, url)
        process.signal()
        assert late.result(timeout=20).ok
        assert process.wait() == 0
        assert len(process.lines) == 1


def test_a_terminal_that_is_closed_ends_the_service_as_sigterm_does(starter: ServiceStarter) -> None:
    with starter.start("hanging model, timeout 1 s") as process, ThreadPoolExecutor(1) as pool:
        url = process.ready().url
        late = admitted(pool, url)
        process.signal(signal.SIGHUP)
        assert late.result(timeout=20).status_code == 504
        assert process.wait() == 0
        assert process.lines[-2:] == [TERM.format(1).replace("TERM", "HUP"), "stopped; all requests answered"]


def test_nohup_keeps_the_service_when_its_terminal_is_closed(starter: ServiceStarter) -> None:
    with starter.start("endless load under nohup") as process:
        url = process.url
        process.signal(signal.SIGHUP)
        assert post(url).json()["error"]["kind"] == "loading"
        process.signal()
        assert process.wait() == 0
        assert process.lines[1:] == [TERM.format(0), "stopped; all requests answered"]


def test_a_body_that_is_on_its_way_at_the_signal_is_still_answered(starter: ServiceStarter) -> None:
    with starter.start("slow model") as process:
        host, port = process.ready().url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            head = (
                f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nContent-Length: {len(PHOTO)}\r\n\r\n"
            )
            connection.sendall(head.encode() + PHOTO[:100])
            # Answered on another connection, so the head above has been read, too.
            assert post(process.url).ok
            process.signal()
            wait(
                lambda: (
                    requests.get(f"{process.url}/readyz", timeout=20).json() == {"status": "draining", "ready": False}
                )
            )
            connection.sendall(PHOTO[100:])
            status, headers, _ = answer_of(connection)
            assert (status, headers["connection"]) == (200, "close")
        assert process.wait() == 0
        assert process.lines[-2:] == [TERM.format(1), "stopped; all requests answered"]


# --- hostile clients --------------------------------------------------------------------------------------------------


def test_more_connections_than_the_process_may_open_files(starter: ServiceStarter) -> None:
    """Half-sent heads, and heads whose bodies never come."""
    head = f"{POST}Content-Length: 1000\r\n".encode()
    with starter.start("few files") as process, contextlib.ExitStack() as clients:
        url = process.ready().url
        host, port = url.removeprefix("http://").split(":")
        for number in range(400):
            client = clients.enter_context(socket.create_connection((host, int(port)), timeout=20))
            with contextlib.suppress(ConnectionError):
                client.sendall(head + (b"\r\n" if number % 2 else b""))
            if number % 50 == 0:
                assert requests.get(f"{url}/healthz", timeout=20).ok
        for _ in range(5):
            assert requests.get(f"{url}/healthz", timeout=20).ok
        wait(lambda: post(url).ok)  # once the bodies that have just begun are stalled
        assert sum(map(len, process.lines)) < 10_000, process.lines
        clients.close()
        process.signal()
        assert process.wait() == 0


# --- errors at the start ----------------------------------------------------------------------------------------------


def never() -> Predictor:
    raise AssertionError("must not be called")


@pytest.mark.slow
def test_a_port_in_use_and_an_unknown_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match="address already in use") as caught:
            run(never, name="x.yaml", port=port, report=print)
    rest = "; choose others by --host, --port"
    assert str(caught.value) == f"cannot listen on 127.0.0.1, port {port}: address already in use{rest}"
    with pytest.raises(ValueError, match=r"nowhere\.invalid") as caught:
        run(never, name="x.yaml", host="nowhere.invalid", port=0, report=print)
    assert str(caught.value).startswith("cannot listen on nowhere.invalid, port 0: ")
