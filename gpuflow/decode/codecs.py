"""Decodes images on the CPU: checks the header first, then calls the decoder.

Whether a sample is bad is a property of its bytes and is decided here: header, size, format, end marker, then the
decoder itself. Damage to entropy-coded data that libjpeg decodes without an error or a warning cannot be detected.
"""

from __future__ import annotations

import hashlib
import logging
import re
import struct
from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Literal

import cv2
import numpy as np

from gpuflow.arrays import Bytes
from gpuflow.decode.header import (
    ANIMATION,
    OPENCV_FLAGS,
    TEST_HEIGHT,
    TEST_JPEG,
    TEST_WIDTH,
    UNSUPPORTED,
    Header,
    refuse,
    require_memory,
    stored,
    tiff_orientation,
    upright,
)
from gpuflow.decode.libjpeg_turbo import (
    OPENCV_COST,
    REMEDY,
    LibjpegTurbo,
    find_libjpeg_turbo,
    libjpeg_turbo_refusal,
)
from gpuflow.decode.optional_formats import LABELS, READERS, Reader, decode_optional, format_by_content
from gpuflow.decode.png_pnm import (
    MAGIC,
    MAX_CHUNKS,
    check_animation,
    decode_pnm,
    has_too_much_data,
    is_pnm,
    read_png,
    read_pnm,
    transparent_level,
)
from gpuflow.errors import BadSampleError, DecoderError

__all__ = [
    "MAX_SCANS",
    "TEST_JPEG",
    "CpuDecoder",
    "Header",
    "check_animation",
    "check_scans",
    "decoder_description",
    "format_of",
    "imdecode",
    "is_test_image",
    "pixels_of_test_image",
    "probe",
]

_LOG = logging.getLogger(__name__)
MAX_SCANS = 100
"""The default limit on the scans of one JPEG. Encoders write at most about twenty; each may take as long as a whole
image to decode."""

_REGION_WORTH = 0.9
"""Decode only a region if its area is at most this fraction of the image."""
_BMP_CORE = 12
"""Size in bytes of OS/2's BMP header, which stores height and width in 16 bits each."""
_BMP_BITFIELDS, _BMP_MASKS = 3, 54
"""The compression of a BMP whose masks say which bits of a pixel are which colour, and where these masks begin."""
_MAX_SIDE = 1 << 20
"""The largest height or width in pixels that OpenCV decodes."""
_MANY_REFUSED = 32
"""Number of consecutive files refused after which a decoder is tested."""
_MAX_SEGMENTS = 10_000
"""The largest number of marker segments of a JPEG before its first scan."""


def probe(
    data: Bytes,
    *,
    max_pixels: int = 179_000_000,
    max_scans: int = MAX_SCANS,
    orientation: bool = False,
    formats: Collection[str] = (),
) -> Header:
    """Read and check an image's header and its end marker. Decodes nothing.

    Args:
        data: the encoded bytes, uint8 [n].
        max_pixels: the largest allowed width * height.
        max_scans: the largest allowed number of scans of a JPEG.
        orientation: also read the EXIF orientation.
        formats: what `decode.formats` names.

    Raises:
        BadSampleError: the bytes are empty, of an unknown format, truncated, too large, deeper than 8 bits, or have
            more scans or segments than any encoder writes. Its code is `sample.format` if naming the format would help.

    Examples:
        >>> probe(TEST_JPEG)
        Header(format='jpeg', width=64, height=48, channels=3, progressive=False, orientation=1, alpha=False, turned=1)
    """
    view = data.data
    if len(view) == 0:
        refuse("empty: the file has no bytes")
    magic = bytes(view[:12])
    read = next((reader for _, test, reader in _READERS if test(magic)), None)
    if read is None:
        name, label = format_of(view)
        if not label:
            refuse(f"not an image: begins with {magic[:4].hex(' ')}; {_KNOWN}")
        if not name:
            refuse(f"{label} is not supported; {_KNOWN}, so convert this file", UNSUPPORTED)
        if name not in formats:
            refuse(_not_named(name), "sample.format")
        read = READERS[name]
    try:
        header = read(view, orientation, max_scans)
    except (struct.error, IndexError):
        refuse(f"truncated: the header breaks off after {len(view)} bytes")
    if header.format in LABELS and header.format not in formats:
        refuse(_not_named(header.format), "sample.format")
    if header.width < 1 or header.height < 1:
        refuse(f"the header gives a size of {header.width}x{header.height} pixels")
    if (pixels := header.width * header.height) > max_pixels:
        reason = f"{header.width}x{header.height} = {pixels:,} pixels are more than max_pixels = {max_pixels:,}"
        refuse(reason, "sample.too_large")
    if max(header.width, header.height) > _MAX_SIDE:
        refuse(f"{header.width}x{header.height} pixels; OpenCV decodes at most {_MAX_SIDE:,} a side")
    return header


