"""Decoding on the CPU: valid files give the pixels of OpenCV and Pillow, and bad files give a reason."""

from __future__ import annotations

import contextlib
import io
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps

from gpuflow.decode.chunk_files import engine_sampling, scan_headers
from gpuflow.decode.codecs import CpuDecoder, Header, _segments, decoder_description, probe
from gpuflow.errors import BadSampleError
from tests.datasets import python
from tests.decode.test_chunk_headers import payload
from tests.images import (
    SUBSAMPLINGS,
    as_array,
    core_bmp,
    encode,
    interlaced_png,
    jpeg,
    masked_bmp,
    patch_jpeg,
    patch_png,
    photo,
    pillow,
    png,
    png_bytes,
    png_chunk,
    segment,
    tiny_jpeg,
    with_orientation,
)

PIXELS = photo(37, 53)
FLAGS = {"rgb": cv2.IMREAD_COLOR_RGB, "bgr": cv2.IMREAD_COLOR_BGR, "gray": cv2.IMREAD_GRAYSCALE}
RGBA = np.dstack([PIXELS, PIXELS[..., 1]])

GOOD: dict[str, bytes] = {
    **{f"jpeg {name}": jpeg(PIXELS, name) for name in SUBSAMPLINGS},
    **{f"jpeg {name}, progressive": jpeg(PIXELS, name, progressive=True) for name in SUBSAMPLINGS},
    **{f"jpeg of {h}x{w}": jpeg(photo(h, w)) for h, w in ((1, 1), (1, 17), (17, 1), (2, 3), (8, 8), (16, 33))},
    "jpeg of quality 1": jpeg(PIXELS, quality=1),
    "jpeg, gray": jpeg(PIXELS[..., 0]),
    "jpeg, gray, progressive": jpeg(PIXELS[..., 0], progressive=True),
    "jpeg, CMYK": encode(Image.fromarray(PIXELS).convert("CMYK"), "JPEG"),
    "jpeg, kept as RGB": encode(PIXELS, "JPEG", keep_rgb=True),
    "jpeg, optimised, with restarts": encode(PIXELS, "JPEG", optimize=True, restart_marker_blocks=2),
    "jpeg, comment and bytes behind the end": jpeg(PIXELS)[:2] + segment(0xFE, b"hello") + jpeg(PIXELS)[2:] + b"\0" * 9,
    "jpeg, fill bytes between markers": jpeg(PIXELS)[:2] + b"\xff\xff\xff" + jpeg(PIXELS)[2:],
    "jpeg, factors 2x1 all over": tiny_jpeg(53, 37, [(2, 1)] * 3),
    "jpeg, factors 4x2": tiny_jpeg(53, 37, [(4, 2), (1, 1), (1, 1)]),
    "png": png(PIXELS),
    "png of 1x1": png(photo(1, 1)),
    "png, gray": png(PIXELS[..., 0]),
    "png, gray and alpha": encode(Image.fromarray(PIXELS).convert("LA"), "PNG"),
    "png, alpha": encode(RGBA, "PNG"),
    "png, palette": encode(Image.fromarray(PIXELS).quantize(40), "PNG"),
    "png, palette with transparency": encode(Image.fromarray(PIXELS).quantize(40), "PNG", transparency=3),
    "png of 1 bit": encode(Image.fromarray(PIXELS).convert("1"), "PNG"),
    "png, interlaced": interlaced_png(PIXELS),
    "webp": encode(PIXELS, "WEBP"),
    "webp, lossless": encode(PIXELS, "WEBP", lossless=True),
    "webp, alpha": encode(RGBA, "WEBP"),
    "webp, extended": encode(PIXELS, "WEBP", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0"),
    "bmp": encode(PIXELS, "BMP"),
    "bmp, gray": encode(PIXELS[..., 0], "BMP"),
    "bmp of OS/2": core_bmp(PIXELS),
}
ALPHA = {name for name in GOOD if "alpha" in name or "transparency" in name}


def decode(
    data: bytes, color: str = "rgb", *, turbo: bool = True, orientation: bool = False, **options: Any
) -> NDArray[np.uint8]:
    header = probe(as_array(data), orientation=orientation)
    decoder = CpuDecoder(color) if turbo else CpuDecoder(color, library=None)
    image, (top, left) = decoder.decode(as_array(data), header, **options)
    region = options.get("region")
    if region is None:
        assert (top, left) == (0, 0)
        assert image.shape[:2] == header.upright_size
    assert image.dtype == np.uint8
    assert image.shape[2] == (1 if color == "gray" else 3)
    return image


def opencv(data: bytes, color: str) -> NDArray[Any]:
    image: Any = cv2.imdecode(as_array(data), FLAGS[color] | cv2.IMREAD_IGNORE_ORIENTATION)
    return np.asarray(image if image.ndim == 3 else image[..., None])


# --- what is good ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("color", FLAGS)
@pytest.mark.parametrize("turbo", [True, False], ids=["turbo", "opencv"])
def test_pixels_are_opencvs(name: str, color: str, turbo: bool) -> None:
    assert np.array_equal(decode(GOOD[name], color, turbo=turbo), opencv(GOOD[name], color))


@pytest.mark.parametrize("name", sorted(GOOD.keys() - ALPHA))
def test_pixels_are_pillows(name: str) -> None:
    """Decoders convert CMYK by different formulas, within one level."""
    apart = decode(GOOD[name]).astype(int) - pillow(GOOD[name])
    assert np.abs(apart).max() <= (1 if "CMYK" in name else 0)


@pytest.mark.parametrize("header", [40, 52, 56, 108, 124])
@pytest.mark.parametrize("order", ["BGRX", "RGBX", "XBGR", "XRGB"])
def test_colors_of_a_bmp_of_32_bits_are_where_its_masks_say(order: str, header: int) -> None:
    masks = [0xFF << 8 * order.index(color) for color in "RGB"]
    data = masked_bmp(PIXELS, masks, bits=32, header=header)
    assert np.array_equal(decode(data), PIXELS)
    assert np.array_equal(decode(data, "bgr"), PIXELS[..., ::-1])
    with contextlib.suppress(OSError):  # Pillow does not read all of these
        assert np.array_equal(pillow(data), PIXELS)


@pytest.mark.parametrize("header", [40, 52, 56, 108, 124])
@pytest.mark.parametrize("bits", [(5, 6, 5), (5, 5, 5)])
def test_colors_of_a_bmp_of_16_bits_are_where_its_masks_say(bits: tuple[int, int, int], header: int) -> None:
    """Pillow makes white 255; with OpenCV it is 248, or 252 of 6 bits."""
    red, green, blue = bits
    masks = [(1 << red) - 1 << green + blue, (1 << green) - 1 << blue, (1 << blue) - 1]
    data = masked_bmp(PIXELS, masks, bits=16, header=header)
    shown = decode(data)
    assert np.array_equal(shown, PIXELS & np.array([256 - (256 >> count) for count in bits], np.uint8))
    assert np.abs(shown.astype(int) - pillow(data)).max() <= 7
    with pytest.raises(BadSampleError):
        decode(masked_bmp(PIXELS, [0xF00, 0xF0, 0xF], bits=16, header=header))


@pytest.mark.parametrize("name", GOOD)
def test_headers(name: str) -> None:
    header = probe(as_array(GOOD[name]))
    with Image.open(io.BytesIO(GOOD[name])) as image:
        assert (header.width, header.height) == image.size
        assert header.format == ("bmp" if image.format == "DIB" else str(image.format).lower())
        assert header.progressive == bool(image.info.get("progressive"))
    assert header.orientation == 1
    if header.format == "jpeg":
        assert header.channels == len(image.getbands())


def test_the_format_is_detected_by_content() -> None:
    assert [probe(as_array(GOOD[name])).format for name in ("jpeg 4:2:0", "png", "webp", "bmp")] == [
        "jpeg",
        "png",
        "webp",
        "bmp",
    ]


# --- orientation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("color", ["rgb", "gray"])
def test_orientation_is_applied_as_pillow_does(form: str, orientation: int, color: str) -> None:
    data = with_orientation(PIXELS, form, orientation, **({"lossless": True} if form == "WEBP" else {}))
    header = probe(as_array(data), orientation=True)
    assert header.orientation == orientation
    assert header.upright_size == ((53, 37) if orientation >= 5 else (37, 53))
    if color == "rgb":
        with Image.open(io.BytesIO(data)) as image:
            upright = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        assert np.array_equal(decode(data, orientation=True), upright)
    assert np.array_equal(decode(data, color), opencv(data, color))
    upright = decode(data, color, orientation=True)
    if orientation != 1:  # then the whole is decoded
        assert np.array_equal(decode(data, color, orientation=True, region=(3, 5, 9, 11)), upright)


def tiff(entry: bytes, order: str = "<", count: int = 1) -> bytes:
    return struct.pack(order + "2sHIH", b"II" if order == "<" else b"MM", 42, 8, count) + entry


INTEGERS = [
    (order, kind, form) for order in "<>" for kind, form in ((3, "H2x"), (4, "I"), (6, "b3x"), (8, "h2x"), (9, "i"))
]
"""Byte orders, types of EXIF data (SHORT, LONG, SBYTE, SSHORT, SLONG), and struct's formats for them."""


@pytest.mark.parametrize(
    ("block", "orientation"),
    [
        (tiff(struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0)), 6),
        (tiff(struct.pack(">HHIHH", 0x0112, 3, 1, 8, 0), ">"), 8),
        (tiff(struct.pack("<HHII", 0x0100, 4, 1, 9) + struct.pack("<HHIHH", 0x0112, 3, 1, 3, 0), count=2), 3),
        (tiff(struct.pack("<HHIHH", 0x0112, 3, 1, 9, 0)), 1),
        (tiff(struct.pack("<HHIHH", 0x0112, 3, 1, 0, 0)), 1),
        (tiff(struct.pack("<HHIHH", 0x0112, 2, 1, 6, 0)), 1),
        *((tiff(struct.pack(f"{order}HHI{form}", 0x0112, kind, 1, 6), order), 6) for order, kind, form in INTEGERS),
        (tiff(struct.pack("<HHIh2x", 0x0112, 8, 1, -6)), 1),
        (tiff(struct.pack("<HHII", 0x0112, 4, 1, 0x10006)), 1),
        (tiff(struct.pack("<HHIH", 0x0112, 4, 1, 6)), 1),
        (tiff(struct.pack("<HHIB3x", 0x0112, 1, 1, 6)), 1),
        (tiff(b"", count=9), 1),
        (b"II*\0\xff\xff\xff\xff", 1),
        (b"XX*\0\x08\0\0\0", 1),
        (b"", 1),
    ],
)
def test_exif_blocks(block: bytes, orientation: int) -> None:
    data = jpeg(PIXELS)[:2] + segment(0xE1, b"Exif\0\0" + block) + jpeg(PIXELS)[2:]
    assert probe(as_array(data), orientation=True).orientation == orientation
    assert probe(as_array(data)).orientation == 1
    assert scan_headers(payload([data]), max_scans=20, orientation=True).orientations.tolist() == [orientation]
    body = encode(PIXELS, "WEBP")[12:]
    head = b"VP8X" + struct.pack("<IB3x", 10, 0x08) + (52).to_bytes(3, "little") + (36).to_bytes(3, "little")
    for prefix in (b"", b"Exif\0\0"):
        exif = prefix + block
        chunk = b"EXIF" + struct.pack("<I", len(exif)) + exif + b"\0" * (len(exif) % 2)
        riff = b"WEBP" + head + body + chunk
        webp = b"RIFF" + struct.pack("<I", len(riff)) + riff
        assert probe(as_array(webp), orientation=True).orientation == orientation


