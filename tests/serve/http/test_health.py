"""Whether a service's decoders work: how often that is checked, and what is said."""

from __future__ import annotations

import asyncio

import pytest

from gpuflow.errors import DecoderError
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
