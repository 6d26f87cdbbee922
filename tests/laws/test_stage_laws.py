"""Laws of every stage: alone, in pipelines, and in folded programs."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from gpuflow.errors import ConfigError
from gpuflow.execute.cpu.native_chunk import run_pointwise
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import OpaqueStep, WarpStep
from gpuflow.stages import (
    STAGES,
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
from tests.images import encode, jpeg, photo, png
from tests.packages.toning.toning import MaskBlue
from tests.running import RGB, by_torchvision, decoded, images, keys_of, levels_apart, program_of, run, size_of


def torchvision(name: str, **parameters: Any) -> Torchvision:
    return Torchvision(name=name, parameters=tuple(sorted(parameters.items())))


ALL_EXAMPLES = tuple(example for stage in STAGES.values() for example in stage.examples())
EXAMPLES = tuple(example for example in ALL_EXAMPLES if not isinstance(example, s.Mixing))
"""Of stages that work on one image; the laws of mixing stages are in test_mixing_laws.py."""

SAMPLES = (
    jpeg(photo(64, 97), "4:2:0"),
    jpeg(photo(83, 61), "4:4:4"),
    jpeg(photo(50, 50)[..., 0]),
    png(photo(45, 131)),
    encode(photo(70, 52), "WEBP", lossless=True),
    encode(Image.fromarray(photo(48, 49)).convert("CMYK"), "JPEG"),
    jpeg(photo(90, 66), progressive=True),
)
KEYS = keys_of(len(SAMPLES), seed=3, epoch=2, first=10**10)

every_example = pytest.mark.parametrize("stage", EXAMPLES, ids=repr)
every_value = pytest.mark.parametrize("stage", ALL_EXAMPLES, ids=repr)
every_stage = pytest.mark.parametrize("name", STAGES)


def pipeline_around(stage: s.Stage) -> tuple[s.Stage, ...]:
    """A short pipeline with this stage, whose results have one size."""
    if isinstance(stage, s.Decoder):
        return (stage, CenterCrop(size=60))
    try:
        return program_of(Decode(), stage).pipeline.stages
    except ConfigError:  # images of varying size
        if stage.output(RGB).dtype == "uint8":
            return (Decode(), stage, CenterCrop(size=18))
        return (Decode(), CenterCrop(size=(18, 21)), stage)


def test_every_stage_has_examples_of_its_own() -> None:
    assert all({type(stage) for stage in one.examples()} == {one} for one in STAGES.values())


@every_stage
def test_a_stage_is_named_as_the_table_says_and_is_of_one_kind(name: str) -> None:
    assert STAGES[name].stage_name == name
    kinds = (s.Decoder, s.Geometry, s.Pointwise, s.Local, s.Policy, s.Opaque, s.Mixing)
    assert [issubclass(STAGES[name], kind) for kind in kinds].count(True) == 1
    derived = [one for one in STAGES[name].__subclasses__() if not one.__module__.startswith("tests.")]
    assert not derived, "stages are final"


# --- 1: values -------------------------------------------------------------------------------------------------------


@every_value
def test_a_stage_is_a_frozen_value(stage: s.Stage) -> None:
    twin = type(stage)(**{field.name: getattr(stage, field.name) for field in dataclasses.fields(stage)})
    assert twin == stage
    assert twin is not stage
    assert hash(twin) == hash(stage)
    assert {twin: 1}[stage] == 1
    assert pickle.loads(pickle.dumps(stage)) == stage
    for field in dataclasses.fields(stage):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(stage, field.name, getattr(stage, field.name))
    assert [twin == other for other in ALL_EXAMPLES].count(True) == 1


@every_value
def test_repr_reads_as_the_yaml_does_and_evaluates(stage: s.Stage) -> None:
    changed = [f.name for f in dataclasses.fields(stage) if getattr(stage, f.name) != f.default]
    inside = ", ".join(f"{name}={getattr(stage, name)!r}" for name in changed)
    assert repr(stage) == f"{stage.stage_name}({inside})"
    assert eval(repr(stage), dict(STAGES)) == stage


@every_value
def test_parameters_are_keywords(stage: s.Stage) -> None:
    with pytest.raises(TypeError, match="positional argument"):
        type(stage)(*[1 for _ in dataclasses.fields(stage)])


@every_stage
def test_fingerprint_changes_with_every_parameter_that_decides_what_comes_out(name: str) -> None:
    def fingerprint(stage: s.Stage) -> str:
        return s.Pipeline("p", (stage,)).fingerprint

    examples = STAGES[name].examples()
    for field in dataclasses.fields(STAGES[name]):
        pairs = []
        for stage, other in itertools.permutations(examples, 2):
            value = getattr(other, field.name)
            if value != getattr(stage, field.name):
                with suppress(ConfigError):  # the value does not go with the other parameters
                    pairs.append((stage, dataclasses.replace(stage, **{field.name: value})))
        assert pairs, f"examples of {name} have no two values of {field.name} that can be exchanged"
        same = field.name in STAGES[name].where_fields
        assert all((fingerprint(a) == fingerprint(b)) == same for a, b in pairs), field.name


def test_fingerprint_tells_shorter_from_longer() -> None:
    prints = {s.Pipeline("p", (stage,)).fingerprint for stage in ALL_EXAMPLES}
    assert len(prints) == len(ALL_EXAMPLES)
    assert s.Pipeline("p", (Resize(shorter=9),)).fingerprint != s.Pipeline("p", (Resize(longer=9),)).fingerprint


# --- 2: the declared spec is the truth -------------------------------------------------------------------------------


@every_example
def test_the_declared_spec_is_the_truth(stage: s.Stage) -> None:
    stages = pipeline_around(stage)
    program = program_of(*stages)
    batch = images(program, SAMPLES, KEYS)
    height, width, channels = program.result.shape
    assert batch.shape == (len(SAMPLES), channels, height, width)
    assert str(batch.dtype) == f"torch.{program.result.dtype}"
    planes = program.result.layout == "nchw"
    assert batch.is_contiguous(memory_format=torch.contiguous_format if planes else torch.channels_last)
    for i, after in enumerate(program.specs[1:], start=1):
        if after.fixed:
            assert images(program_of(*stages[:i]), SAMPLES, KEYS).shape[1:] == (
                after.shape[2],
                after.shape[0],
                after.shape[1],
            )


@every_value
def test_encoded_bytes_and_floats_are_refused_or_taken_in_words(stage: s.Stage) -> None:
    for spec in (s.ENCODED, s.ImageSpec(shape=(20, 20, 3), dtype="float32", layout="nchw")):
        try:
            after = stage.output(spec)
        except ValueError as error:
            text = str(error)
            assert text and "\n" not in text
        else:
            assert isinstance(after, s.ImageSpec)


# --- 3: same keys, same output ---------------------------------------------------------------------------------------


@every_example
@pytest.mark.parametrize("chunk", [1, 3])
def test_same_keys_give_the_same_output_in_any_grouping(stage: s.Stage, chunk: int) -> None:
    program = program_of(*pipeline_around(stage))
    whole, faults = run(program, SAMPLES, KEYS)
    assert faults == [None] * len(SAMPLES)
    assert torch.equal(run(program, SAMPLES, KEYS, chunk)[0], whole)


@every_example
def test_a_sample_does_not_depend_on_its_neighbours(stage: s.Stage) -> None:
    program = program_of(*pipeline_around(stage))
    whole = images(program, SAMPLES, KEYS)
    backwards = KEYS.take(np.arange(len(SAMPLES))[::-1])
    assert torch.equal(images(program, SAMPLES[::-1], backwards).flip(0), whole)
    broken = [*SAMPLES[:2], b"not an image", *SAMPLES[3:]]
    batch, faults = run(program, broken, KEYS)
    assert [fault is None for fault in faults] == [i != 2 for i in range(len(SAMPLES))]
    assert all(torch.equal(batch[i], whole[i]) for i in range(len(SAMPLES)) if i != 2)


@pytest.mark.parametrize(
    "stage",
    [
        *(example for example in EXAMPLES if isinstance(example, s.Opaque) and not example.random),
        torchvision("CenterCrop", size=20),
        torchvision("Resize", size=(20, 31), interpolation="bicubic"),
        MaskBlue(),
    ],
    ids=repr,
)
def test_a_batch_gives_each_image_what_it_gives_alone(stage: s.Opaque) -> None:
    batch = torch.stack([torch.from_numpy(photo(40, 50, seed=i) // (i + 1)).permute(2, 0, 1) for i in range(3)])
    found = stage.apply_batch(batch.clone(), np.arange(3))
    assert torch.equal(found, torch.stack([stage.apply(image, 0) for image in batch]))


@every_example
def test_random_says_whether_keys_matter(stage: s.Stage) -> None:
    program = program_of(*pipeline_around(stage))
    same = [SAMPLES[0]] * 24
    batch = images(program, same, keys_of(len(same), seed=5))
    assert (len({image.contiguous().view(torch.uint8).numpy().tobytes() for image in batch}) > 1) == stage.random
    other_epoch = images(program, same, keys_of(len(same), seed=5, epoch=1))
    other_seed = images(program, same, keys_of(len(same), seed=6))
    assert torch.equal(batch, other_epoch) == torch.equal(batch, other_seed) == (not stage.random)


NEUTRAL: tuple[s.Stage, ...] = (Flip(), torchvision("RandomHorizontalFlip", p=0.0), torchvision("RandomInvert", p=0.0))
"""Stages that draw random numbers but change nothing."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "neutral"),
    [(stage, neutral) for stage in EXAMPLES for neutral in NEUTRAL if type(stage) is not type(neutral)],
    ids=repr,
)
def test_an_inserted_stage_changes_no_other_stages_draws(stage: s.Stage, neutral: s.Stage) -> None:
    """Where it parts a bilinear warp from a crop, a place's last bit in float32 may round a level otherwise."""
    stages = pipeline_around(stage)
    program = program_of(*stages)
    expected = images(program, SAMPLES, KEYS)
    places_round = any(isinstance(one, WarpStep) and one.lookup.interpolation == "bilinear" for one in program.steps)
    for at in range(1, len(stages) + 1):
        if program.specs[at].dtype == "uint8":
            found = images(program_of(*stages[:at], neutral, *stages[at:]), SAMPLES, KEYS)
            if places_round:
                apart = (found.int() - expected.int()).abs()
                assert apart.max() <= 1 and apart.count_nonzero() < 0.01 * apart.numel()
            else:
                assert torch.equal(found, expected)


