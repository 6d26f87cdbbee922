"""Launches the first pass of each output on images that were just decoded, and copies finished images to a batch.

Triton launches the first passes of the first batch, because it compiles the kernels. From then on C code launches them
(gpu_call.py), unless CUDA's driver is too old. The same C code copies images.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import torch

from gpuflow.arrays import Ints
from gpuflow.execute.gpu.device_passes import DevicePasses
from gpuflow.execute.gpu.device_stream import DeviceStream
from gpuflow.execute.gpu.gpu_call import GpuCall, GpuCalls, KernelLaunch, PlanMemory, Transfer, capture_launch
from gpuflow.execute.gpu.results import Canvas, ImageRows, Target
from gpuflow.execute.kernels.copy import ALIGN, FIELDS, copy_images
from gpuflow.execute.packing import table_of
from gpuflow.pipeline.program import Resampling, Warping

_LOG = logging.getLogger(__name__)
_ATTEMPTS = 3
"""The number of times that a capture may fail: work of another thread can make it fail."""


class CapturedPasses(NamedTuple):
    """The kernels of the first passes, as C code launches them.

    targets: tensors that the offsets in a plan count from, [1, C, H, W], one for each output. settings: what was
    captured with the kernels: the `_settings` of each output.
    """

    calls: GpuCalls
    launches: list[KernelLaunch]
    targets: list[Target]
    settings: list[Any]


@final
class FirstPasses:
    """Runs the first passes on a loader's stream. Any thread may call any method, within `device_stream.queued()`.

    calls: makes the calls of C code, if there is any.
    """

    def __init__(self, passes: Sequence[DevicePasses], device_stream: DeviceStream, calls: GpuCalls | None) -> None:
        self._passes, self._device_stream, self._calls = tuple(passes), device_stream, calls
        self._captured: CapturedPasses | None = None
        self._attempts, self._lock = _ATTEMPTS, threading.Lock()

    def captured(self, draws: Sequence[Any], targets: Sequence[Target]) -> CapturedPasses | None:
        """Return the kernels for C code, if they are known for such draws and targets.

        draws: for each output the parameters of its first pass. targets: where each puts its results.
        """
        captured = self._captured
        return captured if captured is not None and captured.settings == list(map(_settings, draws, targets)) else None

    def run(self, draws: Sequence[Any], plans: Sequence[Ints], targets: Sequence[Target]) -> None:
        """Queue all first passes by Triton. plans: of each output, see `device_passes.plan_of`."""
        sent = self._device_stream.send_all(plans)
        for passes, draw, plan, target in zip(self._passes, draws, sent, targets, strict=True):
            passes.queue_move(0, draw, plan, target)
        if self._calls is not None and self._captured is None and self._lock.acquire(blocking=False):
            try:
                if self._attempts:
                    self._attempts -= 1
                    self._captured = self._capture(draws, plans, targets)
            except RuntimeError as error:
                level = logging.DEBUG if self._attempts else logging.INFO
                _LOG.log(level, "Python code queues the work of the GPU: %s", error)
            finally:
                self._lock.release()

    def _capture(self, draws: Sequence[Any], plans: Sequence[Ints], targets: Sequence[Target]) -> CapturedPasses | None:
        assert self._calls is not None
        launches: list[KernelLaunch] = []
        own: list[Target] = []
        for passes, draw, plan, target in zip(self._passes, draws, plans, targets, strict=True):
            if isinstance(target, Canvas) or not len(plan):
                return None
            row = plan[:1].copy()
            row[:, -1] = 0
            (sent,) = self._device_stream.send_all([row])
            shape = (1, *target.shape[1:])
            own.append(torch.empty_strided(shape, target.stride(), dtype=target.dtype, device=target.device))
            launch = partial(passes.queue_move, 0, draw, target=own[-1])
            launch(sent)  # compiles it for memory that is aligned as this
            launches.append(capture_launch(self._calls.driver, self._device_stream, launch, sent))
        return CapturedPasses(self._calls, launches, own, list(map(_settings, draws, own)))


def _settings(draw: Resampling | Warping, target: Target) -> Any:
    """Return what the kernel of a first pass depends on apart from its plan; None if no kernel is captured for it."""
    if isinstance(target, Canvas):
        return None
    way = draw.lookup if isinstance(draw, Warping) else (draw.interpolation, draw.antialias, draw.fill)
    return way, target.stride()


_PLANS_BYTES = 1 << 15


@final
class ImageCopies:
    """Queues copies on a loader's stream. Any thread may call any method, within `device_stream.queued()`.

    calls: makes the calls of C code; without it torch copies.
    """

    def __init__(self, device_stream: DeviceStream, calls: GpuCalls | None) -> None:
        self._device_stream, self._calls = device_stream, calls
        self._launch: KernelLaunch | None = None
        self._memory: queue.SimpleQueue[PlanMemory] = queue.SimpleQueue()
        if calls is not None:
            try:
                (plan,) = device_stream.send_all([np.zeros((1, len(FIELDS)), np.int64)])  # of no bytes
                with device_stream.queued():
                    copy_images(plan)
                self._launch = capture_launch(calls.driver, device_stream, copy_images, plan)
            except RuntimeError as error:
                _LOG.info("Python code queues copies of images: %s", error)

    def queue(self, pairs: Sequence[tuple[ImageRows, ImageRows]], transfer: Transfer | None = None) -> None:
        """Queue copies from the first of each pair to the second, which have images of one size and layout.

        transfer: a copy of pinned memory to the device that comes before.
        """
        if self._queue_by_c(pairs, transfer):
            return
        if transfer is not None:
            self._device_stream.copy_into(transfer.device, transfer.host)
        sent = self._device_stream.send_all([images.rows for pair in pairs for images in pair])
        for these, those, (source, target) in zip(sent[::2], sent[1::2], pairs, strict=True):
            target.tensor.index_copy_(0, those, source.tensor.index_select(0, these))

    def _queue_by_c(self, pairs: Sequence[tuple[ImageRows, ImageRows]], transfer: Transfer | None) -> bool:
        """Queue the copies by one kernel of C code. Return False if that is not possible; then none is queued."""
        if self._calls is None or self._launch is None:
            return False
        plan = np.concatenate(
            [table_of(len(a.rows), [a.addresses, b.addresses, min(a.image_bytes, b.image_bytes)]) for a, b in pairs]
        )
        if not plan[:, -1].all() or (plan % ALIGN).any() or plan.nbytes > _PLANS_BYTES:
            return False
        try:
            memory = self._memory.get_nowait()
        except queue.Empty:
            memory = PlanMemory(self._device_stream, _PLANS_BYTES)
        GpuCall(self._calls, memory, [plan], [self._launch], transfer).queue()
        memory.sources = [transfer]
        self._memory.put(memory)
        return True
