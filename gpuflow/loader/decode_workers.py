"""Chunks that worker processes read and decode, straight into the slots of a batch.

A thread that decodes needs the interpreter a dozen times an image, a tenth of its time. More than a few such threads
spend more time on getting it than on images. So a loader with many threads starts worker processes and hands chunks to
them once they are ready; until then, and where they cannot run the pipeline, its own threads do the work. Either way
`CpuRunner` does it, and the pixels are the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuflow.errors import BadSampleError, DecoderError
from gpuflow.execute.cpu import CpuRunner, CpuRunners
from gpuflow.execute.cpu_workers import open_runner, prepare, slots_in
from gpuflow.pipeline.stage import Keys
from gpuflow.pipeline.views import AnyProgram, ViewSlots
from gpuflow.runtime.buffers import BytePool
from gpuflow.runtime.worker_pool import ParentConnection, WorkerConnection, WorkerPool
from gpuflow.sources import Payload, Source, without_records

__all__ = ["DecodeWorkers", "Outcome", "decode", "prepare", "work"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a chunk's samples.

    faults [n]: None, or why a sample is bad. read_bytes, read_s: of the source. cpu_s: processor seconds in all.
    sizes [n, 3]: see `CpuRunner.run`; None if they were not asked for.
    """

    faults: list[BadSampleError | None]
    read_bytes: int
    read_s: float
    cpu_s: float
    sizes: NDArray[np.int64] | None = None


def decode(
    runner: CpuRunner | CpuRunners,
    payload: Payload,
    keys: Keys,
    slots: Any,
    sizes: NDArray[np.int64] | None = None,
) -> list[BadSampleError | None]:
    """A payload's samples into their slots, as `CpuRunner.run`; an unreadable one is bad without further ado."""
    faults = runner.run([payload.sample(i) for i in range(len(payload))], keys, slots, sizes)
    for i, error in enumerate(payload.errors):
        if error is not None:
            faults[i] = BadSampleError("read", error)
    return faults


class DecodeWorkers:
    """Worker processes that read and decode for one loader. Any thread may call any method.

    Args:
        threads: chunks at a time, of all workers together.
        processes: the workers that share them.
        idle: they run only where a core is idle (SCHED_IDLE).
    """

    def __init__(
        self, program: AnyProgram, source: Source, *, threads: int, processes: int, idle: bool = False
    ) -> None:
        shares = [len(range(worker, threads, processes)) for worker in range(processes)]
        self._pool = WorkerPool(
            __name__, connections=shares, setup=(without_records(source), program, idle), task="decode"
        )

    def run(self, indices: Sequence[int], keys: Keys, slots: Any, start: int, *, sizes: bool = False) -> Outcome | None:
        """Read and decode samples into slots [start, start + n) of a batch's (`slots_of`); None if no worker can.

        The slots then hold anything, and the caller has to decode into them itself. Raises only what ends the caller's
        own wait. sizes: whether to report the images' sizes.
        """

        def exchange(worker: WorkerConnection) -> Outcome | None:
            memory = slots.memory if isinstance(slots, ViewSlots) else slots
            shared = worker.send((indices, keys, start, len(memory), sizes), memory)
            outcome: Outcome | None = worker.answer() if shared else None
            return outcome

        return self._pool.request(exchange)

    def ready(self) -> bool:
        """Whether there is a worker that can be asked."""
        return self._pool.ready()

    def counts(self) -> dict[str, int]:
        """Workers `at_work`, and `starting`: not ready for chunks yet."""
        return self._pool.counts()

    def close(self) -> None:
        """Kill the workers."""
        self._pool.close()


# --- the worker -------------------------------------------------------------------------------------------------------


Setup = tuple[Source, AnyProgram, bool]


def work(connection: ParentConnection, setup: Setup | str) -> None:
    """Reads and decodes chunks until the connection is closed."""
    if isinstance(setup, str):
        connection.send(setup)
        return
    source, program, idle = setup
    if idle:
        with suppress(OSError):  # in a container that does not let us
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread
    runner, pool = open_runner(connection, program), BytePool()
    while runner is not None:
        indices, keys, start, batch, wants_sizes = connection.recv()
        memory = connection.memory()
        if memory is None:
            continue
        slots = slots_in(memory, program, start, len(indices), batch)
        try:
            sizes = np.empty((len(indices), 3), np.int64) if wants_sizes else None
            outcome = _run(source, runner, pool, indices, keys, slots, sizes)
        except DecoderError:
            return  # the pool then does without this worker
        except Exception:  # raised again by the thread that does the work instead
            outcome = None
        connection.send(outcome)


def _run(
    source: Source,
    runner: CpuRunner,
    pool: BytePool,
    indices: Sequence[int],
    keys: Keys,
    slots: Any,
    sizes: NDArray[np.int64] | None,
) -> Outcome:
    begun, cpu = time.perf_counter(), time.thread_time()
    payload = source.read(indices, pool.acquire)
    read_s = time.perf_counter() - begun
    faults = decode(runner, payload, keys, slots, sizes)
    pool.release(payload.buffer)
    return Outcome(faults, sum(payload.sizes), read_s, time.thread_time() - cpu, sizes)
