"""The libjpeg-turbo binding: any region of any JPEG equals a crop of the whole image, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpuflow.decode.libjpeg_turbo import PIXEL_FORMATS, LibjpegTurbo, _is_current, find_libjpeg_turbo
from tests.images import SUBSAMPLINGS, as_array, jpeg, patch_gray_factors, patch_jpeg, photo, tiny_jpeg

LIBRARY = find_libjpeg_turbo()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no libjpeg-turbo 3 here: pip install 'gpuflow[turbo]'")

SIZES = ((75, 101), (64, 96), (33, 17), (8, 8), (1, 1), (1, 90), (90, 1))
FACTORS = {
    "4:4:4": [(1, 1)] * 3,
    "4:2:2": [(2, 1), (1, 1), (1, 1)],
    "4:2:0": [(2, 2), (1, 1), (1, 1)],
    "4:4:0": [(1, 2), (1, 1), (1, 1)],
    "4:1:1": [(4, 1), (1, 1), (1, 1)],
    "4:4:1": [(1, 4), (1, 1), (1, 1)],
    "4:1:0": [(4, 2), (1, 1), (1, 1)],
    "2:1 all over": [(2, 1)] * 3,
    "1:2 all over": [(1, 2)] * 3,
    "3:1 all over": [(3, 1)] * 3,
    "4:2:2 as ffmpeg writes it": [(2, 2), (1, 2), (1, 2)],
    "4:4:0 on its side": [(2, 2), (2, 1), (2, 1)],
    "chroma finer than luma": [(1, 1), (2, 2), (2, 2)],
    "two chromas": [(2, 1), (1, 1), (2, 1)],
    "gray": [(1, 1)],
    "gray, 2x2": [(2, 2)],
}
REFUSED = {
    "4:1:0",
    "2:1 all over",
    "3:1 all over",
    "4:4:0 on its side",
    "chroma finer than luma",
    "two chromas",
    "gray, 2x2",
}
"""Files of which libjpeg-turbo refuses some regions, or all, so that OpenCV decodes them."""


def whole_of(data: bytes, color: str) -> NDArray[np.uint8]:
    flags = {"rgb": cv2.IMREAD_COLOR_RGB, "bgr": cv2.IMREAD_COLOR_BGR, "gray": cv2.IMREAD_GRAYSCALE}[color]
    image = np.asarray(cv2.imdecode(as_array(data), flags | cv2.IMREAD_IGNORE_ORIENTATION), np.uint8)
    return image if image.ndim == 3 else image[..., None]


def turbo() -> LibjpegTurbo:
    assert LIBRARY is not None
    return LIBRARY


def region_of(
    data: bytes, color: str, size: tuple[int, int], box: tuple[int, int, int, int] | None
) -> NDArray[np.uint8] | None:
    return turbo().decode(as_array(data), color, size, box, np.empty(size[0] * size[1] * 3, np.uint8))


def borders(length: int) -> Iterator[tuple[int, int]]:
    """(start, length) of spans with every alignment to blocks of up to 32 pixels, and to the image's edges."""
    for start in {0, 1, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, length - 1}:
        if 0 <= start < length:
            yield from ((start, size) for size in {1, 8, 15, 17, length - start} if start + size <= length)


@pytest.mark.parametrize("subsampling", SUBSAMPLINGS)
@pytest.mark.parametrize("color", PIXEL_FORMATS)
def test_every_border_alignment(subsampling: str, color: str) -> None:
    height, width = 67, 93
    data = jpeg(photo(height, width), subsampling)
    whole = whole_of(data, color)
    decoder, buffer = turbo(), np.empty(height * width * 3, np.uint8)
    rows = list(borders(height))
    for i, (x, w) in enumerate(borders(width)):
        for y, h in rows[i % 4 :: 4]:
            part = decoder.decode(as_array(data), color, (height, width), (y, x, h, w), buffer)
            assert part is not None
            assert np.array_equal(part, whole[y : y + h, x : x + w]), (y, x, h, w)


@settings(max_examples=150)
@given(
    subsampling=st.sampled_from(sorted(SUBSAMPLINGS)),
    color=st.sampled_from(sorted(PIXEL_FORMATS)),
    size=st.sampled_from(SIZES),
    data=st.data(),
)
def test_any_region(subsampling: str, color: str, size: tuple[int, int], data: st.DataObject) -> None:
    y, x = (data.draw(st.integers(0, side - 1)) for side in size)
    h, w = (data.draw(st.integers(1, side - at)) for side, at in zip(size, (y, x), strict=True))
    encoded = jpeg(photo(*size), subsampling)
    part = region_of(encoded, color, size, (y, x, h, w))
    assert part is not None
    assert np.array_equal(part, whole_of(encoded, color)[y : y + h, x : x + w])


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("separate", [False, True], ids=["one scan", "a scan a component"])
def test_sampling_factors_that_no_common_encoder_writes(name: str, separate: bool) -> None:
    """For some of these, libjpeg-turbo cannot decode a region: then it decodes the whole image, or OpenCV does."""
    size = (77, 101)
    data = tiny_jpeg(size[1], size[0], FACTORS[name], separate=separate)
    whole = whole_of(data, "rgb")
    for box in ((0, 0, 77, 101), (3, 8, 30, 33), (16, 16, 44, 61), (33, 40, 5, 7), (0, 24, 1, 77), (70, 99, 7, 2)):
        part = region_of(data, "rgb", size, box)
        y, x, h, w = box
        assert part is not None or name in REFUSED, box
        assert part is None or np.array_equal(part, whole[y : y + h, x : x + w]), box


