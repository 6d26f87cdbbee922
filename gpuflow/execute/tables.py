"""Tables of integers, as nvJPEG and kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["table_of"]


def table_of(count: int, parts: Sequence[NDArray[Any] | int]) -> NDArray[np.int64]:
    """The columns of all parts next to each other, int64 [count, columns].

    parts: each [count], [count, columns of it], or a number for a column of it.
    """
    columns: list[NDArray[Any] | int] = []
    for part in parts:
        columns += [part] if isinstance(part, int) or part.ndim == 1 else list(part.T)
    table = np.empty((count, len(columns)), np.int64)
    for place, column in enumerate(columns):
        table[:, place] = column
    return table
