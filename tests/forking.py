"""Runs scripts as forks of one interpreter that has imported torch and gpuflow, which takes a new one seconds.

Each script runs as `__main__` of a separate process, which behaves as one that `python -c` started: it begins with one
thread and without a loader, and ends with the normal shutdown of the interpreter.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self, final

from tests.datasets import BUSY

ROOT = Path(__file__).parents[1]
_LOADING = """
import gpuflow.loader.epoch, gpuflow.loader.lowering, spdl.pipeline
from tests.datasets import *
"""
_SERVER = """
import gc, json, os, signal, sys

gc.collect()
gc.freeze()  # or each collection of a fork would visit, and copy, all of torch
assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack this process's other threads"
for line in sys.stdin:
    task = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(json.dumps(child), flush=True)
    print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])), flush=True)
else:
    sys.exit()
os.setsid()
os.chdir(task["directory"])
os.environ.clear()
os.environ.update(task["environment"])
for stream, path in ((1, task["out"]), (2, task["err"])):
    opened = os.open(path, os.O_WRONLY | os.O_APPEND)
    os.dup2(opened, stream)
    os.close(opened)
nothing = os.open(os.devnull, os.O_RDONLY)
os.dup2(nothing, 0)
os.close(nothing)
sys.argv = ["-c", *task["arguments"]]
__builtins__.task = task
for name in [*globals()]:
    if not name.startswith("__"):
        del globals()[name]
del name
exec(compile(__builtins__.__dict__.pop("task")["code"], "<string>", "exec"))
"""


@final
class Forked:
    """A process that runs a script. `returncode` is None until `wait` returns."""

    def __init__(self, pid: int, out: Path, err: Path, answers: IO[str]) -> None:
        self.pid, self._out, self._err, self._answers = pid, out, err, answers
        self.returncode: int | None = None

    @property
    def stdout(self) -> str:
        """What it has written so far."""
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def await_output(self, text: str, seconds: float = 60.0) -> None:
        """Wait until this stands in its output."""
        end = time.monotonic() + BUSY * seconds
        while text not in self.stdout:
            assert time.monotonic() < end, f"it does not write {text!r}: {self.stderr}"
            time.sleep(0.01)

    def wait(self, seconds: float = 60.0) -> None:
        """Wait for its end. Kills it after far more than `seconds`."""
        timer = threading.Timer(BUSY * seconds, os.kill, (self.pid, signal.SIGKILL))
        timer.start()
        self.returncode = json.loads(self._answers.readline())
        timer.cancel()
        timer.join()


Python = Callable[..., Forked]


@final
class Interpreter:
    """Forks one script at a time. A context manager; the end of the block ends the interpreter.

    directory: for what the scripts write. imports: source text that imports what they use; it may start no thread.
    """

    def __init__(self, directory: Path, imports: str = _LOADING) -> None:
        self._directory, self._count = directory, 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", imports + _SERVER],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    @contextmanager
    def start(self, code: str, *arguments: str, cwd: Path = ROOT, **environment: str) -> Iterator[Forked]:
        """Run a script, with this process's environment and these variables. It is killed at the end of the block."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        self._count += 1
        out, err = (self._directory / f"{self._count}.{name}" for name in ("out", "err"))
        for path in (out, err):
            path.write_text("")
        task = {
            "code": code,
            "arguments": arguments,
            "out": str(out),
            "err": str(err),
            "directory": str(cwd),
            "environment": {**os.environ, "OMP_NUM_THREADS": "1", **environment},
        }
        requests.write(json.dumps(task) + "\n")
        requests.flush()
        forked = Forked(json.loads(answers.readline()), out, err, answers)
        try:
            yield forked
        finally:
            if forked.returncode is None:
                os.kill(forked.pid, signal.SIGKILL)
                forked.wait()

    def run(self, code: str, *arguments: str, seconds: float = 60.0, cwd: Path = ROOT, **environment: str) -> Forked:
        """Run a script to its end. Kills it, as `tests.datasets.python` does, after far more than `seconds`."""
        with self.start(code, *arguments, cwd=cwd, **environment) as forked:
            forked.wait(seconds)
        return forked
