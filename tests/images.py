"""Encoded images for the tests, made on the spot: every format, subsampling and fault that a data set may hold.

photo           smooth pixels with edges and noise, uint8 HWC
jpeg, png, ...  an encoder each; `as_array` makes the decoders' uint8 [n] of what they return
tiny_jpeg       a baseline JPEG with any sampling factors, which no library here can write
patch_*         the same file with another header
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

SUBSAMPLINGS = {
    "4:4:4": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444,
    "4:2:2": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422,
    "4:2:0": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
    "4:4:0": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440,
    "4:1:1": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411,
}
Pixels = NDArray[np.uint8]


def as_array(data: bytes) -> Pixels:
    return np.frombuffer(data, np.uint8)


def photo(height: int, width: int, *, seed: int = 0) -> Pixels:
    """RGB pixels with gradients, coloured edges and noise: uint8 [height, width, 3]."""
    rng = np.random.default_rng((seed, height, width))
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / rng.uniform(3, 17) + y / rng.uniform(3, 17) + rng.uniform(0, 6)) for _ in range(3)]
    pixels = np.stack(waves, axis=-1) * 90 + 128 + rng.normal(0, 12, (height, width, 3))
    top, left = rng.integers(0, max(height // 2, 1)), rng.integers(0, max(width // 2, 1))
    pixels[top : top + height // 3, left : left + width // 3] = rng.integers(0, 256, 3)
    return np.clip(pixels, 0, 255).astype(np.uint8)


def jpeg(pixels: Pixels, subsampling: str = "4:2:0", *, quality: int = 90, progressive: bool = False) -> bytes:
    """A JPEG of RGB pixels, or a gray one of [H, W]."""
    options = [cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, SUBSAMPLINGS[subsampling]]
    if progressive:
        options += [cv2.IMWRITE_JPEG_PROGRESSIVE, 1]
    bgr = pixels if pixels.ndim == 2 else np.ascontiguousarray(pixels[..., ::-1])
    done, data = cv2.imencode(".jpg", bgr, options)
    assert done
    return bytes(data.tobytes())


def with_restarts(pixels: Pixels, interval: int, subsampling: str = "4:2:0") -> bytes:
    """A JPEG with restart markers: one after each `interval` coded units."""
    options = [cv2.IMWRITE_JPEG_RST_INTERVAL, interval, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, SUBSAMPLINGS[subsampling]]
    done, data = cv2.imencode(".jpg", np.ascontiguousarray(pixels[..., ::-1]) if pixels.ndim == 3 else pixels, options)
    assert done
    return bytes(data.tobytes())


def encode(image: Pixels | Image.Image, form: str, **options: Any) -> bytes:
    """What Pillow writes: `JPEG`, `PNG`, `WEBP`, `BMP`, `GIF`, `TIFF`, ..."""
    stream = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(stream, form, **options)
    return stream.getvalue()


def png(pixels: Pixels) -> bytes:
    return encode(pixels, "PNG")


def with_orientation(pixels: Pixels, form: str, orientation: int, **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(pixels, form, exif=exif, **options)


def turned(data: bytes, orientation: int) -> bytes:
    """The same JPEG with EXIF data that turn it."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    block = exif.tobytes()
    return data[:2] + b"\xff\xe1" + (len(block) + 2).to_bytes(2) + block + data[2:]


def pillow(data: bytes, mode: str = "RGB") -> Pixels:
    """Pillow's pixels, HWC."""
    with Image.open(io.BytesIO(data)) as image:
        pixels = np.asarray(image.convert(mode))
    return pixels if pixels.ndim == 3 else pixels[..., None]


