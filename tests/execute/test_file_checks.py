"""Which files are checked, when, and in which parts. libjpeg-turbo on the CPU takes the place of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from gpuflow.decode.chunk_headers import read_headers
from gpuflow.decode.codecs import MAX_SCANS
from gpuflow.decode.complete import FIELDS
from gpuflow.errors import LoaderTimeout
from gpuflow.execute import file_checks
from gpuflow.execute.file_checks import FileChecks
from gpuflow.execute.kernels.complete import MARGIN_BYTES, Workspace
from gpuflow.sources import Payload
from tests.host_stream import HostStream
from tests.huffman import complete_by_libjpeg
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

    def check(files: torch.Tensor, large: int, places: int, workspace: Workspace) -> torch.Tensor:
        columns = dict(zip(FIELDS, files.numpy().T, strict=True))
        spaces = columns["length"] - columns["scan"] + MARGIN_BYTES
        assert (columns["data"][1:] >= (columns["data"] + spaces)[:-1]).all(), "no file writes into the next one's part"
        assert (columns["data"] % 8 == 0).all() and columns["data"][-1] + spaces[-1] <= len(workspace.data)
        ends = columns["places"] + columns["restarts"] + 2
        assert (columns["places"][1:] >= ends[:-1]).all() and ends[-1] <= places
        found.append(columns["length"].tolist())
        return complete_by_libjpeg(files, large, places, workspace)

    monkeypatch.setattr(file_checks, "complete_files", check)
    return found


def new_checks() -> FileChecks:
    stream: Any = HostStream()
    return FileChecks(stream)


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
    checks, files = new_checks(), [*FILES[:10], *CUT[10:]]
    expected = [True] * 10 + [False] * 10
    assert complete(checks, files) == complete(checks, files) == expected
    assert checked == [sorted(map(len, files), reverse=True)], "the largest first"
    assert complete(checks, CUT[:1]) == [False], "another file with the same index"
    assert complete(checks, [*FILES[:10], *CUT[10:], FILES[0]], rows=[20, 3]) == [True, True]
    assert checked[1:] == [[len(CUT[0])], [len(FILES[0])]]


def test_a_file_is_checked_by_one_of_those_that_share_memory(checked: list[list[int]]) -> None:
    """Whether it is complete or not, and what was known before stays known."""
    one, other, files = new_checks(), new_checks(), [*FILES[:8], *CUT[8:12]]
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


def test_threads_of_the_cpu_check_files_where_there_are_some(
    checked: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a loader all, those of a service but the large ones."""
    stream: Any = HostStream()
    checks, files, expected = FileChecks(stream, 2), [*FILES, *CUT], [True] * 20 + [False] * 20
    monkeypatch.setattr(file_checks, "_MOST_CPU_BYTES", most := sorted(map(len, files))[30])
    assert complete(checks, files) == expected and not checked
    assert complete(checks, files, None) == expected
    assert sorted(size for part in checked for size in part) == sorted(len(data) for data in files if len(data) > most)


def test_an_index_beyond_the_shared_memory_is_not_remembered(checked: list[list[int]]) -> None:
    checks = new_checks()
    checks.share(np.zeros(FileChecks.shared_bytes(2), np.uint8))
    for _ in range(2):
        assert complete(checks, FILES[:4]) == [True] * 4
    assert list(map(len, checked)) == [4, 2]


def test_a_file_without_an_index_is_checked_each_time(checked: list[list[int]]) -> None:
    checks = new_checks()
    for _ in range(3):
        assert complete(checks, FILES[:4], None) == [True] * 4
    assert list(map(len, checked)) == [4] * 3


