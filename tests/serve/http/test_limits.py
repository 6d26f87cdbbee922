"""Where the limits on requests are, to the byte; what `/seen` takes; what is discarded after a refusal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from gpuflow import cli
from gpuflow.serve.http.app import RequestLimits
from gpuflow.serve.http.body import BodyMiddleware
from gpuflow.serve.http.limits import Metrics, Occupancy
from tests.datasets import jpeg
from tests.serve.fakes import FakeEngine
from tests.serve.services import Live, served

MEGABYTE = 1_000_000
CONFIG = Path(__file__).parents[3] / "configs" / "photos.yaml"


@pytest.fixture(scope="module")
def small() -> Iterator[Live]:
    """A service for bodies of at most 10 kB."""
    with served(FakeEngine(), RequestLimits(max_body_bytes=10_000)) as service:
        yield service


def test_defaults() -> None:
    limits = RequestLimits()
    assert (limits.max_body_bytes, limits.max_held_bytes) == (32 * MEGABYTE, 512 * MEGABYTE)
    assert (limits.max_images, limits.max_queue, limits.timeout_s) == (64, 256, 30.0)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("size", "status"), [(9_999, 422), (10_000, 422), (10_001, 413)])
def test_a_body_of_exactly_the_limit_is_read(small: Live, size: int, status: int, chunked: bool) -> None:
    data = iter([bytes(size - 1), b"x"]) if chunked else bytes(size)
    assert small.ask(data).status_code == status


@pytest.mark.parametrize("path", ["/predict", "/seen"])
def test_every_route_for_images_refuses_other_types(small: Live, path: str) -> None:
    answer = small.ask(jpeg(0, 0), path, Content_Type="text/plain")
    assert (answer.status_code, answer.json()["error"]["kind"]) == (415, "unsupported_type")
    answer = small.ask(bytes(10_001), path)
    assert (answer.status_code, answer.json()["error"]["kind"]) == (413, "too_large")


def test_the_time_in_the_answer_is_part_of_the_time_that_the_client_waits(small: Live) -> None:
    begun = time.perf_counter()
    answer = small.ask(jpeg(0, 0))
    waited = (time.perf_counter() - begun) * 1000
    assert 0 < float(answer.headers["Server-Timing"].removeprefix("total;dur=")) <= waited


class Silent:
    """Metrics that nobody reads."""

    def answer(self, path: str, **known: Any) -> None: ...

    def error(self, kind: str) -> None: ...


@pytest.mark.parametrize(("max_body_bytes", "megabytes"), [(10 * MEGABYTE, 80), (1 * MEGABYTE, 64)])
def test_how_much_of_a_refused_body_is_discarded(max_body_bytes: int, megabytes: int) -> None:
    """Eight times the largest body, and 64 MB at least."""
    received, sent = 0, []

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": []})
        await send({"type": "http.response.body", "body": b"no", "more_body": False})

    async def receive() -> dict[str, Any]:
        nonlocal received
        received += 1
        return {"type": "http.request", "body": bytes(MEGABYTE), "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    limits = RequestLimits(max_body_bytes=max_body_bytes)
    app = BodyMiddleware(refuse, metrics=cast(Metrics, Silent()), occupancy=Occupancy(limits), closing=lambda: False)
    scope = {"type": "http", "method": "POST", "path": "/predict", "headers": [(b"transfer-encoding", b"chunked")]}
    asyncio.run(app(scope, receive, send))
    assert received == megabytes
    assert [message.get("body") for message in sent[1:]] == [b"no", b""]


def test_the_limits_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--max-body-mb` counts in millions of bytes, as the errors and the documentation do."""
    given: dict[str, Any] = {}
    monkeypatch.setattr("gpuflow.serve.http.server.run", lambda load, **options: given.update(options))
    options = ["--max-body-mb=1.5", "--max-queue=7", "--timeout-s=2.5", "--host=::1", "--port=9", "--access-log"]
    done = CliRunner().invoke(cli.app, ["serve", str(CONFIG), *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    limits = given["limits"]
    assert (limits.max_body_bytes, limits.max_queue, limits.timeout_s) == (1_500_000, 7, 2.5)
    assert (given["host"], given["port"], given["access_log"], given["name"]) == ("::1", 9, True, str(CONFIG))
    CliRunner().invoke(cli.app, ["serve", str(CONFIG)], catch_exceptions=False)
    assert given["limits"] == RequestLimits()
