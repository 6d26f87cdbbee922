"""stage_entries: an entry of a list of stages to a stage, and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from gpuflow.config.schema import json_schema
from gpuflow.pipeline.parameters import OTHER_KEYS
from gpuflow.pipeline.stage import Stage
from gpuflow.stages import (
    STAGES,
    CenterCrop,
    ColorJitter,
    Cutmix,
    Decode,
    Flip,
    Mixup,
    Normalize,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    Torchvision,
)
from tests.config.files import fault, read, stages_of


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ("", "pipelines.a.stages must name at least one stage, got an empty list; start with decode: {}"),
        ("3", "pipelines.a.stages[0] must be one stage such as `resize: {shorter: 256}`, got 3"),
        ("null", "pipelines.a.stages[0] must be one stage such as `resize: {shorter: 256}`, got null"),
        ("{}", "pipelines.a.stages[0] must be one stage such as `resize: {shorter: 256}`, got {}"),
        (
            "{decode: {}, flip: {}}",
            "pipelines.a.stages[0] must be one stage such as `resize: {shorter: 256}`, got {'decode': {}, 'flip': {}}",
        ),
        ("decode, resie: {shorter: 8}", "pipelines.a.stages[1].resie is not a stage; did you mean 'resize'?"),
        ("decode, 5: {}", "pipelines.a.stages[1][5] is not a stage; known: " + ", ".join(sorted(STAGES))),
        ("decode, zzz", "pipelines.a.stages[1].zzz is not a stage; known: " + ", ".join(sorted(STAGES))),
        ("decode, resize: 8", "pipelines.a.stages[1].resize must be a mapping of parameters, got 8"),
        (
            "decode, resize: {shorte: 8}",
            "pipelines.a.stages[1].resize.shorte is not a key of resize; did you mean 'shorter'?",
        ),
        (
            "decode, flip: {1: 8}",
            "pipelines.a.stages[1].flip[1] is not a key of flip; known: horizontal, vertical",
        ),
        (
            "decode, center_crop",
            "pipelines.a.stages[1].center_crop needs the key 'size': an integer or [an integer, an integer]",
        ),
        (
            "decode, center_crop: {size: [1, 2, 3]}",
            "pipelines.a.stages[1].center_crop.size must be an integer or [an integer, an integer], got [1, 2, 3]",
        ),
        (
            "decode, center_crop: {size: 8.0}",
            "pipelines.a.stages[1].center_crop.size must be an integer or [an integer, an integer], got 8.0",
        ),
        ("decode, center_crop: {size: 0}", "pipelines.a.stages[1].center_crop.size must be >= 1, got 0"),
        *(
            (f"decode, {stage}: {{{key}: {value}}}", f"pipelines.a.stages[1].{stage}.{key} must be {rule}, got {value}")
            for stage, key, value, rule in (
                ("resize", "shorter", 10**23, "<= 65535"),
                ("center_crop", "size", 1_000_000, "<= 65535"),
                ("center_crop", "size", [9, 70_000], "<= 65535"),
                ("pad", "padding", 10**20, "<= 65535"),
                ("rand_augment", "magnitude", 10**40, "<= 999"),
                ("rand_augment", "bins", 10**9, "<= 1000"),
                ("rand_augment", "operations", 20_000, "<= 16"),
                ("trivial_augment", "bins", 10**9, "<= 1000"),
                ("gaussian_blur", "kernel_size", 100_001, "<= 1023"),
                ("rotate", "degrees", 1e200, "<= 3600"),
                ("rotate", "degrees", [-4000, 3], "within [-3600, 3600]"),
                ("brightness", "amount", 1e200, "<= 1000"),
                ("warp_affine", "matrix", [[1, 0, 0], [0, 1, 1e200]], "within [-1e+09, 1e+09]"),
            )
        ),
        (
            f"decode, resize: {{shorter: {10**400}}}",
            f"pipelines.a.stages[1].resize.shorter must be <= 65535, got 1{'0' * 56}...",
        ),
        (
            f"decode, torchvision: {{name: Resize, size: {10**400}}}",
            "pipelines.a.stages[1].torchvision Resize does not take uint8 ?x?x3 hwc: integer division result too large "
            "for a float",
        ),
        (
            "decode, resize: {height: 8}",
            "pipelines.a.stages[1].resize needs height and width, or shorter, or longer; give one of these",
        ),
        (
            "decode, resize: {shorter: 8, antialias: 1}",
            "pipelines.a.stages[1].resize.antialias must be true or false, got 1",
        ),
        (
            "decode, resize: {shorter: 8, interpolation: cubic}",
            "pipelines.a.stages[1].resize.interpolation must be one of nearest, bilinear, bicubic, got 'cubic'",
        ),
        ("decode: {color: rbg}", "pipelines.a.stages[0].decode.color must be one of rgb, bgr, gray, got 'rbg'"),
        (
            "decode, flip: {horizontal: 2}",
            "pipelines.a.stages[1].flip.horizontal must be a probability within [0, 1], got 2",
        ),
        ("decode, flip: {horizontal: yes}", "pipelines.a.stages[1].flip.horizontal must be a number, got true"),
        ("decode, flip: {horizontal: .nan}", "pipelines.a.stages[1].flip.horizontal must be a number, got nan"),
        (
            "decode, center_crop: {size: 8}, normalize: {mean: [a]}",
            "pipelines.a.stages[2].normalize.mean must be imagenet or a list, each a number, got ['a']",
        ),
        ("decode, torchvision", "pipelines.a.stages[1].torchvision needs the key 'name': text"),
        (
            "decode, torchvision: {name: Padd}",
            "pipelines.a.stages[1].torchvision.name must be a transform of one image in torchvision.transforms.v2, "
            "got 'Padd'; did you mean 'Pad'?",
        ),
        (
            "decode, torchvision: {name: Pad}",
            "pipelines.a.stages[1].torchvision Pad does not take these parameters: "
            "Pad.__init__() missing 1 required positional argument: 'padding'",
        ),
        (
            "decode, torchvision: {name: Pad, 3: 4, padding: 1}",
            "pipelines.a.stages[1].torchvision takes keys that are text, got 3",
        ),
        # stages against each other
        (
            "center_crop: {size: 8}",
            "pipelines.a.stages[0].center_crop takes an image but gets encoded bytes; start the list with "
            "decode: {color: rgb}",
        ),
        (
            "normalize, decode",
            "pipelines.a.stages[0].normalize takes an image but gets encoded bytes; start the list with decode: "
            "{color: rgb}",
        ),
        (
            "decode, center_crop: {size: 8}, decode",
            "pipelines.a.stages[2].decode must be the first stage and stand once; remove this one",
        ),
        (
            "decode, normalize, center_crop: {size: 8}",
            "pipelines.a.stages[2].center_crop takes uint8 pixels but gets float32; put center_crop before normalize",
        ),
        (
            "decode",
            "pipelines.a.stages[0].decode leaves images of varying size (uint8 ?x?x3 hwc), which no batch can hold; "
            "add center_crop, random_crop, random_resized_crop, letterbox or resize with height and width",
        ),
        (
            "decode, resize: {shorter: 8}, random_crop: {size: 9}",
            "pipelines.a.stages[2].random_crop crops 9x9 from an image whose shorter side is 8, which is smaller; "
            "crop less or resize to more",
        ),
        (
            "decode: {color: gray}, center_crop: {size: 8}, normalize",
            "pipelines.a.stages[2].normalize has 3 values of mean but gets 1 channel(s); give 1",
        ),
        (
            "decode, torchvision: {name: ToPILImage}",
            "pipelines.a.stages[1].torchvision ToPILImage does not take uint8 ?x?x3 hwc: the result is not one "
            "CHW image",
        ),
    ],
)
def test_stages(stages: str, expected: str) -> None:
    assert fault(stages_of(stages)) == f"x.yaml:2: {expected}"


# --- names of other libraries ---------------------------------------------------------------------------------------

HINTS = {
    **dict.fromkeys(("random_rotation", "RandomRotation", "rotation"), "rotate"),
    **dict.fromkeys(("random_affine", "RandomAffine", "ShiftScaleRotate"), "affine"),
    **dict.fromkeys(("random_horizontal_flip", "horizontal_flip", "HorizontalFlip", "RandomVerticalFlip"), "flip"),
    **dict.fromkeys(("random_erase", "CoarseDropout", "erasing"), "random_erasing"),
    **dict.fromkeys(("to_tensor", "ToTensor", "ConvertImageDtype"), "normalize"),
    **dict.fromkeys(("aug_mix", "AugMix"), "torchvision: {name: AugMix}"),
    **dict.fromkeys(("elastic_transform", "ElasticTransform"), "torchvision: {name: ElasticTransform}"),
    **dict.fromkeys(("gaussian_noise", "GaussianNoise"), "torchvision: {name: GaussianNoise}"),
    "CutMix": "cutmix",
    "MixUp": "mixup",
    "RandAugment": "rand_augment",
    "TrivialAugmentWide": "trivial_augment",
    "random_invert": "invert",
    "random_pad": "pad",
    "SmallestMaxSize": "resize",
    "colour_jitter": "color_jitter",
}


@pytest.mark.parametrize("name", HINTS)
def test_a_name_of_another_library_leads_to_its_stage(name: str) -> None:
    expected = f"x.yaml:2: pipelines.a.stages[1].{name} is not a stage; did you mean {HINTS[name]!r}?"
    assert fault(stages_of(f"decode, {name}: {{}}")) == expected


@pytest.mark.parametrize("name", ["random_zoom", "five_crops_of_it", "sanitize_bounding_boxes"])
def test_a_name_that_no_stage_is_like_gets_the_list(name: str) -> None:
    """Of which `random_` and endings that many names share are no part."""
    assert fault(stages_of(f"decode, {name}: {{}}")).endswith(" is not a stage; known: " + ", ".join(sorted(STAGES)))


def test_no_hint_names_a_transform_that_is_another_one() -> None:
    """For torchvision's names: the stage that the importer puts in its place, or the transform itself."""
    from gpuflow.migration.from_torchvision import _EQUAL
    from gpuflow.stages.torchvision import _NOT_OF_ONE_IMAGE, _transforms

    for name in sorted(_transforms() - _NOT_OF_ONE_IMAGE):
        hint = fault(stages_of(f"decode, {name}: {{}}")).partition("did you mean ")[2].strip("'?")
        if name in _EQUAL:
            assert hint in STAGES and hint != "torchvision", name
        else:
            assert hint in ("normalize", f"torchvision: {{name: {name}}}"), name


