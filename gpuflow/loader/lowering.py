"""Lowers a program to an SPDL thread pipeline: order -> chunks -> read -> decode -> one batch a step.

The items are chunks, a few samples of one batch: SPDL spends a third of a millisecond an item of any size.
Chunks that the CPU decodes next to a GPU (`CpuOffload`) bypass SPDL; their batch waits for them at the end.
No operation ever raises into SPDL, which would drop the item and shift every later sample: a fault is written into the
batch, and the loader raises it in place of that batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import queue
import select
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from spdl.pipeline import AsyncQueue, PipelineBuilder
from spdl.pipeline import Pipeline as SpdlPipeline

from gpuflow.errors import BadSampleError, GpuflowError, LoaderError, LoaderTimeout, TooManyBadSamples
from gpuflow.execute.gpu.device_stream import LONG_WAIT, SHORT_WAIT
from gpuflow.loader.batch import Assembly, Chunk
from gpuflow.loader.decode import (
    ChunkDecoder,
    ChunkReader,
    CpuOffload,
    DecodePayload,
    Delivery,
    Faults,
    Sizes,
    keys_of,
    with_values,
)
from gpuflow.loader.epoch import START_SECONDS, STOP_SECONDS, Admission, Completion, EpochRun, RunningPipeline
from gpuflow.loader.plan import LoaderPlan
from gpuflow.loader.records import RecordMapper
from gpuflow.loader.sampler import EpochSteps
from gpuflow.pipeline.stage import Keys
from gpuflow.runtime.metrics import Meter, oldest_operation
from gpuflow.runtime.threads import DaemonPool, QuickSwitching, torch_threads_lock, use_stop_flag
from gpuflow.sources import cache_counts
from gpuflow.sources.storage import new_copies


class PreparedChunks:
    """Lists the chunks of one epoch that are prepared for the GPU and not being launched yet, for any thread.

    The queues between reading and launching bound how much that is: about eight chunks.
    """

    def __init__(self) -> None:
        self._prepared: dict[tuple[int, int], Any] = {}
        self._lock = threading.Lock()

    def add(self, chunk: Chunk) -> None:
        """Add a chunk that was read, if it was prepared for a GPU."""
        if chunk.prepared is not None:
            with self._lock:
                self._prepared[chunk.batch.step, chunk.start] = chunk.prepared

    def take(self, chunk: Chunk) -> list[Any]:
        """Remove a chunk that is launched now. Return what is prepared of the others, in their order."""
        with self._lock:
            self._prepared.pop((chunk.batch.step, chunk.start), None)
            return [self._prepared[key] for key in sorted(self._prepared)]


_LARGEST_OFFLOADED_CHUNK = 16
_OFFLOADED_AHEAD = 8
"""The number of batches whose offloaded parts may be begun before their turn: a core needs five times as long for a
chunk as the engines for a batch."""
_FEWEST_IN_FLIGHT = 3
"""Batches in flight on a GPU that does not wait for data: with the consumer, ready, and in the making."""
_GPU_SWITCH_SECONDS, _CPU_SWITCH_SECONDS = 0.00002, 0.0001
"""Python's switch intervals while an epoch runs."""
_FIRST_BATCHES = 64
"""Batches that may be late because a loader has just started. They do not count as waits."""

_NAMED_FILES = 8
"""The largest number of files that an error names; `LoaderTimeout.paths` holds all of them."""


@dataclass(frozen=True, slots=True)
class _Epoch:
    """Describes an epoch that runs.

    number: from 0. admission: of batches into memory.
    """

    number: int
    steps: EpochSteps
    admission: Admission
    prepared: PreparedChunks = field(default_factory=PreparedChunks)


