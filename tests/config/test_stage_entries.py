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
from tests.config.files import fault, problems, read, stages_of


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ("", "pipelines.a.stages stage.order"),
        ("3", "pipelines.a.stages[0] config.type, got 3"),
        ("null", "pipelines.a.stages[0] config.type, got null"),
        ("{}", "pipelines.a.stages[0] config.type, got {}"),
        ("{decode: {}, flip: {}}", "pipelines.a.stages[0] config.type, got {'decode': {}, 'flip': {}}"),
        ("decode, resie: {shorter: 8}", "pipelines.a.stages[1].resie stage.unknown"),
        ("decode, 5: {}", "pipelines.a.stages[1][5] stage.unknown"),
        ("decode, zzz", "pipelines.a.stages[1].zzz stage.unknown"),
        ("decode, resize: 8", "pipelines.a.stages[1].resize config.type, got 8"),
        ("decode, resize: {shorte: 8}", "pipelines.a.stages[1].resize.shorte config.unknown_key"),
        ("decode, flip: {1: 8}", "pipelines.a.stages[1].flip[1] config.unknown_key"),
        ("decode, center_crop", "pipelines.a.stages[1].center_crop config.missing_key"),
        ("decode, center_crop: {size: [1, 2, 3]}", "pipelines.a.stages[1].center_crop.size config.type, got [1, 2, 3]"),
        ("decode, center_crop: {size: 8.0}", "pipelines.a.stages[1].center_crop.size config.type, got 8.0"),
        ("decode, center_crop: {size: 0}", "pipelines.a.stages[1].center_crop.size config.range, got 0"),
        *(
            (f"decode, {stage}: {{{key}: {value}}}", f"pipelines.a.stages[1].{stage}.{key} config.range, got {value}")
            for stage, key, value in (
                ("resize", "shorter", 10**23),
                ("center_crop", "size", 1_000_000),
                ("center_crop", "size", [9, 70_000]),
                ("pad", "padding", 10**20),
                ("rand_augment", "magnitude", 10**40),
                ("rand_augment", "bins", 10**9),
                ("rand_augment", "operations", 20_000),
                ("trivial_augment", "bins", 10**9),
                ("gaussian_blur", "kernel_size", 100_001),
                ("rotate", "degrees", 1e200),
                ("rotate", "degrees", [-4000, 3]),
                ("brightness", "amount", 1e200),
                ("warp_affine", "matrix", [[1, 0, 0], [0, 1, 1e200]]),
            )
        ),
        (
            f"decode, resize: {{shorter: {10**400}}}",
            f"pipelines.a.stages[1].resize.shorter config.range, got 1{'0' * 56}...",
        ),
        (f"decode, torchvision: {{name: Resize, size: {10**400}}}", "pipelines.a.stages[1].torchvision stage.order"),
        ("decode, resize: {height: 8}", "pipelines.a.stages[1].resize config.conflict"),
        ("decode, resize: {shorter: 8, antialias: 1}", "pipelines.a.stages[1].resize.antialias config.type, got 1"),
        (
            "decode, resize: {shorter: 8, interpolation: cubic}",
            "pipelines.a.stages[1].resize.interpolation config.type, got 'cubic'",
        ),
        ("decode: {color: rbg}", "pipelines.a.stages[0].decode.color config.type, got 'rbg'"),
        ("decode, flip: {horizontal: 2}", "pipelines.a.stages[1].flip.horizontal config.range, got 2"),
        ("decode, flip: {horizontal: yes}", "pipelines.a.stages[1].flip.horizontal config.type, got true"),
        ("decode, flip: {horizontal: .nan}", "pipelines.a.stages[1].flip.horizontal config.type, got nan"),
        (
            "decode, center_crop: {size: 8}, normalize: {mean: [a]}",
            "pipelines.a.stages[2].normalize.mean config.type, got ['a']",
        ),
        ("decode, torchvision", "pipelines.a.stages[1].torchvision config.missing_key"),
        ("decode, torchvision: {name: Padd}", "pipelines.a.stages[1].torchvision.name config.range, got 'Padd'"),
        ("decode, torchvision: {name: Pad}", "pipelines.a.stages[1].torchvision config.rule"),
        (
            "decode, torchvision: {name: Pad, 3: 4, padding: 1}",
            "pipelines.a.stages[1].torchvision config.unknown_key, got 3",
        ),
        # stages against each other
        ("center_crop: {size: 8}", "pipelines.a.stages[0].center_crop stage.order"),
        ("normalize, decode", "pipelines.a.stages[0].normalize stage.order"),
        ("decode, center_crop: {size: 8}, decode", "pipelines.a.stages[2].decode stage.order"),
        ("decode, normalize, center_crop: {size: 8}", "pipelines.a.stages[2].center_crop stage.order"),
        ("decode", "pipelines.a.stages[0].decode stage.size"),
        ("decode, resize: {shorter: 8}, random_crop: {size: 9}", "pipelines.a.stages[2].random_crop stage.order"),
        ("decode: {color: gray}, center_crop: {size: 8}, normalize", "pipelines.a.stages[2].normalize stage.order"),
        ("decode, torchvision: {name: ToPILImage}", "pipelines.a.stages[1].torchvision stage.order"),
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
    "RandomIoUCrop": "iou_crop",
    "RandomZoomOut": "zoom_out",
    "ScaleJitter": "scale_jitter",
}


