"""Scans the headers of a chunk's ordinary JPEGs together, as arrays, without a Python loop over files or bytes.

The header of a JPEG from a camera or a library has about ten marker segments. Each step of the scan reads one segment
of every file.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuflow.sources import Payload

__all__ = [
    "ALL_CODES",
    "CODE_SHARES",
    "DC_SYMBOLS",
    "ENGINE_SAMPLINGS",
    "ENGINE_WIDTH",
    "ORDINARY",
    "RESTART_INTERVAL",
    "HeaderScan",
    "scan_headers",
]

ENGINE_SAMPLINGS = {(0x11,), *((first, 0x11, 0x11) for first in (0x11, 0x12, 0x21, 0x22))}
"""Sampling factors of each component, horizontal * 16 + vertical: gray, 4:4:4, 4:4:0, 4:2:2 and 4:2:0."""
ENGINE_WIDTH = 5
"""The smallest width for the engines: if chroma is at most 2 samples wide, libjpeg-turbo repeats it (jdsample.c), but
nvJPEG interpolates."""


class HeaderScan(NamedTuple):
    """What the headers of N files say.

    sizes [N, 2]: height and width. engine [N]: whether a file is an ordinary baseline JPEG that the engines decode.
    sampling [N]: factors of its first component, 0 if it is gray. scans [N]: where its compressed data begin, in bytes
    from its first one. intervals [N]: coded units between two restart markers, 0 if there are none.
    orientation: whether EXIF data were looked for; a file that has them may be turned, so that it is then not ordinary.
    """

    sizes: NDArray[np.int64]
    engine: NDArray[np.bool_]
    sampling: NDArray[np.uint8]
    scans: NDArray[np.int64]
    intervals: NDArray[np.int64]


_MIN_FILES = 32
"""Chunks of at most this many files are left to `codecs.probe`: any scan takes as long as probing 40 files."""
_MAX_SEGMENTS = 24
"""The largest number of marker segments before the first scan; a file with more is left to `probe`."""
_STEP_BYTES = 20
"""Bytes that a step reads from a marker on: the length of a frame header with three components."""
_FRAME, _SCAN, _EXIF, _ADOBE, _QUANTISATION, _HUFFMAN = 0xC0, 0xDA, 0xE1, 0xEE, 0xDB, 0xC4
RESTART_INTERVAL = 0xDD
_QUANTISATION_BYTES, _MAX_TABLES = 65, 4
"""Bytes of an 8-bit quantisation table with its number, and the largest number of tables in one segment; a file with
more is left to `probe`."""
ORDINARY = np.zeros(256, bool)
"""[256] true for the markers of a baseline JPEG: tables, comments, application data, the frame and the scan."""
ORDINARY[[0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0), _FRAME, _SCAN]] = True
_LUMA = np.zeros(256, bool)
"""[256] true for sampling factors of a first component that the engines decode with chroma of 1x1."""
_LUMA[[factors[0] for factors in ENGINE_SAMPLINGS if factors[1:] == (0x11, 0x11)]] = True


def scan_headers(payload: Payload, *, orientation: bool) -> HeaderScan:
    """Scan a payload's headers. Other files than ordinary JPEGs, and small chunks, are left to `probe`.

    orientation: whether a file with EXIF data may be turned; it is then not ordinary.
    """
    count = len(payload)
    sizes, taken, sampling = np.zeros((count, 2), np.int64), np.zeros(count, bool), np.zeros(count, np.uint8)
    scans, intervals = np.zeros(count, np.int64), np.zeros(count, np.int64)
    result = HeaderScan(sizes, taken, sampling, scans, intervals)
    if count <= _MIN_FILES:
        return result
    data = payload.buffer
    begin = np.asarray(payload.offsets, np.int64)
    end = begin + np.asarray(payload.sizes, np.int64)
    components, numbers = np.zeros(count, np.int64), np.zeros((count, 3), np.int64)
    tables, needed = np.zeros(count, np.int64), np.zeros(count, np.int64)
    rows = np.flatnonzero(end - begin > _STEP_BYTES)
    marks = data[begin[rows]], data[begin[rows] + 1], data[end[rows] - 2], data[end[rows] - 1]
    rows = rows[(marks[0] == 0xFF) & (marks[1] == 0xD8) & (marks[2] == 0xFF) & (marks[3] == 0xD9)]
    at, last = begin[rows] + 2, end[rows] - _STEP_BYTES
    for _ in range(_MAX_SEGMENTS):
        if (over := at > last).any():
            rows, at, last = rows[~over], at[~over], last[~over]
        if not len(rows):
            break
        segment = data[at[:, None] + np.arange(5)]  # FF, marker, two bytes of length, number of components in a scan
        marker = segment[:, 1]
        sound = (segment[:, 0] == 0xFF) & ORDINARY[marker]
        after = at + 2 + (segment[:, 2].astype(np.int64) << 8 | segment[:, 3])
        if (restarts := np.flatnonzero(marker == RESTART_INTERVAL)).size:
            sound[restarts] &= (after - at)[restarts] == 6
            low = data[at[restarts] + 5].astype(np.int64)
            intervals[rows[restarts]] = segment[restarts, 4].astype(np.int64) << 8 | low
        if orientation:
            sound &= marker != _EXIF
        if (adobe := marker == _ADOBE).any():
            sound &= ~adobe | (data[at + 15] != 0)  # transform 0 may mean RGB
        for kind, read in ((_QUANTISATION, _quantisation_tables), (_HUFFMAN, _huffman_tables)):
            if (found := np.flatnonzero(marker == kind)).size:
                found = found[sound[found] & (after[found] <= last[found])]
                defined, whole = read(data, at[found] + 4, after[found])
                tables[rows[found]] |= defined
                sound[found] &= whole
        if (frames := np.flatnonzero(marker == _FRAME)).size:
            which = rows[frames]
            head = data[at[frames, None] + np.arange(_STEP_BYTES)].astype(np.int64)
            sound[frames] &= after[frames] - at[frames] == 10 + 3 * head[:, 9]
            sound[frames] &= _taken_by_engines(head) & (components[which] == 0)
            sizes[which] = head[:, [5, 7]] << 8 | head[:, [6, 8]]
            colors = head[:, 9] == 3
            components[which], sampling[which] = head[:, 9], np.where(colors, head[:, 11], 0)
            numbers[which] = head[:, [10, 13, 16]]
            needed[which] |= 1 << (head[:, 12] & 3)
            needed[which] |= np.where(colors, 1 << (head[:, 15] & 3) | 1 << (head[:, 18] & 3), 0)
            sound[frames] &= (head[:, 12] < 4) & (~colors | ((head[:, 15] < 4) & (head[:, 18] < 4)))
        if (starts := np.flatnonzero(marker == _SCAN)).size:
            which, gray = rows[starts], components[rows[starts]] == 1
            scans[which] = after[starts] - begin[which]
            head = data[at[starts, None] + np.arange(5, 14)].astype(np.int64)
            sound[starts] &= after[starts] - at[starts] == 8 + 2 * components[which]
            used, chosen, spectrum = head[:, 1:6:2], head[:, 0:5:2], head[:, 6:]
            used[gray], chosen[gray], spectrum[gray] = used[gray, :1], numbers[which[gray]], head[gray, 2:5]
            ordinary = (chosen == numbers[which]).all(axis=1) & (spectrum == _SPECTRUM).all(axis=1)
            ordinary &= gray | ((np.diff(np.sort(numbers[which], axis=1)) > 0).all(axis=1))
            bits = (_DC << (used >> 4)) | (_AC << (used & 15))
            needed[which] |= np.bitwise_or.reduce(np.where((used >> 4 < 4) & (used & 15 < 4), bits, _NONE), axis=1)
            own = needed[which] & ~tables[which] == 0
            taken[which[sound[starts] & own & ordinary & (segment[starts, 4] == components[which])]] = True
            sound[starts] = False
        at = after
        if not sound.all():
            rows, at, last = rows[sound], at[sound], last[sound]
    return result


_SPECTRUM = np.array([0, 63, 0])
"""The last bytes of a baseline scan's header: it holds all coefficients at full precision."""
CODE_SHARES, ALL_CODES = 1 << np.arange(15, -1, -1), 1 << 16
"""The number of 16-bit codes that begin with a code of each length 1-16, and of all 16-bit codes. A valid table
must not use all of them."""
_SHARES_AND_ONES = np.column_stack([CODE_SHARES, np.ones(16)]).astype(np.float64)
DC_SYMBOLS = 16
"""The number of categories of DC differences. A table with other symbols is left to `probe`."""
_DC, _AC, _NONE = 1 << 4, 1 << 8, 1 << 12
"""Bits in a set of tables. Bits 0-3 are the quantisation tables; then come the first Huffman table for DC and the first
one for AC coefficients; the last bit stands for a table that no file has."""


