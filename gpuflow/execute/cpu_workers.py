"""What worker processes that decode on the CPU share: how they say that they are ready, and how faults travel."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.errors import BadSampleError
from gpuflow.execute.cpu import CpuRunner
from gpuflow.pipeline.image_spec import STORAGE, slot_shape
from gpuflow.pipeline.program import Program
from gpuflow.runtime.worker_pool import Peer

__all__ = ["READY", "Told", "faults_of", "open_runner", "prepare", "slots_in", "told"]

READY = "ready"
"""What a process says once it can be asked."""

Told = tuple[str, str] | None
"""Of a sample: None, or the stage and the reason."""


def open_runner(peer: Peer, program: Program) -> CpuRunner | None:
    """A runner for this thread; None where none can be made. Says READY, or why not."""
    torch.set_num_threads(1)
    try:
        runner = CpuRunner(program)
    except Exception as error:
        peer.send(repr(error))
        return None
    peer.send(READY)
    return runner


def slots_in(memory: NDArray[np.uint8], program: Program, start: int, count: int) -> NDArray[Any]:
    """The slots [start, start + count) of a batch's memory."""
    shape, dtype = slot_shape(program.result), np.dtype(STORAGE[program.result.dtype])
    size = math.prod(shape) * dtype.itemsize
    return memory[start * size : (start + count) * size].view(dtype).reshape(-1, *shape)


def told(faults: Sequence[BadSampleError | None]) -> list[Told]:
    """What `faults_of` makes the same faults of in another process."""
    return [None if fault is None else (fault.stage, fault.reason) for fault in faults]


def faults_of(told: Sequence[Told]) -> list[BadSampleError | None]:
    return [None if fault is None else BadSampleError(*fault) for fault in told]


def prepare(setup: bytes) -> Any:
    """What was pickled, or what keeps it from being opened, in words. Leaves no thread behind."""
    torch.set_num_threads(1)
    try:
        return pickle.loads(setup)
    except Exception as error:  # a stage of the script that started us, for one, is not to be found here
        return repr(error)
