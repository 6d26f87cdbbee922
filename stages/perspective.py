"""perspective: moves the four corners of an image inwards at random. The image keeps its size."""

from __future__ import annotations

from itertools import combinations
from typing import Annotated, Any

import numpy as np

from gpuflow.arrays import Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Border, Fill, Probability, WarpingStage, WarpInterpolation

_LARGEST = 1e12
"""The last number of a map is 1. In one with a larger number than this it is 0 but for rounding."""


@s.stage_class
class Perspective(WarpingStage):
    """Move the corners of an image inwards at random, as torchvision's RandomPerspective does.

    An image of which three corners come to lie on one line stays as it is, and so does one whose upper left pixel would
    be infinitely far away.

    Args:
        distortion_scale: how far each corner moves at most, as a fraction of half the width and half the height.
        probability: the probability of moving the corners.
        interpolation: how pixels are resampled, without antialiasing.
        border: what is seen outside the image: `constant` levels, the pixel at the `edge`, or the image again, as in a
            mirror: `reflect` without the pixel at the edge, `symmetric` with it.
        fill: the level of a constant border, or [red, green, blue].
    """

    stage_name = "perspective"
    other_names = ("RandomPerspective",)

    distortion_scale: Annotated[float, s.Bounds(least=0, most=1)] = 0.5
    probability: Probability = 0.5
    interpolation: WarpInterpolation = "bilinear"
    border: Border = "constant"
    fill: Fill = 0

    @classmethod
    def examples(cls) -> tuple[Perspective, ...]:
        return (
            cls(),
            cls(distortion_scale=0.0),
            cls(distortion_scale=0.9, probability=1.0, fill=114),
            cls(probability=0.8, border="reflect", interpolation="nearest"),
        )

    @property
    def random(self) -> bool:
        return self.probability > 0 and self.distortion_scale > 0

    def other_parameters(self) -> dict[str, Any]:
        return {"distortion_scale": self.distortion_scale, "p": self.probability}

    def draw(self, keys: s.StageKeys, height: Ints, width: Ints) -> tuple[s.Move, ...]:
        numbers = keys.uniform(9)
        sides = np.stack([width, height], axis=1)
        bounds = (self.distortion_scale * (sides // 2)).astype(np.int64) + 1
        inwards = (numbers[:, 1:].reshape(-1, 4, 2) * bounds[:, None]).astype(np.int64)
        far = np.array([[0, 0], [1, 0], [1, 1], [0, 1]], bool)
        start = np.where(far, sides[:, None] - 1, 0)
        end = np.where(far, (sides - bounds)[:, None] + inwards, inwards)
        flat = (sides < 2).any(axis=1)
        for a, b, c in combinations(np.moveaxis(end, 1, 0), 3):
            (x, y), (z, w) = (b - a).T, (c - a).T
            flat |= x * w == y * z
        active = (numbers[:, 0] < self.probability) & ~flat & (start != end).any(axis=(1, 2))
        matrix = np.broadcast_to(np.eye(3), (len(height), 3, 3)).copy()
        found = _map_of_corners(end[active], start[active])
        is_map = np.abs(found).max(axis=(1, 2), initial=0) < _LARGEST
        active[active] = is_map
        matrix[active] = found[is_map]
        return (s.Warp(matrix, height, width, *self.warps, active=active),)


def _map_of_corners(start: Ints, end: Ints) -> s.Matrices:
    """Return the projective maps [N, 3, 3] of four points to four others, each [N, 4, 2], whose last number is 1.

    Where no map has that, the other numbers are infinite, or very large by rounding.
    """
    (x, y), one = np.moveaxis(start, 2, 0).astype(np.float64), np.ones((len(start), 4))
    none, rows = np.zeros_like(one), []
    for axis, at in enumerate(np.moveaxis(end, 2, 0)):
        linear = (x, y, one, none, none, none) if axis == 0 else (none, none, none, x, y, one)
        rows.append(np.stack([*linear, -at * x, -at * y], axis=2))
    wanted = np.concatenate([end[:, :, 0], end[:, :, 1]], axis=1).astype(np.float64)
    systems = np.concatenate(rows, axis=1)
    solvable = np.linalg.det(systems) != 0
    found = np.full((len(start), 8), np.inf)
    found[solvable] = np.linalg.solve(systems[solvable], wanted[solvable, :, None])[:, :, 0]
    matrix: s.Matrices = np.concatenate([found, one[:, :1]], axis=1).reshape(-1, 3, 3)
    return matrix
