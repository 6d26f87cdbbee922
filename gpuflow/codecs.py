"""Encoded bytes to pixels on the CPU: the header first, then the decoder.

Whether a sample is bad is a property of its bytes and is decided here: header, size, format, end marker, then the
decoder itself. Damage to the entropy-coded data that libjpeg decodes without complaint cannot be detected.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NoReturn

import cv2
import numpy as np
from numpy.typing import NDArray

from gpuflow.errors import BadSampleError
from gpuflow.turbojpeg import Library, TurboJpeg, find_library
from gpuflow.walk import ENGINE_SAMPLINGS, ENGINE_WIDTH

__all__ = ["CpuDecoder", "Header", "decoder_description", "probe"]

_REGION_WORTH = 0.9
"""Decode only a region where it is at most this part of the image."""
_SWAPPED = 5
"""From this EXIF orientation on, the image is turned by a quarter."""
_BMP_CORE = 12
"""Size in bytes of OS/2's BMP header, whose sides are of 16 bits."""


@dataclass(frozen=True, slots=True)
class Header:
    """What an image's header says.

    format: `jpeg`, `png`, `webp` or `bmp`, by content. width, height: pixels as stored. channels: components in the
    file. progressive: a JPEG in several scans. orientation: the EXIF tag, 1 to 8, 1 where there is none.
    engine: a JPEG for NVIDIA's JPEG engines: one baseline scan, gray or YCbCr, of a common subsampling, not too narrow.
    """

    format: str
    width: int
    height: int
    channels: int
    progressive: bool = False
    orientation: int = 1
    engine: bool = False

    @property
    def upright_size(self) -> tuple[int, int]:
        """(height, width) once the orientation is applied."""
        return (self.width, self.height) if self.orientation >= _SWAPPED else (self.height, self.width)


def _bad(reason: str) -> NoReturn:
    raise BadSampleError("decode", reason)


def probe(data: NDArray[np.uint8], *, max_pixels: int = 179_000_000, orientation: bool = False) -> Header:
    """Read and check an image's header and its end marker; nothing is decoded.

    Args:
        data: the encoded bytes, uint8 [n].
        max_pixels: the largest width * height that passes.
        orientation: look for the EXIF orientation too.

    Raises:
        BadSampleError: the bytes are empty, of an unknown format, cut short, too large, or deeper than 8 bits.
    """
    view = data.data
    if len(view) == 0:
        _bad("empty: the file has no bytes")
    magic = bytes(view[:12])
    read = next((reader for test, reader in _READERS if test(magic)), None)
    if read is None:
        _bad(_unknown_format(magic))
    try:
        header = read(view, orientation)
    except (struct.error, IndexError):
        _bad(f"truncated: the header breaks off after {len(view)} bytes")
    if header.width < 1 or header.height < 1:
        _bad(f"the header gives a size of {header.width}x{header.height} pixels")
    if (pixels := header.width * header.height) > max_pixels:
        _bad(f"{header.width}x{header.height} = {pixels:,} pixels are more than max_pixels = {max_pixels:,}")
    return header


def _unknown_format(magic: bytes) -> str:
    known = {b"GIF8": "GIF", b"II*\0": "TIFF", b"MM\0*": "TIFF", b"%PDF": "PDF", b"8BPS": "PSD", b"P6": "PPM"}
    for start, name in known.items():
        if magic.startswith(start):
            return f"{name} is not supported; gpuflow decodes JPEG, PNG, WebP and BMP"
    if magic[4:8] == b"ftyp":
        return "AVIF/HEIF is not supported; gpuflow decodes JPEG, PNG, WebP and BMP"
    return f"not an image: begins with {magic[:4].hex(' ')}; gpuflow decodes JPEG, PNG, WebP and BMP"


