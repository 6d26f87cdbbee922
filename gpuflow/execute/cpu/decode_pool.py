"""Decodes in advance, on the CPU, the images that a GPU's decoder does not support.

Threads of C code share the images of each chunk. A thread of Python begins that and waits, so that neither the thread
that prepares the chunk has to, nor the one that launches another chunk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from gpuflow.arrays import Bytes, Ints
from gpuflow.errors import BadSampleError, LoaderTimeout
from gpuflow.execute.cpu.runner import CpuRunner
from gpuflow.pipeline.stage import Keys
from gpuflow.pipeline.views import AnyProgram, slot_bytes_of, slot_of, slots_of
from gpuflow.runtime.memory import BytePool, pinned
from gpuflow.runtime.threads import DaemonPool, stop_flag, use_stop_flag, use_torch_threads
from gpuflow.sources import Payload

_CHUNKS = 4
"""Chunks at a time. While Python decodes an image of one of them, the threads of C code work on the others."""
_KEPT_BYTES = 1 << 30
_LONGEST_SECONDS, _END_SECONDS = 600.0, 2.0


@dataclass(eq=False)
class PendingImages:
    """Images of one chunk that are being decoded. If this object is deleted before they are begun, they are not.

    rows [n]: their places in the chunk. memory: holds the results.
    """

    rows: Ints
    memory: Bytes
    _results: Bytes
    _faults: Future[list[BadSampleError | None]]

    def result(self) -> tuple[torch.Tensor, list[BadSampleError | None]]:
        """Wait for the results: uint8 [n, bytes of a slot], which `slots_of` takes, in memory that the GPU copies from.

        Returns them, and for each sample None, or why it is bad. Raises what decoding raises, or LoaderTimeout.
        """
        try:
            faults = self._faults.result(_LONGEST_SECONDS)
        except TimeoutError:
            raise LoaderTimeout(f"the CPU did not decode images of a chunk within {_LONGEST_SECONDS:g} s") from None
        return torch.from_numpy(self._results), faults

    def __del__(self) -> None:
        self._faults.cancel()


class CpuDecodePool:
    """Runs a program on the CPU for one `GpuRunner`. Any thread may call any method.

    runner: its threads may do other work on the same files, too.

    Args:
        threads: that share the images of each chunk.
        make: allocates memory that the GPU copies from.
    """

    def __init__(self, program: AnyProgram, *, threads: int, make: Callable[[int], Bytes] = pinned) -> None:
        self._program, self.runner = program, CpuRunner(program, threads)
        self._results = BytePool(keep=_KEPT_BYTES, make=make)
        self._lock, self._closed = threading.Lock(), False
        self._threads: DaemonPool | None = None

    def begin(self, payload: Payload, rows: Ints, keys: Keys) -> PendingImages:
        """Begin to decode the samples `rows` of a payload, whose buffer must stay as it is until the result is there.

        keys: of all samples of the payload. Raises ConnectionAbortedError if the pool was closed.
        """
        shape, dtype = slot_of(self._program)
        slot_bytes = slot_bytes_of(self._program)
        memory = self._results.acquire(len(rows) * slot_bytes)
        results = memory[: len(rows) * slot_bytes].reshape(len(rows), slot_bytes)
        slots = slots_of(self._program, results.view(dtype).reshape(-1, *shape))
        samples, own, flag = payload.take(rows.tolist()), keys.take(rows), stop_flag()

        def decode() -> list[BadSampleError | None]:
            use_stop_flag(flag)  # of the epoch that this thread works for
            return self.runner.run(samples, own, slots)

        return PendingImages(rows, memory, results, self._started_threads().submit(decode))

    def _started_threads(self) -> DaemonPool:
        with self._lock:
            if self._closed:
                raise ConnectionAbortedError("this loader was closed while images were being decoded")
            self._threads = self._threads or DaemonPool(_CHUNKS, "refused", lambda: use_torch_threads(1))
            return self._threads

    def release(self, memory: Bytes) -> None:
        """Use the memory of a result again."""
        self._results.release(memory)

    def close(self) -> None:
        """End the threads and free the memory."""
        with self._lock:
            self._closed = True
        if self._threads is None or self._threads.end(_END_SECONDS):
            self.runner.clear()
        self._results.clear()