# --- 4: torchvision is the reference ---------------------------------------------------------------------------------


def has_torchvision_form(stage: s.Stage) -> bool:
    try:
        return stage.torchvision() is not None
    except NotImplementedError:
        return False


@pytest.mark.parametrize(
    "stage", [stage for stage in EXAMPLES if not stage.random and has_torchvision_form(stage)], ids=repr
)
def test_a_deterministic_stage_equals_its_torchvision_transform(stage: s.Stage) -> None:
    """Bit for bit, and a warp within its tolerance."""
    most = stage.tolerance if isinstance(stage, s.Geometry) and stage.warps is not None else 0
    for pixels in (photo(64, 97), photo(61, 53), photo(40, 40), photo(1, 1), photo(7, 130)):
        data = png(pixels)
        try:
            expected = stage.torchvision()(decoded(data))
        except (RuntimeError, IndexError):  # the image is too small for torchvision
            assert min(pixels.shape[:2]) < 8
            continue
        height, width = expected.shape[1:]
        sized = CenterCrop(size=(height, width)) if stage.output(RGB).dtype == "uint8" else None
        around = (stage, sized) if sized else (CenterCrop(size=pixels.shape[:2]), stage)
        (result,) = images(program_of(Decode(), *around), [data])
        assert result.dtype == expected.dtype
        assert torch.equal(result, expected) or levels_apart(result, expected) <= most


