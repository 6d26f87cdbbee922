"""Lowers a program to an SPDL thread pipeline: order -> chunks -> read -> work -> one batch a step.

What travels is a chunk, a few samples of one batch: SPDL spends a third of a millisecond an item, whatever its size.
No operation ever raises into SPDL, which would drop the item and shift every later sample: a fault is written into the
batch and raised by the loader when that batch's turn has come.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import queue
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from spdl.pipeline import AsyncQueue, PipelineBuilder
from spdl.pipeline import Pipeline as SpdlPipeline
from spdl.pipeline.defs import Aggregator

from gpuflow.cpu import STORAGE, CpuRunner, as_batch, slot_shape
from gpuflow.errors import BadSampleError, TooManyBadSamples
from gpuflow.fold import Program
from gpuflow.memory import BytePool, SlotPool, heap, pinned, shared, shared_and_pinned
from gpuflow.order import Order, Steps
from gpuflow.sources import Payload, Source
from gpuflow.spec import Keys
from gpuflow.stats import Meter, culprit
from gpuflow.threads import DaemonPool, Gate, Passing, QuickSwitching
from gpuflow.workers import Workers, decode

if TYPE_CHECKING:
    from gpuflow.delivery import ChunkRunner, Delivery

__all__ = ["Assembly", "BadSamples", "Feed", "Run"]

_LARGEST_CHUNK, _LARGEST_GPU_CHUNK = 32, 256
_KEPT_BYTES = 256 << 20
_START_SECONDS = 30.0
_STOP_SECONDS = 3.0
_LOOK_SECONDS = 0.002
_PATIENCE = 8
"""Batches that a GPU has waited for, one after the other, before the machinery hurries. The first of an epoch are late
in any case."""
_BATCHES_AT_EASE = 3
"""On the GPU while nothing hurries: in the consumer's hands, ready, and in the making."""
_LOG = logging.getLogger(__name__)


class BadSamples:
    """Which samples are bad, and whether there are too many of them.

    Args:
        policy: `raise`, `replace` or `skip`.
        limit: distinct bad samples that are allowed, or None for any number.
        path: a file to which each bad sample is appended once, as a JSON line (index, path, stage, reason).
    """

    def __init__(self, *, policy: str, limit: int | None, path: str | None) -> None:
        self.policy, self.limit = policy, limit
        self.count = 0
        self._known: set[int] = set()
        self._file: TextIO | None = open(path, "a", encoding="utf-8") if path else None  # noqa: SIM115
        self._lock = threading.Lock()

    @property
    def distinct(self) -> int:
        return len(self._known)

    def record(self, fault: BadSampleError) -> None:
        """Count one bad sample. Raises TooManyBadSamples above the limit."""
        with self._lock:
            self.count += 1
            if fault.index not in self._known:
                self._known.add(fault.index)
                if self._file is not None:
                    row = {"index": fault.index, "path": fault.path, "stage": fault.stage, "reason": fault.reason}
                    self._file.write(json.dumps(row) + "\n")
                    self._file.flush()
        if self.limit is not None and self.distinct > self.limit:
            raise TooManyBadSamples(
                f"{self.distinct} bad samples are more than run.max_bad allows ({self.limit}); the last: {fault}; "
                "run `gpuflow scan` to list them all"
            ) from fault

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(slots=True)
class Assembly:
    """A batch while it is being filled. Rows are samples.

    indices, labels, valid [B]: what each row holds. kept [B]: false where a bad sample was skipped.
    unfinished: chunks that are still to come.
    slots [B, ...]: the pixels, allocated when the first chunk is worked on: an array, or a tensor on the GPU.
    there: labels, valid and indices on the GPU. They and the slots hold what they should once `ready` has passed.
    """

    step: int
    positions: NDArray[np.int64]
    indices: NDArray[np.int64]
    labels: NDArray[np.int64]
    valid: NDArray[np.bool_]
    kept: NDArray[np.bool_]
    unfinished: int
    slots: Any = None
    there: Sequence[torch.Tensor] = ()
    ready: torch.cuda.Event | None = None
    error: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fail(self, error: BaseException) -> None:
        """Remember the first error; the loader raises it when this batch's turn has come."""
        with self.lock:
            self.error = self.error or error


@dataclass(slots=True)
class _Chunk:
    """Rows [start, stop) of a batch: the item that travels through SPDL."""

    batch: Assembly
    start: int
    stop: int
    last: bool
    payload: Payload | None = None
    prepared: Any = None

    def __len__(self) -> int:
        return self.stop - self.start


