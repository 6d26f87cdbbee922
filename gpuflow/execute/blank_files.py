"""Blank JPEG files in memory that a GPU's decoder reads from, one for each size and chroma sampling."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.decode.blank_images import blank_jpeg
from gpuflow.execute.device_stream import Delivery

__all__ = ["Blanks"]

_MOST_KEPT = 4096


class Blanks:
    """Blank files in memory that the delivery's GPU copies from, kept by size. For one thread."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._files: dict[tuple[int, int, int], NDArray[np.uint8]] = {}

    def files(self, frames: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """(addresses [M], lengths [M]) of blank JPEGs of these heights, widths and samplings, [M, 3]."""
        if len(self._files) > _MOST_KEPT:
            self._delivery.synchronize()  # until the GPU has read them
            self._files.clear()
        found = [self._file(*frame) for frame in frames.tolist()]
        return np.array([x.ctypes.data for x in found], np.uint64), np.array([len(x) for x in found], np.uint64)

    def _file(self, height: int, width: int, sampling: int) -> NDArray[np.uint8]:
        key = height, width, sampling
        if key not in self._files:
            data = np.frombuffer(blank_jpeg(*key), np.uint8)
            self._files[key] = memory = self._delivery.pinned([len(data)], torch.uint8).numpy()
            memory[:] = data
        return self._files[key]