# --- 5: folding ------------------------------------------------------------------------------------------------------

sides = st.integers(1, 48)
filters = st.fixed_dictionaries(
    {"interpolation": st.sampled_from(["nearest", "bilinear", "bicubic"]), "antialias": st.booleans()}
)
chances = st.sampled_from([0.0, 0.5, 1.0])
geometry: st.SearchStrategy[s.Geometry] = st.one_of(
    st.builds(lambda h, w, f: Resize(height=h, width=w, **f), sides, sides, filters),
    st.builds(lambda n, f: Resize(shorter=n, **f), st.integers(8, 48), filters),
    st.builds(lambda n, f: Resize(longer=n, **f), st.integers(8, 48), filters),
    st.builds(lambda h, w: CenterCrop(size=(h, w)), sides, sides),
    st.builds(lambda h, w, p: RandomCrop(size=(h, w), padding=p), sides, sides, st.sampled_from([0, 0, 3, 60])),
    st.builds(
        lambda h, w, fill: RandomCrop(size=(h, w), padding=(0, 3, 1, 9), pad_if_needed=True, fill=fill),
        sides,
        sides,
        st.sampled_from([0, 114]),
    ),
    st.builds(lambda h, w, f: RandomResizedCrop(size=(h, w), **f), sides, sides, filters),
    st.builds(lambda h, v: Flip(horizontal=h, vertical=v), chances, chances),
)
SOURCES = tuple(png(photo(*size)) for size in ((40, 40), (37, 61), (64, 23), (9, 90), (1, 1), (2, 3)))