@pytest.mark.parametrize(("most_bytes", "most_files"), [(1 << 25, 3), (4000, 256), (1, 256)])
def test_many_and_large_files_are_checked_in_parts(
    most_bytes: int, most_files: int, checked: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any rows, in any order."""
    monkeypatch.setattr(file_checks, "_PART_BYTES", most_bytes)
    monkeypatch.setattr(file_checks, "_PART_FILES", most_files)
    files = [data for pair in zip(FILES, CUT, strict=True) for data in pair]
    rows = np.random.default_rng(0).permutation(40)[:31].tolist()
    assert complete(new_checks(), files, None, rows) == [row % 2 == 0 for row in rows]
    assert sorted(size for part in checked for size in part) == sorted(len(files[row]) for row in rows)
    assert all(len(part) == 1 or (len(part) <= most_files and sum(part) <= most_bytes) for part in checked)
    assert len(checked) > 5


def test_a_file_that_is_too_large_for_the_kernels_is_left_to_the_cpu(
    checked: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = sorted(map(len, FILES))[10]
    monkeypatch.setattr("gpuflow.decode.complete.MAX_BYTES", most)
    assert complete(new_checks(), FILES, None) == [len(data) <= most for data in FILES]
    assert complete(new_checks(), [max(FILES, key=len)], None) == [False]
    assert complete(new_checks(), [], None) == []


def test_a_header_that_announces_more_restarts_than_fit_asks_for_no_memory(checked: list[list[int]]) -> None:
    """One unit of a large image between two markers: the file would need millions of them."""
    data = with_restarts(photo(40, 40, seed=1), 1)
    frame = data.index(b"\xff\xc0")
    claims = data[: frame + 5] + (60_000).to_bytes(2) + (2_000).to_bytes(2) + data[frame + 9 :]
    payload = Payload.of([claims, data], lambda size: np.zeros(size, np.uint8))
    headers = read_headers(payload, max_pixels=1 << 30, max_scans=MAX_SCANS, orientation=False)
    assert headers.engine.all() and headers.sizes[0].tolist() == [60_000, 2_000]
    assert new_checks().complete(np.arange(2), payload, headers, None).tolist() == [False, True]
    assert checked == [[len(data)]]


def test_new_files_far_apart_are_not_copied_with_what_lies_between(
    checked: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_checks, "_PART_BYTES", 5000)
    assert complete(new_checks(), FILES, None, rows=[0, 19]) == [True, True]
    assert checked == [[len(FILES[0])], [len(FILES[19])]]


def test_threads_take_turns_in_one_memory(checked: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an error."""
    checks, made, allocate = new_checks(), list[int](), FileChecks._allocated

    def allocated(self: FileChecks, size: int) -> Any:
        made.append(size)
        return allocate(self, size)

    monkeypatch.setattr(FileChecks, "_allocated", allocated)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda turn: complete(checks, [*FILES, *CUT], None), range(8)))
    assert found == [[True] * 20 + [False] * 20] * 8 and len(made) == 1
    with monkeypatch.context() as failing:
        failing.setattr(file_checks, "describe", raise_memory_error)
        with pytest.raises(MemoryError):
            complete(checks, FILES, None)
    assert complete(checks, FILES, None) == [True] * 20 and len(made) == 1
    checks._memory.get()
    monkeypatch.setattr(file_checks, "_TURN_SECONDS", 0.01)
    with pytest.raises(LoaderTimeout, match=r"did not check files within 0\.01 s"):
        complete(checks, FILES, None)


def test_memory_is_freed_once_files_have_long_been_known(
    checked: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_checks, "_UNUSED_CHUNKS", 3)
    checks = new_checks()

    def has_memory() -> bool:
        memory = checks._memory.get_nowait()
        checks._memory.put(memory)
        return memory is not None

    assert not has_memory()
    for first in (0, 100):  # new files, twice
        assert complete(checks, FILES, first) == [True] * 20 and has_memory()
        for _ in range(2):
            complete(checks, FILES, first)
        assert has_memory()
        complete(checks, FILES, first)
        assert not has_memory()
    for first in (200, 300):  # between new files there are too few others
        complete(checks, FILES, first)
        for _ in range(2):
            complete(checks, FILES, first)
        assert has_memory()
    checks._memory.get()  # while a part is being checked
    for _ in range(3):
        complete(checks, FILES, 0)
    assert len(checked) == 4


def raise_memory_error(*arguments: object) -> None:
    raise MemoryError
