# mypy: disable-error-code="assignment, import-untyped, no-untyped-def, untyped-decorator"
"""Copies images within device memory, any number of them in one kernel launch.

`copy_images` copies bytes. `interleave` copies images of any strides to the interleaved memory that the resampling
kernel reads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FIELDS = ("source", "target", "bytes")
"""Columns of a plan, int64 [N, 3]: two device addresses, and how many bytes to copy. All are multiples of ALIGN."""
ALIGN = 16
_WORDS, _BLOCKS = 2048, 32
"""Words of four bytes that a program copies at a time; programs of an image."""


@triton.jit
def _copy(plan, FIELD_COUNT: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr):
    n, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    p = plan + n.to(tl.int64) * FIELD_COUNT
    source = tl.multiple_of(tl.load(p), 16).to(tl.pointer_type(tl.int32))
    target = tl.multiple_of(tl.load(p + 1), 16).to(tl.pointer_type(tl.int32))
    count = tl.multiple_of((tl.load(p + 2) // 4).to(tl.int32), 4)
    for start in range(block * WORDS, count, BLOCKS * WORDS):
        at = start + tl.arange(0, WORDS)
        tl.store(target + at, tl.load(source + at, at < count), at < count)


def copy_images(plan: torch.Tensor) -> None:
    """Copy images. plan: int64 [N, 3] on the device, see FIELDS."""
    _copy[len(plan) * _BLOCKS,](
        plan, FIELD_COUNT=len(FIELDS), BLOCKS=_BLOCKS, WORDS=_WORDS, num_warps=4, enable_fp_fusion=True
    )


IMAGE_FIELDS = ("address", "stride_c", "stride_y", "stride_x", "height", "width", "result")
"""Columns of the images' description, int64 [N, len(IMAGE_FIELDS)]: the device address of the first byte, the strides
in bytes, the size in pixels, and the device address of the result, [height, width, C] without gaps."""
_PIXELS = 512


@triton.jit(do_not_specialize=["blocks"])
def _interleave(images, blocks, FIELD_COUNT: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr):
    """Copy PIXELS pixels of one image. blocks: programs for each image."""
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
    """Copy N images as `images`, int64 [N, len(IMAGE_FIELDS)] on the device, says. most_pixels: of the largest one."""
    blocks = -(-most_pixels // _PIXELS)
    count = len(IMAGE_FIELDS)
    _interleave[blocks * len(images),](
        images, blocks, FIELD_COUNT=count, CHANNELS=channels, PIXELS=_PIXELS, enable_fp_fusion=True
    )
