"""A slow runner of programs that reads like a specification: one image and one step after the other, all pixels.

It shares with gpuflow what is drawn (`gpuflow.pipeline`), and nothing of how pixels are computed (`gpuflow.execute`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.errors import BadSampleError
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import (
    LocalStep,
    OpaqueStep,
    PointwiseStep,
    Program,
    Resampling,
    ResamplingStep,
    Warping,
    WarpStep,
)
from gpuflow.pipeline.views import AnyProgram, outputs_of, programs_of, slot_shape
from tests.reference.coloring import colored, looked_up
from tests.reference.filtering import filtered
from tests.reference.resampling import resampled
from tests.reference.warping import warped

__all__ = ["reference_of"]

Outputs = list[NDArray[Any]]


def reference_of(program: AnyProgram, images: Sequence[NDArray[np.uint8]], keys: s.Keys) -> list[Outputs | str]:
    """Return for each decoded image [H, W, C] its results, one for each number of each view, or why it is bad."""
    return [_of_sample(program, image, keys[i]) for i, image in enumerate(images)]


def _of_sample(program: AnyProgram, image: NDArray[np.uint8], keys: s.Keys) -> Outputs | str:
    programs = programs_of(program)
    try:
        return [_run(programs[one.program], image, one.keys_of(keys)) for one in outputs_of(program)]
    except BadSampleError as fault:
        return str(fault)


def _run(program: Program, image: NDArray[Any], keys: s.Keys) -> NDArray[Any]:
    for step in program.steps:
        size = np.array(image.shape[:1]), np.array(image.shape[1:2])
        match step:
            case ResamplingStep():
                resampling = step.draw(keys, *size)
                _check(resampling)
                image = resampled(image, resampling)
            case WarpStep():
                warping = step.draw(keys, *size)
                _check(warping)
                image = warped(image, warping)
            case PointwiseStep():
                image = colored(image, step.draw(keys, *size))
                if step.table is not None:
                    image = looked_up(image, step.table, planes=step.after.layout == "nchw")
            case LocalStep():
                image = filtered(image, step.draw(keys))
            case OpaqueStep():  # Python code of the stage, which is its own reference
                tensor = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)
                image = step.stage.apply(tensor, int(step.draw(keys)[0])).permute(1, 2, 0).numpy()
            case _:
                assert_never(step)
    return image.reshape(slot_shape(program.result))


def _check(drawn: Resampling | Warping) -> None:
    """Raise BadSampleError if sample 0 does not fit."""
    for misfit in drawn.misfits:
        if (fault := misfit.fault(0)) is not None:
            raise fault
