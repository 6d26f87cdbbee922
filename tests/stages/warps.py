"""What the tests of stages that warp share: their warps, and how far results are from another library's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.pipeline import stage as s
from gpuflow.stages import CenterCrop, Decode
from tests.images import png
from tests.running import images, keys_of, program_of

TIES = 1e-4
"""A nearest pixel is not compared if its source coordinate is less than this from the edge between two."""
FEW = 1e-3
"""The share of such pixels in large images is below this, unless the warp is a special one."""


def warp_of(stage: s.Geometry, count: int, height: int, width: int, keys: s.Keys | None = None) -> s.Warp:
    """The warp that a stage draws for `count` images of one size."""
    keys = keys if keys is not None else keys_of(count)
    sizes = np.full(count, height), np.full(count, width)
    (move,) = stage.draw(keys.stage(stage.stage_name, 0), *sizes)
    assert isinstance(move, s.Warp)
    return move


def ties_of(matrix: NDArray[np.float64], size: tuple[int, int]) -> NDArray[np.bool_]:
    """Which pixels [H, W] of a result show a point that is next to the edge between two pixels."""
    y, x = np.mgrid[: size[0], : size[1]] + 0.5
    points = np.einsum("ij,jyx->iyx", matrix, np.stack([x, y, np.ones_like(x)]))
    places = points[:2] / points[2]
    return np.asarray((np.abs(places - places.round()) < TIES).any(axis=0))


def apart_from(
    expected: torch.Tensor,
    image: NDArray[np.uint8],
    stage: s.Geometry,
    keys: s.Keys | None = None,
    *,
    special: bool = False,
) -> int:
    """The largest difference between a stage's result of an image [H, W, C] and `expected` [C, H, W], in levels.

    Of nearest pixels, those next to an edge between two are left out; they must be few, unless the warp is special.
    """
    size: Any = tuple(expected.shape[1:])
    (found,) = images(program_of(Decode(), stage, CenterCrop(size=size)), [png(image)], keys)
    apart = (found.to(torch.int16) - expected.to(torch.int16)).abs().amax(dim=0).numpy()
    move = warp_of(stage, 1, image.shape[0], image.shape[1], keys)
    if move.interpolation == "nearest":
        ties = ties_of(move.matrix[0], size)
        assert special or ties.mean() < FEW or ties.size < 20_000
        apart = np.where(ties, 0, apart)
    return int(apart.max())
