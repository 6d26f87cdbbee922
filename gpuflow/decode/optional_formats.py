"""Reads the headers of the formats that `decode.formats` must name, and decodes them by libraries of others.

Pillow, pillow-heif and pylibjxl decode these files; the extra `formats` installs them. They are imported where they are
used, so that nothing else needs them. They were written for other purposes, so a header is checked here first: that the
pixels are within the limits, that all data which the header refers to are there, and that reading them takes no more
memory than the image.
"""

from __future__ import annotations

import io
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from gpuflow.arrays import Bytes
from gpuflow.decode.header import ANIMATION, UNSUPPORTED, Header, refuse, require_memory, upright
from gpuflow.errors import BadSampleError, MissingExtra, is_system_fault, reason_of

T = TypeVar("T")

LABELS = {
    "tiff": "TIFF",
    "gif": "GIF",
    "avif": "AVIF",
    "heic": "HEIC",
    "jxl": "JPEG XL",
    "jp2": "JPEG 2000",
    "png16": "PNG of 16 bits per channel",
    "webp_animated": "animated WebP",
}
"""The names that `decode.formats` takes, and what they stand for."""

Reader = Callable[[memoryview, bool, int], Header]
"""Reads a header, with the orientation or without; the number is that of a JPEG's scans at most. Raises struct.error or
IndexError where the bytes end, BadSampleError where they are wrong."""

