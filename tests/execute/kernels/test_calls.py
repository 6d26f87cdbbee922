"""How a chunk is divided into nvJPEG calls."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="torch is built without CUDA")

from gpuflow.execute.gpu import _decode_calls


@pytest.mark.parametrize(
    ("count", "most", "sizes"),
    [(256, 128, [128, 128]), (255, 128, [128, 127]), (129, 128, [65, 64]), (1, 128, [1]), (0, 128, [])],
)
def test_calls_are_of_one_size(count: int, most: int, sizes: list[int]) -> None:
    assert [call.stop - call.start for call in _decode_calls(np.full(count, 10), most, 1 << 20)] == sizes


def test_no_call_needs_more_memory_than_allowed_but_for_one_large_image() -> None:
    calls = list(_decode_calls(np.array([30, 30, 30, 200, 30, 60, 20]), 128, 100))
    assert [(call.start, call.stop, call.size) for call in calls] == [(0, 3, 90), (3, 4, 200), (4, 6, 90), (6, 7, 20)]
