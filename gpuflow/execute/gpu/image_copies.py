"""Copies finished images to their rows of a batch by C code, see gpu_call.py."""

from __future__ import annotations

import logging
import queue
from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np
import torch

from gpuflow.arrays import Ints
from gpuflow.execute.gpu.device_stream import DeviceStream, send_array
from gpuflow.execute.gpu.gpu_call import GpuCall, GpuCalls, KernelLaunch, PlanMemory, Transfer, capture_launch
from gpuflow.execute.kernels.copy import ALIGN, FIELDS, copy_images
from gpuflow.execute.tables import table_of

_LOG = logging.getLogger(__name__)
_PLANS_BYTES = 1 << 15


class ImageRows(NamedTuple):
    """Images in device memory.

    address: of row 0. step: bytes from one row to the next. size: bytes of an image. rows: the rows to copy.
    """

    address: int
    step: int
    size: int
    rows: Ints

    @classmethod
    def of(cls, images: torch.Tensor, rows: Ints) -> ImageRows | None:
        """Rows of a tensor [N, C, H, W]; None if an image is not one block of memory."""
        _, channels, height, width = images.shape
        dense = (height * width, width, 1), (1, width * channels, channels)
        if images.stride()[1:] not in dense:
            return None
        item = images.element_size()
        return cls(images.data_ptr(), images.stride(0) * item, channels * height * width * item, rows)

    @property
    def addresses(self) -> Ints:
        return self.address + self.rows * self.step


@final
class ImageCopies:
    """Queues copies on a loader's stream. Any thread may call any method.

    calls: makes the calls of C code; without it nothing is copied here.
    """

    def __init__(self, device_stream: DeviceStream, calls: GpuCalls | None) -> None:
        self._device_stream, self._calls = device_stream, calls
        self._launch: KernelLaunch | None = None
        self._memory: queue.SimpleQueue[PlanMemory] = queue.SimpleQueue()
        if calls is not None:
            try:
                plan = send_array(device_stream, np.zeros((1, len(FIELDS)), np.int64))  # of no bytes
                with device_stream.queued():
                    copy_images(plan)
                self._launch = capture_launch(calls.driver, device_stream, copy_images, plan)
            except RuntimeError as error:
                _LOG.info("Python code queues copies of images: %s", error)

    @property
    def available(self) -> bool:
        """Whether C code can copy images at all."""
        return self._launch is not None

    def queue(
        self, pairs: Sequence[tuple[ImageRows | None, ImageRows | None]], transfer: Transfer | None = None
    ) -> bool:
        """Queue copies from the first of each pair to the second. False if that is not possible; then none is queued.

        transfer: a copy of pinned memory to the device that comes before.
        """
        if self._calls is None or self._launch is None:
            return False
        plans = [
            table_of(len(source.rows), [source.addresses, target.addresses, source.size])
            for source, target in pairs
            if source is not None and target is not None
        ]
        plan = np.concatenate(plans)
        if len(plans) < len(pairs) or (plan % ALIGN).any() or plan.nbytes > _PLANS_BYTES:
            return False
        try:
            memory = self._memory.get_nowait()
        except queue.Empty:
            memory = PlanMemory(self._device_stream, _PLANS_BYTES)
        GpuCall(self._calls, memory, [plan], [self._launch], transfer).queue()
        memory.sources = [transfer]
        self._memory.put(memory)
        return True
