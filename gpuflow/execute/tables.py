"""Tables of integers, made without giving Python's interpreter away.

numpy lets another thread have the interpreter while it copies more than 500 numbers, and whenever it copies rows by
their numbers. A loader's thread then waits for the interpreter many times for each chunk, and a training's thread as
often (measured in experiments/real_data/NOTES.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuflow.runtime.compiled import compiled

__all__ = ["copy_rows", "table_of"]

_SOURCE = Path(__file__).with_suffix(".c")


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


def copy_rows(
    source: NDArray[np.int64], rows: NDArray[np.int64], target: NDArray[np.int64], places: NDArray[np.int64]
) -> None:
    """target[places] = source[rows], for contiguous tables of equally many columns."""
    copy = _compiled_copy()
    if copy is None:
        target[places] = source[rows]
        return
    assert source.flags.c_contiguous and target.flags.c_contiguous and source.shape[1] == target.shape[1]
    arrays = source, np.ascontiguousarray(rows), target, np.ascontiguousarray(places)
    copy(*(array.ctypes.data for array in arrays), len(rows), source.shape[1])


@lru_cache(maxsize=1)
def _compiled_copy() -> Callable[..., None] | None:
    """`gpuflow_copy_rows`, which keeps the interpreter; None without a compiler."""
    library = compiled(_SOURCE)
    if library is None:
        return None
    copy = ctypes.PyDLL(library._name, handle=library._handle).gpuflow_copy_rows
    copy.argtypes, copy.restype = [*[ctypes.c_void_p] * 4, ctypes.c_int64, ctypes.c_int64], None
    return copy
