"""Formats that decode.formats names: their pixels, conventions and limits, and what damage to them becomes."""

from __future__ import annotations

import io
import struct
import sys
import typing
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple

import cv2
import numpy as np
import PIL
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageFile, features

from gpuflow.config.stage_entries import make_stage
from gpuflow.decode import header
from gpuflow.decode.codecs import CpuDecoder, Header, probe
from gpuflow.decode.header import stored, upright
from gpuflow.decode.optional_formats import LABELS, missing_library
from gpuflow.errors import BadSampleError, ConfigError, MissingExtra
from gpuflow.execute.cpu.masks import decode_mask
from gpuflow.pipeline.records import MaskFile
from gpuflow.stages import STAGES, Decode
from tests.images import as_array, encode, jpeg, photo, with_orientation

Pixels = NDArray[np.uint8]

PIXELS = photo(37, 53)
RGBA = np.dstack([PIXELS, photo(37, 53, seed=1)[..., 0]])
GRAY = PIXELS[..., 0].copy()
DEEP = np.random.default_rng(0).integers(0, 1 << 16, (37, 53, 4), np.uint16)
FORMATS = tuple(LABELS)


def need(*names: str) -> None:
    """Skip a test where what decodes these formats is not installed."""
    if (missing := missing_library(names)) is not None:
        pytest.skip(str(missing))


class File(NamedTuple):
    """An encoded image: format as decode.formats names it; pixels as they must come out, None for a lossy file."""

    format: str
    make: Callable[[], bytes]
    pixels: Pixels | None = None
    alpha: bool = False


def pil(form: str, image: Pixels | Image.Image = PIXELS, **options: Any) -> Callable[[], bytes]:
    return lambda: encode(image, form, **options)


def mode(name: str) -> Image.Image:
    return Image.fromarray(RGBA if name in ("RGBA", "LA") else PIXELS).convert(name)


def by_opencv(suffix: str, pixels: NDArray[Any]) -> Callable[[], bytes]:
    bgr = pixels if pixels.ndim == 2 else pixels[..., [2, 1, 0, 3][: pixels.shape[2]]]
    return lambda: bytes(cv2.imencode(suffix, np.ascontiguousarray(bgr))[1].tobytes())


def by_pylibjxl(pixels: Pixels, **options: Any) -> Callable[[], bytes]:
    def make() -> bytes:
        import pylibjxl

        return bytes(pylibjxl.encode(pixels, **options))

    return make


def by_pillow_heif(pixels: Pixels, *, orientation: int = 1, **options: Any) -> Callable[[], bytes]:
    def make() -> bytes:
        import pillow_heif

        stream = io.BytesIO()
        image = pillow_heif.from_pillow(Image.fromarray(pixels))
        if orientation > 1:  # from_pillow would turn the pixels
            options["exif"] = exif(orientation)
        image.save(stream, **options)
        return stream.getvalue()

    return make


def exif(orientation: int) -> bytes:
    data = Image.Exif()
    data[0x0112] = orientation
    return data.tobytes()


def on_rgb(image: Image.Image) -> Pixels:
    return np.asarray(image.convert("RGB"))


LOSSLESS_HEIC = {"quality": -1, "chroma": 444, "matrix_coefficients": 0}
NEGATIVE = Image.fromarray(255 - PIXELS)
PALETTE = Image.fromarray(PIXELS).quantize(40)
HIGH = (DEEP >> 8).astype(np.uint8)

