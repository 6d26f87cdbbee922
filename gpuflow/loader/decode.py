"""Reads chunks, decodes them on the GPU, in worker processes or on threads, and completes their batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gpuflow.arrays import Bytes, Ints
from gpuflow.errors import BadSampleError, LoaderError
from gpuflow.execute.cpu import workers
from gpuflow.execute.cpu.runner import CpuRunner
from gpuflow.execute.cpu.workers import Outcome, ReadRequest, Setup
from gpuflow.execute.gpu.device_stream import DeviceStream
from gpuflow.execute.mixing import arrays_of, mix_images, mix_images_at_once, mix_labels, soft_labels
from gpuflow.loader.batch import Assembly, Chunk
from gpuflow.loader.plan import LoaderPlan, Share
from gpuflow.loader.records import Blocks, RecordMapper, to_tensors
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.records import Records, values_of
from gpuflow.pipeline.stage import Keys, Mixture
from gpuflow.pipeline.views import (
    AnyProgram,
    ViewSlots,
    ViewsProgram,
    as_batch,
    as_images,
    slot_bytes_of,
    slot_of,
    slots_of,
    split,
)
from gpuflow.runtime import memory
from gpuflow.runtime.memory import BytePool, SlotPool
from gpuflow.runtime.metrics import Meter, nvtx
from gpuflow.runtime.worker_pool import WorkerConnection, WorkerPool
from gpuflow.sources import Payload, Source, records_of, without_records

Faults = list[BadSampleError | None]
"""For each sample None, or why it is bad."""
Sizes = Ints | None
"""Receives the sizes of the images, [N, 3], see `CpuRunner.run`; None if they are not needed."""
DecodePayload = Callable[[Payload, Keys, Any, Sizes], Faults]
"""Decodes a payload into slots, and releases its bytes."""

_KEPT_BYTES = 1 << 30
"""A chunk for a GPU has 16 to 32 MB, and a dozen of them are in flight. Pinning memory takes longer than reading."""


def keys_of(plan: LoaderPlan, epoch: int, chunk: Chunk) -> Keys:
    """Return the random keys of a chunk's samples, with what stages take from their records."""
    if chunk.keys is None:
        keys = Keys(plan.seed, epoch, chunk.batch.positions[chunk.start : chunk.stop])
        chunk.keys, chunk.records = with_values(plan, keys, chunk.indices)
    return chunk.keys


def with_values(plan: LoaderPlan, keys: Keys, indices: Sequence[int]) -> tuple[Keys, Records | None]:
    """Return the keys with what stages take from these samples' records, and the records; None if stages take nothing.

    If a stage cannot use the numbers of a record, the record is bad, too.
    """
    wanted = plan.program.record_values
    if not wanted:
        return keys, None
    records = records_of(plan.source, indices)
    values, errors = values_of(wanted, records)
    return replace(keys, values=values), replace(records, errors=errors)


class ChunkReader:
    """Reads for one loader, on any thread. `meter` counts what it did."""

    def __init__(self, plan: LoaderPlan) -> None:
        self._plan = plan
        self.meter = Meter("read", plan.readers or plan.threads, nvtx(plan.nvtx))
        self._bytes = BytePool(keep=_KEPT_BYTES, make=memory.heap if plan.gpu is None else memory.pinned)

    def read(self, indices: Sequence[int]) -> Payload:
        """Return the bytes of these samples. `release` the payload's buffer once they are decoded."""
        return self._plan.source.read(indices, self._bytes.acquire)

    def read_chunk(self, epoch: int, chunk: Chunk) -> None:
        """Read a chunk's samples into its payload and prepare that for the GPU, if there is one."""
        gpu = self._plan.gpu
        chunk.payload = payload = self.read(chunk.indices)
        if gpu is not None:
            samples = chunk.batch.indices[chunk.start : chunk.stop]
            chunk.prepared = gpu.prepare(payload, keys_of(self._plan, epoch, chunk), samples)
        chunk.batch.add_labels(chunk.start, payload.labels)
        self.meter.add(read_bytes=sum(payload.sizes))

    def release(self, buffer: Bytes) -> None:
        """Use a payload's buffer again."""
        self._bytes.release(buffer)

    def close(self) -> None:
        """Free the buffers, and close the source."""
        self._bytes.clear()
        self._plan.source.close()