def format_of(view: memoryview) -> tuple[str, str]:
    """Return the name of a file's format by its content, and what people call it.

    The name is empty if gpuflow does not decode the format; both are if the format is unknown.

    Examples:
        >>> format_of(TEST_JPEG.data), format_of(memoryview(b"%PDF-1.7"))
        (('jpeg', 'JPEG'), ('', 'PDF'))
    """
    magic = bytes(view[:12])
    name = next((name for name, test, _ in _READERS if test(magic)), None) or format_by_content(view)
    if name is not None:
        return name, LABELS.get(name, name.upper())
    labels = (label for (at, mark), label in _OTHERS.items() if view[at : at + len(mark)] == mark)
    return "", next(labels, "")


_BEGINNINGS = {
    b"%PDF": "PDF",
    b"%!PS": "PostScript",
    b"\xc5\xd0\xd3\xc6": "EPS",
    b"8BPS": "PSD",
    b"\0\0\1\0": "ICO",
    b"\0\0\2\0\1\0": "CUR",
    b"icns": "ICNS",
    b"qoif": "QOI",
    b"DDS ": "DDS",
    b"\1\xda": "SGI",
    **{bytes((10, version, 1)): "PCX" for version in (0, 2, 3, 4, 5)},
    b"\x59\xa6\x6a\x95": "Sun raster",
    b"v/1\1": "OpenEXR",
    b"#?": "Radiance HDR",
    b"II\xbc": "JPEG XR",
    b"BPG\xfb": "BPG",
    b"FLIF": "FLIF",
    b"gimp xcf": "XCF",
    b"SIMPLE  =": "FITS",
    b"P7\n": "PAM",
    b"PF\n": "PFM",
    b"Pf\n": "PFM",
    b"/* XPM */": "XPM",
    b"<svg": "SVG",
    b"\x93NUMPY": "a NumPy array",
}
_OTHERS = {(0, mark): label for mark, label in _BEGINNINGS.items()} | {
    (4, b"ftyp"): "AVIF/HEIF of an unknown kind",
    (128, b"DICM"): "DICOM",
    (-18, b"TRUEVISION-XFILE"): "TGA",
}
"""Other formats of images: a mark and its offset, and what people call them."""
_KNOWN = "gpuflow decodes JPEG, PNG, WebP, BMP and PNM"


def _not_named(name: str) -> str:
    """Return why a format that `decode.formats` could name is refused."""
    action = f"name it in decode.formats: [{name}]"
    if name == "png16":
        return f"16 bits per channel; gpuflow decodes images of 8 bits, so convert this one, or {action}"
    if name == "webp_animated":
        return f"{ANIMATION}; for the first frame, {action}"
    return f"{LABELS[name]} is not supported; {_KNOWN}; to have it decoded, {action}"


