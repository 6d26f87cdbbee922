"""Runs a program on the GPU, one chunk at a time: nvJPEG decodes, then a few batched kernels do the other stages.

A chunk is first prepared and then launched, on different threads. `prepare` reads headers, draws random numbers, and
decodes on the CPU the files that the engines do not support: other formats, progressive or CMYK files, images that EXIF
rotates. A batched call that fails is retried by halves; a file that fails alone falls back to the CPU decoder, and its
place in the batch stays the same.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.decode.blank_images import round_up
from gpuflow.decode.chunk_headers import read_headers
from gpuflow.decode.header_scan import Prescan, scan_headers
from gpuflow.decode.libjpeg_turbo import find_libjpeg_turbo
from gpuflow.decode.nvjpeg import NvjpegLibrary
from gpuflow.errors import BadSampleError
from gpuflow.execute.cpu import CpuRunners
from gpuflow.execute.decode_buffers import BUFFERS, DecodeBuffers
from gpuflow.execute.device_stream import DeviceStream, allocate_slots
from gpuflow.execute.kernels.color import adjust
from gpuflow.execute.kernels.sample import FIELDS, sample
from gpuflow.execute.kernels.unwritten import unwritten
from gpuflow.execute.nvjpeg_decoders import JpegBatch, NvjpegDecoderPool
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.image_spec import STORAGE, slot_shape
from gpuflow.pipeline.program import OpaqueStep, PointwiseStep, Program, Sampling, SamplingStep
from gpuflow.sources import SPARE_BYTES, Payload

__all__ = ["CompleteFiles", "GpuRunner", "Pass", "Prepared", "passes_of", "plan_of"]

_ALIGN = 256
_MAX_REMEMBERED = 1 << 26
"""The largest number of samples whose files are remembered as complete, with four bytes each."""
_CALL_IMAGES = 128
"""The largest number of images in one nvJPEG call. nvJPEG and the decode buffers need memory for all of them; with 64
a training step loses 7% of its speed instead of 3% (measured in experiments/gpu_path/NOTES.md)."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One batched pass over a chunk's images: a step, if any, then a lookup in a table of 256 results per channel.

    step: None if the pass is only a table. table: [C, 256] in the storage dtype, or None if levels do not change.
    result: the spec of the images after the pass.
    """

    step: SamplingStep | PointwiseStep | OpaqueStep | None
    table: NDArray[Any] | None
    result: s.ImageSpec


def passes_of(program: Program) -> tuple[Pass, ...] | str:
    """The passes that run a program's stages after nvJPEG decoded, or a text that says why a GPU cannot run it."""
    if program.decoder.library is not None:
        return f"{program.decoder!r} decodes by itself"
    passes: list[Pass] = []
    done = 1
    for step in program.steps:
        done += len(step.stages) if isinstance(step, SamplingStep) else 1
        result = program.specs[done]
        if not passes and not isinstance(step, SamplingStep):
            return f"{step.stage!r} comes before the images have one size; put a crop or a resize to a fixed size first"
        if not result.fixed:
            return f"after {program.pipeline.stages[done - 1]!r} the images still differ in size"
        match step:
            case PointwiseStep(stage) if (table := stage.table()) is not None:
                last = passes[-1]
                if last.table is None and not isinstance(last.step, OpaqueStep):
                    passes[-1] = Pass(last.step, table, result)
                else:
                    passes.append(Pass(None, table, result))
            case PointwiseStep(stage) if stage.device_operations(step.draw(_NO_KEYS)) is None:
                return f"{stage!r} has no form for the GPU"
            case SamplingStep() | PointwiseStep() | OpaqueStep():
                passes.append(Pass(step, None, result))
            case _:
                assert_never(step)
    return tuple(passes) if passes else "its images differ in size; add a crop or a resize to a fixed size"


