"""check: the first stage that disagrees, in words, before anything runs."""

from __future__ import annotations

import pytest

from gpuflow.errors import ConfigError
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.validate import trace
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
    ("stages", "text"),
    [
        ((), "p must name at least one stage, got an empty list; start with decode: {}"),
        (
            (Resize(shorter=8),),
            "p[0].resize takes an image but gets encoded bytes; start the list with decode: {color: rgb}",
        ),
        ((Decode(), Decode()), "p[1].decode must be the first stage and stand once; remove this one"),
        (
            (Decode(),),
            "p[0].decode leaves images of varying size (uint8 ?x?x3 hwc), which no batch can hold; "
            "add center_crop, random_crop, random_resized_crop, letterbox or resize with height and width",
        ),
        (
            (Decode(), Resize(shorter=8), Normalize()),
            "p[2].normalize leaves images of varying size (float32 ?x?x3 nchw), which no batch can hold; "
            "add center_crop, random_crop, random_resized_crop, letterbox or resize with height and width",
        ),
        (
            (Decode(), Normalize(), CenterCrop(size=8)),
            "p[2].center_crop takes uint8 pixels but gets float32; put center_crop before normalize",
        ),
        (
            (Decode(), CenterCrop(size=8), Normalize(), Normalize()),
            "p[3].normalize takes uint8 pixels but gets float32; put normalize before normalize",
        ),
        (
            (Decode(max_pixels=1023), Resize(height=32, width=32)),
            "p[1].resize makes 32x32 = 1,024 pixels of every image, more than max_pixels; "
            "raise decode.max_pixels, which is 1,023, or resize to less",
        ),
        (
            (Decode(max_pixels=1023), CenterCrop(size=32)),
            "p[1].center_crop makes 32x32 = 1,024 pixels of every image, more than max_pixels; "
            "raise decode.max_pixels, which is 1,023, or resize to less",
        ),
        (
            (Decode(), RandomCrop(size=60_000, padding=60_000)),
            "p[1].random_crop makes 60000x60000 = 3,600,000,000 pixels of every image, more than max_pixels; "
            "raise decode.max_pixels, which is 179,000,000, or resize to less",
        ),
        (
            (Decode(), CenterCrop(size=9), Pad(padding=9_000)),
            "p[2].pad makes 18009x18009 = 324,324,081 pixels of every image, more than max_pixels; "
            "raise decode.max_pixels, which is 179,000,000, or resize to less",
        ),
        (
            (Decode(), WarpAffine(matrix=((1.0, 0.0, 0.0), (0.0, 1.0, 0.0)), size=(30_000, 6_000))),
            "p[1].warp_affine makes 30000x6000 = 180,000,000 pixels of every image, more than max_pixels; "
            "raise decode.max_pixels, which is 179,000,000, or resize to less",
        ),
        (
            (Decode(), CenterCrop(size=9), Torchvision(name="Pad", parameters=(("padding", 9_000),))),
            "p[2].torchvision makes 18009x18009 = 324,324,081 pixels of every image, more than max_pixels; "
            "raise decode.max_pixels, which is 179,000,000, or resize to less",
        ),
        (
            (Decode(), Resize(height=8, width=20), RandomCrop(size=9)),
            "p[2].random_crop crops 9x9 from an image of 8x20, which is smaller; crop less or resize to more",
        ),
        (
            (Decode(), Resize(shorter=8), RandomCrop(size=9)),
            "p[2].random_crop crops 9x9 from an image whose shorter side is 8, which is smaller; "
            "crop less or resize to more",
        ),
        (
            (Decode(color="gray"), CenterCrop(size=8), Normalize()),
            "p[2].normalize has 3 values of mean but gets 1 channel(s); give 1",
        ),
        (
            (Decode(), CenterCrop(size=8), GRAYSCALE, Normalize()),
            "p[3].normalize has 3 values of mean but gets 1 channel(s); give 1",
        ),
        (
            (Decode(color="bgr"), CenterCrop(size=8), ColorJitter()),
            "p[2].color_jitter weighs red, green and blue but gets bgr images; decode with color: rgb",
        ),
    ],
)
def test_the_first_stage_that_disagrees(stages: tuple[s.Stage, ...], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        trace(s.Pipeline("p", stages))
    assert str(caught.value) == text


@pytest.mark.parametrize("stage", [Flip(horizontal=0.5), RandomCrop(size=8), ColorJitter(hue=0.1), BLUR], ids=repr)
def test_random_stages_do_not_serve(stage: s.Stage) -> None:
    pipeline = s.Pipeline("serve", (Decode(), CenterCrop(size=8), stage))
    assert trace(pipeline)[-1].fixed
    with pytest.raises(ConfigError) as caught:
        trace(pipeline, serving=True)
    assert str(caught.value) == (
        f"serve[2].{stage.stage_name} is random and cannot serve; name the stages that pipelines.val uses"
    )


def test_stages_that_could_be_random_serve_where_they_are_not() -> None:
    stages = (Decode(), CenterCrop(size=8), Flip(horizontal=1.0), ColorJitter(brightness=(1.5, 1.5)), Normalize())
    assert trace(s.Pipeline("serve", stages), serving=True) == trace(s.Pipeline("serve", stages))


def test_the_place_is_named_as_asked() -> None:
    with pytest.raises(ConfigError) as caught:
        trace(s.Pipeline("p", (Decode(),)), at=("pipelines", "p", "stages"))
    assert str(caught.value).startswith("pipelines.p.stages[0].decode leaves images")
    (problem,) = caught.value.problems
    assert (problem.path, problem.code) == (("pipelines", "p", "stages", 0, "decode"), "stage.size")
