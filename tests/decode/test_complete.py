"""Which baseline JPEGs C code finds complete, compared with a reader of one code after the other in Python."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest

from gpuflow import native
from gpuflow.decode import chunk_files
from gpuflow.decode.chunk_files import Headers, find_complete, read_headers
from gpuflow.decode.codecs import MAX_SCANS
from gpuflow.native.library import NativePool
from gpuflow.sources import Payload
from tests import damaged
from tests.decode.sanitized_complete import KINDS, sound
from tests.huffman import reads_to_its_end
from tests.images import as_array, jpeg, photo
from tests.reference.headers import scan_start


def flipped(data: bytes, rng: random.Random) -> bytes:
    """With one bit of the compressed data changed."""
    changed = bytearray(data)
    changed[rng.randrange(scan_start(as_array(data))[0], len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def scanned(files: Sequence[bytes]) -> tuple[Payload, Headers, np.ndarray]:
    payload = Payload.of(files, lambda size: np.full(size, 0xAB, np.uint8))
    headers = read_headers(payload, max_pixels=1 << 30, max_scans=MAX_SCANS, orientation=False)
    return payload, headers, np.flatnonzero(headers.engine)


def found_complete(files: Sequence[bytes]) -> list[bool]:
    payload, headers, rows = scanned(files)
    assert len(rows) == len(files)
    found = find_complete(rows, payload, headers)
    complete: list[bool] = found.tolist()
    return complete


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_complete_if_one_code_after_the_other_can_be_read(kind: str) -> None:
    """Sound and damaged files, with one result for any number of threads."""
    rng, files, whole = random.Random(kind), list[bytes](), set[bytes]()
    for _ in range(5):
        data = sound(kind, rng)
        whole.add(data)
        files += [data, *damaged.damages(data, rng), *(flipped(data, rng) for _ in range(3))]
        files += [*(data[: -2 - n] + data[-2:] for n in (1, 2, 5, 12)), data[:-1], data[:-2]]
        files += [data + b"\xff\xd0more", data[:-2] + b"\xff\xff" + data[-2:]]
    payload, headers, rows = scanned(files)
    found = find_complete(rows, payload, headers)
    assert found.tolist() == [reads_to_its_end(files[row]) for row in rows.tolist()]
    assert {files[row] for row in rows[found].tolist()} >= whole
    assert len(found) > found.sum() + 25
    for threads in (1, 3, 40):
        pool = NativePool(threads)
        for _ in range(2):  # with the memory of the files before
            assert np.array_equal(find_complete(rows, payload, headers, pool), found)
        pool.close()


def test_files_with_optimized_tables_and_large_ones() -> None:
    """Each has other tables than the file before, with codes of 16 bits in the larger ones."""
    rng, files = random.Random(3), list[bytes]()
    for quality in (30, 75, 99):
        pixels = photo(120, 170, seed=quality)
        options = [cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_OPTIMIZE, 1]
        data = cv2.imencode(".jpg", pixels, options)[1].tobytes()
        files += [data, data[:-3] + data[-2:], jpeg(pixels, "4:4:4", quality=quality)]
    rng.shuffle(files)
    assert found_complete(files) == [reads_to_its_end(data) for data in files]


def test_nothing_is_read_of_what_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [sound("4:2:0", random.Random(seed)) for seed in range(9)]
    most = sorted(map(len, files))[4]
    monkeypatch.setattr(chunk_files, "MAX_BYTES", most)
    assert found_complete(files) == [len(data) <= most for data in files]
    assert found_complete([]) == []


def test_what_the_kernels_leave_to_the_cpu_is_left_here_too() -> None:
    """A table 2, more tables or segments than a header needs, and many fill bytes before the last marker."""
    data = sound("4:2:0", random.Random(0))
    renamed = bytearray(data)
    for marker, at, _ in damaged.segments(data):
        if marker == damaged.HUFFMAN and data[at + 4] & 15 == 1:
            renamed[at + 4] += 1
        if marker == damaged.SCAN:
            renamed[at + 8] = renamed[at + 10] = 0x22
    assert found_complete([bytes(renamed)]) == [False]
    tables = next(data[at:end] for marker, at, end in damaged.segments(data) if marker == damaged.HUFFMAN)
    for inserted, most in ((b"\xff\xfe\x00\x02", 256), (tables, 64)):
        few, many = (data[:2] + inserted * n + data[2:] for n in (most // 2, most + 1))
        assert found_complete([few, many]) == [True, False], inserted
    few, many = (data[:-2] + b"\xff" * n + data[-2:] for n in (60, 70))
    assert found_complete([few, many]) == [True, False]


def test_no_byte_outside_a_file_is_read(tmp_path: Path) -> None:
    """By sanitizers of addresses and of undefined behaviour, on a thousand files, most of them damaged."""
    sources = [Path(native.__file__).with_name(name) for name in ("complete.c", "pool.c")]
    library = tmp_path / "complete.so"
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-fPIC", "-shared", "-std=gnu11"]
    made = subprocess.run(["cc", *flags, "-o", library, *sources], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"cc has no sanitizers: {made.stderr.splitlines()[-1]}")
    names = ("libasan.so", "libubsan.so")
    loaded = [subprocess.check_output(["cc", f"-print-file-name={name}"], text=True).strip() for name in names]
    environment = {**os.environ, "LD_PRELOAD": " ".join(loaded), "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.decode.sanitized_complete", library],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    read, whole = map(int, done.stdout.split())
    assert read > 600 and 100 < whole < read
