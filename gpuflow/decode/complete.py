"""Finds out which baseline JPEGs hold the data of all their blocks, by C code.

Where data are missing, NVIDIA's JPEG engines show pixels of other images or decode the bytes that happen to follow, and
nvJPEG reports success. Nothing but reading all Huffman codes finds out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpuflow.decode.chunk_headers import Headers
from gpuflow.native.library import INTEGER, POINTER, function
from gpuflow.native.pool import NativePool, using
from gpuflow.sources import Payload

__all__ = ["MAX_BYTES", "find_complete"]

MAX_BYTES = 1 << 26
"""The largest size of a file that is read. A larger one counts as incomplete."""
_find_complete = function("gpuflow_complete", POINTER, INTEGER, POINTER, POINTER)


def find_complete(
    rows: NDArray[np.int64], payload: Payload, headers: Headers, pool: NativePool | None = None
) -> NDArray[np.bool_]:
    """Return which of these rows [n] of a payload are complete files, [n].

    It reads about 220 MB/s on each thread, without Python's interpreter.

    headers: of all files of the payload; those of the rows are files that the engines decode.
    pool: whose threads read; by default the calling thread does.
    """
    offsets, sizes = (np.asarray(x, np.int64)[rows] for x in (payload.offsets, payload.sizes))
    sampling, intervals = headers.sampling[rows].astype(np.int64), headers.intervals[rows]
    across, down = np.maximum(sampling >> 4, 1), np.maximum(sampling & 15, 1)
    units = (-(-headers.sizes[rows] // (8 * np.column_stack([down, across])))).prod(axis=1)
    columns = {
        "address and size in bytes": (offsets + payload.buffer.ctypes.data, sizes),
        "where the compressed data begin, in bytes from the file's first one": (headers.scans[rows],),
        "components: 1 or 3": (np.where(sampling > 0, 3, 1),),
        "blocks of the first component in a coded unit (MCU)": (across * down,),
        "units of the image, and between two restart markers; 0 if there are none": (units, intervals),
        "restart markers": (np.where(intervals > 0, -(-units // np.maximum(intervals, 1)) - 1, 0),),
    }
    files = np.column_stack([column for group in columns.values() for column in group]).astype(np.int64)
    readable = (sizes <= MAX_BYTES) & (2 * files[:, -1] < sizes)  # each restart marker has two bytes
    files = np.ascontiguousarray(files[readable])
    found = np.zeros(len(files), np.uint8)
    with using(pool) as threads:
        _find_complete(files.ctypes.data, len(files), threads, found.ctypes.data)
    complete = np.zeros(len(rows), bool)
    complete[readable] = found > 0
    return complete
