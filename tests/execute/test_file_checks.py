"""Which files are checked: new ones, once in a run; and complete ones of earlier runs, never."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpuflow.decode import complete_scan
from gpuflow.decode.chunk_headers import read_headers
from gpuflow.decode.codecs import MAX_SCANS
from gpuflow.decode.complete_scan import COMPLETE, DAMAGED, check_scan
from gpuflow.decode.libjpeg_turbo import find_libjpeg_turbo
from gpuflow.execute.complete_contents import CompleteContents
from gpuflow.execute.file_checks import FileChecks
from gpuflow.sources import Payload
from tests.images import jpeg, photo

pytestmark = pytest.mark.skipif(find_libjpeg_turbo() is None, reason="needs libjpeg-turbo 3: gpuflow[turbo]")
FILES = [jpeg(photo(30 + i, 40, seed=i)) for i in range(20)]
CUT = [data[:-8] + data[-2:] for data in FILES]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the size in bytes of each file that is checked."""
    found: list[int] = []

    def check(data: NDArray[np.uint8], *arguments: Any) -> int:
        found.append(data.size)
        return check_scan(data, *arguments)

    monkeypatch.setattr(complete_scan, "check_scan", check)
    return found


def states(checks: FileChecks, files: Sequence[bytes], first: int | None = 0) -> list[int]:
    """What is known of the files, whose samples have indices from `first` on, or none."""
    payload = Payload.of(files, lambda size: np.zeros(size, np.uint8))
    headers = read_headers(payload, max_pixels=1 << 20, max_scans=MAX_SCANS, orientation=False)
    indices = None if first is None else range(first, first + len(files))
    found: list[int] = checks.states(np.arange(len(files)), payload, headers, indices).tolist()
    return found


def test_each_file_is_checked_once_by_its_index_and_size(checked: list[int]) -> None:
    checks, files = FileChecks(None, 1, 3), [*FILES[:10], *CUT[10:]]
    expected = [COMPLETE] * 10 + [DAMAGED] * 10
    assert states(checks, files) == states(checks, files) == expected
    assert checked == sorted(map(len, files), reverse=True)
    assert states(checks, CUT[:1]) == [DAMAGED], "another file with the same index"
    assert len(checked) == 21


@pytest.mark.parametrize("threads", [1, 4])
def test_a_file_without_an_index_is_checked_each_time(checked: list[int], threads: int) -> None:
    checks = FileChecks(None, threads, 3)
    for _ in range(3):
        assert states(checks, FILES[:4], None) == [COMPLETE] * 4
    assert len(checked) == 12 and checks.threads_while_reading == 3


def test_complete_files_are_remembered_between_runs_by_their_bytes(tmp_path: Path, checked: list[int]) -> None:
    files = [*FILES[:10], *CUT[10:]]
    first = FileChecks(CompleteContents(tmp_path / "complete"), 1, 3)
    states(first, files)
    first.close()
    checked.clear()
    later = FileChecks(CompleteContents(tmp_path / "complete"), 1, 3)
    assert states(later, files, first=500) == [COMPLETE] * 10 + [DAMAGED] * 10
    assert checked == sorted(map(len, CUT[10:]), reverse=True), "damaged ones are checked in each run"
    later.close()


def test_workers_check_while_many_files_are_new() -> None:
    checks = FileChecks(None, 1, 3)
    assert checks.threads_while_reading == 3
    states(checks, FILES)
    assert checks.threads_while_reading == 3
    states(checks, FILES)
    assert checks.threads_while_reading == 0
    states(checks, [*FILES[:19], CUT[19]])
    assert checks.threads_while_reading == 0, "one of twenty"
    states(checks, FILES, first=18)
    assert checks.threads_while_reading == 3
