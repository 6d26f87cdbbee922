"""Reads the headers and chunks of PNG files, and reads and decodes Netpbm's files: binary PGM (P5) and PPM (P6)."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from itertools import dropwhile, islice, takewhile

import numpy as np

from gpuflow.arrays import Bytes
from gpuflow.decode.header import ANIMATION, UNSUPPORTED, Header, refuse, tiff_orientation

_UNCHECKED_BYTES = 4 << 20
"""A file of at most this size is not inflated here: its data have at most 4 GB, for which libpng needs about 9 s. For a
larger one of 6.5 megapixels the check takes 0.08 s and decoding 0.18 s (one core of an AMD EPYC)."""
_PIECE, _STEP = 1 << 16, 1 << 20
"""The most bytes that are inflated in one call, and that this may give."""
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Number of channels by color type."""
_PALETTE, _ALPHA = 3, 4
"""The color type of pixels that are numbers of a palette's colors, and the first one with an alpha channel."""
MAGIC = b"\x89PNG\r\n\x1a\n"
_FIRST_CHUNK = len(MAGIC)
MAX_CHUNKS, _MAX_OTHER_CHUNKS = 200_000, 1_000
"""The largest number of chunks of a PNG or WebP, and of a PNG's chunks without pixels. A file with more is bad: reading
it would only take time, and libpng writes a line to stderr for each chunk that it does not like."""
_MAX_TEXTS = 16
"""The largest number of a PNG's chunks of compressed text: libpng inflates each, to 8 MB at most, which takes 60 ms."""


def png_chunks(view: memoryview) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name of each chunk, where its content begins, and the length of the content, which may be cut off."""
    at = _FIRST_CHUNK
    while at + 8 <= len(view):
        length, name = struct.unpack_from(">I4s", view, at)
        yield name, at + 8, length
        at += 12 + length


def read_png(view: memoryview, orientation: bool, max_scans: int) -> Header:
    """Return the header, and check that the file has all chunks. See `optional_formats.Reader`."""
    width, height, bits, kind = struct.unpack_from(">IIBB", view, 16)
    alpha = kind >= _ALPHA
    turn = 1
    at = _FIRST_CHUNK
    name = b""
    ended = False
    others = 0
    texts = 0
    for _ in range(MAX_CHUNKS):
        previous = name
        length, name = struct.unpack_from(">I4s", view, at) if at + 8 <= len(view) else (0, b"")
        if at + 12 + length > len(view):  # OpenCV would allocate and fill up to 2 GiB for the chunk
            refuse(f"truncated: no IEND chunk at the end of {len(view)} bytes")
        if name == b"IEND":
            break
        if name == b"acTL":
            refuse(ANIMATION, UNSUPPORTED)
        ended = ended or (previous == b"IDAT" and name != b"IDAT")  # libpng reads pixels only from the first IDATs
        others += ended or name != b"IDAT"
        if others > _MAX_OTHER_CHUNKS:
            refuse(f"more than {_MAX_OTHER_CHUNKS:,} chunks without pixels")
        texts += name in (b"zTXt", b"iTXt") and _is_compressed(name, view[at + 8 : at + 8 + length])
        if texts > _MAX_TEXTS:
            refuse(f"more than {_MAX_TEXTS} chunks of compressed text")
        alpha = alpha or name == b"tRNS"
        if name == b"eXIf" and orientation:
            turn = tiff_orientation(view[at + 8 : at + 8 + length])
        at += 12 + length
    else:
        refuse(f"more than {MAX_CHUNKS:,} chunks")
    channels = 3 if kind == _PALETTE else _CHANNELS.get(kind, 3)
    return Header("png16" if bits == 16 else "png", width, height, channels, orientation=turn, alpha=alpha)


def _is_compressed(name: bytes, text: memoryview) -> bool:
    """Return True if a chunk of text is compressed: in an iTXt, the byte behind its keyword says so."""
    if name == b"zTXt":
        return True
    _, _, rest = bytes(text[:82]).partition(b"\0")
    return rest[:1] != b"\0"


def check_animation(data: Bytes) -> None:
    """Raise BadSampleError if these bytes are an animated PNG. Checks nothing else."""
    view = data.data
    if bytes(view[:_FIRST_CHUNK]) == MAGIC and any(
        name == b"acTL" for name, _, _ in islice(png_chunks(view), MAX_CHUNKS)
    ):
        refuse(ANIMATION, UNSUPPORTED)


def transparent_level(view: memoryview) -> int:
    """Return the level that the chunk tRNS of a gray PNG makes transparent; -1 if there is none.

    It has as many bits as the pixels, 8 at least.
    """
    bits = view[24]
    for name, at, length in png_chunks(view):
        if name == b"tRNS" and length >= 2:
            (level,) = struct.unpack_from(">H", view, at)
            return int(level * (255 // ((1 << bits) - 1) if bits < 8 else 1))
    return -1


def has_too_much_data(data: Bytes) -> bool:
    """Return True if the first data stream of a PNG that passed `probe` is far larger than its pixels need.

    That is more than twice the bytes of the pixels, and 1 MB.

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
    """Yield the compressed data: the content of the first IDAT chunks."""
    later = dropwhile(lambda chunk: chunk[0] != b"IDAT", png_chunks(view))
    for _, begin, length in takewhile(lambda chunk: chunk[0] == b"IDAT", later):
        for start in range(begin, begin + length, _PIECE):
            yield view[start : min(start + _PIECE, begin + length)]


