"""Reads the header of a JPEG one segment after the other: what native/header_scan.c is compared with."""

from __future__ import annotations

import numpy as np

from gpuflow.arrays import Bytes
from gpuflow.decode.codecs import Header, _segments

_ENGINE_SAMPLINGS = {(0x11,), *((first, 0x11, 0x11) for first in (0x11, 0x12, 0x21, 0x22))}
"""Sampling factors of each component, horizontal * 16 + vertical: gray, 4:4:4, 4:4:0, 4:2:2 and 4:2:0."""
_ENGINE_WIDTH = 5
"""The smallest width for the engines: if chroma is at most 2 samples wide, libjpeg-turbo repeats it (jdsample.c), but
nvJPEG interpolates."""
_BASELINE, _HUFFMAN, _QUANTISATION, _RESTART_INTERVAL = 0xC0, 0xC4, 0xDB, 0xDD
_ORDINARY = np.zeros(256, bool)
"""[256] true for the markers of a baseline JPEG: tables, comments, application data, the frame and the scan."""
_ORDINARY[[_BASELINE, _HUFFMAN, 0xDA, _QUANTISATION, _RESTART_INTERVAL, 0xFE, *range(0xE0, 0xF0)]] = True
_CODE_SHARES, _ALL_CODES = 1 << np.arange(15, -1, -1), 1 << 16
"""The number of 16-bit codes that begin with a code of each length 1-16, and of all 16-bit codes. A valid table
must not use all of them."""
_DC_SYMBOLS = 16
"""The number of categories of DC differences."""


def reference_sampling(data: Bytes, header: Header) -> int | None:
    """Return a file's chroma sampling if NVIDIA's JPEG engines may decode it; its header passed `probe`.

    They decode only files for which they certainly give the CPU's pixels, within one level: one baseline scan, gray or
    YCbCr, with a common subsampling, not too narrow, with all the tables that it uses and no segment that libjpeg
    refuses.

    Returns:
        Factors of the first component, horizontal * 16 + vertical; 0 for a gray image; None if the engines may not
        decode the file.
    """
    if header.format != "jpeg" or header.progressive or header.width < _ENGINE_WIDTH:
        return None
    view, channels = data.data, header.channels
    tables = {marker: set[int]() for marker in _TABLE_READERS}
    frame, body, end = None, view[:0], 2
    for marker, at, length in _segments(view):
        if bytes(view[end:at]).strip(b"\xff"):
            return None  # stray bytes, which libjpeg skips with a warning
        end = at + 2 + length
        body = view[at + 4 : end]
        if not _ORDINARY[marker] or (marker == _RESTART_INTERVAL and length != 4):
            return None
        if marker == _BASELINE:
            if frame is not None:
                return None
            frame = body
        elif marker in tables:
            defined = _TABLE_READERS[marker](body)
            if defined is None:
                return None
            tables[marker] |= defined
        elif marker == 0xEE and bytes(body[:5]) == b"Adobe" and not any(body[11:12]) and channels != 1:
            return None  # transform 0, or none, may mean RGB
    scan = body
    if frame is None or len(frame) != 6 + 3 * channels or len(scan) != 4 + 2 * channels:
        return None
    numbers, sampling, quantisation = (frame[6 + offset :: 3].tolist() for offset in range(3))
    if len(set(numbers)) < channels or bytes(numbers) == b"RGB" or tuple(sampling) not in _ENGINE_SAMPLINGS:
        return None
    # The scan must hold all coefficients of all components.
    if scan[0] != channels or scan[1:-3:2].tolist() != numbers or bytes(scan[-3:]) != b"\0\x3f\0":
        return None
    huffman = {table for both in scan[2:-3:2] for table in (both >> 4, both & 15 | 16)}
    if not (set(quantisation) <= tables[_QUANTISATION] and huffman <= tables[_HUFFMAN]):
        return None
    return sampling[0] if channels == 3 else 0


def scan_start(data: Bytes) -> tuple[int, int]:
    """Return where a JPEG's first compressed data begin, in bytes, and its restart interval in coded units.

    The header must have passed `probe`. An interval of 0 means that there are no restart markers.
    """
    interval = end = 0
    for marker, at, length in _segments(data.data):
        end = at + 2 + length
        if marker == _RESTART_INTERVAL:
            interval = int.from_bytes(data[at + 4 : at + 6])
    return end, interval


_TABLES = 4
"""Of each kind, numbered from 0."""


def _quantisation_tables(body: memoryview) -> set[int] | None:
    """Return the numbers of a DQT segment's 8-bit tables; None for a segment that libjpeg refuses.

    The engines may not decode files that need 16-bit tables.
    """
    found, at = set[int](), 0
    while at < len(body):
        wide, number = divmod(body[at], 16)
        at += 1 + (128 if wide else 64)
        if number >= _TABLES:
            return None
        if not wide:
            found.add(number)
    return found if at == len(body) else None


def _huffman_tables(body: memoryview) -> set[int] | None:
    """Return the numbers of a DHT segment's valid tables, 16 more for AC tables; None if libjpeg refuses it."""
    found, at = set[int](), 0
    while at + 17 <= len(body):
        number, counts = body[at], body[at + 1 : at + 17]
        symbols = body[at + 17 : at + 17 + sum(counts)]
        at += 17 + sum(counts)
        if number & 15 >= _TABLES or number >> 4 > 1 or sum(counts) > 256:
            return None
        used = sum(count * share for count, share in zip(counts, _CODE_SHARES.tolist(), strict=True))
        if used < _ALL_CODES and (number >= 16 or max(symbols, default=0) < _DC_SYMBOLS):
            found.add(number)
        else:
            found.discard(number)
    return found if at == len(body) else None


_TABLE_READERS = {_QUANTISATION: _quantisation_tables, _HUFFMAN: _huffman_tables}
