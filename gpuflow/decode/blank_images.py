"""Blank JPEGs, which keep one image's pixels out of another on NVIDIA's JPEG engines.

Each engine decodes into memory of its own and stops where a file's data ends. Where a damaged file leaves pixels
unwritten, that memory still holds the image that the same engine decoded before, and nvJPEG copies it into the result
and reports success (measured in experiments/decoder_history). So a file that was never decoded completely is decoded
right behind a blank image of its size on the same engine: what it leaves unwritten is blank, and `kernels.unwritten`
finds it.

A call spreads its images over the engines in turn, and begins with the first one: image i and image i + `engines` are
decoded by the same one. How many engines there are differs from GPU to GPU; `NvjpegDecoder` finds out.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLANK_COLOR", "BLANK_LEVEL", "SIZE_STEP", "BlankLayout", "blank_jpeg", "interleave", "round_up"]

BLANK_LEVEL = 96
"""Of luma and of both chroma channels, so that every byte that an engine writes is the same, whatever its layout."""
BLANK_COLOR = (51, 130, 39)
"""What that is in RGB."""
SIZE_STEP = 32
"""Sides of blank images are multiples of it, so that few different ones are needed. In pixels."""


def blank_jpeg(height: int, width: int, sampling: int) -> bytes:
    """A baseline JPEG that is BLANK_LEVEL all over.

    sampling: factors of the first component, horizontal * 16 + vertical, beside chroma of 1x1; 0 for a gray image.
    """
    factors = [sampling, 0x11, 0x11] if sampling else [0x11]
    across, down = factors[0] >> 4, factors[0] & 15
    frame = struct.pack(">BHHB", 8, height, width, len(factors))
    frame += b"".join(bytes((number, factor, 0)) for number, factor in enumerate(factors, 1))
    scan = bytes((len(factors), *(byte for number in range(1, len(factors) + 1) for byte in (number, 0)), 0, 63, 0))
    dc = bytes((0x00, 1, 1, *[0] * 14, 0, 1))  # "0": as the block before; "10" and a sign: one step away from it
    ac = bytes((0x10, 1, *[0] * 15, 0))  # "0": no more coefficients
    segments = ((0xDB, bytes((0, *[255] * 64))), (0xC0, frame), (0xC4, dc), (0xC4, ac), (0xDA, scan))
    head = b"".join(struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data for marker, data in segments)
    # Each component's first block goes a step down, all others say the same again, with two bits each.
    luma_blocks = across * down if sampling else 1
    first_unit = "1000" + "00" * (luma_blocks - 1) + "1000" * (len(factors) - 1)
    start = int(first_unit.ljust(32, "0"), 2).to_bytes(4)
    units = -(-width // (8 * across)) * -(-height // (8 * down)) if sampling else -(-width // 8) * -(-height // 8)
    bits = units * 2 * (luma_blocks + len(factors) - 1) + 2 * len(factors)
    size = -(-bits // 8)
    return b"\xff\xd8" + head + start[:size].ljust(size, b"\0") + b"\xff\xd9"


def round_up(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sizes of blank images for images of these sizes, in pixels."""
    return -(-sizes // SIZE_STEP) * SIZE_STEP


class BlankLayout(NamedTuple):
    """Which image of a call stands where. total: of photographs and blanks. photographs [n]: their places.
    blanks [m]: the places of blanks. shapes [m]: for each blank the photograph whose size it has."""

    total: int
    photographs: NDArray[np.int64]
    blanks: NDArray[np.int64]
    shapes: NDArray[np.int64]


def interleave(count: int, engines: int) -> BlankLayout:
    """Places in one call for `count` photographs, each with a blank right before it on the same one of the engines."""
    photographs = np.arange(count)
    rounds = -(-count // engines)
    blanks = np.arange(rounds * engines)
    return BlankLayout(
        count + len(blanks),
        photographs + (photographs // engines + 1) * engines,
        blanks + blanks // engines * engines,
        np.minimum(blanks, count - 1),
    )
