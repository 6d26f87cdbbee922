"""The C code that reads headers: files that it leaves to `probe`, and a machine without a compiler."""

from __future__ import annotations

import numpy as np
import pytest

from gpuflow.decode import header_scan
from gpuflow.decode.chunk_headers import read_headers
from gpuflow.decode.header_scan import scan_headers
from tests import images
from tests.decode.test_chunk_headers import MAX_PIXELS, payload

PHOTO = images.photo(40, 56)


def ordinary(*files: bytes, orientation: bool = False) -> list[bool]:
    found: list[bool] = scan_headers(payload(files), orientation=orientation).engine.tolist()
    return found


def test_an_ordinary_file_needs_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("probe was called")

    monkeypatch.setattr("gpuflow.decode.chunk_headers.probe", refuse)
    files = [images.jpeg(PHOTO, sampling) for sampling in ("4:2:0", "4:2:2", "4:4:0", "4:4:4")]
    files += [images.jpeg(PHOTO[..., 0]), images.with_restarts(PHOTO, 3), images.jpeg(PHOTO) + b"bytes after the end"]
    headers = read_headers(payload(files), max_pixels=MAX_PIXELS, max_scans=1, orientation=True)
    assert headers.engine.all()
    assert headers.sampling.tolist() == [0x22, 0x21, 0x12, 0x11, 0, 0x22, 0x22]
    assert (headers.sizes == [40, 56]).all()


def test_what_is_not_ordinary_is_left_to_probe() -> None:
    whole = images.jpeg(PHOTO)
    fill = whole[:2] + b"\xff" + whole[2:]
    assert ordinary(b"", b"\xff", whole[:30], whole[:-2], images.jpeg(PHOTO, progressive=True), fill) == [False] * 6
    turned = images.with_orientation(PHOTO, "JPEG", 6)
    assert ordinary(turned) == [True] and ordinary(turned, orientation=True) == [False]


def test_without_a_compiler_probe_reads_every_file(monkeypatch: pytest.MonkeyPatch) -> None:
    files = payload([images.jpeg(PHOTO), images.png(PHOTO), b"none"])
    limits = {"max_pixels": MAX_PIXELS, "max_scans": 1, "orientation": False}
    expected = read_headers(files, **limits)  # type: ignore[arg-type]
    monkeypatch.setattr(header_scan, "compiled", lambda source: None)
    found = read_headers(files, **limits)  # type: ignore[arg-type]
    assert found.engine.tolist() == expected.engine.tolist() == [True, False, False]
    for name in ("sizes", "sampling", "scans", "intervals"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))
    assert found.others == expected.others
    assert [str(fault) for fault in found.faults] == [str(fault) for fault in expected.faults]