def _quantisation_tables(
    data: NDArray[np.uint8], at: NDArray[np.int64], end: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Read DQT segments with bodies data[at : end]: the tables that each defines, as bits [M], and which are valid."""
    found = np.zeros(len(at), np.int64)
    for _ in range(_MAX_TABLES):
        more = at < end
        if not more.any():
            break
        number = data[np.where(more, at, 0)].astype(np.int64)
        found |= np.where(more & (number < 4), 1 << (number & 3), 0)
        at = np.where(more, np.where(number < 4, at + _QUANTISATION_BYTES, end + 1), at)
    return found, at == end


def _huffman_tables(
    data: NDArray[np.uint8], at: NDArray[np.int64], end: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Read DHT segments in the same way."""
    found = np.zeros(len(at), np.int64)
    for _ in range(_MAX_TABLES):
        more = at + 17 <= end
        if not more.any():
            break
        table = data[np.where(more, at, 0)[:, None] + np.arange(17)]
        kind, number = table[:, 0] >> 4, (table[:, 0] & 15).astype(np.int64)
        used, count = (table[:, 1:].astype(np.float64) @ _SHARES_AND_ONES).T
        known = more & (kind < 2) & (number < 4) & (used < ALL_CODES)
        if (dc := np.flatnonzero(known & (kind == 0))).size:
            symbols = data[at[dc, None] + 17 + np.arange(DC_SYMBOLS)]
            beyond = (symbols >= DC_SYMBOLS) & (np.arange(DC_SYMBOLS) < count[dc, None])
            known[dc] &= ~beyond.any(axis=1) & (count[dc] <= DC_SYMBOLS)
        found |= np.where(known, np.where(kind == 1, _AC, _DC) << (number & 3), 0)
        at = np.where(more, np.where(known, at + 17 + count.astype(np.int64), end + 1), at)
    return found, at == end


def _taken_by_engines(head: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which frame headers, [M, _STEP_BYTES] from their markers on, describe images that the engines decode."""
    gray = (head[:, 9] == 1) & (head[:, 11] == 0x11)
    rgb = (head[:, 10] == ord("R")) & (head[:, 13] == ord("G")) & (head[:, 16] == ord("B"))
    color = (head[:, 9] == 3) & _LUMA[head[:, 11]] & (head[:, 14] == 0x11) & (head[:, 17] == 0x11) & ~rgb
    sized = head[:, 5:7].any(axis=1) & (head[:, 7] << 8 | head[:, 8] >= ENGINE_WIDTH)
    sound: NDArray[np.bool_] = (head[:, 4] == 8) & sized & (gray | color)
    return sound
