"""Reads the headers of a chunk's ordinary JPEGs together, by C code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuflow.native.library import INTEGER, POINTER, function
from gpuflow.sources import Payload

__all__ = ["HeaderScan", "scan_headers"]

_scan = function("gpuflow_headers", POINTER, POINTER, POINTER, INTEGER, INTEGER, INTEGER, POINTER)
_COLUMNS = 7
_BASELINE, _PROGRESSIVE = 1, 2


class HeaderScan(NamedTuple):
    """What the headers of N files say; zeros for a file that is not ordinary.

    engine, progressive [N]: whether a file is an ordinary baseline JPEG that the engines decode, or an ordinary
    progressive one. sizes [N, 2]: height and width as stored. orientations [N]: as EXIF counts them, 1 if it says
    nothing. sampling [N]: factors of its first component, 0 if it is gray. scans [N]: where its
    compressed data begin, in bytes from its first one. intervals [N]: coded units between two restart markers, 0 if
    there are none.
    """

    engine: NDArray[np.bool_]
    progressive: NDArray[np.bool_]
    sizes: NDArray[np.int64]
    orientations: NDArray[np.uint8]
    sampling: NDArray[np.uint8]
    scans: NDArray[np.int64]
    intervals: NDArray[np.int64]


def scan_headers(payload: Payload, *, max_scans: int, orientation: bool) -> HeaderScan:
    """Scan a payload's headers. Other files than ordinary JPEGs are left to `probe`.

    max_scans, orientation: as `probe` has them; a file with more scans is not ordinary.
    """
    found = np.zeros((len(payload), _COLUMNS), np.int64)
    offsets, sizes = (np.ascontiguousarray(x, np.int64) for x in (payload.offsets, payload.sizes))
    addresses = (array.ctypes.data for array in (payload.buffer, offsets, sizes))
    _scan(*addresses, len(payload), orientation, max_scans, found.ctypes.data)
    kind, _, _, orientations, sampling, scans, intervals = found.T
    return HeaderScan(
        engine=kind == _BASELINE,
        progressive=kind == _PROGRESSIVE,
        sizes=found[:, 1:3].copy(),
        orientations=orientations.astype(np.uint8),
        sampling=sampling.astype(np.uint8),
        scans=scans.copy(),
        intervals=intervals.copy(),
    )
