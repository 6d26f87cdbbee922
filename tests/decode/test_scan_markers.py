"""The markers of a JPEG's scan: those of sound files are as expected, and damage to them is found."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gpuflow.decode.codecs import scan_start
from gpuflow.decode.scan_markers import expected_restarts, has_expected_markers
from tests.images import as_array, jpeg, photo, with_restarts
from tests.scans import scan_of


def fits(data: bytes) -> bool:
    """Whether the markers of a file that engines may decode are as expected."""
    scan = scan_of(data)
    return has_expected_markers(scan.data[scan.start :], expected_restarts(*scan.frame, scan.interval))


@pytest.mark.parametrize("interval", [0, 1, 2, 7, 8, 9, 100, 65_535])
def test_sound_files_fit(interval: int) -> None:
    rng = random.Random(interval)
    for number, sampling in enumerate(["4:4:4", "4:2:2", "4:2:0", "4:4:0", "gray"] * 5):
        pixels = photo(rng.randint(1, 150), rng.randint(5, 170), seed=number)
        if sampling == "gray":
            pixels, sampling = pixels[..., 0], "4:2:0"
        data = with_restarts(pixels, interval, sampling) if interval else jpeg(pixels, sampling)
        assert fits(data)
        assert fits(data + b"\xff\xd0after the end"), "what follows the image is ignored"
        assert fits(data[:-2] + b"\xff\xff\xff" + data[-2:]), "fill bytes may precede the last marker"


def in_the_scan(data: bytes, inserted: bytes, *, replaced: int = 0) -> bytes:
    """The file with other bytes in the middle of its scan, next to no byte 0xFF."""
    start, _ = scan_start(as_array(data))
    at = (start + len(data)) // 2
    while 0xFF in data[at - 1 : at + replaced + 2]:
        at += 1
    return data[:at] + inserted + data[at + replaced :]


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("code", [1, 0x4F, *range(0xC0, 0x100)])
def test_no_other_marker_fits(restarts: bool, code: int) -> None:
    """A marker for the end of the image ends the scan early; what that leaves unwritten is found after decoding."""
    pixels = photo(60, 90, seed=1)
    data = with_restarts(pixels, 5) if restarts else jpeg(pixels)
    for inserted, replaced in ((b"", 0), (b"", 2), (b"\xff", 1)):
        ended = code == 0xD9 and not restarts
        assert fits(in_the_scan(data, inserted + bytes((0xFF, code)), replaced=replaced)) == ended


def test_fill_bytes_with_data_after_them_do_not_fit() -> None:
    data = jpeg(photo(60, 90, seed=1))
    assert not fits(in_the_scan(data, b"\xff\xff\x00"))
    assert not fits(data[:-2] + b"\xff\xff\x00" + data[-2:])


def test_restart_markers_that_lack_are_repeated_or_swapped_do_not_fit() -> None:
    data = with_restarts(photo(60, 90, seed=1), 2)
    start, _ = scan_start(as_array(data))
    marks = [at for at in range(start, len(data) - 2) if data[at] == 0xFF and 0xD0 <= data[at + 1] <= 0xD7]
    assert len(marks) == 11
    for at in marks:
        assert not fits(data[:at] + data[at + 2 :])
        assert not fits(data[:at] + data[at : at + 2] + data[at:])
        assert not fits(data[: at + 1] + bytes((data[at + 1] ^ 1,)) + data[at + 2 :])


def test_a_scan_without_an_end_does_not_fit() -> None:
    data = as_array(jpeg(photo(60, 90, seed=1)))
    scan = data[scan_start(data)[0] :]
    assert has_expected_markers(scan, 0)
    assert not has_expected_markers(scan[:-1], 0) and not has_expected_markers(scan[:-2], 0)
    for size in range(4):
        assert not has_expected_markers(np.zeros(size, np.uint8), 0)


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0", "4:4:0"])
def test_damage_at_random_never_raises(subsampling: str) -> None:
    rng, found = random.Random(3), set[bool]()
    for _ in range(20):
        data = bytearray(with_restarts(photo(40, 60, seed=2), rng.choice([1, 3, 50]), subsampling))
        start, _ = scan_start(as_array(bytes(data)))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(start, len(data) - 2)] = rng.choice([0, 0xFF, 0xD0, 0xD9, 7])
        found.add(fits(bytes(data)))
    assert found == {True, False}


def test_a_restart_marker_behind_a_fill_byte_does_not_fit() -> None:
    """On an H200's engines, such a file once had other pixels after other files."""
    data = jpeg(photo(140, 165, seed=4), "4:2:2")
    assert fits(data) and not fits(in_the_scan(data, b"\xff\xff\xd7", replaced=2))
