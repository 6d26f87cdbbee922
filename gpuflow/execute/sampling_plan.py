"""The table that tells the sampling kernel how to crop, resize and flip each image. Needs no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuflow.execute.tables import table_of
from gpuflow.pipeline.program import Sampling

__all__ = ["FIELDS", "sampling_plan_of"]

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
from there to the next row's and the next column's, the fields of `pipeline.program.Sampling`, and how many elements
after the first one of the kernel's result the image's begins."""


def sampling_plan_of(sampling: Sampling, places: NDArray[np.int64], offsets: NDArray[Any] | int) -> NDArray[np.int64]:
    """Encode a sampling as its kernel reads it: int64 [n, len(FIELDS)].

    places [n, 3]: the first three columns. offsets [n]: the last one, or one number for all.
    """
    drawn = sampling.box, sampling.mirrors, sampling.grid, sampling.shown, sampling.window, sampling.flips
    plan = table_of(len(places), [places, *drawn, offsets])
    assert plan.shape[1] == len(FIELDS)
    return plan
