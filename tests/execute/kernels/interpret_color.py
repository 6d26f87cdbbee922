"""Run by test_color.py with TRITON_INTERPRET=1, in its own process: compares the kernels with their references.

Prints one line a case: its name and the largest difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from gpuflow.execute.cpu.native_chunk import run_pointwise
from gpuflow.execute.kernels import color
from gpuflow.execute.kernels.color import adjust, adjust_plan_of
from gpuflow.execute.packing import send_all
from gpuflow.pipeline.stage import Keys, Operation, Operations, Pointwise
from gpuflow.stages import STAGES, ColorJitter, Normalize
from tests.execute.kernels.quick_interpreter import use_few_slices
from tests.execute.kernels.references import adjust_reference
from tests.packages.toning.toning import Tone

SIZES = ((48, 37), (17, 31), (1, 48), (1, 1))
ADJUSTMENTS = (Operation.BRIGHTNESS, Operation.CONTRAST, Operation.SATURATION, Operation.HUE)
ORDERS = np.array(list(itertools.permutations(ADJUSTMENTS)))
FACTORS = (0.0, 0.004, 0.3, 0.7, 1.0, 1.4, 2.5, 300.0)
SHIFTS = (-0.5, -1 / 3, -0.1, -1e-9, 0.0, 1e-9, 0.25, 0.5)
FUSED = ((20, 152, 7), (40, 252, 80), (110, 111, 26), (140, 236, 23), (190, 175, 206), (230, 225, 177), (250, 247, 99))
"""Colours whose luma changes by a level if a multiply-add rounds twice."""
Case = tuple[str, float]


def fma(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    """x * y + z rounded once, as a GPU does and the interpreter does not: float64 holds these sums exactly."""
    exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data
    return TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)


def pictures(count: int, size: tuple[int, int], channels: int) -> torch.Tensor:
    """Images with any levels in one half and few levels in the other, so that channels often are equal or extreme."""
    rng = np.random.default_rng((count, *size))
    pixels = rng.integers(0, 256, (count, *size, channels), dtype=np.uint8)
    pixels[::2] = rng.choice(np.array([0, 1, 100, 254, 255], np.uint8), (len(pixels[::2]), *size, channels))
    return torch.from_numpy(pixels)


def factors_of(codes: NDArray[np.int64], high: float = 2.0) -> NDArray[np.float64]:
    rng = np.random.default_rng(codes.shape)
    return np.where(codes == Operation.HUE, rng.uniform(-0.5, 0.5, codes.shape), rng.uniform(0, high, codes.shape))


def levels(channels: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A table with one step per level that differs between channels."""
    return torch.stack([torch.arange(256.0) + 256 * c for c in range(channels)]).to(dtype)


def batch(count: int, channels: int, size: tuple[int, int], dtype: torch.dtype, layout: str) -> torch.Tensor:
    """[count, C, H, W] filled with 7: planes, channels_last memory, or every third column of a larger tensor."""
    height, width = size
    if layout == "strided":
        return torch.full((count, channels, height + 2, 3 * width), 7).to(dtype)[:, :, 1:-1, ::3]
    memory = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    return torch.full((count, channels, *size), 7).to(dtype).contiguous(memory_format=memory)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.dtype == b.dtype and a.shape == b.shape
    return float((a.float() - b.float()).abs().max())


def compare(
    images: torch.Tensor,
    codes: NDArray[np.int64],
    factors: NDArray[np.float64],
    layout: str = "nchw",
    dtype: torch.dtype = torch.float32,
) -> float:
    """See `compare_operations`, for colour adjustments with at most one contrast for each image."""
    operations = Operations.of(codes, factors, kinds=ADJUSTMENTS, statistics=int((codes == Operation.CONTRAST).any()))
    return compare_operations(images, operations, layout, dtype)


def compare_operations(
    images: torch.Tensor, operations: Operations, layout: str = "nchw", dtype: torch.dtype = torch.float32
) -> float:
    """The largest difference from the reference, and from 7 in rows that no image fills."""
    count, height, width, channels = images.shape
    table = levels(channels, dtype)
    out = batch(count + 1, channels, (height, width), dtype, layout)
    rows = np.arange(count)[::-1].copy()
    adjust(images, send_all(adjust_plan_of(rows, operations), out.device), operations, table, out)
    untouched = apart(out[count:], torch.full_like(out[count:], 7))
    return max(apart(out[rows.tolist()], adjust_reference(images, operations, table)), untouched)


