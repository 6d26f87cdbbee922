"""Mutated heads and bodies of requests, from a fixed seed: each gets one of the service's own answers, in time."""

from __future__ import annotations

import base64
import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpuflow.serve.http.app import RequestLimits
from tests.datasets import jpeg
from tests.serve.fakes import FakeEngine
from tests.serve.services import SECONDS, Live, served, wait

PHOTO = jpeg(0, 0)
LIMITS = RequestLimits(max_body_bytes=50_000, max_images=3, head_s=1.0, timeout_s=2.0)
STATUSES = {200, 400, 404, 405, 408, 413, 415, 422, 431, 503, 504}
"""All that a client can cause."""
LENGTH = b"Inference-Header-Content-Length"
CASES = 250
TOKENS = (
    b"\r\n", b"\r\n\r\n", b"--x", b"--x--", b": ", b";", b"\0", b"\xff", b"%00", b"=", b'"', b"\\", b"*=", b"HTTP/1.1",
    b"Content-Length: 5\r\n", b"Content-Length: 18446744073709551616\r\n", b"Transfer-Encoding: chunked\r\n",
    b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"Upgrade: websocket\r\n", b"Content-Encoding: br\r\n",
    b"Inference-Header-Content-Length: 5\r\n", b"\xff\xff\xff\xff", b"\0\0\0\0", b"[[[[",
    b'"shape":[1e9],', b'"data":[""],',
    b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"/predict", b"?top_k=", b"a" * 2000, b"filename*=utf-8''%zz",
)  # fmt: skip


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with served(FakeEngine(batch=8), LIMITS) as service:
        yield service


def form(files: int) -> bytes:
    head = b'--x\r\nContent-Disposition: form-data; name="a"; filename="a.jpg"\r\nContent-Type: image/jpeg\r\n\r\n'
    return (head + PHOTO + b"\r\n") * files + b"--x--\r\n"


def tensors(rng: random.Random) -> tuple[bytes, bytes]:
    """The body of a request of the Open Inference Protocol, and its type with its length."""
    tensor = (len(PHOTO).to_bytes(4, "little") + PHOTO) * (count := rng.randint(1, 3))
    given: dict[str, object] = {"parameters": {"binary_data_size": len(tensor)}}
    if rng.random() < 0.5:
        tensor, given = b"", {"data": [base64.b64encode(PHOTO).decode()] * count}
    names = [{"name": name, "parameters": {"binary_data": rng.random() < 0.5}} for name in ("logits", "labels")]
    image = {"name": "image", "datatype": "BYTES", "shape": [count], **given}
    text = json.dumps({"id": "1", "inputs": [image], "outputs": names, "parameters": {"timeout": 2_000_000}}).encode()
    return text + tensor, b"application/octet-stream\r\n%s: %d" % (LENGTH, len(text))


def request(rng: random.Random) -> tuple[bytes, bytes]:
    """Head and body of a good request."""
    path = rng.choice([b"/predict", b"/predict?top_k=2", b"/seen", b"/healthz", b"/metrics", b"/nothing"])
    body, kind = rng.choice(
        [
            (PHOTO, b"image/jpeg"),
            (form(1), b"multipart/form-data; boundary=x"),
            (form(2), b"multipart/form-data; boundary=x"),
            tensors(rng),
            tensors(rng),
        ]
    )
    if LENGTH in kind:
        path = b"/v2/models/model/infer"
    head = rng.choice([b"POST ", b"POST ", b"GET "]) + path + b" HTTP/1.1\r\nHost: x\r\nContent-Type: " + kind
    if rng.random() < 0.3:
        sizes = [b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:100], body[100:])]
        return head + b"\r\nTransfer-Encoding: chunked\r\n\r\n", b"".join(sizes) + b"0\r\n\r\n"
    return head + b"\r\nContent-Length: %d\r\n\r\n" % len(body), body


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Data with some bytes changed, inserted, repeated or cut out."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(changed) + 1)
        to = min(len(changed), at + rng.choice([1, 4, 50]))
        match rng.randrange(5):
            case 0:
                changed[at:to] = rng.randbytes(to - at)
            case 1:
                changed[at:at] = rng.choice(TOKENS)
            case 2:
                changed[at:at] = changed[at:to] * rng.choice([1, 20])
            case 3:
                del changed[at:to]
            case _:
                changed[at:to] = rng.choice(TOKENS)
    return bytes(changed)


def message(seed: int) -> bytes:
    """A request with a mutated head or body; the other part often is as announced."""
    rng = random.Random(seed)
    head, body = request(rng)
    if rng.random() < 0.5:
        return mutate(head, rng) + body
    damaged = mutate(body, rng)
    announced, right = (b"Content-Length: %d\r\n" % len(part) for part in (body, damaged))
    return head.replace(announced, right) + damaged


def first_answer(live: Live, sent: bytes) -> tuple[int, dict[str, str], bytes] | None:
    """The first final answer on a connection, or None if it is closed without one."""
    data = b""
    with socket.create_connection(("127.0.0.1", live.port), timeout=SECONDS) as connection:
        try:
            connection.sendall(sent)
            while True:
                head, ended, body = data.partition(b"\r\n\r\n")
                if ended and head.startswith(b"HTTP/1.1 100 "):
                    data = body
                    continue
                if ended:
                    first, *lines = head.decode("latin-1").lower().split("\r\n")
                    headers = dict(line.split(": ", 1) for line in lines)
                    if len(body) >= (length := int(headers["content-length"])):
                        return int(first.split()[1]), headers, body[:length]
                more = connection.recv(65536)
                if not more:
                    return None
                data += more
        except ConnectionError:
            return None


def test_mutated_requests_get_the_services_own_answers(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda seed: first_answer(live, message(seed)), range(CASES)))
    seen = set()
    for seed, answer in enumerate(answers):
        if answer is None:
            continue
        status, headers, body = answer
        seen.add(status)
        assert status in STATUSES, (seed, answer)
        if status != 200:
            assert headers["content-type"] == "application/json", (seed, answer)
            content = json.loads(body)
            assert content.get("error", content.get("results")), (seed, answer)
    assert {200, 400, 422} <= seen
    assert sum(answer is None for answer in answers) < CASES // 10
    wait(lambda: live.service.occupancy.active == 0)
    assert live.service.occupancy.queue_length == live.service.occupancy.held_bytes == 0
    assert live.ask(PHOTO).ok
    assert "Traceback" not in caplog.text
