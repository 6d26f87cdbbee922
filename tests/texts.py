"""Pins the texts of errors, each once: in errors.json in the folder of the tests that cause them.

Tests compare what code and users rely on: the type of an error, its place, path, code and value. A text that changes
fails once for each module. To write the texts of a folder anew, and to read what changed:

    python -m pytest tests/config --record-texts
    git diff tests/config/errors.json
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuflow.errors import UNSET, ConfigError, GpuflowError, Problem, dotted, show

_caused: dict[str, set[str]] = defaultdict(set)
"""The texts of the running module, by test function."""


def pin(error: BaseException) -> str:
    """Return the text of an error, which must be one of its test in errors.json."""
    name = os.environ["PYTEST_CURRENT_TEST"].partition("::")[2].partition(" (")[0].partition("[")[0]
    _caused[name].add(str(error))
    return str(error)


def outline(error: GpuflowError) -> str:
    """Pin the text of an error, and return it without sentences.

    A ConfigError has a line for each problem, such as `x.yaml:7: run.threads config.range, got 0`. Of another error
    stay what it is about, its first word, and the value: `list.csv:17, got 12`.
    """
    text = pin(error)
    if isinstance(error, ConfigError):
        return "\n".join(map(_outline, error.problems))
    value = re.search(r", got:? ([^;]*)", text)
    return text.split(maxsplit=1)[0].rstrip(":") + (f", got {value[1]}" if value else "")


def _outline(problem: Problem) -> str:
    got = "" if problem.value is UNSET else f", got {show(problem.value)}"
    return " ".join(part for part in (problem.place, dotted(problem.path), f"{problem.code}{got}") if part)


@contextmanager
def compared(module: Path, directories: Path, *, record: bool) -> Iterator[None]:
    """Compare the texts that a module's tests pin in this block with errors.json, or write them there.

    directories: where pytest makes those of tests, whose names differ.
    """
    _caused.clear()
    yield
    found = {name: sorted({_comparable(text, directories) for text in texts}) for name, texts in _caused.items()}
    path = module.with_name("errors.json")
    everything = json.loads(path.read_text()) if path.exists() else {}
    if record:
        everything = {name: texts for name, texts in {**everything, module.name: found}.items() if texts}
        if everything:
            path.write_text(json.dumps(everything, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        return
    pinned = everything.get(module.name, {})
    changed = [f"{name}: {text}" for name, texts in found.items() for text in texts if text not in pinned.get(name, ())]
    if changed:
        shown = "\n".join(changed)
        pytest.fail(f"texts that are not in {path}; tests/texts.py says how to write it anew:\n{shown}", pytrace=False)


def _comparable(text: str, directories: Path) -> str:
    """Return a text without the names of temporary directories and the ports of servers."""
    shared = directories.parent if directories.name.startswith("popen-") else directories  # of all processes of xdist
    text = re.sub(rf"{re.escape(str(shared))}/(popen-[^/]+/)?[^/\s']+", "TMP", text)
    return re.sub(r"(?<=http://127\.0\.0\.1:)\d+", "PORT", text)
