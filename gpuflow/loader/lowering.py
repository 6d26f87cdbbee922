"""Lowers a program to an SPDL thread pipeline: order -> chunks -> read -> work -> one batch a step.

What travels is a chunk, a few samples of one batch: SPDL spends a third of a millisecond an item, whatever its size.
What the CPU decodes beside a GPU (see `Share`) does not travel; its batch waits for it at the end.
No operation ever raises into SPDL, which would drop the item and shift every later sample: a fault is written into the
batch and raised by the loader when that batch's turn has come.
"""

from __future__ import annotations

import asyncio
import functools
import math
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from spdl.pipeline import AsyncQueue, PipelineBuilder
from spdl.pipeline import Pipeline as SpdlPipeline
from spdl.pipeline.defs import Aggregator

from gpuflow.errors import BadSampleError, TooManyBadSamples
from gpuflow.execute.cpu import CpuRunners
from gpuflow.loader.bad_samples import BadSamples
from gpuflow.loader.batch import Assembly, Chunk
from gpuflow.loader.cpu_share import Share
from gpuflow.loader.decode_workers import DecodeWorkers, decode
from gpuflow.loader.epoch import START_SECONDS, STOP_SECONDS, Machinery, Run
from gpuflow.loader.sampler import Order, Steps
from gpuflow.pipeline.image_spec import STORAGE, as_batch, slot_shape
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.stage import Keys
from gpuflow.runtime.buffers import BytePool, SlotPool
from gpuflow.runtime.memory import heap, pinned, shared, shared_and_pinned
from gpuflow.runtime.metrics import Meter, culprit
from gpuflow.runtime.threads import DaemonPool, Gate, QuickSwitching
from gpuflow.sources import Payload, Source

if TYPE_CHECKING:
    from gpuflow.execute.device_stream import ChunkRunner, DeviceStream

__all__ = ["Feed"]

_LARGEST_CHUNK, _LARGEST_GPU_CHUNK, _LARGEST_SHARED_CHUNK = 32, 256, 16
_KEPT_BYTES, _KEPT_SHARED_BYTES = 256 << 20, 1 << 30
_SHARED_AHEAD = 8
"""Batches. A core needs five times as long for a chunk as the engines for a batch."""
_BATCHES_AT_EASE = 3
"""On the GPU while nothing hurries: in the consumer's hands, ready, and in the making."""

_Runner = Callable[[Payload, Keys, Any], list[BadSampleError | None]]
"""Runs the program on what was read, into slots; returns for each sample None, or why it is bad."""


class _ByStep(Aggregator):
    """Chunks arrive in order; the last one of a batch completes it."""

    def accumulate(self, item: Chunk) -> Assembly | None:
        return item.batch if item.last else None

    def flush(self) -> None:
        return None


