# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# ruff: noqa: SIM102  # Triton compiles the inner one of two nested ifs only if the constant outer one holds
"""Filters a chunk's images with weights drawn per sample, then looks levels up in a table, in two launches.

The first launch sums each row of pixels with the weights of the columns, in float32, and the second one sums those sums
with the weights of the rows, rounds, and blends the result with the image. The order of summation is not that of the
CPU, and weights that are too small to change a sum are left out, so that a smoothed level may differ by one where the
exact sum lies close to a half.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from gpuflow.arrays import Floats, Ints
from gpuflow.pipeline.pointwise import Filters

_BLOCK = 512
_HEAD = 8
"""The count of a sample's numbers before its weights: row of the result, whether the sample is changed, centre, factor;
the range of the rows' weights that are summed (first, and after the last), then that of the columns' weights."""
_FEW = 3
"""Up to this many weights are all summed, because a search for the small ones would cost more than it saves."""
_LEAST = 2.0**-27
"""A weight that is smaller than this part of the largest one changes no sum of levels: float32 has 24 bits."""


@triton.jit
def _mirrored(place, LENGTH: tl.constexpr, REACH: tl.constexpr):
    """Return the place inside the image that shows what is at a place up to REACH outside it, mirrored as often as
    needed."""
    period: tl.constexpr = 2 * LENGTH - 2 if LENGTH > 1 else 1
    place = tl.abs(place)
    if REACH >= LENGTH:
        place = place % period
    return tl.minimum(place, tl.abs(period - place)) if LENGTH > 1 else place * 0


@triton.jit
def _sum_columns(
    images, plan, sums,
    PIXELS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    HEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write `sums` [N, C, H, W] of each row's pixels; nothing for samples that are not changed."""
    blocks: tl.constexpr = (PIXELS + BLOCK - 1) // BLOCK
    n, c = tl.program_id(0) // blocks, tl.program_id(1)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    p = plan + n * (HEAD + ROWS + COLUMNS)
    if tl.load(p + 1) > 0:
        inside = at < PIXELS
        y, x = at // WIDTH, at % WIDTH
        row = images + n.to(tl.int64) * (PIXELS * CHANNELS) + y * (WIDTH * CHANNELS) + c
        total = tl.zeros([BLOCK], tl.float32)
        for k in range(tl.load(p + 6).to(tl.int32), tl.load(p + 7).to(tl.int32)):
            weight = tl.load(p + HEAD + ROWS + k).to(tl.float32)
            level = tl.load(row + _mirrored(x + (k - COLUMNS // 2), WIDTH, COLUMNS // 2) * CHANNELS, inside, 0).to(
                tl.float32
            )
            total = tl.fma(level, weight, total)
        tl.store(sums + (n * CHANNELS + c).to(tl.int64) * PIXELS + at, total, inside)


@triton.jit
def _sum_rows(
    images, plan, sums, table, out, stride_n, stride_c, stride_y, stride_x,
    PIXELS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KEEP: tl.constexpr, IN_PLACE: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    HEIGHT: tl.constexpr = PIXELS // WIDTH
    blocks: tl.constexpr = (PIXELS + BLOCK - 1) // BLOCK
    n, c = tl.program_id(0) // blocks, tl.program_id(1)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    p = plan + n * (HEAD + ROWS + COLUMNS)
    if IN_PLACE:
        if tl.load(p + 1) == 0:
            return
    inside = at < PIXELS
    y, x = at // WIDTH, at % WIDTH
    level = tl.load(images + n.to(tl.int64) * (PIXELS * CHANNELS) + at * CHANNELS + c, inside, 0).to(tl.float32)
    if tl.load(p + 1) > 0:
        plane = sums + (n * CHANNELS + c).to(tl.int64) * PIXELS + x
        total = level * tl.load(p + 2).to(tl.float32)
        for k in range(tl.load(p + 4).to(tl.int32), tl.load(p + 5).to(tl.int32)):
            weight = tl.load(p + HEAD + k).to(tl.float32)
            part = tl.load(plane + _mirrored(y + (k - ROWS // 2), HEIGHT, ROWS // 2) * WIDTH, inside, 0.0)
            total = tl.fma(part, weight, total)
        total = (total + 12582912.0) - 12582912.0  # to the nearest whole number, a half to the even one
        share = (1.0 - tl.load(p + 3)).to(tl.float32)
        result = tl.floor(tl.minimum(tl.maximum(tl.fma(total - level, share, level), 0.0), 255.0))
        if KEEP:
            near_y = (y < ROWS // 2) | (y >= HEIGHT - ROWS // 2)
            near_x = (x < COLUMNS // 2) | (x >= WIDTH - COLUMNS // 2)
            result = tl.where(near_y | near_x, level, result)
        level = result
    target = out + tl.load(p).to(tl.int64) * stride_n + c * stride_c + y * stride_y + x * stride_x
    tl.store(target, tl.load(table + c * 256 + level.to(tl.int32), inside), inside)


def smooth_plan_of(rows: Ints, filters: Filters) -> Floats:
    """Encode filters as `smooth` reads them. rows: the row of its result for each image, [N]."""
    head = (rows, filters.active, filters.centre, filters.factor)
    of_rows = _counting(filters.rows)
    of_columns = of_rows if filters.columns is filters.rows else _counting(filters.columns)
    parts = [*of_rows, *of_columns, filters.rows, filters.columns]
    plan: Floats = np.concatenate([*(x[:, None] for x in head), *parts], axis=1, dtype=np.float64)
    return plan


def smooth(images: torch.Tensor, plan: torch.Tensor, filters: Filters, table: torch.Tensor, out: torch.Tensor) -> None:
    """Filter a chunk's images and write them into a batch. Queues work on the current stream and waits for none.

    Args:
        images: uint8 [N, H, W, C] on the device, contiguous.
        plan: the array of `smooth_plan_of`, on the device.
        table: [C, 256] on the device in the dtype of `out`: the result for each level.
        out: [B, C, H, W] with any strides. Other rows do not change. It may be `images` if each image stays where it
            is and the table changes no level.
    """
    count, height, width, channels = images.shape
    assert images.is_contiguous() and table.dtype == out.dtype
    sums = torch.empty((count, channels, height, width), dtype=torch.float32, device=images.device)
    shared: dict[str, Any] = {
        "PIXELS": height * width, "WIDTH": width, "CHANNELS": channels, "ROWS": filters.rows.shape[1],
        "COLUMNS": filters.columns.shape[1], "HEAD": _HEAD, "BLOCK": _BLOCK, "enable_fp_fusion": False,
    }  # fmt: skip
    grid = -(-height * width // _BLOCK) * count, channels
    _sum_columns[grid](images, plan, sums, **shared)
    in_place = out.data_ptr() == images.data_ptr()
    keep = filters.border == "keep"
    _sum_rows[grid](images, plan, sums, table, out, *out.stride(), KEEP=keep, IN_PLACE=in_place, **shared)


def _counting(weights: Floats) -> tuple[Ints, Ints]:
    """Return for weights [N, K] the number of each sample's first weight that is large enough to change a sum, and the
    number after its last such weight, [N, 1] each. There is at least one."""
    first, after = np.zeros((len(weights), 1), np.int64), np.full((len(weights), 1), weights.shape[1])
    if weights.shape[1] <= _FEW:
        return first, after
    sizes = np.abs(np.ascontiguousarray(weights.T))  # numpy takes long for the largest of each of many short rows
    counts = sizes >= sizes.max(axis=0) * _LEAST
    if not counts.all():
        first[:, 0] = counts.argmax(axis=0)
        after[:, 0] -= counts[::-1].argmax(axis=0)
    return first, after