def test_other_names_and_keys_stand_for_one_stage_and_its_parameters() -> None:
    names = [other.lower() for stage in STAGES.values() for other in stage.other_names]
    assert len(set(names)) == len(names)
    assert not {name.replace("_", "") for name in STAGES} & set(names)
    for stage in STAGES.values():
        fields = {field.name for field in dataclasses.fields(stage)}
        assert set(stage.other_keys.values()) <= fields
        assert not set(stage.other_keys) & fields
    shared = {field.name for stage in STAGES.values() for field in dataclasses.fields(stage)}
    assert set(OTHER_KEYS.values()) <= shared


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("perspective: {p: 0.5}", "perspective.p is not a key of perspective; did you mean 'probability'?"),
        ("invert: {p: 0.5}", "invert.p is not a key of invert; did you mean 'probability'?"),
        ("flip: {p: 0.5}", "flip.p is not a key of flip; did you mean 'horizontal'?"),
        ("mixup: {mixup_alpha: 0.8}", "mixup.mixup_alpha is not a key of mixup; did you mean 'alpha'?"),
        ("mixup: {switch_prob: 0.8}", "mixup.switch_prob is not a key of mixup; did you mean 'switch_probability'?"),
        ("rand_augment: {num_ops: 2}", "rand_augment.num_ops is not a key of rand_augment; did you mean 'operations'?"),
        ("pad: {padding: 3, padding_mode: edge}", "pad.padding_mode is not a key of pad; did you mean 'border'?"),
        ("resize: {size: 3}", "resize.size is not a key of resize; did you mean 'shorter'?"),
        ("center_crop: {size: 3, p: 1}", "center_crop.p is not a key of center_crop; known: rounding, size"),
    ],
)
def test_a_key_of_another_library_leads_to_the_parameter(entry: str, expected: str) -> None:
    assert fault(stages_of(f"decode, {entry}")) == f"x.yaml:2: pipelines.a.stages[1].{expected}"


