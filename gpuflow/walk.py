"""The headers of a chunk's ordinary JPEGs at once, without a Python loop over their bytes.

A JPEG as cameras and libraries write it is a walk over about ten marker segments. Here all files of a chunk take each
step of that walk together, as arrays. Needs no decoder, so that a process that only reads starts fast.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpuflow.sources import Payload

__all__ = ["ENGINE_SAMPLINGS", "ENGINE_WIDTH", "Walked", "walk"]

ENGINE_SAMPLINGS = {(0x11,), *((first, 0x11, 0x11) for first in (0x11, 0x12, 0x21, 0x22))}
"""Factors, horizontal and vertical by component, of gray, 4:4:4, 4:4:0, 4:2:2 and 4:2:0."""
ENGINE_WIDTH = 5
"""The least width for the engines: where chroma is at most 2 samples wide, libjpeg-turbo repeats it (jdsample.c), while
nvJPEG interpolates."""

Walked = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""(sizes [N, 2], [N] true where a file is an ordinary baseline JPEG that the engines take)."""

_FEW = 32
"""So many files are left to `codecs.probe` at once: a walk takes as long as probing 40, however few there are."""
_LONGEST_WALK = 24
"""Marker segments before the scan; a file with more is left to `probe`."""
_LOOK = 20
"""Bytes from a marker on that a step looks at: a frame header of three components."""
_FRAME, _SCAN, _EXIF, _ADOBE = 0xC0, 0xDA, 0xE1, 0xEE
_ORDINARY = np.zeros(256, bool)
"""Markers of a baseline JPEG: tables, comments, application data, the frame and the scan."""
_ORDINARY[[0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0), _FRAME, _SCAN]] = True
_LUMA = np.zeros(256, bool)
"""Sampling factors of a first component that the engines take beside chroma of 1x1."""
_LUMA[[factors[0] for factors in ENGINE_SAMPLINGS if factors[1:] == (0x11, 0x11)]] = True


def walk(payload: Payload, *, orientation: bool) -> Walked:
    """The sizes of ordinary JPEGs; what is no such file, or one of few, is left to `probe`."""
    if len(payload) <= _FEW:
        return np.zeros((len(payload), 2), np.int64), np.zeros(len(payload), bool)
    data = payload.buffer
    begin = np.asarray(payload.offsets, np.int64)
    end = begin + np.asarray(payload.sizes, np.int64)
    sizes = np.zeros((len(begin), 2), np.int64)
    components = np.zeros(len(begin), np.int64)
    taken = np.zeros(len(begin), bool)
    rows = np.flatnonzero(end - begin > _LOOK)
    marks = data[begin[rows]], data[begin[rows] + 1], data[end[rows] - 2], data[end[rows] - 1]
    rows = rows[(marks[0] == 0xFF) & (marks[1] == 0xD8) & (marks[2] == 0xFF) & (marks[3] == 0xD9)]
    at, last = begin[rows] + 2, end[rows] - _LOOK
    for _ in range(_LONGEST_WALK):
        if (over := at > last).any():
            rows, at, last = rows[~over], at[~over], last[~over]
        if not len(rows):
            break
        segment = data[at[:, None] + np.arange(5)]  # FF, marker, two bytes of length, and a scan's components
        marker = segment[:, 1]
        sound = (segment[:, 0] == 0xFF) & _ORDINARY[marker]
        if orientation:
            sound &= marker != _EXIF
        if (adobe := marker == _ADOBE).any():
            sound &= ~adobe | (data[at + 15] != 0)  # 0 may be RGB
        if (frames := np.flatnonzero(marker == _FRAME)).size:
            which = rows[frames]
            head = data[at[frames, None] + np.arange(_LOOK)].astype(np.int64)
            sound[frames] &= _taken_by_engines(head) & (components[which] == 0)
            sizes[which] = head[:, [5, 7]] << 8 | head[:, [6, 8]]
            components[which] = head[:, 9]
        if (scans := marker == _SCAN).any():
            taken[rows[scans & sound & (segment[:, 4] == components[rows])]] = True
            sound &= ~scans
        at = at + 2 + (segment[:, 2].astype(np.int64) << 8 | segment[:, 3])
        if not sound.all():
            rows, at, last = rows[sound], at[sound], last[sound]
    return sizes, taken


def _taken_by_engines(head: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which frame headers, [M, _LOOK] from their markers on, are of a kind that the engines take."""
    gray = (head[:, 9] == 1) & (head[:, 11] == 0x11)
    rgb = (head[:, 10] == ord("R")) & (head[:, 13] == ord("G")) & (head[:, 16] == ord("B"))
    color = (head[:, 9] == 3) & _LUMA[head[:, 11]] & (head[:, 14] == 0x11) & (head[:, 17] == 0x11) & ~rgb
    sized = head[:, 5:7].any(axis=1) & (head[:, 7] << 8 | head[:, 8] >= ENGINE_WIDTH)
    sound: NDArray[np.bool_] = (head[:, 4] == 8) & sized & (gray | color)
    return sound
