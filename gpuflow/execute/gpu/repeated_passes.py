"""Runs passes on one batch after another, as `gpuflow.transform` does, with little work for the processor.

Once the images have one size, what the passes draw depends on the samples' positions alone. So the passes after the
first one draw for several batches at once, once each position has twice been the one of the batch before plus a
constant number, as in a training. So does the first one, for images of the size that a batch had. All kernels of a
batch are replayed as one CUDA graph: they read and write the same memory for each batch. Draws, kernels and results
are those of `DevicePasses`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from gpuflow.arrays import Array, Ints
from gpuflow.errors import BadSampleError, reason_of
from gpuflow.execute import packing
from gpuflow.execute.gpu.device_passes import DeviceImages, DevicePasses
from gpuflow.execute.gpu.device_stream import DeviceStream, allocate_slots
from gpuflow.execute.gpu.passes import Pass, draw_passes
from gpuflow.execute.gpu.results import ImageRows
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import LocalStep, PointwiseStep, ResamplingStep, WarpStep, add_misfits

_LOG = logging.getLogger(__name__)
_PLAIN_CALLS = 2
"""As many batches of one size in a row run without memory that is kept."""
_BATCHES = 16
"""For how many batches passes draw at once."""
_MOST_GRAPHS = 16
"""There is a graph for each address at which a result was. torch's allocator uses few of them in turn, as many as the
results that are in use at a time."""

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Returns what repeats this work, which queues kernels. Raises RuntimeError if CUDA cannot capture it."""


class RepeatedPasses:
    """Runs passes on a stream. Any thread may call it, within `device_stream.queued()`."""

    def __init__(self, passes: Sequence[Pass], device_stream: DeviceStream, capture: Capture) -> None:
        self._passes, self._device_stream, self._capture = tuple(passes), device_stream, capture
        self._plain = DevicePasses(passes, device_stream)
        self._can_repeat = _can_be_repeated(self._passes)
        self._lock = threading.Lock()
        self._count, self._calls = 0, 0
        self._repeated: _PassesOfOneSize | None = None

    def run_images(self, images: DeviceImages, keys: s.Keys, slots: torch.Tensor) -> list[BadSampleError | None]:
        """Run the passes as `DevicePasses.run_images` does."""
        count = len(keys.positions)
        with self._lock:
            repeated = self._of_size(count) if self._can_repeat and count and not keys.values else None
            return (repeated or self._plain).run_images(images, keys, slots)

    def _of_size(self, count: int) -> _PassesOfOneSize | None:
        """Return what runs batches of this size; None before enough of them have come in a row."""
        self._calls = self._calls + 1 if count == self._count else 1
        self._count = count
        if self._repeated is None or self._repeated.count != count:
            if self._calls <= _PLAIN_CALLS:
                return None
            self._repeated = None  # which frees its memory
            self._repeated = _PassesOfOneSize(self._passes, self._plain, self._device_stream, self._capture, count)
        return self._repeated


def _can_be_repeated(passes: Sequence[Pass]) -> bool:
    """Return True if all results of a pass have one size, and no pass does more than launch kernels."""
    kernels = ResamplingStep | WarpStep | PointwiseStep | LocalStep
    return all(one.result.fixed and isinstance(one.step, kernels) for one in passes)


class _First(NamedTuple):
    """The first pass of a batch.

    draw: of this batch or of several. faults: for each image None, or why it is bad. plan: int64 [n, F] in pinned
    memory, for the kernel.
    """

    draw: Any
    faults: list[BadSampleError | None]
    plan: torch.Tensor


@dataclass(slots=True)
class _Ahead:
    """What passes read for K batches of n images.

    keys: of the first batch. positions: of all, [K, n]. step: by which number they follow those of the batch before; 0
    if by no constant one. size: the height and width of the first batch's images; None if they differ. first: the first
    pass of each batch, for images of this size. draws: of each later pass, for all batches together. plans: the arrays
    of each. rows: uint8 [K, B] on the device, for each batch those that have a row for each image. shared: the other
    arrays on the device. used: how many batches have run.
    """

    keys: s.Keys
    positions: Ints
    step: int
    size: tuple[int, int] | None
    first: list[_First]
    draws: list[Any]
    plans: list[list[Array]]
    rows: torch.Tensor
    shared: list[torch.Tensor]
    used: int = 0

    def has_next(self, keys: s.Keys) -> bool:
        """Return True if these are the keys of the batch that follows."""
        same = (self.keys.seed, self.keys.epoch) == (keys.seed, keys.epoch)
        return same and self.used < len(self.positions) and np.array_equal(self.positions[self.used], keys.positions)

    def step_to(self, keys: s.Keys) -> int:
        """Return by which number these positions follow those of the last batch; 0 if by no constant one."""
        steps = keys.positions - self.positions[self.used - 1]
        return int(steps[0]) if self.keys.epoch == keys.epoch and (steps == steps[0]).all() else 0