@pytest.mark.parametrize("name", HINTS)
def test_a_name_of_another_library_leads_to_its_stage(name: str) -> None:
    (problem,) = problems(stages_of(f"decode, {name}: {{}}"))
    assert (problem.path[-1], problem.code) == (name, "stage.unknown")
    assert problem.action.partition(repr(HINTS[name]))[1]


@pytest.mark.parametrize("name", ["random_whirl", "five_crops_of_it", "sanitize_bounding_boxes"])
def test_a_name_that_no_stage_is_like_gets_the_list(name: str) -> None:
    """Of which `random_` and endings that many names share are no part."""
    (problem,) = problems(stages_of(f"decode, {name}: {{}}"))
    assert problem.action.endswith(", ".join(sorted(STAGES)))


def test_no_hint_names_a_transform_that_is_another_one() -> None:
    """For torchvision's names: the stage that the importer puts in its place, or the transform itself."""
    from gpuflow.migration.from_torchvision import _OF_TORCHVISION
    from gpuflow.stages.torchvision import _NOT_OF_ONE_IMAGE, _transforms

    for name in sorted(_transforms() - _NOT_OF_ONE_IMAGE):
        (problem,) = problems(stages_of(f"decode, {name}: {{}}"))
        hint = problem.action.partition("'")[2].rpartition("'")[0]
        if name in _OF_TORCHVISION:
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
        ("perspective: {p: 0.5}", "perspective.p config.unknown_key"),
        ("invert: {p: 0.5}", "invert.p config.unknown_key"),
        ("flip: {p: 0.5}", "flip.p config.unknown_key"),
        ("mixup: {mixup_alpha: 0.8}", "mixup.mixup_alpha config.unknown_key"),
        ("mixup: {switch_prob: 0.8}", "mixup.switch_prob config.unknown_key"),
        ("rand_augment: {num_ops: 2}", "rand_augment.num_ops config.unknown_key"),
        ("pad: {padding: 3, padding_mode: edge}", "pad.padding_mode config.unknown_key"),
        ("resize: {size: 3}", "resize.size config.unknown_key"),
        ("center_crop: {size: 3, p: 1}", "center_crop.p config.unknown_key"),
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
        source: dict[str, Any] = {"folder": "x"}
        if stage.record_values:
            stage = dataclasses.replace(stage, boxes="objects")  # type: ignore[call-arg]
            source = {"listing": "x.jsonl", "fields": {"objects": {"type": "boxes"}}}
        stages = tuple(around(stage))
        document = {"source": source, "pipelines": {"p": {"stages": [as_entry(stage) for stage in stages]}}}
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
