"""Runs the scripts that run kernels in Triton's interpreter, each in a new process with TRITON_INTERPRET=1.

The interpreter needs numpy < 2.4.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["differences_of", "lines_of"]

TRITON = "3.6.0"
"""That of the pinned torch."""
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]


def lines_of(script: str, *arguments: str) -> list[str]:
    """What a script of this folder prints with these arguments, once it has ended without an error."""
    if (found := importlib.metadata.version("triton")) != TRITON:
        pytest.skip(f"quick_interpreter.py is for the interpreter of Triton {TRITON}, found {found}")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def differences_of(script: str) -> dict[str, float]:
    """The number that a script prints behind the name of each case."""
    return {name: float(text) for name, text in (line.rsplit(": ", 1) for line in lines_of(script))}
