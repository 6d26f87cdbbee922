"""Reads and decodes Netpbm's files: PBM, PGM and PPM, binary (P4, P5, P6) and plain (P1, P2, P3)."""

from __future__ import annotations

import re

import numpy as np

from gpuflow.arrays import Array, Bytes, Floats
from gpuflow.decode.header import UNSUPPORTED, Header, refuse

_GAP = rb"(?:[ \t-\r]|#[^\n\r]*[\n\r])+"
_HEADER = re.compile(
    rb"P(?:([14])%b(\d{1,9})%b(\d{1,9})|([2356])%b(\d{1,9})%b(\d{1,9})%b(\d{1,9}))[ \t-\r]" % ((_GAP,) * 5)
)
_LONGEST_HEADER = 1 << 16
_COMMENT, _OTHER = re.compile(rb"#[^\n\r]*"), re.compile(rb"[^0-9 \t-\r]")
_BITS, _PLAIN, _COLORED = (1, 4), (1, 2, 3), (3, 6)
_FULL = 255


def is_pnm(magic: bytes) -> bool:
    """Return True if a file that begins so is a PBM, PGM or PPM."""
    return re.match(rb"P[1-6][ \t-\r#]", magic) is not None


def read_pnm(view: memoryview, orientation: bool, max_scans: int) -> Header:
    """Return the header, and check that a binary file holds all pixels. See `optional_headers.Reader`."""
    kind, width, height, top, start = _numbers(view)
    if top > _FULL:
        refuse(f"levels of 0 to {top} in 16 bits; gpuflow decodes images of 8 bits, so convert this one", UNSUPPORTED)
    if not top:
        refuse("damaged header: the highest level is 0")
    channels = 3 if kind in _COLORED else 1
    need = 2 * width * height * channels - 1 if kind in _PLAIN else _row_bytes(kind, width, channels) * height
    if start + (need if kind != 1 else width * height) > len(view):
        refuse(f"truncated: {width}x{height} pixels end after the file's {len(view)} bytes")
    return Header("pnm", width, height, channels)


def decode_pnm(data: Bytes, header: Header) -> Bytes:
    """Return the pixels of a file whose header passed `read_pnm`, gray or RGB: uint8 [H, W, C]. Raises BadSampleError.

    Other highest levels than 255 become 255, and all levels in proportion, rounded, as Pillow has them.
    """
    kind, width, height, top, start = _numbers(data.data)
    shape, count = (height, width, header.channels), height * width * header.channels
    if kind in _PLAIN:
        levels: Array = _plain(_COMMENT.sub(b"", data[start:].tobytes()), kind)[:count]
        if len(levels) < count:
            refuse(f"truncated: {len(levels):,} of {count:,} levels")
    else:
        rows = data[start : start + _row_bytes(kind, width, header.channels) * height].reshape(height, -1)
        levels = np.unpackbits(rows, axis=1, count=width) if kind in _BITS else rows
    if (highest := levels.max()) > top:
        refuse(f"damaged data: levels of 0 to {top} by its header, got {highest:g}")
    if kind in _BITS:
        levels = 1 - levels
    scaled = np.rint(np.arange(top + 1) / top * _FULL).astype(np.uint8)
    return np.take(scaled, levels.astype(np.uint8)).reshape(shape)


def _numbers(view: memoryview) -> tuple[int, int, int, int, int]:
    """Return the kind (1 to 6), width, height and highest level, and where the pixels begin."""
    found = _HEADER.match(view[:_LONGEST_HEADER])
    if found is None:
        refuse("damaged header: it must have the width, the height and the highest level")
    kind, width, height, *top = (int(number) for number in found.groups() if number is not None)
    return kind, width, height, top[0] if top else 1, found.end()


def _row_bytes(kind: int, width: int, channels: int) -> int:
    """Return the number of bytes of a row in a binary file."""
    return -(-width // 8) if kind in _BITS else width * channels


def _plain(text: bytes, kind: int) -> Floats:
    """Return the numbers of plain text. The bits of a PBM need no spaces between them."""
    if (other := _OTHER.search(text)) is not None:
        refuse(f"damaged data: {other.group()!r} among the levels")
    if kind in _BITS:
        digits = np.frombuffer(text, np.uint8)
        return digits[digits >= ord("0")] - np.float64(ord("0"))
    return np.fromstring(text, np.float64, sep=" ")