def _segments(view: memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, offset, length) of a JPEG's segments, up to and including the first scan's header.

    As libjpeg does, this skips stray bytes between two segments.
    """
    at = 2
    for _ in range(_MAX_SEGMENTS):
        found = _ANY_MARKER.search(view, at)
        if found is None:
            raise IndexError
        at = found.end() - 2
        marker = view[at + 1]
        if marker == 0xD9:
            refuse("damaged header: the image ends before its first scan")
        if marker in _ALONE:
            at += 2
            continue
        length = view[at + 2] << 8 | view[at + 3]
        yield marker, at, length
        if marker == 0xDA:
            return
        at += 2 + length
    refuse(f"more than {_MAX_SEGMENTS:,} marker segments before the first scan")


def _read_jpeg(view: memoryview, orientation: bool, max_scans: int) -> Header:
    """Read the marker segments up to the first scan (ITU-T T.81, annex B).

    Of several EXIF segments the first one gives the orientation: the others may continue its data.
    """
    frame, turn, at = None, None, 0
    for marker, at, length in _segments(view):
        if marker in _FRAMES:
            frame = (marker, *struct.unpack_from(">BHHB", view, at + 4))
        elif orientation and turn is None and marker == 0xE1 and bytes(view[at + 4 : at + 10]) == b"Exif\0\0":
            turn = tiff_orientation(view[at + 10 : at + 2 + length])
    if frame is None:
        refuse("damaged header: a scan begins before the image's size is given")
    kind, bits, height, width, channels = frame
    if bits != 8:
        refuse(f"{bits} bits per channel; gpuflow decodes images of 8 bits, so convert this one", UNSUPPORTED)
    if bytes(view[-2:]) != b"\xff\xd9" and bytes(view[at:]).rfind(b"\xff\xd9") < 0:
        refuse(f"truncated: no end-of-image marker within {len(view)} bytes")
    if kind != 0xC0 or view[at + 4] != channels:
        check_scans(view, at, max_scans)
    return Header("jpeg", width, height, channels, progressive=kind not in (0xC0, 0xC1), orientation=turn or 1)


_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""The markers of frame headers."""


def check_scans(view: memoryview, at: int = 2, max_scans: int = MAX_SCANS) -> None:
    """Raise BadSampleError if a JPEG has more than `max_scans` scans, or far too many segments, from a marker on.

    It checks nothing else. at: where the marker stands.
    """
    scans = 0
    for _ in range(_MAX_SEGMENTS):
        found = _MARKER.search(view, at)
        if found is None or (marker := view[found.end() - 1]) == 0xD9:
            return
        scans += marker == 0xDA
        if scans > max_scans:
            refuse(f"more than max_scans = {max_scans} scans", "sample.too_large")
        at = found.end() + max(2, int.from_bytes(view[found.end() : found.end() + 2]))
    refuse(f"more than {_MAX_SEGMENTS:,} marker segments")


_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
"""A marker that begins a segment or ends the image. Inside a scan, 0xFF is followed only by 0 or a restart marker."""
_ANY_MARKER = re.compile(rb"\xff[^\x00\xff]")
"""A marker, of which there may be several 0xFF bytes; 0xFF before 0 is none."""
_ALONE = frozenset((0x01, *range(0xD0, 0xD8)))
"""The markers that begin no segment: restarts and TEM."""


def _read_webp(view: memoryview, orientation: bool, max_scans: int) -> Header:
    (size,) = struct.unpack_from("<I", view, 4)
    if size + 8 > len(view):
        refuse(f"truncated: the header promises {size + 8} bytes, there are {len(view)}")
    kind, turn, alpha, form = bytes(view[12:16]), 1, False, "webp"
    if kind == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", view, 26))
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", view, 21)
        width, height, alpha = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, bool(bits >> 28 & 1)
    elif kind == b"VP8X":
        width = int.from_bytes(view[24:27], "little") + 1
        height = int.from_bytes(view[27:30], "little") + 1
        form = "webp_animated" if view[20] & 0x02 else form
        alpha = bool(view[20] & 0x10)
        turn = _webp_orientation(view) if orientation else 1
    else:
        refuse(f"damaged header: unknown WebP chunk {kind!r}")
    return Header(form, width, height, 3, orientation=turn, alpha=alpha)


def _webp_orientation(view: memoryview) -> int:
    at = 12
    for _ in range(MAX_CHUNKS):
        if at + 8 > len(view):
            return 1
        name, length = struct.unpack_from("<4sI", view, at)
        if name == b"EXIF":
            return tiff_orientation(view[at + 8 : at + 8 + length])
        at += 8 + length + length % 2
    refuse(f"more than {MAX_CHUNKS:,} chunks")


def _read_bmp(view: memoryview, orientation: bool, max_scans: int) -> Header:
    (size,) = struct.unpack_from("<I", view, 2)
    (kind,) = struct.unpack_from("<I", view, 14)
    width, height, _, bits = struct.unpack_from("<HHHH" if kind == _BMP_CORE else "<iiHH", view, 18)
    if size > len(view):
        refuse(f"truncated: the header promises {size} bytes, there are {len(view)}")
    return Header("bmp", abs(width), abs(height), 1 if bits <= 8 else 3)


