"""Images in memory as files have them that EXIF data turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpuflow.decode.header import stored
from gpuflow.execute.gpu.chunk_scan import pixel_steps

__all__ = ["in_memory"]


def in_memory(images: Sequence[NDArray[np.uint8]]) -> tuple[list[NDArray[np.uint8]], NDArray[np.int64]]:
    """Upright images [H_i, W_i, C], each stored for another EXIF orientation: the arrays, and where kernels find their
    pixels, [n, 3] (`DeviceImages.places`)."""
    orientations = np.resize((6, 3, 8, 5, 1, 7, 2, 4), len(images))
    held = [stored(image, int(turn)) for image, turn in zip(images, orientations, strict=True)]
    places = pixel_steps(np.array([array.shape[:2] for array in held]), images[0].shape[2], orientations)
    places[:, 0] += [array.ctypes.data for array in held]
    return held, places
