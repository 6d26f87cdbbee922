# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""The operator of own_warp.py in Triton, which compiles it at the first call. With TRITON_INTERPRET=1 a CPU runs it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["warp"]

_BLOCK = 256


@triton.jit
def _level(image, y, x, c, H, W, C: tl.constexpr, inside):
    found = inside & (y >= 0) & (x >= 0) & (y < H) & (x < W)
    return tl.load(image + (y * W + x) * C + c, mask=found, other=0).to(tl.float64)


@triton.jit
def _warp(images, out, matrices, H, W, C: tl.constexpr, BLOCK: tl.constexpr):
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(1).to(tl.int64)
    inside = pixel < H * W
    y, x = (pixel // W).to(tl.float64), (pixel % W).to(tl.float64)
    m, image = matrices + 6 * n, images + n * H * W * C
    sx = tl.load(m) * x + tl.load(m + 1) * y + tl.load(m + 2)
    sy = tl.load(m + 3) * x + tl.load(m + 4) * y + tl.load(m + 5)
    left, top = tl.floor(sx), tl.floor(sy)
    fx, fy = sx - left, sy - top
    x0, y0 = left.to(tl.int64), top.to(tl.int64)
    for c in tl.static_range(C):
        a = _level(image, y0, x0, c, H, W, C, inside)
        b = _level(image, y0, x0 + 1, c, H, W, C, inside)
        upper = a * (1 - fx) + b * fx
        a = _level(image, y0 + 1, x0, c, H, W, C, inside)
        b = _level(image, y0 + 1, x0 + 1, c, H, W, C, inside)
        lower = a * (1 - fx) + b * fx
        level = tl.floor(upper * (1 - fy) + lower * fy + 0.5).to(tl.int32).to(tl.uint8)
        tl.store(out + n * H * W * C + pixel.to(tl.int64) * C + c, level, mask=inside)


def warp(images: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Return uint8 images [N, H, W, C] as own_warp.warp does. matrices: float64 [N, 2, 3]."""
    out = torch.empty_like(images)
    count, height, width, channels = images.shape
    if out.numel():
        grid = triton.cdiv(height * width, _BLOCK), count
        # without fused multiplications, as in C++
        _warp[grid](images, out, matrices, height, width, C=channels, BLOCK=_BLOCK, enable_fp_fusion=False)
    return out
