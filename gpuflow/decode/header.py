"""The header of an image file: its values, the memory that decoding needs, and how an EXIF orientation is applied.

Constants that several decoders share, and the image that they are tested on, are here, too.
"""

from __future__ import annotations

import base64
import struct
from dataclasses import dataclass
from typing import NoReturn

import cv2
import numpy as np

from gpuflow.arrays import Bytes
from gpuflow.errors import BadSampleError, Code

SWAPPED = 5
"""EXIF orientations from this value on rotate the image by 90 degrees, so they swap height and width."""
FLIPPED_Y, FLIPPED_X = (3, 4, 7, 8), (2, 3, 6, 7)
"""EXIF orientations whose rows, and whose columns, are in reverse order, after height and width are swapped."""
_INVERSE = {6: 8, 8: 6}
"""EXIF orientations that are not their own inverse."""
_DECODING_BYTES = 8
"""The largest number of bytes for each pixel while a file other than a JPEG is decoded: 4 channels of 16 bits."""
_JPEG_BYTES, _COEFFICIENT_BYTES = 3, 2
"""The same for a JPEG: 3 channels, and for each component all coefficients, which files of several scans need."""
OPENCV_FLAGS = {"rgb": cv2.IMREAD_COLOR_RGB, "bgr": cv2.IMREAD_COLOR_BGR, "gray": cv2.IMREAD_GRAYSCALE}
"""OpenCV's flag for each `color` of the stage `decode`."""
ANIMATION = "an animation; gpuflow decodes still images"
UNSUPPORTED: Code = "sample.unsupported"


@dataclass(frozen=True, slots=True)
class Header:
    """The header of an image file.

    format: `jpeg`, `png`, `webp`, `bmp` or a name of `decode.formats`, by content. width, height: pixels as stored.
    channels: components in the file. progressive: true for a JPEG that is neither baseline nor extended sequential with
    Huffman codes. orientation: as EXIF counts them, 1 to 8; 1 if the file says nothing, or it was not read. alpha:
    whether the file may hold transparent pixels. turned: the orientation that the format's own decoder applies in any
    case.

    Examples:
        >>> header = Header("jpeg", width=64, height=48, channels=3, orientation=6)
        >>> header.size, header.upright_size
        ((48, 64), (64, 48))
    """

    format: str
    width: int
    height: int
    channels: int
    progressive: bool = False
    orientation: int = 1
    alpha: bool = False
    turned: int = 1

    @property
    def size(self) -> tuple[int, int]:
        """Return (height, width) as stored."""
        return self.height, self.width

    @property
    def upright_size(self) -> tuple[int, int]:
        """Return (height, width) after the orientation is applied."""
        return self._size_after(self.orientation)

    @property
    def decoded_size(self) -> tuple[int, int]:
        """Return (height, width) as the format's own decoder gives the image."""
        return self._size_after(self.turned)

    def _size_after(self, orientation: int) -> tuple[int, int]:
        return (self.width, self.height) if orientation >= SWAPPED else (self.height, self.width)


def refuse(reason: str, code: Code = "sample.bad") -> NoReturn:
    """Raise BadSampleError of the stage `decode`."""
    raise BadSampleError("decode", reason, code)


def require_memory(header: Header) -> None:
    """Raise MemoryError if there is not enough memory to decode an image.

    Call it before refusing a file that a decoder failed on: most decoders report a lack of memory as any other failure.
    """
    pixels, size = header.width * header.height, _DECODING_BYTES
    if header.format == "jpeg":
        size = _JPEG_BYTES + _COEFFICIENT_BYTES * header.channels
    try:
        np.empty(pixels * size, np.uint8)
    except MemoryError:
        raise MemoryError(f"not enough memory to decode an image of {pixels:,} pixels") from None


