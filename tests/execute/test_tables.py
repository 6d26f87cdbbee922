"""Tables that are filled without giving Python's interpreter away equal those that numpy makes."""

from __future__ import annotations

import numpy as np
import pytest

from gpuflow.execute import tables
from gpuflow.execute.tables import copy_rows, table_of


@pytest.mark.parametrize("count", [0, 1, 700])
def test_columns_next_to_each_other(count: int) -> None:
    rng = np.random.default_rng(0)
    flags, box = rng.integers(0, 2, (count, 2)).astype(bool), rng.integers(0, 99, (count, 4)).astype(np.int32)
    offsets = rng.integers(0, 1 << 40, count)
    table = table_of(count, [7, offsets, box, flags])
    assert table.dtype == np.int64 and table.flags.c_contiguous
    assert np.array_equal(table, np.column_stack([np.full(count, 7), offsets, box, flags]))


@pytest.mark.parametrize("compiled", [True, False])
def test_rows_are_copied(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled:
        assert tables._compiled_copy() is not None, "tests need a compiler"
    else:
        monkeypatch.setattr(tables, "_compiled_copy", lambda: None)
    rng = np.random.default_rng(0)
    source, target = rng.integers(-99, 99, (50, 7)), np.full((30, 7), -1)
    rows, places = rng.permutation(50)[:20], rng.permutation(30)[:20]
    copy_rows(source, rows[::2], target, places[::2])  # every other one: not contiguous
    expected = np.full((30, 7), -1)
    expected[places[::2]] = source[rows[::2]]
    assert np.array_equal(target, expected)
    copy_rows(source, rows[:0], target, places[:0])
    assert np.array_equal(target, expected)