FILES: dict[str, File] = {
    **{
        f"tiff {compression}": File("tiff", pil("TIFF", compression=compression), PIXELS)
        for compression in ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "zstd")
    },
    **{
        f"tiff {name}": File("tiff", pil("TIFF", mode(name), compression="tiff_lzw"), on_rgb(mode(name)), "A" in name)
        for name in ("1", "L", "P", "CMYK", "RGBA", "LA")
    },
    # Pillow 12 calls the file that it wrote truncated.
    **({} if PIL.__version__ < "13" else {"tiff YCbCr": File("tiff", pil("TIFF", mode("YCbCr")))}),
    "tiff jpeg": File("tiff", pil("TIFF", compression="jpeg")),
    "tiff group4": File("tiff", pil("TIFF", mode("1"), compression="group4"), on_rgb(mode("1"))),
    "tiff of 16 bits": File("tiff", by_opencv(".tif", DEEP[..., :3]), HIGH[..., :3]),
    "tiff, gray of 16 bits": File(
        "tiff", pil("TIFF", Image.fromarray(DEEP[..., 0].copy())), np.dstack([HIGH[..., 0]] * 3)
    ),
    "tiff, gray of 16 bits whose 0 is white": File(
        "tiff",
        lambda: tag(encode(Image.fromarray(~DEEP[..., 0]), "TIFF"), 262, value=0),
        np.dstack([HIGH[..., 0]] * 3),
    ),
    "tiff, two pages": File("tiff", pil("TIFF", save_all=True, append_images=[NEGATIVE]), PIXELS),
    "tiff, big": File("tiff", pil("TIFF", big_tiff=True), PIXELS),
    "gif": File("gif", pil("GIF", PALETTE), on_rgb(PALETTE)),
    "gif, gray": File("gif", pil("GIF", GRAY), np.dstack([GRAY] * 3)),
    "gif, two frames": File("gif", pil("GIF", PALETTE, save_all=True, append_images=[NEGATIVE]), on_rgb(PALETTE)),
    "gif, transparent": File("gif", pil("GIF", PALETTE, transparency=3), on_rgb(PALETTE), True),
    "avif": File("avif", pil("AVIF", quality=70)),
    "avif, alpha": File("avif", pil("AVIF", RGBA), None, True),
    "avif, gray": File("avif", pil("AVIF", GRAY)),
    "jp2": File("jp2", pil("JPEG2000"), PIXELS),
    "jp2, code alone": File("jp2", pil("JPEG2000", no_jp2=True), PIXELS),
    "jp2, tiles": File("jp2", pil("JPEG2000", tile_size=(16, 16)), PIXELS),
    "jp2, lossy": File("jp2", pil("JPEG2000", irreversible=True, quality_mode="rates", quality_layers=[20, 10])),
    "jp2, gray": File("jp2", pil("JPEG2000", GRAY), np.dstack([GRAY] * 3)),
    "jp2, alpha": File("jp2", pil("JPEG2000", RGBA), PIXELS, True),
    "jp2, gray of 16 bits": File(
        "jp2", pil("JPEG2000", Image.fromarray(DEEP[..., 0].copy())), np.dstack([HIGH[..., 0]] * 3)
    ),
    "png16": File("png16", by_opencv(".png", DEEP[..., :3]), HIGH[..., :3]),
    "png16, gray": File("png16", by_opencv(".png", DEEP[..., 0]), np.dstack([HIGH[..., 0]] * 3)),
    "png16, alpha": File("png16", by_opencv(".png", DEEP), HIGH[..., :3], True),
    "webp": File(
        "webp_animated", pil("WEBP", save_all=True, append_images=[NEGATIVE], lossless=True, duration=50), PIXELS
    ),
    "jxl": File("jxl", by_pylibjxl(PIXELS)),
    "jxl, lossless": File("jxl", by_pylibjxl(PIXELS, lossless=True), PIXELS),
    "jxl, box": File("jxl", by_pylibjxl(PIXELS, lossless=True, exif=exif(6)), PIXELS),
    "jxl, gray": File("jxl", by_pylibjxl(GRAY, lossless=True), np.dstack([GRAY] * 3)),
    "jxl, alpha": File("jxl", by_pylibjxl(RGBA, lossless=True), PIXELS, True),
    "heic": File("heic", by_pillow_heif(PIXELS)),
    "heic, lossless": File("heic", by_pillow_heif(PIXELS, **LOSSLESS_HEIC), PIXELS),
    "heic, alpha": File("heic", by_pillow_heif(RGBA, **LOSSLESS_HEIC), PIXELS, True),
    "heic, grid": File("heic", by_pillow_heif(photo(160, 200), tile_size=64)),
}
BY_FORMAT = {file.format: name for name, file in reversed(FILES.items())}


@cache
def data_of(name: str) -> bytes:
    need(FILES[name].format)
    return FILES[name].make()


