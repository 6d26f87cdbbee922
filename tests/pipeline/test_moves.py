"""forward: where each move takes points, and the size of its result."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from gpuflow.pipeline.moves import Crop, Flip, Move, Pad, Resize, Warp, forward

HEIGHT, WIDTH = np.array([10, 20]), np.array([30, 40])


def ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def bools(*values: bool) -> NDArray[np.bool_]:
    return np.array(values)


TURN = np.array([[0.0, 1.0, 0.0], [-1.0, 0.0, 10.0], [0.0, 0.0, 1.0]])
"""A quarter turn: the output point (x, y) shows the input point (y, 10 - x)."""
FAR = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.01, 0.0, 1.0]])


@pytest.mark.parametrize(
    ("move", "points", "sizes"),
    [
        (Crop(ints(1, 2), ints(3, 4), ints(5, 6), ints(7, 8)), [(2, 7), (1, 6)], [(5, 7), (6, 8)]),
        (Flip(bools(True, False), bools(False, True)), [(25, 8), (5, 12)], [(10, 30), (20, 40)]),
        (Resize(ints(5, 40), ints(60, 20), "nearest", True), [(10, 4), (2.5, 16)], [(5, 60), (40, 20)]),
        (Pad(ints(1, 2), ints(3, 4), ints(5, 6), ints(7, 8)), [(10, 9), (11, 10)], [(14, 42), (26, 54)]),
        (Warp(np.stack([TURN, FAR]), ints(30, 20), ints(10, 40)), [(2, 5), (5 / 0.95, 8 / 0.95)], [(30, 10), (20, 40)]),
        (
            Warp(np.stack([TURN, np.zeros((3, 3))]), ints(30, 9), ints(10, 9), active=bools(True, False)),
            [(2, 5), (5, 8)],
            [(30, 10), (20, 40)],
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_forward(move: Move, points: list[tuple[float, float]], sizes: list[tuple[int, int]]) -> None:
    matrix, height, width = forward(move, HEIGHT, WIDTH)
    assert matrix.shape == (2, 3, 3) and matrix.dtype == np.float64
    moved = matrix @ np.array([5.0, 8.0, 1.0])
    assert np.allclose(moved[:, :2] / moved[:, 2:], points)
    assert (moved[:, 2] > 0).all()
    assert list(zip(height.tolist(), width.tolist(), strict=True)) == sizes
