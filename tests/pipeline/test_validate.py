"""trace: the first stage that disagrees, in words, before anything runs."""

from __future__ import annotations

import pytest

from gpuflow.errors import ConfigError
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import trace
from gpuflow.stages import (
    CenterCrop,
    ColorJitter,
    Decode,
    Flip,
    Normalize,
    Pad,
    RandomCrop,
    Resize,
    Torchvision,
    WarpAffine,
)
from tests.texts import outline

GRAYSCALE = Torchvision(name="Grayscale")
BLUR = Torchvision(name="GaussianBlur", parameters=(("kernel_size", 3),))


def test_specs_between_the_stages() -> None:
    stages = (Decode(), Resize(shorter=32), CenterCrop(size=(24, 28)), Normalize(dtype="float16", layout="nhwc"))
    specs = trace(s.Pipeline("p", stages))
    assert specs[0] == s.ENCODED
    assert [str(spec) for spec in specs] == [
        "encoded bytes",
        "uint8 ?x?x3 hwc",
        "uint8 ?x?x3 hwc",
        "uint8 24x28x3 hwc",
        "float16 24x28x3 nhwc",
    ]
    assert [spec.shorter for spec in specs] == [None, None, 32, None, None]


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ((), "p stage.order"),
        ((Resize(shorter=8),), "p[0].resize stage.order"),
        ((Decode(), Decode()), "p[1].decode stage.order"),
        ((Decode(),), "p[0].decode stage.size"),
        ((Decode(), Resize(shorter=8), Normalize()), "p[2].normalize stage.size"),
        ((Decode(), Normalize(), CenterCrop(size=8)), "p[2].center_crop stage.order"),
        ((Decode(), CenterCrop(size=8), Normalize(), Normalize()), "p[3].normalize stage.order"),
        ((Decode(max_pixels=1023), Resize(height=32, width=32)), "p[1].resize config.conflict"),
        ((Decode(max_pixels=1023), CenterCrop(size=32)), "p[1].center_crop config.conflict"),
        ((Decode(), RandomCrop(size=60_000, padding=60_000)), "p[1].random_crop config.conflict"),
        ((Decode(), CenterCrop(size=9), Pad(padding=9_000)), "p[2].pad config.conflict"),
        (
            (Decode(), WarpAffine(matrix=((1.0, 0.0, 0.0), (0.0, 1.0, 0.0)), size=(30_000, 6_000))),
            "p[1].warp_affine config.conflict",
        ),
        (
            (Decode(), CenterCrop(size=9), Torchvision(name="Pad", parameters=(("padding", 9_000),))),
            "p[2].torchvision config.conflict",
        ),
        ((Decode(), Resize(height=8, width=20), RandomCrop(size=9)), "p[2].random_crop stage.order"),
        ((Decode(), Resize(shorter=8), RandomCrop(size=9)), "p[2].random_crop stage.order"),
        ((Decode(color="gray"), CenterCrop(size=8), Normalize()), "p[2].normalize stage.order"),
        ((Decode(), CenterCrop(size=8), GRAYSCALE, Normalize()), "p[3].normalize stage.order"),
        ((Decode(color="bgr"), CenterCrop(size=8), ColorJitter()), "p[2].color_jitter stage.order"),
    ],
)
def test_the_first_stage_that_disagrees(stages: tuple[s.Stage, ...], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trace(s.Pipeline("p", stages))
    assert outline(caught.value) == expected


@pytest.mark.parametrize("stage", [Flip(horizontal=0.5), RandomCrop(size=8), ColorJitter(hue=0.1), BLUR], ids=repr)
def test_random_stages_do_not_serve(stage: s.Stage) -> None:
    pipeline = s.Pipeline("serve", (Decode(), CenterCrop(size=8), stage))
    assert trace(pipeline)[-1].fixed
    with pytest.raises(ConfigError) as caught:
        trace(pipeline, serving=True)
    assert outline(caught.value) == f"serve[2].{stage.stage_name} stage.random"


def test_stages_that_could_be_random_serve_where_they_are_not() -> None:
    stages = (Decode(), CenterCrop(size=8), Flip(horizontal=1.0), ColorJitter(brightness=(1.5, 1.5)), Normalize())
    assert trace(s.Pipeline("serve", stages), serving=True) == trace(s.Pipeline("serve", stages))


def test_the_place_is_named_as_asked() -> None:
    with pytest.raises(ConfigError) as caught:
        trace(s.Pipeline("p", (Decode(),)), at=("pipelines", "p", "stages"))
    (problem,) = caught.value.problems
    assert (problem.path, problem.code) == (("pipelines", "p", "stages", 0, "decode"), "stage.size")