_READERS: tuple[tuple[str, Callable[[bytes], bool], Reader], ...] = (
    ("jpeg", lambda magic: magic.startswith(b"\xff\xd8\xff"), _read_jpeg),
    ("png", lambda magic: magic.startswith(MAGIC), read_png),
    ("webp", lambda magic: magic.startswith(b"RIFF") and magic[8:12] == b"WEBP", _read_webp),
    ("bmp", lambda magic: magic.startswith(b"BM"), _read_bmp),
    ("pnm", is_pnm, read_pnm),
)
"""The formats that are always decoded: their name, a test of a file's first bytes, and what reads the header."""


class CpuDecoder:
    """Decodes JPEGs with libjpeg-turbo 3 if there is one, and the rest with OpenCV. Reuses its buffer: one per thread.

    The pixels depend only on the file's bytes, not on files decoded before. If libjpeg-turbo gives an error or a
    warning for a file, OpenCV decodes it and decides whether it is bad.

    background: the RGB color under transparent pixels; None ignores alpha.
    library: `auto` searches libjpeg-turbo; None decodes everything with OpenCV.
    """

    def __init__(
        self,
        color: str,
        *,
        background: tuple[int, int, int] | None = None,
        library: LibjpegTurbo | Literal["auto"] | None = "auto",
    ) -> None:
        self._color, self._background = color, background
        self._channels = 1 if color == "gray" else 3
        self.library = find_libjpeg_turbo() if library == "auto" else library
        self._buffer = np.empty(0, np.uint8)
        self._refused = 0

    def decode(
        self, data: Bytes, header: Header, region: tuple[int, int, int, int] | None = None
    ) -> tuple[Bytes, tuple[int, int]]:
        """Decode an image whose header passed `probe`.

        Args:
            data: the encoded bytes, uint8 [n].
            region: (y, x, height, width) in the upright image, if the caller needs only this region.

        Returns:
            The image, uint8 HWC, valid until the next call, and the position (y, x) of its corner in the upright image:
            that of the region if only the region was decoded, else (0, 0).

        Raises:
            BadSampleError: the decoder refused the file. MemoryError: there is not enough memory for the image.
            DecoderError: the decoder fails on gpuflow's own test image too.

        Examples:
            >>> decoder, header = CpuDecoder("rgb"), probe(TEST_JPEG)
            >>> image, corner = decoder.decode(TEST_JPEG, header)
            >>> image.shape, corner
            ((48, 64, 3), (0, 0))
        """
        try:
            decoded = self._decode(data, header, region)
        except BadSampleError:
            self._refused += 1
            if self._refused >= _MANY_REFUSED:
                self._refused = 0
                self.check()
            raise
        self._refused = 0
        return decoded

    def check(self) -> None:
        """Decode gpuflow's own test image. If libjpeg-turbo fails, it is not used again.

        Raises:
            DecoderError: OpenCV fails.
        """
        if self.library is not None:
            buffer = self._buffer_for(TEST_HEIGHT * TEST_WIDTH)
            image = self.library.decode(TEST_JPEG, self._color, (TEST_HEIGHT, TEST_WIDTH), None, buffer)
            if not is_test_image(image, self._color):
                _LOG.warning("libjpeg-turbo no longer decodes gpuflow's test image; OpenCV decodes instead")
                self.library = None
        image = imdecode(TEST_JPEG, OPENCV_FLAGS[self._color])
        if not is_test_image(image, self._color):
            raise DecoderError("OpenCV does not decode gpuflow's test image; end this process and start another one")

    def _decode(
        self, data: Bytes, header: Header, region: tuple[int, int, int, int] | None
    ) -> tuple[Bytes, tuple[int, int]]:
        if header.format == "pnm" or (header.format in LABELS and header.format != "png16"):
            return self._by_optional(data, header), (0, 0)
        size = height, width = header.height, header.width
        whole = 0, 0, height, width
        if region is None or header.orientation != 1 or region[2] * region[3] > _REGION_WORTH * height * width:
            region = whole
        image: Bytes | None = None
        if header.format == "jpeg" and header.channels in (1, 3) and self.library is not None:
            image = self.library.decode(data, self._color, size, region, self._buffer_for(region[2] * region[3]))
        if image is None:
            region = whole
            image = self._by_opencv(data, header)
        if header.orientation != 1:
            image = upright(image, header.orientation)
        return image, region[:2]

    def _by_opencv(self, data: Bytes, header: Header) -> Bytes:
        """Decode a whole file with OpenCV."""
        background, deep = self._background if header.alpha else None, header.format == "png16"
        composited = background is not None
        flags = OPENCV_FLAGS[self._color] | cv2.IMREAD_IGNORE_ORIENTATION
        if header.format == "bmp":
            data = _with_known_masks(data)
        if header.format in ("png", "png16") and has_too_much_data(data):
            refuse("its compressed data are far more than its pixels")
        decoded = imdecode(data, cv2.IMREAD_UNCHANGED if composited or deep else flags)
        if decoded is None:
            require_memory(header)
            refuse(f"the {LABELS.get(header.format, header.format.upper())} decoder gave up; the data is damaged")
        if composited and decoded.ndim == 2:  # OpenCV gives no alpha for a gray PNG with a transparent level
            decoded = _with_alpha(decoded, transparent_level(data.data))
        if deep:
            decoded = (decoded >> 8).astype(np.uint8)
        if composited or deep:
            decoded = _in_color(decoded, background, self._color)
        image: Bytes = decoded.reshape(*decoded.shape[:2], self._channels)
        if image.shape[:2] != (header.height, header.width):
            sizes = f"{header.width}x{header.height} and {image.shape[1]}x{image.shape[0]}"
            refuse(f"damaged header: two sizes, {sizes} pixels")
        return image

    def _by_optional(self, data: Bytes, header: Header) -> Bytes:
        """Decode a whole PNM, or a file of a format that `decode.formats` named, and turn it as its header says."""
        background = self._background if header.alpha else None
        if header.format == "pnm":
            decoded = decode_pnm(data, header)
        else:
            decoded = decode_optional(data, header, alpha=background is not None)
        if decoded.shape[2] >= 3:
            decoded = decoded[..., [2, 1, 0, 3][: decoded.shape[2]]]
        image = _in_color(decoded, background, self._color)
        if header.orientation != header.turned:
            image = upright(stored(image, header.turned), header.orientation)
        return np.ascontiguousarray(image)

    def _buffer_for(self, pixels: int) -> Bytes:
        """Return the buffer, grown to hold `pixels` pixels. After a huge image, the next small one shrinks it again."""
        need, have = pixels * self._channels, len(self._buffer)
        if need > have or have > max(16 * need, 1 << 26):
            self._buffer = np.empty(max(need, 1 << 20), np.uint8)
        return self._buffer