def decode(
    data: bytes,
    color: str = "rgb",
    *,
    background: tuple[int, int, int] | None = None,
    formats: Sequence[str] = FORMATS,
    **limits: Any,
) -> Pixels:
    header = probe(as_array(data), formats=formats, **limits)
    image, corner = CpuDecoder(color, background=background).decode(as_array(data), header)
    assert corner == (0, 0)
    assert image.dtype == np.uint8 and image.flags.c_contiguous
    assert image.shape == (*header.upright_size, 1 if color == "gray" else 3)
    return image.copy()


def fault_of(data: bytes, **limits: Any) -> BadSampleError:
    with pytest.raises(BadSampleError) as caught:
        decode(data, **limits)
    assert caught.value.stage == "decode"
    return caught.value


# --- pixels -----------------------------------------------------------------------------------------------------------


def own_pixels(name: str) -> Pixels:
    """What the library itself gives for a lossy file."""
    data, form = data_of(name), FILES[name].format
    if form == "jxl":
        import pylibjxl

        return np.asarray(pylibjxl.decode(data))
    if form == "heic":
        import pillow_heif

        return on_rgb(pillow_heif.open_heif(io.BytesIO(data)).to_pillow())
    with Image.open(io.BytesIO(data)) as image:
        return on_rgb(image)


@pytest.mark.parametrize("name", FILES)
def test_pixels_are_those_that_were_encoded_or_the_librarys(name: str) -> None:
    data, wanted = data_of(name), FILES[name].pixels
    rgb = decode(data)
    assert np.array_equal(rgb, own_pixels(name) if wanted is None else wanted)
    assert np.array_equal(decode(data, "bgr"), rgb[..., ::-1])
    gray = (rgb == rgb[..., :1]).all()
    luma = rgb[..., :1] if gray else cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY)[..., None]
    assert np.array_equal(decode(data, "gray"), luma)


@pytest.mark.parametrize("name", FILES)
def test_a_format_must_be_named(name: str) -> None:
    data, form = data_of(name), FILES[name].format
    others = [other for other in FORMATS if other != form]
    fault = fault_of(data, formats=others)
    assert fault.code == "sample.format"
    assert fault.reason.endswith(f"name it in decode.formats: [{form}]")
    header = probe(as_array(data), formats=[form])
    assert (header.format, header.alpha, header.turned) == (form, FILES[name].alpha, 1)


@pytest.mark.parametrize("name", [name for name, file in FILES.items() if file.alpha])
def test_alpha_is_put_over_the_background(name: str) -> None:
    if name in ("gif, transparent", "tiff LA", "avif, alpha"):
        with Image.open(io.BytesIO(data_of(name))) as image:
            rgba = np.asarray(image.convert("RGBA"))
    else:
        rgba = HIGH if name == "png16, alpha" else RGBA
    under = Image.new("RGBA", (53, 37), (255, 0, 9, 255))
    wanted = on_rgb(Image.alpha_composite(under, Image.fromarray(rgba))).astype(int)
    assert np.abs(decode(data_of(name), background=(255, 0, 9)) - wanted).max() <= 1
    opaque = decode(data_of(name))
    assert np.array_equal(opaque, rgba[..., :3])
    assert decode(data_of(name), "gray", background=(255, 0, 9)).shape == (37, 53, 1)


def test_a_transparent_level_of_16_bits() -> None:
    """Two levels with the same upper 8 bits: only one is transparent."""
    levels = np.array([[0x1234, 0x1235, 0xFFFF]], np.uint16)
    plain = by_opencv(".png", levels)()
    chunk = b"tRNS" + struct.pack(">H", 0x1234)
    at = plain.index(b"IDAT") - 4
    crc = struct.pack(">I", zlib.crc32(chunk))
    data = plain[:at] + struct.pack(">I", 2) + chunk + crc + plain[at:]
    assert decode(data, background=(255, 0, 9)).tolist() == [[[255, 0, 9], [0x12] * 3, [255] * 3]]
    assert decode(data, "gray").tolist() == [[[0x12], [0x12], [255]]]


