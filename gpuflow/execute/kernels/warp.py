# mypy: disable-error-code="assignment, import-untyped, no-untyped-def, untyped-decorator"
"""Warps a chunk's images by projective maps, then looks each level up in a table, in one kernel launch.

Coordinates are computed in float64, so that a GPU and a CPU choose the same nearest pixel; weights and levels are
float32. What is seen outside an image, and how a constant border is blended, is what `execute/warp.py` says.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from gpuflow.arrays import Array, Ints
from gpuflow.execute.kernels import load_pair
from gpuflow.execute.packing import table_of
from gpuflow.execute.warp import BORDERS, PLACES, TIE, TINY, float32_map
from gpuflow.pipeline.program import Warping
from gpuflow.pipeline.stage import Lookup

FIELDS = (
    "address", "step_y", "step_x",
    "box_y", "box_x", "box_height", "box_width",
    "a", "b", "c", "d", "e", "f", "g", "h", "i",
    "shown_y", "shown_x", "shown_height", "shown_width",
    "offset",
)  # fmt: skip
"""Columns of a chunk's plan, int64 [N, len(FIELDS)]: the device address of the image's upper left pixel and the bytes
from there to the next row's and the next column's, the fields of `pipeline.program.Warping`, of which the matrix is the
bits of float64 numbers, row by row, or of its `float32_map` where pixels are to be torchvision's, and how many elements
after the first one of `out` the result begins."""
ROWS, COLUMNS, WARPS = 4, 32, 4
_TIE, _TINY, _PLACES = tl.constexpr(TIE), tl.constexpr(TINY), tl.constexpr(PLACES)


@triton.jit
def _fold_back(at, length, BORDER: tl.constexpr):
    """Return the places, in units of pixels, inside an image at which those outside are looked up. Border 1 has the
    edge's."""
    tl.static_assert(BORDER <= 3)
    if BORDER == 2:
        period = tl.maximum(2 * (length - 1), 1).to(tl.float64)
        at = at - tl.floor(at / period) * period
        at = tl.minimum(at, period - at)
    if BORDER == 3:
        period = (2 * length).to(tl.float64)
        at = at - tl.floor(at / period) * period
        at = tl.minimum(at, period - 1.0 - at)
    return tl.minimum(tl.maximum(at, 0.0), (length - 1).to(tl.float64))


@triton.jit
def _place(at, length, NEAREST: tl.constexpr, BORDER: tl.constexpr):
    """Return for coordinates along one axis the first pixel, and the weight of the next one."""
    far: tl.constexpr = 2147483648.0
    at = tl.minimum(tl.maximum(at, -far), far)
    at = tl.floor(at + _TIE) if NEAREST else at - 0.5
    if BORDER == 0:  # from one pixel outside on, nothing is seen
        at = tl.minimum(tl.maximum(at, -1.0), length.to(tl.float64))
    if BORDER != 0:
        at = _fold_back(at, length, BORDER)
    if not NEAREST:
        at = tl.floor(at * _PLACES + 0.5) / _PLACES
    first = tl.floor(at)
    return first.to(tl.int32), (at - first).to(tl.float32)


@triton.jit
def _row(p):
    """Load a row of a matrix from its bits."""
    first, second, third = tl.load(p), tl.load(p + 1), tl.load(p + 2)
    return first.to(tl.float64, bitcast=True), second.to(tl.float64, bitcast=True), third.to(tl.float64, bitcast=True)