class Feed:
    """Builds the SPDL pipelines of one loader, one an epoch, and is their operations. Owns the buffers.

    Args:
        threads: threads that decode. readers: threads that only read, for storage that is waited for; with 0 each
            decoding thread reads its own chunks, which spares a hand-over.
        share: of each batch that the CPU decodes beside `gpu`, on threads of its own, or None.
        processes: that the decoding threads leave their chunks to, those of the share if there is one; they read, too.
        prefetch: finished batches that wait for the consumer.
        device_stream: to the GPU that batches are for, or None for the CPU.
        gpu: runs the chunks on the GPU; without it the CPU does.
    """

    def __init__(
        self,
        *,
        program: Program,
        source: Source,
        order: Order,
        seed: int,
        batch_size: int,
        threads: int,
        prefetch: int,
        bad: BadSamples,
        readers: int,
        processes: int = 0,
        share: Share | None = None,
        device_stream: DeviceStream | None = None,
        gpu: ChunkRunner | None = None,
    ) -> None:
        self._device_stream, self._gpu, self.share = device_stream, gpu, share
        self._hurried = False
        self._program, self._source, self._order, self._seed = program, source, order, seed
        self._bad, self._prefetch = bad, prefetch
        self._batch_size = batch_size
        if gpu is not None:
            self._chunk_size = min(_LARGEST_GPU_CHUNK, batch_size)
        else:  # with processes, threads work on several batches at a time: fewer items for SPDL
            batches = prefetch + 1 if processes else 1
            self._chunk_size = min(_LARGEST_CHUNK, batch_size, -(-batch_size * batches // threads))
        self._readers = readers
        self.read_meter = Meter("read", readers or threads)
        self.work_meter = Meter("decode", threads, before=self.read_meter.after)
        self._share_meter = Meter("decode_cpu", share.threads if share else 0, after=self.work_meter.after)
        self.meters = (self.read_meter, *[self._share_meter] * (share is not None), self.work_meter)
        self._runners = CpuRunners(program)
        self._owners: list[threading.Thread] = []
        self._bytes = BytePool(keep=_KEPT_BYTES, make=heap if gpu is None else shared_and_pinned)
        self._pinned = BytePool(keep=_KEPT_SHARED_BYTES, make=shared_and_pinned)
        self._threads, self._processes = share.threads if share else threads, processes
        self._workers: DecodeWorkers | None = None
        if processes:
            make = shared if device_stream is None else shared_and_pinned
        else:
            make = heap if device_stream is None else pinned
        self._slot = slot_shape(program.result), np.dtype(STORAGE[program.result.dtype])
        shape, dtype = self._slot
        self._slots = SlotPool((batch_size, *shape), dtype, keep=prefetch + 2, make=make)

    def start(self, epoch: int, steps: Steps) -> Run:
        """Begin an epoch. The first one starts the processes, and does not wait for them."""
        if self._processes and self._workers is None:
            idle = self.share is not None
            self._workers = DecodeWorkers(
                self._program, self._source, threads=self._threads, processes=self._processes, idle=idle
            )
        torch_threads = torch.get_num_threads()
        try:
            run = Run(functools.partial(self._begin, epoch, steps), self.culprit)
        finally:
            torch.set_num_threads(torch_threads)  # undo what _begin_thread did to threads yet to come
        self._owners = [*filter(threading.Thread.is_alive, self._owners), run.owner]
        return run

    def wait(self) -> None:
        """For the ends of the epochs that were let go of."""
        for owner in self._owners:
            owner.join(2 * STOP_SECONDS)

    def processes(self) -> dict[str, int]:
        """The processes that decode, see `DecodeWorkers.counts`; nothing where there are to be none."""
        return self._workers.counts() if self._workers is not None else {}

    def culprit(self) -> str:
        """Which stage has been at one operation for the longest time, in words."""
        return culprit(*self.meters)

    def _begin(self, epoch: int, steps: Steps) -> Machinery:
        builder: Any = PipelineBuilder()
        begun, places = threading.Event(), self._prefetch + 2
        at_ease = places if self._gpu is None else min(places, _BATCHES_AT_EASE)
        gate, ahead = Gate(at_ease, spare=places - at_ease), Gate(_SHARED_AHEAD)
        finished: queue.SimpleQueue[Assembly] = queue.SimpleQueue()

        async def hand_over(batch: Assembly) -> None:
            if self.share is not None and batch.shared and batch.error is None:
                late = not batch.over.done()
                await asyncio.wrap_future(batch.over)
                self.share.follow(batch.own, late=late, wanted=self._hurried, rate=self._share_meter.capacity())
            if beside is not None:
                ahead.leave()
            finished.put(batch)  # taken at once where it waits: a batch of SPDL's sink comes by way of its event loop

        beside: DaemonPool | None = None
        if self.share is not None:
            self.share.begin()
            beside = DaemonPool(self._share_meter.threads, "share", self._begin_thread)
        pools = [beside] if beside is not None else []
        builder.add_source(self._chunks(epoch, steps, begun, ahead, beside))
        read = _never_raise(self.read_meter, functools.partial(self._read, epoch))
        work = _never_raise(self.work_meter, functools.partial(self._work, epoch))
        if self._readers == 0:
            whole = work if self._workers is not None else lambda chunk: work(read(chunk))
            stages = [(self.work_meter, self._gated(gate, whole))]
        else:
            stages = [(self.read_meter, read), (self.work_meter, self._gated(gate, work))]
        for meter, operation in stages:
            pools.append(DaemonPool(meter.threads, meter.name, self._begin_thread))
            builder.pipe(
                operation, executor=pools[-1], concurrency=meter.threads, output_order="input", name=meter.name
            )
        builder.aggregate(_ByStep()).pipe(hand_over).add_sink(1)
        # The meters tell what SPDL's own statistics would, which double its time an item.
        pipeline: SpdlPipeline[None] = builder.build(
            num_threads=1, queue_class=AsyncQueue, task_hook_factory=lambda stage: []
        )
        pipeline.start(timeout=START_SECONDS)
        if self._gpu is None:
            return Machinery(pipeline, finished, pools, begun, gate, ahead, hurry=lambda on: None, switching=None)
        hurry = functools.partial(self._hurry, self._gpu, gate)
        return Machinery(pipeline, finished, pools, begun, gate, ahead, hurry, QuickSwitching())

    def _hurry(self, gpu: ChunkRunner, gate: Gate, on: bool) -> None:
        self._hurried = on
        gpu.set_starved(on)
        if on:
            gate.widen()

    async def _chunks(
        self, epoch: int, steps: Steps, begun: threading.Event, ahead: Gate, beside: DaemonPool | None
    ) -> AsyncIterator[Chunk]:
        """What travels; the CPU's share of each batch goes to the threads beside at the same time."""
        begun.set()
        work = _never_raise(self._share_meter, functools.partial(self._work_on_share, epoch))

        def on_cpu(chunk: Chunk) -> None:
            if ahead.enter(chunk.batch.step):
                work(chunk)

        for step in range(len(steps)):
            batch = self._assembly(epoch, step, steps)
            count = len(batch.positions)
            if beside is not None:
                for start in range(batch.own, count, _LARGEST_SHARED_CHUNK):
                    chunk = Chunk(batch, start, min(start + _LARGEST_SHARED_CHUNK, count), last=False)
                    beside.submit(on_cpu, chunk)
            for start in range(0, max(batch.own, 1), self._chunk_size):
                stop = min(start + self._chunk_size, batch.own)
                yield Chunk(batch, start, stop, last=stop == batch.own)

    def _assembly(self, epoch: int, step: int, steps: Steps) -> Assembly:
        """A batch, empty as yet; or without rows, and with what keeps it from having them."""
        try:
            positions, valid = steps.positions(step)
            indices = self._order.indices(epoch, positions)
            labels = self._source.labels[indices]
        except Exception as error:
            none = np.empty(0, np.int64)
            return Assembly(step, none, none, none, none.astype(bool), none.astype(bool), 1, error=error)
        count, shared = len(positions), self._shared_rows(len(positions))
        chunks = -(-(count - shared) // self._chunk_size) - (-shared // _LARGEST_SHARED_CHUNK)
        return Assembly(step, positions, indices, labels, valid, np.ones(count, bool), chunks, shared=shared)

    def _shared_rows(self, count: int) -> int:
        """The CPU's share of a batch of so many: nothing before there are processes, if it may change at all."""
        if self.share is None or (self.share.adapts and self._workers is not None and not self._workers.ready()):
            return 0
        return self.share.rows(count)

    def _read(self, epoch: int, chunk: Chunk) -> None:
        chunk.payload = self._source.read(chunk.indices, self._bytes.acquire)
        self.read_meter.add(read_bytes=sum(chunk.payload.sizes), cpu_s=chunk.payload.cpu_s)
        if self._gpu is not None:
            chunk.prepared = self._gpu.prepare(chunk.payload, self._keys(epoch, chunk), chunk.indices)

    def _gated(self, gate: Gate, operation: Callable[[Chunk], Chunk]) -> Callable[[Chunk], Chunk]:
        """An operation that waits until its batch may take memory. Nothing happens once the epoch is being ended.

        The batch is not locked meanwhile: the CPU may be at its share of it.
        """

        def run(chunk: Chunk) -> Chunk:
            batch = chunk.batch
            try:
                if batch.slots is None and batch.error is None and not gate.enter(batch.step):
                    return chunk
                with batch.lock:
                    if batch.slots is None and batch.error is None:
                        count = len(batch.positions)
                        batch.slots = self._slots.acquire(count) if self._gpu is None else self._gpu.slots(count)
            except BaseException as error:  # as in _never_raise
                batch.fail(error)
            return operation(chunk)

        return run

    def _keys(self, epoch: int, chunk: Chunk) -> Keys:
        return Keys(self._seed, epoch, chunk.batch.positions[chunk.start : chunk.stop])

    def _work(self, epoch: int, chunk: Chunk) -> None:
        batch, keys = chunk.batch, self._keys(epoch, chunk)
        assert batch.slots is not None
        faults = None
        if self._gpu is None:  # else whatever processes there are have the share to do
            faults = self._by_process(chunk, keys, self.work_meter, batch.slots, chunk.start)
        if faults is None:
            if chunk.payload is None:
                with self.read_meter.work(len(chunk)):
                    self._read(epoch, chunk)
            assert chunk.payload is not None
            faults = self._run(chunk.payload, keys, batch.slots[chunk.start : chunk.stop], chunk.prepared)
        chunk.payload = chunk.prepared = None
        self._finish(epoch, chunk, keys, faults, self._run, batch.slots[chunk.start : chunk.stop])

    def _work_on_share(self, epoch: int, chunk: Chunk) -> None:
        """Read and decode a chunk of the CPU's share, on one of its threads."""
        batch, keys = chunk.batch, self._keys(epoch, chunk)
        start, pixels = chunk.start - batch.own, self._pixels(batch)
        faults = self._by_process(chunk, keys, self._share_meter, pixels, start)
        pixels = pixels[start : start + len(chunk)]
        if faults is None:
            payload = self._source.read(chunk.indices, self._bytes.acquire)
            self.read_meter.add(samples=len(chunk), read_bytes=sum(payload.sizes), cpu_s=payload.cpu_s)
            faults = self._run_on_cpu(payload, keys, pixels)
        self._finish(epoch, chunk, keys, faults, self._run_on_cpu, pixels)

    def _pixels(self, batch: Assembly) -> NDArray[Any]:
        """Where the CPU puts its share of a batch: [shared, ...], which processes map and the GPU copies from."""
        shape, dtype = self._slot
        size = batch.shared * math.prod(shape) * dtype.itemsize
        with batch.lock:
            if batch.memory is None:
                batch.memory = self._pinned.acquire(size)
        return batch.memory[:size].view(dtype).reshape(-1, *shape)

    def _finish(
        self,
        epoch: int,
        chunk: Chunk,
        keys: Keys,
        faults: Sequence[BadSampleError | None],
        run: _Runner,
        slots: Any,
    ) -> None:
        """A chunk is done, but for its bad samples. What replaces them is run into its slots."""
        batch = chunk.batch
        for i, fault in enumerate(faults):
            if fault is not None:
                self._judge(batch, chunk.start + i, epoch, fault, run, keys[i], slots[i : i + 1])
        with batch.lock:
            batch.unfinished -= 1
            whole = batch.unfinished == 0
        if whole:
            if self._device_stream is not None:
                self._deliver(batch, self._device_stream)
            batch.end()

    def _by_process(
        self, chunk: Chunk, keys: Keys, meter: Meter, slots: NDArray[Any], start: int
    ) -> list[BadSampleError | None] | None:
        """Read and decode a chunk elsewhere, into slots from `start` on; None where that cannot be done just now."""
        if self._workers is None:
            return None
        outcome = self._workers.run(chunk.indices, keys, slots, start)
        if outcome is None:
            return None
        self.read_meter.add(samples=len(chunk), read_bytes=outcome.read_bytes, busy_s=outcome.read_s)
        meter.add(busy_s=-outcome.read_s, cpu_s=outcome.cpu_s)
        return outcome.errors()

    def _run(self, payload: Payload, keys: Keys, slots: Any, prepared: Any = None) -> list[BadSampleError | None]:
        """The program on what was read; an unreadable sample is bad without further ado. Gives the bytes back."""
        if self._gpu is None or self._device_stream is None:
            return self._run_on_cpu(payload, keys, slots)
        faults = self._gpu.launch(prepared or self._gpu.prepare(payload, keys), slots)
        self._device_stream.retain_until_done(payload.buffer, self._bytes.release)
        return faults

    def _run_on_cpu(self, payload: Payload, keys: Keys, slots: NDArray[Any]) -> list[BadSampleError | None]:
        faults = decode(self._runners, payload, keys, slots)
        self._bytes.release(payload.buffer)
        return faults

    def _deliver(self, batch: Assembly, device_stream: DeviceStream) -> None:
        """Queue what is left of a batch's way to the GPU: the pixels that the CPU made, and what is known of it."""
        if self._gpu is None:
            pixels = batch.slots
            batch.slots = device_stream.send(as_batch(pixels, self._program.result))
            device_stream.retain_until_done(pixels)
        elif batch.memory is not None:
            device_stream.copy_into(batch.slots[batch.own :], as_batch(self._pixels(batch), self._program.result))
            device_stream.retain_until_done(batch.memory, self._pinned.release)
            batch.memory = None
        batch.there = device_stream.send_all([batch.labels, batch.valid, batch.indices])
        batch.ready = device_stream.record_event()

    def _judge(
        self,
        batch: Assembly,
        row: int,
        epoch: int,
        fault: BadSampleError,
        run: _Runner,
        keys: Keys,
        slot: Any,
    ) -> None:
        """Apply the policy to one bad sample. What replaces it is run into its slot."""
        index = int(batch.indices[row])
        fault = fault.located(index, self._source.path(index))
        if self._bad.policy == "raise":
            raise fault
        self._bad.record(fault)
        if self._bad.policy == "skip":
            batch.kept[row] = False
            return
        for attempt in range(self._order.size):
            index = self._order.replacement(epoch, int(batch.positions[row]), attempt)
            payload = self._source.read([index], self._bytes.acquire)
            (new_fault,) = run(payload, keys, slot)
            if new_fault is None:
                batch.indices[row], batch.labels[row] = index, self._source.labels[index]
                return
            self._bad.record(new_fault.located(index, self._source.path(index)))
        raise TooManyBadSamples(
            f"all {self._order.size} samples are bad, so none can stand in for {fault}; run `gpuflow scan` to list them"
        )

    def close(self) -> None:
        """Let go of the buffers, the source's files and the list of bad samples."""
        if self._workers is not None:
            self._workers.close()
        self._source.close()
        for pool in (self._slots, self._bytes, self._pinned):
            pool.clear()
        self._runners.clear()
        if self._device_stream is not None:
            self._device_stream.close()
        self._bad.close()

    def _begin_thread(self) -> None:
        """Keep torch's operators on this thread, and whatever it allocates off the other GPUs.

        A team of OpenMP threads for each worker would spin beside the others. The first call ties this thread to the
        default, so that the second, which also changes the default, stays in force.
        """
        torch.get_num_threads()
        torch.set_num_threads(1)
        if self._device_stream is not None:
            torch.cuda.set_device(self._device_stream.device)


def _never_raise(meter: Meter, operation: Callable[[Chunk], None]) -> Callable[[Chunk], Chunk]:
    """An SPDL operation that meters its work and writes whatever it raises into the batch.

    BaseException, because SPDL hangs on SystemExit and StopIteration from an operation.
    """

    def run(chunk: Chunk) -> Chunk:
        if chunk.batch.error is None:
            try:
                with meter.work(len(chunk)):
                    operation(chunk)
            except BaseException as error:
                chunk.batch.fail(error)
        return chunk

    return run
