"""Connections of the HTTP service: heads that do not arrive, malformed requests, more connections than the limit."""

from __future__ import annotations

import contextlib
import json
import logging
import select
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from starlette.requests import Request
from starlette.responses import Response

from gpuflow.serve.http.app import RequestLimits
from gpuflow.serve.http.server import FewRecords
from tests.datasets import jpeg
from tests.serve.fakes import FakeEngine, Gate
from tests.serve.services import Live, answer_of, served, wait

PHOTO = jpeg(0, 0)
HEAD = f"POST /predict HTTP/1.1\nContent-Type: image/jpeg\nContent-Length: {len(PHOTO)}"
CHUNKED = "POST /predict HTTP/1.1\nContent-Type: image/jpeg\nTransfer-Encoding: chunked"
HALF = b"POST /predict HTTP/1.1\r\nContent-Ty"


def errors(live: Live, kind: str) -> float:
    """How often an error of this kind was counted."""
    lines = live.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f'gpuflow_errors_total{{kind="{kind}"}}'))


def is_closed(connection: socket.socket) -> bool:
    """Wait until the service closes a connection without another answer."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


# --- heads that do not arrive -----------------------------------------------------------------------------------------


def test_the_head_of_a_request_has_to_arrive_in_time() -> None:
    with served(FakeEngine(), RequestLimits(head_s=1.0)) as live, contextlib.ExitStack() as clients:
        silent, half, second = (clients.enter_context(live.connect()) for _ in range(3))
        half.sendall(HALF)
        second.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer_of(second)[0] == 200
        second.sendall(HALF)
        assert is_closed(silent)
        for connection in (half, second):
            status, headers, body = answer_of(connection)
            assert (status, headers["connection"], headers["content-type"]) == (408, "close", "application/json")
            reason = "the head of the request did not arrive within 1 s"
            assert json.loads(body) == {"error": {"kind": "slow_head", "reason": reason}}
            assert is_closed(connection)
        assert errors(live, "slow_head") == 2


def test_bytes_that_trickle_in_do_not_extend_the_time() -> None:
    with served(FakeEngine(), RequestLimits(head_s=1.0)) as live, live.connect() as connection:
        connection.settimeout(0.1)
        begun = time.monotonic()
        answer = b""
        while not answer:
            assert time.monotonic() - begun < 20
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"a")
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(100)
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_model_may_take_longer_than_a_head() -> None:
    gate = Gate()
    with (
        served(FakeEngine(before=gate), RequestLimits(head_s=0.2)) as live,
        ThreadPoolExecutor(1) as pool,
        live.connect(HEAD, PHOTO[:100]) as slow_body,
    ):
        answer = pool.submit(live.ask, PHOTO)
        assert gate.reached.wait(timeout=20)
        time.sleep(0.5)
        gate.open()
        assert answer.result(timeout=20).ok
        slow_body.sendall(PHOTO[100:])
        assert answer_of(slow_body)[0] == 200


# --- malformed requests -----------------------------------------------------------------------------------------------

MALFORMED = [
    (b"nonsense\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    (b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 400_000, 431),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
]


@pytest.mark.parametrize(("sent", "expected"), MALFORMED, ids=range(len(MALFORMED)))
def test_a_malformed_head_is_answered_as_json_and_counted(live: Live, sent: bytes, expected: int) -> None:
    before = errors(live, "bad_request")
    with live.connect() as connection:
        connection.sendall(sent)
        status, headers, body = answer_of(connection)
        assert (status, headers["content-type"], headers["connection"]) == (expected, "application/json", "close")
        error = json.loads(body)["error"]
        assert error["kind"] == "bad_request"
        assert error["reason"].startswith("the request is not valid HTTP/1.1: ")
        connection.sendall(b"more")
        assert is_closed(connection)
    assert errors(live, "bad_request") == before + 1


def test_a_malformed_body_is_answered_once(live: Live) -> None:
    before = errors(live, "bad_request"), errors(live, "disconnected")
    with live.connect(CHUNKED, b"zz\r\nabc") as connection:
        status, headers, body = answer_of(connection)
        assert (status, headers["connection"], json.loads(body)["error"]["kind"]) == (400, "close", "bad_request")
        assert is_closed(connection)
    assert (errors(live, "bad_request"), errors(live, "disconnected")) == (before[0] + 1, before[1])
    with live.connect(CHUNKED.replace("/predict", "/nothing"), b"zz\r\nabc") as connection:
        assert answer_of(connection)[0] == 404, "known before the body"
        assert is_closed(connection)


def in_chunks(body: bytes, size: int) -> bytes:
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def test_a_body_in_tiny_chunks_is_refused(live: Live) -> None:
    """Each takes as long to parse as a large one, while all other clients wait."""
    before = errors(live, "bad_request")
    with live.connect(CHUNKED) as connection, contextlib.suppress(ConnectionError):
        for _ in range(200):
            connection.sendall(in_chunks(b"a" * 1000, 1)[:-5])
        status, headers, body = answer_of(connection)
        assert (status, headers["connection"]) == (400, "close")
        assert json.loads(body)["error"]["reason"] == "the body has chunks of fewer than 32 bytes; send larger ones"
    wait(lambda: errors(live, "bad_request") == before + 1)
    with live.connect(CHUNKED.replace("/predict", "/healthz")) as connection:
        assert answer_of(connection)[0] == 405
        for _ in range(20):
            with contextlib.suppress(ConnectionError):
                connection.sendall(in_chunks(b"a" * 1000, 1)[:-5])
        assert is_closed(connection)


@pytest.mark.parametrize("size", [32, 1000, len(PHOTO)])
def test_a_body_may_come_in_chunks(live: Live, size: int) -> None:
    with live.connect(CHUNKED, in_chunks(PHOTO, size)) as connection:
        assert answer_of(connection)[0] == 200


def test_a_request_with_two_lengths_is_refused_and_nothing_after_it_is_answered(live: Live) -> None:
    """A proxy before the service may take what follows for a part of the body."""
    with live.connect(f"{CHUNKED}\nContent-Length: 4", b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") as client:
        status, headers, body = answer_of(client)
        assert (status, headers["connection"], json.loads(body)["error"]["kind"]) == (400, "close", "bad_request")
        assert is_closed(client)


def test_what_follows_the_last_request_of_a_connection_is_ignored() -> None:
    gate = Gate()
    with (
        served(FakeEngine(before=gate)) as live,
        live.connect(f"{HEAD}\nConnection: close", PHOTO) as connection,
    ):
        assert gate.reached.wait(timeout=20)
        connection.sendall(b"nonsense\r\n\r\n")
        time.sleep(0.1)
        gate.open()
        assert answer_of(connection)[0] == 200


# --- more connections than the limit ----------------------------------------------------------------------------------


def test_a_new_connection_takes_the_place_of_the_one_that_has_waited_the_longest() -> None:
    with served(FakeEngine(), RequestLimits(max_connections=4)) as live, contextlib.ExitStack() as clients:
        waiting = [clients.enter_context(live.connect()) for _ in range(4)]
        for connection in waiting[1:]:
            connection.sendall(HALF)
        with requests.Session() as session:
            assert session.get(f"{live.url}/healthz", timeout=20).ok
            assert is_closed(waiting[0])
            for _ in range(3):
                answer = session.post(
                    f"{live.url}/predict", data=PHOTO, headers={"Content-Type": "image/jpeg"}, timeout=20
                )
                assert answer.ok
        waiting[3].sendall(b"pe: image/png\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        assert answer_of(waiting[3])[0] == 422, "still open"


def test_connections_whose_bodies_are_stalled_give_way() -> None:
    with served(FakeEngine(), RequestLimits(max_connections=4)) as live, contextlib.ExitStack() as clients:
        stalled = [clients.enter_context(live.connect(HEAD, PHOTO[:10])) for _ in range(4)]
        wait(lambda: live.service.occupancy.active >= 3)

        def given_way() -> bool:
            """The last of the stalled ones may be accepted after a request is answered, which needed its place then."""
            if not live.ask(PHOTO, Connection="close").ok:
                return False
            readable, _, _ = select.select(stalled, [], [], 0)
            return any(is_closed(connection) for connection in readable)

        wait(given_way)
        assert errors(live, "evicted") >= 1
        assert errors(live, "disconnected") == 0, "the clients did not close them"


def test_requests_that_are_answered_are_not_closed() -> None:
    """One connection too many gets a 503, and the answer of a probe."""
    gate = Gate()
    with (
        served(FakeEngine(before=gate), RequestLimits(max_connections=3)) as live,
        ThreadPoolExecutor(3) as pool,
    ):
        taken = [pool.submit(live.ask, PHOTO) for _ in range(3)]
        wait(lambda: live.service.occupancy.active == 3)
        answer = live.ask(PHOTO)
        reason = "the service has too many connections; retry later, or keep one open for several requests"
        assert (answer.status_code, answer.json()["error"]) == (503, {"kind": "connections", "reason": reason})
        assert (answer.headers["Retry-After"], answer.headers["Connection"]) == ("1", "close")
        for path in ("/healthz", "/readyz", "/metrics"):
            assert live.get(path).ok
        gate.open()
        assert all(future.result(timeout=20).ok for future in taken)
        assert errors(live, "connections") >= 1


def connect_without_reading(live: Live) -> socket.socket:
    """A connection whose client asks for many answers and reads none, so that the service cannot send them."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(0.5)
    client.connect(("127.0.0.1", live.port))
    with contextlib.suppress(TimeoutError):  # once the service does not read any more requests
        while True:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 200)
    return client


