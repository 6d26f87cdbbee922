"""Encodes the crop, resize and flip of each image as a table, which the resampling kernel reads. Needs no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuflow.execute.tables import table_of
from gpuflow.pipeline.program import Resampling

__all__ = ["FIELDS", "resampling_plan_of"]

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


def resampling_plan_of(
    resampling: Resampling, places: NDArray[np.int64], offsets: NDArray[Any] | int
) -> NDArray[np.int64]:
    """Encode a resampling as its kernel reads it: int64 [n, len(FIELDS)].

    places [n, 3]: the first three columns. offsets [n]: the last one, or one number for all.
    """
    drawn = resampling.box, resampling.mirrors, resampling.grid, resampling.shown, resampling.window, resampling.flips
    plan = table_of(len(places), [places, *drawn, offsets])
    assert plan.shape[1] == len(FIELDS)
    return plan
