"""Which JPEG files count as complete: sound ones of every kind, and none that lacks data, however few."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuflow.decode.chunk_headers import read_headers
from gpuflow.decode.codecs import MAX_SCANS, scan_start
from gpuflow.decode.complete_scan import COMPLETE, DAMAGED, MARKED, check_scan, check_scans
from gpuflow.decode.libjpeg_turbo import find_libjpeg_turbo
from gpuflow.sources import Payload
from tests.images import as_array, jpeg, photo, with_restarts
from tests.scans import scan_of

pytestmark = pytest.mark.skipif(find_libjpeg_turbo() is None, reason="needs libjpeg-turbo 3: gpuflow[turbo]")


def sound(seed: int) -> bytes:
    rng = random.Random(seed)
    pixels = photo(rng.randint(1, 90), rng.randint(5, 90), seed=seed)
    if seed % 4 == 3:
        return with_restarts(pixels, rng.choice([1, 4, 9]))
    return jpeg(pixels, rng.choice(["4:2:0", "4:2:2", "4:4:4", "4:4:0"]))


@given(st.integers(0, 10_000))
@settings(max_examples=60)
def test_sound_files_are_complete(seed: int) -> None:
    assert check_scan(*scan_of(sound(seed))) == COMPLETE


@given(st.integers(0, 10_000), st.integers(1, 60))
@settings(max_examples=120)
def test_a_file_that_lacks_its_last_bytes_is_damaged(seed: int, missing: int) -> None:
    """It still has an end marker. Of such files the engines may decode all, part or the bytes that happen to follow."""
    data = sound(seed)
    *_, (start, stop) = runs_of_data(data)
    cut = data[: max(stop - missing, start)] + data[stop:]
    assert check_scan(*scan_of(cut)) == DAMAGED


def runs_of_data(data: bytes) -> list[tuple[int, int]]:
    """Where the compressed data between two markers start and stop."""
    start, found, at = scan_start(as_array(data))[0], [], 0
    for at in range(start, len(data) - 1):
        if data[at] == 0xFF and data[at + 1] != 0:
            found.append((start, at))
            start = at + 2
    return found


@given(st.integers(0, 2_000), st.integers(2, 30))
@settings(max_examples=60)
def test_data_that_are_missing_before_a_restart_marker_are_found(seed: int, missing: int) -> None:
    data = with_restarts(photo(40 + seed % 30, 60, seed=seed), 2 + seed % 5)
    start, stop = random.Random(seed).choice(runs_of_data(data))
    cut = data[: max(stop - missing, start)] + data[stop:]
    assert check_scan(*scan_of(cut)) == DAMAGED


@pytest.mark.parametrize("threads", [1, 4])
def test_files_are_checked_in_their_order(threads: int) -> None:
    files = [sound(seed) if seed % 3 else sound(seed)[:-9] + b"\xff\xd9" for seed in range(40)]
    payload = Payload.of(files, lambda size: np.zeros(size, np.uint8))
    headers = read_headers(payload, max_pixels=1 << 20, max_scans=MAX_SCANS, orientation=False)
    rows = np.arange(39, -1, -1)
    found = check_scans(payload, rows, headers, threads).tolist()
    assert found == [COMPLETE if seed % 3 else DAMAGED for seed in rows.tolist()]


def test_without_libjpeg_turbo_only_the_markers_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuflow.decode.libjpeg_turbo.find_libjpeg_turbo", lambda: None)
    data = jpeg(photo(40, 60))
    assert check_scan(*scan_of(data)) == check_scan(*scan_of(data[:-9] + data[-2:])) == MARKED
    assert check_scan(*scan_of(data[:-2] + b"\xff\xd0\xff\xd9")) == DAMAGED