def one_by_one(pipeline: s.Pipeline, data: bytes, keys: s.Keys) -> torch.Tensor | None:
    """Runs each stage's torchvision form in order on the whole image; None if a crop is larger than its image.

    Pointwise and opaque stages run their reference form, which other laws compare with torchvision's.
    """
    image = decoded(data)
    for stage, turn in zip(pipeline.stages[1:], pipeline.occurrences()[1:], strict=True):
        if isinstance(stage, s.Pointwise):
            pixels = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
            coefficients = stage.draw(keys.stage(stage.stage_name, turn))
            operations = stage.operations(coefficients, *size_of(image))
            assert operations is not None
            image = torch.from_numpy(run_pointwise(pixels, operations, 0, None, planes=False))
            image = image.permute(2, 0, 1)
            continue
        if isinstance(stage, s.Opaque):
            step = OpaqueStep(stage, turn, RGB, RGB, 10**9)
            image = stage.apply(image, int(step.draw(keys)[0]))
            continue
        assert isinstance(stage, s.Geometry)
        if isinstance(stage, RandomCrop) and not stage.pad_if_needed:
            height, width = stage.size if isinstance(stage.size, tuple) else (stage.size, stage.size)
            assert isinstance(stage.padding, int)
            room = 2 * stage.padding
            if height > image.shape[1] + room or width > image.shape[2] + room:
                return None
        image = by_torchvision(stage, image, keys.stage(stage.stage_name, turn))
    return image


def pairs(
    sources: Sequence[bytes], stages: Sequence[s.Stage], seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each source's image from a folded program and from one stage after the other. Both refuse the same sources."""
    program = program_of(Decode(), *stages)
    keys = keys_of(len(sources), seed=seed)
    batch, faults = run(program, sources, keys)
    for i, data in enumerate(sources):
        expected = one_by_one(program.pipeline, data, keys[i])
        assert (faults[i] is None) == (expected is not None)
        if expected is not None:
            yield batch[i], expected


def check_folding(stages: Sequence[s.Stage], seed: int) -> None:
    for image, expected in pairs(SOURCES, stages, seed):
        assert levels_apart(image, expected) <= 1


REGIONS = tuple(
    jpeg(photo(*size), kind)
    for size, kind in [((180, 240), "4:2:0"), ((250, 170), "4:2:2"), ((200, 200), "4:4:4"), ((161, 333), "4:2:0")]
)
"""JPEGs of which a crop is decoded without the rest, where libjpeg-turbo is installed."""
others: st.SearchStrategy[s.Stage] = st.sampled_from(
    [
        ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4),
        ColorJitter(brightness=(1.3, 1.3)),
        torchvision("GaussianBlur", kernel_size=3),
        torchvision("RandomHorizontalFlip", p=0.5),
        torchvision("RandomPosterize", bits=2),
    ]
)
crops: st.SearchStrategy[s.Stage] = st.one_of(
    st.builds(lambda h, w, f: RandomResizedCrop(size=(h, w), **f), sides, sides, filters),
    st.builds(lambda h, w: RandomCrop(size=(h, w)), sides, sides),
    st.builds(lambda h, w: CenterCrop(size=(h, w)), sides, sides),
)


def check_regions(stages: Sequence[s.Stage], seed: int) -> None:
    """Each JPEG as one stage after the other gives it, from a region of it and from the whole.

    Where pixels of two ways may differ by one level, a posterized or blurred or brightened image differs by more, so
    then the images must agree on average.
    """
    exact = not any(isinstance(stage, ColorJitter | Torchvision) for stage in stages)
    for image, expected in pairs(REGIONS, stages, seed):
        apart = (image.to(torch.int16) - expected.to(torch.int16)).abs().float()
        assert apart.shape == image.shape
        assert apart.max() <= 1 if exact else apart.mean() <= 2


@pytest.mark.slow
@settings(max_examples=120)
@given(first=crops, stages=st.lists(st.one_of(geometry, others), max_size=4), seed=st.integers(0, 2**32))
def test_folded_stages_of_every_kind_equal_one_after_the_other_on_regions_of_jpegs(
    first: s.Stage, stages: list[s.Stage], seed: int
) -> None:
    stages = [first, *stages]
    stages = stages if checks(stages) else [*stages, Resize(height=16, width=17)]
    assume(checks(stages))
    check_regions(stages, seed)


@pytest.mark.parametrize(
    "stages",
    [
        (RandomResizedCrop(size=24), ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2), Flip(horizontal=0.5)),
        (RandomCrop(size=60), torchvision("GaussianBlur", kernel_size=3), RandomCrop(size=40), Flip(vertical=0.5)),
        (CenterCrop(size=50), ColorJitter(saturation=0.4), RandomResizedCrop(size=30), Flip(horizontal=1.0)),
        (RandomCrop(size=80), Resize(height=30, width=40), Resize(shorter=20), CenterCrop(size=18)),
    ],
    ids=lambda stages: " -> ".join(map(repr, stages)),
)
def test_folding_on_regions_of(stages: tuple[s.Stage, ...]) -> None:
    for seed in range(5):
        check_regions(stages, seed)