def test_clients_that_do_not_read_give_way() -> None:
    with served(FakeEngine(), RequestLimits(max_connections=4)) as live, contextlib.ExitStack() as clients:
        for _ in range(4):
            clients.enter_context(connect_without_reading(live))
        wait(lambda: live.get("/openapi.json").ok)
        assert errors(live, "evicted") >= 1
        assert errors(live, "unread") == 0


def test_a_client_that_does_not_read_for_some_seconds_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuflow.serve.http.server._CHECK_SECONDS", 0.1)
    with served(FakeEngine()) as live, connect_without_reading(live) as slow, connect_without_reading(live):
        slow.setblocking(False)

        def one_is_cut_off() -> bool:
            with contextlib.suppress(BlockingIOError):
                slow.recv(1000)
            return errors(live, "unread") == 1

        assert not one_is_cut_off()
        monkeypatch.setattr("gpuflow.serve.http.server._UNREAD_SECONDS", 2.0)
        begun = time.monotonic()
        wait(one_is_cut_off)
        while time.monotonic() - begun < 6:
            assert one_is_cut_off(), "the other one reads a little all the time"
        wait(lambda: errors(live, "unread") == 2)


def test_an_answer_that_is_not_read_is_cut_off_on_a_connection_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuflow.serve.http.server._CHECK_SECONDS", 0.1)
    monkeypatch.setattr("gpuflow.serve.http.server._UNREAD_SECONDS", 0.5)
    monkeypatch.setattr("gpuflow.serve.http.app._page", lambda: large_answer)
    with served(FakeEngine()) as live, live.connect("GET / HTTP/1.1\nConnection: close") as client:
        wait(lambda: errors(live, "unread") == 1)
        received = 0
        with contextlib.suppress(ConnectionError):
            while part := client.recv(1 << 20):
                received += len(part)
        assert received < 20_000_000


