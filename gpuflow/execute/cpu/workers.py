"""The code of worker processes that decode on the CPU, which a loader's and a service's workers share."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from gpuflow.arrays import Bytes, Ints
from gpuflow.errors import BadSampleError, DecoderError
from gpuflow.execute.cpu.runner import CpuRunner
from gpuflow.pipeline.stage import Keys
from gpuflow.pipeline.views import AnyProgram, slot_bytes_of, slot_of, slots_of
from gpuflow.runtime.memory import BytePool
from gpuflow.runtime.worker_pool import READY, ParentConnection
from gpuflow.sources import Payload, Source

_first_call = threading.Lock()
"""torch's first call in a forked process creates its thread pool again, which fails if two threads do it at once."""


class Setup(NamedTuple):
    """A worker's program, and how it works.

    source: read from by requests of type `ReadRequest`.
    """

    program: AnyProgram
    source: Source | None = None


class ReadRequest(NamedTuple):
    """A request to read and decode samples into the slots of a batch from `start` on.

    The parent shares the batch's memory next. batch: its number of samples. wants_sizes: see `Outcome.sizes`.
    """

    indices: Sequence[int]
    keys: Keys
    start: int
    batch: int
    wants_sizes: bool


class DecodeRequest(NamedTuple):
    """A request to decode samples into the slots of a batch from `start` on.

    The parent shares two memories next: the encoded bytes and the batch's. offsets, sizes [N]: of the samples in the
    encoded bytes. batch: the batch's number of samples.
    """

    offsets: Sequence[int]
    sizes: Sequence[int]
    keys: Keys
    start: int
    batch: int


class Outcome(NamedTuple):
    """The answer to a `ReadRequest`.

    faults [n]: None, or why a sample is bad. read_bytes, read_s: of the source. cpu_s: processor seconds in all.
    sizes [n, 3]: see `CpuRunner.run`; None if they were not asked for.
    """

    faults: list[BadSampleError | None]
    read_bytes: int
    read_s: float
    cpu_s: float
    sizes: Ints | None = None


def prepare(setup: bytes) -> Any:
    """Unpickle the setup, or return why it cannot be unpickled, as text. Starts no thread."""
    torch.set_num_threads(1)
    try:
        loaded = pickle.loads(setup)
        CpuRunner(loaded.program)  # loads what stages call, for all workers
        return loaded
    except Exception as error:  # such as a stage that is defined in the script that started the loader
        return repr(error)


def open_runner(connection: ParentConnection, program: AnyProgram) -> Any:
    """Return a runner for this thread, or None if there can be none. Send READY, or the reason."""
    with _first_call:
        torch.set_num_threads(1)
    try:
        runner = CpuRunner(program)
    except Exception as error:
        connection.send(repr(error))
        return None
    connection.send(READY)
    return runner


def _slots_in(memory: Bytes, program: AnyProgram, start: int, count: int, batch: int) -> Any:
    """Return the slots [start, start + count) in the memory of a batch of `batch` samples."""
    shape, dtype = slot_of(program)
    size = slot_bytes_of(program) * batch
    return slots_of(program, memory[:size].view(dtype).reshape(-1, *shape))[start : start + count]


def work(connection: ParentConnection, setup: Setup | str) -> None:
    """Answer requests until the connection is closed: `ReadRequest`, `DecodeRequest`, or None for a check.

    A check decodes gpuflow's test image.
    If the work raises, the answer is None. A thread of the parent then does the work, and raises the error again.
    """
    if isinstance(setup, str):
        connection.send(setup)
        return
    runner, pool = open_runner(connection, setup.program), BytePool()
    with suppress(DecoderError):  # the pool then does without this worker
        while runner is not None:
            request = connection.recv()
            encoded = connection.memory() if isinstance(request, DecodeRequest) else None
            memory = None if request is None else connection.memory()
            if request is not None and memory is None:
                continue
            try:
                answer = _answer(setup, runner, pool, request, encoded, memory)
            except DecoderError:
                raise
            except Exception:
                answer = None
            connection.send(answer)


def _answer(setup: Setup, runner: CpuRunner, pool: BytePool, request: Any, encoded: Any, memory: Any) -> Any:
    """Return the answer to one request. Raises DecoderError if the decoder fails on gpuflow's test image."""
    if request is None:
        runner.check()
        return None
    count = len(request.keys.positions)
    slots = _slots_in(memory, setup.program, request.start, count, request.batch)
    if isinstance(request, DecodeRequest):
        errors = [None] * count
        payload = Payload(buffer=encoded, offsets=request.offsets, sizes=request.sizes, errors=errors)
        return runner.run(payload, request.keys, slots)
    assert setup.source is not None
    begun, cpu = time.perf_counter(), time.thread_time()
    payload = setup.source.read(request.indices, pool.acquire)
    read_s = time.perf_counter() - begun
    sizes = np.empty((count, 3), np.int64) if request.wants_sizes else None
    faults = runner.run(payload, request.keys, slots, sizes)
    pool.release(payload.buffer)
    return Outcome(faults, sum(payload.sizes), read_s, time.thread_time() - cpu, sizes)
