"""Runs the console script in the test's own process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from gpuflow.cli import main

__all__ = ["Done", "Run", "command_here"]


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]


def command_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *first: object) -> Run:
    """`gpuflow` with these arguments and those of each call."""

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["gpuflow", *map(str, first), *map(str, arguments)])
        monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # main replaces it
        with pytest.raises(SystemExit) as end:
            main()
        code = end.value.code
        return Done(code if isinstance(code, int) else 0, *capsys.readouterr())

    return run
