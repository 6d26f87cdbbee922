# mypy: disable-error-code="assignment, import-untyped, no-untyped-def, untyped-decorator"
"""Crops, resamples and flips a chunk's decoded images, then looks each level up in a table, in one kernel launch.

The kernel follows torch's antialiased interpolation (aten/native/UpSample.h): centres at (i + 0.5) * scale, a triangle
or cubic filter that widens with the scale when the image shrinks, weights normalized over the taps inside the box. Rows
are resampled first and rounded to levels of 0-255, then columns, as torch does on uint8 images. Each resulting level is
looked up in a table of 256 results per channel, so `normalize` costs one load and equals the CPU's bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpuflow.arrays import Array, Ints
from gpuflow.execute.kernels import load_pair
from gpuflow.execute.packing import table_of
from gpuflow.pipeline.program import Resampling

ROWS, COLUMNS, WARPS = 4, 32, 1
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
from there to the next row's and the next column's, the fields of `Resampling`, and how many elements
after the first one of the kernel's result the image's begins."""
_KINDS = {"nearest": 0, "bilinear": 1, "bicubic": 2}


@triton.jit
def _filter(distance, KIND: tl.constexpr, ANTIALIAS: tl.constexpr):
    """Return the filter's value at a distance in units of its scale: triangle, or Keys's cubic, a = -0.5 (antialiased)
    or -0.75."""
    x = tl.abs(distance)
    if KIND == 1:
        return tl.maximum(1.0 - x, 0.0)
    a = -0.5 if ANTIALIAS else -0.75
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return tl.where(x < 1.0, near, tl.where(x < 2.0, far, 0.0))


@triton.jit
def _axis(at, box, grid, KIND: tl.constexpr, ANTIALIAS: tl.constexpr):
    """Return for positions `at` of the grid along one axis: centre in the box, 1 / filter width, first tap, number of
    taps."""
    scale = box.to(tl.float32) / grid
    wide = tl.maximum(scale, 1.0) if ANTIALIAS else scale * 0.0 + 1.0
    center = (at.to(tl.float32) + 0.5) * scale
    first = tl.floor(center - wide * KIND + 0.5).to(tl.int32)
    return center, 1.0 / wide, first, tl.ceil(2.0 * wide * KIND).to(tl.int32)


@triton.jit
def _weight(tap, center, inverse, box, KIND: tl.constexpr, ANTIALIAS: tl.constexpr):
    """Return a tap's weight. If antialiased, taps outside the box weigh 0; otherwise they repeat the pixel at the
    edge."""
    weight = _filter((tap + 0.5 - center) * inverse, KIND, ANTIALIAS)
    return tl.where((tap >= 0) & (tap < box), weight, 0.0) if ANTIALIAS else weight