@pytest.mark.parametrize("first", [6, 1])
def test_the_first_exif_segment_gives_the_orientation(first: int) -> None:
    """As in Pillow. A second segment may continue the data of the first one, which holds at most 64 KB."""
    six, one = (b"Exif\0\0" + tiff(struct.pack("<HHIHH", 0x0112, 3, 1, turn, 0)) for turn in (6, 1))
    block, other = (six, one) if first == 6 else (one, six)
    data = jpeg(PIXELS)
    for segments in ((block, other), (block + b"\0" * 65_000, b"Exif\0\0" + b"\1" * 3_000)):
        file = data[:2] + b"".join(segment(0xE1, body) for body in segments) + data[2:]
        assert probe(as_array(file), orientation=True).orientation == first
        with Image.open(io.BytesIO(file)) as image:
            upright = np.asarray(ImageOps.exif_transpose(image))
        assert np.array_equal(decode(file, orientation=True), upright)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(("order", "kind", "layout"), INTEGERS)
def test_an_orientation_of_any_integer_type_turns_as_pillow_does(form: str, order: str, kind: int, layout: str) -> None:
    entry = tiff(struct.pack(f"{order}HHI{layout}", 0x0112, kind, 1, 6), order) + bytes(4)
    data = encode(PIXELS, form, exif=b"Exif\0\0" + entry, **({"lossless": True} if form == "WEBP" else {}))
    with Image.open(io.BytesIO(data)) as image:
        upright = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    assert upright.shape[:2] == PIXELS.shape[1::-1]
    assert np.array_equal(decode(data, orientation=True), upright)


