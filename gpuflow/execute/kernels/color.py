# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# ruff: noqa: SIM102  # Triton compiles the inner one of two nested ifs only if the constant outer one holds
"""Runs the colour operations of a chunk's images, drawn per sample, then looks levels up in a table.

The operations are those of torchvision v2 on uint8 images: each result is clamped and truncated to levels before the
next operation. The arithmetic is that of torch: float32, rounded after every step except for the multiply-adds that
torch's `add(alpha=...)` fuses, so the compiler may not fuse others.

One launch runs all operations of all samples. An operation that needs a statistic of the image, as it is after the
operations that precede it in that sample's order, takes one launch before that for each such operation that a sample
may have, and one more if histograms are among them. So the number of launches depends only on the stages. Contrast
needs the mean luma: luma is summed in integers, so the order of summation does not matter. Autocontrast and equalize
need a histogram of each channel, from which a table of levels is made.

The result equals torchvision on a CPU with fused multiply-add, bit for bit, up to 65,793 pixels per image. Above that,
torch's float32 mean is not exact, and contrast may differ by one level. On a CPU without fused multiply-add, 21 of the
2^24 colours have another luma, so contrast, saturation and grayscale may differ by one level. Later operations scale a
difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from gpuflow.arrays import Array, Ints
from gpuflow.execute.kernels import load_pair
from gpuflow.pipeline.pointwise import Operation, Operations

_BLOCK = 512
_SLICES = 32  # partial sums of an image, a power of two; 2^31 / 255 pixels each is more than any image has
(
    _NONE, _BRIGHTNESS, _CONTRAST, _SATURATION, _HUE, _GRAYSCALE, _TABLE, _MATRIX, _ERASE, _AUTOCONTRAST, _EQUALIZE,
) = map(tl.constexpr, map(int, Operation))  # fmt: skip
_HISTOGRAMS = {Operation.AUTOCONTRAST, Operation.EQUALIZE}
_BIT_GRAYSCALE = tl.constexpr(1 << Operation.GRAYSCALE)
_BIT_TABLE = tl.constexpr(1 << Operation.TABLE)
_BIT_MATRIX = tl.constexpr(1 << Operation.MATRIX)
_BIT_ERASE = tl.constexpr(1 << Operation.ERASE)
_BITS_HISTOGRAMS = tl.constexpr(1 << Operation.AUTOCONTRAST | 1 << Operation.EQUALIZE)
_ALWAYS = {Operation.BRIGHTNESS, Operation.CONTRAST, Operation.SATURATION, Operation.HUE}
"""Operations that every kernel contains; others add their code only to the kernels of stages that may have them."""


@triton.jit
def _luma(r, g, b, CHANNELS: tl.constexpr):
    """Return Rec. 601 luma rounded down to a level."""
    if CHANNELS == 1:
        return r
    return tl.floor(tl.fma(b, 0.114, tl.fma(g, 0.587, r * 0.2989)))


@triton.jit
def _blend(level, share, other, rest):
    """Return share * level + rest * other, clamped and truncated to a level of 0-255."""
    return tl.floor(tl.minimum(tl.maximum(tl.fma(other, rest, level * share), 0.0), 255.0))


@triton.jit
def _hue(r, g, b, shift):
    """Return levels with the hue shifted by `shift` turns of the colour circle; computed in hue, saturation, value."""
    level = tl.maximum(tl.maximum(r, g), b)
    r, g, b = r * (1.0 / 255), g * (1.0 / 255), b * (1.0 / 255)
    high, low = tl.maximum(tl.maximum(r, g), b), tl.minimum(tl.minimum(r, g), b)
    middle = tl.maximum(tl.minimum(r, g), tl.minimum(tl.maximum(r, g), b))
    spread = high - low
    gray = spread == 0.0
    saturation = tl.div_rn(spread, tl.where(gray, 1.0, high))
    # (high - channel) / spread is 0 for the largest and 1 for the smallest channel: one division serves all three.
    part = tl.div_rn(high - middle, tl.where(gray, 1.0, spread))
    from_r = tl.where(r == high, 0.0, tl.where(r == low, 1.0, part))
    from_g = tl.where(g == high, 0.0, tl.where(g == low, 1.0, part))
    from_b = tl.where(b == high, 0.0, tl.where(b == low, 1.0, part))
    sixths = tl.where(r == high, from_b - from_g, tl.where(g == high, from_r + 2.0 - from_b, from_g + 4.0 - from_r))
    hue = sixths * (1.0 / 6) + 1.0
    hue = hue - tl.floor(hue) + shift
    hue = (hue - tl.floor(hue)) * 6.0
    sector = tl.floor(hue)
    slope = saturation * (hue - sector)
    rest = 1.0 - saturation
    p = tl.floor(rest * high * 255.999)
    q = tl.floor((1.0 - slope) * high * 255.999)
    t = tl.floor((slope + rest) * high * 255.999)
    sector = tl.where(sector == 6.0, 0.0, sector)  # a hue just below 0 rounds up to a whole turn
    r = tl.where(sector == 1.0, q, tl.where(sector == 4.0, t, tl.where((sector == 2.0) | (sector == 3.0), p, level)))
    g = tl.where(sector == 0.0, t, tl.where(sector == 3.0, q, tl.where(sector >= 4.0, p, level)))
    b = tl.where(sector <= 1.0, p, tl.where(sector == 2.0, t, tl.where(sector == 5.0, q, level)))
    return r, g, b


@triton.jit
def _row_sum(r, g, b, row):
    """Return the sum of the channels with a colour matrix's row of weights, rounded and clamped to a level."""
    red, green, blue = tl.load(row).to(tl.float32), tl.load(row + 1).to(tl.float32), tl.load(row + 2).to(tl.float32)
    total = tl.fma(b, blue, tl.fma(g, green, r * red)) + (tl.load(row + 3) + 0.5).to(tl.float32)
    return tl.floor(tl.minimum(tl.maximum(total, 0.0), 255.0))