def checks(stages: Sequence[s.Stage]) -> bool:
    try:
        program_of(Decode(), *stages)
    except ConfigError:
        return False
    return True


@settings(max_examples=150)
@given(stages=st.lists(geometry, min_size=1, max_size=5), seed=st.integers(0, 2**32))
def test_folded_geometry_equals_one_stage_after_the_other(stages: list[s.Stage], seed: int) -> None:
    stages = stages if checks(stages) else [*stages, Resize(height=16, width=17)]
    assume(checks(stages))
    check_folding(stages, seed)


@pytest.mark.parametrize(
    "stages",
    [
        (CenterCrop(size=20), Resize(height=11, width=13)),
        (Resize(height=33, width=41), CenterCrop(size=20)),
        (RandomCrop(size=20, padding=20), Resize(height=11, width=13), RandomCrop(size=9)),
        (Flip(horizontal=1.0), Resize(height=7, width=5, interpolation="nearest")),
        (Resize(height=30, width=20), Flip(horizontal=1.0, vertical=0.5), RandomCrop(size=(9, 12)), Flip(vertical=0.5)),
        (Resize(height=40, width=44), Resize(height=30, width=20), RandomCrop(size=(9, 12)), Resize(height=6, width=6)),
        (Resize(height=40, width=44), CenterCrop(size=20), RandomCrop(size=20, padding=6)),
        (CenterCrop(size=20), RandomCrop(size=20, padding=6), RandomCrop(size=24, padding=4)),
        (RandomCrop(size=4, padding=60), Flip(horizontal=0.5)),
        (RandomResizedCrop(size=24), RandomCrop(size=30, padding=3), RandomResizedCrop(size=24), Flip(horizontal=0.5)),
        (RandomCrop(size=1), Rotate(degrees=30), Resize(height=11, width=13)),
        (Flip(horizontal=0.5, vertical=0.5), Rotate(degrees=30), CenterCrop(size=20), Flip(horizontal=0.5)),
        (CenterCrop(size=30), Flip(vertical=0.5), Rotate(degrees=90, fill=9), RandomCrop(size=30, padding=6)),
        (Resize(height=30, width=40), CenterCrop(size=20), Rotate(degrees=50, border="reflect"), RandomCrop(size=9)),
        (Rotate(degrees=50), Resize(height=9, width=12), Rotate(degrees=20, border="edge"), Flip(vertical=1.0)),
        (
            Flip(vertical=0.5),
            Rotate(degrees=50, expand=True),
            RandomCrop(size=30, pad_if_needed=True),
            Flip(vertical=0.5),
        ),
        (Rotate(degrees=50, expand=True, fill=9), Resize(shorter=20, max_size=30), CenterCrop(size=25)),
        (RandomCrop(size=40, padding=3, pad_if_needed=True, border="edge"), Rotate(degrees=20), RandomCrop(size=9)),
    ],
    ids=lambda stages: " -> ".join(map(repr, stages)),
)
def test_folding_of(stages: tuple[s.Stage, ...]) -> None:
    for seed in range(20):
        check_folding(stages, seed)


def test_one_resampling_for_crop_resize_crop_and_flip() -> None:
    stages = (RandomCrop(size=30), Resize(height=20, width=20), CenterCrop(size=10), Flip(horizontal=0.5), Normalize())
    assert [type(step).__name__ for step in program_of(Decode(), *stages).steps] == ["ResamplingStep", "PointwiseStep"]
    again = (*stages[:4], Resize(height=5, width=5))
    assert [type(step).__name__ for step in program_of(Decode(), *again).steps] == ["ResamplingStep", "ResamplingStep"]


def test_a_colour_stage_between_crops_takes_part_in_no_fold() -> None:
    jitter = ColorJitter(brightness=0.5)
    stages = (Decode(), Resize(height=30, width=30), jitter, CenterCrop(size=20), Normalize())
    program = program_of(*stages)
    assert [type(step).__name__ for step in program.steps] == [
        "ResamplingStep",
        "PointwiseStep",
        "ResamplingStep",
        "PointwiseStep",
    ]
    batch = images(program, SAMPLES, KEYS)
    before = images(program_of(*stages[:3]), SAMPLES, KEYS)
    assert torch.equal(batch, torch.stack([Normalize().torchvision()(image[:, 5:25, 5:25]) for image in before]))
