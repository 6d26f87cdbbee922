"""Encoded images that a decoder may trip over, and that could change what it makes of the next one.

`pool` gives sound and damaged files of every format; the other functions make one kind each, of a sound JPEG.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from functools import cache

from PIL import Image

from tests.images import encode, interlaced_png, jpeg, photo, png, segment, tiny_jpeg

FRAME, HUFFMAN, QUANTISATION, SCAN = 0xC0, 0xC4, 0xDB, 0xDA


def segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(marker, start, stop) of every segment of a JPEG, those between scans included; of a scan, its header alone."""
    at = 2
    while data[at + 1] != 0xD9:
        stop = at + 2 + struct.unpack_from(">H", data, at + 2)[0]
        yield data[at + 1], at, stop
        if data[at + 1] == SCAN:
            while data[stop] != 0xFF or data[stop + 1] in (0, *range(0xD0, 0xD8)):
                stop += 1
        at = stop


def first(data: bytes, marker: int) -> tuple[int, int]:
    """Where the first segment of a kind starts and stops."""
    return next((start, stop) for kind, start, stop in segments(data) if kind == marker)


def without(data: bytes, marker: int, which: slice = slice(None)) -> bytes:
    """The file without some of its segments of a kind."""
    for start, stop in reversed([(start, stop) for kind, start, stop in segments(data) if kind == marker][which]):
        data = data[:start] + data[stop:]
    return data


def warned_of_then_fatal(data: bytes) -> bytes:
    """A progressive JPEG with a version that libjpeg warns of, and before its second scan a table that it refuses."""
    second = [start for kind, start, _ in segments(data) if kind == SCAN][1]
    bogus = segment(HUFFMAN, bytes((0, *[255] * 16, 1, 2, 3)))
    return data[:11] + b"\x09" + data[12:second] + bogus + data[second:]


def many_scans(data: bytes, count: int) -> bytes:
    """A progressive JPEG whose last scan is repeated `count` times."""
    start = [start for kind, start, _ in segments(data) if kind == SCAN][-1]
    tables = [at for kind, at, _ in segments(data) if kind == HUFFMAN and at < start]
    return data[:-2] + data[tables[-1] : -2] * count + data[-2:]


def flipped(data: bytes, start: int, stop: int, rng: random.Random) -> bytes:
    """One bit of data[start:stop] the other way round."""
    at = rng.randrange(start, stop)
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def cut_off(data: bytes, rng: random.Random) -> bytes:
    """A JPEG without the rest of its scan, but with an end marker."""
    _, scan = first(data, SCAN)
    return data[: rng.randrange(scan, len(data) - 2)] + b"\xff\xd9"


def damages(data: bytes, rng: random.Random) -> Iterator[bytes]:
    """One JPEG damaged in every way."""
    _, scan = first(data, SCAN)
    end = len(data) - 2
    yield flipped(data, 2, scan, rng)
    yield flipped(data, scan, end, rng)
    yield cut_off(data, rng)
    at = rng.randrange(scan, end)
    stop = min(end, at + rng.randrange(2, 400))
    yield data[:at] + data[stop:]
    yield data[:at] + bytes(stop - at) + data[stop:]
    yield data[:at] + bytes((0xFF, 0xD0 + rng.randrange(8))) + data[at + 2 :]
    yield data[:at] + b"\xff\xd9" + data[at:]
    yield data[: rng.randrange(len(data))]


@cache
def pool(count: int = 220, seed: int = 0) -> tuple[bytes, ...]:
    """Files, about a third of them sound, in any order: JPEG, PNG, WebP, BMP and PNM of several sizes."""
    rng = random.Random(seed)
    found: list[bytes] = []
    for number in range(24):
        pixels = photo(rng.choice([40, 56, 61]), rng.choice([48, 72, 83]), seed=number)
        sampling = rng.choice(["4:2:0", "4:2:0", "4:4:4", "4:2:2", "4:4:0", "4:1:1"])
        baseline, progressive = jpeg(pixels, sampling), jpeg(pixels, sampling, progressive=True)
        found += [baseline, progressive, baseline, jpeg(pixels[..., 0])]
        found += [without(baseline, QUANTISATION), without(baseline, QUANTISATION, slice(1, None))]
        found += [without(baseline, HUFFMAN), without(baseline, HUFFMAN, slice(2, None))]
        found += [warned_of_then_fatal(progressive), many_scans(progressive, 300), *damages(baseline, rng)]
        found += list(damages(progressive, rng))
        others = [png(pixels), encode(pixels, "WEBP"), encode(pixels, "BMP"), interlaced_png(pixels)]
        others.append(encode(Image.fromarray(pixels).convert("CMYK"), "JPEG"))
        found += others + [flipped(data, 0, len(data), rng) for data in others]
        found += [data[: rng.randrange(len(data))] for data in others]
    found.append(tiny_jpeg(53, 37, [(4, 2), (1, 1), (1, 1)]))
    wide = struct.pack("<IHHIIiiHHIIiiII", 62 + (1 << 18), 0, 0, 62, 40, 1 << 21, 1, 1, 1, *[0] * 6) + bytes(8)
    found.append(b"BM" + wide + bytes(1 << 18))
    canvas = struct.pack("<I4x", 10) + (12_648_448).to_bytes(3, "little") + bytes(3)
    found.append((b"RIFF" + struct.pack("<I", 48) + b"WEBPVP8X" + canvas).ljust(56, b"\0"))
    return tuple(rng.sample(found, min(count, len(found))) + found[-3:])