@triton.jit
def _pixel_as_torchvision(x, y, across, down, shift, side):
    """Return, as `find_as_torchvision` in native/warp.c, the nearest pixel along one axis, whose side is `side`; -1 or
    `side` outside. x, y: from the center, float32. across, down, shift: of a `float32_map`, in float64."""
    place = tl.fma(y, down.to(tl.float32), x * across.to(tl.float32)) + shift.to(tl.float32) + 1.0
    place = tl.fma(place, side.to(tl.float32), -1.0) * 0.5
    place = (place + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23: rounds half to even
    return tl.minimum(tl.maximum(place, -1.0), side.to(tl.float32)).to(tl.int32)


@triton.jit
def _warp(
    plan, table, out, stride_c, stride_y, stride_x, fill_0, fill_1, fill_2,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, FIELD_COUNT: tl.constexpr,
    NEAREST: tl.constexpr, BORDER: tl.constexpr, AS_TORCHVISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of ROWS by COLUMNS of one sample."""
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    tiles: tl.constexpr = (HEIGHT + ROWS - 1) // ROWS * across
    n, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = (tile // across * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tile % across * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < HEIGHT) & (column < WIDTH)
    p = plan + n.to(tl.int64) * FIELD_COUNT
    image = tl.load(p).to(tl.pointer_type(tl.uint8))
    step_y, step_x = tl.load(p + 1), tl.load(p + 2).to(tl.int32)
    image += tl.load(p + 3) * step_y + tl.load(p + 4) * step_x
    box_h, box_w = load_pair(p + 5)
    shown_y, shown_x = load_pair(p + 16)
    shown_h, shown_w = load_pair(p + 18)
    target = out + tl.load(p + 20) + row * stride_y + column * stride_x
    shown = (row >= shown_y) & (row < shown_y + shown_h) & (column >= shown_x) & (column < shown_x + shown_w)

    m = p + 7
    a, b, c = _row(m)
    d, e, f = _row(m + 3)
    if AS_TORCHVISION:
        # A tile's place in the whole result is in `shown`.
        x = (column - shown_x).to(tl.float32) + (0.5 - 0.5 * box_w.to(tl.float32))
        y = (row - shown_y).to(tl.float32) + (0.5 - 0.5 * box_h.to(tl.float32))
        column_0 = _pixel_as_torchvision(x, y, a, b, c, box_w)
        row_0 = _pixel_as_torchvision(x, y, d, e, f, box_h)
        share_x, share_y = 0.0, 0.0
    else:
        x, y = column.to(tl.float64) + 0.5, row.to(tl.float64) + 0.5
        g, h, i = _row(m + 6)
        third = g * x + (h * y + i)
        third = tl.where(tl.abs(third) < _TINY, _TINY, third)
        column_0, share_x = _place((a * x + (b * y + c)) / third, box_w, NEAREST, BORDER)
        row_0, share_y = _place((d * x + (e * y + f)) / third, box_h, NEAREST, BORDER)
    column_1, row_1 = column_0 + 1, row_0 + 1
    left, right = (column_0 >= 0) & (column_0 < box_w), (column_1 >= 0) & (column_1 < box_w)
    top, bottom = (row_0 >= 0) & (row_0 < box_h), (row_1 >= 0) & (row_1 < box_h)
    seen = inside & shown
    line_0, place_0 = image + row_0 * step_y, column_0 * step_x
    line_1, place_1 = line_0 + step_y, place_0 + step_x
    weight_0, weight_1 = (1.0 - share_y) * (1.0 - share_x), (1.0 - share_y) * share_x
    weight_2, weight_3 = share_y * (1.0 - share_x), share_y * share_x
    mask = (tl.where(left, 1.0 - share_x, 0.0) + tl.where(right, share_x, 0.0)) * (
        tl.where(top, 1.0 - share_y, 0.0) + tl.where(bottom, share_y, 0.0)
    )
    for c in tl.static_range(CHANNELS):
        fill = (fill_0, fill_1, fill_2)[c]
        value = tl.load(line_0 + place_0 + c, seen & top & left, 0).to(tl.float32)
        if NEAREST:
            if BORDER == 0:
                value = tl.where(top & left, value, fill)
        else:
            value *= weight_0
            value += weight_1 * tl.load(line_0 + place_1 + c, seen & top & right, 0).to(tl.float32)
            value += weight_2 * tl.load(line_1 + place_0 + c, seen & bottom & left, 0).to(tl.float32)
            value += weight_3 * tl.load(line_1 + place_1 + c, seen & bottom & right, 0).to(tl.float32)
            if BORDER == 0:
                value = tl.where(mask < 1.0, mask * (value - fill) + fill, value)
            value = (value + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23: rounds half to even
        level = tl.where(seen, value, 0.0).to(tl.int32)
        tl.store(target + c * stride_c, tl.load(table + c * 256 + level), inside)


def warp_all(plan: torch.Tensor, table: torch.Tensor, out: torch.Tensor, *, lookup: Lookup) -> None:
    """Fill a chunk's slots: see `sample`.

    Args:
        plan: int64 [N, len(FIELDS)] on the device. Images are uint8, interleaved, C channels, and none of their rows
            is longer than `ROW_BYTES`.
        table: [C, 256] on the device in the dtype of `out`: the result for each level.
        out: [B, C, H, W] with any strides; every sample's result is H by W.
    """
    _, channels, height, width = out.shape
    fill = [float(level) for level in (lookup.fill * 3 if len(lookup.fill) == 1 else lookup.fill)]
    _warp[-(-height // ROWS) * -(-width // COLUMNS) * len(plan),](
        plan, table, out, *out.stride()[1:], *fill,
        HEIGHT=height, WIDTH=width, CHANNELS=channels, FIELD_COUNT=len(FIELDS),
        NEAREST=lookup.interpolation == "nearest", BORDER=BORDERS[lookup.border],
        AS_TORCHVISION=lookup.as_torchvision,
        ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS, enable_fp_fusion=True,
    )  # fmt: skip


def warp_plan_of(warping: Warping, places: Ints, offsets: Array | int) -> Ints:
    """Encode a warp as the kernel reads it: int64 [n, len(FIELDS)]. places [n, 3]: its first three columns."""
    matrix = np.array(warping.matrix, np.float64, order="C")
    if warping.lookup.as_torchvision:
        matrix[:, :2] = float32_map(matrix, *warping.box[:, 2:].T)
    plan = table_of(len(places), [places, warping.box, matrix.reshape(-1, 9).view(np.int64), warping.shown, offsets])
    assert plan.shape[1] == len(FIELDS)
    return plan
