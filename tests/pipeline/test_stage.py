"""The values of pipelines: specs, keys and their random numbers, and pipelines."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.pipeline import stage as s
from gpuflow.stages import CenterCrop, Decode, Flip, Normalize, Resize
from tests.random_reference import philox

U64 = np.uint64
KNOWN = [[0.8908170177601278, 0.9291253734845668], [0.12185005168430507, 0.4543886261526495]]
"""The first random numbers of seed 3, epoch 4, the second flip, positions 5 and 2^40."""


# --- random numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, 0xFFFFFFFFFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(counter: list[int], key: int, expected: list[int]) -> None:
    words = philox(np.array([counter, counter[::-1]], U64).T, key)
    assert words[:, 0].tolist() == expected


def keys(seed: int = 0, epoch: int = 0, positions: object = (0, 1, 2)) -> s.Keys:
    return s.Keys(seed, epoch, np.array(positions, np.int64))


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31), st.integers(1, 40))
def test_numbers_are_within_0_and_1_and_start_the_same_however_many(seed: int, epoch: int, count: int) -> None:
    drawn = keys(seed, epoch, [0, 7, 2**40]).stage("flip", 0).uniform(count)
    assert drawn.shape == (3, count)
    assert drawn.dtype == np.float64
    assert (drawn >= 0).all() and (drawn < 1).all()
    assert np.array_equal(keys(seed, epoch, [0, 7, 2**40]).stage("flip", 0).uniform(50)[:, :count], drawn)


def test_a_samples_numbers_do_not_depend_on_its_neighbours() -> None:
    many = keys(positions=range(100))
    drawn = many.stage("flip", 0).uniform(5)
    for i in (0, 1, 50, 99):
        assert np.array_equal(many[i].stage("flip", 0).uniform(5)[0], drawn[i])
    assert np.array_equal(keys(positions=[50, 1]).stage("flip", 0).uniform(5), drawn[[50, 1]])
    assert keys(positions=[]).stage("flip", 0).uniform(5).shape == (0, 5)


def test_seed_epoch_position_and_stage_change_the_numbers() -> None:
    draws = [
        keys(seed, epoch, [place]).stage(name, turn).uniform(4)
        for seed in (0, 1)
        for epoch in (0, 1)
        for place in (0, 1, 2**32, 2**32 + 1)
        for name in ("flip", "resize")
        for turn in (0, 1)
    ]
    assert len({draw.tobytes() for draw in draws}) == len(draws)


def test_numbers_are_uniform_and_uncorrelated() -> None:
    count = 20_000
    drawn = keys(positions=range(count)).stage("flip", 0).uniform(6)
    counts = np.histogram(drawn, bins=64, range=(0, 1))[0]
    expected = drawn.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 140
    columns = np.corrcoef(drawn.T) - np.eye(6)
    assert np.abs(columns).max() < 5 / math.sqrt(count)
    assert abs(np.corrcoef(drawn[:-1, 0], drawn[1:, 0])[0, 1]) < 5 / math.sqrt(count)


def test_numbers_are_the_same_in_every_process() -> None:
    code = (
        "import numpy as np; from gpuflow.pipeline.stage import Keys;"
        "print(Keys(3, 4, np.array([5, 2**40])).stage('flip', 1).uniform(5).tolist())"
    )
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert again.stdout.strip() == str(keys(3, 4, [5, 2**40]).stage("flip", 1).uniform(5).tolist())
    assert keys(3, 4, [5, 2**40]).stage("flip", 1).uniform(2).tolist() == KNOWN


# --- specs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "text", "fixed"),
    [
        (s.ENCODED, "encoded bytes", False),
        (s.ImageSpec(shape=(None, None, 3)), "uint8 ?x?x3 hwc", False),
        (s.ImageSpec(shape=(None, 5, 3)), "uint8 ?x5x3 hwc", False),
        (s.ImageSpec(shape=(4, 5, 1), dtype="float16", layout="nhwc"), "float16 4x5x1 nhwc", True),
        (s.ImageSpec(shape=(4, 5, 3), device="cuda:1"), "uint8 4x5x3 hwc on cuda:1", True),
    ],
)
def test_specs_in_words(spec: s.ImageSpec, text: str, fixed: bool) -> None:
    assert str(spec) == text
    assert spec.fixed == fixed


def test_a_changed_shape_resets_the_shorter_side() -> None:
    spec = s.ImageSpec(shape=(None, None, 3), shorter=8)
    assert spec.replace(dtype="float32").shorter == 8
    assert spec.replace(shape=(9, 9, 3)).shorter is None
    assert spec.replace(shape=(9, 9, 3), shorter=9).shorter == 9
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.dtype = "float32"  # type: ignore[misc]


# --- pipelines -------------------------------------------------------------------------------------------------------


def test_a_pipeline_is_a_value() -> None:
    pipeline = s.Pipeline("val", (Decode(), Resize(shorter=256), CenterCrop(size=224), Normalize()))
    assert repr(pipeline) == "val: decode() -> resize(shorter=256) -> center_crop(size=224) -> normalize()"
    assert pipeline == s.Pipeline("val", (Decode(), Resize(shorter=256), CenterCrop(size=224), Normalize()))
    assert len({pipeline, s.Pipeline("val", pipeline.stages), s.Pipeline("val", pipeline.stages[:3])}) == 2


def test_a_fingerprint_covers_stages_in_order_and_not_the_name() -> None:
    first, second = Flip(horizontal=0.5), CenterCrop(size=8)
    prints = [
        s.Pipeline(name, stages).fingerprint
        for name, stages in [("a", (first, second)), ("b", (first, second)), ("a", (second, first)), ("a", (first,))]
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
    assert all(len(text) == 16 and int(text, 16) >= 0 for text in prints)


def test_equal_pipelines_have_equal_fingerprints() -> None:
    """YAML says 1 where Python says 1.0."""
    for one, other in [
        (Flip(horizontal=1), Flip(horizontal=1.0)),
        (Normalize(mean=(0, 0, 1), std=(1, 1, 1)), Normalize(mean=(0.0, 0.0, 1.0), std=(1.0, 1.0, 1.0))),
    ]:
        assert one == other
        assert s.Pipeline("p", (one,)).fingerprint == s.Pipeline("p", (other,)).fingerprint
        assert s.Pipeline("p", (one,)).lines == s.Pipeline("p", (other,)).lines
    assert s.Pipeline("p", (Flip(horizontal=0.5),)).fingerprint != s.Pipeline("p", (Flip(),)).fingerprint


def test_lines_name_every_parameter() -> None:
    """The text of the parameters that a fingerprint covers, to find why two fingerprints differ."""
    assert s.Pipeline("p", (Resize(shorter=8), Normalize(mean=(0.5, 0, 0), std=(1, 1, 1.5)))).lines == (
        "resize(height=None, width=None, shorter=8, longer=None, interpolation='bilinear', antialias=True)",
        "normalize(mean=(0.5, 0, 0), std=(1, 1, 1.5), dtype='float32', layout='nchw')",
    )


def test_occurrences_count_earlier_stages_of_the_same_name() -> None:
    stages = (Decode(), Flip(), Resize(shorter=3), Flip(), Resize(shorter=2), Flip())
    assert s.Pipeline("p", stages).occurrences() == [0, 0, 0, 1, 1, 2]