class DecodeWorkers:
    """Starts worker processes, which read and decode for one loader. Any thread may call any method.

    Args:
        threads: chunks at a time, of all workers together.
        processes: the workers that share them.
    """

    def __init__(self, program: AnyProgram, source: Source, *, threads: int, processes: int) -> None:
        shares = [len(range(worker, threads, processes)) for worker in range(processes)]
        self._pool = WorkerPool(
            workers.__name__,
            connections=shares,
            setup=Setup(program, without_records(source)),
            task="decode",
        )

    def decode(
        self, indices: Sequence[int], keys: Keys, slots: Any, start: int, *, sizes: bool = False
    ) -> Outcome | None:
        """Read and decode samples into slots [start, start + n) of a batch's (`slots_of`); None if no worker can.

        The slots then hold anything, and the caller has to decode into them itself. Raises only what ends the caller's
        own wait. sizes: whether to report the images' sizes.
        """

        def exchange(worker: WorkerConnection) -> Outcome | None:
            memory = slots.memory if isinstance(slots, ViewSlots) else slots
            shared = worker.send(ReadRequest(indices, keys, start, len(memory), sizes), memory)
            outcome: Outcome | None = worker.answer() if shared else None
            return outcome

        return self._pool.request(exchange)

    def counts(self) -> dict[str, int]:
        """Return the number of workers `at_work`, and of those `starting`: not ready for chunks yet."""
        return self._pool.counts()

    def close(self) -> None:
        """Kill the workers."""
        self._pool.close()


class ChunkDecoder:
    """Decodes chunks for one loader, on any thread. `meter` counts what it did. Owns the slots of batches.

    workers: processes that read and decode; None until `start_workers`, and if the plan has none.
    """

    def __init__(self, plan: LoaderPlan, reader: ChunkReader) -> None:
        self._plan, self._reader = plan, reader
        self.workers: DecodeWorkers | None = None
        self.meter = Meter("decode", plan.threads, nvtx(plan.nvtx), by_processor=plan.shares_chunks)
        self._runner = CpuRunner(
            plan.program,
            plan.threads if plan.shares_chunks else 0,
            lambda seconds: self.meter.add(busy_s=seconds, cpu_s=seconds),
        )
        on_gpu = plan.device_stream is not None
        if plan.processes:
            make = memory.shared_and_pinned if on_gpu else memory.shared
        else:
            make = memory.pinned if on_gpu else memory.heap
        shape, dtype = slot_of(plan.program)
        self._slots = SlotPool((0, *shape), dtype, keep=plan.prefetch + 2, make=make)

    def start_workers(self) -> None:
        """Start the workers, without waiting for them; only once, and only if the plan has any."""
        plan = self._plan
        if plan.processes and self.workers is None:
            self.workers = DecodeWorkers(plan.program, plan.source, threads=plan.threads, processes=plan.processes)

    def allocate(self, batch: Assembly) -> None:
        """Give a batch its slots. Raises MemoryError if there is not enough memory for them."""
        count, gpu = len(batch.positions), self._plan.gpu
        try:
            batch.slots = slots_of(self._plan.program, self._slots.acquire(count)) if gpu is None else gpu.slots(count)
        except MemoryError as error:
            shape, dtype = slot_of(self._plan.program)
            needed = count * math.prod(shape) * np.dtype(dtype).itemsize
            name = self._plan.program.pipeline.name
            raise MemoryError(
                f"not enough memory for a batch of {count:,} samples, which needs {needed:,} bytes; "
                f"set a smaller pipelines.{name}.batch"
            ) from error

    def decode_in_worker(self, chunk: Chunk, keys: Keys, sizes: Sizes) -> Faults | None:
        """Have a worker read and decode a chunk into its slots, and meter that; None if no worker can."""
        if self.workers is None:
            return None
        slots, wants_sizes = chunk.batch.slots, sizes is not None
        outcome = self.workers.decode(chunk.indices, keys, slots, chunk.start, sizes=wants_sizes)
        if outcome is None:
            return None
        if sizes is not None and outcome.sizes is not None:
            sizes[:] = outcome.sizes
        self._reader.meter.add(samples=len(outcome.faults), read_bytes=outcome.read_bytes, busy_s=outcome.read_s)
        self.meter.add(busy_s=-outcome.read_s, cpu_s=outcome.cpu_s)
        return outcome.faults

    def decode_chunk(self, chunk: Chunk, keys: Keys, sizes: Sizes, ahead: Sequence[Any]) -> Faults:
        """Decode the payload of a chunk into its slots. ahead: see `ChunkRunner.launch`."""
        payload, prepared = chunk.payload, chunk.prepared
        assert payload is not None
        chunk.payload = chunk.prepared = None
        return self.decode_payload(payload, keys, chunk.slots, sizes, prepared, ahead)

    def decode_payload(
        self, payload: Payload, keys: Keys, slots: Any, sizes: Sizes, prepared: Any = None, ahead: Sequence[Any] = ()
    ) -> Faults:
        """Decode a payload into slots on the CPU, or queue that on the GPU. Releases the bytes once that is done.

        prepared: the payload, if it is prepared for the GPU already. ahead: see `ChunkRunner.launch`.
        """
        gpu, device_stream = self._plan.gpu, self._plan.device_stream
        if gpu is None or device_stream is None:
            return self.decode_on_cpu(payload, keys, slots, sizes)
        if prepared is None:
            prepared = gpu.prepare(payload, keys)
        if sizes is not None:
            sizes[:] = prepared.sizes
        faults = gpu.launch(prepared, slots, ahead)
        device_stream.retain_until_done(payload.buffer, self._reader.release)
        return faults

    def decode_on_cpu(self, payload: Payload, keys: Keys, slots: Any, sizes: Sizes) -> Faults:
        """Decode a payload into slots, on this thread and those that share its images. Releases the bytes."""
        faults = self._runner.run(payload, keys, slots, sizes)
        self._reader.release(payload.buffer)
        return faults

    def place(self, thread: int) -> int | None:
        """Return which sample of its chunk this thread decodes on the CPU; None if that is not known."""
        return self._runner.place(thread) if self._plan.gpu is None else None

    def close(self) -> None:
        """Kill the workers, and free the slots that no batch holds and the decoders' memory."""
        if self.workers is not None:
            self.workers.close()
        self._slots.clear()
        self._runner.clear()


