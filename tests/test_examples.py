"""Runs the examples of docstrings, each docstring's in an empty folder."""

from __future__ import annotations

import doctest
import importlib
import os
from pathlib import Path

import pytest

import gpuflow

_ROOT = Path(gpuflow.__file__).parent


def _examples() -> list[doctest.DocTest]:
    """Return the docstrings that have an example."""
    finder = doctest.DocTestFinder()
    found = []
    for folder, _, files in os.walk(_ROOT, followlinks=True):  # gpuflow/stages is a link
        for path in (Path(folder, name) for name in sorted(files) if name.endswith(".py")):
            if ">>> " in path.read_text(encoding="utf-8"):
                parts = path.relative_to(_ROOT.parent).with_suffix("").parts
                name = ".".join(parts).removesuffix(".__init__")
                found += finder.find(importlib.import_module(name), name)
    return [example for example in found if example.examples]


@pytest.mark.parametrize("example", _examples(), ids=lambda example: example.name.removeprefix("gpuflow."))
def test_example(example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert runner.run(example, out=report.append).failed == 0, "".join(report)