# --- regions ---------------------------------------------------------------------------------------------------------


@settings(max_examples=120)
@given(name=st.sampled_from(sorted(GOOD)), color=st.sampled_from(sorted(FLAGS)), turbo=st.booleans(), data=st.data())
def test_a_region_is_the_whole_images_crop(name: str, color: str, turbo: bool, data: st.DataObject) -> None:
    whole = opencv(GOOD[name], color)
    y, x = (data.draw(st.integers(0, side - 1)) for side in whole.shape[:2])
    h, w = (data.draw(st.integers(1, side - at)) for side, at in zip(whole.shape[:2], (y, x), strict=True))
    header = probe(as_array(GOOD[name]))
    decoder = CpuDecoder(color) if turbo else CpuDecoder(color, library=None)
    image, (top, left) = decoder.decode(as_array(GOOD[name]), header, (y, x, h, w))
    assert np.array_equal(image[y - top : y - top + h, x - left : x - left + w], whole[y : y + h, x : x + w])


def test_only_a_region_is_decoded_if_that_saves_time() -> None:
    box = (8, 9, 20, 21)
    assert decode(GOOD["jpeg 4:2:0"], region=box).shape == (20, 21, 3)
    for name in ("jpeg 4:2:0, progressive", "jpeg, factors 4x2"):
        assert decode(GOOD[name], region=box).shape == (20, 21, 3)
    for name in ("png", "jpeg, CMYK"):
        assert decode(GOOD[name], region=box).shape == (37, 53, 3)
    assert decode(GOOD["jpeg 4:2:0"], region=(0, 0, 36, 52)).shape == (37, 53, 3)
    assert decode(GOOD["jpeg 4:2:0"], turbo=False, region=box).shape == (37, 53, 3)