@triton.jit
def _float(level):
    """Convert uint8 to float32 by its bits: a GPU converts integers at an eighth of the rate at which it adds."""
    return (level.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0  # 2 ** 23


@triton.jit
def _level(value, KIND: tl.constexpr):
    """Round to a level of 0-255, as a float. Only cubic weights can give values outside, since some are negative."""
    level = tl.floor(value + 0.5)
    return tl.minimum(tl.maximum(level, 0.0), 255.0) if KIND == 2 else level


@triton.jit
def _resample(
    plan, table, out, stride_c, stride_y, stride_x, fill_0, fill_1, fill_2,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, FIELD_COUNT: tl.constexpr,
    KIND: tl.constexpr, ANTIALIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Compute a tile of ROWS by COLUMNS of one sample: resample each line of the box, then add it to the rows it
    affects."""
    across: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    tiles: tl.constexpr = (HEIGHT + ROWS - 1) // ROWS * across
    n, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = tile // across * ROWS + tl.arange(0, ROWS)
    column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < HEIGHT)[:, None] & (column < WIDTH)[None, :]
    p = plan + n.to(tl.int64) * FIELD_COUNT
    image = tl.load(p).to(tl.pointer_type(tl.uint8))
    step_y, step_x = tl.load(p + 1), tl.load(p + 2).to(tl.int32)
    box_y, box_x = load_pair(p + 3)
    box_h, box_w = load_pair(p + 5)
    grid_h, grid_w = load_pair(p + 9)
    shown_y, shown_x = load_pair(p + 11)
    shown_h, shown_w = load_pair(p + 13)
    offset = tl.load(p + 21)
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    target = out + offset + row[:, None] * stride_y + column[None, :] * stride_x

    gy = tl.where(tl.load(p + 19) > 0, HEIGHT - 1 - row, row) + tl.load(p + 15).to(tl.int32)
    gx = tl.where(tl.load(p + 20) > 0, WIDTH - 1 - column, column) + tl.load(p + 16).to(tl.int32)
    seen_y, seen_x = (gy >= shown_y) & (gy < shown_y + shown_h), (gx >= shown_x) & (gx < shown_x + shown_w)
    seen = inside & seen_y[:, None] & seen_x[None, :]

    if KIND == 0:
        y = tl.minimum((gy.to(tl.float32) * (box_h.to(tl.float32) / grid_h)).to(tl.int32), box_h - 1)
        x = tl.minimum((gx.to(tl.float32) * (box_w.to(tl.float32) / grid_w)).to(tl.int32), box_w - 1)
        y = tl.where(tl.load(p + 7) > 0, box_h - 1 - y, y) + box_y
        x = tl.where(tl.load(p + 8) > 0, box_w - 1 - x, x) + box_x
        nearest = image + y[:, None] * step_y + x[None, :] * step_x
        for c in tl.static_range(CHANNELS):
            fill = (fill_0, fill_1, fill_2)[c]
            level = tl.where(seen, tl.load(nearest + c, seen, 0).to(tl.float32), fill).to(tl.int32)
            tl.store(target + c * stride_c, tl.load(table + c * 256 + level), inside)
        return

    gy = tl.minimum(tl.maximum(gy, 0), grid_h - 1)
    gx = tl.minimum(tl.maximum(gx, 0), grid_w - 1)
    center_y, inverse_y, first_y, taps_y = _axis(gy, box_h, grid_h, KIND, ANTIALIAS)
    center_x, inverse_x, first_x, taps_x = _axis(gx, box_w, grid_w, KIND, ANTIALIAS)
    total_x = tl.zeros([COLUMNS], tl.float32)
    KEPT: tl.constexpr = 4 * KIND  # the taps of an image that shrinks to half its size
    weights, places = (), ()  # of the first KEPT taps, the same for all lines
    for i in tl.static_range(KEPT):
        weight_x = _weight(first_x + i, center_x, inverse_x, box_w, KIND, ANTIALIAS)
        weights += (tl.where(i < taps_x, weight_x, 0.0),)
        places += (tl.minimum(tl.maximum(first_x + i, 0), box_w - 1) * step_x,)
        total_x += weights[i]
    for i in range(KEPT, taps_x):
        total_x += _weight(first_x + i, center_x, inverse_x, box_w, KIND, ANTIALIAS)
    share_x = 1.0 / total_x
    red = tl.zeros([ROWS, COLUMNS], tl.float32)
    green, blue = red, red
    total_y = tl.zeros([ROWS], tl.float32)
    image += box_y * step_y + box_x * step_x
    top, bottom = tl.min(first_y, 0), tl.max(first_y, 0) + taps_y
    if ANTIALIAS:  # lines beyond the box weigh nothing
        top, bottom = tl.maximum(top, 0), tl.minimum(bottom, box_h)
    for y in range(top, bottom):
        line = image + tl.minimum(tl.maximum(y, 0), box_h - 1) * step_y
        red_x = tl.zeros([COLUMNS], tl.float32)
        green_x, blue_x = red_x, red_x
        for i in tl.static_range(KEPT):
            pixel = line + places[i]
            red_x += weights[i] * _float(tl.load(pixel))
            if CHANNELS == 3:
                green_x += weights[i] * _float(tl.load(pixel + 1))
                blue_x += weights[i] * _float(tl.load(pixel + 2))
        for i in range(KEPT, taps_x):
            x = first_x + i
            weight_x = _weight(x, center_x, inverse_x, box_w, KIND, ANTIALIAS)
            pixel = line + tl.minimum(tl.maximum(x, 0), box_w - 1) * step_x
            red_x += weight_x * _float(tl.load(pixel))
            if CHANNELS == 3:
                green_x += weight_x * _float(tl.load(pixel + 1))
                blue_x += weight_x * _float(tl.load(pixel + 2))
        weight = _filter((y + 0.5 - center_y) * inverse_y, KIND, ANTIALIAS)
        if not ANTIALIAS:
            weight = tl.where((y >= first_y) & (y < first_y + taps_y), weight, 0.0)
        total_y += weight
        red += weight[:, None] * _level(red_x * share_x, KIND)[None, :]
        if CHANNELS == 3:
            green += weight[:, None] * _level(green_x * share_x, KIND)[None, :]
            blue += weight[:, None] * _level(blue_x * share_x, KIND)[None, :]
    share_y = (1.0 / total_y)[:, None]
    for c in tl.static_range(CHANNELS):
        total, fill = (red, green, blue)[c], (fill_0, fill_1, fill_2)[c]
        level = tl.where(seen, _level(total * share_y, KIND), fill).to(tl.int32)
        tl.store(target + c * stride_c, tl.load(table + c * 256 + level), inside)


def resample_all(
    plan: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    *,
    interpolation: str,
    antialias: bool,
    fill: tuple[float, ...] = (0,),
) -> None:
    """Fill a chunk's slots.

    Args:
        plan: int64 [N, len(FIELDS)] on the device. Images are uint8, interleaved, C channels, and none of their rows
            is longer than `ROW_BYTES`.
        table: [C, 256] on the device in the dtype of `out`: the result for each level.
        out: [B, C, H, W] with any strides; every sample's window is H by W. Only the memory at the offsets of the plan
            changes, which may be that of another tensor with the same strides.
        fill: the levels outside the images, one for all channels or one for each.
    """
    _, channels, height, width = out.shape
    fills = [float(level) for level in (fill * 3 if len(fill) == 1 else fill)]
    _resample[-(-height // ROWS) * -(-width // COLUMNS) * len(plan),](
        plan, table, out, *out.stride()[1:], *fills,
        HEIGHT=height, WIDTH=width, CHANNELS=channels, FIELD_COUNT=len(FIELDS),
        KIND=_KINDS[interpolation], ANTIALIAS=antialias,
        ROWS=ROWS, COLUMNS=COLUMNS, ALIGNED=out.stride(0) % 16 == 0, num_warps=WARPS, enable_fp_fusion=True,
    )  # fmt: skip


def resampling_plan_of(resampling: Resampling, places: Ints, offsets: Array | int) -> Ints:
    """Encode a resampling as the kernel reads it: int64 [n, len(FIELDS)].

    places [n, 3]: the first three columns. offsets [n]: the last one, or one number for all.
    """
    drawn = resampling.box, resampling.mirrors, resampling.grid, resampling.shown, resampling.window, resampling.flips
    plan = table_of(len(places), [places, *drawn, offsets])
    assert plan.shape[1] == len(FIELDS)
    return plan
