"""Run by test_copy.py with TRITON_INTERPRET=1, in its own process: copies images of several sizes in one launch.

Prints one line a case: its name and the number of bytes that are not as they should be.
"""

from __future__ import annotations

import numpy as np
import torch

from gpuflow.execute.kernels.copy import copy_images

SIZES = (16, 48, 8192, 8208, 32 * 8192 + 16, 3 * 32 * 8192 - 16, 0)
"""In bytes: less than a program copies at a time, as much, more than all programs of an image do at once, nothing."""
GAP = 64


def main() -> None:
    generator = np.random.default_rng(0)
    total = sum(SIZES) + GAP * len(SIZES)
    source = torch.from_numpy(generator.integers(0, 256, total, np.uint8))
    target = torch.full((total,), 7, dtype=torch.uint8)
    expected, plan, at, to = target.clone(), [], 0, total
    for size in SIZES:
        to -= size + GAP
        plan.append((source.data_ptr() + at, target.data_ptr() + to, size))
        expected[to : to + size] = source[at : at + size]
        at += size + GAP
    copy_images(torch.tensor(plan))
    print(f"{len(SIZES)} images: {int((target != expected).sum())}")


if __name__ == "__main__":
    main()