@dataclass(slots=True)
class _Memory:
    """Where the passes of each batch read on the device.

    rows: a row of `_Ahead.rows`. shared: room for each of `_Ahead.shared`. plans: the arrays of each pass; those of the
    later ones are views of both. graphs: what replays all passes, by the address of the result. filled: whose arrays
    `shared` has.
    """

    rows: torch.Tensor
    shared: list[torch.Tensor]
    plans: list[list[torch.Tensor]]
    graphs: dict[int, Callable[[], None]] = field(default_factory=dict)
    filled: _Ahead | None = None


class _PassesOfOneSize:
    """Runs passes on batches of n images, with memory that all batches use in turn."""

    def __init__(
        self, passes: Sequence[Pass], plain: DevicePasses, device_stream: DeviceStream, capture: Capture, count: int
    ) -> None:
        self._passes, self._plain, self._device_stream, self._capture = passes, plain, device_stream, capture
        self.count = count
        self._results = self._allocate_results()
        self._ahead: dict[object, _Ahead] = {}
        self._memory: _Memory | None = None
        self._can_capture = True

    def _allocate_results(self) -> list[torch.Tensor]:
        """Allocate the result of each pass but the last one. A pass reads nothing older than the result before it."""
        results: list[torch.Tensor] = []
        for i, one in enumerate(self._passes[:-1]):
            if self._plain.in_place[i]:
                results.append(results[-1])
                continue
            same = (results[k] for k in range(i) if self._passes[k].result == one.result)
            free = next((result for result in same if result is not results[-1]), None)
            results.append(allocate_slots(self._device_stream, self.count, one.result) if free is None else free)
        return results

    def run_images(self, images: DeviceImages, keys: s.Keys, slots: torch.Tensor) -> list[BadSampleError | None]:
        """Run the passes as `DevicePasses.run_images` does."""
        height, width = images.sizes[0].tolist()
        size = (height, width) if (images.sizes == images.sizes[0]).all() else None
        ahead = self._ahead.get(keys.view)
        if ahead is None or not ahead.has_next(keys):
            ahead = self._ahead[keys.view] = self._draw_ahead(keys, ahead, size, slots)
        batch = ahead.used
        ahead.used += 1
        if size is None or size != ahead.size:
            (first,) = self._draw_first(keys, images.sizes, slots)
        else:
            first = ahead.first[batch]
        if not any(first.faults):
            first.plan.numpy()[:, :3] = images.places
            memory = self._filled_memory(first.plan, ahead, batch)
            self._queue([first.draw, *ahead.draws], memory, slots)
        return first.faults

    def _queue(self, draws: Sequence[Any], memory: _Memory, slots: torch.Tensor) -> None:
        """Queue all passes on what `memory` has."""

        def launch() -> None:
            targets = [*self._results, slots]
            for i, draw in enumerate(draws):
                images = targets[max(i - 1, 0)]  # which the first pass does not read: its plan has addresses
                self._plain.run_pass(i, draw, images, targets[i], memory.plans[i])

        place = slots.data_ptr()
        if self._can_capture and place not in memory.graphs and len(memory.graphs) < _MOST_GRAPHS:
            try:
                memory.graphs[place] = self._capture(launch)
            except RuntimeError as error:
                self._can_capture = False
                _LOG.info("kernels are launched one by one, because they cannot be captured: %s", reason_of(error))
        memory.graphs.get(place, launch)()

    def _draw_first(self, keys: s.Keys, sizes: Ints, slots: torch.Tensor) -> list[_First]:
        """Draw the first pass of each batch, without the images' places. keys, sizes [K * n, 2]: of all batches."""
        (draw,) = draw_passes(self._passes[:1], keys, sizes)
        faults: list[BadSampleError | None] = [None] * len(sizes)
        add_misfits([draw], faults)
        places = np.zeros((len(sizes), 3), np.int64)
        rows = np.tile(np.arange(self.count), len(sizes) // self.count)
        plan = self._plain.plan_of_move(draw, places, ImageRows([*self._results, slots][0], rows))
        pinned = self._device_stream.pinned(plan.shape, torch.int64)
        pinned.numpy()[...] = plan
        batches = [slice(start, start + self.count) for start in range(0, len(sizes), self.count)]
        return [_First(draw, faults[batch], pinned[batch]) for batch in batches]

    def _draw_ahead(
        self, keys: s.Keys, before: _Ahead | None, size: tuple[int, int] | None, slots: torch.Tensor
    ) -> _Ahead:
        """Draw for this batch alone; or for several, if its positions follow those of the batch before as those did."""
        step = 0 if before is None else before.step_to(keys)
        several = before is not None and step != 0 and step == before.step
        positions = keys.positions + step * np.arange(_BATCHES if several else 1)[:, None]
        batches, total = len(positions), positions.size
        of_all = s.Keys(keys.seed, keys.epoch, positions.reshape(-1), keys.view)
        first = [] if size is None else self._draw_first(of_all, np.tile(size, (total, 1)), slots)
        after_first = np.array(self._passes[0].result.shape[:2], np.int64)
        draws = draw_passes(self._passes[1:], of_all, np.tile(after_first, (total, 1)))
        targets = [ImageRows(images, np.arange(self.count)) for images in (*self._results, slots)]
        plans = self._plain.plans([None, *draws], targets, batches)
        return _Ahead(keys, positions, step, size, first, draws, plans, *self._send(plans, batches))

    def _send(self, plans: Sequence[Sequence[Array]], batches: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Copy the later passes' arrays to the device in one transfer: `rows` and `shared` of `_Ahead`."""
        starts, length = packing.layout(self._of_first_batch(plans))
        others = [array for _, *rest in plans for array in rest]
        starts_of_others, room = packing.layout(others)
        end = batches * length
        host = self._device_stream.pinned([end + room], torch.uint8)
        block = host.numpy()
        rows = block[:end].reshape(batches, length)
        for start, (array, *_) in zip(starts, plans, strict=True):
            of_batches = np.ascontiguousarray(array).reshape(batches, -1).view(np.uint8)
            rows[:, start : start + of_batches.shape[1]] = of_batches
        packing.write(block[end:], starts_of_others, others)
        sent = self._device_stream.send(host)
        return sent[:end].view(batches, length), packing.tensors_in(sent[end:], starts_of_others, others)

    def _of_first_batch(self, plans: Sequence[Sequence[Array]]) -> list[Array]:
        """Return the array of each later pass that has a row for each image, for the first batch alone."""
        return [array[: self.count] for array, *_ in plans]

    def _filled_memory(self, plan: torch.Tensor, ahead: _Ahead, batch: int) -> _Memory:
        """Queue copies of what the passes of this batch read to where they read it."""
        memory = self._memory
        if memory is None or memory.filled is not ahead:
            if memory is None or any(len(room) < len(a) for room, a in zip(memory.shared, ahead.shared, strict=True)):
                with torch.inference_mode(mode=False):  # so that calls outside of inference mode can copy into it, too
                    memory = self._memory = self._allocate(plan, ahead)
            for room, given in zip(memory.shared, ahead.shared, strict=True):
                room[: len(given)].copy_(given)
            memory.filled = ahead
        self._device_stream.copy_into(memory.plans[0][0], plan)
        memory.rows.copy_(ahead.rows[batch])
        return memory

    def _allocate(self, plan: torch.Tensor, ahead: _Ahead) -> _Memory:
        """Allocate memory for such plans. What samples share takes at most a row for each of a sample's operations."""
        most = max((one.codes.shape[1] for one in ahead.draws if isinstance(one, s.Operations)), default=0)
        room = most * _BATCHES * self.count
        first_plan = torch.empty_like(plan, device=self._device_stream.device)
        shared = [given.new_empty((max(room, len(given)), *given.shape[1:])) for given in ahead.shared]
        rows = torch.empty_like(ahead.rows[0])
        each = self._of_first_batch(ahead.plans)
        starts, _ = packing.layout(each)
        others = iter(shared)
        later = [
            [view, *(next(others) for _ in arrays[1:])]
            for view, arrays in zip(packing.tensors_in(rows, starts, each), ahead.plans, strict=True)
        ]
        return _Memory(rows, shared, [[first_plan], *later])
