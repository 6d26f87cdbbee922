"""Run by test_local.py with TRITON_INTERPRET=1, in its own process: compares the kernels with their reference.

Prints one line a case: its name and the largest difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder

from gpuflow.execute.kernels import local
from gpuflow.execute.kernels.local import smooth, smooth_plan_of
from gpuflow.pipeline.stage import Filters, Keys, Local
from gpuflow.stages import STAGES, GaussianBlur, Sharpness
from tests.execute.kernels.interpret_color import Case, Launches, apart, batch, fma, levels, pictures
from tests.execute.kernels.references import smooth_reference

LAYOUTS = ((torch.float32, "nchw"), (torch.uint8, "nhwc"), (torch.bfloat16, "strided"))


def drawn(stage: Local, count: int) -> Filters:
    return stage.filters(stage.draw(Keys(3, 1, np.arange(count)).stage(stage.stage_name, 0)))


def compare(images: torch.Tensor, filters: Filters, dtype: torch.dtype, layout: str) -> float:
    """The largest difference from the reference, and from 7 in rows that no image fills."""
    count, height, width, channels = images.shape
    table = torch.arange(256).expand(channels, 256).contiguous().to(dtype)
    out = batch(count + 1, channels, (height, width), dtype, layout)
    rows = np.arange(count)[::-1].copy()
    smooth(images, torch.from_numpy(smooth_plan_of(rows, filters)), filters, table, out)
    untouched = apart(out[count:], torch.full_like(out[count:], 7))
    return max(apart(out[rows.tolist()], smooth_reference(images, filters, table)), untouched)


def sizes() -> Iterator[Case]:
    stages: tuple[Local, ...] = (
        Sharpness(amount=(0.0, 3.0), probability=0.8),
        GaussianBlur(kernel_size=9, sigma=(0.1, 3.0), probability=0.8),
    )
    for stage, channels, size in itertools.product(stages, (1, 3), ((48, 37), (17, 31), (2, 20), (3, 1), (1, 1))):
        for dtype, layout in LAYOUTS[: 3 if size == (17, 31) else 1]:
            difference = compare(pictures(4, size, channels), drawn(stage, 4), dtype, layout)
            yield f"{stage!r}, {channels} of {size}, {dtype} {layout}", difference


def examples() -> Iterator[Case]:
    for stage in [example for kind in STAGES.values() for example in kind.examples()]:
        if isinstance(stage, Local):
            difference = compare(pictures(5, (19, 23), 3), drawn(stage, 5), torch.float32, "nchw")
            yield f"example {stage!r}", max(0.0, difference - stage.tolerance)


def launches() -> Iterator[Case]:
    """How many launches more than two there are."""
    kernels = {name: Launches(getattr(local, name)) for name in ("_sum_columns", "_sum_rows")}
    for name, kernel in kernels.items():
        setattr(local, name, kernel)
    for count in (1, 8):
        before = sum(kernel.count for kernel in kernels.values())
        out = batch(count, 3, (4, 5), torch.float32, "nchw")
        filters = drawn(GaussianBlur(kernel_size=3), count)
        plan = torch.from_numpy(smooth_plan_of(np.arange(count), filters))
        smooth(pictures(count, (4, 5), 3), plan, filters, levels(3), out)
        yield f"launches for {count}", sum(kernel.count for kernel in kernels.values()) - before - 2


if __name__ == "__main__":
    InterpreterBuilder.create_fma = fma
    for cases in (sizes, examples, launches):
        for name, difference in cases():
            print(f"{name}: {difference}", flush=True)