# --- any stage survives the way through YAML -------------------------------------------------------------------------

numbers = st.floats(0, 1).map(lambda value: round(value, 4))
pairs = st.tuples(numbers, numbers).map(lambda pair: (min(pair), max(pair)))
sizes = st.one_of(st.integers(1, 2000), st.tuples(st.integers(1, 2000), st.integers(1, 2000)))
filters = {"interpolation": st.sampled_from(["nearest", "bilinear", "bicubic"]), "antialias": st.booleans()}
jitters = st.one_of(numbers, pairs)
one_more = st.lists(st.floats(0.01, 2), min_size=3, max_size=3).map(tuple)
mixing: dict[str, Any] = {
    "probability": numbers,
    "mode": st.sampled_from(["batch", "pair", "elem"]),
    "label_smoothing": numbers,
}
STRATEGIES: dict[str, st.SearchStrategy[Stage]] = {
    **{name: st.sampled_from(stage.examples()) for name, stage in STAGES.items()},
    "decode": st.builds(
        Decode,
        color=st.sampled_from(["rgb", "bgr", "gray"]),
        backend=st.sampled_from(["auto", "cpu", "gpu"]),
        cpu_share=numbers,
        orientation=st.sampled_from(["ignore", "apply"]),
        max_pixels=st.integers(1, 10**12),
    ),
    "resize": st.one_of(
        st.builds(Resize, height=st.integers(1, 999), width=st.integers(1, 999), **filters),
        st.builds(Resize, shorter=st.integers(1, 999), **filters),
        st.builds(Resize, longer=st.integers(1, 999), **filters),
    ),
    "center_crop": st.builds(CenterCrop, size=sizes),
    "random_crop": st.builds(RandomCrop, size=sizes, padding=st.integers(0, 50)),
    "random_resized_crop": st.builds(
        RandomResizedCrop,
        size=sizes,
        scale=pairs.map(lambda pair: (max(pair[0], 0.01), max(pair[1], 0.01))),
        ratio=pairs.map(lambda pair: (pair[0] + 0.1, pair[1] * 3 + 0.1)),
        **filters,
    ),
    "flip": st.builds(Flip, horizontal=numbers, vertical=numbers),
    "color_jitter": st.builds(
        ColorJitter,
        brightness=jitters,
        contrast=jitters,
        saturation=jitters,
        hue=st.one_of(numbers.map(lambda x: x / 2), pairs.map(lambda pair: (pair[0] - 0.5, pair[1] - 0.5))),
    ),
    "normalize": st.builds(
        Normalize,
        mean=st.one_of(st.just("imagenet"), one_more),
        std=st.one_of(st.just("imagenet"), one_more),
        dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
        layout=st.sampled_from(["nchw", "nhwc"]),
    ),
    "torchvision": st.one_of(
        st.builds(
            lambda degrees, fill: Torchvision(name="RandomRotation", parameters=(("degrees", degrees), ("fill", fill))),
            st.tuples(st.floats(-90, 0), st.floats(0, 90)),
            st.integers(0, 255),
        ),
        st.just(Torchvision(name="AutoAugment")),
    ),
    "mixup": st.builds(
        Mixup, alpha=st.floats(0.01, 5), cutmix_alpha=numbers, switch_probability=numbers, correct_lambda=..., **mixing
    ),
    "cutmix": st.builds(Cutmix, alpha=st.floats(0.01, 5), correct_lambda=..., **mixing),
}


