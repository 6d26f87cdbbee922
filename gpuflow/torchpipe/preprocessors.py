"""Preprocesses a service's images, on the CPU or with the runner that feeds training on a GPU.

On the CPU a batch is one native call, or worker processes share its images. Processes are for stages that run Python
code for each image, and keep the model out of the memory of decoders. They get the encoded bytes and give the pixels
through memory that they share with this process.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from gpuflow.arrays import Array, Bytes
from gpuflow.errors import BadSampleError, DecoderError
from gpuflow.execute.cpu import workers
from gpuflow.execute.cpu.runner import CpuRunner
from gpuflow.execute.cpu.workers import DecodeRequest, Setup
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.stage import Keys
from gpuflow.pipeline.views import STORAGE, as_batch, slot_shape
from gpuflow.runtime.memory import BytePool, SlotPool, heap, shared
from gpuflow.runtime.threads import use_torch_threads
from gpuflow.runtime.worker_pool import Pending, WorkerConnection, WorkerPool
from gpuflow.sources import Payload

if TYPE_CHECKING:
    from gpuflow.execute.gpu.device_stream import ChunkRunner, DeviceStream


_START_SECONDS, _RESTART_SECONDS = 30.0, 10.0
_KEPT_BATCHES = 4
_LONGEST_SECONDS = 60.0
"""A decoder that takes longer for an image hangs: one of 50 million pixels takes about four seconds."""


class CpuPreprocessor:
    """Encoded images to images, several at a time. Any thread may call any method.

    With processes it waits until they have started, for half a minute at most. What no worker can do, this process
    does. Workers that are lost are started again, at most every ten seconds.

    Args:
        program: of the block `serve`.
        batch: how many files `run` gets at most.
        threads: that share the files of a call. One file is preprocessed by the thread that calls `run`.
        processes: that do so instead; 0 for none.
        device: of the images that `run` returns.
    """

    def __init__(
        self,
        program: Program,
        *,
        batch: int,
        threads: int,
        processes: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self._program, self._threads, self._device = program, threads, device
        self._runners = CpuRunner(program), CpuRunner(program, threads if threads > 1 else 0)
        """Of one file, and of several."""
        self._running: dict[int, tuple[float, int]] = {}
        """When the call on each thread began, and its number of files."""
        make = shared if processes else heap
        self._bytes = BytePool(make=make)
        dtype = np.dtype(STORAGE[program.result.dtype])
        self._slots = SlotPool((batch, *slot_shape(program.result)), dtype, keep=_KEPT_BATCHES, make=make)
        self._pool = WorkerPool(
            workers.__name__,
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
        thread = threading.get_ident()
        self._running[thread] = time.monotonic(), len(files)
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
        finally:
            del self._running[thread]
        self._bytes.release(payload.buffer)
        if errors:
            raise errors[0]
        batch = as_batch(slots, self._program.result).to(self._device)
        return [batch[i : i + 1] if fault is None else fault for i, fault in enumerate(faults)]

    def _begin(self, payload: Payload, part: slice, slots: Array) -> Pending | None:
        """Have a worker decode a part of the files, if one is free."""

        def send(worker: WorkerConnection) -> bool:
            sizes = payload.sizes[part]
            job = DecodeRequest(payload.offsets[part], sizes, _keys(len(sizes)), part.start, len(payload))
            return worker.send(job, payload.buffer, slots)

        return self._pool.begin(send)

    def check(self) -> None:
        """Have each worker that is idle, and this process, decode gpuflow's own test image. One that fails is killed.

        Raises DecoderError if this process fails twice, or has decoded for longer than any image takes.
        """
        for begun, files in list(self._running.values()):
            seconds = time.monotonic() - begun
            if seconds > _LONGEST_SECONDS * math.ceil(files / self._threads):
                raise DecoderError(f"a decoder has worked on {files} image(s) for {seconds:.0f} s; restart the service")

        def exchange(worker: WorkerConnection) -> None:
            worker.send(None)
            worker.answer()

        self._pool.each_idle(exchange)
        for runner in self._runners:
            try:
                runner.check()
            except DecoderError:  # which has discarded the decoders that the runner had
                runner.check()

    def _run(self, payload: Payload, part: slice, slots: Array) -> list[BadSampleError | None]:
        """A part of the files in this process."""
        use_torch_threads(1)
        samples = payload.take(range(part.start, part.stop))
        return self._runners[len(samples) > 1].run(samples, _keys(len(samples)), slots[part])

    def close(self) -> None:
        """Kill the workers, end the threads and free the memory."""
        self._pool.close()
        self._bytes.clear()
        self._slots.clear()
        for runner in self._runners:
            runner.clear()


def _parts(count: int, most: int) -> Iterator[slice]:
    """At most `most` parts of neighbours, whose lengths differ by one at most."""
    parts = min(count, most)
    ends = [count * (number + 1) // parts for number in range(parts)]
    return itertools.starmap(slice, itertools.pairwise([0, *ends]))


def _keys(count: int) -> Keys:
    """Nothing is drawn where a model is served."""
    return Keys(0, 0, np.zeros(count, np.int64))


class GpuPreprocessor:
    """Encoded images to images on the GPU, several at a time. Any thread may call any method.

    Args:
        runner, device_stream: as in training; used by this preprocessor alone.
        acquire, release: get pinned memory of at least that many bytes, and return it.
    """

    def __init__(
        self,
        runner: ChunkRunner,
        device_stream: DeviceStream,
        *,
        acquire: Callable[[int], Bytes],
        release: Callable[[Bytes], None],
    ) -> None:
        self._runner, self._device_stream, self._acquire, self._release = runner, device_stream, acquire, release

    def run(self, files: Sequence[bytes]) -> list[torch.Tensor | BadSampleError]:
        """Each file's image [1, C, H, W], ready for any stream, or why it is bad. Waits for the GPU."""
        payload = Payload.of(files, self._acquire)
        slots = self._runner.slots(len(files))
        try:
            prepared = self._runner.prepare(payload, Keys(0, 0, np.zeros(len(files), np.int64)))
            faults = self._runner.launch(prepared, slots)
        finally:
            self._device_stream.record_event(blocking=True).synchronize()  # bytes are read, images written
            self._release(payload.buffer)
        return [slots[i : i + 1] if fault is None else fault for i, fault in enumerate(faults)]

    def check(self) -> None:
        """Decode gpuflow's own test image. Raises DecoderError if that fails."""
        self._runner.check()

    def close(self) -> None:
        """Wait until the GPU has finished all queued work."""
        self._device_stream.close()
