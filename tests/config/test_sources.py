"""The block `source` with weights and mixes: what YAML gives, and the places of what is wrong."""

from __future__ import annotations

import pytest

from gpuflow.sources import Mix, WeightsSpec, source_spec
from tests.config.files import fault, read, with_block


def test_a_mix_and_weights_are_read_from_yaml() -> None:
    block = (
        "source: {mix: [{source: {folder: a}, weight: 2}, {source: {hf: b, image: img, weights: {column: w}}}], "
        "by: batch, samples: 100, unite_classes: true, split: {val: 0.5}}"
    )
    source = read(with_block(block)).source
    assert isinstance(source, Mix)
    first, second = source.mix
    assert (first.source, first.weight, second.weight) == (source_spec(folder="a"), 2, 1)
    assert second.source == source_spec(hf="b", image="img", weights=WeightsSpec(column="w"))
    assert (source.by, source.samples, source.unite_classes, source.kind) == ("batch", 100, True, "mix")
    assert source.where == "a and b"


def test_an_override_reaches_a_source_of_a_mix() -> None:
    block = with_block("source: {mix: [{source: {folder: a}}, {source: {folder: b}}]}")
    source = read(block, "source.mix.1.weight=3").source
    assert isinstance(source, Mix) and [entry.weight for entry in source.mix] == [1, 3]


MIX = "source:\n  mix:\n    - source: {folder: a}\n    - %s\n"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("source: {foldr: b}", "source.mix[1].source.foldr config.unknown_key"),
        ("source: {folder: 3}", "source.mix[1].source.folder config.type, got 3"),
        ("{source: {folder: b}, wieght: 2}", "source.mix[1].wieght config.unknown_key"),
        ("{source: {folder: b}, weight: -2}", "source.mix[1].weight config.range, got -2.0"),
        ("{weight: 2}", "source.mix[1] config.missing_key"),
        ("source: {mix: []}", "source.mix[1].source.mix config.range, got []"),
        ("source: {mix: [{source: {folder: b}}]}", "source.mix[1].source.mix config.conflict"),
        ("source: 3", "source.mix[1].source config.type, got 3"),
        ("source: {folder: b, split: {x: 0.5}}", "source.mix[1].source.split config.conflict"),
        ("source: {}", "source.mix[1].source config.conflict"),
    ],
)
def test_the_place_of_what_is_wrong_in_a_mix(entry: str, expected: str) -> None:
    text = with_block("source: {folder: x}").replace("source: {folder: x}\n", MIX % entry)
    line = text.splitlines().index(f"    - {entry}") + 1
    assert fault(text) == f"x.yaml:{line}: {expected}"


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("source: {folder: x, weights: {column: w}}", "source.weights config.conflict"),
        ("source: {folder: x, weights: {balance: clas}}", "source.weights.balance config.range, got 'clas'"),
        (
            "source: {listing: x, weights: {balance: {colum: w}}}",
            "source.weights.balance config.missing_key\nx.yaml:4: source.weights.balance.colum config.unknown_key",
        ),
        ("source: {listing: x, weights: {balance: {}}}", "source.weights.balance config.missing_key"),
        ("source: {folder: x, weights: {fil: w}}", "source.weights.fil config.unknown_key"),
        ("source: {folder: x, weights: {file: w, samples: 0}}", "source.weights.samples config.range, got 0"),
        ("source: {folder: x, image: img}", "source.image config.conflict"),
        ("source: {hf: x, label: y, fields: {image: , label: }}", "source.label config.conflict"),
    ],
)
def test_the_place_of_other_keys_that_are_wrong(block: str, expected: str) -> None:
    text = with_block(block)
    assert fault(text) == f"x.yaml:{text.splitlines().index(block) + 1}: {expected}"


def test_a_pipeline_reads_a_split_of_the_dataset_by_its_name() -> None:
    config = read(with_block("source: {hf: x, splits: [train, val]}"))
    assert (config.split_of("val"), config.source.part_names) == ("val", ("train", "val"))
    other = with_block("source: {hf: x, splits: [train, test]}")
    assert fault(other) == "x.yaml:2: pipelines.val config.conflict"
