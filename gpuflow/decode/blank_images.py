"""Makes blank JPEGs and places them in nvJPEG calls, so that no image shows pixels of another image.

Each of NVIDIA's JPEG engines decodes into its own memory and stops where a file's data ends. If a damaged file leaves
pixels unwritten, that memory still holds the image that the same engine decoded before, and nvJPEG copies it into the
result and reports success (measured in experiments/decoder_history). So without
libjpeg-turbo, which finds damaged files beforehand, each file is decoded right after a blank image of its size on the
same engine: its unwritten pixels are then blank, and `kernels.unwritten` finds them.

A call assigns its images to the engines in turn, starting with the first engine: one engine decodes image i and image
i + `engines`. The number of engines differs between GPUs; `NvjpegDecoder` measures it.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLANK_COLOR", "BLANK_LEVEL", "SIZE_STEP", "BlankLayout", "blank_jpeg", "interleave", "round_up"]

BLANK_LEVEL = 96
"""The level of luma and both chroma channels. With one level, an engine writes the same byte in any memory layout."""
BLANK_COLOR = (51, 130, 39)
"""The same colour in RGB."""
SIZE_STEP = 32
"""Sides of blank images are multiples of this number of pixels, so that few different sizes are needed."""


def blank_jpeg(height: int, width: int, sampling: int) -> bytes:
    """A baseline JPEG whose luma and chroma are BLANK_LEVEL everywhere.

    sampling: horizontal * 16 + vertical factor of the first component, where chroma is 1x1; 0 for a gray image.
    """
    factors = [sampling, 0x11, 0x11] if sampling else [0x11]
    across, down = factors[0] >> 4, factors[0] & 15
    frame = struct.pack(">BHHB", 8, height, width, len(factors))
    frame += b"".join(bytes((number, factor, 0)) for number, factor in enumerate(factors, 1))
    scan = bytes((len(factors), *(byte for number in range(1, len(factors) + 1) for byte in (number, 0)), 0, 63, 0))
    dc = bytes((0x00, 1, 1, *[0] * 14, 0, 1))  # "0": equal to the previous block; "10" and a sign: one step from it
    ac = bytes((0x10, 1, *[0] * 15, 0))  # "0": no more coefficients
    segments = ((0xDB, bytes((0, *[255] * 64))), (0xC0, frame), (0xC4, dc), (0xC4, ac), (0xDA, scan))
    head = b"".join(struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data for marker, data in segments)
    # Each component's first block goes one step down; every other block repeats that level, with two bits each.
    luma_blocks = across * down if sampling else 1
    first_unit = "1000" + "00" * (luma_blocks - 1) + "1000" * (len(factors) - 1)
    start = int(first_unit.ljust(32, "0"), 2).to_bytes(4)
    units = -(-width // (8 * across)) * -(-height // (8 * down)) if sampling else -(-width // 8) * -(-height // 8)
    bits = units * 2 * (luma_blocks + len(factors) - 1) + 2 * len(factors)
    size = -(-bits // 8)
    return b"\xff\xd8" + head + start[:size].ljust(size, b"\0") + b"\xff\xd9"


def round_up(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sizes of blank images for images of these sizes, in pixels."""
    return -(-sizes // SIZE_STEP) * SIZE_STEP


class BlankLayout(NamedTuple):
    """The places of photographs and blank images in one call.

    total: the number of all images. photographs [n]: the photographs' places. blanks [m]: the blank images' places.
    shapes [m]: for each blank image, the index of the photograph whose size it has.
    """

    total: int
    photographs: NDArray[np.int64]
    blanks: NDArray[np.int64]
    shapes: NDArray[np.int64]


def interleave(count: int, engines: int) -> BlankLayout:
    """Place `count` photographs in one call so that each follows a blank image on the same engine."""
    photographs = np.arange(count)
    rounds = -(-count // engines)
    blanks = np.arange(rounds * engines)
    return BlankLayout(
        count + len(blanks),
        photographs + (photographs // engines + 1) * engines,
        blanks + blanks // engines * engines,
        np.minimum(blanks, count - 1),
    )
