"""The batched passes over a chunk's images that run a program on a GPU, and their random parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, assert_never

import numpy as np

from gpuflow.arrays import Array, Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import (
    LocalStep,
    OpaqueStep,
    PointwiseStep,
    Program,
    ResamplingStep,
    Step,
    WarpStep,
)
from gpuflow.pipeline.views import AnyProgram, ViewsProgram, programs_of


class Pass(NamedTuple):
    """One batched pass over a chunk's images: a step, then a lookup in a table of 256 results per channel.

    step: a pointwise one may be nothing but the table. table: [C, 256] in the storage dtype, or None if levels do not
    change. result: the spec of the images after the pass. Where they still differ in size, this pass and the next one
    are resamplings or warps.
    """

    step: Step
    table: Array | None
    result: s.ImageSpec


def passes_of(program: Program) -> tuple[Pass, ...] | str:
    """Return the passes that run a program's stages after nvJPEG decoded, or why a GPU cannot run it, as text."""
    if program.decoder.library is not None:
        return f"{program.decoder!r} decodes by itself"
    passes: list[Pass] = []
    for step, following, end in zip(program.steps, (*program.steps[1:], None), program.ends, strict=True):
        result = program.specs[end]
        if not passes and not isinstance(step, ResamplingStep | WarpStep):
            first = program.pipeline.stages[1]
            return f"{first!r} comes before the images have one size; put a crop or a resize to a fixed size first"
        moves = isinstance(step, ResamplingStep | WarpStep) and isinstance(following, ResamplingStep | WarpStep)
        if not result.fixed and not moves:
            return f"after {program.pipeline.stages[end - 1]!r} the images still differ in size"
        match step:
            case PointwiseStep():
                last, table = passes[-1], step.table
                alone = table is not None and len(step.stages) == 1
                if alone and last.table is None and not isinstance(last.step, OpaqueStep):
                    step = passes.pop().step  # which looks the levels up, too
                passes.append(Pass(step, table, result))
            case ResamplingStep() | WarpStep() | LocalStep() | OpaqueStep():
                passes.append(Pass(step, None, result))
            case _:
                assert_never(step)
    return tuple(passes) if passes else "its images differ in size; add a crop or a resize to a fixed size"


def passes_of_each(program: AnyProgram) -> tuple[tuple[Pass, ...], ...] | str:
    """Return `passes_of` each of `programs_of(program)`, or why a GPU cannot run one of them, as text."""
    found: list[tuple[Pass, ...]] = []
    for i, one in enumerate(programs_of(program)):
        passes = passes_of(one)
        if isinstance(passes, str):
            where = f"in view {program.pipeline.views[i].name!r}, " if isinstance(program, ViewsProgram) else ""
            return f"{where}{passes}"
        found.append(passes)
    return tuple(found)


def draw_passes(passes: Sequence[Pass], keys: s.Keys, sizes: Ints) -> list[Any]:
    """Draw each pass's parameters for N samples: a resampling or warp, operations, filters, coefficients, or seeds.

    sizes [N, 2]: height and width of the decoded images.
    """
    draws: list[Any] = []
    height, width = sizes.T
    for one in passes:
        draws.append(one.step.draw(keys, height, width))
        if one.result.fixed:
            height, width = (np.full(len(keys.positions), side) for side in one.result.shape[:2])
        else:
            height, width = draws[-1].size
    return draws