def one_operation() -> Iterator[Case]:
    for operation, channels, size in itertools.product(ADJUSTMENTS, (1, 3), SIZES):
        factors = np.array(SHIFTS if operation == Operation.HUE else FACTORS)[:, None]
        codes = np.full(factors.shape, operation)
        images = pictures(len(codes), size, channels)
        yield f"{operation.name}, {channels} of {size}", compare(images, codes, factors)


def orders() -> Iterator[Case]:
    for channels, size, high in ((1, SIZES[1], 1.4), (3, SIZES[1], 1.4), (3, SIZES[1], 3.0), (3, SIZES[3], 1.4)):
        images = pictures(len(ORDERS), size, channels)
        yield f"24 orders, factors to {high}, {channels} of {size}", compare(images, ORDERS, factors_of(ORDERS, high))


def fused_luma() -> Iterator[Case]:
    images = torch.tensor(FUSED, dtype=torch.uint8)[None, None]
    for operation in (Operation.CONTRAST, Operation.SATURATION):
        yield f"{operation.name} of fused colours", compare(images, np.array([[operation]]), np.zeros((1, 1)))


def some_left_out() -> Iterator[Case]:
    """Samples with and without contrast in one chunk, gaps before and after it, the same operation twice."""
    codes = np.array(
        [
            [Operation.NONE, Operation.CONTRAST, Operation.NONE, Operation.HUE],
            [Operation.NONE] * 4,
            [Operation.SATURATION, Operation.NONE, Operation.NONE, Operation.CONTRAST],
            [Operation.BRIGHTNESS, Operation.BRIGHTNESS, Operation.HUE, Operation.HUE],
        ]
    )
    for channels in (1, 3):
        yield f"gaps, {channels}", compare(pictures(len(codes), SIZES[0], channels), codes, factors_of(codes))


def layouts() -> Iterator[Case]:
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
    for dtype, layout, channels in itertools.product(dtypes, ("nchw", "nhwc", "strided"), (1, 3)):
        codes = ORDERS[9:10]
        images = pictures(1, SIZES[1], channels)
        yield f"{dtype} {layout} {channels}", compare(images, codes, factors_of(codes), layout, dtype)
        nothing = compare(images, codes[:, :0], np.empty((1, 0)), layout, dtype)
        yield f"{dtype} {layout} {channels}, the table alone", nothing


def as_stages() -> Iterator[Case]:
    """Two color jitters and normalize as one pass."""
    stages = ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1), ColorJitter(contrast=0.9, hue=0.5)
    normalize = Normalize(mean=(0.0,) * 3, std=(1 / 255,) * 3)
    count = 8
    images = pictures(count, SIZES[1], 3)
    sizes = np.full(count, SIZES[1][0]), np.full(count, SIZES[1][1])
    drawn = [stage.draw(Keys(3, 1, np.arange(count)).stage("color_jitter", i)) for i, stage in enumerate(stages)]
    parts = [stage.operations(rows, *sizes) for stage, rows in zip(stages, drawn, strict=True)]
    joined = Operations.join(count, parts)
    table = normalize.table()
    expected = []
    for i, image in enumerate(images.numpy().copy()):
        one = run_pointwise(image, parts[0], i, None, planes=False)
        expected.append(torch.from_numpy(run_pointwise(one, parts[1], i, table, planes=True)))
    out = batch(count, 3, SIZES[1], torch.float32, "nchw")
    plan = send_all(adjust_plan_of(np.arange(count), joined), out.device)
    adjust(images, plan, joined, torch.from_numpy(table), out)
    yield "two jitters and normalize as stages", apart(out, torch.stack(expected))


