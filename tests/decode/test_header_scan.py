"""The C code that reads headers: files that it leaves to `probe`, and a machine without a compiler."""

from __future__ import annotations

import pytest

from gpuflow.decode.chunk_files import HeaderScan, engine_sampling, read_headers, scan_headers
from gpuflow.decode.codecs import probe
from tests import images
from tests.decode.test_chunk_headers import MAX_PIXELS, payload
from tests.reference.headers import reference_sampling

PHOTO = images.photo(40, 56)


def scanned(*files: bytes, max_scans: int = 20, orientation: bool = False) -> HeaderScan:
    return scan_headers(payload(files), max_scans=max_scans, orientation=orientation)


def test_an_ordinary_file_needs_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("probe was called")

    monkeypatch.setattr("gpuflow.decode.chunk_files.probe", refuse)
    files = [images.jpeg(PHOTO, sampling) for sampling in ("4:2:0", "4:2:2", "4:4:0", "4:4:4")]
    files += [images.jpeg(PHOTO[..., 0]), images.with_restarts(PHOTO, 3), images.jpeg(PHOTO) + b"bytes after the end"]
    files += [images.with_orientation(PHOTO, "JPEG", 6), images.jpeg(PHOTO, progressive=True)]
    headers = read_headers(payload(files), max_pixels=MAX_PIXELS, max_scans=10, orientation=True)
    assert headers.engine.tolist() == [True] * 8 + [False]
    assert headers.sampling.tolist() == [0x22, 0x21, 0x12, 0x11, 0, 0x22, 0x22, 0x22, 0]
    assert headers.orientations.tolist() == [1] * 7 + [6, 1]
    assert (headers.sizes[:7] == [40, 56]).all()
    assert headers.upright_sizes[7].tolist() == headers.sizes[7, ::-1].tolist()
    assert headers.progressive.tolist() == [False] * 8 + [True]


def test_what_is_not_ordinary_is_left_to_probe() -> None:
    whole = images.jpeg(PHOTO)
    stray = whole[:2] + b"\0" + whole[2:]
    found = scanned(b"", b"\xff", whole[:30], whole[:-2], stray, whole[:2] + b"\xff" * 9, images.png(PHOTO))
    assert not found.engine.any() and not found.progressive.any() and not found.sizes.any()


def test_a_progressive_file_with_too_many_scans_is_left_to_probe() -> None:
    file = images.jpeg(PHOTO, progressive=True)
    scans = file.count(b"\xff\xda")
    assert scanned(file, max_scans=scans).progressive.tolist() == [True]
    assert scanned(file, max_scans=scans - 1).progressive.tolist() == [False]


@pytest.mark.parametrize("cut_off", [b"\xff", b"\xff\xe1", b"\xff\xe1\0", b"\xff\xe1\0\x10"])
def test_a_segment_that_is_cut_off_ends_the_search_for_scans(cut_off: bytes) -> None:
    """What follows the file in the buffer is not read as part of it: here an end marker, then scans."""
    comment = b"\xff\xfe\0\x04\xff\xd9"  # the end marker that a whole file has
    file = images.jpeg(PHOTO, progressive=True)[:-2] + comment + cut_off
    scans = file.count(b"\xff\xda")
    content = payload([file, b"\xff\xda\0\x02" * 20])
    assert scan_headers(content, max_scans=scans, orientation=False).progressive.tolist() == [True, False]


def test_an_orientation_is_read_only_where_it_is_asked_for() -> None:
    files = [images.with_orientation(PHOTO, "JPEG", orientation) for orientation in range(1, 9)]
    assert scanned(*files).orientations.tolist() == [1] * 8
    found = scanned(*files, orientation=True)
    assert found.orientations.tolist() == list(range(1, 9)) and found.engine.all()


def adobe(transform: int, length: int = 14) -> bytes:
    """An Adobe segment of this length."""
    return b"\xff\xee" + length.to_bytes(2) + (b"Adobe\0\x64\0\0\0\0" + bytes([transform]))[: length - 2]


WIDE = b"\xff\xdb\0\x83\x13" + bytes(range(1, 129))
"""A segment with quantisation table 3, of 16 bits, which no component uses."""
INVALID = b"\xff\xc4\0\x16\x03\x03" + bytes(18)
"""A segment with Huffman table 3, of three codes of one bit, which no component uses."""


@pytest.mark.parametrize(
    ("segment", "gray", "color"),
    [
        (b"\xff" * 5, True, True),
        (b"\xff\xfe\0\x04ab" * 100, True, True),
        (adobe(1), True, True),
        (adobe(0), True, False),
        (adobe(1, length=7), True, False),
        (b"\xff\xee\0\x04ab", True, True),
        (WIDE, True, True),
        (INVALID, True, True),
        (INVALID[:3] + b"\x15" + INVALID[4:-1], False, False),
        (b"\xff\xd3", False, False),
    ],
    ids=[
        "fill",
        "comments",
        "YCbCr",
        "RGB",
        "cut off",
        "not Adobe's",
        "16 bits",
        "an invalid table",
        "a cut table",
        "a restart",
    ],
)
def test_unusual_segments(segment: bytes, gray: bool, color: bool) -> None:
    """The engines decode a file with one, where they certainly give the CPU's pixels."""
    files = [image[:2] + segment + image[2:] for image in (images.jpeg(PHOTO[..., 0]), images.jpeg(PHOTO))]
    assert [engine_sampling(images.as_array(file)) is not None for file in files] == [gray, color]
    for file in files:
        array = images.as_array(file)
        assert engine_sampling(array) == reference_sampling(array, probe(array))


def test_a_tiny_file_needs_few_bytes_after_its_header() -> None:
    data = images.jpeg(images.photo(8, 8)[..., 0] * 0)
    assert engine_sampling(images.as_array(data)) == 0