class CpuOffload:
    """Decodes the last rows of each batch on the CPU, for one loader. `meter` counts what it did.

    The pixels go to pinned memory, and from there to the GPU.
    """

    def __init__(self, plan: LoaderPlan, share: Share, reader: ChunkReader, decoder: ChunkDecoder) -> None:
        self.share = share
        self._plan, self._reader, self._decoder = plan, reader, decoder
        self.meter = Meter("decode_cpu", share.threads, nvtx(plan.nvtx))
        self._pinned = BytePool(keep=_KEPT_BYTES, make=memory.pinned)

    def decode(self, chunk: Chunk, keys: Keys, sizes: Sizes = None) -> tuple[Faults, Any]:
        """Read and decode a chunk. Return its faults and its slots."""
        batch, (shape, dtype) = chunk.batch, slot_of(self._plan.program)
        start = chunk.start - batch.first_offloaded
        whole = slots_of(self._plan.program, self._memory(batch).view(dtype).reshape(-1, *shape))
        slots = whole[start : start + len(chunk)]
        payload = self._reader.read(chunk.indices)
        batch.add_labels(chunk.start, payload.labels)
        self._reader.meter.add(samples=len(chunk), read_bytes=sum(payload.sizes))
        return self._decoder.decode_on_cpu(payload, keys, slots, sizes), slots

    def send(self, batch: Assembly) -> None:
        """Queue the copy of a batch's pixels that the CPU decoded into its slots on the GPU: one for each output."""
        device_stream = self._plan.device_stream
        if batch.offload_memory is not None and device_stream is not None:
            held = slots_of(self._plan.program, torch.from_numpy(self._memory(batch)))
            for target, pixels in zip(split(batch.slots[batch.first_offloaded :]), split(held), strict=True):
                device_stream.copy_into(target, pixels)
            device_stream.retain_until_done(batch.offload_memory, self._pinned.release)
            batch.offload_memory = None

    def _memory(self, batch: Assembly) -> Bytes:
        """Return the memory into which the CPU decodes its rows of a batch: [offloaded, bytes of a slot]."""
        slot_bytes = slot_bytes_of(self._plan.program)
        with batch.lock:
            if batch.offload_memory is None:
                batch.offload_memory = self._pinned.acquire(batch.offloaded * slot_bytes)
        return batch.offload_memory[: batch.offloaded * slot_bytes].reshape(batch.offloaded, slot_bytes)

    def close(self) -> None:
        """Free the memory."""
        self._pinned.clear()


