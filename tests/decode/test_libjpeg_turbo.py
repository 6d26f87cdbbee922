"""The libjpeg-turbo binding: any region of any JPEG equals a crop of the whole image, bit for bit."""

from __future__ import annotations

import resource
import shutil
import subprocess
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpuflow.decode import libjpeg_turbo
from gpuflow.decode.codecs import decoder_description
from gpuflow.decode.libjpeg_turbo import PIXEL_FORMATS, LibjpegTurbo, find_libjpeg_turbo, libjpeg_turbo_refusal
from tests import damaged
from tests.datasets import python
from tests.images import SUBSAMPLINGS, as_array, jpeg, patch_gray_factors, patch_jpeg, photo, tiny_jpeg

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
}


def whole_of(data: bytes, color: str) -> NDArray[np.uint8]:
    flags = {"rgb": cv2.IMREAD_COLOR_RGB, "bgr": cv2.IMREAD_COLOR_BGR, "gray": cv2.IMREAD_GRAYSCALE}[color]
    image = np.asarray(cv2.imdecode(as_array(data), flags | cv2.IMREAD_IGNORE_ORIENTATION), np.uint8)
    return image if image.ndim == 3 else image[..., None]


def turbo() -> LibjpegTurbo:
    library = find_libjpeg_turbo()
    assert library is not None, libjpeg_turbo_refusal()
    return library


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
    size = (77, 101)
    data = tiny_jpeg(size[1], size[0], FACTORS[name], separate=separate)
    whole = whole_of(data, "rgb")
    for box in ((0, 0, 77, 101), (3, 8, 30, 33), (16, 16, 44, 61), (33, 40, 5, 7), (0, 24, 1, 77), (70, 99, 7, 2)):
        part = region_of(data, "rgb", size, box)
        y, x, h, w = box
        assert part is not None and np.array_equal(part, whole[y : y + h, x : x + w]), box


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


# --- progressive files, and limits ------------------------------------------------------------------------------------


def ending_early(data: bytes, scans: int) -> bytes:
    """A progressive JPEG without all but its first scans. It is valid, but of less precision."""
    starts = [start for kind, start, _ in damaged.segments(data) if kind in (damaged.SCAN, damaged.HUFFMAN)]
    kinds = [kind for kind, _, _ in damaged.segments(data) if kind in (damaged.SCAN, damaged.HUFFMAN)]
    last = [number for number, kind in enumerate(kinds) if kind == damaged.SCAN][scans - 1]
    return data[: starts[last + 1]] + b"\xff\xd9"


@pytest.mark.parametrize("scans", [1, 2, 3, 5])
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:0"])
def test_regions_of_progressive_files_that_libjpeg_smooths(scans: int, subsampling: str) -> None:
    """libjpeg estimates missing coefficients from blocks all around, outside of the region too."""
    data = ending_early(jpeg(photo(77, 101), subsampling, progressive=True), scans)
    whole = whole_of(data, "rgb")
    for y, x, h, w in ((0, 0, 20, 20), (33, 40, 5, 7), (16, 24, 30, 40), (70, 90, 7, 11)):
        part = region_of(data, "rgb", (77, 101), (y, x, h, w))
        assert part is not None and np.array_equal(part, whole[y : y + h, x : x + w])


@pytest.mark.parametrize("name", FACTORS)
def test_rows_are_skipped_in_several_steps(name: str) -> None:
    size = (1700, 40)
    data = tiny_jpeg(size[1], size[0], FACTORS[name])
    whole = whole_of(data, "rgb")
    for y in (511, 512, 513, 1100, 1699):
        part = region_of(data, "rgb", size, (y, 3, 1, 30))
        assert part is not None and np.array_equal(part, whole[y : y + 1, 3:33])