class _ByStep(Aggregator):
    """Chunks arrive in order; the last one of a batch completes it."""

    def accumulate(self, item: _Chunk) -> Assembly | None:
        return item.batch if item.last else None

    def flush(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class _Machinery:
    """What runs one epoch.

    finished: its batches in order. begun: SPDL has asked for the first chunk. gate: how many may exist.
    hurry: told whether the GPU keeps waiting for batches.
    """

    pipeline: SpdlPipeline[None]
    finished: queue.SimpleQueue[Assembly]
    pools: Sequence[DaemonPool]
    begun: threading.Event
    gate: Gate
    hurry: Callable[[bool], None]
    switching: QuickSwitching | None

    def stop(self, timeout: float) -> bool:
        """End the pipeline and its threads; what is under way is waited for. Returns whether all ended in time."""
        deadline = time.monotonic() + timeout
        self.gate.close()
        self.begun.wait(timeout)  # SPDL warns of coroutines that were never awaited when it is stopped before
        try:
            self.pipeline.stop(timeout=timeout)
        except TimeoutError:
            return False
        finally:
            ended = [pool.end(max(0.0, deadline - time.monotonic())) for pool in self.pools]
            if self.switching is not None:
                self.switching.end()
        return all(ended)


class Run:
    """One epoch's pipeline under way. Letting go of it, on purpose or by dropping it, ends it.

    A thread of its own begins and ends the machinery: a Ctrl-C in the middle of either, or several in a row, would
    leave threads behind.

    Raises whatever keeps it from beginning.
    """

    def __init__(self, begin: Callable[[], _Machinery], culprit: Callable[[], str]) -> None:
        begun: queue.SimpleQueue[_Machinery | BaseException] = queue.SimpleQueue()
        end: queue.SimpleQueue[object] = queue.SimpleQueue()
        # No frame of Python's, at whose beginning a Ctrl-C could come in between. The owner keeps the reference.
        collected = weakref.ref(self, end.put)
        self.let_go: Callable[[], None] = functools.partial(end.put, None)
        """Ends the epoch, and does not wait for that."""
        self.owner = threading.Thread(
            target=_own, args=(begin, culprit, begun, end, collected), name="gpuflow_epoch", daemon=True
        )
        self.owner.start()
        machinery = begun.get(timeout=2 * _START_SECONDS)
        if isinstance(machinery, BaseException):
            raise machinery
        self._machinery = machinery
        self._hunger = 0

    def stop(self) -> None:
        """End the epoch and wait for that, within limits; what is under way comes to its end."""
        self.let_go()
        self.owner.join(2 * _STOP_SECONDS)

    def get(self, timeout: float, starved: Callable[[], bool] | None = None) -> Assembly:
        """The next batch in order. It takes a place of the gate, which `leave` frees.

        starved: whether a GPU has nothing to do without it. Asked while there is none. Once that has been so for
            several batches, the machinery hurries.

        Raises TimeoutError after so many seconds.
        """
        finished = self._machinery.finished
        try:
            if starved is None:
                return finished.get(timeout=timeout)
            if finished.empty():
                return self._wait(timeout, starved)
            self._hunger = max(0, self._hunger - 1)
            return finished.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None

    def _wait(self, timeout: float, starved: Callable[[], bool]) -> Assembly:
        machinery, deadline = self._machinery, time.monotonic() + timeout
        hungry = False
        try:
            while (left := deadline - time.monotonic()) > _LOOK_SECONDS:
                starving = starved()
                hungry = hungry or starving
                machinery.hurry(starving and self._hunger >= _PATIENCE)
                with suppress(queue.Empty):
                    return machinery.finished.get(timeout=_LOOK_SECONDS)
            return machinery.finished.get(timeout=max(0.0, left))
        finally:
            machinery.hurry(False)
            self._hunger = min(2 * _PATIENCE, self._hunger + 1) if hungry else max(0, self._hunger - 1)

    def leave(self, passing: Passing | None = None) -> None:
        """A batch is not needed any more: now, or once that has come to pass."""
        self._machinery.gate.leave(passing)


def _own(
    begin: Callable[[], _Machinery],
    culprit: Callable[[], str],
    begun: queue.SimpleQueue[_Machinery | BaseException],
    end: queue.SimpleQueue[object],
    collected: weakref.ref[Run],
) -> None:
    """The life of an epoch, on its owner's thread. It ends when something is put in `end`."""
    owner = threading.current_thread()

    def leave() -> None:
        end.put(None)
        owner.join(2 * _STOP_SECONDS)

    atexit.register(leave)
    try:
        machinery = begin()
    except BaseException as error:
        begun.put(error)
    else:
        begun.put(machinery)
        end.get()
        if not machinery.stop(_STOP_SECONDS):
            _LOG.warning("a thread stays behind: %s", culprit())
    finally:
        atexit.unregister(leave)


class Feed:
    """Builds the SPDL pipelines of one loader, one an epoch, and is their operations. Owns the buffers.

    Args:
        threads: threads that decode. readers: threads that only read, for storage that is waited for; with 0 each
            decoding thread reads its own chunks, which spares a hand-over.
        processes: that the decoding threads leave their chunks to; they read them, too.
        prefetch: finished batches that wait for the consumer.
        delivery: to the GPU that batches are for, or None for the CPU.
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
        delivery: Delivery | None = None,
        gpu: ChunkRunner | None = None,
    ) -> None:
        self._delivery, self._gpu = delivery, gpu
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
        self._runners: list[CpuRunner] = []
        self._owners: list[threading.Thread] = []
        self._bytes = BytePool(keep=_KEPT_BYTES, make=heap if gpu is None else shared_and_pinned)
        self._threads, self._processes = threads, processes
        self._workers: Workers | None = None
        if processes:
            make = shared if delivery is None else shared_and_pinned
        else:
            make = heap if delivery is None else pinned
        shape = (batch_size, *slot_shape(program.result))
        self._slots = SlotPool(shape, STORAGE[program.result.dtype], keep=prefetch + 2, make=make)

    def start(self, epoch: int, steps: Steps) -> Run:
        """Begin an epoch. The first one starts the processes, and does not wait for them."""
        if self._processes and self._workers is None:
            self._workers = Workers(self._program, self._source, threads=self._threads, processes=self._processes)
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
            owner.join(2 * _STOP_SECONDS)

    def processes(self) -> dict[str, int]:
        """The processes that decode, see `Workers.counts`; nothing where there are to be none."""
        return self._workers.counts() if self._workers is not None else {}

    def culprit(self) -> str:
        """Which stage has been at one operation for the longest time, in words."""
        return culprit(self.read_meter, self.work_meter)

    def _begin(self, epoch: int, steps: Steps) -> _Machinery:
        builder: Any = PipelineBuilder()
        begun, places = threading.Event(), self._prefetch + 2
        at_ease = places if self._gpu is None else min(places, _BATCHES_AT_EASE)
        gate = Gate(at_ease, spare=places - at_ease)
        finished: queue.SimpleQueue[Assembly] = queue.SimpleQueue()

        async def hand_over(batch: Assembly) -> None:
            finished.put(batch)  # taken at once where it waits: a batch of SPDL's sink comes by way of its event loop

        builder.add_source(self._chunks(epoch, steps, begun))
        pools = []
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
        pipeline.start(timeout=_START_SECONDS)
        if self._gpu is None:
            return _Machinery(pipeline, finished, pools, begun, gate, hurry=lambda on: None, switching=None)
        hurry = functools.partial(_hurry, self._gpu, gate)
        return _Machinery(pipeline, finished, pools, begun, gate, hurry, QuickSwitching())

    async def _chunks(self, epoch: int, steps: Steps, begun: threading.Event) -> AsyncIterator[_Chunk]:
        begun.set()
        for step in range(len(steps)):
            batch = self._assembly(epoch, step, steps)
            count = len(batch.positions)
            for start in range(0, max(count, 1), self._chunk_size):
                stop = min(start + self._chunk_size, count)
                yield _Chunk(batch, start, stop, last=stop == count)

    def _assembly(self, epoch: int, step: int, steps: Steps) -> Assembly:
        """A batch, empty as yet; or without rows, and with what keeps it from having them."""
        try:
            positions, valid = steps.positions(step)
            indices = self._order.indices(epoch, positions)
            labels = self._source.labels[indices]
        except Exception as error:
            none = np.empty(0, np.int64)
            return Assembly(step, none, none, none, none.astype(bool), none.astype(bool), 1, error=error)
        chunks = -(-len(positions) // self._chunk_size)
        return Assembly(step, positions, indices, labels, valid, np.ones(len(positions), bool), chunks)

    def _read(self, epoch: int, chunk: _Chunk) -> None:
        batch = chunk.batch
        chunk.payload = self._source.read(batch.indices[chunk.start : chunk.stop].tolist(), self._bytes.take)
        self.read_meter.add(read_bytes=sum(chunk.payload.sizes), cpu_s=chunk.payload.cpu_s)
        if self._gpu is not None:
            chunk.prepared = self._gpu.prepare(chunk.payload, self._keys(epoch, chunk))

    def _gated(self, gate: Gate, operation: Callable[[_Chunk], _Chunk]) -> Callable[[_Chunk], _Chunk]:
        """An operation that waits until its batch may take memory. Nothing happens once the epoch is being ended."""

        def run(chunk: _Chunk) -> _Chunk:
            batch = chunk.batch
            try:
                with batch.lock:
                    if batch.slots is None and batch.error is None:
                        if not gate.enter(batch.step):
                            return chunk
                        count = len(batch.positions)
                        batch.slots = self._slots.take(count) if self._gpu is None else self._gpu.slots(count)
            except BaseException as error:  # as in _never_raise
                batch.fail(error)
            return operation(chunk)

        return run

    def _keys(self, epoch: int, chunk: _Chunk) -> Keys:
        return Keys(self._seed, epoch, chunk.batch.positions[chunk.start : chunk.stop])

    def _work(self, epoch: int, chunk: _Chunk) -> None:
        batch, keys = chunk.batch, self._keys(epoch, chunk)
        assert batch.slots is not None
        faults = self._by_process(chunk, keys)
        if faults is None:
            if chunk.payload is None:
                with self.read_meter.work(len(chunk)):
                    self._read(epoch, chunk)
            assert chunk.payload is not None
            faults = self._run(chunk.payload, keys, batch.slots[chunk.start : chunk.stop], chunk.prepared)
        chunk.payload = chunk.prepared = None
        rows = range(chunk.start, chunk.stop)
        for i, (row, fault) in enumerate(zip(rows, faults, strict=True)):
            if fault is not None:
                self._judge(batch, row, epoch, keys[i], fault)
        with batch.lock:
            batch.unfinished -= 1
            whole = batch.unfinished == 0
        if whole and self._delivery is not None:
            self._deliver(batch, self._delivery)

    def _by_process(self, chunk: _Chunk, keys: Keys) -> list[BadSampleError | None] | None:
        """Read and decode a chunk elsewhere; None where that cannot be done just now."""
        if self._workers is None:
            return None
        batch = chunk.batch
        outcome = self._workers.run(batch.indices[chunk.start : chunk.stop].tolist(), keys, batch.slots, chunk.start)
        if outcome is None:
            return None
        self.read_meter.add(samples=len(chunk), read_bytes=outcome.read_bytes, busy_s=outcome.read_s)
        self.work_meter.add(busy_s=-outcome.read_s, cpu_s=outcome.cpu_s)
        return outcome.errors()

    def _run(self, payload: Payload, keys: Keys, slots: Any, prepared: Any = None) -> list[BadSampleError | None]:
        """The program on what was read; an unreadable sample is bad without further ado. Gives the bytes back."""
        if self._gpu is not None and self._delivery is not None:
            faults = self._gpu.launch(prepared or self._gpu.prepare(payload, keys), slots)
            self._delivery.keep(payload.buffer, self._bytes.give)
            return faults
        try:
            runner = self._runners.pop()
        except IndexError:
            runner = CpuRunner(self._program)
        faults = decode(runner, payload, keys, slots)
        self._bytes.give(payload.buffer)
        self._runners.append(runner)
        return faults

    def _deliver(self, batch: Assembly, delivery: Delivery) -> None:
        """Queue what is left of a batch's way to the GPU: its pixels if the CPU made them, and what is known of it."""
        if self._gpu is None:
            pixels = batch.slots
            batch.slots = delivery.send(as_batch(pixels, self._program.result))
            delivery.keep(pixels)
        batch.there = delivery.send_all([batch.labels, batch.valid, batch.indices])
        batch.ready = delivery.mark()

    def _judge(self, batch: Assembly, row: int, epoch: int, keys: Keys, fault: BadSampleError) -> None:
        """Apply the policy to one bad sample."""
        index = int(batch.indices[row])
        fault = fault.located(index, self._source.path(index))
        if self._bad.policy == "raise":
            raise fault
        self._bad.record(fault)
        if self._bad.policy == "skip":
            batch.kept[row] = False
            return
        assert batch.slots is not None
        for attempt in range(self._order.size):
            index = self._order.replacement(epoch, int(batch.positions[row]), attempt)
            payload = self._source.read([index], self._bytes.take)
            (new_fault,) = self._run(payload, keys, batch.slots[row : row + 1])
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
        self._slots.clear()
        self._runners.clear()
        if self._delivery is not None:
            self._delivery.close()
        self._bad.close()

    def _begin_thread(self) -> None:
        """Keep torch's operators on this thread, and whatever it allocates off the other GPUs.

        A team of OpenMP threads for each worker would spin beside the others. The first call ties this thread to the
        default, so that the second, which also changes the default, stays in force.
        """
        torch.get_num_threads()
        torch.set_num_threads(1)
        if self._delivery is not None:
            torch.cuda.set_device(self._delivery.device)


def _hurry(gpu: ChunkRunner, gate: Gate, on: bool) -> None:
    gpu.hurry(on)
    if on:
        gate.widen()


def _never_raise(meter: Meter, operation: Callable[[_Chunk], None]) -> Callable[[_Chunk], _Chunk]:
    """An SPDL operation that meters its work and writes whatever it raises into the batch.

    BaseException, because SPDL hangs on SystemExit and StopIteration from an operation.
    """

    def run(chunk: _Chunk) -> _Chunk:
        if chunk.batch.error is None:
            try:
                with meter.work(len(chunk)):
                    operation(chunk)
            except BaseException as error:
                chunk.batch.fail(error)
        return chunk

    return run
