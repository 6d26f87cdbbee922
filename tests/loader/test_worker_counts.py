"""How many worker processes are started, and at which priority they decode next to a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpuflow.loader.read_workers import ProcessStorage
from tests.datasets import await_children, children

CODE = """
import os, pickle
from gpuflow.execute.cpu_workers import Setup, prepare, work
from gpuflow.stages import Decode, Resize
from tests.running import program_of

policies = []

class Connection:
    def send(self, value):
        pass

    def recv(self):
        policies.append(os.sched_getscheduler(0))
        raise EOFError

def run(idle):
    try:
        work(Connection(), prepare(pickle.dumps(Setup(program_of(Decode(), Resize(height=4, width=4)), idle=idle))))
    except EOFError:
        pass

run(False)
run(True)
print(*(policy == os.SCHED_IDLE for policy in policies))
"""


def test_as_many_reading_processes_as_were_asked_for() -> None:
    before = children()
    storage = ProcessStorage(3)
    try:
        await_children(3, before)
    finally:
        storage.close()


@pytest.mark.slow
def test_decoding_next_to_a_gpu_takes_only_idle_time() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], check=True, timeout=120, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"]
