"""Runs a program on the GPU, a chunk at a time: the JPEG engines decode, a few batched kernels do all the rest.

A chunk is prepared (headers, draws, and the CPU's way for what the engines do not take: other formats, progressive or
CMYK files, images to be turned by EXIF) and then launched, each on threads of its own. A batched call that fails is
tried again by halves; what fails alone is judged on the CPU, in the place that it has in the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow import spec as s
from gpuflow.cpu import STORAGE, CpuRunner, slot_shape
from gpuflow.delivery import Delivery, slots_on
from gpuflow.errors import BadSampleError
from gpuflow.fold import Call, Map, Program, Sample, Sampling
from gpuflow.headers import read_headers
from gpuflow.kernels.color import adjust
from gpuflow.kernels.sample import FIELDS, sample
from gpuflow.memory import DecodeBuffers
from gpuflow.nvjpeg import Engines, Library, NvjpegError
from gpuflow.sources import Payload

__all__ = ["GpuRunner", "Pass", "Prepared", "passes_of", "plan_of"]

_ALIGN = 256


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
class Prepared:
    """A chunk, ready to be launched.

    rows [n]: which of its samples the engines take. data, lengths [n]: where their bytes are. sizes [n, 2]: height and
    width. draws: what each pass draws for them. finished: the other rows, done.
    faults: of each sample None, or why it is bad.
    """

    samples: Sequence[NDArray[np.uint8]]
    keys: s.Keys
    rows: NDArray[np.int64]
    data: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    sizes: NDArray[np.int64]
    draws: list[Any]
    finished: _Finished | None
    faults: list[BadSampleError | None]


class GpuRunner:
    """Runs a program's chunks on a delivery's stream. Any thread may call any method.

    One thread at a time is in nvJPEG: two calls beside each other cost a training step far more than they gain. A
    second thread in `launch` does what is to be done in Python meanwhile, so that the engines need not wait for it.

    Args:
        program, passes: what `passes_of` made of it.
        library: the nvJPEG to decode with. backend: of it, see `nvjpeg.BACKENDS`.
        decode_bytes: decoded pixels that one of the buffers holds at most; one image may be larger.

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
    ) -> None:
        self._program, self._passes, self._delivery = program, tuple(passes), delivery
        self._channels = 1 if program.decoder.color == "gray" else 3
        self._decode_bytes = decode_bytes
        self._cpu: list[CpuRunner] = []
        self._lock, self._engines_turn = threading.Lock(), threading.Lock()
        self.engine_images, self.cpu_images = 0, 0
        with delivery.queued():
            self._engines = Engines(library, program.decoder.color, backend)
            self._buffers = DecodeBuffers(delivery)
            self._tables = [self._table(one).to(delivery.device) for one in self._passes]
        delivery.synchronize()

    def _table(self, one: Pass) -> torch.Tensor:
        """[C, 256]: what each level becomes, in the dtype of the result."""
        if one.table is None:
            return torch.arange(256, dtype=torch.uint8).expand(one.result.shape[2], 256).contiguous()
        table = torch.from_numpy(one.table)
        return table.view(getattr(torch, one.result.dtype)) if table.dtype == torch.uint16 else table

    # --- on any thread ----------------------------------------------------------------------------------------------

    def prepare(self, payload: Payload, keys: s.Keys) -> Prepared:
        """All that comes before the engines: headers, draws, and whole images where those are not for the engines.

        The payload's memory must be pinned and stay until the launch is through on the GPU.
        """
        decoder = self._program.decoder
        headers = read_headers(payload, max_pixels=decoder.max_pixels, orientation=decoder.orientation == "apply")
        samples = [payload.sample(i) for i in range(len(payload))]
        rows = np.flatnonzero(headers.engine)
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
        finished = self._finish(others, samples, keys, faults) if len(others) else None
        with self._lock:
            self.engine_images += len(rows)
            self.cpu_images += len(others)
        return Prepared(
            samples=samples,
            keys=keys,
            rows=rows,
            data=np.asarray(payload.offsets, np.uint64)[rows] + np.uint64(payload.buffer.ctypes.data),
            lengths=np.asarray(payload.sizes, np.uint64)[rows],
            sizes=headers.sizes[rows],
            draws=draws,
            finished=finished,
            faults=faults,
        )

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
        samples: Sequence[NDArray[np.uint8]],
        keys: s.Keys,
        faults: list[BadSampleError | None],
    ) -> _Finished:
        """The CPU's way for these rows, into pinned memory; what is bad is written into `faults`."""
        result = self._program.result
        staging = self._delivery.pinned((len(rows), *slot_shape(result)), getattr(torch, result.dtype))
        held = staging.view(torch.uint16) if STORAGE[result.dtype] is np.uint16 else staging
        try:
            runner = self._cpu.pop()
        except IndexError:
            runner = CpuRunner(self._program)
        for row, fault in zip(
            rows.tolist(), runner.run([samples[i] for i in rows], _keys_of(keys, rows), held.numpy()), strict=True
        ):
            faults[row] = fault
        self._cpu.append(runner)
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
                self._place(self._finish(refused, chunk.samples, chunk.keys, chunk.faults), slots)
                with self._lock:
                    self.engine_images -= len(refused)
                    self.cpu_images += len(refused)
        return chunk.faults

    def _on_engines(self, chunk: Prepared, slots: torch.Tensor) -> NDArray[np.int64]:
        """Decode a chunk and run every pass on it; returns the rows that were refused, whose slots hold nothing."""
        last = len(self._passes) - 1
        targets = [
            slots if i == last else slots_on(self._delivery, len(chunk.rows), one.result)
            for i, one in enumerate(self._passes)
        ]
        places = [chunk.rows if i == last else np.arange(len(chunk.rows)) for i in range(last + 1)]
        good = self._decode(chunk, targets[0], places[0])
        for i in range(1, last + 1):
            self._run(i, chunk.draws[i], targets[i - 1], targets[i], places[i])
        return chunk.rows[~good]

    def _decode(self, chunk: Prepared, target: torch.Tensor, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Decode in as few calls as memory allows, each followed by the first pass; returns which were decoded."""
        pitches = chunk.sizes[:, 1] * self._channels
        sizes = -(-pitches * chunk.sizes[:, 0] // _ALIGN) * _ALIGN
        good = np.ones(len(sizes), bool)
        for start, stop in _groups(sizes, self._decode_bytes):
            part = slice(start, stop)
            with self._buffers.lend(int(sizes[part].sum())) as decoded:
                images = np.zeros((stop - start, 8), np.uint64)
                images[:, 0] = addresses = decoded.data_ptr() + np.cumsum(sizes[part]) - sizes[part]
                images[:, 4] = pitches[part]
                plan = self._plan(chunk.draws[0], addresses, pitches, places, part)
                with self._engines_turn:
                    good[part] = self._call(chunk.data[part], chunk.lengths[part], images)
                self._sample(0, chunk.draws[0], plan, target)
        return good

    def _call(
        self, data: NDArray[np.uint64], lengths: NDArray[np.uint64], images: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        """Which images a call decoded. A call that fails is split in two until the culprits stand alone."""
        if self._engines.batch_size not in (0, len(data)):
            self._delivery.synchronize()
        try:
            self._engines.decode(data, lengths, images, self._delivery.handle)
        except NvjpegError:
            if len(data) == 1:
                return np.array([False])
            middle = len(data) // 2
            halves = (slice(None, middle), slice(middle, None))
            return np.concatenate([self._call(*(x[half] for x in (data, lengths, images))) for half in halves])
        return np.ones(len(data), bool)

    def _run(self, i: int, draw: Any, images: torch.Tensor, target: torch.Tensor, places: NDArray[np.int64]) -> None:
        """One pass behind the first, from images [n, C, H, W] to rows of the target."""
        match self._passes[i].step:
            case Sample():
                pitch = images.stride(2)
                addresses = images.data_ptr() + np.arange(len(images)) * images.stride(0)
                plan = self._plan(draw, addresses, np.full(len(images), pitch), places, slice(None))
                self._sample(i, draw, plan, target)
            case Call(stage):
                result = stage.apply_batch(images, draw)
                target.index_copy_(0, self._send(places), result)
            case _:
                codes, factors = draw
                adjust(images.permute(0, 2, 3, 1), places, codes, factors, self._tables[i], target)

    def _plan(
        self,
        sampling: Sampling,
        addresses: NDArray[np.int64],
        pitches: NDArray[np.int64],
        places: NDArray[np.int64],
        part: slice,
    ) -> torch.Tensor:
        """On the device: where the images of a part of the chunk lie, and what is to be done with them."""
        return self._send(plan_of(sampling, addresses, pitches, places, part))

    def _sample(self, i: int, sampling: Sampling, plan: torch.Tensor, target: torch.Tensor) -> None:
        how = sampling.interpolation, sampling.antialias
        sample(plan, self._tables[i], target, interpolation=how[0], antialias=how[1])

    def _send(self, array: NDArray[np.int64]) -> torch.Tensor:
        (there,) = self._delivery.send_all([array])
        return there

    def _place(self, finished: _Finished, slots: torch.Tensor) -> None:
        """Put what the CPU finished into its slots: one transfer, one kernel."""
        there = self._delivery.send(finished.images)
        images = there if self._program.result.layout == "nchw" else there.permute(0, 3, 1, 2)
        slots.index_copy_(0, self._send(finished.rows), images)


def _keys_of(keys: s.Keys, rows: NDArray[np.int64]) -> s.Keys:
    return s.Keys(keys.seed, keys.epoch, keys.positions[rows])


def _groups(sizes: NDArray[np.int64], most: int) -> Iterator[tuple[int, int]]:
    """Ranges of neighbours whose sizes add up to no more than `most`; one that is larger stands alone."""
    start, total = 0, 0
    for i, size in enumerate(sizes.tolist()):
        if total and total + size > most:
            yield start, i
            start, total = i, 0
        total += size
    yield start, len(sizes)


def plan_of(
    sampling: Sampling,
    addresses: NDArray[np.int64],
    pitches: NDArray[np.int64],
    rows: NDArray[np.int64],
    part: slice = slice(None),
) -> NDArray[np.int64]:
    """A part of a sampling as the kernel reads it: int64 [n, len(FIELDS)]. addresses [n] are of that part alone."""
    parts = [
        addresses[:, None],
        pitches[part, None],
        sampling.box[part],
        sampling.mirrors[part],
        sampling.grid[part],
        sampling.shown[part],
        sampling.window[part],
        sampling.flips[part],
        rows[part, None],
    ]
    plan = np.concatenate([np.asarray(column, np.int64) for column in parts], axis=1)
    assert plan.shape[1] == len(FIELDS)
    return plan
