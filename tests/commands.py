"""Runs the console script in the test's own process."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpuflow.cli import main

__all__ = ["REFERENCE", "Done", "Run", "command_here", "document_of", "documented", "keys_of"]

REFERENCE = (Path(__file__).parents[1] / "docs/reference/commands.md").read_text(encoding="utf-8")


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


def documented(command: str) -> set[str]:
    """The keys that the reference lists of a command's document, `NAME` standing for any key."""
    return set(re.findall(rf"^\| `?{command}`? \| `([\w.]+)` \|", REFERENCE, flags=re.MULTILINE))


def keys_of(values: dict[str, Any], keys: set[str]) -> set[str]:
    """The keys of a document, as deep as the reference lists them."""
    found = set()
    for key, value in values.items():
        inner = {one.partition(".")[2].removeprefix("NAME.") for one in keys if one.startswith(f"{key}.")}
        found |= {f"{key}.NAME.{name}" for each in value.values() for name in each} if inner else {key}
    return found


def document_of(command: str, done: Done) -> dict[str, Any]:
    """The document that a command printed, which has the keys of the reference and no errors."""
    document: dict[str, Any] = json.loads(done.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    keys = documented(command)
    assert keys_of(document, keys) == keys | documented("all")
    assert (document["version"], document["exit_code"], document["errors"]) == (1, done.code, [])
    return document