_JP2_CODE, _JXL_CODE = b"\xff\x4f\xff\x51", b"\xff\x0a"
"""The first bytes of codestreams, within boxes and without."""
_MARKS = {
    "tiff": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    "gif": (b"GIF87a", b"GIF89a"),
    "jxl": (_JXL_CODE, b"\0\0\0\x0cJXL \r\n\x87\n"),
    "jp2": (_JP2_CODE, b"\0\0\0\x0cjP  \r\n\x87\n"),
}
"""The first bytes of the files of each format."""
_BRANDS = {"avif": {b"avif", b"avis"}, "heic": {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"}}
_SEQUENCES = frozenset((b"avis", b"hevc", b"hevx", b"hevm", b"hevs", b"msf1"))
"""Major brands of image sequences."""
_MAX_PARTS = 100_000
"""The largest number of boxes in a box, blocks, tile parts, extents or entries of a list that are looked at; a file
with more is bad."""


def format_by_content(view: memoryview) -> str | None:
    """Return which of these formats a file is of, other than those of PNG and WebP; None if of none."""
    magic = bytes(view[:12])
    if magic[4:8] == b"ftyp":
        brands = bytes(view[8 : min(int.from_bytes(magic[:4]), 256)])
        found = {brands[at : at + 4] for at in range(0, len(brands), 4) if at != 4}
        return next((name for name, known in _BRANDS.items() if found & known), None)
    return next((name for name, marks in _MARKS.items() if magic.startswith(marks)), None)


def _refuse_truncated(view: memoryview, what: str) -> NoReturn:
    refuse(f"truncated: {what} ends after the file's {len(view)} bytes")


def _limited(items: Iterable[T], what: str) -> Iterator[T]:
    """Yield each item. Raises BadSampleError after `_MAX_PARTS` of them."""
    for count, item in enumerate(items):
        if count == _MAX_PARTS:
            refuse(f"more than {_MAX_PARTS:,} {what}")
        yield item


# --- TIFF -------------------------------------------------------------------------------------------------------------

_MAX_ENTRIES = 1000
"""The largest number of tags of a TIFF; Pillow reads the values of all of them."""
_TIFF_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}
"""Bytes of a value of each type."""
_TIFF_INTEGERS = {1: "u1", 3: "u2", 4: "u4", 16: "u8"}
_TILE_PIXELS = 1 << 22
"""A tile of a TIFF may have this many pixels more than the image."""
_TIFF_BITS = frozenset((1, 2, 4, 8, 16))
_TIFF_COLORS = {0: 1, 1: 1, 2: 3, 3: 1, 5: 4, 6: 3}
"""Photometric interpretations that are decoded (gray, RGB, palette, CMYK, YCbCr), and their numbers of channels."""


def _read_tiff(view: memoryview, orientation: bool, max_scans: int) -> Header:
    """Read the header of the first page. TIFF 6.0, and BigTIFF."""
    tags = _tiff_tags(view)
    _check_strips(view, tags)

    def first(tag: int, default: int) -> int:
        return int(tags[tag][0]) if tag in tags and len(tags[tag]) else default

    color, channels = first(262, 1), first(277, 1)
    forms = {int(form) for form in tags.get(339, ())} or {1}
    if forms != {1}:
        numbers = {2: "signed", 3: "floating-point"}.get(max(forms), "other")
        refuse(f"{numbers} samples; only unsigned samples have levels, so convert this TIFF", UNSUPPORTED)
    bits = {int(number) for number in tags.get(258, (1,))}
    if len(bits) != 1 or not bits <= _TIFF_BITS:
        refuse(
            f"{', '.join(map(str, sorted(bits)))} bits per channel; a TIFF of 1, 2, 4, 8 or 16 is decoded", UNSUPPORTED
        )
    if color not in _TIFF_COLORS or not _TIFF_COLORS[color] <= channels <= _TIFF_COLORS[color] + 1:
        refuse(
            f"color space {color} with {channels} channels; gray, RGB, palette, CMYK and YCbCr TIFFs are decoded",
            UNSUPPORTED,
        )
    width, height, turn = first(256, 0), first(257, 0), first(274, 1)
    tile = first(322, 0) * first(323, 0)
    if tile > width * height + _TILE_PIXELS:
        refuse(f"damaged header: tiles of {tile:,} pixels in an image of {width}x{height}")
    turn = turn if 1 <= turn <= 8 else 1
    alpha = channels > _TIFF_COLORS[color]
    return Header("tiff", width, height, channels, orientation=turn if orientation else 1, alpha=alpha, turned=turn)


def _tiff_tags(view: memoryview) -> dict[int, Any]:
    """Return the integers of each tag of the first page. Checks that the values of all tags are there."""
    order, big = "<" if view[0] == ord("I") else ">", 43 in (view[2], view[3])
    word, word_bytes, head, entry = ("Q", 8, "HHQ", 20) if big else ("I", 4, "HHI", 12)
    (at,) = struct.unpack_from(order + word, view, word_bytes)  # stands at byte 4, of a BigTIFF at byte 8
    if at + 2 > len(view):
        _refuse_truncated(view, "the directory of tags")
    (count,) = struct.unpack_from(order + ("Q" if big else "H"), view, at)
    if count > _MAX_ENTRIES:
        refuse(f"{count:,} tags; a TIFF of at most {_MAX_ENTRIES:,} is decoded")
    at += 8 if big else 2
    if at + entry * count + word_bytes > len(view):
        _refuse_truncated(view, "the directory of tags")
    tags, total = dict[int, Any](), 0
    for place in range(at, at + entry * count, entry):
        tag, kind, number = struct.unpack_from(order + head, view, place)
        size = number * _TIFF_BYTES.get(kind, 1)
        start, total = place + entry - word_bytes, total + size
        if size > word_bytes:
            (start,) = struct.unpack_from(order + word, view, start)
        if start + size > len(view):
            _refuse_truncated(view, f"the value of tag {tag}")
        if kind in _TIFF_INTEGERS:
            tags[tag] = np.frombuffer(view[start : start + size], order + _TIFF_INTEGERS[kind])
    if total > len(view):
        refuse(f"damaged header: its tags have {total:,} bytes, the file has {len(view):,}")
    return tags


def _check_strips(view: memoryview, tags: dict[int, Any]) -> None:
    """Raise BadSampleError unless all strips, or tiles, of pixels are in the file."""
    offsets, sizes = (tags.get(tag, tags.get(other)) for tag, other in ((273, 324), (279, 325)))
    if offsets is None or not len(offsets):
        refuse("damaged header: it does not say where the pixels are")
    ends = offsets.astype(np.float64)
    if sizes is not None:
        if len(sizes) != len(offsets):
            refuse(f"damaged header: {len(offsets)} strips with {len(sizes)} sizes")
        ends += sizes
    if ends.max() > len(view):
        _refuse_truncated(view, "a strip of pixels")


# --- GIF --------------------------------------------------------------------------------------------------------------


def _read_gif(view: memoryview, orientation: bool, max_scans: int) -> Header:
    """Read up to the end of the first frame. A frame that reaches beyond the screen enlarges the image."""
    width, height, packed = struct.unpack_from("<HHB", view, 6)
    at, transparent, parts = 13 + _gif_palette(packed), False, iter(range(_MAX_PARTS))
    for _ in parts:
        kind = view[at]
        if kind == 0x21:
            transparent = transparent or (view[at + 1] == 0xF9 and bool(view[at + 3] & 1))
            at = _after_blocks(view, at + 2, parts)
        elif kind == 0x2C:
            left, top, columns, rows, packed = struct.unpack_from("<HHHHB", view, at + 1)
            _after_blocks(view, at + 11 + _gif_palette(packed), parts)
            return Header("gif", max(width, left + columns), max(height, top + rows), 3, alpha=transparent)
        elif kind == 0x3B:
            refuse("damaged data: a GIF without a frame")
        else:
            refuse(f"damaged data: unknown block {kind:#04x}")
    refuse(_TOO_MANY_BLOCKS)


_TOO_MANY_BLOCKS = f"more than {_MAX_PARTS:,} blocks up to the end of the first frame"


def _gif_palette(packed: int) -> int:
    """Return the size in bytes of a palette that these flags announce."""
    return 3 << (packed & 7) + 1 if packed & 0x80 else 0


def _after_blocks(view: memoryview, at: int, parts: Iterator[int]) -> int:
    """Return the place after sub-blocks with their lengths, which an empty one ends. Takes one of `parts` each."""
    for _ in parts:
        length = view[at]
        at += 1 + length
        if not length:
            return at
    refuse(_TOO_MANY_BLOCKS)


# --- boxes: AVIF, HEIC, JPEG 2000 and JPEG XL -------------------------------------------------------------------------


class _Box(NamedTuple):
    """kind: four letters. start, end: where its content begins and ends."""

    kind: bytes
    start: int
    end: int


def _boxes(view: memoryview, outer: _Box | None = None) -> Iterator[_Box]:
    """Yield the boxes (ISO/IEC 14496-12) in another one. At the top level (`outer` is None) it ends at no box."""
    _, at, last = outer or _Box(b"", 0, len(view))
    for _ in range(_MAX_PARTS):
        if at + 8 > last:
            return
        size, kind = struct.unpack_from(">I4s", view, at)
        start = at + 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", view, start)
            start += 8
        stop = at + size if size else last
        if stop < start or stop > last:
            if outer is None and not kind.isalnum():
                return  # bytes after the image's end
            _refuse_truncated(view, f"the box {kind.decode('latin-1')!r}")
        yield _Box(kind, start, stop)
        at = stop
    refuse(f"more than {_MAX_PARTS:,} boxes")


def _read_heif(name: str, view: memoryview, orientation: bool, max_scans: int) -> Header:
    """Read the header of the primary image of an AVIF or HEIC file (ISO/IEC 23008-12)."""
    if bytes(view[8:12]) in _SEQUENCES:
        refuse(ANIMATION, UNSUPPORTED)
    meta = next((box for box in _boxes(view) if box.kind == b"meta"), None)
    if meta is None:
        _refuse_truncated(view, "the list of images")
    inner = {box.kind: box for box in _boxes(view, meta._replace(start=meta.start + 4))}
    if not {b"pitm", b"iprp", b"iloc"} <= inner.keys():
        refuse("damaged header: it names no primary image")
    _check_extents(view, inner[b"iloc"])
    at = inner[b"pitm"].start
    (primary,) = struct.unpack_from(">I" if view[at] else ">H", view, at + 4)
    parts = list(_boxes(view, inner[b"iprp"]))  # of a sound file, which has one `ipco`
    found = (one for box in parts if box.kind == b"ipco" for one in _boxes(view, box))
    properties = list(_limited(found, "properties of images"))
    entries = (entry for box in parts if box.kind == b"ipma" for entry in _property_lists(view, box))
    chosen = next((numbers for item, numbers in _limited(entries, "lists of properties") if item == primary), [])
    own = [properties[number - 1] for number in chosen if 0 < number <= len(properties)]
    width, height = 0, 0
    for box in own:
        if box.kind == b"ispe":
            width, height = struct.unpack_from(">II", view, box.start + 4)
    for box in own:
        if box.kind == b"clap":
            width, height = _cropped(view, box, name, width, height)
    turn = _heif_orientation(view, own)
    marks = (bytes(view[box.start : box.end]) for box in properties if box.kind == b"auxC")
    alpha = any(b":alpha" in mark or b"auxid:1" in mark for mark in marks)
    used = turn if orientation else 1
    return Header(name, width, height, 3, orientation=used, alpha=alpha, turned=turn if name == "heic" else 1)


def _cropped(view: memoryview, box: _Box, name: str, coded_width: int, coded_height: int) -> tuple[int, int]:
    """Return (width, height) that `clap` leaves. HEIC encoders fill images up to whole blocks and crop them."""
    columns, divisor, rows, divisor_of_rows = struct.unpack_from(">4I", view, box.start)
    if name == "avif":
        refuse("cropped by its header (clap), which Pillow's AVIF decoder does not do; convert this image", UNSUPPORTED)
    width, height = columns // max(1, divisor), rows // max(1, divisor_of_rows)
    if coded_width * coded_height > 4 * width * height + _CROPPED_PIXELS:
        refuse(
            f"cropped by its header to {width}x{height} of {coded_width}x{coded_height} pixels; convert this image",
            UNSUPPORTED,
        )
    return width, height


_CROPPED_PIXELS = 1 << 16
"""A crop to less than a quarter may remove this many pixels: what is decoded must not be far more than what is kept."""


def _property_lists(view: memoryview, box: _Box) -> Iterator[tuple[int, list[int]]]:
    """Yield the number of each item in a box `ipma`, and those of its properties, which begin at 1."""
    version, wide = view[box.start], view[box.start + 3] & 1
    (count,) = struct.unpack_from(">I", view, box.start + 4)
    at, inside = box.start + 8, view[: box.end]
    for _ in range(count):
        (number,) = struct.unpack_from(">I" if version else ">H", inside, at)
        at += 4 if version else 2
        length = inside[at]
        values = struct.unpack_from(f">{length}{'H' if wide else 'B'}", inside, at + 1)
        yield number, [value & (0x7FFF if wide else 0x7F) for value in values]
        at += 1 + length * (1 + wide)


def _heif_orientation(view: memoryview, own: list[_Box]) -> int:
    """Return the EXIF orientation that stands for an image's properties `irot` and `imir`, in their order."""
    image = before = np.arange(6, dtype=np.uint8).reshape(2, 3, 1)
    for box in own:
        if box.kind == b"irot":
            image = np.rot90(image, view[box.start] & 3)
        elif box.kind == b"imir":
            image = image[:, ::-1] if view[box.start] & 1 else image[::-1]
    return next(turn for turn in range(1, 9) if np.array_equal(upright(before, turn), image))


def _check_extents(view: memoryview, box: _Box) -> None:
    """Raise BadSampleError if the data of an item, as the box `iloc` places them, reach beyond the file."""
    at, version = box.start + 6, view[box.start]
    sizes, more = view[box.start + 4], view[box.start + 5]
    widths = sizes >> 4, sizes & 15, more >> 4, more & 15 if version in (1, 2) else 0

    def number(width: int) -> int:
        nonlocal at
        at += width
        if at > box.end:
            raise IndexError
        return int.from_bytes(view[at - width : at])

    parts = 0
    for _ in range(number(4 if version == 2 else 2)):
        number(4 if version == 2 else 2)
        method = number(2) & 15 if version in (1, 2) else 0
        number(2)
        base, extents = number(widths[2]), number(2)
        parts += 1 + extents  # extents of no bytes may be as many as their number says
        if parts > _MAX_PARTS:
            refuse(f"more than {_MAX_PARTS:,} parts of images")
        for _ in range(extents):
            number(widths[3])
            offset, length = number(widths[0]), number(widths[1])
            if method == 0 and base + offset + length > len(view):
                _refuse_truncated(view, "the data of an image")


# --- JPEG 2000 --------------------------------------------------------------------------------------------------------

_MAX_TILES, _MAX_JP2_SEGMENTS = 10_000, 10_000
_JP2_CHANNELS = 4


def _read_jp2(view: memoryview, orientation: bool, max_scans: int) -> Header:
    """Read the codestream's header, and its tile parts up to the end marker (ITU-T T.800, annex A)."""
    at = _jp2_start(view)
    right, lower, left, upper, columns, rows, first_x, first_y, channels = struct.unpack_from(">8IH", view, at + 8)
    if channels > _JP2_CHANNELS:
        refuse(f"{channels} channels; a JPEG 2000 of at most {_JP2_CHANNELS} is decoded", UNSUPPORTED)
    if not columns or not rows:
        refuse("damaged header: tiles without pixels")
    tiles = -(-(right - first_x) // columns) * -(-(lower - first_y) // rows)
    if not 0 < tiles <= _MAX_TILES:
        refuse(f"{tiles:,} tiles; a JPEG 2000 of at most {_MAX_TILES:,} is decoded")
    at += 2
    for _ in range(_MAX_JP2_SEGMENTS):
        (marker,) = struct.unpack_from(">H", view, at)
        if marker == 0xFF90:
            break
        if marker >> 8 != 0xFF:
            refuse("damaged header: no marker where one should be")
        if marker == 0xFF52:
            _check_jp2_coding(view, at, right - left, lower - upper, tiles)
        at += 2 + struct.unpack_from(">H", view, at + 2)[0]
    else:
        refuse(f"more than {_MAX_JP2_SEGMENTS:,} segments up to the first tile")
    _check_jp2_tiles(view, at, tiles)
    return Header("jp2", right - left, lower - upper, channels, alpha=channels in (2, 4))


def _jp2_start(view: memoryview) -> int:
    """Return where the codestream begins."""
    at = 0
    if bytes(view[:4]) != _JP2_CODE:
        code = next((box for box in _boxes(view) if box.kind == b"jp2c"), None)
        if code is None:
            _refuse_truncated(view, "the codestream")
        at = code.start
    if bytes(view[at : at + 4]) != _JP2_CODE:
        refuse("damaged header: the codestream does not begin with the image's size")
    return at


def _check_jp2_tiles(view: memoryview, at: int, tiles: int) -> None:
    """Raise BadSampleError unless parts of all tiles follow from `at` on, and then the end marker."""
    seen, marker = set[int](), 0
    for _ in range(_MAX_PARTS):
        if at + 2 > len(view):
            _refuse_truncated(view, "a tile")
        (marker,) = struct.unpack_from(">H", view, at)
        if marker != 0xFF90:
            break
        tile, length = struct.unpack_from(">HI", view, at + 4)
        seen.add(tile)
        if length == 0:  # up to the end marker
            end = bytes(view[at:]).rfind(b"\xff\xd9")
            at = at + end if end > 0 else len(view)
        else:
            at += max(length, 12)
    if marker != 0xFFD9 or len(seen) < tiles:
        refuse(f"truncated: {len(seen)} of {tiles} tiles, then no end marker within {len(view)} bytes")


def _check_jp2_coding(view: memoryview, at: int, width: int, height: int, tiles: int) -> None:
    """Raise BadSampleError if the coding style at a marker COD would take far more time or memory than the pixels."""
    style, layers, levels = struct.unpack_from(">BxHxB", view, at + 4)
    if layers > _MAX_LAYERS or layers * tiles > _MAX_TILE_LAYERS:
        most = f"{_MAX_LAYERS:,} layers, {_MAX_TILE_LAYERS:,} of all tiles,"
        refuse(f"{layers:,} layers in {tiles:,} tiles; a JPEG 2000 of at most {most} is decoded")
    if style & 1:
        sizes = view[at + 14 : at + 15 + levels]
        sides = [(-(-width >> levels - r), -(-height >> levels - r), sizes[r]) for r in range(levels + 1)]
        precincts = sum(-(-x >> (size & 15)) * -(-y >> (size >> 4)) for x, y, size in sides)
        if precincts > width * height // _PRECINCT_PIXELS + 100 * tiles:
            refuse(f"{precincts:,} precincts, which is too many for {width}x{height} pixels")


_MAX_LAYERS, _MAX_TILE_LAYERS = 1000, 100_000
"""The largest number of quality layers, and of all tiles together. Encoders write at most about fifty."""
_PRECINCT_PIXELS = 256
"""The smallest number of pixels of a precinct, on average. OpenJPEG allocates memory for each of them."""


# --- JPEG XL ----------------------------------------------------------------------------------------------------------

_JXL_RATIOS = ((1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))


def _read_jxl(view: memoryview, orientation: bool, max_scans: int) -> Header:
    """Read the codestream's header (ISO/IEC 18181-1, annex D). libjxl itself notices whether the rest is there."""
    code = view
    if bytes(view[:2]) != _JXL_CODE:
        parts = [box for box in _boxes(view) if box.kind in (b"jxlc", b"jxlp")]
        if not parts:
            _refuse_truncated(view, "the codestream")
        code = view[parts[0].start + (4 if parts[0].kind == b"jxlp" else 0) : parts[0].end]
    if bytes(code[:2]) != _JXL_CODE:
        refuse("damaged header: the codestream does not begin with its mark")
    bits = _Bits(code[2:64])
    width, height = bits.size()
    turn, alpha = 1, False
    if not bits.take(1):  # not all of the metadata have their defaults
        if bits.take(1):
            turn = 1 + bits.take(3)
            if bits.take(1):
                bits.size()
            if bits.take(1):
                refuse("a preview; gpuflow decodes JPEG XL without one", UNSUPPORTED)
            if bits.take(1):
                refuse(ANIMATION, UNSUPPORTED)
        if bits.take(1):  # floating-point samples
            bits.choose((32, 0), (16, 0), (24, 0), (1, 6))
            bits.take(4)
        else:
            bits.choose((8, 0), (10, 0), (12, 0), (1, 6))
        bits.take(1)
        alpha = bits.choose((0, 0), (1, 0), (2, 4), (1, 12)) > 0
    used = turn if orientation else 1
    return Header("jxl", width, height, 3, orientation=used, alpha=alpha, turned=turn)


class _Bits:
    """Reads numbers from bits, the lowest ones of each byte first."""

    def __init__(self, view: memoryview) -> None:
        self._value, self._left = int.from_bytes(view, "little"), 8 * len(view)

    def take(self, count: int) -> int:
        """Return the number in the next bits."""
        self._left -= count
        if self._left < 0:
            raise IndexError
        found, self._value = self._value & (1 << count) - 1, self._value >> count
        return found

    def choose(self, *forms: tuple[int, int]) -> int:
        """Return a number that follows two bits, which choose its form: an offset, and how many bits are added."""
        offset, count = forms[self.take(2)]
        return offset + self.take(count)

    def size(self) -> tuple[int, int]:
        """Return (width, height)."""
        small = self.take(1)

        def side() -> int:
            return 8 * (1 + self.take(5)) if small else self.choose((1, 9), (1, 13), (1, 18), (1, 30))

        height, ratio = side(), self.take(3)
        if ratio == 0:
            return side(), height
        across, down = _JXL_RATIOS[ratio - 1]
        return height * across // down, height


READERS: dict[str, Reader] = {
    "tiff": _read_tiff,
    "gif": _read_gif,
    "avif": partial(_read_heif, "avif"),
    "heic": partial(_read_heif, "heic"),
    "jxl": _read_jxl,
    "jp2": _read_jp2,
}
"""What reads the header of each format, other than those of PNG and WebP."""


# --- decoding ---------------------------------------------------------------------------------------------------------

_EXTRA = "formats"
_OLDEST_PILLOW = 12
"""Older ones turn a TIFF by its XMP data, and have no AVIF or a decoder of it that can crash."""
_PILLOW_LACKS_MEMORY = ("out of memory", "decoder error -9")
"""How the texts of Pillow's OSErrors for its codecs' status -9 begin; they have no errno."""
_INTERPRETATION_TAG, _WHITE_IS_ZERO = 0x0106, 0
"""A TIFF's photometric interpretation, and its value in gray files whose level 0 is white."""


def decode_optional(data: Bytes, header: Header, *, alpha: bool) -> Bytes:
    """Decode a file whose header passed `codecs.probe`, as its library gives it: turned by `header.turned`.

    Returns:
        Gray, RGB or, if asked for and present, RGBA: uint8 [H, W, C]. Levels of 16 bits are their upper 8 bits.

    Raises:
        BadSampleError: the library refused the file. MissingExtra: the library is not installed. MemoryError: there is
            not enough memory for the image.
    """
    try:
        image = (_by_pylibjxl if header.format == "jxl" else _by_pillow)(data.tobytes(), header, alpha)
    except (BadSampleError, MissingExtra):
        raise
    except Exception as error:  # Pillow's parsers raise SyntaxError, struct.error, EOFError and others
        if is_system_fault(error):
            raise
        reason = reason_of(error)
        if isinstance(error, OSError) and reason.startswith(_PILLOW_LACKS_MEMORY):
            raise MemoryError(f"not enough memory to decode {LABELS[header.format]}") from error
        require_memory(header)
        refuse(f"the {LABELS[header.format]} decoder gave up: {reason}")
    _require_size(header, *image.shape[:2])
    return image


def _require_size(header: Header, height: int, width: int) -> None:
    """Raise BadSampleError if a library reads another size from a file than gpuflow, which checked it."""
    if (height, width) != header.decoded_size:
        rows, columns = header.decoded_size
        refuse(f"damaged header: two sizes, {columns}x{rows} and {width}x{height} pixels")


def missing_library(names: Sequence[str]) -> MissingExtra | None:
    """Return what must be installed before these formats of `decode.formats` are decoded; None if nothing."""
    for name in names:
        try:
            if name in _LIBRARIES:
                _LIBRARIES[name]()
        except MissingExtra as error:
            return error
    return None


# --- Pillow -----------------------------------------------------------------------------------------------------------


def _pillow(name: str) -> Any:
    """Import one of Pillow's classes of files, which reads one format, unlike Image.open."""
    import importlib

    import PIL

    if int(PIL.__version__.partition(".")[0]) < _OLDEST_PILLOW:
        raise MissingExtra(f"decoding {LABELS[name]}", f"Pillow {_OLDEST_PILLOW} or newer", _EXTRA)
    module: Any = importlib.import_module(f"PIL.{_PILLOW[name]}ImagePlugin")
    if not getattr(module, "SUPPORTED", True):
        raise MissingExtra(f"decoding {LABELS[name]}", "a Pillow that was built with it", _EXTRA)
    if name == "avif" and not module.DEFAULT_MAX_THREADS:
        module.DEFAULT_MAX_THREADS = 1  # gpuflow's threads decode several images at a time
    return getattr(module, f"{_PILLOW[name]}ImageFile")


def _by_pillow(data: bytes, header: Header, alpha: bool) -> Bytes:
    with _LIBRARIES[header.format]()(io.BytesIO(data)) as image:
        _require_size(header, image.height, image.width)  # before it allocates the image
        for key in ("xmp", "XML:com.adobe.xmp"):
            image.info.pop(key, None)  # else Pillow turns a TIFF by its XMP data
        image.load()
        return _levels(image, alpha)


def _levels(image: Any, alpha: bool) -> Bytes:
    """Return the pixels of a loaded Pillow image as `decode_optional` returns them."""
    if image.mode.startswith("I;16"):
        levels = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)[..., None]
        white_is_zero = image.format == "TIFF" and image.tag_v2.get(_INTERPRETATION_TAG) == _WHITE_IS_ZERO
        return 255 - levels if white_is_zero else levels  # Pillow inverts only levels of up to 8 bits
    if image.mode in ("I", "F", "LAB", "HSV"):
        refuse(f"pixels of Pillow's mode {image.mode}, which have no 8-bit levels; convert this image", UNSUPPORTED)
    opaque = "L" if image.mode in ("1", "L", "LA", "La") else "RGB"
    mode = "RGBA" if alpha and image.has_transparency_data else opaque
    return np.atleast_3d(np.asarray(image if image.mode == mode else image.convert(mode)))


# --- pillow-heif ------------------------------------------------------------------------------------------------------


def _pillow_heif() -> Any:
    """Import pillow-heif's class of files for Pillow."""
    try:
        import pillow_heif
    except ImportError as error:
        raise MissingExtra("decoding HEIC", "pillow-heif", _EXTRA) from error
    if pillow_heif.options.DECODE_THREADS == _HEIF_THREADS:
        pillow_heif.options.DECODE_THREADS = 1  # gpuflow's threads decode several images at a time
    return pillow_heif.HeifImageFile


_HEIF_THREADS = 4
"""The number of threads that pillow-heif starts for each image unless the program chose another one."""


# --- pylibjxl ---------------------------------------------------------------------------------------------------------


def _pylibjxl() -> Any:
    try:
        import pylibjxl
    except ImportError as error:
        raise MissingExtra("decoding JPEG XL", "pylibjxl", _EXTRA) from error
    return pylibjxl


_own = threading.local()


def _by_pylibjxl(data: bytes, header: Header, alpha: bool) -> Bytes:
    """Decode a JPEG XL. libjxl converts levels of any depth to 8 bits, rounded."""
    found = _pylibjxl().probe(data)
    _require_size(header, found["height"], found["width"])
    if not hasattr(_own, "jxl"):
        _own.jxl = _pylibjxl().JXL(threads=1, pool_size=1)
    pixels = np.atleast_3d(np.asarray(_own.jxl.decode(data), np.uint8))
    channels = pixels.shape[2]
    if channels == 2 and alpha:
        return pixels[..., [0, 0, 0, 1]]
    return pixels if channels in (1, 3) or alpha else pixels[..., : channels - 1]


_PILLOW = {"tiff": "Tiff", "gif": "Gif", "avif": "Avif", "jp2": "Jpeg2K", "webp_animated": "WebP"}
"""The formats that Pillow decodes, and how the names of their modules and classes begin."""
_LIBRARIES: dict[str, Callable[[], Any]] = {
    "heic": _pillow_heif,
    "jxl": _pylibjxl,
    **{name: partial(_pillow, name) for name in _PILLOW},
}
"""Maps each format to the function that imports its library, for Pillow its class. OpenCV decodes a PNG of 16 bits."""