class Feed:
    """Builds the SPDL pipelines of one loader, one an epoch, out of reading, decoding and resolving bad samples."""

    def __init__(self, plan: LoaderPlan) -> None:
        self._plan = plan
        self._reader = ChunkReader(plan)
        self.decoder = ChunkDecoder(plan, self._reader)
        self._offload: CpuOffload | None = None
        if plan.share is not None:
            self._offload = CpuOffload(plan, plan.share, self._reader, self.decoder)
        self._records = RecordMapper(plan.source, plan.targets, plan.turned) if plan.targets is not None else None
        self._delivery = Delivery(plan, self._records, self._offload)
        offload_meters = [self._offload.meter] if self._offload is not None else []
        self.meters = (self._reader.meter, *offload_meters, self.decoder.meter)
        self._owners: list[threading.Thread] = []
        self._gpu_wait, self._first_batches_left = 0.0, _FIRST_BATCHES
        self._pid, self._begun = os.getpid(), False

    @property
    def forked(self) -> bool:
        """Return True in a forked child, which has none of the loader's threads.

        A lock that one of them held at the fork stays locked in the child forever.
        """
        return os.getpid() != self._pid

    def start(self, epoch: int, steps: EpochSteps, in_flight: Sequence[Completion | None] = ()) -> EpochRun:
        """Begin an epoch. The first one starts the workers, without waiting for them.

        in_flight: for each batch of earlier epochs that may be in use, when it is not any more; or None, if a call of
            `release` will say so.

        Raises LoaderError if the process may not have that many threads or open files, or if it is a forked child of a
        process that ran an epoch.
        """
        if self._begun and self.forked:
            raise self.error_in_child()
        self._pid, self._begun = os.getpid(), True
        self.decoder.start_workers()
        try:
            with torch_threads_lock():
                torch_threads = torch.get_num_threads()
                try:
                    run = EpochRun(functools.partial(self._begin, epoch, steps, in_flight), self.culprit)
                finally:
                    torch.set_num_threads(torch_threads)  # undo what _begin_thread did to threads yet to come
        except GpuflowError:
            raise
        except (OSError, RuntimeError, MemoryError) as error:
            raise LoaderError(
                f"epoch {epoch} cannot begin: {str(error) or type(error).__name__}; lower run.threads, or raise this "
                "process's limits of threads (ulimit -u, a container's pids), open files (ulimit -n) and memory"
            ) from error
        self._owners = [*filter(threading.Thread.is_alive, self._owners), run.owner]
        return run

    def error_in_child(self) -> LoaderError:
        return LoaderError(
            f"this loader runs in process {self._pid} and does not work in its forked child {os.getpid()}; "
            "make another one after the fork"
        )

    def wait(self) -> None:
        """Wait for the ends of the epochs that were asked to stop."""
        for owner in self._owners:
            owner.join(2 * STOP_SECONDS)

    def culprit(self) -> str:
        """Return which stage has been at one operation for the longest time, and on which files, in words."""
        return self.under_way()[0]

    def under_way(self) -> tuple[str, list[str]]:
        """Describe the operation that has run for the longest time, and return the paths of its files."""
        operation = oldest_operation(*self.meters)
        if operation is None:
            return "no stage is at work", []
        chunk: Chunk = operation.subject
        place = self.decoder.place(operation.thread) if operation.stage == self.decoder.meter.name else None
        if chunk.replacement is not None:
            indices = [chunk.replacement]
        else:
            indices = chunk.indices if place is None else chunk.indices[place : place + 1]
        paths = list(map(self._plan.source.path, indices))
        return f"{operation}, on {_files(paths)}", paths

    def close(self) -> None:
        """Kill the workers, free the buffers, close the source and the list of bad samples; all of them even if one
        raises, such as a GPU's stream after an error of CUDA.

        Does nothing in a forked child.
        """
        if self.forked:
            return
        plan = self._plan
        parts = self.decoder, self._reader, self._delivery, self._offload, plan.gpu, plan.device_stream, plan.bad
        with contextlib.ExitStack() as stack:  # which closes the last one first
            for part in reversed(parts):
                if part is not None:
                    stack.callback(part.close)

    # --- the pipeline of an epoch -------------------------------------------------------------------------------

    def _begin(self, number: int, steps: EpochSteps, in_flight: Sequence[Completion | None]) -> RunningPipeline:
        plan, offload = self._plan, self._offload
        builder: Any = PipelineBuilder()
        begun, capacity = threading.Event(), plan.prefetch + 2
        fewest = capacity if plan.gpu is None else min(capacity, _FEWEST_IN_FLIGHT)
        in_flight = in_flight[-fewest:]  # there may be more, if the GPU waited for batches
        admission, ahead = Admission(fewest - len(in_flight), spare=capacity - fewest), Admission(_OFFLOADED_AHEAD)
        for completion in in_flight:
            if completion is not None:
                admission.release(completion)
        epoch = _Epoch(number, steps, admission)
        finished: queue.SimpleQueue[Assembly | None] = queue.SimpleQueue()

        async def emit(chunk: Chunk) -> None:
            if not chunk.last:  # chunks arrive in order; the last one of a batch completes it
                return
            if offload is not None:
                await self._wait_for_offloaded(chunk.batch, offload)
                ahead.release()
            if not admission.stop:  # else the batch may not be decoded
                finished.put(chunk.batch)  # SPDL's sink would pass it on by its event loop, later

        pools: list[DaemonPool] = []
        with contextlib.ExitStack() as undo:

            def start_pool(threads: int, name: str) -> DaemonPool:
                pools.append(DaemonPool(threads, name, functools.partial(self._begin_thread, admission)))
                undo.callback(pools[-1].end, STOP_SECONDS)
                return pools[-1]

            submit: Callable[[Chunk], object] | None = None
            if offload is not None:
                offload.share.begin()
                work = offload.meter, self._decode_offloaded
                decode_share = _operation(epoch, lambda batch: ahead.acquire(batch.step), work)
                executor: Any = start_pool(offload.meter.threads, "offload")
                submit = functools.partial(executor.submit, decode_share)
            builder.add_source(self._chunks(epoch, begun, submit))
            read, decode = (self._reader.meter, self._read), (self.decoder.meter, self._decode)
            allocate = functools.partial(self._allocate, epoch)
            works = [decode] if plan.readers or plan.processes else [read, decode]  # processes read, too
            stages = [(plan.callers, "decode", _operation(epoch, allocate, *works))]
            if plan.readers:
                stages.insert(0, (plan.readers, "read", _operation(epoch, lambda batch: True, read)))
            for count, name, operation in stages:
                threads = start_pool(count, name)
                builder.pipe(operation, executor=threads, concurrency=count, output_order="input", name=name)
            _try_what_spdl_needs()
            builder.pipe(emit).add_sink(1)
            # The meters count what SPDL's own statistics would, which double its time an item.
            pipeline: SpdlPipeline[None] = builder.build(
                num_threads=1, queue_class=AsyncQueue, task_hook_factory=lambda stage: []
            )
            _start(pipeline)
            undo.pop_all()
        unshared = math.inf if plan.processes else _CPU_SWITCH_SECONDS
        switching = QuickSwitching(unshared if plan.gpu is None else _GPU_SWITCH_SECONDS)
        return RunningPipeline(pipeline, finished, pools, begun, admission, ahead, switching)

    async def _wait_for_offloaded(self, batch: Assembly, offload: CpuOffload) -> None:
        """Wait until the CPU has decoded its rows of a batch, and adapt its share to whether it was late."""
        if batch.offloaded and batch.error is None:
            late = not batch.decoded.done()
            await asyncio.wrap_future(batch.decoded)
            gpu_waits, rate = self._gpu_wait > SHORT_WAIT, offload.meter.capacity()
            offload.share.update(batch.first_offloaded, late=late, wanted=gpu_waits, rate=rate)

    def set_gpu_wait(self, share: float, grow: Callable[[], None]) -> None:
        """Set the share of its time for which the consumer's GPU waits for batches, 0 to 1.

        grow: lets one more batch be in flight. It is called if the GPU waits for batches most of its time. Not at
            first: memory that is taken then would be kept for the whole run.
        """
        self._first_batches_left = max(0, self._first_batches_left - 1)
        if self._first_batches_left:
            share = 0.0
        self._gpu_wait = share
        if self._plan.gpu is not None:
            self._plan.gpu.set_gpu_wait(share)
        if share > LONG_WAIT:
            grow()

    async def _chunks(
        self, epoch: _Epoch, begun: threading.Event, submit: Callable[[Chunk], object] | None
    ) -> AsyncIterator[Chunk]:
        """Yield the chunks for SPDL, and submit those of the CPU's share to its threads at the same time."""
        begun.set()
        for step in range(len(epoch.steps)):
            batch = self._assembly(epoch, step)
            count = len(batch.positions)
            if submit is not None:
                for start in range(batch.first_offloaded, count, _LARGEST_OFFLOADED_CHUNK):
                    submit(Chunk(batch, start, min(start + _LARGEST_OFFLOADED_CHUNK, count), last=False))
            for start in range(0, max(batch.first_offloaded, 1), self._plan.chunk_size):
                stop = min(start + self._plan.chunk_size, batch.first_offloaded)
                yield Chunk(batch, start, stop, last=stop == batch.first_offloaded)

    def _assembly(self, epoch: _Epoch, step: int) -> Assembly:
        """Return a batch, empty as yet; or without rows, and with the error that keeps it from having them."""
        try:
            positions, valid = epoch.steps.positions(step)
            indices = self._plan.order.indices(epoch.number, positions)
        except Exception as error:
            none = np.empty(0, np.int64)
            return Assembly(step, none, none, none.astype(bool), none.astype(bool), 1, error=error)
        count = len(positions)
        offloaded = self._offload.share.rows(count) if self._offload is not None else 0
        chunks = -(-(count - offloaded) // self._plan.chunk_size) - (-offloaded // _LARGEST_OFFLOADED_CHUNK)
        return Assembly(step, positions, indices, valid, np.ones(count, bool), chunks, offloaded=offloaded)

    # --- operations on a chunk ----------------------------------------------------------------------------------

    def _allocate(self, epoch: _Epoch, batch: Assembly) -> bool:
        """Wait until a batch may take memory, and give it its slots. Return False once the epoch is being ended.

        The batch is not locked meanwhile: the CPU may be decoding its share.
        """
        if batch.slots is None and batch.error is None and not epoch.admission.acquire(batch.step):
            return False
        with batch.lock:
            if batch.slots is None and batch.error is None:
                self.decoder.allocate(batch)
        return True

    def _read(self, epoch: _Epoch, chunk: Chunk) -> None:
        with self._naming_files(chunk):
            self._reader.read_chunk(epoch.number, chunk)
        epoch.prepared.add(chunk)

    def _decode(self, epoch: _Epoch, chunk: Chunk) -> None:
        keys, sizes = keys_of(self._plan, epoch.number, chunk), self._sizes(len(chunk))
        ahead = epoch.prepared.take(chunk)
        with self._naming_files(chunk):
            faults = self.decoder.decode_in_worker(chunk, keys, sizes)
            if faults is None:
                if chunk.payload is None:
                    # No process has answered. A thread that decoded now could outlive the interpreter.
                    if epoch.admission.stop:
                        raise LoaderError("the epoch was ended")
                    with self._reader.meter.work(len(chunk), chunk):
                        self._reader.read_chunk(epoch.number, chunk)
                faults = self.decoder.decode_chunk(chunk, keys, sizes, ahead)
        self._finish(epoch, chunk, keys, faults, sizes, self.decoder.decode_payload, chunk.slots)

    def _sizes(self, count: int) -> Sizes:
        """Return room for the sizes of images, where their records need them."""
        return None if self._records is None else np.empty((count, 3), np.int64)

    @contextlib.contextmanager
    def _naming_files(self, chunk: Chunk) -> Iterator[None]:
        """Add the chunk's files to a timeout that does not know them, such as that of a call of nvJPEG."""
        try:
            yield
        except LoaderTimeout as late:
            if late.paths:
                raise
            paths = list(map(self._plan.source.path, chunk.indices))
            raise LoaderTimeout(f"{late}; it worked on {_files(paths)}", paths) from late

    def _decode_offloaded(self, epoch: _Epoch, chunk: Chunk) -> None:
        assert self._offload is not None
        keys, sizes = keys_of(self._plan, epoch.number, chunk), self._sizes(len(chunk))
        faults, slots = self._offload.decode(chunk, keys, sizes)
        self._finish(epoch, chunk, keys, faults, sizes, self.decoder.decode_on_cpu, slots)

    def _finish(
        self, epoch: _Epoch, chunk: Chunk, keys: Keys, faults: Faults, sizes: Sizes, decode: DecodePayload, slots: Any
    ) -> None:
        """Map a chunk's records, resolve its bad samples, and deliver its batch if it was the last chunk.

        decode: decodes what replaces bad samples into their slots.
        """
        batch = chunk.batch
        if self._records is not None and sizes is not None:
            self._records.add(batch, chunk.start, chunk.indices, keys, sizes, faults, chunk.records)
        for i, fault in enumerate(faults):
            if fault is not None:
                row = chunk.start + i
                replace = functools.partial(self._replace, chunk, row, keys[i], decode, slots[i : i + 1])
                self._resolve(epoch, batch, row, fault, replace)
                chunk.replacement = None
        with batch.lock:
            batch.unfinished -= 1
            is_whole = batch.unfinished == 0
        if is_whole:
            self._delivery.deliver(epoch.number, batch)
            batch.end()

    def _resolve(
        self,
        epoch: _Epoch,
        batch: Assembly,
        row: int,
        fault: BadSampleError,
        decode: Callable[[int], BadSampleError | None],
    ) -> None:
        """Raise the error of a bad sample, put another sample into its row, or skip the row.

        decode: decodes the sample of an index into the row, or returns why it is bad.

        Raises BadSampleError under `raise`, TooManyBadSamples above the limit or if every sample is bad, LoaderError
        once the epoch is being ended.
        """
        source, order, bad = self._plan.source, self._plan.order, self._plan.bad
        index = int(batch.indices[row])
        if fault.stage != "read" and cache_counts(source) is not None:
            with new_copies():
                again = decode(index)
            if again is None:
                return
            fault = again
        fault = fault.located(index, source.path(index))
        if bad.policy == "raise":
            raise fault
        bad.record(fault)
        if bad.policy == "skip":
            batch.kept[row] = False
            return
        position = int(batch.positions[row])
        candidates = order.candidates(epoch.number, position)
        for attempt in range(candidates):
            if epoch.admission.stop:  # there may be as many attempts as samples
                raise LoaderError(f"epoch {epoch.number} was ended while {fault} was being replaced")
            index = order.replacement(epoch.number, position, attempt)
            new_fault = decode(index)
            if new_fault is None:
                return
            bad.record(new_fault.located(index, source.path(index)))
        raise TooManyBadSamples(
            f"all {candidates} samples are bad, so none can replace {fault}; run `gpuflow scan` to list them"
        )

    def _replace(
        self, chunk: Chunk, row: int, keys: Keys, decode: DecodePayload, slot: Any, index: int
    ) -> BadSampleError | None:
        """Put the sample of an index into a row of the batch, or return why it is bad."""
        batch, chunk.replacement = chunk.batch, index
        with self._reader.meter.work(0):  # as part of decoding, whose samples these are
            payload = self._reader.read([index])
            self._reader.meter.add(read_bytes=sum(payload.sizes))
        sizes = self._sizes(1)
        keys, records = with_values(self._plan, keys, [index])
        faults = decode(payload, keys, slot, sizes)
        if self._records is not None and sizes is not None:
            self._records.add(batch, row, [index], keys, sizes, faults, records)
        [fault] = faults
        if fault is None:
            batch.indices[row] = index
            batch.add_labels(row, payload.labels)
        return fault

    def _begin_thread(self, admission: Admission) -> None:
        """Keep torch's operators on this thread, its allocations on this loader's GPU, and its waits within the epoch.

        A team of OpenMP threads for each worker thread would spin next to the others. The first call ties this thread
        to the default, so that the second, which also changes the default, stays in force.
        """
        use_stop_flag(admission.stop)
        torch.get_num_threads()
        torch.set_num_threads(1)
        if self._plan.device_stream is not None:
            torch.cuda.set_device(self._plan.device_stream.device)


def _files(paths: Sequence[str]) -> str:
    if len(paths) == 1:
        return paths[0]
    more = f" and {len(paths) - _NAMED_FILES} more" if len(paths) > _NAMED_FILES else ""
    return f"one of {len(paths)} files: {', '.join(paths[:_NAMED_FILES])}{more}"


def _try_what_spdl_needs() -> None:
    """Raise RuntimeError or OSError if there are no threads or file descriptors for SPDL's event loop.

    A pipeline without them warns of coroutines that were never awaited, waits in vain, or fails at its end.
    """
    with contextlib.ExitStack() as tried:
        tried.enter_context(DaemonPool(2, "trial"))  # the event loop, and what asyncio starts at its end
        for end in socket.socketpair():
            tried.enter_context(end)
        tried.enter_context(select.epoll())


def _start(pipeline: SpdlPipeline[None]) -> None:
    """Start a pipeline; if that fails, leave no thread of it. Raises RuntimeError or TimeoutError."""
    try:
        pipeline.start(timeout=START_SECONDS)
    except BaseException:
        with contextlib.suppress(RuntimeError, TimeoutError):  # it has no thread to wait for, or one that is late
            pipeline.stop(timeout=STOP_SECONDS)
        raise


def _operation(
    epoch: _Epoch, begin: Callable[[Assembly], bool], *works: tuple[Meter, Callable[[_Epoch, Chunk], None]]
) -> Callable[[Chunk], Chunk]:
    """Return an operation of SPDL that does these works on a chunk, meters each, and writes an error into the batch.

    begin: waits until they may begin; returns False if they must not.

    It catches BaseException, because SPDL hangs on SystemExit and StopIteration from an operation.
    """

    def operate(chunk: Chunk) -> Chunk:
        batch = chunk.batch
        try:
            if begin(batch):
                for meter, work in works:
                    if batch.error is None:
                        with meter.work(len(chunk), chunk):
                            work(epoch, chunk)
        except BaseException as error:
            batch.fail(error)
        return chunk

    return operate