def test_a_decoder_frees_memory_after_a_huge_image() -> None:
    decoder = CpuDecoder("rgb")
    huge, small = as_array(jpeg(np.zeros((5000, 6000), np.uint8))), as_array(GOOD["jpeg 4:2:0"])
    assert decoder.decode(huge, probe(huge))[0].shape == (5000, 6000, 3)
    image, _ = decoder.decode(small, probe(small))
    assert np.array_equal(image, opencv(GOOD["jpeg 4:2:0"], "rgb"))
    assert image.base is not None and image.base.nbytes <= 1 << 20


# --- what is bad -----------------------------------------------------------------------------------------------------

JPEG, PNG, WEBP, BMP = (GOOD[name] for name in ("jpeg 4:2:0", "png", "webp", "bmp"))
SCAN = JPEG.index(b"\xff\xda")
FRAME = JPEG.index(b"\xff\xc0")
KNOWN = "gpuflow decodes JPEG, PNG, WebP, BMP and PNM"
NAME_IT = f"{KNOWN}; to have it decoded, name it in decode.formats:"
TINY_FRAME = segment(0xC0, struct.pack(">BHHB", 8, 8, 8, 3) + bytes((1, 0x11, 0, 2, 0x11, 1, 3, 0x11, 1)))


def two_faced() -> bytes:
    """A JPEG of 53x37 pixels, as libjpeg finds; a reader that expects a length after RST markers finds 8x8."""
    true_frame = JPEG[FRAME : FRAME + 19]
    hidden = segment(0xFE, TINY_FRAME)
    leap = b"\xff\xd0" + struct.pack(">H", 2 + len(true_frame) + 4)
    return JPEG[:FRAME] + leap + true_frame + hidden + JPEG[FRAME + 19 :]


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty: the file has no bytes"),
    "text": (b"hello, world\n", f"not an image: begins with 68 65 6c 6c; {KNOWN}"),
    "one byte": (b"\xff", f"not an image: begins with ff; {KNOWN}"),
    "html": (b"<html>", f"not an image: begins with 3c 68 74 6d; {KNOWN}"),
    "gif": (encode(PIXELS, "GIF"), f"GIF is not supported; {NAME_IT} [gif]"),
    "tiff": (encode(PIXELS, "TIFF"), f"TIFF is not supported; {NAME_IT} [tiff]"),
    "tiff, big-endian": (b"MM\0*\0\0\0\x08", f"TIFF is not supported; {NAME_IT} [tiff]"),
    "pdf": (b"%PDF-1.4", f"PDF is not supported; {KNOWN}, so convert this file"),
    "avif": (b"\0\0\0\x1cftypavif", f"AVIF is not supported; {NAME_IT} [avif]"),
    "a film": (b"\0\0\0\x1cftypisom", f"AVIF/HEIF of an unknown kind is not supported; {KNOWN}, so convert this file"),
    "jpeg, no more than its magic": (JPEG[:3], "truncated: the header breaks off after 3 bytes"),
    "jpeg, half a header": (JPEG[: FRAME + 5], f"truncated: the header breaks off after {FRAME + 5} bytes"),
    "jpeg, half a scan": (
        JPEG[: SCAN + 200],
        f"truncated: no end-of-image marker within {SCAN + 200} bytes",
    ),
    "jpeg, one byte short": (JPEG[:-1], f"truncated: no end-of-image marker within {len(JPEG) - 1} bytes"),
    "jpeg of 60000x60000": (
        patch_jpeg(JPEG, width=60_000, height=60_000),
        "60000x60000 = 3,600,000,000 pixels are more than max_pixels = 179,000,000",
    ),
    "jpeg without height": (patch_jpeg(JPEG, height=0), "the header gives a size of 53x0 pixels"),
    "jpeg without width": (patch_jpeg(JPEG, width=0), "the header gives a size of 0x37 pixels"),
    "jpeg of 12 bits": (
        patch_jpeg(JPEG, bits=12),
        "12 bits per channel; gpuflow decodes images of 8 bits, so convert this one",
    ),
    "jpeg, nothing but stray bytes": (
        JPEG[:2] + b"\xff\xfe\0\x02" + b"abcd" * 9,
        "truncated: the header breaks off after 42 bytes",
    ),
    "jpeg, end before the scan": (b"\xff\xd8\xff\xd9", "damaged header: the image ends before its first scan"),
    "jpeg, scan before the frame": (
        JPEG[:FRAME] + JPEG[SCAN:],
        "damaged header: a scan begins before the image's size is given",
    ),
    "png, no more than its magic": (PNG[:8], "truncated: the header breaks off after 8 bytes"),
    "png, half": (PNG[:200], "truncated: no IEND chunk at the end of 200 bytes"),
    "png, a chunk that promises a gigabyte": (
        PNG[:33] + b"\x40\0\0\0" + PNG[37:],
        f"truncated: no IEND chunk at the end of {len(PNG)} bytes",
    ),
    "png, animated": (
        encode(PIXELS, "PNG", save_all=True, append_images=[Image.fromarray(255 - PIXELS)]),
        "an animation; gpuflow decodes still images",
    ),
    "png, four bytes short": (PNG[:-4], f"truncated: no IEND chunk at the end of {len(PNG) - 4} bytes"),
    "png of 16 bits": (
        encode(Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 256), "PNG"),
        "16 bits per channel; gpuflow decodes images of 8 bits, so convert this one, or name it in decode.formats: "
        "[png16]",
    ),
    "png of 60000x60000": (
        patch_png(PNG, width=60_000, height=60_000),
        "60000x60000 = 3,600,000,000 pixels are more than max_pixels = 179,000,000",
    ),
    "png, a side that OpenCV refuses": (
        png_bytes(2_000_000, 1),
        "2000000x1 pixels; OpenCV decodes at most 1,048,576 a side",
    ),
    "png of nothing": (png_bytes(0, 5), "the header gives a size of 0x5 pixels"),
    "webp, half": (WEBP[:200], f"truncated: the header promises {len(WEBP)} bytes, there are 200"),
    "webp, no more than its magic": (WEBP[:12], f"truncated: the header promises {len(WEBP)} bytes, there are 12"),
    "webp, animated": (
        encode(PIXELS, "WEBP", save_all=True, append_images=[Image.fromarray(255 - PIXELS)]),
        "an animation; gpuflow decodes still images; for the first frame, name it in decode.formats: [webp_animated]",
    ),
    "webp, unknown chunk": (
        WEBP[:12] + b"VP9 " + WEBP[16:],
        "damaged header: unknown WebP chunk b'VP9 '",
    ),
    "bmp, half": (BMP[:200], f"truncated: the header promises {len(BMP)} bytes, there are 200"),
    "bmp, no more than its magic": (BMP[:10], "truncated: the header breaks off after 10 bytes"),
}
UNDECODABLE: dict[str, tuple[bytes, str]] = {
    "jpeg, no tables": (
        JPEG[:2] + JPEG[FRAME:].replace(b"\xff\xc4", b"\xff\xfe"),
        "the JPEG decoder gave up; the data is damaged",
    ),
    "png, no rows": (png_bytes(9, 9), "the PNG decoder gave up; the data is damaged"),
    "png, header damaged": (
        PNG[:19] + b"\x36" + PNG[20:],
        "the PNG decoder gave up; the data is damaged",
    ),
    "webp, no data": (
        b"RIFF" + struct.pack("<I", 32) + WEBP[8:16] + struct.pack("<I", 20) + WEBP[20:40],
        "the WEBP decoder gave up; the data is damaged",
    ),
    "bmp of no known kind": (
        BMP[:28] + b"\x07" + BMP[29:],
        "the BMP decoder gave up; the data is damaged",
    ),
}


