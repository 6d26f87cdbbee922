"""What the steps of a program draw: each stage its own numbers, also next to another stage of its name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gpuflow.pipeline.program import OpaqueStep, PointwiseStep, ResamplingStep, _overlap
from gpuflow.pipeline.stage import Operation
from gpuflow.stages import ColorJitter, Decode, Flip, RandomCrop, Torchvision
from tests.running import keys_of, program_of

KEYS = keys_of(200, seed=4)
SIZES = np.full(200, 100), np.full(200, 100)


def test_two_colour_stages_of_one_name_draw_independently() -> None:
    jitter = ColorJitter(brightness=0.5, contrast=0.5, saturation=0.5)
    (step,) = program_of(Decode(), RandomCrop(size=9), jitter, jitter).steps[1:]
    assert isinstance(step, PointwiseStep)
    drawn = step.draw(KEYS, *SIZES)
    assert drawn.codes.shape == (200, 6) and drawn.statistics == 2
    for operation in (Operation.BRIGHTNESS, Operation.CONTRAST, Operation.SATURATION):
        a, b = (
            half[0][half[1] == operation]
            for half in zip(np.split(drawn.factors, 2, 1), np.split(drawn.codes, 2, 1), strict=True)
        )
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.35


def test_two_opaque_stages_of_one_name_draw_independently() -> None:
    stage = Torchvision(name="RandomInvert", parameters=(("p", 0.5),))
    steps = [
        step
        for step in program_of(Decode(), RandomCrop(size=9), stage, stage).steps
        if not isinstance(step, ResamplingStep)
    ]
    first, second = steps
    assert isinstance(first, OpaqueStep) and isinstance(second, OpaqueStep)
    assert not np.intersect1d(first.draw(KEYS), second.draw(KEYS)).size


def test_two_crops_of_one_name_in_one_resampling_draw_independently() -> None:
    """The second crop's place within the first one is not the first one's place within the image."""
    outer, both = (
        program_of(Decode(), *crops).steps[0]
        for crops in ((RandomCrop(size=50),), (RandomCrop(size=50), RandomCrop(size=10)))
    )
    assert isinstance(outer, ResamplingStep) and isinstance(both, ResamplingStep)
    first = outer.draw(KEYS, *SIZES).box[:, :2]
    second = both.draw(KEYS, *SIZES).box[:, :2] - first
    for axis in range(2):
        assert abs(np.corrcoef(first[:, axis], second[:, axis])[0, 1]) < 0.35
    assert abs(np.corrcoef(first.T)[0, 1]) < 0.35, "and the two axes are independent"


def test_two_flips_undo_each_other_for_half_of_the_samples() -> None:
    (step,) = program_of(Decode(), RandomCrop(size=9), Flip(horizontal=0.5), Flip(horizontal=0.5)).steps
    assert isinstance(step, ResamplingStep)
    mirrored = step.draw(KEYS, *SIZES).flips[:, 1]
    assert 0.3 < mirrored.mean() < 0.7


@dataclass(frozen=True, kw_only=True, repr=False)
class OtherLibrary(Torchvision):
    """An opaque stage of a plug-in."""

    stage_name: ClassVar[str] = "other_library"


def test_opaque_stages_of_two_names_draw_independently() -> None:
    stages = [kind(name="RandomInvert", parameters=(("p", 0.5),)) for kind in (Torchvision, OtherLibrary)]
    first, second = program_of(Decode(), RandomCrop(size=9), *stages).steps[1:]
    assert isinstance(first, OpaqueStep) and isinstance(second, OpaqueStep)
    assert first.occurrence == second.occurrence == 0
    assert not np.intersect1d(first.draw(KEYS), second.draw(KEYS)).size


def test_boxes_that_do_not_meet_have_an_empty_intersection() -> None:
    boxes = np.array([[0, 0, 4, 5], [10, 0, 4, 5], [0, 10, 4, 5], [2, 3, 4, 5], [4, 0, 1, 5]])
    common = _overlap(np.repeat(boxes[:1], len(boxes), axis=0), boxes)
    assert common[:, 2:].tolist() == [[4, 5], [0, 5], [4, 0], [2, 2], [0, 5]]
    assert common[3].tolist() == [2, 3, 2, 2]