@triton.jit
def _look_up(r, g, b, table):
    """Look each channel's levels up in its own table of uint8 [3, 256]."""
    r = tl.load(table + r.to(tl.int32)).to(tl.float32)
    g = tl.load(table + 256 + g.to(tl.int32)).to(tl.float32)
    b = tl.load(table + 512 + b.to(tl.int32)).to(tl.float32)
    return r, g, b


@triton.jit
def _operate(
    r, g, b, at, n, codes, count, sums, made, tables, values,
    PIXELS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, COUNT: tl.constexpr, STATISTICS: tl.constexpr,
    KINDS: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Run the first `count` operations of sample n on levels held as float32, at these places of the image.

    codes: the sample's codes, which its factors follow. Those are float64, because torchvision computes 1 - factor in
    double. KINDS: a bit for each operation that may occur and is not in `_ALWAYS`.
    """
    seen = 0  # operations that need a statistic
    for k in range(count):
        code, factor = tl.load(codes + k), tl.load(codes + COUNT + k)
        share, rest = factor.to(tl.float32), (1.0 - factor).to(tl.float32)
        if code == _BRIGHTNESS:
            r = tl.floor(tl.minimum(r * share, 255.0))
            g = tl.floor(tl.minimum(g * share, 255.0))
            b = tl.floor(tl.minimum(b * share, 255.0))
        elif code == _CONTRAST:
            total = tl.sum(tl.load(sums + (n * STATISTICS + seen) * SLICES + tl.arange(0, SLICES)).to(tl.int64))
            mean = tl.div_rn(total.to(tl.float32), 1.0 * PIXELS)
            r, g, b = _blend(r, share, mean, rest), _blend(g, share, mean, rest), _blend(b, share, mean, rest)
        elif CHANNELS == 3:
            if code == _SATURATION:
                luma = _luma(r, g, b, CHANNELS)
                r, g, b = _blend(r, share, luma, rest), _blend(g, share, luma, rest), _blend(b, share, luma, rest)
            elif code == _HUE:
                r, g, b = _hue(r, g, b, share)
        if _BIT_GRAYSCALE & KINDS:
            if code == _GRAYSCALE:
                luma = _luma(r, g, b, CHANNELS)
                r, g, b = luma, luma, luma
        if _BIT_TABLE & KINDS:
            if code == _TABLE:
                r, g, b = _look_up(r, g, b, tables + factor.to(tl.int64) * 768)
        if _BIT_MATRIX & KINDS:
            if code == _MATRIX:
                rows = values + factor.to(tl.int64) * 12
                if CHANNELS == 1:
                    g, b = r, r
                r, g, b = _row_sum(r, g, b, rows), _row_sum(r, g, b, rows + 4), _row_sum(r, g, b, rows + 8)
        if _BIT_ERASE & KINDS:
            if code == _ERASE:
                box = values + factor.to(tl.int64) * 12
                top, left = load_pair(box)
                height, width = load_pair(box + 2)
                y, x = at // WIDTH - top, at % WIDTH - left
                erased = (y >= 0) & (y < height) & (x >= 0) & (x < width)
                r = tl.where(erased, tl.load(box + 4).to(tl.float32), r)
                g = tl.where(erased, tl.load(box + 5).to(tl.float32), g)
                b = tl.where(erased, tl.load(box + 6).to(tl.float32), b)
        if _BITS_HISTOGRAMS & KINDS:
            if (code == _AUTOCONTRAST) | (code == _EQUALIZE):
                r, g, b = _look_up(r, g, b, made + (n * STATISTICS + seen) * 768)
        seen += _needs_statistic(code).to(tl.int32)
    return r, g, b


@triton.jit
def _needs_statistic(code):
    return (code == _CONTRAST) | (code == _AUTOCONTRAST) | (code == _EQUALIZE)


@triton.jit
def _operation_of(codes, turn, COUNT: tl.constexpr):
    """Return which of COUNT operations is number `turn` of those that need a statistic, and its code.

    If there are fewer, return COUNT and the code of contrast.
    """
    before, found, wanted = COUNT, 0, _CONTRAST
    for k in range(COUNT):
        code = tl.load(codes + k).to(tl.int32)
        needs = _needs_statistic(code)
        here = needs & (found == turn)
        before = tl.where(here, k, before)
        wanted = tl.where(here, code, wanted)
        found += needs.to(tl.int32)
    return before, wanted


@triton.jit
def _pixels(image, at, inside, CHANNELS: tl.constexpr):
    """Load these pixels as float32 levels, one tensor per channel; three times the same tensor for gray images."""
    r = tl.load(image + at * CHANNELS, inside, 0).to(tl.float32)
    if CHANNELS == 1:
        return r, r, r
    g = tl.load(image + at * CHANNELS + 1, inside, 0).to(tl.float32)
    b = tl.load(image + at * CHANNELS + 2, inside, 0).to(tl.float32)
    return r, g, b


@triton.jit(do_not_specialize=["turn"])
def _measure(
    images, plan, sums, counts, made, tables, values, turn,
    PIXELS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, COUNT: tl.constexpr, STATISTICS: tl.constexpr,
    KINDS: tl.constexpr, HISTOGRAMS: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write partial statistics of the image just before its operation number `turn` of those that need one.

    sums [N, STATISTICS, SLICES]: of luma, for contrast. counts [N, SLICES, 3, 256]: of each channel's levels, for the
    operations that need histograms. Samples with fewer operations get sums of 0.
    """
    part, n = tl.program_id(0) % SLICES, tl.program_id(0) // SLICES
    codes = plan + n * (1 + 2 * COUNT) + 1
    before, wanted = _operation_of(codes, turn, COUNT)
    image = images + n.to(tl.int64) * (PIXELS * CHANNELS)
    total = tl.zeros([BLOCK], tl.int32)
    in_r = tl.zeros([256], tl.int32)
    in_g, in_b = in_r, in_r
    for first in range(part * BLOCK, tl.where(before < COUNT, PIXELS, 0), SLICES * BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < PIXELS
        r, g, b = _pixels(image, at, inside, CHANNELS)
        r, g, b = _operate(
            r, g, b, at, n, codes, before, sums, made, tables, values,
            PIXELS, WIDTH, CHANNELS, COUNT, STATISTICS, KINDS, SLICES,
        )  # fmt: skip
        if HISTOGRAMS:
            if wanted == _CONTRAST:
                total += tl.where(inside, _luma(r, g, b, CHANNELS), 0.0).to(tl.int32)
            else:
                in_r += tl.histogram(r.to(tl.int32), 256, inside)
                if CHANNELS == 3:
                    in_g += tl.histogram(g.to(tl.int32), 256, inside)
                    in_b += tl.histogram(b.to(tl.int32), 256, inside)
        else:
            total += tl.where(inside, _luma(r, g, b, CHANNELS), 0.0).to(tl.int32)
    tl.store(sums + (n * STATISTICS + turn) * SLICES + part, tl.sum(total))
    if HISTOGRAMS:
        if wanted != _CONTRAST:
            target = counts + (n * SLICES + part).to(tl.int64) * 768 + tl.arange(0, 256)
            tl.store(target, in_r)
            if CHANNELS == 3:
                tl.store(target + 256, in_g)
                tl.store(target + 512, in_b)


@triton.jit(do_not_specialize=["turn"])
def _make_table(
    plan, counts, made, turn,
    PIXELS: tl.constexpr, COUNT: tl.constexpr, STATISTICS: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Write one channel's table of levels, of the operation number `turn` of those that need a statistic."""
    n, c = tl.program_id(0), tl.program_id(1)
    codes = plan + n * (1 + 2 * COUNT) + 1
    _, wanted = _operation_of(codes, turn, COUNT)
    if wanted != _CONTRAST:
        level = tl.arange(0, 256)
        begin = counts + n.to(tl.int64) * (SLICES * 768) + c * 256
        parts = begin + tl.arange(0, SLICES)[:, None] * 768 + level[None, :]
        count = tl.sum(tl.load(parts), 0)
        high = tl.max(tl.where(count > 0, level, 0), 0)
        low = tl.min(tl.where(count > 0, level, 255), 0)
        if wanted == _EQUALIZE:
            most = tl.sum(tl.where(level == high, count, 0), 0)
            step = (PIXELS - most) // 255
            below = tl.cumsum(count, 0) - count
            even = (below + step // 2) // tl.maximum(step, 1)
            result = tl.where(step > 0, tl.minimum(even, 255), level)
        else:
            scale = (high - low).to(tl.float32) * (1.0 / 255)
            stretched = tl.div_rn((level - low).to(tl.float32), tl.where(high > low, scale, 1.0))
            stretched = tl.minimum(tl.maximum(stretched, 0.0), 255.0).to(tl.int32)
            result = tl.where(high > low, stretched, level)
        tl.store(made + (n * STATISTICS + turn) * 768 + c * 256 + level, result.to(tl.uint8))


@triton.jit
def _adjust(
    images, plan, sums, made, tables, values, table, out, stride_n, stride_c, stride_y, stride_x,
    PIXELS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, COUNT: tl.constexpr, STATISTICS: tl.constexpr,
    KINDS: tl.constexpr, DENSE: tl.constexpr, IN_PLACE: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    blocks: tl.constexpr = (PIXELS + BLOCK - 1) // BLOCK
    n, at = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = at < PIXELS
    p = plan + n * (1 + 2 * COUNT)
    if IN_PLACE:
        changes = 0
        for k in range(COUNT):
            changes += (tl.load(p + 1 + k) >= 0).to(tl.int32)
        if changes == 0:
            return
    r, g, b = _pixels(images + n.to(tl.int64) * (PIXELS * CHANNELS), at, inside, CHANNELS)
    r, g, b = _operate(
        r, g, b, at, n, p + 1, COUNT, sums, made, tables, values,
        PIXELS, WIDTH, CHANNELS, COUNT, STATISTICS, KINDS, SLICES,
    )  # fmt: skip
    target = out + tl.load(p).to(tl.int64) * stride_n
    target += at * stride_x if DENSE else at // WIDTH * stride_y + at % WIDTH * stride_x
    for c in tl.static_range(CHANNELS):
        level = (r if c == 0 else (g if c == 1 else b)).to(tl.int32)
        tl.store(target + c * stride_c, tl.load(table + c * 256 + level, inside), inside)


def adjust_plan_of(rows: Ints, operations: Operations) -> list[Array]:
    """Encode operations as `adjust` reads them. rows: the row of its result for each image, [N]."""
    plan = np.concatenate([rows[:, None], operations.codes, operations.factors], axis=1, dtype=np.float64)
    return [plan, operations.values, operations.tables]


def adjust(
    images: torch.Tensor, plan: Sequence[torch.Tensor], operations: Operations, table: torch.Tensor, out: torch.Tensor
) -> None:
    """Run the operations on a chunk's images and write them into a batch, in at most 1 + 2 * statistics launches.

    Queues work on the current stream and waits for none.

    Args:
        images: uint8 [N, H, W, C] on the device, contiguous, C = 1 or 3 (red, green, blue).
        plan: the arrays of `adjust_plan_of`, on the device.
        operations: of these images. Without any, only the table is applied.
        table: [C, 256] on the device in the dtype of `out`: the result for each level.
        out: [B, C, H, W] with any strides. Other rows do not change. It may be `images` if each image stays where it
            is and the table changes no level.
    """
    count, height, width, channels = images.shape
    assert images.is_contiguous() and table.dtype == out.dtype
    described, values, tables = plan
    statistics, histograms = operations.statistics, bool(operations.kinds & _HISTOGRAMS)
    slots = max(statistics, 1)
    sums = torch.empty((count, slots, _SLICES), dtype=torch.int32, device=images.device)
    made = torch.empty((count, slots, 3, 256) if histograms else 1, dtype=torch.uint8, device=images.device)
    counts = torch.empty((count, _SLICES, 3, 256) if histograms else 1, dtype=torch.int32, device=images.device)
    size: dict[str, Any] = {
        "PIXELS": height * width, "COUNT": operations.codes.shape[1], "STATISTICS": slots, "SLICES": _SLICES,
        "enable_fp_fusion": False,
    }  # fmt: skip
    kinds = sum(1 << int(kind) for kind in operations.kinds - _ALWAYS)
    shared: dict[str, Any] = {**size, "WIDTH": width, "CHANNELS": channels, "KINDS": kinds, "BLOCK": _BLOCK}
    for turn in range(statistics):
        _measure[_SLICES * count,](
            images, described, sums, counts, made, tables, values, turn, HISTOGRAMS=histograms, **shared
        )
        if histograms:
            _make_table[count, channels](described, counts, made, turn, **size)
    _adjust[-(-height * width // _BLOCK) * count,](
        images, described, sums, made, tables, values, table, out, *out.stride(),
        DENSE=out.stride(2) == width * out.stride(3), IN_PLACE=out.data_ptr() == images.data_ptr(), **shared,
    )  # fmt: skip
