"""Rewrites progressive JPEGs as baseline ones with the same coefficients, by C code: a GPU's engines need these.

That takes about two fifths of the time of decoding them on the CPU. A file is not rewritten if it is incomplete or
damaged, if it is very large, or if the engines would not decode its baseline form.
Whether a file is rewritten depends on the file alone, so that its pixels are always the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuflow.decode.header_scan import scan_headers
from gpuflow.native.library import INTEGER, POINTER, function
from gpuflow.native.pool import NativePool, using
from gpuflow.sources import SPARE_BYTES, Payload, lay_out

__all__ = ["Rewritten", "rewrite_progressive"]

_rewrite = function("gpuflow_baseline", POINTER, INTEGER, POINTER, INTEGER)
_MOST_INSTRUCTIONS = 2
"""The instructions to use where the processor has them: 0 those of all processors, 1 also those that count bits (BMI),
2 also those that move bits to the places of a mask (BMI2)."""
_ROOM, _MORE_ROOM = 1.5, 4096
"""A rewritten file has at most this many times the bytes of the progressive one, and this many bytes more. Usual ones
grow by 5 to 15%, those of quality 15 by 40%."""


class Rewritten(NamedTuple):
    """Files that were rewritten.

    buffer: holds them; zeros follow each. offsets, sizes [n]: where each begins there, and its bytes, 0 if it was not
    rewritten. sampling [n]: as `Headers` has it.
    """

    buffer: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    sampling: NDArray[np.uint8]


def rewrite_progressive(
    payload: Payload,
    rows: NDArray[np.int64],
    allocate: Callable[[int], NDArray[np.uint8]],
    pool: NativePool | None = None,
) -> Rewritten:
    """Rewrite these rows [n] of a payload. Runs without Python's interpreter.

    allocate: returns memory of at least the given number of bytes.
    pool: whose threads rewrite; by default the calling thread does.
    """
    starts, lengths = (np.asarray(x, np.int64)[rows] for x in (payload.offsets, payload.sizes))
    rooms = (lengths * _ROOM).astype(np.int64) + _MORE_ROOM
    places, end = lay_out(rooms.tolist())
    buffer, offsets = allocate(end), np.array(places, np.int64)
    columns = [starts + payload.buffer.ctypes.data, lengths, offsets + buffer.ctypes.data, rooms, 0 * rooms]
    order = np.argsort(-lengths, kind="stable")  # the largest first, so that no thread is left with one at the end
    files = np.stack(columns, axis=1)[order]
    with using(pool) as threads:
        _rewrite(files.ctypes.data, len(rows), threads, _MOST_INSTRUCTIONS)
    sizes = np.empty_like(lengths)
    sizes[order] = files[:, -1]
    copies = Payload(buffer=buffer, offsets=places, sizes=sizes.tolist(), errors=[None] * len(rows))
    scan = scan_headers(copies, max_scans=1, orientation=False)
    sizes[~scan.engine] = 0
    buffer[(offsets + sizes)[:, None] + np.arange(SPARE_BYTES)] = 0
    return Rewritten(buffer, offsets, sizes, scan.sampling)