def test_a_gif_whose_frame_is_smaller_than_its_screen() -> None:
    data = encode(PALETTE, "GIF")
    enlarged = data[:6] + struct.pack("<HH", 60, 40) + data[10:]
    with Image.open(io.BytesIO(enlarged)) as image:
        assert np.array_equal(decode(enlarged), on_rgb(image))
    beyond = data[:6] + struct.pack("<HH", 20, 10) + data[10:]
    assert np.array_equal(decode(beyond), decode(data))


# --- orientation ------------------------------------------------------------------------------------------------------


@cache
def turned(form: str, orientation: int) -> bytes:
    """A file whose upright image is `upright(decode(turned(form, 1)), orientation)`."""
    need(form)
    if form == "jxl":
        import pylibjxl

        return bytes(pylibjxl.jpeg_to_jxl(with_orientation(PIXELS, "JPEG", orientation)))
    if form == "heic":
        return by_pillow_heif(PIXELS, orientation=orientation, **LOSSLESS_HEIC)()
    if form == "png16":
        plain, block = by_opencv(".png", DEEP[..., :3])(), exif(orientation)[6:]
        chunk = b"eXIf" + block
        crc = struct.pack(">I", zlib.crc32(chunk))
        return plain[:33] + struct.pack(">I", len(block)) + chunk + crc + plain[33:]
    if form == "webp_animated":
        animated = {"save_all": True, "append_images": [NEGATIVE], "duration": 9}
        return encode(PIXELS, "WEBP", lossless=True, exif=exif(orientation), **animated)
    return encode(PIXELS, form.upper(), exif=exif(orientation))


@pytest.mark.parametrize("form", ["tiff", "avif", "heic", "jxl", "png16", "webp_animated"])
def test_orientation_is_applied_where_asked(form: str) -> None:
    plain = decode(turned(form, 1)).astype(int)
    apart = 1 if form == "jxl" else 0  # libjxl does not round alike in each direction
    for orientation in range(2, 9):
        data = turned(form, orientation)
        assert np.abs(decode(data) - plain).max() <= apart, "ignored: the pixels as they are stored"
        assert probe(as_array(data), formats=FORMATS).orientation == 1
        assert np.abs(decode(data, orientation=True) - upright(plain, orientation)).max() <= apart
        assert np.array_equal(stored(upright(PIXELS, orientation), orientation), PIXELS)


def test_a_tiff_is_not_turned_by_its_xmp_data() -> None:
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    from PIL import TiffImagePlugin

    tags = TiffImagePlugin.ImageFileDirectory_v2()
    tags[700] = xmp
    data = encode(PIXELS, "TIFF", tiffinfo=tags)
    assert np.array_equal(decode(data), PIXELS)
    assert np.array_equal(decode(data, orientation=True), PIXELS)


def test_only_the_containers_rotation_turns_avif_and_jxl() -> None:
    """As their standards say: EXIF data in them inform and turn nothing."""
    need("jxl")
    assert np.array_equal(decode(data_of("jxl, box"), orientation=True), PIXELS)


# --- what is refused --------------------------------------------------------------------------------------------------


def tag(data: bytes, number: int, *, value: int | None = None, count: int | None = None) -> bytes:
    """A little-endian TIFF with another value, or number of values, of a tag."""
    (at,) = struct.unpack_from("<I", data, 4)
    (entries,) = struct.unpack_from("<H", data, at)
    for place in range(at + 2, at + 2 + 12 * entries, 12):
        found, kind, old_count, old_value = struct.unpack_from("<HHII", data, place)
        if found == number:
            new = struct.pack(
                "<HHII", number, kind, old_count if count is None else count, old_value if value is None else value
            )
            return data[:place] + new + data[place + 12 :]
    raise AssertionError(f"no tag {number}")


def many_tags(count: int, size: int) -> bytes:
    """A TIFF of which each tag has all of the file's bytes as its value."""
    entries = b"".join(struct.pack("<HHII", 1000 + i, 7, size, 8) for i in range(count))
    head = b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", count) + entries + bytes(4)
    return head + bytes(max(0, size + 8 - len(head)))


