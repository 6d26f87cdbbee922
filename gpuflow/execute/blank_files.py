"""Caches blank JPEG files in pinned memory for the GPU's decoder, one for each size and chroma sampling."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.decode.blank_images import blank_jpeg
from gpuflow.execute.device_stream import DeviceStream

__all__ = ["BlankFiles"]

_MAX_FILES = 4096


class BlankFiles:
    """Blank JPEG files in pinned memory, cached by size and sampling. Not thread-safe."""

    def __init__(self, device_stream: DeviceStream) -> None:
        self._device_stream = device_stream
        self._files: dict[tuple[int, int, int], NDArray[np.uint8]] = {}

    def files(self, frames: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """(addresses [M], lengths [M]) of blank JPEGs of these heights, widths and samplings, [M, 3]."""
        if len(self._files) > _MAX_FILES:
            self._device_stream.synchronize()  # the GPU may still be reading them
            self._files.clear()
        found = [self._file(*frame) for frame in frames.tolist()]
        return np.array([x.ctypes.data for x in found], np.uint64), np.array([len(x) for x in found], np.uint64)

    def _file(self, height: int, width: int, sampling: int) -> NDArray[np.uint8]:
        key = height, width, sampling
        if key not in self._files:
            data = np.frombuffer(blank_jpeg(*key), np.uint8)
            self._files[key] = memory = self._device_stream.pinned([len(data)], torch.uint8).numpy()
            memory[:] = data
        return self._files[key]
