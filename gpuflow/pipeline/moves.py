"""The moves that geometry stages return: what happens to the pixels of N samples, and where a point of an image goes.

Coordinates are continuous, (x, y) with (0, 0) at the image's top-left corner: the centre of the pixel in column j and
row i is (j + 0.5, i + 0.5). Arrays have one row per sample: [N].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import numpy as np

from gpuflow.arrays import Bools, Floats, Ints

Matrices = Floats
"""Projective maps of points, [N, 3, 3]."""
MIRRORS = {"reflect": 1, "symmetric": 0}
"""The borders that mirror the image, and how many of its pixels at an edge they leave out. The others are the most that
they can pad on that side."""


@dataclass(frozen=True, slots=True)
class Crop:
    """Keep the box (y, x, height, width), all [N], in pixels. It may extend `margin` pixels outside the image, where
    the result is black. centers [N]: for which samples boxes are dropped whose centre it leaves outside; None for none.
    """

    y: Ints
    x: Ints
    height: Ints
    width: Ints
    margin: int = 0
    centers: Bools | None = None


@dataclass(frozen=True, slots=True)
class Flip:
    """Mirror samples left-right if `horizontal` [N] is set, and top-bottom if `vertical` [N] is set."""

    horizontal: Bools
    vertical: Bools


@dataclass(frozen=True, slots=True)
class Resize:
    """Resample to (height, width), both [N], in pixels. The result is rounded to uint8, as in torchvision."""

    height: Ints
    width: Ints
    interpolation: str
    antialias: bool


@dataclass(frozen=True, slots=True)
class Pad:
    """Add rows and columns, each [N] and >= 0, as torchvision's Pad does.

    border: `constant` gives them the levels `fill`, one for all channels or one for each; `edge` repeats the pixels at
        the edge; `reflect` mirrors the image without repeating those, and `symmetric` repeats them.
    """

    top: Ints
    bottom: Ints
    left: Ints
    right: Ints
    border: str = "constant"
    fill: tuple[float, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Warp:
    """Resample once by a projective map, without antialiasing, and round to uint8.

    matrix: maps a point of the output to the point of the input that is seen there. height, width [N]: of the output.
    interpolation: `nearest` or `bilinear`. border, fill: what is seen outside the input, as in `Pad`.
    as_torchvision: see `Lookup`.
    active [N]: samples that are not active keep their pixels and their size exactly; None if all are active.
    """

    matrix: Matrices
    height: Ints
    width: Ints
    interpolation: str = "bilinear"
    border: str = "constant"
    fill: tuple[float, ...] = (0,)
    as_torchvision: bool = False
    active: Bools | None = None


Move = Crop | Flip | Resize | Pad | Warp


def forward(move: Move, height: Ints, width: Ints) -> tuple[Matrices, Ints, Ints]:
    """Return where a move takes the points of images of these sizes [N].

    Returns:
        the maps [N, 3, 3] from a point of the input to the point of the output, and the output's height and width [N].
        The sign of a point's third coordinate says on which side of a projective map's horizon it is.

    Examples:
        >>> y, x, side, image = np.array([[20], [30], [8], [64]])
        >>> matrix, height, width = forward(Crop(y, x, side, side), image, image)
        >>> (matrix[0] @ (33, 21, 1)).tolist(), height.tolist()  # the point x = 33, y = 21
        ([3.0, 1.0, 1.0], [8])
    """
    matrix = np.broadcast_to(np.eye(3), (len(height), 3, 3)).copy()
    match move:
        case Crop():
            matrix[:, 0, 2], matrix[:, 1, 2] = -move.x, -move.y
            return matrix, move.height, move.width
        case Flip():
            matrix[:, 0, 0], matrix[:, 0, 2] = np.where(move.horizontal, -1, 1), np.where(move.horizontal, width, 0)
            matrix[:, 1, 1], matrix[:, 1, 2] = np.where(move.vertical, -1, 1), np.where(move.vertical, height, 0)
            return matrix, height, width
        case Resize():
            matrix[:, 0, 0], matrix[:, 1, 1] = move.width / width, move.height / height
            return matrix, move.height, move.width
        case Pad():
            matrix[:, 0, 2], matrix[:, 1, 2] = move.left, move.top
            return matrix, height + move.top + move.bottom, width + move.left + move.right
        case Warp():
            active = np.ones(len(height), bool) if move.active is None else move.active
            matrix[active] = np.linalg.inv(move.matrix[active])
            return matrix, np.where(active, move.height, height), np.where(active, move.width, width)
        case _:
            assert_never(move)


_HORIZON = 1e-6
"""The least third coordinate of a mapped point, so that one at a projective map's horizon goes far outside."""


def boxes_around(matrix: Matrices, boxes: Floats) -> Floats:
    """Map each box of [M, 4], x1, y1, x2, y2, by one matrix of [M, 3, 3]. Return the boxes around the results."""
    mapped = map_points(matrix, boxes[:, [[0, 1], [2, 1], [2, 3], [0, 3]]], is_shape=True)
    around: Floats = np.concatenate([mapped.min(axis=1), mapped.max(axis=1)], axis=1)
    return around


def map_points(matrix: Matrices, points: Floats, *, is_shape: bool) -> Floats:
    """Map each row of points [M, K, 2] by one matrix of [M, 3, 3].

    Points behind a projective map's horizon are mapped, too, because a warp also samples the image there.

    is_shape: the K points of a row are the corners of one shape. Corners that the horizon separates from the shape's
        centre go far outside, because the part of the shape towards them does.
    """
    mapped = np.einsum("mij,mkj->mki", matrix[:, :, :2], points) + matrix[:, None, :, 2]
    third = mapped[..., 2:]
    side = np.where((third.mean(axis=1, keepdims=True) if is_shape else third) < 0, -1.0, 1.0)
    result: Floats = side * mapped[..., :2] / np.maximum(side * third, _HORIZON)
    return result
