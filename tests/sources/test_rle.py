"""COCO's compressed run lengths. The texts were made by pycocotools' `mask.encode`, the run lengths counted."""

from __future__ import annotations

import pytest

from gpuflow.sources.record_table import run_lengths


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("01", [0, 1]),
        ("T1", [36]),
        ("01?1D", [0, 1, 15, 2, 3]),
        ("031O0O0140LO", [0, 3, 1, 2, 1, 1, 1, 2, 5, 2, 1, 1]),
        (
            "i41X30\\10RM0[N0o80jL020bK0YO",
            [153, 1, 104, 1, 148, 1, 54, 1, 1, 1, 288, 1, 186, 1, 188, 1, 46, 1, 23],
        ),
    ],
)
def test_run_lengths(text: str, expected: list[int]) -> None:
    assert run_lengths(text).tolist() == expected


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("0 1", "a character that is none of run lengths"),
        ("0\u20ac", "a character that is none of run lengths"),
        ("01i", "the last run length is cut off"),
        ("o" * 13 + "1", "a run length of more than 60 bits"),
    ],
)
def test_other_texts_are_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        run_lengths(text)
