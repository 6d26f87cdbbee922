"""PNG files whose compressed data are more than their pixels."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.decode.codecs import CpuDecoder, probe
from gpuflow.decode.png_pnm import has_too_much_data
from gpuflow.errors import BadSampleError
from tests.images import encode, interlaced_png, photo, png, png_bytes, png_chunk

ROWS = b"".join(b"\0" + row.tobytes() for row in photo(20, 30))


@pytest.fixture(autouse=True)
def check_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuflow.decode.png_pnm._UNCHECKED_BYTES", 100)


def as_array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def with_data(stream: bytes, size: int) -> bytes:
    """A PNG of 30x20 pixels with this compressed stream, in chunks of `size` bytes, and one chunk after them."""
    whole = png_bytes(30, 20)
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    chunks = b"".join(png_chunk(b"IDAT", piece) for piece in pieces)
    return whole[:33] + chunks + png_chunk(b"tEXt", b"a\0b") + whole[-12:]


@pytest.mark.parametrize("size", [7_001, 1 << 20])
def test_a_file_with_far_more_data_than_pixels_is_bad(size: int) -> None:
    bomb = as_array(with_data(zlib.compress(ROWS + bytes(20_000_000)), size))
    with pytest.raises(BadSampleError, match="its compressed data are far more than its pixels"):
        CpuDecoder("rgb").decode(bomb, probe(bomb))


def test_no_more_is_inflated_than_the_pixels_need(monkeypatch: pytest.MonkeyPatch) -> None:
    inflated, new = [], zlib.decompressobj

    class Counting:
        def __init__(self) -> None:
            self._stream = new()

        def decompress(self, data: memoryview, most: int) -> bytes:
            made = self._stream.decompress(data, most)
            inflated.append(len(made))
            return made

        eof = property(lambda self: self._stream.eof)
        unconsumed_tail = property(lambda self: self._stream.unconsumed_tail)

    bomb = as_array(with_data(zlib.compress(ROWS + bytes(100_000_000)), 1 << 20))
    monkeypatch.setattr(zlib, "decompressobj", Counting)
    assert has_too_much_data(bomb) and sum(inflated) < 4_000_000


def test_data_after_the_end_of_the_stream_do_not_count() -> None:
    data = as_array(with_data(zlib.compress(ROWS) + zlib.compress(bytes(20_000_000)), 500))
    assert not has_too_much_data(data)
    image, _ = CpuDecoder("rgb").decode(data, probe(data))
    assert np.array_equal(image, photo(20, 30))


@given(st.sampled_from(["1", "L", "LA", "P", "RGB", "RGBA", "I;16"]), st.integers(1, 40), st.integers(1, 40))
def test_whole_files_are_good(mode: str, height: int, width: int) -> None:
    from PIL import Image

    pixels = photo(height, width)
    picture = Image.fromarray(pixels)
    if mode == "I;16":
        picture = Image.fromarray(pixels[..., 0].astype(np.uint16) << 7)
    elif mode != "RGB":
        picture = picture.convert(mode)
    assert not has_too_much_data(as_array(encode(picture, "PNG")))
    assert not has_too_much_data(as_array(interlaced_png(pixels)))


def test_damaged_and_large_files_are_left_to_the_decoder() -> None:
    assert not has_too_much_data(as_array(with_data(b"no stream" * 40, 100)))
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)
    assert not has_too_much_data(as_array(png(noise)))
