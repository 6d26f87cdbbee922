"""The code of worker processes that decode on the CPU, which a loader's and a service's workers share."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.errors import BadSampleError, DecoderError
from gpuflow.execute.cpu import CpuRunner
from gpuflow.pipeline.stage import Keys
from gpuflow.pipeline.views import AnyProgram, slot_bytes_of, slot_of, slots_of
from gpuflow.runtime.worker_pool import READY, ParentConnection

__all__ = ["decode_shared", "open_runner", "prepare", "slots_in"]

_first_call = threading.Lock()
"""torch's first call in a forked process creates its thread pool again, which fails if two threads do it at once."""


def prepare(setup: bytes) -> Any:
    """The unpickled setup, or why it cannot be unpickled, as text. Starts no thread."""
    torch.set_num_threads(1)
    try:
        return pickle.loads(setup)
    except Exception as error:  # such as a stage that is defined in the script that started the loader
        return repr(error)


def open_runner(connection: ParentConnection, program: AnyProgram) -> Any:
    """A runner for this thread, or None if that fails. Sends READY, or the reason."""
    with _first_call:
        torch.set_num_threads(1)
    try:
        runner = CpuRunner(program)
    except Exception as error:
        connection.send(repr(error))
        return None
    connection.send(READY)
    return runner


def slots_in(memory: NDArray[np.uint8], program: AnyProgram, start: int, count: int, batch: int | None = None) -> Any:
    """The slots [start, start + count) in a batch's memory. batch: the batch's number of samples, needed with views."""
    shape, dtype = slot_of(program)
    size = slot_bytes_of(program) * (start + count if batch is None else batch)
    return slots_of(program, memory[:size].view(dtype).reshape(-1, *shape))[start : start + count]


def decode_shared(
    connection: ParentConnection,
    program: AnyProgram,
    runner: CpuRunner,
    start: int,
    offsets: Sequence[int],
    sizes: Sequence[int],
    keys: Keys,
    batch: int | None = None,
) -> list[BadSampleError | None] | None:
    """Decode samples from one memory that the parent shares next, the encoded bytes, to another one, a batch's slots.

    Args:
        start: the slot of the first sample. offsets, sizes [N]: of the samples in the encoded bytes.
        keys: of them.
        batch: see `slots_in`.

    Returns:
        For each sample its error or None. None in place of the list if decoding raised: a thread of the parent then
        does the work, and raises that again.

    Raises DecoderError.
    """
    encoded, slots = connection.memory(), connection.memory()
    assert encoded is not None and slots is not None
    samples = [encoded[offset : offset + length] for offset, length in zip(offsets, sizes, strict=True)]
    try:
        return runner.run(samples, keys, slots_in(slots, program, start, len(samples), batch))
    except DecoderError:
        raise
    except Exception:
        return None
