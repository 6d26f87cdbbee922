"""Checks whether the compressed data of JPEG files are complete, before NVIDIA's decoders get them.

Where data are missing or damaged, the JPEG engines show pixels of other images, or decode the bytes that happen to
follow; the pixels of nvJPEG's CUDA kernels differ with the number of files of a call. What the engines make of a file
that lacks its last bytes depends on its place in a call (measured in experiments/decoder_history), so nothing but
reading all of its data finds out. libjpeg-turbo does that, without the interpreter.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gpuflow.decode.scan_markers import expected_restarts, has_expected_markers
from gpuflow.sources import Payload

__all__ = ["COMPLETE", "DAMAGED", "MARKED", "NOT_CHECKED", "ScanHeaders", "check_scan", "check_scans"]

NOT_CHECKED, DAMAGED, MARKED, COMPLETE = -1, 0, 1, 2
"""What is known of a file. MARKED: it has the markers that it should have, and there is no libjpeg-turbo to read the
data between them. COMPLETE: it has, and all data of its image without an error or a warning of libjpeg-turbo."""


class ScanHeaders(Protocol):
    """What the headers of N files say of their scans: see `header_scan.HeaderScan`."""

    @property
    def sizes(self) -> NDArray[np.int64]: ...
    @property
    def sampling(self) -> NDArray[np.uint8]: ...
    @property
    def scans(self) -> NDArray[np.int64]: ...
    @property
    def intervals(self) -> NDArray[np.int64]: ...


def check_scan(data: NDArray[np.uint8], start: int, frame: tuple[int, int, int], interval: int) -> int:
    """DAMAGED, MARKED or COMPLETE.

    data: a baseline JPEG. start: where its compressed data begin. frame: height, width and sampling.
    interval: see `expected_restarts`.
    """
    from gpuflow.decode.libjpeg_turbo import find_libjpeg_turbo  # it imports OpenCV, which takes time

    if not has_expected_markers(data[start:], expected_restarts(*frame, interval)):
        return DAMAGED
    library = find_libjpeg_turbo()
    if library is None:
        return MARKED
    return COMPLETE if library.accepts(data, frame[:2]) else DAMAGED


def check_scans(payload: Payload, rows: NDArray[np.int64], headers: ScanHeaders, threads: int) -> NDArray[np.int8]:
    """What `check_scan` returns for each of these rows of a payload. It uses the calling thread if `threads` is 1."""

    def check(row: int) -> int:
        height, width = headers.sizes[row].tolist()
        frame = height, width, int(headers.sampling[row])
        return check_scan(payload.sample(row), int(headers.scans[row]), frame, int(headers.intervals[row]))

    largest_first = np.argsort(-np.asarray(payload.sizes, np.int64)[rows], kind="stable")
    run = map if threads == 1 or len(rows) == 1 else _threads(threads, os.getpid()).map
    found = np.empty(len(rows), np.int8)
    found[largest_first] = list(run(check, rows[largest_first].tolist()))
    return found


@cache
def _threads(count: int, process: int) -> ThreadPoolExecutor:
    """Threads that stay until the process ends. process: its number; a forked child has no threads."""
    return ThreadPoolExecutor(count, thread_name_prefix="gpuflow_check")
