"""Decodes in advance, on the CPU, the images that a GPU's decoder does not support.

Worker processes do that, which share the memory of the encoded bytes and of the results with this process. How many
there are follows from the share of such images that is seen. Until they have started, the calling thread decodes.

A request is sent by the thread that prepares a chunk, and its answer is received by the thread that launches the chunk:
no thread waits in between, since each one that wakes up needs the interpreter.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.errors import BadSampleError
from gpuflow.execute import cpu_workers
from gpuflow.execute.cpu import CpuRunner
from gpuflow.execute.cpu_workers import DecodeRequest, Setup
from gpuflow.pipeline.stage import Keys
from gpuflow.pipeline.views import AnyProgram, slot_bytes_of, slot_of, slots_of
from gpuflow.runtime.buffers import BytePool
from gpuflow.runtime.memory import shared_and_pinned, shared_block
from gpuflow.runtime.worker_pool import Pending, WorkerConnection, WorkerPool
from gpuflow.sources import Payload

__all__ = ["CpuDecodePool", "PendingImages"]

_FEW_PART_IMAGES, _PART_IMAGES, _REQUESTS = 4, 8, 4
"""A request to a worker process has 4 images on average, 8 if there are few workers, or all of a chunk: requests take
time of the process that trains. At most 4 requests wait for one worker or are being answered."""
_FEW_IMAGES, _FEW_SHARE = 8, 0.003
"""No process is started for fewer images, or a smaller share of all images."""
_PRIOR_IMAGES = 1000
"""The assumed number of earlier images that the GPU decoded, so that a few refused images at first start no process.
The number of processes follows from the share of refused images; each start takes seconds, so there should be one."""
_CORES_FOR_ALL = 20.0
"""Processes for each core if the GPU took no image at all. The JPEG engines decode 80 times as many images a second as
one core decodes progressive JPEGs. With half as many, five processes limited a loader with 3.5% of such images."""
_KEPT_BYTES = 1 << 30


class _Part:
    """Some samples of a payload: `rows` are their places in it.

    memory: of the results of a chunk's `count` samples. slots: those of this part, from the number `start` on.
    faults: what became of them, once they are decoded. pending: the request for them, once one is sent.
    """

    def __init__(
        self,
        payload: Payload,
        rows: Sequence[int],
        keys: Keys,
        memory: NDArray[np.uint8],
        slots: Any,
        start: int,
        count: int,
    ) -> None:
        self.payload, self.rows, self.keys = payload, rows, keys
        self.memory, self.slots, self.start, self.count = memory, slots, start, count
        self.faults: list[BadSampleError | None] | None = None
        self.pending: Pending | None = None

    def send(self, worker: WorkerConnection) -> bool:
        offsets, sizes = ([values[i] for i in self.rows] for values in (self.payload.offsets, self.payload.sizes))
        return worker.send(
            DecodeRequest(offsets, sizes, self.keys, self.start, self.count), self.payload.buffer, self.memory
        )


class PendingImages:
    """Images of one chunk that are being decoded.

    rows [n]: their places in the chunk. memory: holds the results. parts: how they are divided.
    """

    def __init__(
        self, pool: CpuDecodePool, rows: NDArray[np.int64], memory: NDArray[np.uint8], results: NDArray[np.uint8]
    ) -> None:
        self.rows, self.memory = rows, memory
        self._pool, self._results, self.parts = pool, results, list[_Part]()

    def result(self) -> tuple[torch.Tensor, list[BadSampleError | None]]:
        """Wait for the results, uint8 [n, bytes of a slot], which `slots_of` takes, in memory that the GPU copies from;
        and for each sample None, or why it is bad.

        Raises what decoding raises.
        """
        faults = [fault for part in self.parts for fault in self._pool.finish(part)]
        self.parts.clear()
        return torch.from_numpy(self._results), faults

    def __del__(self) -> None:
        """A chunk that is never launched leaves requests behind, whose answers must be received."""
        self._pool.leave(self.parts)


class CpuDecodePool:
    """Runs a program on the CPU for one `GpuRunner`. Any thread may call any method.

    Args:
        processes: the largest number of worker processes.
        cores: that this process may use.
        make: allocates memory that worker processes can map and the GPU copies from.
    """

    def __init__(
        self,
        program: AnyProgram,
        *,
        processes: int,
        cores: int,
        make: Callable[[int], NDArray[np.uint8]] = shared_and_pinned,
    ) -> None:
        self._program, self._most, self._cores = program, processes, cores
        self._runners = CpuRunner(program)
        self._results = BytePool(keep=_KEPT_BYTES, make=make)
        self._lock = threading.Lock()
        self._workers: list[WorkerPool] = []
        self._starting: WorkerPool | None = None
        self._unsent: deque[_Part] = deque()
        self._left: deque[_Part] = deque()
        self._seen, self._taken, self._closed = 0, 0, False

    def begin(self, payload: Payload, rows: NDArray[np.int64], keys: Keys) -> PendingImages:
        """Begin to decode the samples `rows` of a payload, whose buffer must stay as it is until the result is there.

        keys: of all samples of the payload.
        """
        shape, dtype = slot_of(self._program)
        slot_bytes = slot_bytes_of(self._program)
        workers = self._adapt(len(payload), len(rows))
        step = min(_PART_IMAGES, max(_FEW_PART_IMAGES, len(rows) // max(1, workers)))
        parts = _deal(np.asarray(payload.sizes, np.int64)[rows], -(-len(rows) // step))
        rows = rows[np.concatenate(parts)]
        memory = self._results.acquire(len(rows) * slot_bytes)
        results = memory[: len(rows) * slot_bytes].reshape(len(rows), slot_bytes)
        slots = slots_of(self._program, results.view(dtype).reshape(-1, *shape))
        pending = PendingImages(self, rows, memory, results)
        start = 0
        for part in parts:
            own = slice(start, start + len(part))
            taken = rows[own]
            pending.parts.append(_Part(payload, taken.tolist(), keys.take(taken), memory, slots[own], start, len(rows)))
            start += len(part)
        if workers and shared_block(payload.buffer) is not None and shared_block(memory) is not None:
            with self._lock:
                self._unsent.extend(pending.parts)
                self._send_all()
        else:
            for one in pending.parts:
                self._decode_here(one)
        return pending

    def count(self, images: int) -> None:
        """Count images of a chunk that the GPU decodes all."""
        with self._lock:
            self._seen += images
            self._receive_left()

    def finish(self, part: _Part) -> list[BadSampleError | None]:
        """What became of a part's samples, once they are decoded."""
        if part.faults is None and part.pending is None:
            with self._lock, suppress(ValueError):
                self._unsent.remove(part)  # no worker was free yet: this thread is
        if part.pending is not None:
            part.faults = _receive(part)
            with self._lock:
                self._send_all()  # the worker is free
        return part.faults if part.faults is not None else self._decode_here(part)

    def leave(self, parts: Sequence[_Part]) -> None:
        """Abandon parts of a chunk that is never launched."""
        self._left.extend(part for part in parts if part.faults is None)

    def release(self, memory: NDArray[np.uint8]) -> None:
        """Use the memory of a result again."""
        self._results.release(memory)

    @property
    def is_starting(self) -> bool:
        """Whether processes are starting."""
        return self._starting is not None

    def _adapt(self, images: int, taken: int) -> int:
        """Count images, and start processes if far more are needed than there are. Returns how many are at work."""
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("this loader was closed while images were being decoded")
            self._seen, self._taken = self._seen + images, self._taken + taken
            at_work, share = sum(map(len, self._workers)), self._taken / self._seen
            enough = self._taken >= max(_FEW_IMAGES, _FEW_SHARE * (self._seen + _PRIOR_IMAGES))
            needed = min(self._most, math.ceil(_CORES_FOR_ALL * share * self._cores))
            if self._starting is not None:
                self._starting.ready()
                if self._starting.counts()["starting"] == 0:
                    if len(self._starting) == 0:
                        self._most = at_work  # others could not start either
                    self._workers.append(self._starting)
                    self._starting = None
            elif enough and needed > at_work + at_work // 2:
                connections = [_REQUESTS] * (needed - at_work)
                self._starting = WorkerPool(
                    cpu_workers.__name__,
                    connections=connections,
                    setup=Setup(self._program, one_at_a_time=True),
                    task="decode",
                )
            return sum(map(len, self._workers))

    def _receive_left(self) -> None:
        """Receive the answers for abandoned parts that are there; drop what was not sent. The caller holds the lock.

        The other parts stay, because workers still use their memory; a worker that does not answer in time is killed.
        """
        for _ in range(len(self._left)):
            part = self._left.popleft()
            with suppress(ValueError):
                self._unsent.remove(part)
            if part.pending is None:
                continue
            if part.pending.is_answered():
                _receive(part)
            elif not part.pending.expire():
                self._left.append(part)

    def _send_all(self) -> None:
        """Send what was not sent, as far as workers take it. The caller holds the lock."""
        self._receive_left()
        while self._unsent:
            pools = sorted(self._workers, key=lambda pool: pool.load)
            pending = next(filter(None, (pool.begin(self._unsent[0].send) for pool in pools)), None)
            if pending is None:
                return
            self._unsent.popleft().pending = pending

    def _decode_here(self, part: _Part) -> list[BadSampleError | None]:
        part.faults = self._runners.run(part.payload.take(part.rows), part.keys, part.slots)
        return part.faults

    def close(self) -> None:
        """Kill the workers and free the memory."""
        with self._lock:
            self._closed = True
            pools = [*self._workers, *([self._starting] if self._starting is not None else [])]
            self._unsent.clear()
        for pool in pools:
            pool.close()
        self._left.clear()
        self._results.clear()
        self._runners.clear()


def _deal(sizes: NDArray[np.int64], parts: int) -> list[NDArray[np.int64]]:
    """Deal files of these sizes [N] to at most `parts` parts of about equal size, each the numbers of its files.

    The largest first, each to the smallest part so far (longest processing time first, Graham 1969): how long a file
    takes follows roughly from its size.
    """
    dealt: list[list[int]] = [[] for _ in range(parts)]
    smallest = [(0, part) for part in range(parts)]
    for number in np.argsort(-sizes, kind="stable").tolist():
        total, part = smallest[0]
        dealt[part].append(number)
        heapq.heapreplace(smallest, (total + int(sizes[number]), part))
    return [np.array(part, np.int64) for part in dealt if part]


def _receive(part: _Part) -> list[BadSampleError | None] | None:
    """The answer of the worker; None if it was lost, or if decoding raised there.

    The part is no longer pending then, because its connection takes the requests of others.
    """
    pending, part.pending = part.pending, None
    assert pending is not None
    answer: list[BadSampleError | None] | None = pending.result()
    return answer