def _in_color(image: Bytes, background: tuple[int, int, int] | None, color: str) -> Bytes:
    """Convert an image that is gray, BGR or BGRA, HW or HWC, to the decoder's color, HWC.

    background: the RGB color to put it over; None ignores alpha. Each level is then (level * alpha + background *
    (255 - alpha)) / 255, rounded to the nearest. `gray` is luma after that.
    """
    if image.ndim == 2 or image.shape[2] == 1:
        level = image.reshape(*image.shape[:2], 1)
        return level if color == "gray" else np.repeat(level, 3, axis=2)
    if image.shape[2] == 4 and background is not None:
        opacity = image[..., 3:].astype(np.uint16)
        under = np.array(background[::-1], np.uint16) * (255 - opacity)
        image = ((image[..., :3] * opacity + under + 127) // 255).astype(np.uint8)
    image = np.ascontiguousarray(image[..., :3])
    if color == "gray":
        return np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2GRAY), np.uint8)[..., None]
    return np.ascontiguousarray(image[..., ::-1]) if color == "rgb" else image


def _with_known_masks(data: Bytes) -> Bytes:
    """Return a BMP whose masks OpenCV reads: behind 40 bytes of header for 16 bits a pixel, in 56 for 32.

    OpenCV refuses masks of 16 bits in larger headers, and ignores those of 32 bits in smaller ones.
    """
    view = data.data
    if len(view) < _BMP_MASKS + 12:
        return data
    start, size = struct.unpack_from("<II", view, 10)
    bits, compression = struct.unpack_from("<HI", view, 28)
    known = {16: size == 40, 32: size >= 56}.get(bits, True)
    if size == _BMP_CORE or compression != _BMP_BITFIELDS or known:
        return data
    head = struct.pack("<I", 40 if bits == 16 else 56) + bytes(view[18 : _BMP_MASKS + 12])
    head += b"" if bits == 16 else bytes(4)  # no mask of alpha
    pixels = bytes(view[start:])
    begin = b"BM" + struct.pack("<IHHI", 14 + len(head) + len(pixels), 0, 0, 14 + len(head))
    return np.frombuffer(begin + head + pixels, np.uint8)