# --- Netpbm -----------------------------------------------------------------------------------------------------------

_GAP = rb"(?:[ \t-\r]|#[^\n\r]*[\n\r])+"
_HEADER = re.compile(rb"P([56])%b(\d{1,9})%b(\d{1,9})%b(\d{1,9})[ \t-\r]" % ((_GAP,) * 3))
_LONGEST_HEADER = 1 << 16
_GRAY, _COLORED = 5, 6
_FULL = 255


def is_pnm(magic: bytes) -> bool:
    """Return True if a file that begins so is a PBM, PGM or PPM."""
    return re.match(rb"P[1-6][ \t-\r#]", magic) is not None


def read_pnm(view: memoryview, orientation: bool, max_scans: int) -> Header:
    """Return the header, and check that the file holds all pixels. See `optional_formats.Reader`."""
    if view[1] - ord("0") not in (_GRAY, _COLORED):
        refuse("a bitmap or plain text; gpuflow decodes PNM of the kinds P5 and P6, so convert this one", UNSUPPORTED)
    channels, width, height, top, start = _numbers(view)
    if top > _FULL:
        refuse(f"levels of 0 to {top} in 16 bits; gpuflow decodes images of 8 bits, so convert this one", UNSUPPORTED)
    if not top:
        refuse("damaged header: the highest level is 0")
    if start + width * height * channels > len(view):
        refuse(f"truncated: {width}x{height} pixels end after the file's {len(view)} bytes")
    return Header("pnm", width, height, channels)


def decode_pnm(data: Bytes, header: Header) -> Bytes:
    """Return the pixels of a file whose header passed `read_pnm`, gray or RGB: uint8 [H, W, C]. Raises BadSampleError.

    Other highest levels than 255 become 255, and all levels in proportion, rounded, as Pillow has them.

    Examples:
        >>> data = np.frombuffer(b"P5 2 1 255 \\0\\xff", np.uint8)
        >>> decode_pnm(data, read_pnm(data.data, False, 1)).tolist()
        [[[0], [255]]]
    """
    channels, width, height, top, start = _numbers(data.data)
    levels = data[start : start + height * width * channels]
    if (highest := levels.max()) > top:
        refuse(f"damaged data: levels of 0 to {top} by its header, got {highest}")
    scaled = np.rint(np.arange(top + 1) / top * _FULL).astype(np.uint8)
    return np.take(scaled, levels).reshape(height, width, channels)


def _numbers(view: memoryview) -> tuple[int, int, int, int, int]:
    """Return the number of channels, the width, height and highest level, and where the pixels begin."""
    found = _HEADER.match(view[:_LONGEST_HEADER])
    if found is None:
        refuse("damaged header: it must have the width, the height and the highest level")
    kind, width, height, top = map(int, found.groups())
    return 3 if kind == _COLORED else 1, width, height, top, found.end()