async def large_answer(request: Request) -> Response:
    return Response(bytes(20_000_000))


def test_honest_clients_are_answered_while_others_are_slow() -> None:
    """Half-sent heads and bodies that stop arriving, more of both than there is room for."""
    limits = RequestLimits(max_connections=24, max_held_bytes=5_000_000, head_s=3.0, timeout_s=10.0)
    stop, most = threading.Event(), 0
    slow = "POST /predict HTTP/1.1\nContent-Type: image/png\nContent-Length: 1000000"

    def attack(live: Live, number: int) -> None:
        sent = (slow, bytes(900_000)) if number % 2 else ()
        while not stop.is_set():
            with contextlib.suppress(OSError), live.connect(*sent) as connection:
                if not sent:
                    connection.sendall(HALF)
                connection.settimeout(0.5)
                while not stop.is_set():
                    with contextlib.suppress(TimeoutError):
                        if not connection.recv(1000):
                            break

    def ask(live: Live) -> None:
        nonlocal most
        for _ in range(5):
            limit = time.monotonic() + 30
            while True:
                most = max(most, live.service.occupancy.held_bytes)
                with contextlib.suppress(requests.ConnectionError):
                    answer = live.ask(PHOTO)
                    if answer.status_code != 503:
                        assert answer.status_code == 200, answer.text
                        break
                assert time.monotonic() < limit, "no answer under attack"
                time.sleep(0.05)

    with served(FakeEngine(batch=8), limits) as live, ThreadPoolExecutor(24) as pool:
        attacks = [pool.submit(attack, live, number) for number in range(20)]
        try:
            wait(lambda: live.service.occupancy.held_bytes > 2_000_000)
            with ThreadPoolExecutor(3) as clients:
                list(clients.map(ask, [live] * 3))
            assert most <= limits.max_held_bytes
        finally:
            stop.set()
        for one in attacks:
            one.result(timeout=20)
        wait(lambda: live.service.occupancy.active == 0)
        assert live.service.occupancy.held_bytes == 0


# --- the log ----------------------------------------------------------------------------------------------------------


def logged(records: Sequence[tuple[str, float]]) -> list[str]:
    """What the filter passes of records at given times, all from one line of code."""
    now = 0.0
    few, passed = FewRecords(clock=lambda: now), []
    for text, now in records:  # noqa: B007
        record = logging.LogRecord("x", logging.WARNING, "x.py", 1, text, None, None)
        if few.filter(record):
            passed.append(record.getMessage())
    return passed


def test_the_log_has_a_few_records_a_minute_from_each_line() -> None:
    found = logged([("a", 0.0), *[("b", 1.0)] * 1004, ("c", 61.0), ("d", 61.0), ("e", 200.0)])
    assert found == ["a", "b", "b", "b", "b", "c (1,000 more like this were not logged)", "d", "e"]
