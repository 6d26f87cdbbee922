"""Preprocessing on many cores where a model is served: worker processes decode a batch's images.

So threads that decode do not take the interpreter from those that launch the model and that answer; with more than
four threads, processes answered more requests (measured in experiments/service, before an image was one native call).
They get the encoded bytes and give the pixels through memory that they share with this process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.errors import BadSampleError
from gpuflow.execute import cpu_workers
from gpuflow.execute.cpu import CpuRunner
from gpuflow.execute.cpu_workers import DecodeRequest, Setup
from gpuflow.pipeline.image_spec import STORAGE, as_batch, slot_shape
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.stage import Keys
from gpuflow.runtime.buffers import BytePool, SlotPool
from gpuflow.runtime.memory import shared
from gpuflow.runtime.threads import use_torch_threads
from gpuflow.runtime.worker_pool import Pending, WorkerConnection, WorkerPool
from gpuflow.sources import Payload

__all__ = ["CpuPreprocessor"]

_START_SECONDS, _RESTART_SECONDS = 30.0, 10.0
_KEPT_BATCHES = 4


class CpuPreprocessor:
    """Encoded images to images, several at a time. Any thread may call any method.

    Waits until the worker processes have started, for half a minute at most. What no worker can do, the caller's
    thread does. Workers that are lost are started again, at most every ten seconds.

    Args:
        program: of the block `serve`.
        batch: how many files `run` gets at most.
        processes: to start, one at least.
    """

    def __init__(self, program: Program, *, batch: int, processes: int) -> None:
        self._program = program
        self._runners = CpuRunner(program)
        self._bytes = BytePool(make=shared)
        dtype = np.dtype(STORAGE[program.result.dtype])
        self._slots = SlotPool((batch, *slot_shape(program.result)), dtype, keep=_KEPT_BATCHES, make=shared)
        self._pool = WorkerPool(
            cpu_workers.__name__,
            connections=[1] * processes,
            setup=Setup(program),
            task="decode",
            restart_seconds=_RESTART_SECONDS,
        )
        self._pool.wait_until_ready(_START_SECONDS)

    def run(self, files: Sequence[bytes]) -> list[torch.Tensor | BadSampleError]:
        """For each file its image [1, C, H, W], or why it is bad. The images are rows of one batch in memory.

        Raises what preprocessing one of them raises besides that.
        """
        payload = Payload.of(files, self._bytes.acquire)
        slots = self._slots.acquire(len(files))
        parts = _parts(len(files), max(1, self._pool.counts()["at_work"]))
        requests = [(part, self._begin(payload, part, slots)) for part in parts]
        faults: list[BadSampleError | None] = [None] * len(files)
        errors: list[Exception] = []
        requests.sort(key=lambda request: request[1] is None)  # this process does its parts while the workers do others
        try:
            while requests:
                part, pending = requests.pop()
                answer: list[BadSampleError | None] | None = None if pending is None else pending.result()
                try:
                    faults[part] = self._run(payload, part, slots) if answer is None else answer
                except Exception as error:  # raised once all workers have answered, which can work on
                    errors.append(error)
        except BaseException:
            for _, pending in requests:
                if pending is not None:
                    pending.abandon()
            raise
        self._bytes.release(payload.buffer)
        if errors:
            raise errors[0]
        batch = as_batch(slots, self._program.result)
        return [batch[i : i + 1] if fault is None else fault for i, fault in enumerate(faults)]

    def _begin(self, payload: Payload, part: slice, slots: NDArray[Any]) -> Pending | None:
        """Have a worker decode a part of the files, if one is free."""

        def send(worker: WorkerConnection) -> bool:
            sizes = payload.sizes[part]
            job = DecodeRequest(payload.offsets[part], sizes, _keys(len(sizes)), part.start, len(payload))
            return worker.send(job, payload.buffer, slots)

        return self._pool.begin(send)

    def check(self) -> None:
        """Have each worker that is idle, and this process, decode gpuflow's own test image. One that fails is killed.

        Raises DecoderError where this process fails.
        """

        def exchange(worker: WorkerConnection) -> None:
            worker.send(None)
            worker.answer()

        self._pool.each_idle(exchange)
        self._runners.check()

    def _run(self, payload: Payload, part: slice, slots: NDArray[Any]) -> list[BadSampleError | None]:
        """A part of the files on this thread."""
        use_torch_threads(1)
        samples = payload.take(range(part.start, part.stop))
        return self._runners.run(samples, _keys(len(samples)), slots[part])

    def close(self) -> None:
        """Kill the workers and free the memory."""
        self._pool.close()
        self._bytes.clear()
        self._slots.clear()
        self._runners.clear()


def _parts(count: int, most: int) -> Iterator[slice]:
    """At most `most` parts of neighbours, whose lengths differ by one at most."""
    parts = min(count, most)
    ends = [count * (number + 1) // parts for number in range(parts)]
    return itertools.starmap(slice, itertools.pairwise([0, *ends]))


def _keys(count: int) -> Keys:
    """Nothing is drawn where a model is served."""
    return Keys(0, 0, np.zeros(count, np.int64))