def _read_jpeg(view: memoryview, orientation: bool) -> Header:
    """ITU-T T.81, annex B: walk the marker segments up to the first scan."""
    at, frame, turn = 2, None, 1
    sampling: tuple[int, ...] = ()
    ycbcr = True
    while True:
        if view[at] != 0xFF:
            _bad(f"damaged header: byte {at} should begin a marker but is {view[at]:#04x}")
        marker = view[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        if marker == 0xDA:
            break
        if marker == 0xD9:
            _bad("damaged header: the image ends before its first scan")
        (length,) = struct.unpack_from(">H", view, at + 2)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            frame = (marker, *struct.unpack_from(">BHHB", view, at + 4))
            sampling = tuple(view[at + 11 : at + 10 + 3 * frame[4] : 3])
            ycbcr = ycbcr and bytes(view[at + 10 : at + 19 : 3]) != b"RGB"
        elif marker == 0xEE and bytes(view[at + 4 : at + 9]) == b"Adobe":
            ycbcr = view[at + 15] != 0
        elif orientation and marker == 0xE1 and bytes(view[at + 4 : at + 10]) == b"Exif\0\0":
            turn = _tiff_orientation(view[at + 10 : at + 2 + length])
        at += 2 + length
    if frame is None:
        _bad("damaged header: a scan begins before the image's size is given")
    kind, bits, height, width, channels = frame
    if bits != 8:
        _bad(f"{bits} bits per channel; gpuflow decodes images of 8 bits, so convert this one")
    if bytes(view[-2:]) != b"\xff\xd9" and bytes(view[at:]).rfind(b"\xff\xd9") < 0:
        _bad(f"truncated: no end-of-image marker within {len(view)} bytes")
    plain = kind == 0xC0 and view[at + 4] == channels and turn == 1 and (ycbcr or channels == 1)
    return Header(
        "jpeg",
        width,
        height,
        channels,
        progressive=kind not in (0xC0, 0xC1),
        orientation=turn,
        engine=plain and sampling in ENGINE_SAMPLINGS and width >= ENGINE_WIDTH,
    )


def _read_png(view: memoryview, orientation: bool) -> Header:
    width, height, bits, kind = struct.unpack_from(">IIBB", view, 16)
    if bits == 16:
        _bad("16 bits per channel; gpuflow decodes images of 8 bits, so convert this one")
    turn, at, name = 1, 8, b""
    while name != b"IEND":
        length, name = struct.unpack_from(">I4s", view, at) if at + 8 <= len(view) else (0, b"")
        if at + 12 + length > len(view):  # OpenCV would make room for a chunk of up to 2 GiB, and fill it
            _bad(f"truncated: no IEND chunk at the end of {len(view)} bytes")
        if name == b"eXIf" and orientation:
            turn = _tiff_orientation(view[at + 8 : at + 8 + length])
        at += 12 + length
    return Header("png", width, height, {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}.get(kind, 3), orientation=turn)


def _read_webp(view: memoryview, orientation: bool) -> Header:
    (size,) = struct.unpack_from("<I", view, 4)
    if size + 8 > len(view):
        _bad(f"truncated: the header promises {size + 8} bytes, there are {len(view)}")
    kind, turn = bytes(view[12:16]), 1
    if kind == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", view, 26))
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", view, 21)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8X":
        width = int.from_bytes(view[24:27], "little") + 1
        height = int.from_bytes(view[27:30], "little") + 1
        if view[20] & 0x02:
            _bad("an animation; gpuflow decodes still images")
        at = 12
        while orientation and at + 8 <= len(view):
            name, length = struct.unpack_from("<4sI", view, at)
            if name == b"EXIF":
                turn = _tiff_orientation(view[at + 8 : at + 8 + length])
            at += 8 + length + length % 2
    else:
        _bad(f"damaged header: unknown WebP chunk {kind!r}")
    return Header("webp", width, height, 3, orientation=turn)


def _read_bmp(view: memoryview, orientation: bool) -> Header:
    (size,) = struct.unpack_from("<I", view, 2)
    (kind,) = struct.unpack_from("<I", view, 14)
    width, height, _, bits = struct.unpack_from("<HHHH" if kind == _BMP_CORE else "<iiHH", view, 18)
    if size > len(view):
        _bad(f"truncated: the header promises {size} bytes, there are {len(view)}")
    return Header("bmp", abs(width), abs(height), 1 if bits <= 8 else 3)


_READERS: tuple[tuple[Callable[[bytes], bool], Callable[[memoryview, bool], Header]], ...] = (
    (lambda magic: magic.startswith(b"\xff\xd8\xff"), _read_jpeg),
    (lambda magic: magic.startswith(b"\x89PNG\r\n\x1a\n"), _read_png),
    (lambda magic: magic.startswith(b"RIFF") and magic[8:12] == b"WEBP", _read_webp),
    (lambda magic: magic.startswith(b"BM"), _read_bmp),
)


def _tiff_orientation(block: memoryview) -> int:
    """The orientation tag (0x0112) of a TIFF block as EXIF embeds it; 1 where it is absent or malformed.

    PNG and WebP embed the bare block, but some programs write JPEG's prefix there too.
    """
    block = block[6:] if bytes(block[:6]) == b"Exif\0\0" else block
    try:
        order = {b"II": "<", b"MM": ">"}[bytes(block[:2])]
        (start,) = struct.unpack_from(order + "I", block, 4)
        (count,) = struct.unpack_from(order + "H", block, start)
        for entry in range(count):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", block, start + 2 + 12 * entry)
            if tag == 0x0112 and kind == 3:
                return value if 1 <= value <= 8 else 1
    except (KeyError, struct.error):
        return 1
    return 1


def _upright(image: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Apply an EXIF orientation (JEITA CP-3451, tag 0x0112) to an HWC image."""
    if orientation >= _SWAPPED:
        image = image.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    return np.ascontiguousarray(image)


_OPENCV_FLAGS = {"rgb": cv2.IMREAD_COLOR_RGB, "bgr": cv2.IMREAD_COLOR_BGR, "gray": cv2.IMREAD_GRAYSCALE}


class CpuDecoder:
    """Decodes with libjpeg-turbo 3 where there is one and OpenCV otherwise. Keeps its buffer; one a thread.

    library: `auto` looks for libjpeg-turbo, None leaves everything to OpenCV.
    """

    def __init__(self, color: str, *, library: Library | Literal["auto"] | None = "auto") -> None:
        self._color = color
        self._channels = 1 if color == "gray" else 3
        library = find_library() if library == "auto" else library
        self._turbo = TurboJpeg(library) if library else None
        self._buffer = np.empty(0, np.uint8)

    def decode(
        self, data: NDArray[np.uint8], header: Header, region: tuple[int, int, int, int] | None = None
    ) -> tuple[NDArray[np.uint8], tuple[int, int]]:
        """Decode an image whose header passed `probe`.

        Args:
            data: the encoded bytes, uint8 [n].
            region: (y, x, height, width) in the upright image, where the caller needs no more than that.

        Returns:
            The image, uint8 HWC, valid until the next call, and the (y, x) in the upright image where it begins:
            the region's corner if only the region was decoded, else (0, 0).

        Raises:
            BadSampleError: the decoder gave up.
        """
        height, width = header.height, header.width
        if region is not None:
            worth = region[2] * region[3] <= _REGION_WORTH * height * width
            if not worth or header.progressive or header.orientation != 1:
                region = None
        image: NDArray[np.uint8] | None = None
        if header.format == "jpeg" and header.channels in (1, 3) and self._turbo is not None:
            image = self._turbo.decode(data, self._color, height, width, region, self._room(height * width))
        if image is None:
            region = None
            decoded: Any = cv2.imdecode(data, _OPENCV_FLAGS[self._color] | cv2.IMREAD_IGNORE_ORIENTATION)
            if decoded is None:
                _bad(f"the {header.format.upper()} decoder gave up; the data is damaged")
            image = decoded.reshape(*decoded.shape[:2], self._channels)
            if image.shape[:2] != (height, width):
                sizes = f"{width}x{height} and {image.shape[1]}x{image.shape[0]}"
                _bad(f"damaged header: two sizes, {sizes} pixels")
        if header.orientation != 1:
            image = _upright(image, header.orientation)
        return image, region[:2] if region else (0, 0)

    def _room(self, pixels: int) -> NDArray[np.uint8]:
        """The buffer, grown to hold so many pixels; one that grew for a huge image shrinks at the next small one."""
        need, have = pixels * self._channels, len(self._buffer)
        if need > have or have > max(16 * need, 1 << 26):
            self._buffer = np.empty(max(need, 1 << 20), np.uint8)
        return self._buffer


@lru_cache(maxsize=1)
def decoder_description() -> str:
    """The CPU decoders in use with their versions, for people and reports."""
    library = find_library()
    opencv = f"OpenCV {cv2.__version__}"
    if library is None:
        return f"{opencv} (whole images; pip install 'gpuflow[turbo]' to decode only the region that a crop needs)"
    return f"libjpeg-turbo {library.version} (JPEG, only the region of a crop), {opencv} (the rest)"
