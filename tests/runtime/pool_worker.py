"""What the worker processes of test_worker_pool.py run, and pools of them. Imports little, as each test starts many."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from gpuflow.runtime.worker_pool import READY, ParentConnection, WorkerConnection, WorkerPool

SECONDS = 60.0


# --- the worker -------------------------------------------------------------------------------------------------------


def prepare(setup: bytes) -> None:
    """Nothing is needed."""


def work(connection: ParentConnection, prepared: None) -> None:
    """For each module: (its file, this process, its import paths)."""
    connection.send(READY)
    while True:
        module = import_module(connection.recv())
        connection.send((module.__file__, os.getpid(), sys.path))


# --- its pool ---------------------------------------------------------------------------------------------------------


@contextmanager
def pool_of(workers: int) -> Iterator[WorkerPool]:
    """A pool whose workers have started."""
    pool = WorkerPool("tests.runtime.pool_worker", connections=[1] * workers, setup=None, task="answer")
    pool.wait_until_ready(SECONDS)
    yield pool
    pool.close()


def ask(pool: WorkerPool, module: str) -> Any:
    """(the file, process id, import paths) of a worker that imports a module."""

    def exchange(worker: WorkerConnection) -> object:
        worker.send(module)
        return worker.answer()

    return pool.request(exchange)


def pids_of(pool: WorkerPool) -> list[int]:
    """The process ids of the workers, the fork server's first."""
    file, start = pool._servers[0]._pids
    pids: list[int] = json.loads(os.pread(file, 1 << 16, start))
    return pids


def wait_until(condition: Callable[[], bool]) -> bool:
    """Whether a condition holds within a minute."""
    end = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def state(pid: int) -> str:
    """The state of a process as proc(5) has it, Z for one that nobody waits for; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