def test_a_png_of_very_many_chunks_without_pixels_is_bad() -> None:
    """libpng writes a line to stderr for each empty tEXt chunk."""
    empty = struct.pack(">I4sI", 0, b"tEXt", zlib.crc32(b"tEXt"))
    first = len(b"\x89PNG\r\n\x1a\n") + 12 + 13
    others = sum(PNG.count(name) for name in (b"PLTE", b"tEXt")) + 1  # and IHDR
    most = np.frombuffer(PNG[:first] + (1000 - others) * empty + PNG[first:], np.uint8)
    assert probe(most).format == "png"
    more = np.frombuffer(PNG[:first] + (1001 - others) * empty + PNG[first:], np.uint8)
    with pytest.raises(BadSampleError, match="more than 1,000 chunks without pixels"):
        probe(more)


def test_chunks_of_pixels_behind_others_are_without_pixels() -> None:
    """libpng writes a line to stderr for each of them, too."""
    end = PNG.index(b"IEND") - 4
    pixels, text = (struct.pack(">I4sI", 0, name, zlib.crc32(name)) for name in (b"IDAT", b"tEXt"))
    assert probe(np.frombuffer(PNG[:end] + 1001 * pixels + PNG[end:], np.uint8)).format == "png"
    with pytest.raises(BadSampleError, match="more than 1,000 chunks without pixels"):
        probe(np.frombuffer(PNG[:end] + text + 1001 * pixels + PNG[end:], np.uint8))


@pytest.mark.parametrize("name", [b"zTXt", b"iTXt"])
def test_a_png_with_many_chunks_of_compressed_text_is_refused(name: bytes) -> None:
    """libpng inflates all of them: 100 chunks of 8 KB took 6 s. Text that is not compressed does not count."""

    def with_texts(count: int, flag: bytes = b"\1") -> NDArray[np.uint8]:
        head = b"key\0" + (b"\0" if name == b"zTXt" else flag + b"\0\0\0")
        return np.frombuffer(PNG[:33] + png_chunk(name, head + zlib.compress(bytes(1000))) * count + PNG[33:], np.uint8)

    probe(with_texts(16))
    with pytest.raises(BadSampleError, match="more than 16 chunks of compressed text"):
        probe(with_texts(17))
    if name == b"iTXt":
        probe(with_texts(100, b"\0"))


