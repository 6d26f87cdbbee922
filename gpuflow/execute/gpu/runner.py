"""Runs a program on the GPU, one chunk at a time: nvJPEG decodes, then a few batched kernels do the other stages.

With views, each image is decoded once, and the first pass of every view reads it in the decode buffer. What is said
here of an output holds for each number of each view, or for the only image of a sample without views. Of an image that
the engines decode, the buffer gets the smallest part that has all that the first passes read.

A chunk is first prepared and then launched, on different threads. `prepare` reads headers, draws random parameters,
rewrites progressive JPEGs as baseline ones (`decode/chunk_files.py`), and has the CPU begin to decode the files that
the engines do not support: other formats, CMYK files. Images that EXIF data turn are decoded as stored, and the first
kernel reads them upright (`execute/gpu/chunk_scan.py`).

A launch may also decode images of chunks that come later, if they fit into its calls (`execute/gpu/decode_calls.py`). A
batched call that fails is retried by halves; a file that fails alone falls back to the CPU decoder, and its place in
the batch stays the same. So does a sample that an opaque stage refuses alone, so that a sample is bad where the CPU
finds it bad, and for the same reason.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, final

import numpy as np
import torch

from gpuflow.arrays import Bools, Bytes, Ints
from gpuflow.decode.chunk_files import rewrite_progressive
from gpuflow.decode.nvjpeg import NvjpegLibrary
from gpuflow.errors import BadSampleError, LoaderTimeout
from gpuflow.execute import packing
from gpuflow.execute.cpu.decode_pool import CpuDecodePool, PendingImages
from gpuflow.execute.gpu.chunk_scan import ChunkScanner, FileChecks
from gpuflow.execute.gpu.decode_buffers import BUFFERS, BUFFERS_FOR_ONE_CALL, DecodeBuffers
from gpuflow.execute.gpu.decode_calls import AHEAD, CallPart, DecodeCall, Undecoded, plan_calls
from gpuflow.execute.gpu.device_passes import DevicePasses, plan_of
from gpuflow.execute.gpu.device_stream import LONG_WAIT, SHORT_WAIT, DeviceStream
from gpuflow.execute.gpu.gpu_call import GpuCall, GpuCalls, Transfer
from gpuflow.execute.gpu.launches import FirstPasses, ImageCopies
from gpuflow.execute.gpu.nvjpeg_decoders import CALL_SECONDS, JpegBatch, NvjpegDecoderPool
from gpuflow.execute.gpu.passes import Pass
from gpuflow.execute.gpu.results import Canvas, ImageRows, LaterResults, Target, Tiles, tiles_of
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import Resampling, Warping
from gpuflow.pipeline.views import AnyProgram, outputs_of, slot_bytes_of, slots_of, split
from gpuflow.sources import Payload

_LONG_WAITS = 32
"""The number of batches in a row for which the GPU must have waited so long. Fewer would count the first batches of a
training, which are late, and a second call needs as much GPU memory as the first one."""
_SETTLED = 256
"""The number of batches in a row for which the GPU must not have waited so long before memory for a second call is
given back. Freeing it may wait for the GPU, as may allocating it again."""


class _Plan(NamedTuple):
    """The first pass of one output on images [n], as its kernel reads it (`plan_of`), without addresses.

    rows [M, K]: of each image, or of each tile where results differ in size. In place of an address there is the
    distance in bytes from the image's first byte to its upper left pixel. tiles: the images of the tiles, if results
    differ in size.
    """

    rows: Ints
    tiles: Tiles | None

    @classmethod
    def of(cls, draw: Resampling | Warping, steps: Ints, *, fixed: bool) -> _Plan:
        """Plan it for images [n] with these `pixel_steps`. fixed: whether their results have one size."""
        tiles = None if fixed else tiles_of(draw)
        if tiles is not None:
            draw, steps = tiles.draw, steps[tiles.image]
        return cls(plan_of(draw, steps, 0), tiles)

    def on_canvas(self, taken: Ints, addresses: Ints, target: Canvas) -> Ints:
        """Return the rows of the kernel's plan for the tiles of the images `taken` of the n, at these addresses."""
        assert self.tiles is not None, "their results differ in size"
        number = np.full(int(self.tiles.image.max(initial=-1)) + 1, -1)
        number[taken] = np.arange(len(taken))
        numbers = number[self.tiles.image]
        kept = np.flatnonzero(numbers >= 0)
        rows = self.rows[kept]
        rows[:, 0] += addresses[numbers[kept]]
        rows[:, -1] = target.offsets(self.tiles)[kept]
        return rows


