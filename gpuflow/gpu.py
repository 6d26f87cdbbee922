"""Runs a program on the GPU, a chunk at a time: the JPEG engines decode, one kernel does all the rest.

What the engines do not take goes the CPU's way into the same slots: other formats, progressive or CMYK files, images
to be turned by EXIF. A batched call that fails is tried again by halves; what fails alone is judged on the CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow import spec as s
from gpuflow.codecs import Header, probe
from gpuflow.cpu import STORAGE, CpuRunner, slot_shape
from gpuflow.errors import BadSampleError
from gpuflow.fold import Map, Program, Sample, Sampling
from gpuflow.kernels.sample import FIELDS, sample
from gpuflow.nvjpeg import Engines, NvjpegError, find_library

__all__ = ["GpuRunner", "engine_refusal", "plan_of"]

_ALIGN = 256
_DECODE_BUFFERS = 3


def engine_refusal(program: Program) -> str | None:
    """Why a program cannot run on the engines and the kernel, in words; None if it can."""
    match program.steps:
        case (Sample(),):
            return None
        case (Sample(), Map(stage)) if hasattr(stage, "table"):
            return None
    return "its stages are not one sampling followed by at most a table, such as normalize"


class GpuRunner:
    """Runs a program's chunks on one stream. Holds the engines and scratch memory; not for two threads at once.

    Args:
        program: one that `engine_refusal` passes.
        stream: the loader's; everything here is queued on it and nothing waits for it.

    Raises:
        MissingExtra: there is no libnvjpeg. NvjpegError: the GPU has no JPEG engines.
    """

    def __init__(self, program: Program, stream: torch.cuda.Stream) -> None:
        self._program, self._stream = program, stream
        self._color = program.decoder.color
        self._channels = 1 if self._color == "gray" else 3
        self._cpu = CpuRunner(program)
        self.engine_images, self.cpu_images = 0, 0
        with torch.cuda.stream(stream):
            self._engines = Engines(find_library(), self._color)
            self._table = self._make_table().to(stream.device)
        self._decoded: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque(
            [(torch.empty(0, dtype=torch.uint8, device=stream.device), None)] * _DECODE_BUFFERS
        )
        self._under_way: deque[tuple[torch.cuda.Event, Any]] = deque()

    def _make_table(self) -> torch.Tensor:
        """[C, 256]: what each level becomes, in the dtype of the result."""
        if len(self._program.steps) == 1:
            return torch.arange(256, dtype=torch.uint8).expand(self._channels, 256).contiguous()
        (_, last) = self._program.steps
        assert isinstance(last, Map)
        table = torch.from_numpy(last.stage.table())  # type: ignore[attr-defined]
        return table.view(getattr(torch, self._program.result.dtype)) if table.dtype == torch.uint16 else table

    def run(
        self, samples: Sequence[NDArray[np.uint8]], keys: s.Keys, slots: torch.Tensor
    ) -> list[BadSampleError | None]:
        """As `CpuRunner.run`, with slots [N, C, H, W] on the device; the work is queued when this returns.

        The samples' memory must be pinned and stay until `release` gives it back.
        """
        faults: list[BadSampleError | None] = [None] * len(samples)
        headers: list[Header | None] = [None] * len(samples)
        decoder = self._program.decoder
        for i, data in enumerate(samples):
            try:
                headers[i] = probe(data, max_pixels=decoder.max_pixels, orientation=decoder.orientation == "apply")
            except BadSampleError as fault:
                faults[i] = fault
        rows = [i for i, header in enumerate(headers) if header is not None and header.engine]
        with torch.cuda.stream(self._stream):
            refused = self._on_engines(rows, samples, headers, keys, slots) if rows else []
            rest = [i for i, header in enumerate(headers) if header is not None and not header.engine] + refused
            if rest:
                self._on_cpu(sorted(rest), samples, keys, slots, faults)
        self.engine_images += len(rows) - len(refused)
        self.cpu_images += len(rest)
        return faults

    def slots(self, count: int) -> torch.Tensor:
        """Memory on the device for so many results: [count, C, H, W] in the result's dtype and memory format."""
        result = self._program.result
        with torch.cuda.stream(self._stream):
            memory = torch.empty(
                (count, *slot_shape(result)), dtype=getattr(torch, result.dtype), device=self._stream.device
            )
        return memory if result.layout == "nchw" else memory.permute(0, 3, 1, 2)

    def release(self, buffer: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """The buffers that may be used again: this one will be when what is queued so far is through."""
        self._keep(buffer)
        through = []
        while self._under_way and self._under_way[0][0].query():  # type: ignore[no-untyped-call]
            through.append(self._under_way.popleft()[1])
        return [memory for memory in through if isinstance(memory, np.ndarray)]

    def mark(self) -> torch.cuda.Event:
        """An event behind everything queued so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def close(self) -> None:
        """Wait until the GPU has read all that it was given, and let go of it."""
        self._stream.synchronize()
        self._under_way.clear()

    def _keep(self, memory: Any) -> None:
        self._under_way.append((self.mark(), memory))

    # --- the engines ------------------------------------------------------------------------------------------------

    def _on_engines(
        self,
        rows: Sequence[int],
        samples: Sequence[NDArray[np.uint8]],
        headers: Sequence[Header | None],
        keys: s.Keys,
        slots: torch.Tensor,
    ) -> list[int]:
        """Decode these rows in one call and fill their slots in one launch; returns the rows that were refused."""
        sizes = np.array([(h.height, h.width) for i in rows if (h := headers[i]) is not None], np.int64)
        step = self._program.steps[0]
        assert isinstance(step, Sample)
        chosen = s.Keys(keys.seed, keys.epoch, keys.positions[list(rows)])
        sampling = step.draw(chosen, sizes[:, 0], sizes[:, 1])
        pitches = sizes[:, 1] * self._channels
        ends = np.cumsum((pitches * sizes[:, 0] + _ALIGN - 1) // _ALIGN * _ALIGN)
        decoded, read = self._decoded.popleft()
        if read is not None:
            read.synchronize()  # nvJPEG writes from streams of its own, which do not wait for what reads here
        if ends[-1] > len(decoded):
            decoded = torch.empty(int(ends[-1] * 5 // 4), dtype=torch.uint8, device=slots.device)
        addresses = decoded.data_ptr() + np.concatenate([[0], ends[:-1]])
        images = np.zeros((len(rows), 8), np.uint64)
        images[:, 0], images[:, 4] = addresses, pitches
        data = np.array([samples[i].ctypes.data for i in rows], np.uint64)
        lengths = np.array([samples[i].size for i in rows], np.uint64)
        misfit = np.zeros(len(rows), bool)
        for _, outside, _ in sampling.misfits:
            misfit |= outside
        good = self._decode(data, lengths, images) & ~misfit
        plan = plan_of(sampling, addresses, pitches, np.array(rows))[good]
        if len(plan):
            pinned = torch.from_numpy(plan).pin_memory()
            self._keep(pinned)
            sample(
                pinned.to(slots.device, non_blocking=True),
                self._table,
                slots,
                interpolation=sampling.interpolation,
                antialias=sampling.antialias,
            )
        self._decoded.append((decoded, self.mark()))
        return [row for row, ok in zip(rows, good.tolist(), strict=True) if not ok]

    def _decode(
        self, data: NDArray[np.uint64], lengths: NDArray[np.uint64], images: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        """Which images a call decoded. A call that fails is split in two until the culprits stand alone."""
        if self._engines.batch_size != len(data):
            self._stream.synchronize()
        try:
            self._engines.decode(data, lengths, images, self._stream.cuda_stream)
        except NvjpegError:
            if len(data) == 1:
                return np.array([False])
            middle = len(data) // 2
            halves = (slice(None, middle), slice(middle, None))
            return np.concatenate([self._decode(*(x[half] for x in (data, lengths, images))) for half in halves])
        return np.ones(len(data), bool)

    # --- the rest ---------------------------------------------------------------------------------------------------

    def _on_cpu(
        self,
        rows: Sequence[int],
        samples: Sequence[NDArray[np.uint8]],
        keys: s.Keys,
        slots: torch.Tensor,
        faults: list[BadSampleError | None],
    ) -> None:
        """The CPU's way for these rows, into pinned memory and from there into their slots."""
        result = self._program.result
        staging = torch.empty((len(rows), *slot_shape(result)), dtype=getattr(torch, result.dtype), pin_memory=True)
        held = staging.view(torch.uint16) if STORAGE[result.dtype] is np.uint16 else staging
        chosen = s.Keys(keys.seed, keys.epoch, keys.positions[list(rows)])
        for place, fault in enumerate(self._cpu.run([samples[i] for i in rows], chosen, held.numpy())):
            faults[rows[place]] = fault
            if fault is None:
                image = staging[place] if result.layout == "nchw" else staging[place].permute(2, 0, 1)
                slots[rows[place]].copy_(image, non_blocking=True)
        self._keep(staging)


def plan_of(
    sampling: Sampling, addresses: NDArray[np.int64], pitches: NDArray[np.int64], rows: NDArray[np.int64]
) -> NDArray[np.int64]:
    """A sampling as the kernel reads it: int64 [N, len(FIELDS)]."""
    parts = [
        np.stack([addresses, pitches], axis=1),
        sampling.box,
        sampling.mirrors,
        sampling.grid,
        sampling.shown,
        sampling.window,
        sampling.flips,
        rows[:, None],
    ]
    plan = np.concatenate([np.asarray(part, np.int64) for part in parts], axis=1)
    assert plan.shape[1] == len(FIELDS)
    return plan
