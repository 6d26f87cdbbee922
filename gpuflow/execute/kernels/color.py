# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Adjusts colours of a chunk's images by factors drawn per sample, then looks levels up in a table, in two launches.

The operations are those of torchvision v2 on uint8 images: each result is clamped and truncated to levels before the
next operation. The arithmetic is that of torch: float32, rounded after every step except for the multiply-adds that
torch's `add(alpha=...)` fuses, so the compiler may not fuse others. Contrast blends with the mean luma of the image
after the operations that precede it in that sample's order: one kernel sums luma in integers, so the order of summation
does not matter, and the other kernel does all the rest.

The result equals torchvision on a CPU with fused multiply-add, bit for bit, up to 65,793 pixels per image. Above that,
torch's float32 mean is not exact, and contrast may differ by one level. On a CPU without fused multiply-add, 21 of the
2^24 colours have another luma, so contrast and saturation may differ by one level. Later operations scale a difference.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from gpuflow.pipeline.stage import Operation

__all__ = ["adjust", "adjust_reference"]

_BLOCK = 512
_SLICES = 32  # partial sums of an image, a power of two; 2^31 / 255 pixels each is more than any image has
_BRIGHTNESS = tl.constexpr(int(Operation.BRIGHTNESS))
_CONTRAST = tl.constexpr(int(Operation.CONTRAST))
_SATURATION = tl.constexpr(int(Operation.SATURATION))
_HUE = tl.constexpr(int(Operation.HUE))


@triton.jit
def _luma(r, g, b, CHANNELS: tl.constexpr):
    """Rec. 601 luma rounded down to a level."""
    if CHANNELS == 1:
        return r
    return tl.floor(tl.fma(b, 0.114, tl.fma(g, 0.587, r * 0.2989)))


@triton.jit
def _blend(level, share, other, rest):
    """share * level + rest * other, clamped and truncated to a level of 0-255."""
    return tl.floor(tl.minimum(tl.maximum(tl.fma(other, rest, level * share), 0.0), 255.0))


@triton.jit
def _hue(r, g, b, shift):
    """Levels with the hue shifted by `shift` turns of the colour circle; computed in hue, saturation, value."""
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
def _operate(r, g, b, code, factor, mean, CHANNELS: tl.constexpr):
    """One operation on levels held as float32. factor: float64, because torchvision computes 1 - factor in double."""
    share, rest = factor.to(tl.float32), (1.0 - factor).to(tl.float32)
    if code == _BRIGHTNESS:
        r = tl.floor(tl.minimum(r * share, 255.0))
        g = tl.floor(tl.minimum(g * share, 255.0))
        b = tl.floor(tl.minimum(b * share, 255.0))
    elif code == _CONTRAST:
        r, g, b = _blend(r, share, mean, rest), _blend(g, share, mean, rest), _blend(b, share, mean, rest)
    elif CHANNELS == 3:
        if code == _SATURATION:
            luma = _luma(r, g, b, CHANNELS)
            r, g, b = _blend(r, share, luma, rest), _blend(g, share, luma, rest), _blend(b, share, luma, rest)
        elif code == _HUE:
            r, g, b = _hue(r, g, b, share)
    return r, g, b


@triton.jit
def _pixels(image, at, inside, CHANNELS: tl.constexpr):
    """Load these pixels as float32 levels, one tensor per channel; three times the same tensor for gray images."""
    r = tl.load(image + at * CHANNELS, inside, 0).to(tl.float32)
    if CHANNELS == 1:
        return r, r, r
    g = tl.load(image + at * CHANNELS + 1, inside, 0).to(tl.float32)
    b = tl.load(image + at * CHANNELS + 2, inside, 0).to(tl.float32)
    return r, g, b


