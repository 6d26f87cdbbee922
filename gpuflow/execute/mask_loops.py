"""Masks as loops that numba compiles: to the bit what `masks.py` and `mask_maps.py` do with numpy. Needs numba."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpuflow.execute.jit import compiled

__all__ = ["draw_outline", "look_up"]


@compiled
def _turns_of(points: Any, scale: int, height: int, width: int, turns: Any) -> int:
    """See `gpuflow.execute.masks._turns`. Writes to `turns`, and returns how many there are."""
    count, known, u_before, v_before = 0, False, 0, 0
    for i in range(len(points)):
        x, y = points[i, 0], points[i, 1]
        x_end, y_end = points[(i + 1) % len(points), 0], points[(i + 1) % len(points), 1]
        dx, dy = abs(x - x_end), abs(y - y_end)
        flat = dx >= dy
        backwards = x > x_end if flat else y > y_end
        if backwards:
            x, x_end, y, y_end = x_end, x, y_end, y
        length = max(dx, dy)
        slope = 0.0
        if length:
            slope = (y_end - y) / dx if flat else (x_end - x) / dy
        for turn in range(length + 1):
            step = length - turn if backwards else turn
            if flat:
                u, v = x + step, int(y + slope * step + 0.5)
            else:
                u, v = int(x + slope * step + 0.5), y + step
            if known and u != u_before:
                column = ((u if u < u_before else u - 1) + 0.5) / scale - 0.5
                if math.floor(column) == column and 0 <= column <= width - 1:
                    row = math.ceil(min(max((min(v, v_before) + 0.5) / scale - 0.5, 0.0), height))
                    turns[count] = int(column * height + row)
                    count += 1
            known, u_before, v_before = True, u, v
    return count


@compiled
def draw_outline(points: Any, scale: int, value: Any, down: Any) -> None:
    """Set the bits `value` of the pixels inside a closed outline, by the rules of pycocotools' rleFrPoly.

    points: int64 [n, 2], x and y on a grid that is finer than the pixels by `scale`. down: uint8 [width, height].
    """
    width, height = down.shape
    room = 0
    for i in range(len(points)):
        room += abs(points[i, 0] - points[(i + 1) % len(points), 0]) // scale + 2
    turns = np.empty(room, np.int64)
    turns = turns[: _turns_of(points, scale, height, width, turns)]
    turns.sort()
    pixels = down.reshape(-1)
    for i in range(0, len(turns), 2):
        end = turns[i + 1] if i + 1 < len(turns) else pixels.size
        for at in range(turns[i], min(end, pixels.size)):
            pixels[at] |= value


@compiled
def _look_up_line(across: Any, rest: float, shift: Any, first: float, side: float, line: Any) -> None:
    """Write which pixels a row of the result shows, along the axis whose side is `side`, into `line`, float32.

    across, shift: float32. rest: what the row adds. first: of the points, from the center.
    """
    for i in range(len(line)):
        place = np.float32(rest + across * np.float32(first + i)) + shift + np.float32(1)
        line[i] = np.rint(np.float32(place * side - 1.0) * np.float32(0.5))


@compiled
def look_up(
    matrix: Any,
    rounded: Any,
    tie: float,
    tiny: float,
    rows: Any,
    columns: Any,
    shown: Any,
    first: Any,
    places: Any,
) -> None:
    """Write which pixel each pixel of a warp shows, into places [H, W, 2]: its column and its row; -1 outside.

    matrix [3, 3]: maps a point of the result to a point of the image. rounded: its `float32_map`, to take the pixels
    that torchvision takes, or None. tie, tiny: see `gpuflow.execute.warp`.
    rows, columns: the row of each of the image's rows, and the column of each column; negative ones are outside.
    shown: y, x, height and width of the part of the result that is not filled.
    first: the row and the column of the result that places[0, 0] stands for.
    """
    a, b, c, d, e, f = matrix[0, 0], matrix[0, 1], matrix[0, 2], matrix[1, 0], matrix[1, 1], matrix[1, 2]
    g, h, k = matrix[2, 0], matrix[2, 1], matrix[2, 2]
    affine = g == 0 and h == 0 and k == 1
    height, width = float(len(rows)), float(len(columns))
    line_x, line_y = np.empty((2, shown[3]), np.float32)
    begin = shown[1] + 0.5 - width / 2
    places[:] = -1
    for j in range(shown[0], shown[0] + shown[2]):
        y = j + 0.5
        x_rest, y_rest, third_rest = b * y + c, e * y + f, h * y + k
        if rounded is not None:
            middle = y - height / 2
            _look_up_line(rounded[0, 0], rounded[0, 1] * middle, rounded[0, 2], begin, width, line_x)
            _look_up_line(rounded[1, 0], rounded[1, 1] * middle, rounded[1, 2], begin, height, line_y)
        for i in range(shown[1], shown[1] + shown[3]):
            x = i + 0.5
            at_x, at_y = a * x + x_rest, d * x + y_rest
            if rounded is not None:
                at_x, at_y = line_x[i - shown[1]], line_y[i - shown[1]]
            elif not affine:
                third = g * x + third_rest
                if abs(third) < tiny:
                    third = tiny
                at_x, at_y = at_x / third, at_y / third
            column, row = np.floor(at_x + tie), np.floor(at_y + tie)
            if 0 <= row < height and 0 <= column < width:
                to_row, to_column = rows[np.uint32(row)], columns[np.uint32(column)]
                if to_row >= 0 and to_column >= 0:
                    place = places[j - first[0], i - first[1]]
                    place[0], place[1] = to_column, to_row
