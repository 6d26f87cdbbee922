"""Tables of integers, as nvJPEG and kernels read them, and those of the resampling kernel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpuflow.arrays import Array, Ints
from gpuflow.pipeline.program import Resampling


def table_of(count: int, parts: Sequence[Array | int]) -> Ints:
    """The columns of all parts next to each other, int64 [count, columns].

    parts: each [count], [count, columns of it], or a number for a column of it.
    """
    columns = [np.full(count, part) if isinstance(part, int) else part for part in parts]
    columns = [column[:, None] if column.ndim == 1 else column for column in columns]
    table = np.empty((count, sum(column.shape[1] for column in columns)), np.int64)
    return np.concatenate(columns, axis=1, out=table)


FIELDS = (
    "address", "step_y", "step_x",
    "box_y", "box_x", "box_height", "box_width",
    "mirror_y", "mirror_x",
    "grid_height", "grid_width",
    "shown_y", "shown_x", "shown_height", "shown_width",
    "window_y", "window_x", "window_height", "window_width",
    "flip_y", "flip_x",
    "offset",
)  # fmt: skip
"""Columns of a chunk's plan, int64 [N, len(FIELDS)]: the device address of the image's upper left pixel and the bytes
from there to the next row's and the next column's, the fields of `pipeline.program.Resampling`, and how many elements
after the first one of the kernel's result the image's begins."""


def resampling_plan_of(resampling: Resampling, places: Ints, offsets: Array | int) -> Ints:
    """Encode a resampling as its kernel reads it: int64 [n, len(FIELDS)].

    places [n, 3]: the first three columns. offsets [n]: the last one, or one number for all.
    """
    drawn = resampling.box, resampling.mirrors, resampling.grid, resampling.shown, resampling.window, resampling.flips
    plan = table_of(len(places), [places, *drawn, offsets])
    assert plan.shape[1] == len(FIELDS)
    return plan
