"""Runs a program's stages on images in a GPU's memory: the first pass reads each image by its address, the later ones
read batches. What put the images there is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, assert_never

import numpy as np
import torch

from gpuflow.arrays import Array, Ints
from gpuflow.errors import BadSampleError, LoaderError, reason_of
from gpuflow.execute.cpu.runner import bad_by_stage, require_declared
from gpuflow.execute.gpu.chunk_scan import ROW_BYTES, pixel_steps
from gpuflow.execute.gpu.device_stream import DeviceStream, allocate_slots
from gpuflow.execute.gpu.passes import Pass, draw_passes
from gpuflow.execute.gpu.results import Canvas, ImageRows, Target, tiles_of
from gpuflow.execute.kernels.color import adjust, adjust_plan_of
from gpuflow.execute.kernels.copy import interleave
from gpuflow.execute.kernels.local import smooth, smooth_plan_of
from gpuflow.execute.kernels.resample import resample_all, resampling_plan_of
from gpuflow.execute.kernels.warp import warp_all, warp_plan_of
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import (
    LocalStep,
    OpaqueStep,
    PointwiseStep,
    Resampling,
    ResamplingStep,
    Warping,
    WarpStep,
    add_misfits,
)


class DeviceImages(NamedTuple):
    """Interleaved uint8 images in device memory.

    places [n, 3]: the address of the upper left pixel, and how many bytes further the next row and the next column are.
    sizes [n, 2]: height and width in pixels.
    memory: of those that were copied; it may be released once all work that reads them is queued.
    """

    places: Ints
    sizes: Ints
    memory: torch.Tensor | None


def interleaved(
    images: torch.Tensor | Sequence[torch.Tensor],
    device_stream: DeviceStream,
    shapes: Sequence[torch.Size] | None = None,
) -> DeviceImages:
    """Return where the pixels of tensors are: uint8 [N, C, H, W], or [C, H_i, W_i] each, of any strides.

    Images whose channels are not next to each other are copied, all at once. shapes: of each image, if they were read
    already.
    """
    if isinstance(images, torch.Tensor):
        first = [*images.shape[1:], *images.stride()[1:], images.data_ptr()]
        described = np.tile(np.array(first, np.int64), (len(images), 1))
        described[:, 6] += images.stride(0) * np.arange(len(images))
    else:
        described = np.empty((len(images), 7), np.int64)
        described[:, :3] = _numbers_of([image.shape for image in images] if shapes is None else shapes)
        described[:, 3:6] = _numbers_of([image.stride() for image in images])
        described[:, 6] = np.fromiter(map(torch.Tensor.data_ptr, images), np.int64, len(images))
    sizes, strides, addresses = described[:, 1:3], described[:, 3:6], described[:, 6]
    places, channels = described[:, [6, 4, 5]], int(described[0, 0]) if len(described) else 1
    copied = ((strides[:, 0] != 1) & (channels > 1)) | (strides[:, 2] * sizes[:, 1] > ROW_BYTES)
    if not copied.any():
        return DeviceImages(places, sizes, None)
    pixels = sizes[copied].prod(axis=1)
    with device_stream.queued():
        memory = torch.empty(int(pixels.sum()) * channels, dtype=torch.uint8, device=device_stream.device)
        begins = memory.data_ptr() + (np.cumsum(pixels) - pixels) * channels
        plan = np.column_stack([addresses[copied], strides[copied], sizes[copied], begins])
        (sent,) = device_stream.send_all([plan])
        interleave(sent, int(pixels.max()), channels=channels)
    places[copied] = pixel_steps(sizes[copied], channels)
    places[copied, 0] += begins
    return DeviceImages(places, sizes, memory)


def _numbers_of(found: Sequence[tuple[int, ...]]) -> Ints:
    """Return three numbers for each of N images: [N, 3], or [1, 3] if all are equal."""
    if len(set(found)) == 1:
        return np.array(found[:1], np.int64)
    return np.fromiter(chain.from_iterable(found), np.int64, 3 * len(found)).reshape(-1, 3)


class DevicePasses:
    """Runs passes on a loader's stream. Any thread may call any method, within `device_stream.queued()`."""

    def __init__(self, passes: Sequence[Pass], device_stream: DeviceStream) -> None:
        self._passes, self._device_stream = tuple(passes), device_stream
        self.in_place = [self._is_in_place(i) for i in range(len(passes))]
        """For each pass whether it writes to the images that it reads, except for those that it does not change."""
        with device_stream.queued():
            self._tables = [self._table(one).to(device_stream.device) for one in self._passes]

    @property
    def first(self) -> Pass:
        return self._passes[0]

    def _table(self, one: Pass) -> torch.Tensor:
        """Return the pass's table as a tensor [C, 256] in the dtype of its result; the identity if it has none."""
        if one.table is None:
            return torch.arange(256, dtype=torch.uint8, device="cpu").expand(one.result.shape[2], 256).contiguous()
        table = torch.from_numpy(one.table)
        return table.view(getattr(torch, one.result.dtype)) if table.dtype == torch.uint16 else table

    def _is_in_place(self, i: int) -> bool:
        if not 0 < i < len(self._passes) - 1:
            return False
        one, before = self._passes[i], self._passes[i - 1]
        changes_few = isinstance(one.step, PointwiseStep | LocalStep) and one.table is None
        return changes_few and one.result.fixed and one.result == before.result

    def targets(self, slots: torch.Tensor, draws: Sequence[Any], rows: Ints) -> list[ImageRows]:
        """Return where each pass puts its results for n images: the last one to these rows [n] of the slots, the others
        to new memory, or to that of the images that they read.

        draws: the result of `draw_passes`.
        """
        targets: list[ImageRows] = []
        all_rows = np.arange(len(rows))
        for i, (one, draw) in enumerate(zip(self._passes[:-1], draws, strict=False)):
            if self.in_place[i]:
                targets.append(targets[i - 1])
            elif one.result.fixed:
                targets.append(ImageRows(allocate_slots(self._device_stream, len(rows), one.result), all_rows))
            else:
                targets.append(ImageRows(Canvas.allocate(self._device_stream, draw, one.result.shape[2]), all_rows))
        return [*targets, ImageRows(slots, rows)]

    def run_images(self, images: DeviceImages, keys: s.Keys, slots: torch.Tensor) -> list[BadSampleError | None]:
        """Queue all passes on n images, one for each slot.

        Returns for each image None, or why a stage cannot take it; then its slot holds no result.
        """
        draws = draw_passes(self._passes, keys, images.sizes)
        faults: list[BadSampleError | None] = [None] * len(images.sizes)
        add_misfits(draws, faults)
        if faults and not any(faults):
            targets = self.targets(slots, draws, np.arange(len(faults)))
            plan = self.plan_of_move(draws[0], images.places, targets[0])
            (first,), *later = self._send([[plan], *self.plans(draws, targets)])
            self.queue_move(0, draws[0], first, targets[0].images)
            for i, fault in self._queue(draws, targets, later).items():
                faults[i] = fault
        return faults

    def run_later(self, draws: Sequence[Any], targets: Sequence[ImageRows]) -> dict[int, BadSampleError]:
        """Queue all passes after the first one, whose results are in targets[0].

        draws: the result of `draw_passes`. targets: that of `targets`.

        Returns which of the n images an opaque stage refused, and why; their places in the last target hold no result.
        """
        return self._queue(draws, targets, self._send(self.plans(draws, targets)))

    def plans(self, draws: Sequence[Any], targets: Sequence[ImageRows], batches: int = 1) -> list[list[Array]]:
        """Return what each later pass reads on the device: an array with a row for each image, and others.

        batches: how many batches of n images, which use the same targets in turn, the draws describe.
        """
        plans: list[list[Array]] = []
        for i in range(1, len(self._passes)):
            images, draw, rows = targets[i - 1].images, draws[i], np.tile(targets[i].rows, batches)
            match self._passes[i].step:
                case ResamplingStep() | WarpStep():
                    if isinstance(images, Canvas):
                        addresses, steps = images.addresses, (images.pitch, images.memory.shape[2])
                    else:
                        addresses = images.data_ptr() + np.arange(len(images)) * images.stride(0)
                        steps = images.stride(2), images.stride(3)
                    own = np.column_stack([addresses, np.tile(steps, (len(addresses), 1))])
                    target = ImageRows(targets[i].images, rows)
                    plans.append([self.plan_of_move(draw, np.tile(own, (batches, 1)), target)])
                case PointwiseStep():
                    plans.append(adjust_plan_of(rows, draw))
                case LocalStep():
                    plans.append([smooth_plan_of(rows, draw)])
                case OpaqueStep():
                    plans.append([rows])
                case unknown:
                    assert_never(unknown)
        return plans

    def _send(self, plans: Sequence[Sequence[Array]]) -> list[list[torch.Tensor]]:
        """Copy the arrays of all passes to the device in one transfer."""
        flat = [array for plan in plans for array in plan]
        sent = iter(self._device_stream.send_all(flat) if flat else [])
        return [[next(sent) for _ in plan] for plan in plans]

    def _queue(
        self, draws: Sequence[Any], targets: Sequence[ImageRows], plans: Sequence[Sequence[torch.Tensor]]
    ) -> dict[int, BadSampleError]:
        """Queue the passes after the first one. Returns what `run_later` does.

        plans: the arrays of each of them, on the device.
        """
        refused: dict[int, BadSampleError] = {}
        for i, plan in enumerate(plans, start=1):
            found = self.run_pass(i, draws[i], targets[i - 1].images, targets[i].images, plan)
            refused = {**found, **refused}  # later passes get what is no image
        return refused

    def run_pass(
        self, i: int, draw: Any, images: Target, target: Target, plan: Sequence[torch.Tensor]
    ) -> dict[int, BadSampleError]:
        """Queue pass i, after the first one, from images [n, C, H, W] or a canvas to the target. Returns what
        `run_later` does."""
        step, table = self._passes[i].step, self._tables[i]
        if isinstance(step, ResamplingStep | WarpStep):
            self.queue_move(i, draw, plan[0], target)
            return {}
        assert not isinstance(images, Canvas) and not isinstance(target, Canvas), "see passes_of"
        match step:
            case OpaqueStep():
                return self._call(step, images, draw, target, plan[0])
            case PointwiseStep():
                adjust(images.permute(0, 2, 3, 1), plan, draw, table, target)
            case LocalStep():
                smooth(images.permute(0, 2, 3, 1), plan[0], draw, table, target)
            case unknown:
                assert_never(unknown)
        return {}

    def _call(
        self, step: OpaqueStep, images: torch.Tensor, seeds: Ints, target: torch.Tensor, places: torch.Tensor
    ) -> dict[int, BadSampleError]:
        """Queue an opaque stage on images [n, C, H, W], to these rows [n] of the target. Returns which of them it
        refuses, and why.

        A batch that it refuses is passed again by halves. That needs the images as they were: if the call that failed
        wrote to them, its exception is raised, as are those that no image causes, such as errors of CUDA.
        """
        refused: dict[int, BadSampleError] = {}
        images = images if step.stage.on_gpu else images.cpu()
        parts = [slice(0, len(images))]
        while parts:
            part, version = parts.pop(), _version(images)
            try:
                result = step.stage.apply_batch(images[part], seeds[part])
            except NotImplementedError as error:
                reason = reason_of(error).partition(". ")[0]
                action = f"add one to its operator, or let {type(step.stage).__name__}.on_gpu return False"
                rule = f"{step.stage.stage_name}: has no form for {images.device}"
                raise LoaderError(f"{rule}: {reason}; {action}") from error
            except (ValueError, RuntimeError) as error:
                fault = None if _is_of_device(error) else bad_by_stage(step, error)
                if fault is None or version is None or _version(images) != version:
                    raise
                if part.stop - part.start == 1:
                    refused[part.start] = fault.with_traceback(None)  # which refers to this frame
                else:
                    middle = (part.start + part.stop) // 2
                    parts += [slice(middle, part.stop), slice(part.start, middle)]
            else:
                require_declared(step, result, part.stop - part.start)
                target.index_copy_(0, places[part], result.to(target.device))
        return refused

    def plan_of_move(self, draw: Resampling | Warping, places: Ints, target: ImageRows) -> Ints:
        """Encode a resampling or a warp of n images to a target as its kernel reads it.

        places [n, 3]: see `DeviceImages`.
        """
        if isinstance(target.images, Canvas):
            tiles = tiles_of(draw)
            return plan_of(tiles.draw, places[tiles.image], target.images.offsets(tiles))
        return plan_of(draw, places, target.offsets_from(target.images))

    def queue_move(self, i: int, drawn: Resampling | Warping, plan: torch.Tensor, target: Target) -> None:
        """Queue pass i, a resampling or a warp of the images whose addresses a plan has (`plan_of`), to its offsets."""
        table, target = self._tables[i], target.tile if isinstance(target, Canvas) else target
        if isinstance(drawn, Warping):
            warp_all(plan, table, target, lookup=drawn.lookup)
            return
        kind, antialias, fill = drawn.interpolation, drawn.antialias, drawn.fill
        resample_all(plan, table, target, interpolation=kind, antialias=antialias, fill=fill)


def _version(images: torch.Tensor) -> int | None:
    """Return a number that changes when torch writes to a tensor; None if it keeps none."""
    return None if images.is_inference() else images._version


def _is_of_device(error: Exception) -> bool:
    """Return True for an error of CUDA or of its libraries, which says nothing about an image."""
    return isinstance(error, torch.AcceleratorError) or any(name in str(error) for name in _OF_DEVICE)


_OF_DEVICE = ("CUDA", "cuDNN", "cuFFT", "Triton Error")
"""In the texts of such errors."""


def plan_of(draw: Resampling | Warping, places: Ints, offsets: Array | int) -> Ints:
    """Encode a resampling or a warp as its kernel reads it: int64 [n, number of the kernel's FIELDS].

    places [n, 3]: see `DeviceImages`; in either kernel's plan these are the first columns. offsets [n]: the last one,
        or one number for all.
    """
    if isinstance(draw, Warping):
        return warp_plan_of(draw, places, offsets)
    return resampling_plan_of(draw, places, offsets)