TIFF = encode(PIXELS, "TIFF")
JP2 = encode(PIXELS, "JPEG2000")
SIZ = JP2.index(b"\xff\x4f\xff\x51") + 8
COD = JP2.index(b"\xff\x52", SIZ)
GIF = encode(PALETTE, "GIF")


def big_endian_at(data: bytes, at: int, *values: int) -> bytes:
    new = struct.pack(f">{len(values)}I", *values)
    return data[:at] + new + data[at + len(new) :]


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


def avif(extents: bytes = bytes(8), properties: bytes = b"") -> bytes:
    """Without an image: the contents of its boxes `iloc`, and of `iprp`."""
    inner = box(b"pitm", bytes(5) + b"\1") + box(b"iloc", extents) + box(b"iprp", properties)
    return box(b"ftyp", b"avif" + bytes(4) + b"avif") + box(b"meta", bytes(4) + inner)


MANY_EXTENTS = bytes(6) + struct.pack(">H", 9) + struct.pack(">HHH", 1, 0, 65_535) * 9
"""Of no bytes."""
GIF_START = b"GIF89a" + struct.pack("<HHBBB", 4, 4, 0, 0, 0)

REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "floating-point tiff": (
        pil("TIFF", Image.fromarray(np.ones((5, 5), np.float32))),
        "floating-point samples; only unsigned samples have levels, so convert this TIFF",
    ),
    "tiff of 32 bits": (
        pil("TIFF", Image.fromarray(np.ones((5, 5), np.int32))),
        "signed samples; only unsigned samples have levels, so convert this TIFF",
    ),
    "CIELab tiff": (
        pil("TIFF", mode("RGB").convert("LAB")),
        "color space 8 with 3 channels; gray, RGB, palette, CMYK and YCbCr TIFFs are decoded",
    ),
    "tiff of 60000x60000": (
        lambda: tag(tag(TIFF, 256, value=60_000), 257, value=60_000),
        "60000x60000 = 3,600,000,000 pixels are more than max_pixels = 179,000,000",
    ),
    "tiff with a million tags' bytes": (
        lambda: many_tags(900, 100_000),
        "damaged header: its tags have 90,000,000 bytes, the file has 100,008",
    ),
    "tiff with many tags": (
        lambda: many_tags(60_000, 10),
        "60,000 tags; a TIFF of at most 1,000 is decoded",
    ),
    "tiff with a huge strip": (
        lambda: tag(TIFF, 279, value=1 << 31),
        f"truncated: a strip of pixels ends after the file's {len(TIFF)} bytes",
    ),
    "gif of 60000x60000": (
        lambda: GIF[:6] + struct.pack("<HH", 60_000, 60_000) + GIF[10:],
        "60000x60000 = 3,600,000,000 pixels are more than max_pixels = 179,000,000",
    ),
    "gif with many blocks": (
        lambda: GIF_START + b"\x21\xfe" + b"\1a" * 100_000 + bytes(1) + b";",
        "more than 100,000 blocks up to the end of the first frame",
    ),
    "gif without a frame": (lambda: b"GIF89a" + bytes(7) + b";", "damaged data: a GIF without a frame"),
    "jp2 of 60000x60000": (
        lambda: big_endian_at(big_endian_at(JP2, SIZ, 60_000, 60_000), SIZ + 16, 60_000, 60_000),
        "60000x60000 = 3,600,000,000 pixels are more than max_pixels = 179,000,000",
    ),
    "jp2, another size in its box": (
        lambda: big_endian_at(JP2, JP2.index(b"ihdr") + 4, 12_000, 12_000),
        "damaged header: two sizes, 53x37 and 12000x12000 pixels",
    ),
    "jp2 with a tile for each pixel": (
        lambda: big_endian_at(big_endian_at(JP2, SIZ, 300, 300), SIZ + 16, 1, 1),
        "90,000 tiles; a JPEG 2000 of at most 10,000 is decoded",
    ),
    "jp2 with many layers": (
        lambda: JP2[: COD + 6] + struct.pack(">H", 65535) + JP2[COD + 8 :],
        "65,535 layers in 1 tiles; a JPEG 2000 of at most 1,000 layers, 100,000 of all tiles, is decoded",
    ),
    "jp2 with many segments": (
        lambda: JP2[:COD] + b"\xff\x64\0\2" * 10_000 + JP2[COD:],
        "more than 10,000 segments up to the first tile",
    ),
    "avif of 60000x60000": (
        lambda: big_endian_at(data_of("avif"), data_of("avif").index(b"ispe") + 8, 60_000, 60_000),
        "60000x60000 = 3,600,000,000 pixels are more than max_pixels = 179,000,000",
    ),
    "avif with many extents": (lambda: avif(MANY_EXTENTS), "more than 100,000 parts of images"),
    "avif with many lists of properties": (
        lambda: avif(properties=box(b"ipma", struct.pack(">II", 0, 1 << 20) + bytes(3 << 20))),
        "more than 100,000 lists of properties",
    ),
    "avif with many properties": (
        lambda: avif(properties=box(b"ipco", box(b"free", b"") * 60_000) * 2),
        "more than 100,000 properties of images",
    ),
    "avif with a list of properties that ends too early": (
        lambda: avif(properties=box(b"ipma", struct.pack(">II", 0, 1 << 31)) * 9) + bytes(100),
        "truncated: the header breaks off after 314 bytes",
    ),
    "animated avif": (
        pil("AVIF", save_all=True, append_images=[NEGATIVE]),
        "an animation; gpuflow decodes still images",
    ),
    "heic, cropped to a small part": (
        lambda: big_endian_at(data_of("heic"), data_of("heic").index(b"ispe") + 8, 4000, 4000),
        "cropped by its header to 53x37 of 4000x4000 pixels; convert this image",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_headers_that_are_refused(name: str) -> None:
    make, reason = REFUSED[name]
    assert fault_of(make()).reason == reason


def test_the_limit_of_pixels_counts_before_anything_is_decoded() -> None:
    for name in BY_FORMAT.values():
        if missing_library([FILES[name].format]) is None:
            with pytest.raises(BadSampleError) as caught:
                probe(as_array(data_of(name)), formats=FORMATS, max_pixels=37 * 53 - 1)
            assert caught.value.code == "sample.too_large"


# --- damage -----------------------------------------------------------------------------------------------------------


def outcome(data: bytes) -> bytes | str:
    try:
        return decode(data).tobytes()
    except BadSampleError as fault:
        return fault.reason


FRAMES = {"tiff, two pages", "gif, two frames"}
"""Files of which a whole first image is left where the second one is cut off."""


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_bad(name: str) -> None:
    data = data_of(name)
    whole = outcome(data)
    assert isinstance(whole, bytes)
    for length in sorted({*np.linspace(0, len(data) - 1, 25).astype(int).tolist(), len(data) - 2}):
        found = outcome(data[:length])
        if name in FRAMES and isinstance(found, bytes) and length > len(data) // 4:
            assert found == whole
        elif isinstance(found, bytes):
            assert name.startswith("gif") and length >= len(data) - 1, f"{length} of {len(data)} bytes"
            assert found == whole


@cache
def corrupted(name: str) -> tuple[bytes, ...]:
    """A file with random bytes at random places, in its header more often."""
    data, rng = data_of(name), np.random.default_rng(sum(name.encode()))
    made = []
    for number in range(16):
        changed = bytearray(data)
        for place in rng.integers(0, len(data) if number % 2 else min(len(data), 200), rng.integers(1, 5)):
            changed[place] = rng.integers(0, 256)
        made.append(bytes(changed))
    return tuple(made)


@pytest.mark.parametrize("form", sorted(BY_FORMAT))
def test_damage_gives_a_fault_or_an_image_and_threads_change_nothing(form: str) -> None:
    """What becomes of a file depends on its bytes alone, also on four threads at once, and after other files."""
    need(form)
    names = [name for name, file in FILES.items() if file.format == form]
    files = [data for name in names for data in (data_of(name), *corrupted(name))]
    serial = [outcome(data) for data in files]
    assert [isinstance(found, bytes) for found in serial[:: len(files) // len(names)]] == [True] * len(names)
    with ThreadPoolExecutor(4) as pool:
        threaded = list(pool.map(outcome, files))
        backwards = list(pool.map(outcome, reversed(files)))
    assert threaded == serial
    assert backwards[::-1] == serial


OUT_OF_MEMORY = -9
"""The status of Pillow's codecs."""


def let_pillow_raise(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the decoding of every TIFF raise an error."""

    def fail(*_: object) -> None:
        raise error

    from PIL import TiffImagePlugin

    monkeypatch.setattr(TiffImagePlugin.TiffImageFile, "load", fail)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        ImageFile._get_oserror(OUT_OF_MEMORY, encoder=False),
        OSError(f"decoder error {OUT_OF_MEMORY}"),  # of TiffImagePlugin
    ],
)
def test_memory_that_a_library_lacks_is_no_samples_fault(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    let_pillow_raise(error, monkeypatch)
    with pytest.raises(MemoryError):
        decode(TIFF)


def test_a_file_is_refused_only_where_there_is_memory_to_decode_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most errors of libraries do not say whether memory or the file is at fault."""
    let_pillow_raise(OSError("broken data stream when reading image file"), monkeypatch)
    assert fault_of(TIFF).reason == "the TIFF decoder gave up: broken data stream when reading image file"
    monkeypatch.setattr(header, "_DECODING_BYTES", 1 << 50)
    with pytest.raises(MemoryError, match="not enough memory to decode an image of 1,961 pixels"):
        decode(TIFF)


# --- what must be installed -------------------------------------------------------------------------------------------


def test_the_stage_names_every_format() -> None:
    (choices,) = (typing.get_args(typing.get_type_hints(Decode)["formats"])[0],)
    assert typing.get_args(choices) == FORMATS
    assert "formats" not in Decode().params(), "fingerprints stay as they were"
    assert Decode(formats=("gif",)).params()["formats"] == ("gif",)


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("heic", "pillow_heif", "pillow-heif"),
        ("jxl", "pylibjxl", "pylibjxl"),
    ],
)
def test_a_missing_library_is_named(name: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    text = f"decoding {LABELS[name]} needs {package}, which is not installed; pip install 'gpuflow[formats]'"
    with pytest.raises(ConfigError) as caught:
        make_stage({"decode": {"formats": ["png16", name]}}, STAGES)
    (problem,) = caught.value.problems
    assert (problem.path, problem.code) == (("decode", "formats"), "config.rule")
    assert str(problem) == f"decode.formats names what cannot be decoded here: {text}"
    header = Header(name, 53, 37, 3)
    with pytest.raises(MissingExtra) as missing:
        CpuDecoder("rgb").decode(as_array(jpeg(PIXELS)), header)
    assert str(missing.value) == text


@pytest.mark.parametrize("version", ["10.4.0", "11.3.0"])
def test_an_old_pillow_is_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It decodes masks too. Pillow 12 came with the first tests of these formats."""
    monkeypatch.setattr(PIL, "__version__", version)
    needs = "needs Pillow 12 or newer, which is not installed; pip install 'gpuflow[formats]'"
    assert str(missing_library(["png16", "gif"])) == f"decoding GIF {needs}"
    with pytest.raises(MissingExtra, match="decoding TIFF needs Pillow 12"):
        decode_mask(MaskFile(encode(GRAY, "TIFF")), (37, 53), ["tiff"])


def test_formats_are_checked() -> None:
    with pytest.raises(ConfigError) as caught:
        make_stage({"decode": {"formats": ["tif"]}}, STAGES)
    known = ", ".join(FORMATS)
    assert str(caught.value) == f"decode.formats must be a list, each one of {known}, got ['tif']"
    with pytest.raises(ConfigError) as caught:
        make_stage({"decode": {"formats": ["gif", "gif"]}}, STAGES)
    assert str(caught.value) == "decode.formats must name each format once, and names 'gif' twice"
    assert make_stage({"decode": {"formats": ["png16"]}}, STAGES) == Decode(formats=("png16",))


def test_a_pillow_without_avif_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert features.check("avif")
    from PIL import AvifImagePlugin

    monkeypatch.setattr(AvifImagePlugin, "SUPPORTED", False)
    missing = missing_library(["avif"])
    assert str(missing) == (
        "decoding AVIF needs a Pillow that was built with it, which is not installed; pip install 'gpuflow[formats]'"
    )