def test_a_webp_of_very_many_chunks_is_bad_where_its_orientation_is_looked_for() -> None:
    count = 200_000
    head = b"RIFF" + struct.pack("<I", 22 + 8 * count) + b"WEBPVP8X" + struct.pack("<I", 10)
    data = np.frombuffer(head + bytes(10 + 8 * count), np.uint8)
    assert probe(data).width == 1
    with pytest.raises(BadSampleError, match="more than 200,000 chunks"):
        probe(data, orientation=True)


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("orientation", [False, True])
def test_errors_of_the_header(name: str, orientation: bool) -> None:
    data, reason = BAD[name]
    with pytest.raises(BadSampleError) as caught:
        probe(as_array(data), orientation=orientation)
    assert str(caught.value) == f"decode: {reason}"
    assert (caught.value.stage, caught.value.reason) == ("decode", reason)


@pytest.mark.parametrize("name", UNDECODABLE)
def test_errors_of_the_decoder(name: str) -> None:
    data, reason = UNDECODABLE[name]
    header = probe(as_array(data))
    for region in (None, (0, 0, 3, 3)):
        with pytest.raises(BadSampleError) as caught:
            CpuDecoder("rgb").decode(as_array(data), header, region)
        assert str(caught.value) == f"decode: {reason}"


def with_segment(code: int, body: bytes) -> bytes:
    """The JPEG with one segment more, right after its start."""
    return JPEG[:2] + bytes((0xFF, code)) + (2 + len(body)).to_bytes(2) + body + JPEG[2:]


@pytest.mark.parametrize(
    "data",
    [
        with_segment(0xDB, b"\x04" + bytes(range(1, 65))),
        with_segment(0xDB, bytes(range(60))),
        with_segment(0xC4, b"\x04" + bytes(15) + b"\x01\x00"),
        with_segment(0xC4, b"\x20" + bytes(15) + b"\x01\x00"),
        with_segment(0xC4, b"\x00" + bytes(15) + b"\x09\x00"),
        with_segment(0xC4, bytes(9)),
    ],
    ids=["quantisation table 4", "half a table", "Huffman table 4", "of no class", "without symbols", "half a head"],
)
def test_a_file_with_a_segment_that_libjpeg_refuses_is_not_for_the_engines(data: bytes) -> None:
    assert engine_sampling(as_array(JPEG)) is not None
    assert engine_sampling(as_array(data)) is None
    with pytest.raises(BadSampleError):
        decode(data)


def test_a_file_that_ends_soon_after_a_short_adobe_segment_is_not_for_the_engines() -> None:
    frame = JPEG[JPEG.index(b"\xff\xc0") : JPEG.index(b"\xff\xc4")]
    data = as_array(JPEG[:2] + frame + b"\xff\xee\x00\x07Adobe" + b"\xff\xda\x00\x02\xff\xd9")
    assert engine_sampling(data) is None


def test_the_size_is_that_which_libjpeg_finds() -> None:
    data = as_array(two_faced())
    assert probe(data).size == (37, 53)
    assert engine_sampling(data) is None
    assert np.array_equal(decode(two_faced()), decode(JPEG))


@pytest.mark.parametrize("library", ["auto", None])
def test_an_image_of_another_size_than_its_header_was_read_to_give_is_refused(library: Any) -> None:
    with pytest.raises(BadSampleError) as caught:
        CpuDecoder("rgb", library=library).decode(as_array(JPEG), Header("jpeg", 8, 8, 3))
    assert str(caught.value) == "decode: damaged header: two sizes, 8x8 and 53x37 pixels"


def test_max_pixels_is_the_largest_that_passes() -> None:
    assert probe(as_array(JPEG), max_pixels=37 * 53) == Header("jpeg", 53, 37, 3)
    with pytest.raises(BadSampleError) as caught:
        probe(as_array(JPEG), max_pixels=37 * 53 - 1)
    assert str(caught.value) == "decode: 53x37 = 1,961 pixels are more than max_pixels = 1,960"


