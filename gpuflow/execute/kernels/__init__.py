# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
"""Triton kernels: resampling, warps, colours, neighbourhoods and interleaving.

The programs for all parts of all images are on the first axis of a grid, those of one image next to each other: CUDA
allows 2^31 - 1 programs there, and 65,535 on the other axes.

Each launch says whether the compiler may fuse a multiplication and an addition (`enable_fp_fusion`), which rounds once
instead of twice: Triton's own choice will be another one from version 3.10 on.
"""

import triton
import triton.language as tl

__all__ = ["load_pair"]


@triton.jit
def load_pair(p):
    """Load two numbers of a plan in 32 bits: 64 bits would need more registers."""
    return tl.load(p).to(tl.int32), tl.load(p + 1).to(tl.int32)
