"""Triton kernels: resampling, warps, colours, neighbourhoods and interleaving.

The programs for all parts of all images are on the first axis of a grid, those of one image next to each other: CUDA
allows 2^31 - 1 programs there, and 65,535 on the other axes.

Each launch says whether the compiler may fuse a multiplication and an addition (`enable_fp_fusion`), which rounds once
instead of twice: Triton's own choice will be another one from version 3.10 on.
"""

__all__: list[str] = []