def new_operations(count: int, size: tuple[int, int], channels: int) -> dict[str, Operations]:
    """Operations of each other kind, on some of the samples."""
    rng = np.random.default_rng((count, *size, channels))
    active = rng.random(count) < 0.7
    corner = rng.integers(0, size, (count, 2))
    box = np.concatenate([corner, rng.integers(1, 20, (count, 2))], axis=1)
    return {
        "grayscale": Operations.one(Operation.GRAYSCALE, active),
        "autocontrast": Operations.one(Operation.AUTOCONTRAST, active),
        "equalize": Operations.one(Operation.EQUALIZE, active),
        "table for all": Operations.table(active, rng.integers(0, 256, (1, 1, 256), dtype=np.uint8)),
        "tables": Operations.table(active, rng.integers(0, 256, (count, 3, 256), dtype=np.uint8)),
        "matrices": Operations.matrix(active, rng.uniform(-0.5, 1.0, (count, 3, 4)) * [1, 1, 1, 90]),
        "boxes": Operations.erase(active, box, rng.integers(0, 256, (count, channels)).astype(float)),
        "boxes of one colour": Operations.erase(active, box, np.array([[130.0]])),
    }


def other_operations() -> Iterator[Case]:
    count = 7
    for channels, size in itertools.product((1, 3), (SIZES[0], (2, 5), SIZES[3])):
        images = pictures(count, size, channels)
        if size == SIZES[0]:  # one image of few pixels with one level, one whose levels lie close together
            images[1], images[2] = 77, 100 + images[2] // 8
        for name, operations in new_operations(count, size, channels).items():
            yield f"{name}, {channels} of {size}", compare_operations(images, operations)


def joined_operations() -> Iterator[Case]:
    """All kinds in one pass, five of which need a statistic: in two orders, so that tables and values are numbered."""
    count, size = 3, (9, 13)
    for channels, turn in itertools.product((1, 3), (1, -1)):
        images = pictures(count, size, channels)
        parts = [*new_operations(count, size, channels).values(), *new_operations(count, (7, 9), channels).values()]
        codes = ORDERS[:count]
        parts.append(Operations.of(codes, factors_of(codes, 1.4), kinds=ADJUSTMENTS, statistics=1))
        joined = Operations.join(count, parts[::turn])
        yield f"all kinds, {channels}, {turn}", compare_operations(images, joined)


def examples() -> Iterator[Case]:
    """Every example of every stage that has operations, and another package's: the kernel equals the CPU's form."""
    count, size = 6, (19, 23)
    keys = Keys(1, 2, np.arange(count))
    for stage in [*(example for kind in STAGES.values() for example in kind.examples()), Tone()]:
        if isinstance(stage, Pointwise) and stage.table() is None:
            drawn = stage.draw(keys.stage(stage.stage_name, 0))
            operations = stage.operations(drawn, np.full(count, size[0]), np.full(count, size[1]))
            assert operations is not None, "gpuflow's own stages have a form for the GPU"
            yield f"example {stage!r}", compare_operations(pictures(count, size, 3), operations)


class Launches:
    """Counts the launches of a kernel in place of which it stands."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self.count = kernel, 0

    def __getitem__(self, grid: Any) -> Any:
        self.count += 1
        return self._kernel[grid]


def launches() -> Iterator[Case]:
    """How many launches more there are than stated: 1, and 2 for the operation that needs a histogram."""
    kernels = {name: Launches(getattr(color, name)) for name in ("_measure", "_make_table", "_adjust")}
    for name, kernel in kernels.items():
        setattr(color, name, kernel)
    out = batch(9, 3, (4, 5), torch.float32, "nchw")
    for name, one in new_operations(1, (4, 5), 3).items():
        for operations in (one, new_operations(8, (4, 5), 3)[name]):
            count, before = len(operations.codes), sum(kernel.count for kernel in kernels.values())
            plan = send_all(adjust_plan_of(np.arange(count), operations), out.device)
            adjust(pictures(count, (4, 5), 3), plan, operations, levels(3), out)
            launched = sum(kernel.count for kernel in kernels.values()) - before
            yield f"launches for {count}, {name}", launched - (1 + 2 * one.statistics)


if __name__ == "__main__":
    InterpreterBuilder.create_fma = fma
    own_slices = layouts, some_left_out, as_stages, joined_operations
    for number, cases in enumerate(
        (*own_slices, one_operation, orders, fused_luma, other_operations, examples, launches)
    ):
        if number == len(own_slices):
            use_few_slices()
        for name, difference in cases():
            print(f"{name}: {difference}", flush=True)
