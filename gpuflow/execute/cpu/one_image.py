"""Runs native steps on one image at a time: the reference for the GPU's kernels."""

from __future__ import annotations

import numpy as np

from gpuflow.arrays import Array, Bytes
from gpuflow.execute.cpu.native_chunk import Records, run_records
from gpuflow.pipeline.pointwise import Filters, Operations


def run_pointwise(image: Bytes, operations: Operations, i: int, table: Array | None, *, planes: bool) -> Array:
    """Run sample i's operations on its image [H, W, C], then look levels up in a table, if there is one.

    Args:
        image: is not changed. C is 1, or 3: red, green, blue.
        operations: of all samples.
        table: [C, 256] in the result's dtype.
        planes: the result of the table is [C, H, W], and [H, W, C] otherwise.
    """
    records, shape = Records(), image.shape
    records.add_operations(operations)
    if table is None:
        return run_records(records, i, image, np.empty(shape, np.uint8))
    records.add_table(table, planes)
    return run_records(records, i, image, np.empty((shape[2], *shape[:2]) if planes else shape, table.dtype))


def run_filters(image: Bytes, filters: Filters, i: int) -> Bytes:
    """Return sample i's result for its image [H, W, C], which is not changed."""
    records = Records()
    records.add_filters(filters)
    return run_records(records, i, image, np.empty(image.shape, np.uint8))