_NO_KEYS = s.Keys(0, 0, np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class _Finished:
    """Samples that the CPU has finished: rows [m], images [m, *slot_shape(result)] in pinned memory."""

    rows: NDArray[np.int64]
    images: torch.Tensor


@dataclass(frozen=True, slots=True)
class _DecodeCall:
    """Images [start, stop) of a chunk, which one call decodes into one buffer of `size` bytes."""

    start: int
    stop: int
    size: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """A chunk that is ready to be launched.

    rows [n]: which of its samples nvJPEG decodes. indices [n]: the indices of these samples in the source, or None.
    whole [n]: which of these files are known to be complete. files: the files of these rows, with output addresses
    relative to their call's buffer. calls: how these rows are grouped into nvJPEG calls.
    plan [n, len(FIELDS)]: the first pass's sampling of each row, with addresses relative to the call's buffer.
    draws: for each pass its random parameters for these rows. finished: rows that the CPU has finished, or None.
    faults: for each sample of the chunk None, or why it is bad.
    """

    payload: Payload
    keys: s.Keys
    rows: NDArray[np.int64]
    indices: NDArray[np.int64] | None
    whole: NDArray[np.bool_]
    files: JpegBatch
    calls: list[_DecodeCall]
    plan: NDArray[np.int64]
    draws: list[Any]
    finished: _Finished | None
    faults: list[BadSampleError | None]


class GpuRunner:
    """Runs a program's chunks on a loader's stream. Any thread may call any method.

    While one thread in `launch` waits for nvJPEG, a second thread in `launch` does the Python work of the next chunk,
    so that the engines do not wait for it. `NvjpegDecoderPool` says when two threads may call nvJPEG at the same time.

    Args:
        program: what to run. passes: the result of `passes_of(program)`.
        library: the nvJPEG to decode with. backend: one of `nvjpeg.BACKENDS`.
        decode_bytes: the largest size of a buffer for decoded pixels; one larger image gets a buffer of its own.
        buffers: the number of such buffers at first, which is the number of chunks launched at a time; `set_starved`
            adds more.

    Raises:
        NvjpegError: the GPU does not have the backend.
    """

    def __init__(
        self,
        program: Program,
        passes: Sequence[Pass],
        device_stream: DeviceStream,
        library: NvjpegLibrary,
        *,
        backend: str,
        decode_bytes: int,
        buffers: int = BUFFERS,
    ) -> None:
        self._program, self._passes, self._device_stream = program, tuple(passes), device_stream
        self._channels = 1 if program.decoder.color == "gray" else 3
        self._turns = program.decoder.orientation == "apply"
        self._decode_bytes = decode_bytes
        self._cpu = CpuRunners(program)
        self._lock = threading.Lock()
        self._complete = CompleteFiles()
        self.engine_images, self.cpu_images = 0, 0
        with device_stream.queued():
            self._decoders = NvjpegDecoderPool(device_stream, library, program.decoder.color, backend)
            self._buffers = DecodeBuffers(device_stream, buffers)
            self._tables = [self._table(one).to(device_stream.device) for one in self._passes]
        device_stream.synchronize()

    def _table(self, one: Pass) -> torch.Tensor:
        """The pass's table as a tensor [C, 256] in the dtype of its result; the identity if it has none."""
        if one.table is None:
            return torch.arange(256, dtype=torch.uint8).expand(one.result.shape[2], 256).contiguous()
        table = torch.from_numpy(one.table)
        return table.view(getattr(torch, one.result.dtype)) if table.dtype == torch.uint16 else table

    # --- on any thread ----------------------------------------------------------------------------------------------

    def set_starved(self, starved: bool) -> None:
        """Says whether the GPU waits for batches. If it does, adds a decode buffer, and see `NvjpegDecoderPool`."""
        self._decoders.set_starved(starved)
        if starved:
            self._buffers.grow()

    def check(self) -> None:
        """Decode gpuflow's own test image with a GPU decoder and the CPU decoders. Raises DecoderError if one fails."""
        with self._device_stream.queued(), self._decoders.acquire() as decoder:
            decoder.check()
        self._cpu.check()

    @property
    def prescan(self) -> Prescan:
        """`scan_headers` for this program, which is most of the interpreter time that `prepare` needs."""
        return functools.partial(scan_headers, orientation=self._turns)

    def prepare(self, payload: Payload, keys: s.Keys, indices: Sequence[int] | None = None) -> Prepared:
        """Do all work that precedes nvJPEG: headers, draws, and the images that the CPU decodes.

        The payload's memory must be pinned, and stay valid until the GPU has finished the launched chunk. `indices`:
        the indices of the samples in the source, if any; files that were once decoded completely are recognised by
        them.
        """
        decoder = self._program.decoder
        headers = read_headers(
            payload, max_pixels=decoder.max_pixels, max_scans=decoder.max_scans, orientation=self._turns
        )
        rows = self._undamaged(np.flatnonzero(headers.engine), payload, headers.sizes, indices)
        draws = self._draw(_keys_of(keys, rows), headers.sizes[rows])
        misfit = np.zeros(len(rows), bool)
        for draw in draws:
            for found in draw.misfits if isinstance(draw, Sampling) else ():
                misfit |= found.where
        if misfit.any():  # the CPU path reports what is wrong with each of them
            rows = rows[~misfit]
            draws = self._draw(_keys_of(keys, rows), headers.sizes[rows])
        rest = np.array([fault is None for fault in headers.faults])
        rest[rows] = False
        others = np.flatnonzero(rest)
        faults = headers.faults
        finished = self._finish(others, payload, keys, faults) if len(others) else None
        with self._lock:
            self.engine_images += len(rows)
            self.cpu_images += len(others)
        calls, images, plan = self._layout(headers.sizes[rows], draws[0], rows)
        starts, lengths = (np.asarray(x, np.int64)[rows] for x in (payload.offsets, payload.sizes))
        known = None if indices is None else np.asarray(indices, np.int64)[rows]
        whole = np.ones(len(rows), bool)
        if self._decoders.engines:
            whole = np.zeros(len(rows), bool) if known is None else self._complete.known(known, lengths)
        spare = _clear_after(payload, rows[~whole])
        lengths[~whole] += spare
        return Prepared(
            payload=payload,
            keys=keys,
            rows=rows,
            indices=known,
            whole=whole,
            files=JpegBatch(
                (starts + payload.buffer.ctypes.data).astype(np.uint64),
                lengths.astype(np.uint64),
                images,
                np.column_stack([headers.sizes[rows], headers.sampling[rows]]),
            ),
            calls=calls,
            plan=plan,
            draws=draws,
            finished=finished,
            faults=faults,
        )

    def _undamaged(
        self, rows: NDArray[np.int64], payload: Payload, sizes: NDArray[np.int64], indices: Sequence[int] | None
    ) -> NDArray[np.int64]:
        """Filter rows: keep those whose files nvJPEG's CUDA kernels decode to the same pixels in a call of any size.

        The pixels that these kernels give for a damaged file depend on how many files a call has. So libjpeg-turbo
        checks each file first; with `indices`, it checks each sample only once.
        """
        library = find_libjpeg_turbo() if self._decoders.engines == 0 else None
        if library is None or not len(rows):
            return rows
        lengths = np.asarray(payload.sizes, np.int64)[rows]
        known, good = None, np.zeros(len(rows), bool)
        if indices is not None:
            known = np.asarray(indices, np.int64)[rows]
            good = self._complete.known(known, lengths)
        for place in np.flatnonzero(~good).tolist():
            height, width = sizes[rows[place]].tolist()
            good[place] = library.accepts(payload.sample(int(rows[place])), (height, width))
        if known is not None:
            self._complete.add(known[good], lengths[good])
        undamaged: NDArray[np.int64] = rows[good]
        return undamaged

    def _layout(
        self, sizes: NDArray[np.int64], sampling: Sampling, rows: NDArray[np.int64]
    ) -> tuple[list[_DecodeCall], NDArray[np.uint64], NDArray[np.int64]]:
        """calls, output addresses and plan for images of these sizes [n, 2], as documented in `Prepared`."""
        pitches = sizes[:, 1] * self._channels
        spaces = -(-pitches * sizes[:, 0] // _ALIGN) * _ALIGN
        calls = list(_decode_calls(spaces, _CALL_IMAGES, self._decode_bytes))
        offsets = np.cumsum(spaces) - spaces
        for call in calls:
            offsets[call.start : call.stop] -= offsets[call.start]
        images = np.zeros((len(rows), 8), np.uint64)
        images[:, 0], images[:, 4] = offsets, pitches
        return calls, images, plan_of(sampling, offsets, pitches, self._places(0, rows))

    def _places(self, i: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The rows of pass i's target that it fills: the final slots for the last pass, 0..n-1 for others."""
        return rows if i == len(self._passes) - 1 else np.arange(len(rows))

    def _draw(self, keys: s.Keys, sizes: s.Ints) -> list[Any]:
        """Each pass's random parameters: a sampling, operations with factors (none for a table only), or seeds."""
        draws: list[Any] = []
        height, width = sizes.T
        for one in self._passes:
            match one.step:
                case SamplingStep():
                    draws.append(one.step.draw(keys, height, width))
                case PointwiseStep(stage):
                    draws.append(stage.device_operations(one.step.draw(keys)))
                case OpaqueStep():
                    draws.append(one.step.draw(keys))
                case None:
                    draws.append((np.empty((len(keys.positions), 0), np.int64), np.empty((len(keys.positions), 0))))
                case unknown:
                    assert_never(unknown)
            height, width = (np.full(len(keys.positions), side) for side in one.result.shape[:2])
        return draws

    def _finish(
        self,
        rows: NDArray[np.int64],
        payload: Payload,
        keys: s.Keys,
        faults: list[BadSampleError | None],
    ) -> _Finished:
        """Run the program for these rows on the CPU, into pinned memory. Writes why samples are bad into `faults`."""
        result = self._program.result
        staging = self._device_stream.pinned((len(rows), *slot_shape(result)), getattr(torch, result.dtype))
        held = staging.view(torch.uint16) if STORAGE[result.dtype] is np.uint16 else staging
        samples = [payload.sample(i) for i in rows.tolist()]
        for row, fault in zip(rows.tolist(), self._cpu.run(samples, _keys_of(keys, rows), held.numpy()), strict=True):
            faults[row] = fault
        return _Finished(rows, staging)

    # --- on a launching thread --------------------------------------------------------------------------------------

    def slots(self, count: int) -> torch.Tensor:
        """Allocate device memory for `count` results: [count, C, H, W] in the result's dtype and memory format."""
        return allocate_slots(self._device_stream, count, self._program.result)

    def launch(self, chunk: Prepared, slots: torch.Tensor) -> list[BadSampleError | None]:
        """Queue the work that fills a chunk's slots [N, C, H, W]; returns for each sample None, or why it is bad."""
        with self._device_stream.queued():
            refused = self._run_on_gpu(chunk, slots) if len(chunk.rows) else chunk.rows
            if chunk.finished is not None:
                self._place(chunk.finished, slots)
            if len(refused):
                self._place(self._finish(refused, chunk.payload, chunk.keys, chunk.faults), slots)
                with self._lock:
                    self.engine_images -= len(refused)
                    self.cpu_images += len(refused)
        return chunk.faults

    def _run_on_gpu(self, chunk: Prepared, slots: torch.Tensor) -> NDArray[np.int64]:
        """Decode a chunk and run every pass on it. Returns the rows that nvJPEG refused, whose slots hold no result."""
        count = len(chunk.rows)
        targets = [*(allocate_slots(self._device_stream, count, one.result) for one in self._passes[:-1]), slots]
        good = self._decode(chunk, targets[0])
        for i in range(1, len(self._passes)):
            self._run(i, chunk.draws[i], targets[i - 1], targets[i], self._places(i, chunk.rows))
        return chunk.rows[~good]

    def _decode(self, chunk: Prepared, target: torch.Tensor) -> NDArray[np.bool_]:
        """Decode a chunk's calls, each followed by the first pass. Returns which rows were decoded."""
        good = np.ones(len(chunk.rows), bool)
        for call in chunk.calls:
            part = slice(call.start, call.stop)
            files, whole = chunk.files.part(part), chunk.whole[part]
            blank_size = 0 if whole.all() else int(round_up(files.frames[:, :2]).prod(axis=1).max()) * self._channels
            with self._buffers.acquire(call.size + blank_size) as decoded:
                images, plan = files.images.copy(), chunk.plan[part].copy()
                images[:, 0] += np.uint64(decoded.data_ptr())
                plan[:, 0] += decoded.data_ptr()
                sent_plan = self._send(plan)
                with self._decoders.acquire() as decoder:
                    blank = decoded.data_ptr() + call.size if blank_size else None
                    good[part] = decoder.decode(files._replace(images=images), blank)
                if blank_size:
                    good[part] &= ~self._unwritten(images, files.frames)
                self._sample(0, chunk.draws[0], sent_plan, target)
                if blank_size and chunk.indices is not None:
                    sizes = np.asarray(chunk.payload.sizes, np.int64)[chunk.rows[part]]
                    self._complete.add(chunk.indices[part][good[part]], sizes[good[part]])
        return good

    def _unwritten(self, images: NDArray[np.uint64], frames: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which images, each decoded after a blank image, were not decoded completely. Waits for the GPU."""
        described = np.column_stack([images[:, [0, 4]].astype(np.int64), frames[:, :2], frames[:, 2] == 0])
        found = unwritten(self._send(described), int(frames[:, 0].max()), color=self._program.decoder.color)
        return found.cpu().numpy().astype(bool)

    def _run(self, i: int, draw: Any, images: torch.Tensor, target: torch.Tensor, places: NDArray[np.int64]) -> None:
        """Queue a pass after the first one, from images [n, C, H, W] to rows of the target."""
        match self._passes[i].step:
            case SamplingStep():
                pitch = images.stride(2)
                addresses = images.data_ptr() + np.arange(len(images)) * images.stride(0)
                plan = plan_of(draw, addresses, np.full(len(images), pitch), places)
                self._sample(i, draw, self._send(plan), target)
            case OpaqueStep(stage):
                result = stage.apply_batch(images, draw)
                target.index_copy_(0, self._send(places), result)
            case PointwiseStep() | None:
                codes, factors = draw
                adjust(images.permute(0, 2, 3, 1), places, codes, factors, self._tables[i], target)
            case unknown:
                assert_never(unknown)

    def _sample(self, i: int, sampling: Sampling, plan: torch.Tensor, target: torch.Tensor) -> None:
        table = self._tables[i]
        sample(plan, table, target, interpolation=sampling.interpolation, antialias=sampling.antialias)

    def _send(self, array: NDArray[np.int64]) -> torch.Tensor:
        (sent,) = self._device_stream.send_all([array])
        return sent

    def _place(self, finished: _Finished, slots: torch.Tensor) -> None:
        """Copy images that the CPU finished into their slots: one transfer, one kernel."""
        sent = self._device_stream.send(finished.images)
        images = sent if self._program.result.layout == "nchw" else sent.permute(0, 3, 1, 2)
        slots.index_copy_(0, self._send(finished.rows), images)


class CompleteFiles:
    """Remembers which samples' files are undamaged, by index in the source and size in bytes.

    Any thread may call any method.
    """

    def __init__(self) -> None:
        self._sizes, self._lock = np.zeros(0, np.uint32), threading.Lock()

    def known(self, indices: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these samples [N] are known to have undamaged files of these sizes."""
        held = self._sizes
        inside = indices < len(held)
        found: NDArray[np.bool_] = inside & (held[np.where(inside, indices, 0)] == sizes) if len(held) else inside
        return found

    def add(self, indices: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Remember samples [N] with undamaged files of these sizes. Very high indices are not remembered."""
        kept = (indices < _MAX_REMEMBERED) & (sizes <= np.iinfo(np.uint32).max)
        if not kept.any():
            return
        indices, sizes = indices[kept], sizes[kept]
        with self._lock:
            if (need := int(indices.max()) + 1) > len(self._sizes):
                grown = np.zeros(min(max(need, 2 * len(self._sizes)), _MAX_REMEMBERED), np.uint32)
                grown[: len(self._sizes)] = self._sizes
                self._sizes = grown
            self._sizes[indices] = sizes


def _clear_after(payload: Payload, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Write zeros after these files, because the engines read a little ahead. Returns their number for each file, [n].

    It is 0 for a file without room after it, which occurs if `sources.lay_out` did not lay the payload out.
    """
    if not len(rows):
        return rows
    begins = np.sort(np.append(np.asarray(payload.offsets, np.int64), len(payload.buffer)))
    ends = np.asarray(payload.offsets, np.int64)[rows] + np.asarray(payload.sizes, np.int64)[rows]
    room = begins[np.searchsorted(begins, ends)] - ends >= SPARE_BYTES
    if room.any():
        payload.buffer[ends[room][:, None] + np.arange(SPARE_BYTES)] = 0
    return np.where(room, SPARE_BYTES, 0)


def _keys_of(keys: s.Keys, rows: NDArray[np.int64]) -> s.Keys:
    return s.Keys(keys.seed, keys.epoch, keys.positions[rows])


def _decode_calls(spaces: NDArray[np.int64], max_images: int, max_bytes: int) -> Iterator[_DecodeCall]:
    """Group neighbours into calls of equal size, none above `max_images` or `max_bytes`; a larger image is alone."""
    count = len(spaces)
    even = -(-count // max(1, -(-count // max_images)))
    start, total = 0, 0
    for i, space in enumerate(spaces.tolist()):
        if i - start == even or (total and total + space > max_bytes):
            yield _DecodeCall(start, i, total)
            start, total = i, 0
        total += space
    if count:
        yield _DecodeCall(start, count, total)


def plan_of(
    sampling: Sampling, addresses: NDArray[np.int64], pitches: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Encode a sampling as the kernel reads it: int64 [n, len(FIELDS)]."""
    parts = [
        addresses[:, None],
        pitches[:, None],
        sampling.box,
        sampling.mirrors,
        sampling.grid,
        sampling.shown,
        sampling.window,
        sampling.flips,
        rows[:, None],
    ]
    plan = np.concatenate([np.asarray(column, np.int64) for column in parts], axis=1)
    assert plan.shape[1] == len(FIELDS)
    return plan
