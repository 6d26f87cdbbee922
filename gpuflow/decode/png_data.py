"""The chunks of PNG files, and whether a file's compressed data are far more than its pixels."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from itertools import dropwhile, takewhile

from gpuflow.arrays import Bytes

_UNCHECKED_BYTES = 4 << 20
"""A file of at most this size is not inflated here: its data have at most 4 GB, for which libpng needs about 9 s. For a
larger one of 6.5 megapixels the check takes 0.08 s and decoding 0.18 s (one core of an AMD EPYC)."""
_PIECE, _STEP = 1 << 16, 1 << 20
"""The most bytes that are inflated in one call, and that this may give."""
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Of each color type."""


def png_chunks(view: memoryview) -> Iterator[tuple[bytes, int, int]]:
    """The name of each chunk, where its content begins, and the length of the content, which may be cut off."""
    at = 8
    while at + 8 <= len(view):
        length, name = struct.unpack_from(">I4s", view, at)
        yield name, at + 8, length
        at += 12 + length


def has_too_much_data(data: Bytes) -> bool:
    """Whether the first data stream of a PNG that passed `probe` has over twice the bytes of its pixels, and 1 MB.

    libpng inflates what is left of a stream after the last pixel, so a small image could keep it busy for minutes.
    """
    if len(data) <= _UNCHECKED_BYTES:
        return False
    view = data.data
    width, height, bits, kind = struct.unpack_from(">IIBB", view, 16)
    row = 1 + -(-width * bits * _CHANNELS.get(kind, 4) // 8)
    left, stream = 2 * row * height + _STEP, zlib.decompressobj()
    try:
        for piece in _pieces(view):
            rest: memoryview | bytes = piece
            while rest and not stream.eof:
                left -= len(stream.decompress(rest, _STEP))
                if left < 0:
                    return True
                rest = stream.unconsumed_tail
    except zlib.error:  # damaged: the decoder says so
        return False
    return False


def _pieces(view: memoryview) -> Iterator[memoryview]:
    """The compressed data: the content of the first IDAT chunks."""
    later = dropwhile(lambda chunk: chunk[0] != b"IDAT", png_chunks(view))
    for _, begin, length in takewhile(lambda chunk: chunk[0] == b"IDAT", later):
        for start in range(begin, begin + length, _PIECE):
            yield view[start : min(start + _PIECE, begin + length)]