def _with_alpha(image: Bytes, level: int) -> Bytes:
    """Return a gray image of 8 or 16 bits as BGRA of as many bits, transparent where it has this level."""
    alpha = np.where(image == level, 0, np.iinfo(image.dtype).max).astype(image.dtype)
    return np.dstack([image, image, image, alpha])


_BY_OPENCV = ("jpeg", "png", "webp", "bmp")
_OPENCV_BYTES = 32
"""OpenCV takes no WebP of fewer bytes for one. Zeros after the end of a file change no decoder's pixels."""


def imdecode(data: Bytes, flags: int) -> Bytes | None:
    """Decode a JPEG, PNG, WebP or BMP with OpenCV: uint8 HWC or HW, or None if OpenCV returns None or raises an error.

    OpenCV chooses a decoder by the content, and has some for formats that nothing here checks. Those get no file.

    Raises MemoryError if there is not enough memory for the image.
    """
    if format_of(data.data)[0] not in _BY_OPENCV:
        return None
    if len(data) < _OPENCV_BYTES:
        data = np.pad(data, (0, _OPENCV_BYTES - len(data)))
    try:
        image: Bytes | None = cv2.imdecode(data, flags)  # type: ignore[assignment]  # it may be None
    except cv2.error as error:
        if error.code == cv2.Error.StsNoMem:
            raise MemoryError(f"not enough memory to decode an image of {len(data):,} bytes") from error
        return None
    return image


# --- the test image ---------------------------------------------------------------------------------------------------

_SHA256 = {
    "rgb": "cf80df5c29c7dea96ad42b339d81b42ab150e485abd6e49dae5b0cb0244f383c",
    "gray": "052fc57fb2fd284873a1822d6e02823e408bd6ee368b49756671aacf1f8ca708",
}
"""SHA-256 of the pixels that libjpeg-turbo gives."""


def is_test_image(image: Bytes | None, color: str) -> bool:
    """Return True if an image equals the CPU decoders' pixels of TEST_JPEG, uint8 [TEST_HEIGHT, TEST_WIDTH, C].

    Examples:
        >>> is_test_image(imdecode(TEST_JPEG, cv2.IMREAD_COLOR_RGB), "rgb")
        True
    """
    if image is None or image.shape[:2] != (TEST_HEIGHT, TEST_WIDTH):
        return False
    ordered = np.ascontiguousarray(image[..., ::-1] if color == "bgr" else image)
    return hashlib.sha256(ordered.tobytes()).hexdigest() == _SHA256["gray" if color == "gray" else "rgb"]


@cache
def pixels_of_test_image(color: str) -> Bytes:
    """Return OpenCV's pixels of TEST_JPEG: uint8 [TEST_HEIGHT, TEST_WIDTH, C]. `color`: rgb, bgr or gray."""
    image = imdecode(TEST_JPEG, OPENCV_FLAGS[color])
    assert image is not None
    return image.reshape(TEST_HEIGHT, TEST_WIDTH, -1)


@cache
def decoder_description() -> str:
    """Return the CPU decoders in use with their versions, as a text for messages and reports."""
    library = find_libjpeg_turbo()
    opencv = f"OpenCV {cv2.__version__}"
    if library is None:
        return f"{opencv} (whole images: {OPENCV_COST}; no libjpeg-turbo: {libjpeg_turbo_refusal()}; {REMEDY})"
    return f"libjpeg-turbo {library.version} (JPEG, only the region of a crop), {opencv} (the rest)"
