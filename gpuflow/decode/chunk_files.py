"""Runs C code on all files of a chunk together: reads headers, rewrites progressive JPEGs, finds complete files."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from gpuflow.arrays import Bools, Bytes, Ints
from gpuflow.decode.codecs import probe
from gpuflow.decode.header import SWAPPED
from gpuflow.errors import BadSampleError
from gpuflow.native.library import INTEGER, POINTER, NativePool, function, using
from gpuflow.sources import SPARE_BYTES, Payload, lay_out

_scan = function("gpuflow_headers", POINTER, POINTER, POINTER, INTEGER, INTEGER, INTEGER, POINTER)
_COLUMNS = 7
_BASELINE, _PROGRESSIVE = 1, 2


@dataclass(frozen=True)
class HeaderScan:
    """Holds what the headers of N files say; zeros for a file that is not ordinary.

    engine [N]: whether the JPEG engines decode the file, an ordinary baseline JPEG.
    progressive [N]: whether the file is a progressive JPEG, gray or in color.
    sizes [N, 2]: height and width as stored, in pixels.
    orientations [N]: as EXIF counts them, 1 to 8; 1 if the file says nothing, or if it was not read.
    sampling [N]: horizontal * 16 + vertical factor of the first component; 0 for a gray file.
    scans [N]: where the compressed data begin, in bytes from the file's first one.
    intervals [N]: coded units between two restart markers; 0 if there are none.
    The last three are valid for files that the engines decode.
    """

    engine: Bools
    progressive: Bools
    sizes: Ints
    orientations: Bytes
    sampling: Bytes
    scans: Ints
    intervals: Ints


def scan_headers(payload: Payload, *, max_scans: int, orientation: bool) -> HeaderScan:
    """Scan a payload's headers. Other files than ordinary JPEGs are left to `probe`.

    max_scans, orientation: as `probe` has them; a file with more scans is not ordinary.

    Examples:
        >>> from gpuflow.decode.codecs import TEST_JPEG
        >>> scan = scan_headers(Payload.of([TEST_JPEG, b"no image"]), max_scans=100, orientation=False)
        >>> scan.engine.tolist(), scan.sizes.tolist()
        ([True, False], [[48, 64], [0, 0]])
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


def engine_sampling(data: Bytes) -> int | None:
    """Return a file's chroma sampling if NVIDIA's JPEG engines may decode it, else None.

    The factors of the first component are joined: horizontal * 16 + vertical; 0 for a gray image.

    Examples:
        >>> from gpuflow.decode.codecs import TEST_JPEG
        >>> hex(engine_sampling(TEST_JPEG))  # 4:2:0
        '0x22'
    """
    scan = scan_headers(Payload.of([data]), max_scans=1, orientation=False)
    return int(scan.sampling[0]) if scan.engine[0] else None


@dataclass(frozen=True)
class Headers(HeaderScan):
    """Holds the headers of a chunk's N files, also of those that are not ordinary.

    faults [N]: why a file is bad, or None.
    tags [N]: EXIF orientations that are not applied and that `decode` does not mention; else 1.
    jpegs [N]: whether the file is a JPEG, gray or in color.
    """

    faults: list[BadSampleError | None]
    tags: Bytes
    jpegs: Bools

    @property
    def upright_sizes(self) -> Ints:
        """Return height and width of the upright images, [N, 2]."""
        swapped = self.orientations >= SWAPPED
        return np.where(swapped[:, None], self.sizes[:, ::-1], self.sizes) if swapped.any() else self.sizes


def read_headers(
    payload: Payload, *, max_pixels: int, max_scans: int, orientation: bool | None, formats: Collection[str] = ()
) -> Headers:
    """Return the header of each file. Unreadable files (of size 0) are faults of the stage `read`.

    orientation: whether to read it. None: read it as `Headers.tags`, to count such files.
    """
    limits: Any = {"max_scans": max_scans, "orientation": orientation is not False}
    scan = scan_headers(payload, **limits)
    too_large = scan.sizes.prod(axis=1) > max_pixels
    scan.engine[too_large] = scan.progressive[too_large] = False
    faults: list[BadSampleError | None] = [None] * len(payload)
    jpegs = scan.engine | scan.progressive
    for i in np.flatnonzero(~jpegs).tolist():
        scan.orientations[i] = 1
        if (error := payload.errors[i]) is not None:
            faults[i] = BadSampleError("read", error)
            continue
        try:
            header = probe(payload.sample(i), max_pixels=max_pixels, formats=formats, **limits)
        except BadSampleError as fault:
            faults[i] = fault.with_traceback(None)  # which refers to this frame, and that to all samples
            continue
        scan.sizes[i], scan.orientations[i] = header.size, header.orientation
        jpegs[i] = header.format == "jpeg" and header.channels in (1, 3)
        scan.progressive[i] = jpegs[i] and header.progressive
    tags = np.ones_like(scan.orientations)
    if orientation is None:
        scan, tags = replace(scan, orientations=tags), scan.orientations
    return Headers(**vars(scan), faults=faults, tags=tags, jpegs=jpegs)


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

    buffer: Bytes
    offsets: Ints
    sizes: Ints
    sampling: Bytes


def rewrite_progressive(
    payload: Payload,
    rows: Ints,
    allocate: Callable[[int], Bytes],
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


MAX_BYTES = 1 << 26
"""The largest size of a file that is read. A larger one counts as incomplete."""
_find_complete = function("gpuflow_complete", POINTER, INTEGER, POINTER, POINTER)


def find_complete(rows: Ints, payload: Payload, headers: Headers, pool: NativePool | None = None) -> Bools:
    """Return which of these rows [n] of a payload are complete files, [n].

    It reads about 220 MB/s on each thread, without Python's interpreter.

    headers: of all files of the payload; those of the rows are files that the engines decode.
    pool: whose threads read; by default the calling thread does.
    """
    offsets, sizes = (np.asarray(x, np.int64)[rows] for x in (payload.offsets, payload.sizes))
    sampling, intervals = headers.sampling[rows].astype(np.int64), headers.intervals[rows]
    across, down = np.maximum(sampling >> 4, 1), np.maximum(sampling & 15, 1)
    units = (-(-headers.sizes[rows] // (8 * np.column_stack([down, across])))).prod(axis=1)
    columns = (
        offsets + payload.buffer.ctypes.data,
        sizes,
        headers.scans[rows],
        np.where(sampling > 0, 3, 1),  # components
        across * down,  # blocks of the first component in a coded unit (MCU)
        units,
        intervals,
        np.where(intervals > 0, -(-units // np.maximum(intervals, 1)) - 1, 0),  # restart markers
    )
    files = np.column_stack(columns).astype(np.int64)
    readable = (sizes <= MAX_BYTES) & (2 * files[:, -1] < sizes)  # each restart marker has two bytes
    files = np.ascontiguousarray(files[readable])
    found = np.zeros(len(files), np.uint8)
    with using(pool) as threads:
        _find_complete(files.ctypes.data, len(files), threads, found.ctypes.data)
    complete = np.zeros(len(rows), bool)
    complete[readable] = found > 0
    return complete
