"""Tables of integers, as nvJPEG and kernels read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpuflow.arrays import Array, Ints


def table_of(count: int, parts: Sequence[Array | int]) -> Ints:
    """Return the columns of all parts next to each other, int64 [count, columns].

    parts: each [count], [count, columns of it], or a number for a column of it.
    """
    columns = [np.full(count, part) if isinstance(part, int) else part for part in parts]
    columns = [column[:, None] if column.ndim == 1 else column for column in columns]
    table = np.empty((count, sum(column.shape[1] for column in columns)), np.int64)
    return np.concatenate(columns, axis=1, out=table)
