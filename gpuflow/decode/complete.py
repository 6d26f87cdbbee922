"""Finds out which baseline JPEGs hold the data of all their blocks, by C code on the CPU.

Where data are missing, NVIDIA's JPEG engines show pixels of other images or decode the bytes that happen to follow, and
nvJPEG reports success. Nothing but reading all Huffman codes finds out, which complete.c does here and
execute/kernels/complete.py on a GPU.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpuflow.decode.chunk_headers import Headers
from gpuflow.native.library import INTEGER, POINTER, function
from gpuflow.sources import Payload

__all__ = ["FIELDS", "MAX_BYTES", "can_be_read", "complete_on_cpu", "describe"]

FIELDS = ("file", "length", "scan", "components", "luma", "units", "interval", "restarts", "data", "places")
"""Columns of the description of the files, int64 [N, len(FIELDS)]: address and size in bytes; where the compressed data
begin, in bytes from the file's first one; number of components, 1 or 3; blocks of the first component in a coded unit
(MCU); units of the image; units between two restart markers, 0 if there are none; number of these markers; and, for the
kernels, where this file's part of the working memory for data begins, a multiple of 8 bytes, and where that for places
begins."""
MAX_BYTES = 1 << 26
"""The largest size of a file that is read."""
_find_complete = function("gpuflow_complete", POINTER, INTEGER, INTEGER, POINTER)


def describe(rows: NDArray[np.int64], payload: Payload, headers: Headers) -> NDArray[np.int64]:
    """The files of these rows [n] of a payload, [n, len(FIELDS)]. Instead of the address there is the offset in the
    payload; where working memory begins is 0.

    headers: of all files of the payload; those of the rows are files that the engines decode.
    """
    sampling, intervals = headers.sampling[rows].astype(np.int64), headers.intervals[rows]
    across, down = np.maximum(sampling >> 4, 1), np.maximum(sampling & 15, 1)
    units = (-(-headers.sizes[rows] // (8 * np.column_stack([down, across])))).prod(axis=1)
    columns = {
        "file": np.asarray(payload.offsets, np.int64)[rows],
        "length": np.asarray(payload.sizes, np.int64)[rows],
        "scan": headers.scans[rows],
        "components": np.where(sampling > 0, 3, 1),
        "luma": across * down,
        "units": units,
        "interval": intervals,
        "restarts": np.where(intervals > 0, -(-units // np.maximum(intervals, 1)) - 1, 0),
    }
    nothing = np.zeros(len(rows), np.int64)
    return np.column_stack([columns.get(name, nothing) for name in FIELDS]).astype(np.int64)


def can_be_read(files: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of the described files are not too large to be read, and not too small for the restart markers that their
    headers announce. The others count as incomplete."""
    sizes, restarts = files[:, FIELDS.index("length")], files[:, FIELDS.index("restarts")]
    readable: NDArray[np.bool_] = (sizes <= MAX_BYTES) & (2 * restarts < sizes)
    return readable


def complete_on_cpu(rows: NDArray[np.int64], payload: Payload, headers: Headers, threads: int) -> NDArray[np.bool_]:
    """Return which of these rows [n] of a payload are complete files, [n].

    It reads about 220 MB/s on each thread, without Python's interpreter.

    headers: see `describe`. threads: that read at the same time, this one included.
    """
    files = describe(rows, payload, headers)
    readable = can_be_read(files)
    files[:, FIELDS.index("file")] += payload.buffer.ctypes.data
    chosen = np.ascontiguousarray(files[readable])
    found = np.zeros(len(chosen), np.uint8)
    _find_complete(chosen.ctypes.data, len(chosen), threads, found.ctypes.data)
    complete = np.zeros(len(rows), bool)
    complete[readable] = found > 0
    return complete
