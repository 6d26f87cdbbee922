"""Runs a local stage's filters on one image on the CPU: the reference for the GPU's kernel."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from gpuflow.native.library import INTEGER, POINTER, function
from gpuflow.pipeline.local import Filters

__all__ = ["run_filters"]

_filter = function("gpuflow_filter", POINTER, POINTER, POINTER, INTEGER, result=INTEGER)


class _LocalFilter(ctypes.Structure):
    """See native/local.h."""

    _fields_ = (
        ("rows", POINTER), ("columns", POINTER), ("high", INTEGER), ("wide", INTEGER),
        ("centre", ctypes.c_double), ("factor", ctypes.c_double), ("keep", INTEGER),
    )  # fmt: skip


def run_filters(image: NDArray[np.uint8], filters: Filters, i: int) -> NDArray[np.uint8]:
    """Return sample i's result for its image [H, W, C], which is not changed."""
    if not filters.active[i]:
        return image
    image, result = np.ascontiguousarray(image), np.empty(image.shape, np.uint8)
    rows, columns = (np.ascontiguousarray(weights[i], np.float64) for weights in (filters.rows, filters.columns))
    described = np.array([image.ctypes.data, *image.shape, image.strides[0]], np.int64)
    numbers = len(rows), len(columns), filters.centre[i], filters.factor[i], filters.border == "keep"
    one = _LocalFilter(rows.ctypes.data, columns.ctypes.data, *numbers)
    if _filter(described.ctypes.data, ctypes.addressof(one), result.ctypes.data, result.strides[0]):
        raise MemoryError(f"no memory to filter an image of {image.shape[0]}x{image.shape[1]} pixels")
    return result
