# mypy: disable-error-code="assignment, import-untyped, no-untyped-def, untyped-decorator"
"""Copies images of any sizes and strides to interleaved memory, which the resampling kernel reads, in one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

FIELDS = ("address", "stride_c", "stride_y", "stride_x", "height", "width", "result")
"""Columns of the images' description, int64 [N, len(FIELDS)]: the device address of the first byte, the strides in
bytes, the size in pixels, and the device address of the result, [height, width, C] without gaps."""
_PIXELS = 512


@triton.jit(do_not_specialize=["blocks"])
def _interleave(images, blocks, FIELD_COUNT: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr):
    """PIXELS pixels of one image. blocks: programs for each image."""
    n, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    p = images + n.to(tl.int64) * FIELD_COUNT
    image, result = tl.load(p).to(tl.pointer_type(tl.uint8)), tl.load(p + 6).to(tl.pointer_type(tl.uint8))
    stride_c, stride_y, stride_x = tl.load(p + 1), tl.load(p + 2), tl.load(p + 3)
    height, width = tl.load(p + 4), tl.load(p + 5)
    pixel = block.to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    inside = pixel < height * width
    begins = image + pixel // width * stride_y + pixel % width * stride_x
    for c in tl.static_range(CHANNELS):
        tl.store(result + pixel * CHANNELS + c, tl.load(begins + c * stride_c, inside, 0), inside)


def interleave(images: torch.Tensor, most_pixels: int, *, channels: int) -> None:
    """Copy N images as `images`, int64 [N, len(FIELDS)] on the device, says. most_pixels: of the largest one."""
    blocks = -(-most_pixels // _PIXELS)
    grid: Any = (blocks * len(images),)
    _interleave[grid](images, blocks, FIELD_COUNT=len(FIELDS), CHANNELS=channels, PIXELS=_PIXELS, enable_fp_fusion=True)
