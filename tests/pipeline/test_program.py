"""fold: the steps of a folded pipeline, and the fields of a resampling. tests/laws checks that pixels do not change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpuflow.pipeline import stage as s
from gpuflow.pipeline.moves import forward
from gpuflow.pipeline.program import OpaqueStep, PointwiseStep, Resampling, ResamplingStep, Warping, WarpStep
from gpuflow.stages import (
    CenterCrop,
    ColorJitter,
    Decode,
    Flip,
    Normalize,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    Rotate,
    Torchvision,
)
from tests.running import keys_of, program_of

BLUR = Torchvision(name="GaussianBlur", parameters=(("kernel_size", 3),))


def steps(*stages: s.Stage) -> list[str]:
    """For each step the names of its stages."""
    program = program_of(Decode(), *stages, name="p")
    return [
        " ".join(stage.stage_name for stage in (step.stages if hasattr(step, "stages") else [step.stage]))
        for step in program.steps
    ]


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ((Resize(shorter=9), CenterCrop(size=8), Normalize()), ["resize center_crop", "normalize"]),
        ((RandomResizedCrop(size=8), Flip(), Normalize()), ["random_resized_crop flip", "normalize"]),
        ((RandomCrop(size=8), Resize(height=3, width=3), Flip()), ["random_crop resize flip"]),
        ((Flip(), RandomCrop(size=8), Flip(), RandomCrop(size=3)), ["flip random_crop flip random_crop"]),
        ((Resize(shorter=9), Resize(height=3, width=3)), ["resize", "resize"]),
        ((CenterCrop(size=8), Resize(height=3, width=3)), ["center_crop", "resize"]),
        ((RandomCrop(size=8, padding=1), Resize(height=3, width=3)), ["random_crop", "resize"]),
        ((RandomResizedCrop(size=8), RandomResizedCrop(size=8)), ["random_resized_crop", "random_resized_crop"]),
        ((ColorJitter(), CenterCrop(size=8)), ["color_jitter", "center_crop"]),
        ((CenterCrop(size=8), ColorJitter(), Flip()), ["center_crop", "color_jitter", "flip"]),
        ((Rotate(degrees=9), CenterCrop(size=8)), ["rotate center_crop"]),
        ((Flip(), RandomCrop(size=8), Rotate(degrees=9), Flip()), ["flip random_crop rotate flip"]),
        ((RandomCrop(size=8), Rotate(degrees=9), Rotate(degrees=9)), ["random_crop rotate rotate"]),
        ((Resize(height=9, width=9), Flip(), Rotate(degrees=9)), ["resize flip", "rotate"]),
        ((Rotate(degrees=9), Resize(height=9, width=9)), ["rotate", "resize"]),
        ((CenterCrop(size=9), Rotate(degrees=9)), ["center_crop", "rotate"]),
        (
            (RandomCrop(size=9), Rotate(degrees=9), CenterCrop(size=8), Rotate(degrees=9)),
            ["random_crop rotate center_crop rotate"],
        ),
        (
            (RandomCrop(size=9), Rotate(degrees=9), RandomCrop(size=8, padding=1), Rotate(degrees=9)),
            ["random_crop rotate random_crop", "rotate"],
        ),
        ((RandomCrop(size=9), Rotate(degrees=9), Rotate(degrees=9, border="edge")), ["random_crop rotate", "rotate"]),
        ((RandomCrop(size=9), Rotate(degrees=9, fill=1), Rotate(degrees=9)), ["random_crop rotate", "rotate"]),
        (
            (CenterCrop(size=8), ColorJitter(), ColorJitter(), Flip()),
            ["center_crop", "color_jitter color_jitter", "flip"],
        ),
        ((CenterCrop(size=8), ColorJitter(), Normalize()), ["center_crop", "color_jitter normalize"]),
        (
            (CenterCrop(size=8), BLUR, ColorJitter(), Normalize()),
            ["center_crop", "torchvision", "color_jitter normalize"],
        ),
        ((BLUR, CenterCrop(size=8), BLUR, Normalize()), ["torchvision", "center_crop", "torchvision", "normalize"]),
    ],
    ids=str,
)
def test_steps(stages: tuple[s.Stage, ...], expected: list[str]) -> None:
    assert steps(*stages) == expected


def test_a_program_is_a_value_with_its_specs() -> None:
    program = program_of(Decode(), CenterCrop(size=8), BLUR, Normalize())
    assert program == program_of(Decode(), CenterCrop(size=8), BLUR, Normalize())
    assert program.decoder == Decode()
    assert program.result == program.specs[-1]
    assert [str(spec) for spec in program.specs] == [
        "encoded bytes",
        "uint8 ?x?x3 hwc",
        "uint8 8x8x3 hwc",
        "uint8 8x8x3 hwc",
        "float32 8x8x3 nchw",
    ]
    call = program.steps[1]
    assert isinstance(call, OpaqueStep)
    assert (call.before, call.after) == program.specs[2:4]
    assert isinstance(program.steps[2], PointwiseStep)


def resampling(height: int, width: int, *stages: s.Stage) -> Resampling:
    (step,) = program_of(Decode(), *stages).steps
    assert isinstance(step, ResamplingStep)
    return step.draw(keys_of(1), np.array([height]), np.array([width]))


def test_a_crop_before_the_resize_bounds_the_box_and_one_after_it_selects_from_the_grid() -> None:
    before = resampling(50, 60, RandomCrop(size=20), Resize(height=10, width=12))
    assert before.box[0, 2:].tolist() == [20, 20]
    assert before.grid.tolist() == [[10, 12]]
    assert before.window.tolist() == before.shown.tolist() == [[0, 0, 10, 12]]
    after = resampling(50, 60, Resize(height=10, width=12), CenterCrop(size=(4, 6)))
    assert after.box.tolist() == [[0, 0, 50, 60]]
    assert after.grid.tolist() == [[10, 12]]
    assert after.window.tolist() == [[3, 3, 4, 6]]


def test_flips_turn_later_crops_around() -> None:
    plain = resampling(50, 60, CenterCrop(size=(4, 6)))
    flipped = resampling(50, 61, Flip(horizontal=1.0), CenterCrop(size=(4, 6)))
    assert plain.window.tolist() == [[23, 27, 4, 6]]
    assert flipped.window.tolist() == [[23, 61 - 28 - 6, 4, 6]]
    assert flipped.flips.tolist() == [[False, True]]
    twice = resampling(50, 60, Flip(horizontal=1.0, vertical=1.0), RandomCrop(size=4), Flip(horizontal=1.0))
    assert twice.flips.tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("interpolation", "mirrors", "flips"),
    [
        ("nearest", [[False, True]], [[False, False]]),
        ("bilinear", [[False, False]], [[False, True]]),
        ("bicubic", [[False, False]], [[False, True]]),
    ],
)
def test_only_nearest_depends_on_whether_a_flip_comes_first(
    interpolation: Any, mirrors: list[list[bool]], flips: list[list[bool]]
) -> None:
    result = resampling(50, 60, Flip(horizontal=1.0), Resize(height=7, width=5, interpolation=interpolation))
    assert (result.mirrors.tolist(), result.flips.tolist()) == (mirrors, flips)
    assert (result.interpolation, result.antialias) == (interpolation, True)


def test_what_an_earlier_crop_left_out_stays_black() -> None:
    result = resampling(50, 60, CenterCrop(size=20), RandomCrop(size=20, padding=6))
    assert result.shown.tolist()[0] != result.window.tolist()[0]
    top, left, height, width = result.shown[0].tolist()
    assert top >= 15 and left >= 20 and top + height <= 35 and left + width <= 40


def test_misfits_name_the_stage_and_the_size_that_it_met() -> None:
    result = resampling(50, 60, Resize(longer=30), RandomCrop(size=28))
    (misfit,) = result.misfits
    assert (misfit.stage, misfit.where.tolist(), misfit.sizes.tolist()) == ("random_crop", [True], [[25, 30]])
    assert resampling(50, 60, RandomCrop(size=50)).misfits == ()


def warping(height: int, width: int, *stages: s.Stage) -> Warping:
    (step,) = program_of(Decode(), *stages).steps
    assert isinstance(step, WarpStep)
    return step.draw(keys_of(1), np.array([height]), np.array([width]))


def test_warps_in_a_row_are_one_map() -> None:
    """A point of the result, taken through the moves backwards, is where the one map takes it."""
    stages = (
        RandomCrop(size=(40, 44)),
        Flip(horizontal=1.0),
        Rotate(degrees=40),
        RandomCrop(size=30),
        Flip(vertical=1.0),
        Rotate(degrees=(10, 20)),
        CenterCrop(size=(20, 24)),
    )
    found = warping(50, 60, *stages)
    pipeline = s.Pipeline("p", (Decode(), *stages))
    matrix, height, width = np.eye(3), np.array([50]), np.array([60])
    for stage, turn in zip(stages, pipeline.occurrences()[1:], strict=True):
        for move in stage.draw(keys_of(1).stage(stage.stage_name, turn), height, width):
            step, height, width = forward(move, height, width)
            matrix = step[0] @ matrix
    y, x, *size = found.box[0].tolist()
    assert size == [40, 44]
    corner = np.array([[1, 0, x], [0, 1, y], [0, 0, 1]])
    assert np.abs(corner @ found.matrix[0] - np.linalg.inv(matrix)).max() < 1e-10
    assert (found.height.tolist(), found.width.tolist()) == (height.tolist(), width.tolist()) == ([20], [24])
    assert found.shown.tolist() == [[0, 0, 20, 24]]


def test_what_a_crop_pads_after_a_warp_is_not_shown() -> None:
    found = warping(50, 60, Rotate(degrees=9), CenterCrop(size=(60, 50)), Flip(vertical=1.0), CenterCrop(size=(56, 48)))
    assert found.shown.tolist() == [[3, 0, 50, 48]]
    assert np.array_equal(found.box, [[0, 0, 50, 60]])


def test_seeds_of_opaque_stages_differ_and_fit_torch() -> None:
    step = program_of(Decode(), CenterCrop(size=8), BLUR).steps[1]
    assert isinstance(step, OpaqueStep)
    seeds = step.draw(keys_of(10_000))
    assert seeds.dtype == np.int64
    assert len(set(seeds.tolist())) == 10_000
    assert seeds.min() >= 0 and seeds.max() < 2**62 and seeds.max() > 2**61
