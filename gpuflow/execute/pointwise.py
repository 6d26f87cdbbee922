"""Runs the colour operations of one sample on the CPU: the reference for the GPU's kernel.

Most operations are torchvision v2's, to the bit. `native/color.c` computes them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuflow.native.library import INTEGER, POINTER, function
from gpuflow.pipeline.pointwise import Operation, Operations

__all__ = ["run_pointwise"]

_IMAGE = (POINTER, INTEGER, INTEGER, INTEGER, INTEGER)
"""Types of the parameters that `_place` gives."""
_run_operations = function(
    "gpuflow_run_operations", *_IMAGE, POINTER, POINTER, INTEGER, POINTER, POINTER, INTEGER, POINTER
)
_look_up_levels = function("gpuflow_look_up_levels", *_IMAGE, POINTER, INTEGER, INTEGER, POINTER)


def run_pointwise(
    image: NDArray[np.uint8],
    operations: Operations,
    i: int,
    table: NDArray[Any] | None,
    *,
    planes: bool,
    out: NDArray[Any] | None,
) -> NDArray[Any]:
    """Run sample i's operations on its image [H, W, C], then look levels up in a table, if there is one.

    Args:
        image: is not changed. C is 1, or 3: red, green, blue.
        operations: of all samples.
        table: [C, 256] in the result's dtype.
        planes: the result of the table is [C, H, W], and [H, W, C] otherwise.
        out: receives the result, if given. It is contiguous.
    """
    height, width, channels = image.shape
    if (operations.codes[i] != Operation.NONE).any():
        changed = out if table is None and out is not None else np.empty_like(image, order="C")
        np.copyto(changed, image)
        image = changed
        _run_operations(
            *_place(image),
            operations.codes.ctypes.data,
            operations.factors.ctypes.data,
            operations.codes.shape[1],
            operations.tables.ctypes.data,
            operations.values.ctypes.data,
            i,
            None,
        )
    if table is None:
        return image
    if out is None:
        out = np.empty((channels, height, width) if planes else image.shape, table.dtype)
    table, image = np.ascontiguousarray(table), np.ascontiguousarray(image)
    _look_up_levels(*_place(image), table.ctypes.data, table.itemsize, planes, out.ctypes.data)
    return out


def _place(image: NDArray[np.uint8]) -> tuple[int, int, int, int, int]:
    """Return the address, height, width, channels and bytes of a row of a contiguous image, as C takes an image."""
    height, width, channels = image.shape
    assert channels in (1, 3) and image.flags.c_contiguous
    return image.ctypes.data, height, width, channels, width * channels