VALIDATOR = Draft202012Validator(json_schema(STAGES))


def test_the_strategies_are_of_stages_of_the_table() -> None:
    assert set(STRATEGIES) == set(STAGES)


def dump(value: Any) -> Any:
    """What YAML says for a value: lists for tuples."""
    return [dump(item) for item in value] if isinstance(value, tuple) else value


def as_entry(stage: Stage) -> dict[str, Any]:
    """A stage as an entry of a YAML list."""
    values = {field.name: dump(getattr(stage, field.name)) for field in dataclasses.fields(stage)}
    if stage.open_field is not None:
        values |= dict(values.pop(stage.open_field))
    return {stage.stage_name: {key: value for key, value in values.items() if value is not None}}


def around(stage: Stage) -> Iterator[Stage]:
    """A pipeline that checks, with the stage in it."""
    if stage.stage_name != "decode":
        yield Decode()
    if stage.stage_name in ("normalize", "mixup", "cutmix"):
        yield CenterCrop(size=8)
    if stage.stage_name == "mixup":
        yield Normalize()
    yield stage
    if stage.stage_name not in ("normalize", "center_crop", "random_crop", "mixup", "cutmix"):
        yield Resize(height=1, width=1)  # within any decode.max_pixels


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_any_stage_reads_back_equal_from_yaml(name: str) -> None:
    @settings(max_examples=30)
    @given(STRATEGIES[name], st.booleans())
    def check(stage: Stage, flow: bool) -> None:
        stages = tuple(around(stage))
        document = {"source": {"folder": "x"}, "pipelines": {"p": {"stages": [as_entry(stage) for stage in stages]}}}
        pipeline = read(yaml.safe_dump(document, default_flow_style=flow)).program("p").pipeline
        assert pipeline.stages == stages
        VALIDATOR.validate(json.loads(json.dumps(document)))
        assert eval(repr(pipeline.stages[stages.index(stage)]), dict(STAGES)) == stage
        by_override = [
            f"pipelines.p.stages.{i}={yaml.safe_dump(as_entry(s), default_flow_style=True)}"
            for i, s in enumerate(stages)
        ]
        blank = yaml.safe_dump({**document, "pipelines": {"p": {"stages": ["decode"] * len(stages)}}})
        again = read(blank, *by_override).program("p").pipeline
        assert again == pipeline
        assert again.fingerprint == pipeline.fingerprint

    check()
