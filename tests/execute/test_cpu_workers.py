"""Decoding worker processes: what each thread of one sets up."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import pickle, threading
import torch
from gpuflow.execute.cpu_workers import open_runner, prepare
from gpuflow.runtime.worker_pool import READY
from gpuflow.stages import Decode, Resize
from tests.running import program_of

sent, threads = [], []

class Connection:
    def send(self, value):
        sent.append(value)

def work():
    runner = open_runner(Connection(), program)
    threads.append((runner is not None, torch.get_num_threads()))

torch.set_num_threads(3)
program = prepare(pickle.dumps(program_of(Decode(), Resize(height=4, width=4))))
before = torch.get_num_threads()
torch.set_num_threads(3)
thread = threading.Thread(target=work)
thread.start()
thread.join()
assert sent == [READY] and threads == [(True, 1)] and before == 1, (sent, threads, before)
assert isinstance(prepare(b"damaged"), str)
assert open_runner(Connection(), None) is None
assert len(sent) == 2 and "NoneType" in sent[1], sent
"""


@pytest.mark.slow
def test_one_thread_of_torch_for_each_thread_of_a_worker() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=120)