@final
class _Call:
    """One nvJPEG call, from its planning to its end.

    chunks: those that were planned together. results: for each chunk that has any of its images, where the first pass
    of each output puts them.
    """

    def __init__(self, planned: DecodeCall, chunks: Sequence[Prepared]) -> None:
        self.planned = planned
        self.chunks: Sequence[Prepared] = chunks
        self.results: dict[int, list[ImageRows]] = {}
        self.queued: Future[Bools] = Future()
        """Holds which images were decoded, once the call is queued, or the error that prevented that."""

    def finish(self, good: Bools) -> None:
        """Record that the call is queued, and which images are good. It then drops its reference to the batch of its
        first chunk, because later chunks may refer to this call long after that batch has ended."""
        del self.results[0]
        self.queued.set_result(good)

    def wait(self) -> None:
        """Wait until the call is queued. Raises the error that prevented that, or LoaderTimeout."""
        if not wait([self.queued], CALL_SECONDS).done:
            raise LoaderTimeout(f"a call of nvJPEG was not queued within {CALL_SECONDS:g} s")
        self.queued.result()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A chunk that is ready to be launched.

    rows [n]: which of its samples nvJPEG decodes: complete files.
    entries [n, 7]: of the files of these rows, as `JpegBatch.of` takes them. memory: that holds these files.
    undecoded: which of these rows no call has taken yet; needs the runner's lock.
    plans: for each output the first pass's resampling or warp of these rows.
    sizes [N, 3]: of all samples of the chunk that have a valid header, as `CpuRunner.run` has them.
    draws: for each output and each pass of it the random parameters for these rows.
    others: the samples that the CPU decodes, or None.
    faults: for each sample of the chunk None, or why it is bad.
    early: calls for earlier chunks that decode images of this one, too, each with its part of this chunk.
    """

    payload: Payload
    keys: s.Keys
    rows: Ints
    entries: Ints
    memory: Sequence[Bytes]
    undecoded: Undecoded
    plans: list[_Plan]
    sizes: Ints
    draws: list[list[Any]]
    others: PendingImages | None
    faults: list[BadSampleError | None]
    early: list[tuple[_Call, CallPart]] = field(default_factory=list)


class GpuRunner:
    """Runs a program's chunks on a loader's stream. Any thread may call any method.

    While one thread in `launch` waits for nvJPEG, a second thread in `launch` does the Python work of the next chunk,
    so that the engines do not wait for it. `NvjpegDecoderPool` says when two threads may call nvJPEG at the same time.

    Args:
        program: what to run.
        passes: the result of `passes.passes_of_each(program)`.
        library: the nvJPEG to decode with.
        backend: as `nvjpeg.BatchedDecoder` takes it.
        decode_bytes: the largest size of a buffer for decoded pixels; one larger image gets a separate buffer.
        buffers: the number of such buffers at first, which is the number of chunks launched at once; `set_gpu_wait`
            adds more.
        later_images: the largest number of images of later chunks that are decoded early, to fill up calls. Their
            results need memory until their chunk is launched.
        threads: the number of threads of C code that work on the files of a chunk: they check new files, rewrite
            progressive ones, and decode what nvJPEG does not take.
        decoder_calls: how many threads call nvJPEG at once; `auto`: two while the GPU waits most of its time.

    Raises:
        NvjpegError: the GPU does not have the backend.
        SystemFault: there is no GPU memory for a small image.
    """

    def __init__(
        self,
        program: AnyProgram,
        passes: Sequence[Sequence[Pass]],
        device_stream: DeviceStream,
        library: NvjpegLibrary,
        *,
        backend: str,
        decode_bytes: int,
        buffers: int = BUFFERS,
        later_images: int = 0,
        threads: int = 1,
        decoder_calls: int | Literal["auto"] = "auto",
    ) -> None:
        self._program, self._device_stream = program, device_stream
        outputs = outputs_of(program)
        each_passes = tuple(tuple(passes[x.program]) for x in outputs)
        self._decode_bytes = decode_bytes
        self._pinned = lambda size: device_stream.pinned([size], torch.uint8).numpy()
        self._cpu = CpuDecodePool(program, threads=threads, make=self._pinned)
        self._lock = threading.Lock()
        self._calls: deque[_Call] = deque()
        self._checks = FileChecks()
        self.engine_images, self.cpu_images = 0, 0
        self._decoder_calls = decoder_calls
        self._long_waits = self._settled = 0
        with device_stream.queued():
            self._decoders = NvjpegDecoderPool(device_stream, library, program.decoder.color, backend)
            with self._decoders.acquire() as decoder:
                with_regions = decoder.decodes_regions()
            self._scanner = ChunkScanner(program.decoder, outputs, each_passes, with_regions=with_regions)
            self._buffers = DecodeBuffers(device_stream, decode_bytes, buffers)
            each = [DevicePasses(one, device_stream) for one in passes]
            self._passes = [each[output.program] for output in outputs]
            calls = GpuCalls.find(device_stream, library)
            self._first_passes = FirstPasses(self._passes, device_stream, calls)
            self._copies = ImageCopies(device_stream, calls)
            self._later = LaterResults(device_stream, [one.first.result for one in self._passes])
        # A canvas has room for the results of one chunk.
        self._later_images = later_images if all(passes.first.result.fixed for passes in self._passes) else 0
        device_stream.synchronize()

    # --- on any thread ----------------------------------------------------------------------------------------------

    def set_gpu_wait(self, share: float) -> None:
        """Set the share of its time for which the consumer's GPU waits for batches, 0 to 1. Call it for each batch.

        If the GPU waits for more than a short time, a second decode buffer is used. If it has waited most of the time
        for `_LONG_WAITS` batches, or `decoder_calls` is 2, there are more buffers and two calls at a time (see
        `NvjpegDecoderPool.set_starved`). After `_SETTLED` batches without such waits the memory for these is freed.
        """
        waited_long = share > LONG_WAIT
        self._long_waits = self._long_waits + 1 if waited_long else 0
        starved = self._long_waits >= _LONG_WAITS
        two = starved if self._decoder_calls == "auto" else self._decoder_calls == 2
        self._settled = 0 if waited_long or two else self._settled + 1
        self._decoders.set_starved(two)
        if two or share > SHORT_WAIT:
            self._buffers.grow(BUFFERS if two else BUFFERS_FOR_ONE_CALL)
        if self._settled and self._settled % _SETTLED == 0:
            self._decoders.release_second()
            self._buffers.shrink(BUFFERS_FOR_ONE_CALL)

    def check(self) -> None:
        """Decode gpuflow's own test image with a GPU decoder and the CPU decoders. Raises DecoderError if one fails."""
        with self._device_stream.queued(), self._decoders.acquire() as decoder:
            decoder.check()
        self._cpu.runner.check()

    def share_checks(self, samples: int, memory_of: Callable[[int], Bytes | None]) -> None:
        """Share with the ranks of this host which files of a source of that many samples were checked.

        memory_of: see `ChunkRunner.share_checks`.
        """
        memory = memory_of(FileChecks.shared_bytes(samples))
        if memory is not None:
            self._checks.share(memory)

    def prepare(self, payload: Payload, keys: s.Keys, indices: Sequence[int] | Ints | None = None) -> Prepared:
        """Do all work that precedes nvJPEG: `ChunkScanner`, checks, and the images that the CPU decodes.

        The payload's memory must be pinned, and stay valid until the GPU has finished the launched chunk. `indices`:
        the indices of the samples in the source, if any; files that were checked are recognised by them.
        """
        scan, memory, pool = self._scanner(payload, keys), [payload.buffer], self._cpu.runner.native_threads()
        which = scan.progressive
        complete = np.ones(len(which), bool)
        if which.any():
            rewritten = rewrite_progressive(payload, scan.rows[which], self._pinned, pool)
            memory.append(rewritten.buffer)
            complete[which] = rewritten.sizes > 0
            scan = scan._replace(tables=scan.tables.with_files(which, rewritten))
        if not which.all():
            complete[~which] = self._checks.complete(scan.rows[~which], payload, scan.headers, indices, pool)
        if not complete.all():
            scan = scan.take(complete, self._scanner, keys)
        headers, rows, draws, tables = scan.headers, scan.rows, scan.draws, scan.tables
        rest = np.array([fault is None for fault in headers.faults])
        rest[rows] = False
        others = np.flatnonzero(rest)
        with self._lock:
            self.engine_images += len(rows)
            self.cpu_images += len(others)
        return Prepared(
            payload=payload,
            keys=keys,
            rows=rows,
            entries=tables.entries,
            memory=memory,
            undecoded=Undecoded(tables.samplings, tables.pixels, tables.spaces),
            plans=[
                _Plan.of(own[0], tables.steps, fixed=passes.first.result.fixed)
                for own, passes in zip(draws, self._passes, strict=True)
            ],
            sizes=np.column_stack([headers.upright_sizes, headers.tags.astype(np.int64)]),
            draws=draws,
            others=self._cpu.begin(payload, others, keys) if len(others) else None,
            faults=headers.faults,
        )

    # --- on a launching thread --------------------------------------------------------------------------------------

    def slots(self, count: int) -> Any:
        """Allocate device memory for `count` results: [count, C, H, W] in the result's dtype and memory format, or
        `ViewSlots` of tensors."""
        with self._device_stream.queued():
            shape = count, slot_bytes_of(self._program)
            return slots_of(self._program, torch.empty(shape, dtype=torch.uint8, device=self._device_stream.device))

    def launch(self, chunk: Prepared, slots: Any, ahead: Sequence[Prepared] = ()) -> list[BadSampleError | None]:
        """Queue the work that fills a chunk's slots; returns for each sample None, or why it is bad.

        ahead: prepared chunks that will be launched after this one, in that order. Some of their images may be decoded
            together with those of this chunk.
        """
        with self._device_stream.queued():
            refused, by_stages = self._run_on_gpu(chunk, slots, ahead) if len(chunk.rows) else (chunk.rows, {})
            pending = [] if chunk.others is None else [chunk.others]
            if len(refused):
                pending.append(self._cpu.begin(chunk.payload, refused, chunk.keys))
            for images in pending:
                self._place(images, chunk.faults, slots)
            if len(refused):
                with self._lock:
                    self.engine_images -= len(refused)
                    self.cpu_images += len(refused)
            for row, fault in by_stages.items():
                if chunk.faults[row] is None:
                    error = fault.__cause__ or fault
                    error.add_note(f"The stage {fault.stage} raised this on the GPU only.")
                    raise error
        return chunk.faults

    def _run_on_gpu(
        self, chunk: Prepared, slots: Any, ahead: Sequence[Prepared]
    ) -> tuple[Ints, dict[int, BadSampleError]]:
        """Decode a chunk and run every pass on it.

        Returns:
            The rows that nvJPEG or an opaque stage refused, whose slots hold no result. And what the stage raised, by
            row, if it refused all images that were decoded: it cannot run on a GPU if the CPU then runs one of them.
        """
        rows = chunk.rows
        pairs = zip(self._passes, split(slots), strict=True)
        targets = [passes.targets(own, draws, rows) for (passes, own), draws in zip(pairs, chunk.draws, strict=True)]
        good = self._decode(chunk, [own[0] for own in targets], ahead)
        by_stages: dict[int, BadSampleError] = {}
        for passes, draws, own in zip(self._passes, chunk.draws, targets, strict=True):
            by_stages |= passes.run_later(draws, own)
        by_stages = {i: fault for i, fault in by_stages.items() if good[i]}
        whole = bool(by_stages) and len(by_stages) == good.sum()
        good[list(by_stages)] = False
        return rows[~good], {int(rows[i]): fault for i, fault in by_stages.items() if whole}

    def _decode(self, chunk: Prepared, first: Sequence[ImageRows], ahead: Sequence[Prepared]) -> Bools:
        """Decode a chunk and run the first pass of each output, to its place. Returns which rows were decoded.

        The calls that are needed for this are put into a queue, and this thread runs calls from that queue, also those
        of other threads, until its own are over.
        """
        chunks = (chunk, *ahead[:AHEAD]) if self._later_images else (chunk,)
        with self._lock:  # from here on no call for another chunk takes images of this one
            own = self._new_calls(chunks, first)
        self._calls.extend(own)
        try:
            for call in (*own, *(call for call, _ in chunk.early)):
                while not call.queued.done() and self._calls:
                    with suppress(IndexError):  # another thread was faster
                        self._run_call(self._calls.popleft())
                call.wait()
        except BaseException as error:
            for call in own:
                with suppress(ValueError):  # it has begun
                    self._calls.remove(call)
                    call.queued.set_exception(error)
            raise
        good = np.ones(len(chunk.rows), bool)
        moved: list[tuple[ImageRows, ImageRows]] = []
        for call, part in [*((call, call.planned.parts[0]) for call in own), *chunk.early]:
            good[part.rows] = call.queued.result()[part.where]
            if part.chunk:
                moved += zip(call.results[part.chunk], _taken(first, part.rows), strict=True)
        if moved:
            self._copies.queue(moved)
        for call, part in chunk.early:  # which may have images of other chunks, too
            del call.results[part.chunk]
        chunk.early.clear()  # which refer to this chunk
        return good

    def _new_calls(self, chunks: Sequence[Prepared], first: Sequence[ImageRows]) -> list[_Call]:
        """Plan the calls for the first chunk. The caller holds the lock."""
        calls: list[_Call] = []
        undecoded = [one.undecoded for one in chunks]
        later = 0
        if len(chunks) > 1 and undecoded[0].mixed:
            later = self._later.reserve(self._later_images)
        planned = plan_calls(undecoded, max_bytes=self._decode_bytes, max_later=later)
        try:
            for one in planned:
                calls.append(self._new_call(one, chunks, first))
        except BaseException as error:  # such as a lack of memory
            for call in calls:
                call.queued.set_exception(error)
            for other in planned[len(calls) :]:
                other.give_back(undecoded)
            raise
        return calls

    def _new_call(self, planned: DecodeCall, chunks: Sequence[Prepared], first: Sequence[ImageRows]) -> _Call:
        """Make a call, with rows for the results of images of later chunks, whose `early` gets the call."""
        call = _Call(planned, chunks)
        own, *others = planned.parts
        call.results[0] = _taken(first, own.rows)
        for part in others:
            call.results[part.chunk] = self._later.take(len(part.rows))
            chunks[part.chunk].early.append((call, part))
        return call

    def _run_call(self, call: _Call) -> None:
        """Run one call. An error is raised by each thread that waits for it."""
        try:
            call.finish(self._decode_call(call))
        except BaseException as error:
            call.queued.set_exception(error)
        finally:
            call.chunks = ()  # which refer to this call

    def _decode_call(self, call: _Call) -> Bools:
        """Decode one call and queue the first passes. Return which of its images were decoded."""
        chunks, planned = call.chunks, call.planned
        draws = [own[0] for own in chunks[0].draws]
        targets: list[Target] = [images.images for images in call.results[0]]
        captured = self._first_passes.captured(draws, targets)
        if captured is not None:
            targets = captured.targets
        ends = np.cumsum(planned.spaces)
        with self._buffers.acquire(int(ends[-1]), wait=captured is None) as buffer:
            # Even if a chunk is never launched, or not to its end.
            buffer.sources += [memory for part in planned.parts for memory in chunks[part.chunk].memory]
            addresses = buffer.address + ends - planned.spaces
            entries = _rows_of_call(planned, [chunks[part.chunk].entries for part in planned.parts])
            files = JpegBatch.of(entries, addresses, planned.sampling, with_regions=self._scanner.with_regions)
            plans = [_plan_of_call(call, i, addresses, target) for i, target in enumerate(targets)]
            gpu_call = None
            if captured is not None:
                gpu_call = GpuCall(captured.calls, buffer.plans(packing.layout(plans)[1]), plans, captured.launches)
            good = self._decoders.decode(files, gpu_call)
            if gpu_call is not None and gpu_call.queued:
                buffer.recorded = True
            else:
                self._first_passes.run(draws, plans, targets)
        return good

    def _place(self, images: PendingImages, faults: list[BadSampleError | None], slots: Any) -> None:
        """Wait for images that the CPU decodes, queue copies into their slots, and add faults."""
        results, found = images.result()
        for row, fault in zip(images.rows.tolist(), found, strict=True):
            faults[row] = fault
        memory, rows = torch.empty_like(results, device=self._device_stream.device), np.arange(len(found))
        pairs = zip(split(slots_of(self._program, memory)), split(slots), strict=True)
        copies = [(ImageRows(decoded, rows), ImageRows(target, images.rows)) for decoded, target in pairs]
        self._copies.queue(copies, Transfer(results, memory))
        self._device_stream.retain_until_done(images.memory, self._cpu.release)

    def close(self) -> None:
        """End the threads that decode on the CPU. Nothing may be prepared or launched any more."""
        self._cpu.close()