@pytest.mark.parametrize("factors", [0x11, 0x22, 0x21, 0x14])
def test_gray_files_may_claim_any_sampling(factors: int) -> None:
    data = patch_gray_factors(jpeg(photo(50, 70)[..., 0]), factors)
    for color in PIXEL_FORMATS:
        part = region_of(data, color, (50, 70), (9, 17, 20, 31))
        assert part is not None
        assert np.array_equal(part, whole_of(data, color)[9:29, 17:48])


def test_a_decoder_forgets_the_last_region() -> None:
    decoder = turbo()
    buffer, data = np.empty(75 * 101 * 3, np.uint8), b""
    for size, box in (((75, 101), (9, 9, 20, 20)), ((40, 30), None), ((75, 101), (60, 90, 15, 11)), ((8, 8), None)):
        data = jpeg(photo(*size))
        part = decoder.decode(as_array(data), "rgb", size, box, buffer)
        y, x, h, w = box or (0, 0, *size)
        assert part is not None
        assert np.array_equal(part, whole_of(data, "rgb")[y : y + h, x : x + w])
    assert decoder.decode(as_array(b"\xff\xd8\xff\xd9"), "rgb", (8, 8), (0, 0, 4, 4), buffer) is None
    part = decoder.decode(as_array(data), "rgb", (8, 8), None, buffer)
    assert part is not None and np.array_equal(part, whole_of(data, "rgb"))


def test_nothing_is_written_beyond_the_buffer() -> None:
    room, guard = 60 * 40 * 3, 1 << 16
    buffer = np.full(room + guard, 0xA5, np.uint8)
    data = jpeg(photo(60, 40))
    for box in (None, (0, 0, 60, 40), (20, 10, 40, 30), (59, 39, 1, 1)):
        turbo().decode(as_array(data), "rgb", (60, 40), box, buffer)
        assert (buffer[room:] == 0xA5).all()


def test_a_file_of_another_size_than_announced_is_refused_and_writes_nothing() -> None:
    buffer = np.full(8 * 8 * 3 + 4096, 0xA5, np.uint8)
    assert turbo().decode(as_array(jpeg(photo(64, 48))), "rgb", (8, 8), None, buffer) is None
    assert (buffer == 0xA5).all()


def test_a_file_with_an_error_or_a_warning_is_refused() -> None:
    data = jpeg(photo(40, 40))
    no_tables = data[:2] + data[data.index(b"\xff\xc0") :].replace(b"\xff\xc4", b"\xff\xfe")
    cut = data[: data.index(b"\xff\xda") + 40] + data[-2:]
    version_9 = data[:11] + b"\x09" + data[12:]
    for refused in (no_tables, cut, version_9, patch_jpeg(data, height=0)):
        for box in (None, (4, 4, 10, 10)):
            assert region_of(refused, "rgb", (40, 40), box) is None
    assert region_of(data, "rgb", (40, 40), None) is not None


def test_it_accepts_files_that_decode_without_an_error_or_a_warning() -> None:
    data = jpeg(photo(41, 67))
    scan = data.index(b"\xff\xda")
    assert turbo().accepts(as_array(data), (41, 67))
    assert not turbo().accepts(as_array(data), (41, 68))
    refused = (
        data[: scan + 40] + data[-2:],
        data[:11] + b"\x09" + data[12:],
        data[: scan + 60] + b"\xff\xd2" + data[scan + 62 :],
    )
    assert not any(turbo().accepts(as_array(damaged), (41, 67)) for damaged in refused)
    for size in SIZES:
        assert turbo().accepts(as_array(jpeg(photo(*size))), size)


def test_betas_and_older_releases_are_not_used() -> None:
    assert [_is_current(version) for version in ("3.0", "3.1.3", "4.0.0")] == [True] * 3
    assert not any(_is_current(version) for version in ("2.1.5", "2.1.92", "3", ""))


def test_a_file_that_is_no_library_raises() -> None:
    with pytest.raises(OSError, match=r"no-such-library\.so"):
        LibjpegTurbo("/no-such-library.so")
    with pytest.raises(AttributeError, match="tj3"):
        LibjpegTurbo("libc.so.6")


def test_a_system_library_that_cannot_be_loaded_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that was removed while it is still listed, or whose own libraries are gone."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: "libno-such-turbojpeg.so.0")
    find_libjpeg_turbo.cache_clear()
    try:
        assert find_libjpeg_turbo() is None
    finally:
        find_libjpeg_turbo.cache_clear()
