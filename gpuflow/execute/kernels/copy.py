# mypy: disable-error-code="assignment, import-untyped, no-untyped-def, untyped-decorator"
"""Copies images from one place in device memory to another, any number of them in one kernel launch."""

from __future__ import annotations

from typing import Any

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
    grid: Any = (len(plan) * _BLOCKS,)
    _copy[grid](plan, FIELD_COUNT=len(FIELDS), BLOCKS=_BLOCKS, WORDS=_WORDS, num_warps=4, enable_fp_fusion=True)