# --- PNG by hand -----------------------------------------------------------------------------------------------------


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_bytes(width: int, height: int, rows: bytes = b"", *, interlaced: bool = False, color: int = 2) -> bytes:
    """A PNG of 8 bits with this header and these filtered rows, which need not fit it."""
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, int(interlaced))
    chunks = (png_chunk(b"IHDR", header), png_chunk(b"IDAT", zlib.compress(rows)), png_chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def interlaced_png(pixels: Pixels) -> bytes:
    """The same RGB pixels in Adam7's seven passes."""
    rows = b""
    for y, x, dy, dx in (
        (0, 0, 8, 8),
        (0, 4, 8, 8),
        (4, 0, 8, 4),
        (0, 2, 4, 4),
        (2, 0, 4, 2),
        (0, 1, 2, 2),
        (1, 0, 2, 1),
    ):
        part = pixels[y::dy, x::dx]
        if part.size:
            rows += b"".join(b"\0" + row.tobytes() for row in part)
    return png_bytes(pixels.shape[1], pixels.shape[0], rows, interlaced=True)


# --- JPEG by hand ----------------------------------------------------------------------------------------------------


def segment(marker: int, data: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data


def tiny_jpeg(
    width: int, height: int, factors: Sequence[tuple[int, int]], *, separate: bool = False, seed: int = 0
) -> bytes:
    """A baseline JPEG of random flat 8x8 blocks, with any sampling factors (horizontal, vertical) of its components.

    Its Huffman tables are the simplest: DC categories as 4-bit numbers, one bit for the end of a block.
    separate: one scan a component instead of one for all.
    """
    rng = np.random.default_rng(seed)
    widest, tallest = max(h for h, _ in factors), max(v for _, v in factors)
    units_x, units_y = -(-width // (8 * widest)), -(-height // (8 * tallest))
    frame = struct.pack(">BHHB", 8, height, width, len(factors))
    frame += b"".join(bytes((i + 1, h << 4 | v, 0)) for i, (h, v) in enumerate(factors))
    dc = bytes((0, 0, 0, 0, 12, *[0] * 12, *range(12)))
    ac = bytes((0x10, 1, *[0] * 15, 0))
    head = segment(0xDB, bytes((0, *[8] * 64))) + segment(0xC0, frame) + segment(0xC4, dc) + segment(0xC4, ac)

    class Scan:
        def __init__(self) -> None:
            self.bits: list[str] = []
            self.last = [0] * len(factors)

        def block(self, component: int) -> None:
            level = int(rng.integers(-100, 101))
            step, self.last[component] = level - self.last[component], level
            size = abs(step).bit_length()
            low = step if step > 0 else step + (1 << size) - 1
            self.bits.append(f"{size:04b}" + (f"{low:0{size}b}" if size else "") + "0")

        def bytes(self) -> bytes:
            text = "".join(self.bits)
            text += "1" * (-len(text) % 8)
            return int(text, 2).to_bytes(len(text) // 8).replace(b"\xff", b"\xff\0")

    def begin(components: Sequence[int]) -> bytes:
        parts = b"".join(bytes((i + 1, 0)) for i in components)
        return segment(0xDA, bytes((len(components),)) + parts + bytes((0, 63, 0)))

    body = b""
    if separate:
        for i, (h, v) in enumerate(factors):
            scan = Scan()
            across, down = -(-width * h // (8 * widest)), -(-height * v // (8 * tallest))
            for _ in range(across * down):
                scan.block(i)
            body += begin([i]) + scan.bytes()
    else:
        scan = Scan()
        for _ in range(units_x * units_y):
            for i, (h, v) in enumerate(factors):
                for _ in range(h * v):
                    scan.block(i)
        body += begin(range(len(factors))) + scan.bytes()
    return b"\xff\xd8" + head + body + b"\xff\xd9"


def _frame(data: bytes) -> int:
    """Where the frame header's parameters begin: precision, height, width, components."""
    at = 2
    while not (0xC0 <= data[at + 1] <= 0xCF and data[at + 1] not in (0xC4, 0xC8, 0xCC)):
        at += 2 + struct.unpack_from(">H", data, at + 2)[0]
    return at + 4


def patch_jpeg(data: bytes, *, width: int | None = None, height: int | None = None, bits: int | None = None) -> bytes:
    at = _frame(data)
    old_bits, old_height, old_width = struct.unpack_from(">BHH", data, at)
    new = (bits or old_bits, old_height if height is None else height, old_width if width is None else width)
    return data[:at] + struct.pack(">BHH", *new) + data[at + 5 :]


def patch_gray_factors(data: bytes, factors: int) -> bytes:
    """A gray JPEG whose one component claims these sampling factors (0x22 is common), which change nothing."""
    at = _frame(data)
    return data[: at + 7] + bytes((factors,)) + data[at + 8 :]


def patch_png(data: bytes, *, width: int, height: int) -> bytes:
    header = struct.pack(">II", width, height) + data[24:29]
    return data[:8] + png_chunk(b"IHDR", header) + data[33:]


def masked_bmp(pixels: Pixels, masks: Sequence[int], *, bits: int, header: int) -> bytes:
    """A BMP of 16 or 32 bits a pixel whose masks say where each colour is. header: its size, 40 to 124."""
    height, width = pixels.shape[:2]
    values = np.zeros((height, width), np.uint32)
    for mask, levels in zip(masks, np.moveaxis(pixels, 2, 0), strict=True):
        lowest = (mask & -mask).bit_length() - 1
        values |= (levels >> (8 - mask.bit_count())).astype(np.uint32) << lowest
    stride = -(-width * bits // 32) * 4
    data = b"".join(row.astype(f"<u{bits // 8}").tobytes().ljust(stride, b"\0") for row in values[::-1])
    info = struct.pack("<IiiHHIIiiII", header, width, height, 1, bits, 3, len(data), 0, 0, 0, 0)
    info = (info + struct.pack("<III", *masks)).ljust(header, b"\0")
    return b"BM" + struct.pack("<IHHI", 14 + len(info) + len(data), 0, 0, 14 + len(info)) + info + data


def core_bmp(pixels: Pixels) -> bytes:
    """A BMP with OS/2's header of 12 bytes, as old programs write it."""
    height, width = pixels.shape[:2]
    rows = b"".join(row.tobytes() + b"\0" * (-3 * width % 4) for row in pixels[::-1, :, ::-1])
    header = struct.pack("<IHHHH", 12, width, height, 1, 24)
    return b"BM" + struct.pack("<IHHI", 26 + len(rows), 0, 0, 26) + header + rows
