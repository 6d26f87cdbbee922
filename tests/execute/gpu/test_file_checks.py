"""Tests which files of a chunk are checked, and when."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpuflow.decode.chunk_files import find_complete, read_headers
from gpuflow.decode.codecs import MAX_SCANS
from gpuflow.execute.gpu import chunk_scan
from gpuflow.execute.gpu.chunk_scan import FileChecks
from gpuflow.sources import Payload
from tests.images import jpeg, photo, with_restarts

FILES = [
    with_restarts(photo(30 + i, 40, seed=i), 3) if i % 4 == 3 else jpeg(photo(30 + i, 40, seed=i), kind)
    for i, kind in enumerate(["4:2:0", "4:2:2", "4:4:4", "4:4:0", "4:2:0"] * 4)
]
CUT = [data[:-8] + data[-2:] for data in FILES]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Gets the sizes in bytes of the files that are checked together."""
    found: list[list[int]] = []

    def find(rows: NDArray[np.int64], payload: Payload, *arguments: Any) -> NDArray[np.bool_]:
        found.append([payload.sizes[row] for row in rows])
        return find_complete(rows, payload, *arguments)

    monkeypatch.setattr(chunk_scan, "find_complete", find)
    return found


def complete(
    checks: FileChecks, files: Sequence[bytes], first: int | None = 0, rows: Sequence[int] | None = None
) -> list[bool]:
    """Which files are complete, whose samples have indices from `first` on, or none."""
    payload = Payload.of(files, lambda size: np.zeros(size, np.uint8))
    headers = read_headers(payload, max_pixels=1 << 20, max_scans=MAX_SCANS, orientation=False)
    indices = None if first is None else range(first, first + len(files))
    chosen = np.arange(len(files)) if rows is None else np.array(rows, np.int64)
    found: list[bool] = checks.complete(chosen, payload, headers, indices).tolist()
    return found


def test_each_file_is_checked_once_by_its_index_and_size(checked: list[list[int]]) -> None:
    checks, files = FileChecks(), [*FILES[:10], *CUT[10:]]
    expected = [True] * 10 + [False] * 10
    assert complete(checks, files) == complete(checks, files) == expected
    assert checked == [list(map(len, files))]
    assert complete(checks, CUT[:1]) == [False], "another file with the same index"
    assert complete(checks, [*FILES[:10], *CUT[10:], FILES[0]], rows=[20, 3]) == [True, True]
    assert checked[1:] == [[len(CUT[0])], [len(FILES[0])]]


def test_a_file_is_checked_by_one_of_those_that_share_memory(checked: list[list[int]]) -> None:
    """Whether it is complete or not, and what was known before stays known."""
    one, other, files = FileChecks(), FileChecks(), [*FILES[:8], *CUT[8:12]]
    expected = [True] * 8 + [False] * 4
    assert complete(one, files, rows=[0, 1, 8]) == [True, True, False]
    memory = np.zeros(FileChecks.shared_bytes(12), np.uint8)
    one.share(memory)
    other.share(memory)
    assert complete(other, files, rows=range(6)) == expected[:6]
    assert complete(one, files) == expected
    assert complete(other, files) == expected
    assert list(map(len, checked)) == [3, 4, 5]
    assert complete(other, CUT[:1]) == [False], "another file with the same index"
    assert complete(one, CUT[:1]) == [False]
    assert list(map(len, checked[3:])) == [1]


def test_an_index_beyond_the_shared_memory_is_not_remembered(checked: list[list[int]]) -> None:
    checks = FileChecks()
    checks.share(np.zeros(FileChecks.shared_bytes(2), np.uint8))
    for _ in range(2):
        assert complete(checks, FILES[:4]) == [True] * 4
    assert list(map(len, checked)) == [4, 2]


def test_a_file_without_an_index_is_checked_each_time(checked: list[list[int]]) -> None:
    checks = FileChecks()
    for _ in range(3):
        assert complete(checks, FILES[:4], None) == [True] * 4
    assert list(map(len, checked)) == [4] * 3


def test_a_file_that_is_too_large_is_left_to_the_cpu(checked: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    most = sorted(map(len, FILES))[10]
    monkeypatch.setattr("gpuflow.decode.chunk_files.MAX_BYTES", most)
    assert complete(FileChecks(), FILES, None) == [len(data) <= most for data in FILES]
    assert complete(FileChecks(), [max(FILES, key=len)], None) == [False]
    assert complete(FileChecks(), [], None) == []


def test_a_header_that_announces_more_restarts_than_fit_asks_for_no_memory(checked: list[list[int]]) -> None:
    """One unit of a large image between two markers: the file would need millions of them."""
    data = with_restarts(photo(40, 40, seed=1), 1)
    frame = data.index(b"\xff\xc0")
    claims = data[: frame + 5] + (60_000).to_bytes(2) + (2_000).to_bytes(2) + data[frame + 9 :]
    payload = Payload.of([claims, data], lambda size: np.zeros(size, np.uint8))
    headers = read_headers(payload, max_pixels=1 << 30, max_scans=MAX_SCANS, orientation=False)
    assert headers.engine.all() and headers.sizes[0].tolist() == [60_000, 2_000]
    assert FileChecks().complete(np.arange(2), payload, headers, None).tolist() == [False, True]


def raise_memory_error(*arguments: object) -> None:
    raise MemoryError


def test_threads_may_check_at_the_same_time() -> None:
    checks = FileChecks()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda turn: complete(checks, [*FILES, *CUT], turn % 3 * 40), range(24)))
    assert found == [[True] * 20 + [False] * 20] * 24