@triton.jit
def _sum_luma(
    images, plan, sums,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, COUNT: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Partial sums of luma over the image just before its contrast operation; 0 for samples without contrast."""
    part, n = tl.program_id(0), tl.program_id(1)
    codes = plan + n * (1 + 2 * COUNT) + 1
    before = COUNT
    for k in range(COUNT):
        before = tl.where(tl.load(codes + k) == _CONTRAST, k, before)
    image = images + n.to(tl.int64) * (PIXELS * CHANNELS)
    total = tl.zeros([BLOCK], tl.int32)
    for first in range(part * BLOCK, tl.where(before < COUNT, PIXELS, 0), SLICES * BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < PIXELS
        r, g, b = _pixels(image, at, inside, CHANNELS)
        for k in range(before):
            r, g, b = _operate(r, g, b, tl.load(codes + k), tl.load(codes + COUNT + k), 0.0, CHANNELS)
        total += tl.where(inside, _luma(r, g, b, CHANNELS), 0.0).to(tl.int32)
    tl.store(sums + n * SLICES + part, tl.sum(total))


@triton.jit
def _adjust(
    images, plan, sums, table, out, stride_n, stride_c, stride_y, stride_x,
    PIXELS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, COUNT: tl.constexpr, DENSE: tl.constexpr,
    SLICES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at, n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    inside = at < PIXELS
    p = plan + n * (1 + 2 * COUNT)
    r, g, b = _pixels(images + n.to(tl.int64) * (PIXELS * CHANNELS), at, inside, CHANNELS)
    for k in range(COUNT):
        code = tl.load(p + 1 + k)
        mean = 0.0
        if code == _CONTRAST:
            total = tl.sum(tl.load(sums + n * SLICES + tl.arange(0, SLICES)).to(tl.int64))
            mean = tl.div_rn(total.to(tl.float32), 1.0 * PIXELS)
        r, g, b = _operate(r, g, b, code, tl.load(p + 1 + COUNT + k), mean, CHANNELS)
    target = out + tl.load(p).to(tl.int64) * stride_n
    target += at * stride_x if DENSE else at // WIDTH * stride_y + at % WIDTH * stride_x
    for c in tl.static_range(CHANNELS):
        level = (r if c == 0 else (g if c == 1 else b)).to(tl.int32)
        tl.store(target + c * stride_c, tl.load(table + c * 256 + level, inside), inside)


def adjust(
    images: torch.Tensor,
    rows: NDArray[np.int64],
    codes: NDArray[np.int64],
    factors: NDArray[np.float64],
    table: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Adjust a chunk's images and write them into a batch. Queues work on the current stream and waits for none.

    Args:
        images: uint8 [N, H, W, C] on the device, contiguous, C = 1 or 3 (red, green, blue).
        rows: the row of `out` for each image, [N].
        codes: each image's operations (`Operation`) in their order, [N, K], at most one CONTRAST per image. With K = 0
            only the table is applied.
        factors: the factors of the operations, [N, K].
        table: [C, 256] on the device in the dtype of `out`: the result for each level.
        out: [B, C, H, W] with any strides. Other rows do not change. It may share memory with `images` if each image
            stays in its place.
    """
    count, height, width, channels = images.shape
    contrast = codes == Operation.CONTRAST
    assert images.is_contiguous() and table.dtype == out.dtype and contrast.sum(axis=1).max(initial=0) <= 1
    plan = torch.from_numpy(np.concatenate([rows[:, None], codes, factors], axis=1, dtype=np.float64))
    if images.is_cuda:  # torch keeps pinned memory until copies from it have ended
        plan = plan.pin_memory().to(images.device, non_blocking=True)
    sums = torch.empty((count, _SLICES), dtype=torch.int32, device=images.device)
    shared: dict[str, Any] = {
        "PIXELS": height * width, "CHANNELS": channels, "COUNT": codes.shape[1], "SLICES": _SLICES, "BLOCK": _BLOCK,
        "enable_fp_fusion": False,
    }  # fmt: skip
    if contrast.any():
        _sum_luma[_SLICES, count](images, plan, sums, **shared)
    _adjust[triton.cdiv(height * width, _BLOCK), count](
        images, plan, sums, table, out, *out.stride(),
        WIDTH=width, DENSE=out.stride(2) == width * out.stride(3), **shared,
    )  # fmt: skip


def adjust_reference(
    images: torch.Tensor, codes: NDArray[np.int64], factors: NDArray[np.float64], table: torch.Tensor
) -> torch.Tensor:
    """The reference for `adjust`: torchvision's functions, one image and one operation at a time; [N, C, H, W]."""
    from torchvision.transforms.v2 import functional as tv

    functions = {
        Operation.BRIGHTNESS: tv.adjust_brightness_image,
        Operation.CONTRAST: tv.adjust_contrast_image,
        Operation.SATURATION: tv.adjust_saturation_image,
        Operation.HUE: tv.adjust_hue_image,
    }
    results = []
    for pixels, operations, amounts in zip(images, codes.tolist(), factors.tolist(), strict=True):
        image = pixels.permute(2, 0, 1).contiguous()
        for operation, amount in zip(operations, amounts, strict=True):
            if operation != Operation.NONE:
                image = functions[Operation(operation)](image, amount)
        results.append(torch.stack([values[plane.long()] for values, plane in zip(table, image, strict=True)]))
    return torch.stack(results)
