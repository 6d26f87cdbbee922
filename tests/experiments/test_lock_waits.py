"""experiments/ranks/lock_waits: each wait of a thread for a lock is recorded, with what waited and how long, and for
how long each thread has Python's interpreter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.scripts import imported

HERE = Path(__file__).parents[2] / "experiments" / "ranks"
PROGRAM = """
import ctypes, os, sys, threading, time

def compute():
    end = time.perf_counter() + 0.3
    while time.perf_counter() < end:
        sum(range(50))

library = ctypes.CDLL(os.environ["LD_PRELOAD"])
threads = [threading.Thread(target=compute) for _ in range(2)]
library.lock_waits_start()
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
library.lock_waits_write(os.fsencode(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def lock_waits() -> Iterator[Any]:
    with imported(HERE, ["one_rank", "lock_waits"]) as modules:
        yield modules["lock_waits"]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_threads_that_compute_in_turn_wait_for_the_interpreter(lock_waits: Any, tmp_path: Path) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(lock_waits.compiled(str(tmp_path)))}
    found = tmp_path / "waits"
    subprocess.run([sys.executable, "-c", PROGRAM, str(found)], env=environment, check=True, timeout=60)
    lines = list(lock_waits.lines(found, 1))
    threads = [line for line in lines if line.startswith("  thread")]
    assert len(threads) >= 2, "both threads waited"
    waits = [float(line.split("a step,")[1].split("ms")[0]) for line in lines if lock_waits.INTERPRETER in line]
    assert 100 < sum(waits) < 700, "of 0.3 s, in which both compute, each waits for about half"
    (in_use,) = (float(line.split("for")[1].split("ms")[0]) for line in lines if "interpreter is in use" in line)
    assert 100 < in_use < 700, "nearly all of the time by one of them"


def test_waits_of_a_step_the_longest_first(lock_waits: Any, tmp_path: Path) -> None:
    found = tmp_path / "waits"
    found.write_text(
        "1\twrite lock\t0\t20\t4000000\tlibcuda.so.1:?|libcudart.so.13:cudaLaunchKernel|python:main|\n"
        "1\twrite lock\t1\t2\t2000000\tlibcuda.so.1:?|libcudart.so.13:cudaFree|python:main|\n"
        "1\tcondition with a time limit\t0\t10\t6000000\tpython:?|python:PyEval_RestoreThread|\n"
        "1\tmutex\t0\t1\t1000\tpython:main|\n"
        "2\tmutex\t0\t1\t1000\tpython:main|\n"
        "2\thas the interpreter\t1\t4\t1000000\t\n"
        "1\thas the interpreter\t1\t8\t3000000\t\n"
    )
    assert list(lock_waits.lines(found, 2)) == [
        "  the interpreter is in use for 2.00 ms a step",
        "        4.0 times a step,   1.50 ms a step: thread 1 of a library",
        "        2.0 times a step,   0.50 ms a step: thread 2 of a library",
        "  thread 1 of a library",
        "        5.0 a step,   3.00 ms a step: Python's interpreter, python:PyEval_RestoreThread",
        "       10.0 a step,   2.00 ms a step: write lock, libcudart.so.13:cudaLaunchKernel",
        "        1.0 a step,   1.00 ms a step: write lock while it has Python's interpreter, libcudart.so.13:cudaFree",
    ]
