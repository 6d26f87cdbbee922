"""Memory for results of images that nvJPEG decodes before their chunk is launched, because they fill up a call."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.execute.device_stream import DeviceStream, allocate_slots
from gpuflow.pipeline.image_spec import ImageSpec

__all__ = ["LaterResults", "LaterRows"]


class LaterRows:
    """Rows that are in use in each of the `LaterResults.images`. They are free again when this object is deleted.

    Work that is queued on the loader's stream after that may overwrite them, so work that reads them must be queued
    before.
    """

    def __init__(self, rows: NDArray[np.int64], free: deque[int]) -> None:
        self.rows, self._free = rows, free

    def __del__(self) -> None:
        self._free.extend(self.rows.tolist())


class LaterResults:
    """Memory for a fixed number of images for each output of a program, allocated when it is first needed.

    If each call allocated memory for its own images, torch would keep a block for each number of images
    (experiments/real_data/NOTES.md). One thread at a time may call the methods; any thread may delete rows.

    specs: of the results of each output's first pass. images: for each of them a tensor [K, C, H, W].
    """

    def __init__(self, device_stream: DeviceStream, specs: Sequence[ImageSpec]) -> None:
        self._device_stream, self._specs = device_stream, specs
        self._free: deque[int] = deque()
        self.images: list[torch.Tensor] = []

    def reserve(self, images: int) -> int:
        """The number of free rows. The first call allocates memory for this number of images."""
        if not self.images:
            self.images = [allocate_slots(self._device_stream, images, spec) for spec in self._specs]
            self._free.extend(range(images))
        return len(self._free)

    def take(self, count: int) -> LaterRows:
        """Take `count` rows. At least that many must be free."""
        return LaterRows(np.array([self._free.popleft() for _ in range(count)], np.int64), self._free)