def upright(image: Bytes, orientation: int) -> Bytes:
    """Apply an EXIF orientation (JEITA CP-3451, tag 0x0112) to an HWC image.

    The result has no negative strides, which torch refuses, also where a flipped side has a single pixel.

    Examples:
        >>> upright(np.zeros((48, 64, 3), np.uint8), orientation=6).shape
        (64, 48, 3)
    """
    if orientation == 1:
        return np.ascontiguousarray(image)
    if orientation >= SWAPPED:
        image = image.transpose(1, 0, 2)
    if orientation in FLIPPED_Y:
        image = image[::-1]
    if orientation in FLIPPED_X:
        image = image[:, ::-1]
    return image.copy()  # np.ascontiguousarray keeps the stride of a side of one pixel


def stored(image: Bytes, orientation: int) -> Bytes:
    """Undo `upright`."""
    return upright(image, _INVERSE.get(orientation, orientation))


def tiff_orientation(block: memoryview) -> int:
    """Return the orientation tag (0x0112) of a TIFF block in EXIF data; 1 if it is absent or malformed.

    PNG and WebP embed the block without JPEG's prefix, but some programs write the prefix there too.
    """
    block = block[6:] if bytes(block[:6]) == b"Exif\0\0" else block
    try:
        order = {b"II": "<", b"MM": ">"}[bytes(block[:2])]
        (start,) = struct.unpack_from(order + "I", block, 4)
        (count,) = struct.unpack_from(order + "H", block, start)
        for at in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind = struct.unpack_from(order + "HH", block, at)
            if tag == 0x0112 and kind in _INTEGERS:
                (value,) = struct.unpack_from(order + _INTEGERS[kind], block, at + 8)
                return int(value) if 1 <= value <= 8 else 1
    except (KeyError, struct.error):
        return 1
    return 1


_INTEGERS = {3: "H", 4: "I", 6: "b", 8: "h", 9: "i"}
"""The types of an orientation in EXIF data, as struct has them: SHORT, by the standard, and LONG, SBYTE, SSHORT and
SLONG, which Pillow and OpenCV take too."""


# --- the test image ---------------------------------------------------------------------------------------------------

TEST_HEIGHT, TEST_WIDTH, TEST_SAMPLING = 48, 64, 0x22
TEST_JPEG = np.frombuffer(
    base64.b64decode(
        "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDABcQERQRDhcUEhQaGBcbIjklIh8fIkYyNSk5UkhXVVFIUE5bZoNvW2F8Yk5QcptzfIeLkpSSWG2grJ+O"
        "qoOPko3/2wBDARgaGiIeIkMlJUONXlBejY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY2NjY3/wAARCAAwAEAD"
        "ASIAAhEBAxEB/8QAGQAAAgMBAAAAAAAAAAAAAAAAAwQAAQIF/8QAJRAAAwEAAQEIAwEAAAAAAAAAAAECAwQREhMhMWFxobEUQlKB/8QAGgEAAwAD"
        "AQAAAAAAAAAAAAAAAwQFAAECBv/EAB0RAQADAQADAQEAAAAAAAAAAAEAAgMRBBIxIXH/2gAMAwEAAhEDEQA/AOpFIKrRzp2NPf1OjLkNXFCO1ohf"
        "TVCmnJ9Rd71ddmfFs215FdqcjV6oz3iFXOz/AE+UWo2/n5QC52IetV+x2KQeKRzVo5rpXg0HjYUtmrKeGH52AVMxWjDPNgdIZZtclO1gIvpoyuJb"
        "fLhe/wBE0hk4kNcuH7/QG1xJM8i41Z0yEILyLE9m/wAiv8+i5bC3l2tWy+6YWlRnqfGQyr/CP1kL6ZD1tC2jQk6rJ+uqRG8jM5Oa6z4MafQkpGFl"
        "k62isHM6Pzr4Dxi35hM5Q1EoKLGMq1fpF54/oaeI2kjFNBqqR109a8J//9k="
    ),
    np.uint8,
)
"""A baseline JPEG, 4:2:0, with waves and an edge. A decoder that refuses many files in a row is tested on it."""