def _taken(images: Sequence[ImageRows], rows: Ints) -> list[ImageRows]:
    """Return some of the images of each output. rows: their numbers among these images."""
    return [ImageRows(one.images, one.rows[rows]) for one in images]


def _rows_of_call(planned: DecodeCall, tables: Sequence[Ints]) -> Ints:
    """Return the rows of a call's images [N] in tables, of which there is one for each of the call's parts."""
    if len(tables) == 1:
        return tables[0].take(planned.parts[0].rows, 0)
    rows = np.empty((len(planned), tables[0].shape[1]), np.int64)
    for table, part in zip(tables, planned.parts, strict=True):
        rows[part.where] = table.take(part.rows, 0)
    return rows


def _plan_of_call(call: _Call, i: int, addresses: Ints, target: Target) -> Ints:
    """Encode the first pass of output i on a call's images [n] at these addresses, as its kernel reads it.

    target: where the results are, or a tensor that their offsets count from.
    """
    parts = call.planned.parts
    plans = [call.chunks[part.chunk].plans[i] for part in parts]
    if isinstance(target, Canvas):
        (plan,), (part,) = plans, parts  # a call has images of one chunk then
        return plan.on_canvas(part.rows, addresses, target)
    rows = _rows_of_call(call.planned, [plan.rows for plan in plans])
    for part in parts:
        rows[part.where, -1] = call.results[part.chunk][i].offsets_from(target)
    rows[:, 0] += addresses
    return rows
