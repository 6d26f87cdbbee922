"""Runs a program on the GPU, a chunk at a time: the JPEG engines decode, a few batched kernels do all the rest.

A chunk is prepared (headers, draws, and the CPU's way for what the engines do not take: other formats, progressive or
CMYK files, images to be turned by EXIF) and then launched, each on threads of its own. A batched call that fails is
tried again by halves; what fails alone is judged on the CPU, in the place that it has in the batch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.decode.blank_images import round_up
from gpuflow.decode.chunk_headers import read_headers
from gpuflow.decode.header_scan import Prescan, walk
from gpuflow.decode.libjpeg_turbo import find_library as find_libjpeg_turbo
from gpuflow.decode.nvjpeg import Library
from gpuflow.errors import BadSampleError
from gpuflow.execute.cpu import CpuRunners
from gpuflow.execute.decode_buffers import BUFFERS, DecodeBuffers
from gpuflow.execute.device_stream import Delivery, slots_on
from gpuflow.execute.kernels.color import adjust
from gpuflow.execute.kernels.sample import FIELDS, sample
from gpuflow.execute.kernels.unwritten import unwritten
from gpuflow.execute.nvjpeg_decoders import Decoders, Files
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.image_spec import STORAGE, slot_shape
from gpuflow.pipeline.program import Call, Map, Program, Sample, Sampling
from gpuflow.sources import SPARE_BYTES, Payload

__all__ = ["CompleteFiles", "GpuRunner", "Pass", "Prepared", "passes_of", "plan_of"]

_ALIGN = 256
_MOST_REMEMBERED = 1 << 26
"""Samples of which is remembered that their files are complete, in four bytes each."""
_CALL_IMAGES = 128
"""Images in one call of nvJPEG at most. It and the decode buffers need memory for all of them; with 64 a training step
would lose 7% of its speed instead of 3% (measured in experiments/gpu_path/NOTES.md)."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One batched pass over a chunk's images: a step, or None for none, then a table of 256 results a channel.

    table: [C, 256] in the storage dtype, or None where levels stay as they are. result: what the images are then.
    """

    step: Sample | Map | Call | None
    table: NDArray[Any] | None
    result: s.ImageSpec


def passes_of(program: Program) -> tuple[Pass, ...] | str:
    """The passes that a program becomes behind the engines, or why it cannot run there, in words."""
    if program.decoder.library is not None:
        return f"{program.decoder!r} decodes by itself"
    passes: list[Pass] = []
    done = 1
    for step in program.steps:
        done += len(step.stages) if isinstance(step, Sample) else 1
        result = program.specs[done]
        if not passes and not isinstance(step, Sample):
            return f"{step.stage!r} comes before the images have one size; put a crop or a resize to a fixed size first"
        if not result.fixed:
            return f"after {program.pipeline.stages[done - 1]!r} the images still differ in size"
        if isinstance(step, Map) and (table := step.stage.table()) is not None:
            last = passes[-1]
            if last.table is None and not isinstance(last.step, Call):
                passes[-1] = Pass(last.step, table, result)
            else:
                passes.append(Pass(None, table, result))
        elif isinstance(step, Map) and step.stage.device_operations(step.draw(_NO_KEYS)) is None:
            return f"{step.stage!r} has no form for the GPU"
        else:
            passes.append(Pass(step, None, result))
    return tuple(passes) if passes else "its images differ in size; add a crop or a resize to a fixed size"


_NO_KEYS = s.Keys(0, 0, np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class _Finished:
    """What the CPU has done: rows [m], images [m, *slot_shape(result)] in pinned memory."""

    rows: NDArray[np.int64]
    images: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Call:
    """Images [start, stop) of a chunk, decoded by one call into one buffer of so many bytes."""

    start: int
    stop: int
    size: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """A chunk, ready to be launched.

    rows [n]: which of its samples the engines take. indices [n]: which samples of the source these are, or None.
    whole [n]: which of them are known to be decoded completely. files: of these rows; calls: which of them go together.
    plan [n, len(FIELDS)]: what becomes of them; its addresses, and those where nvJPEG is to put them, are relative to
    the buffer of their call. draws: what each pass draws for them. finished: the other rows, done.
    faults: of each sample None, or why it is bad.
    """

    payload: Payload
    keys: s.Keys
    rows: NDArray[np.int64]
    indices: NDArray[np.int64] | None
    whole: NDArray[np.bool_]
    files: Files
    calls: list[_Call]
    plan: NDArray[np.int64]
    draws: list[Any]
    finished: _Finished | None
    faults: list[BadSampleError | None]


class GpuRunner:
    """Runs a program's chunks on a delivery's stream. Any thread may call any method.

    While one thread in `launch` is in nvJPEG, a second one does what is to be done in Python meanwhile, so that the
    engines need not wait for it; see `Decoders` for when both may be in nvJPEG.

    Args:
        program, passes: what `passes_of` made of it.
        library: the nvJPEG to decode with. backend: of it, see `nvjpeg.BACKENDS`.
        decode_bytes: decoded pixels that one of the buffers holds at most; one image may be larger.
        buffers: of decoded pixels to begin with, which is how many chunks are launched at a time; see `hurry`.

    Raises:
        NvjpegError: the GPU has no JPEG engines.
    """

    def __init__(
        self,
        program: Program,
        passes: Sequence[Pass],
        delivery: Delivery,
        library: Library,
        *,
        backend: str,
        decode_bytes: int,
        buffers: int = BUFFERS,
    ) -> None:
        self._program, self._passes, self._delivery = program, tuple(passes), delivery
        self._channels = 1 if program.decoder.color == "gray" else 3
        self._turns = program.decoder.orientation == "apply"
        self._decode_bytes = decode_bytes
        self._cpu = CpuRunners(program)
        self._lock = threading.Lock()
        self._complete = CompleteFiles()
        self.engine_images, self.cpu_images = 0, 0
        with delivery.queued():
            self._decoders = Decoders(delivery, library, program.decoder.color, backend)
            self._buffers = DecodeBuffers(delivery, buffers)
            self._tables = [self._table(one).to(delivery.device) for one in self._passes]
        delivery.synchronize()

    def _table(self, one: Pass) -> torch.Tensor:
        """[C, 256]: what each level becomes, in the dtype of the result."""
        if one.table is None:
            return torch.arange(256, dtype=torch.uint8).expand(one.result.shape[2], 256).contiguous()
        table = torch.from_numpy(one.table)
        return table.view(getattr(torch, one.result.dtype)) if table.dtype == torch.uint16 else table

    # --- on any thread ----------------------------------------------------------------------------------------------

    def hurry(self, on: bool) -> None:
        """Whether the GPU waits for batches: each time it does, one more decode buffer; for calls see `Decoders`."""
        self._decoders.hurry(on)
        if on:
            self._buffers.more()

    def check(self) -> None:
        """Have each decoder at hand decode gpuflow's own test image. Raises DecoderError where one fails."""
        with self._delivery.queued(), self._decoders.lend() as decoder:
            decoder.check()
        self._cpu.check()

    @property
    def prescan(self) -> Prescan:
        """The headers of ordinary files, most of what `prepare` would need the interpreter for."""
        return functools.partial(walk, orientation=self._turns)

    def prepare(self, payload: Payload, keys: s.Keys, indices: Sequence[int] | None = None) -> Prepared:
        """All that comes before the engines: headers, draws, and whole images where those are not for the engines.

        The payload's memory must be pinned and stay until the launch is through on the GPU. `indices`: which samples of
        the source it holds, if any, so that what was decoded completely once is known again.
        """
        decoder = self._program.decoder
        headers = read_headers(
            payload, max_pixels=decoder.max_pixels, max_scans=decoder.max_scans, orientation=self._turns
        )
        rows = self._undamaged(np.flatnonzero(headers.engine), payload, headers.sizes, indices)
        draws = self._draw(_keys_of(keys, rows), headers.sizes[rows])
        misfit = np.zeros(len(rows), bool)
        for draw in draws:
            for _, outside, _ in draw.misfits if isinstance(draw, Sampling) else ():
                misfit |= outside
        if misfit.any():  # the CPU will say of each what is wrong
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
        spare = _clear_behind(payload, rows[~whole])
        lengths[~whole] += spare
        return Prepared(
            payload=payload,
            keys=keys,
            rows=rows,
            indices=known,
            whole=whole,
            files=Files(
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
        """Those of some rows whose files nvJPEG's kernels decode alike in calls of any size.

        What they make of a damaged file depends on how many files a call has, so libjpeg-turbo checks each file first,
        only once if `indices` say which sample it is.
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
    ) -> tuple[list[_Call], NDArray[np.uint64], NDArray[np.int64]]:
        """Where images of these sizes [n, 2] go, as `Prepared` has it."""
        pitches = sizes[:, 1] * self._channels
        spaces = -(-pitches * sizes[:, 0] // _ALIGN) * _ALIGN
        calls = list(_calls(spaces, _CALL_IMAGES, self._decode_bytes))
        offsets = np.cumsum(spaces) - spaces
        for call in calls:
            offsets[call.start : call.stop] -= offsets[call.start]
        images = np.zeros((len(rows), 8), np.uint64)
        images[:, 0], images[:, 4] = offsets, pitches
        return calls, images, plan_of(sampling, offsets, pitches, self._places(0, rows))

    def _places(self, i: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where pass i puts what it makes of these rows: the last one into their slots, others side by side."""
        return rows if i == len(self._passes) - 1 else np.arange(len(rows))

    def _draw(self, keys: s.Keys, sizes: s.Ints) -> list[Any]:
        """What each pass draws: a sampling, operations with their factors (none for a table alone), or seeds."""
        draws: list[Any] = []
        height, width = sizes.T
        for one in self._passes:
            if isinstance(one.step, Sample):
                draws.append(one.step.draw(keys, height, width))
            elif isinstance(one.step, Map):
                draws.append(one.step.stage.device_operations(one.step.draw(keys)))
            elif isinstance(one.step, Call):
                draws.append(one.step.draw(keys))
            else:
                draws.append((np.empty((len(keys.positions), 0), np.int64), np.empty((len(keys.positions), 0))))
            height, width = (np.full(len(keys.positions), side) for side in one.result.shape[:2])
        return draws

    def _finish(
        self,
        rows: NDArray[np.int64],
        payload: Payload,
        keys: s.Keys,
        faults: list[BadSampleError | None],
    ) -> _Finished:
        """The CPU's way for these rows, into pinned memory; what is bad is written into `faults`."""
        result = self._program.result
        staging = self._delivery.pinned((len(rows), *slot_shape(result)), getattr(torch, result.dtype))
        held = staging.view(torch.uint16) if STORAGE[result.dtype] is np.uint16 else staging
        samples = [payload.sample(i) for i in rows.tolist()]
        for row, fault in zip(rows.tolist(), self._cpu.run(samples, _keys_of(keys, rows), held.numpy()), strict=True):
            faults[row] = fault
        return _Finished(rows, staging)

    # --- on a launching thread --------------------------------------------------------------------------------------

    def slots(self, count: int) -> torch.Tensor:
        """Memory on the device for so many results: [count, C, H, W] in the result's dtype and memory format."""
        return slots_on(self._delivery, count, self._program.result)

    def launch(self, chunk: Prepared, slots: torch.Tensor) -> list[BadSampleError | None]:
        """Queue all that fills a chunk's slots [N, C, H, W]; returns for each sample None, or why it is bad."""
        with self._delivery.queued():
            refused = self._on_engines(chunk, slots) if len(chunk.rows) else chunk.rows
            if chunk.finished is not None:
                self._place(chunk.finished, slots)
            if len(refused):
                self._place(self._finish(refused, chunk.payload, chunk.keys, chunk.faults), slots)
                with self._lock:
                    self.engine_images -= len(refused)
                    self.cpu_images += len(refused)
        return chunk.faults

    def _on_engines(self, chunk: Prepared, slots: torch.Tensor) -> NDArray[np.int64]:
        """Decode a chunk and run every pass on it; returns the rows that were refused, whose slots hold nothing."""
        targets = [slots_on(self._delivery, len(chunk.rows), one.result) for one in self._passes[:-1]] + [slots]
        good = self._decode(chunk, targets[0])
        for i in range(1, len(self._passes)):
            self._run(i, chunk.draws[i], targets[i - 1], targets[i], self._places(i, chunk.rows))
        return chunk.rows[~good]

    def _decode(self, chunk: Prepared, target: torch.Tensor) -> NDArray[np.bool_]:
        """Decode in as few calls as may be, each followed by the first pass; returns which were decoded."""
        good = np.ones(len(chunk.rows), bool)
        for call in chunk.calls:
            part = slice(call.start, call.stop)
            files, whole = chunk.files.part(part), chunk.whole[part]
            blank_size = 0 if whole.all() else int(round_up(files.frames[:, :2]).prod(axis=1).max()) * self._channels
            with self._buffers.lend(call.size + blank_size) as decoded:
                images, plan = files.images.copy(), chunk.plan[part].copy()
                images[:, 0] += np.uint64(decoded.data_ptr())
                plan[:, 0] += decoded.data_ptr()
                there = self._send(plan)
                with self._decoders.lend() as decoder:
                    blank = decoded.data_ptr() + call.size if blank_size else None
                    good[part] = decoder.decode(files._replace(images=images), blank)
                if blank_size:
                    good[part] &= ~self._unwritten(images, files.frames)
                self._sample(0, chunk.draws[0], there, target)
                if blank_size and chunk.indices is not None:
                    sizes = np.asarray(chunk.payload.sizes, np.int64)[chunk.rows[part]]
                    self._complete.add(chunk.indices[part][good[part]], sizes[good[part]])
        return good

    def _unwritten(self, images: NDArray[np.uint64], frames: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which images, decoded behind blank ones, were not decoded completely. Waits for the GPU."""
        described = np.column_stack([images[:, [0, 4]].astype(np.int64), frames[:, :2], frames[:, 2] == 0])
        found = unwritten(self._send(described), int(frames[:, 0].max()), color=self._program.decoder.color)
        return found.cpu().numpy().astype(bool)

    def _run(self, i: int, draw: Any, images: torch.Tensor, target: torch.Tensor, places: NDArray[np.int64]) -> None:
        """One pass behind the first, from images [n, C, H, W] to rows of the target."""
        match self._passes[i].step:
            case Sample():
                pitch = images.stride(2)
                addresses = images.data_ptr() + np.arange(len(images)) * images.stride(0)
                plan = plan_of(draw, addresses, np.full(len(images), pitch), places)
                self._sample(i, draw, self._send(plan), target)
            case Call(stage):
                result = stage.apply_batch(images, draw)
                target.index_copy_(0, self._send(places), result)
            case _:
                codes, factors = draw
                adjust(images.permute(0, 2, 3, 1), places, codes, factors, self._tables[i], target)

    def _sample(self, i: int, sampling: Sampling, plan: torch.Tensor, target: torch.Tensor) -> None:
        table = self._tables[i]
        sample(plan, table, target, interpolation=sampling.interpolation, antialias=sampling.antialias)

    def _send(self, array: NDArray[np.int64]) -> torch.Tensor:
        (there,) = self._delivery.send_all([array])
        return there

    def _place(self, finished: _Finished, slots: torch.Tensor) -> None:
        """Put what the CPU finished into its slots: one transfer, one kernel."""
        there = self._delivery.send(finished.images)
        images = there if self._program.result.layout == "nchw" else there.permute(0, 3, 1, 2)
        slots.index_copy_(0, self._send(finished.rows), images)


class CompleteFiles:
    """Which samples' files are known to be undamaged, by index in the source and size in bytes.

    Any thread may call any method.
    """

    def __init__(self) -> None:
        self._sizes, self._lock = np.zeros(0, np.uint32), threading.Lock()

    def known(self, indices: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these samples [N] are known, with files of these sizes."""
        held = self._sizes
        inside = indices < len(held)
        found: NDArray[np.bool_] = inside & (held[np.where(inside, indices, 0)] == sizes) if len(held) else inside
        return found

    def add(self, indices: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Samples [N] whose files of these sizes are undamaged. Those of very high numbers are forgotten."""
        kept = (indices < _MOST_REMEMBERED) & (sizes <= np.iinfo(np.uint32).max)
        if not kept.any():
            return
        indices, sizes = indices[kept], sizes[kept]
        with self._lock:
            if (need := int(indices.max()) + 1) > len(self._sizes):
                grown = np.zeros(min(max(need, 2 * len(self._sizes)), _MOST_REMEMBERED), np.uint32)
                grown[: len(self._sizes)] = self._sizes
                self._sizes = grown
            self._sizes[indices] = sizes


def _clear_behind(payload: Payload, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Write zeros behind these files: the engines read a little ahead. Returns how many each has, [n].

    A payload that `sources.lay_out` did not lay out may have no room for them.
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


def _calls(spaces: NDArray[np.int64], most: int, most_bytes: int) -> Iterator[_Call]:
    """Neighbours in calls of one size, none with more images or bytes than allowed; one that is larger stands alone."""
    count = len(spaces)
    even = -(-count // max(1, -(-count // most)))
    start, total = 0, 0
    for i, space in enumerate(spaces.tolist()):
        if i - start == even or (total and total + space > most_bytes):
            yield _Call(start, i, total)
            start, total = i, 0
        total += space
    if count:
        yield _Call(start, count, total)


def plan_of(
    sampling: Sampling, addresses: NDArray[np.int64], pitches: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """A sampling as the kernel reads it: int64 [n, len(FIELDS)]."""
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