@pytest.mark.parametrize("subsampling", ["4:2:2", "4:2:0"])
def test_images_are_too_narrow_for_the_engines_where_the_cpu_repeats_chroma(subsampling: str) -> None:
    for width in range(2, 9):
        pixels = 64 + photo(30, width, seed=width) // 2  # so that no color leaves the range of RGB
        data = as_array(jpeg(pixels, subsampling))
        header = probe(data)
        decoded, _ = CpuDecoder("rgb").decode(data, header)
        red = cv2.cvtColor(decoded, cv2.COLOR_RGB2YCrCb)[:, : width // 2 * 2, 1].astype(int)
        repeated = np.abs(red[:, ::2] - red[:, 1::2]).max() <= 1  # level that rounding may cost
        assert (engine_sampling(data) is not None) != repeated, width


# --- noise -----------------------------------------------------------------------------------------------------------


def attempt(data: bytes, color: str, region: tuple[int, int, int, int] | None) -> bool:
    """Whether these bytes decode. Any exception other than BadSampleError fails the test."""
    try:
        header = probe(as_array(data), max_pixels=10**6, orientation=True)
        height, width = header.upright_size
        if region is not None:
            y, x, h, w = region
            region = (y % height, x % width, 1 + h % (height - y % height), 1 + w % (width - x % width))
        under = (9, 8, 7) if header.alpha and header.width % 2 else None
        image, (top, left) = CpuDecoder(color, background=under).decode(as_array(data), header, region)
    except BadSampleError as error:
        assert error.stage == "decode"  # noqa: PT017
        assert error.reason  # noqa: PT017
        return False
    y, x, h, w = region or (0, 0, height, width)
    assert image[y - top : y - top + h, x - left : x - left + w].shape[:2] == (h, w)
    return True


def damaged(data: bytes, rng: np.random.Generator) -> Iterator[bytes]:
    """The file truncated, with bytes changed, and with a piece removed or duplicated."""
    for _ in range(12):
        yield data[: rng.integers(0, len(data))]
    for _ in range(40):
        noisy = bytearray(data)
        reach = len(data) if rng.random() < 0.5 else min(len(data), 700)
        for place in rng.integers(0, reach, rng.integers(1, 6)):
            noisy[place] = rng.integers(0, 256)
        yield bytes(noisy)
    for _ in range(12):
        start, end = sorted(rng.integers(0, len(data), 2))
        yield data[:start] + data[end:]
        yield data[:end] + data[start:]


@pytest.mark.parametrize("name", GOOD)
def test_noise_is_decoded_or_bad_and_nothing_else(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(list(name.encode()))
    decoded = 0
    for data in damaged(GOOD[name], rng):
        box = tuple(int(n) for n in rng.integers(0, 50, 4)) if rng.random() < 0.5 else None
        decoded += attempt(data, rng.choice(list(FLAGS)), box)  # type: ignore[arg-type]
    capfd.readouterr()  # the libraries' own complaints
    assert attempt(GOOD[name], "rgb", None)


@settings(max_examples=200)
@given(magic=st.sampled_from([b"", b"\xff\xd8\xff", PNG[:16], PNG[:29], WEBP[:12], WEBP[:20], b"BM"]), body=st.binary())
def test_random_bytes_are_bad_and_nothing_else(magic: bytes, body: bytes) -> None:
    attempt(magic + body, "rgb", None)


def test_a_header_without_end_takes_no_longer_than_its_length() -> None:
    for filler in (b"\xff" * 200_000, b"\xff\xfe\0\0" * 50_000, b"\xff\xfe\0\2" * 50_000):
        with pytest.raises(BadSampleError):
            probe(as_array(b"\xff\xd8" + filler))
    endless = b"RIFF" + struct.pack("<I", 400_004) + b"WEBP" + b"VP8X" + bytes((10, 0, 0, 0, 8, *[0] * 9))
    with pytest.raises(BadSampleError):
        decode(endless + b"\0" * 400_000, orientation=True)


# --- lack of memory ---------------------------------------------------------------------------------------------------

LACK = """
import resource, sys
import cv2, numpy as np
from gpuflow.decode.codecs import CpuDecoder, probe
from gpuflow.decode.preset import Preset
def used():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
data = cv2.imencode(".jpg", np.full((6000, 6000, 3), 90, np.uint8), [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])[1].reshape(-1)
header, preset = probe(data), Preset(name="torchpipe_cpu", height=8, width=8)
decoders = {
    "opencv": lambda: CpuDecoder("rgb", library=None).decode(data, header)[0],
    "any": lambda: CpuDecoder("rgb").decode(data, header)[0],
    "preset": lambda: preset.decode(data),
}
resource.setrlimit(resource.RLIMIT_AS, (used() + (int(sys.argv[1]) << 20), -1))
for name, decode in decoders.items():
    try:
        print(name, decode().shape)
    except (MemoryError, ValueError) as error:
        print(name, isinstance(error, MemoryError))
"""
"""Decodes a progressive JPEG of 103 MiB, for which libjpeg needs as much again, within a limit in MiB."""


@pytest.mark.parametrize("limit", [60, 130, 170])
def test_lack_of_memory_makes_no_sound_file_bad(limit: int) -> None:
    """OpenCV says nothing of libjpeg's lack of memory: it returns no image, as for a damaged file."""
    done = python(LACK, str(limit))
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert found.keys() == {"opencv", "any", "preset"}, done.stderr
    assert (found["opencv"], found["preset"]) == ("True", "True")
    assert found["any"] in ("True", "(6000, 6000, 3)"), "libjpeg-turbo takes less memory, where it is installed"


def test_with_enough_memory_the_same_file_is_decoded() -> None:
    done = python(LACK, "600")
    assert done.stdout.splitlines() == ["opencv (6000, 6000, 3)", "any (6000, 6000, 3)", "preset (8, 8, 3)"]


# --- which decoders --------------------------------------------------------------------------------------------------


def test_description_names_the_decoders() -> None:
    text = decoder_description()
    version = re.match(r"libjpeg-turbo (\d+\.\d+\.\d+) ", text)
    assert version is not None
    assert text == f"libjpeg-turbo {version[1]} (JPEG, only the region of a crop), OpenCV {cv2.__version__} (the rest)"


# --- stray bytes between segments -------------------------------------------------------------------------------------


def with_stray_bytes(data: bytes, stray: bytes, places: Sequence[int]) -> bytes:
    """A JPEG with stray bytes before these segments of its header, the first of which is number 0."""
    starts = [at for _, at, _ in _segments(memoryview(data))]
    for at in sorted((starts[place] for place in places), reverse=True):
        data = data[:at] + stray + data[at:]
    return data


@pytest.mark.parametrize(
    "stray", [b"abcd", b"\0", b"\xff\0", b"\0\xff\xff", b"\xff\xd3", b"\xff\x01", b"\xff\0\xff\xff\xff"]
)
@pytest.mark.parametrize("progressive", [False, True])
def test_stray_bytes_between_segments_are_skipped_as_libjpeg_does(stray: bytes, progressive: bool) -> None:
    whole = jpeg(photo(37, 53), progressive=progressive)
    expected = decode(whole)
    for places in ([1], [2, 3], [-1], range(1, 5)):
        data = with_stray_bytes(whole, stray, places)
        reference = torchvision.io.decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        assert np.array_equal(reference.permute(1, 2, 0).numpy(), pillow(whole))
        header = probe(as_array(data))
        for decoder in (CpuDecoder("rgb"), CpuDecoder("rgb", library=None)):
            image, _ = decoder.decode(as_array(data), header)
            assert np.array_equal(image, expected)
        if stray.strip(b"\xff"):
            assert engine_sampling(as_array(data)) is None, "NVIDIA's engines get only what is certain"


def test_fill_bytes_are_no_stray_bytes() -> None:
    data = with_stray_bytes(jpeg(photo(37, 53)), b"\xff\xff", [2, 3])
    assert engine_sampling(as_array(data)) == 0x22


# --- alpha ------------------------------------------------------------------------------------------------------------


def transparent(mode: str, **options: Any) -> bytes:
    """Every alpha of 0 to 255 over every fourth level, in a PNG of this mode, or in a WebP."""
    y, x = np.mgrid[:256, :64]
    level, alpha = (x * 4).astype(np.uint8), y.astype(np.uint8)
    pixels = np.stack([level, 255 - level, level // 2 + 20, alpha], axis=-1)
    image = Image.fromarray(pixels, "RGBA")
    if mode == "P":
        image = image.quantize(64)
    elif mode in ("L", "RGB"):
        image = image.convert("RGB").convert(mode)
    elif mode == "LA":
        image = image.convert("LA")
    return encode(image, options.pop("form", "PNG"), **options)


TRANSPARENT = {
    "png, RGBA": transparent("RGBA"),
    "png, gray and alpha": transparent("LA"),
    "png, palette": transparent("P"),
    "png, a transparent level": transparent("L", transparency=149),
    "png, a transparent color": transparent("RGB", transparency=(8, 247, 24)),
    "webp, lossless": transparent("RGBA", form="WEBP", lossless=True, exact=True),
}


@pytest.mark.parametrize("name", TRANSPARENT)
@pytest.mark.parametrize("background", [(0, 0, 0), (255, 255, 255), (255, 0, 9)], ids=str)
def test_alpha_over_a_background_is_pillows_composition(name: str, background: tuple[int, int, int]) -> None:
    data = TRANSPARENT[name]
    header = probe(as_array(data))
    assert header.alpha
    with Image.open(io.BytesIO(data)) as image:
        layer = image.convert("RGBA")
    assert np.asarray(layer)[..., 3].min() < 255
    expected = Image.alpha_composite(Image.new("RGBA", layer.size, (*background, 255)), layer).convert("RGB")
    for color in ("rgb", "bgr"):
        shown, _ = CpuDecoder(color, background=background).decode(as_array(data), header)
        pixels = np.asarray(expected)[..., :: 1 if color == "rgb" else -1]
        assert shown.shape == pixels.shape
        assert np.abs(shown.astype(int) - pixels).max() <= 1
    gray, _ = CpuDecoder("gray", background=background).decode(as_array(data), header)
    assert gray.shape == (*layer.size[::-1], 1)
    assert np.abs(gray[..., 0].astype(int) - np.asarray(expected.convert("L"))).max() <= 2


@pytest.mark.parametrize("data", [PNG, WEBP, BMP, JPEG], ids=["png", "webp", "bmp", "jpeg"])
def test_a_background_changes_no_opaque_image(data: bytes) -> None:
    header = probe(as_array(data))
    assert not header.alpha
    with_background, _ = CpuDecoder("rgb", background=(9, 8, 7)).decode(as_array(data), header)
    assert np.array_equal(with_background, decode(data))


def test_without_a_background_alpha_is_dropped() -> None:
    """The pixels are those of the file, for any alpha."""
    data = TRANSPARENT["png, RGBA"]
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(decode(data), np.asarray(image)[..., :3])