class Delivery:
    """Delivers the batches of one loader, on any thread.

    Samples are mixed alike wherever they are: partners come from the rank's own batch, and a wrapped or skipped sample
    is no sample's partner.

    records: maps the records of the batch's chunks; None if the source has no fields. offload: decodes a part of each
    batch on the CPU; None if the GPU decodes all of it.
    """

    def __init__(self, plan: LoaderPlan, records: RecordMapper | None, offload: CpuOffload | None) -> None:
        self._plan, self._records, self._offload = plan, records, offload
        self._blocks = Blocks(keep=plan.prefetch + 2)

    def deliver(self, epoch: int, batch: Assembly) -> None:
        """Look up the labels of a batch, mix it, and queue the copies to the GPU that are left."""
        known = batch.read_labels
        batch.labels = self._plan.source.labels[batch.indices] if known is None else known
        if batch.labels.dtype == np.uint8:  # several classes a sample, of which losses want floats
            batch.labels = batch.labels.astype(np.float32)
        keys = Keys(self._plan.seed, epoch, batch.positions)
        mixtures = [step.draw(keys, batch.valid).among(batch.kept) for step in self._plan.program.mixings]
        fields = {} if self._records is None else self._records.join(batch)
        device_stream = self._plan.device_stream
        self._mix_labels(batch, mixtures)
        if self._plan.gpu is None and mixtures:
            program = self._plan.program
            assert isinstance(program, Program), "views are not mixed"
            images = as_batch(batch.slots, program.result)
            for mixture in mixtures:
                mix_images(images, mixture)
        if device_stream is None:
            batch.fields = to_tensors(fields, self._blocks.pack)
            return
        if self._plan.gpu is None:
            self._send_pixels(batch, device_stream)
        else:
            self._complete_on_gpu(batch, mixtures, device_stream)
        batch.sent = device_stream.send_all([batch.labels, batch.valid, batch.indices])
        batch.fields = to_tensors(fields, device_stream.send_all)
        batch.ready = device_stream.record_event()

    def _mix_labels(self, batch: Assembly, mixtures: Sequence[Mixture]) -> None:
        """Replace the labels of a batch by probabilities, if samples are mixed."""
        if not mixtures:
            return
        source, labels = self._plan.source, np.asarray(batch.labels, np.int64)
        count = len(source.classes)
        unknown = np.flatnonzero((labels < 0) | (labels >= count))
        if unknown.size:
            i = int(unknown[0])
            raise LoaderError(
                f"{source.path(int(batch.indices[i]))} has the label {labels[i]}, which is none of the {count} classes "
                f"0 to {count - 1}; correct the label, or `classes` of the dataset"
            )
        probabilities = soft_labels(labels, count)
        for step, mixture in zip(self._plan.program.mixings, mixtures, strict=True):
            probabilities = mix_labels(probabilities, mixture, step.stage.label_smoothing)
        batch.labels = probabilities

    def _send_pixels(self, batch: Assembly, device_stream: DeviceStream) -> None:
        """Queue the transfer of pixels that the CPU decoded."""
        program, slots = self._plan.program, batch.slots
        if isinstance(program, ViewsProgram):
            pixels = slots.memory
            batch.slots = as_images(program, device_stream.send(torch.from_numpy(pixels)))
        else:
            pixels = slots
            batch.slots = device_stream.send(as_batch(pixels, program.result))
        device_stream.retain_until_done(pixels)

    def _complete_on_gpu(self, batch: Assembly, mixtures: Sequence[Mixture], device_stream: DeviceStream) -> None:
        """Queue the transfer of the CPU's part of pixels that the GPU decoded, and the mixing of all."""
        if self._offload is not None:
            self._offload.send(batch)
        for mixture in mixtures:
            if mixture.changed.any():
                sent = device_stream.send_all(arrays_of(mixture))
                with device_stream.queued():
                    mix_images_at_once(batch.slots, sent, blends=bool((mixture.weights != 1).any()))
        if isinstance(batch.slots, ViewSlots):
            batch.slots = as_images(self._plan.program, batch.slots.memory)

    def close(self) -> None:
        """Free the memory that no batch holds."""
        self._blocks.clear()