def test_a_file_of_many_scans_is_refused() -> None:
    data = tiny_jpeg(40, 40, FACTORS["4:2:0"], separate=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    assert region_of(data[:-2] + 90 * last + data[-2:], "rgb", (40, 40), None) is not None
    assert region_of(data[:-2] + 110 * last + data[-2:], "rgb", (40, 40), None) is None


# --- threads and memory -----------------------------------------------------------------------------------------------


def test_many_threads_decode_at_once() -> None:
    files = [jpeg(photo(90, 120, seed=seed), progressive=seed % 3 == 0) for seed in range(6)]
    wholes = [whole_of(data, "rgb") for data in files]
    spoiled = files[0][:600] + b"\xff\xd9"
    wrong: list[int] = []

    def decode(thread: int) -> None:
        for i in range(150):
            number = (thread + i) % len(files)
            part = region_of(files[number], "rgb", (90, 120), (i % 50, 7, 40, 90))
            if part is None or not np.array_equal(part, wholes[number][i % 50 : i % 50 + 40, 7:97]):
                wrong.append(number)
            assert region_of(spoiled, "rgb", (90, 120), None) is None

    threads = [threading.Thread(target=decode, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert wrong == []


def test_damaged_files_leave_no_memory_behind() -> None:
    files = [data for data in damaged.pool() if data[:2] == b"\xff\xd8"]
    buffer = np.empty(61 * 83 * 3, np.uint8)

    def decode_all(rounds: int) -> int:
        for _ in range(rounds):
            for data in files:
                turbo().decode(as_array(data), "rgb", (40, 56), (3, 5, 30, 40), buffer)
                turbo().accepts(as_array(data), (40, 56))
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    before = decode_all(2)
    assert decode_all(20) - before < 2 << 20


# --- which library ----------------------------------------------------------------------------------------------------

STUB = """
struct errors { void (*functions[5])(void *); int code, numbers[2]; };
void jpeg_CreateDecompress(struct errors **decompressor, int version, unsigned long size) {
    struct errors *errors = *decompressor;
    errors->code = 12, errors->numbers[0] = 80, errors->numbers[1] = version + 0 * (int)size;
    errors->functions[0](decompressor);
}
void jpeg_destroy_decompress(void) {}
void jpeg_mem_src(void) {}
void jpeg_read_header(void) {}
void jpeg_start_decompress(void) {}
void jpeg_finish_decompress(void) {}
void jpeg_crop_scanline(void) {}
void jpeg_skip_scanlines(void) {}
void jpeg_read_scanlines(void) {}
"""
"""A library with the functions of a libjpeg whose API is that of version 8."""


def stub(folder: Path, more: str = "") -> str:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    (folder / "stub.c").write_text(STUB + more)
    path = str(folder / "libstub.so")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", path, str(folder / "stub.c")], check=True, timeout=60)
    return path


def test_libraries_that_cannot_be_used_are_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"^/no-such-library\.so: cannot open shared object file"):
        LibjpegTurbo("/no-such-library.so")
    with pytest.raises(OSError, match=r"^libc\.so\.6: it has no function jpeg_CreateDecompress$"):
        LibjpegTurbo("libc.so.6")
    with pytest.raises(OSError, match=r"it is older than libjpeg-turbo 3\.0$"):
        LibjpegTurbo(stub(tmp_path))
    copied = str(shutil.copy(turbo().path, tmp_path))
    with pytest.raises(OSError, match=r"this process has opened another one$"):
        LibjpegTurbo(copied)
    assert LibjpegTurbo(turbo().path).path == turbo().path


def test_a_library_of_another_api_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"its API is that of libjpeg 8, not 6\.2$"):
        LibjpegTurbo(stub(tmp_path, "void jpeg12_crop_scanline(void) {}"))


def test_a_libjpeg_in_the_global_scope_makes_opencv_decode(tmp_path: Path) -> None:
    done = python(GLOBAL, stub(tmp_path))
    assert done.stdout == "None True\n", done.stderr


GLOBAL = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
from gpuflow.decode.libjpeg_turbo import find_libjpeg_turbo, libjpeg_turbo_refusal
print(find_libjpeg_turbo(), "another libjpeg is in the process's global scope" in libjpeg_turbo_refusal())
"""


def test_without_a_library_the_description_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a distribution's package of Pillow, which has no list of files."""
    monkeypatch.setattr(metadata, "files", lambda name: None)
    monkeypatch.setattr(libjpeg_turbo, "_SYSTEM", "libno-such.so.62")
    caches = (libjpeg_turbo._search, decoder_description)
    for cache in caches:
        cache.cache_clear()
    try:
        assert find_libjpeg_turbo() is None
        assert decoder_description() == (
            f"OpenCV {cv2.__version__} (whole images: crops of JPEGs take 1.3 times as long, small ones of large "
            "photographs 4 times; no libjpeg-turbo: this package of Pillow has no libjpeg; libno-such.so.62: "
            "cannot open shared object file: No such file or directory; pip install --force-reinstall "
            "'pillow>=10.4', whose wheel has libjpeg-turbo, and preload no other libjpeg)"
        )
    finally:
        for cache in caches:
            cache.cache_clear()
