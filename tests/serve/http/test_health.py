"""Whether a service's decoders work: how often that is checked, and what is said."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gpuflow.errors import DecoderError, PredictorTimeout
from gpuflow.serve.http import app
from gpuflow.serve.http.app import Health


def test_a_check_is_made_once_in_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        raise DecoderError(f"check {checks}")

    async def ask(times: int) -> list[str | None]:
        health = Health(check)
        return [await health.refresh() for _ in range(times)]

    monkeypatch.setattr(app, "_CHECK_SECONDS", 1e9)
    assert asyncio.run(ask(3)) == ["check 1"] * 3
    monkeypatch.setattr(app, "_CHECK_SECONDS", 0.0)
    assert asyncio.run(ask(2)) == ["check 2", "check 3"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError("none left"), "MemoryError: none left"),
        (OSError(24, "Too many open files"), "OSError: [Errno 24] Too many open files"),
        (PredictorTimeout("the decoder is busy"), "the decoder is busy"),
        (SystemExit(3), "SystemExit: 3"),
    ],
    ids=repr,
)
def test_whatever_a_check_raises_is_a_fault(error: BaseException, reason: str) -> None:
    async def ask() -> str | None:
        return await Health(fail).refresh()

    def fail() -> None:
        raise error

    assert asyncio.run(ask()) == reason


def test_a_check_that_hangs_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_ANSWER_SECONDS", 0.1)
    hang = threading.Event()

    def check() -> None:
        hang.wait(20)

    async def ask() -> str | None:
        return await Health(check).refresh()

    assert asyncio.run(ask()) == "the decoders did not decode a test image within 0.1 s: they are busy, or hang"
    hang.set()
