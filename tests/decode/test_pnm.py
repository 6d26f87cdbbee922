"""Binary PGM and PPM: the pixels are Pillow's, and damage is a bad sample."""

from __future__ import annotations

import io
from contextlib import suppress

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from gpuflow.decode.codecs import CpuDecoder, probe
from gpuflow.errors import BadSampleError

HEIGHT, WIDTH = 5, 11


def levels_of(kind: int, top: int) -> NDArray[np.uint8]:
    """Every level of 0 to `top`, as far as there are pixels for them, gray or three channels."""
    channels = 3 if kind == 6 else 1
    count = HEIGHT * WIDTH * channels
    return np.linspace(0, top, count).round().astype(np.uint8).reshape(HEIGHT, WIDTH, channels)


def netpbm(kind: int, levels: NDArray[np.uint8], top: int, comment: bytes = b"") -> bytes:
    """A binary file, gray (5) or in color (6)."""
    return b"P%d%b\n%d %d\n%d\n" % (kind, comment, levels.shape[1], levels.shape[0], top) + levels.tobytes()


def decoded(data: bytes, color: str = "rgb") -> NDArray[np.uint8]:
    encoded = np.frombuffer(data, np.uint8)
    return CpuDecoder(color).decode(encoded, probe(encoded))[0].copy()


@pytest.mark.parametrize("comment", [b"", b" # by a program\n#and more"])
@pytest.mark.parametrize("kind", [5, 6])
@pytest.mark.parametrize("top", [1, 15, 200, 255])
def test_the_pixels_are_those_of_pillow(kind: int, top: int, comment: bytes) -> None:
    data = netpbm(kind, levels_of(kind, top), top, comment)
    with Image.open(io.BytesIO(data), formats=["PPM"]) as image:
        expected = np.asarray(image.convert("RGB"))
    assert np.abs(decoded(data).astype(int) - expected).max() == 0
    assert np.array_equal(decoded(data, "bgr"), expected[..., ::-1])
    assert decoded(data, "gray").shape == (HEIGHT, WIDTH, 1)
    header = probe(np.frombuffer(data, np.uint8))
    assert (header.format, header.size, header.channels) == ("pnm", (HEIGHT, WIDTH), 3 if kind == 6 else 1)


def test_pixels_may_begin_like_a_comment() -> None:
    levels = np.frombuffer(b"# \n\t" * 4, np.uint8).reshape(4, 4, 1)
    assert np.array_equal(decoded(netpbm(5, levels, 255), "gray"), levels)


@pytest.mark.parametrize(
    ("data", "code", "reason"),
    [
        (b"P6 # no end", "sample.bad", "damaged header: it must have the width, the height and the highest level"),
        (b"P5 2 x 255\n", "sample.bad", "damaged header: it must have the width, the height and the highest level"),
        (b"P5 2 2 0\n    ", "sample.bad", "damaged header: the highest level is 0"),
        (b"P5 0 2 255\n    ", "sample.bad", "the header gives a size of 0x2 pixels"),
        (b"P5 2 2 65535\n        ", "sample.unsupported", "levels of 0 to 65535 in 16 bits; "),
        (b"P5 60000 60000 255\n ", "sample.bad", "truncated: 60000x60000 pixels end after the file's 20 bytes"),
        (b"P6 2 2 255\n" + bytes(11), "sample.bad", "truncated: 2x2 pixels end after the file's 22 bytes"),
        (b"P5 2 2 15\n\1\2\x1e\4", "sample.bad", "damaged data: levels of 0 to 15 by its header, got 30"),
        *((b"P%d 1 1\n1 1\n" % kind, "sample.unsupported", "a bitmap or plain text; ") for kind in (1, 2, 3, 4)),
    ],
)
def test_bad_files(data: bytes, code: str, reason: str) -> None:
    with pytest.raises(BadSampleError) as caught:
        decoded(data)
    assert caught.value.code == code and caught.value.reason.startswith(reason)


def test_damage_anywhere_is_a_bad_sample_or_other_pixels() -> None:
    rng = np.random.default_rng(0)
    for kind in (5, 6):
        sound = netpbm(kind, levels_of(kind, 1), 1)
        for _ in range(300):
            data = bytearray(sound)
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
            with np.errstate(all="raise"), suppress(BadSampleError):
                decoded(bytes(data[: rng.integers(1, len(data) + 1)]))
