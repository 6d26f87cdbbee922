"""Decoding worker processes: what each thread of one sets up."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from gpuflow.execute.cpu.workers import Setup, prepare
from gpuflow.spec import ImageSpec, Opaque
from gpuflow.stages import Decode, Resize
from tests.running import program_of

CODE = """
import pickle, threading
import torch
from gpuflow.execute.cpu.workers import Setup, open_runner, prepare
from gpuflow.runtime.worker_pool import READY
from gpuflow.stages import Decode, Resize
from tests.running import program_of

sent, threads = [], []

class Connection:
    def send(self, value):
        sent.append(value)

def work():
    runner = open_runner(Connection(), setup.program)
    threads.append((runner is not None, torch.get_num_threads()))

torch.set_num_threads(3)
setup = prepare(pickle.dumps(Setup(program_of(Decode(), Resize(height=4, width=4)))))
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


@dataclass(frozen=True, kw_only=True, repr=False)
class Built(Opaque):
    """Counts how often it is prepared in this process."""

    stage_name: ClassVar[str] = "built"
    prepared: ClassVar[list[str]] = []

    def prepare(self) -> None:
        self.prepared.append(self.stage_name)

    def output(self, spec: ImageSpec) -> ImageSpec:
        return spec


def test_stages_are_prepared_before_workers_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Built, "prepared", [])
    setup = pickle.dumps(Setup(program_of(Decode(), Resize(height=4, width=4), Built())))
    assert Built.prepared == []
    threads = torch.get_num_threads()
    try:
        loaded = prepare(setup)
    finally:
        torch.set_num_threads(threads)
    assert isinstance(loaded, Setup) and Built.prepared == ["built"]
