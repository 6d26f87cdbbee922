"""Tables for nvJPEG and kernels equal those that numpy makes of columns."""

from __future__ import annotations

import numpy as np
import pytest

from gpuflow.execute.packing import table_of


@pytest.mark.parametrize("count", [0, 1, 700])
def test_columns_next_to_each_other(count: int) -> None:
    rng = np.random.default_rng(0)
    flags, box = rng.integers(0, 2, (count, 2)).astype(bool), rng.integers(0, 99, (count, 4)).astype(np.int32)
    offsets = rng.integers(0, 1 << 40, count)
    table = table_of(count, [7, offsets, box, flags])
    assert table.dtype == np.int64 and table.flags.c_contiguous
    assert np.array_equal(table, np.column_stack([np.full(count, 7), offsets, box, flags]))
    by_columns = table_of(count, [np.asfortranarray(box), offsets, np.asfortranarray(flags)])
    assert by_columns.flags.c_contiguous and np.array_equal(by_columns, np.column_stack([box, offsets, flags]))
