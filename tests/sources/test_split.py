"""Splits: a partition with exact totals, the same proportions in every class; SourceSpec's rules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpuflow.errors import ConfigError, SourceError
from gpuflow.sources import Allocate, Payload, Subset, open_source, source_spec, subset
from gpuflow.sources.split import parts_by_fractions, split_counts
from tests.sources.conftest import ReadAll
from tests.texts import outline


class MemorySource:
    """A source whose samples hold their own index as text."""

    def __init__(self, labels: Sequence[int], shard_sizes: tuple[int, ...] | None = None) -> None:
        self.labels: NDArray[np.int64] = np.array(labels, dtype=np.int64)
        self.classes = tuple(map(str, range(max(labels) + 1)))
        self.shard_sizes = shard_sizes
        self.closed = False

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        return f"memory/{index}"

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        texts = [str(index).encode() for index in indices]
        sizes = list(map(len, texts))
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        buffer = allocate(sum(sizes))
        buffer[: sum(sizes)] = np.frombuffer(b"".join(texts), dtype=np.uint8)
        return Payload(buffer=buffer, offsets=offsets, sizes=sizes, errors=[None] * len(sizes))

    storage = None

    def close(self) -> None:
        self.closed = True


@st.composite
def shares(draw: st.DrawFn) -> list[float]:
    weights = draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    rest = draw(st.integers(0, 20))
    return [weight / (sum(weights) + rest) for weight in weights]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=80), shares(), st.integers(0, 3))
def test_splits_are_disjoint_exact_and_stratified(labels: list[int], fractions: list[float], seed: int) -> None:
    whole = np.array(labels, dtype=np.int64)
    classes = tuple(map(str, range(7)))
    part_of = parts_by_fractions(whole, classes, fractions, seed)
    parts = [np.flatnonzero(part_of == place) for place in range(len(fractions))]
    assert len(part_of) == len(labels) and set(part_of.tolist()) <= {-1, *range(len(fractions))}
    ends = np.floor(np.cumsum(fractions) * len(whole) + 0.5 + 1e-9).astype(int)
    assert np.cumsum([len(part) for part in parts]).tolist() == ends.tolist()
    for part, fraction in zip(parts, fractions, strict=True):
        ideal = np.bincount(whole, minlength=7) * fraction
        assert (abs(np.bincount(whole[part], minlength=7) - ideal) <= 1 + 1e-6).all()


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), shares())
def test_counts_are_floors_or_ceilings_and_lose_nothing(sizes: list[int], fractions: list[float]) -> None:
    class_sizes = np.array(sizes, dtype=np.int64)
    counts = split_counts(class_sizes, fractions)
    assert (counts >= 0).all()
    assert counts.sum(axis=1).tolist() == sizes


def test_the_next_class_compensates_the_rounding_of_one_class() -> None:
    counts = split_counts(np.full(10, 13, dtype=np.int64), [0.9, 0.1])
    assert counts.sum(axis=0).tolist() == [117, 13, 0]
    assert set(counts[:5, 1].tolist()) == {1, 2}


def test_a_split_depends_on_the_seed_only() -> None:
    labels = np.arange(1000) % 10
    classes = tuple(map(str, range(10)))
    first = parts_by_fractions(labels, classes, [0.9, 0.1], 0)
    assert np.flatnonzero(first == 1)[:8].tolist() == [2, 6, 11, 16, 23, 29, 45, 47]
    assert (parts_by_fractions(labels, classes, [0.9, 0.1], 0) == first).all()
    assert (parts_by_fractions(labels, classes, [0.9, 0.1], 1) != first).any()


def test_subset_is_a_source(read_all: ReadAll) -> None:
    source = MemorySource([0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1], shard_sizes=(3, 5, 1, 3))
    spec = source_spec(folder="x", split={"train": 0.75, "val": 0.25})
    train, val = subset(source, spec, "train"), subset(source, spec, "val")
    assert isinstance(train, Subset) and isinstance(val, Subset)
    assert sorted([*train.indices.tolist(), *val.indices.tolist()]) == list(range(12))
    assert np.bincount(train.labels).tolist() == [3, 6]
    assert np.bincount(val.labels).tolist() == [1, 2]
    assert train.classes == ("0", "1")
    assert val.shard_sizes is not None and sum(val.shard_sizes) == 3 and 0 not in val.shard_sizes
    assert read_all(val, [2, 0]) == [str(val.indices[2]).encode(), str(val.indices[0]).encode()]
    assert val.path(1) == f"memory/{val.indices[1]}"
    val.close()
    assert source.closed


def test_shard_sizes_of_a_subset() -> None:
    source = MemorySource([0] * 12, shard_sizes=(3, 5, 0, 4))
    assert Subset(source, np.array([0, 2, 3, 8, 11])).shard_sizes == (2, 1, 2)
    assert Subset(source, np.array([3, 7])).shard_sizes == (2,)
    assert Subset(MemorySource([0, 0]), np.array([1])).shard_sizes is None


def test_an_undeclared_split_is_the_whole() -> None:
    source = MemorySource([0, 1])
    assert subset(source, source_spec(folder="x"), "train") is source
    assert subset(source, source_spec(folder="x", split={"val": 0.5}), "train") is source


def test_an_empty_split() -> None:
    with pytest.raises(SourceError) as caught:
        subset(MemorySource([0, 0, 1, 1]), source_spec(folder="x", split={"train": 0.9, "val": 0.1}), "val")
    assert outline(caught.value) == "source.split.val, got none: 0.1 of 4 samples"


def test_a_spec_is_a_value() -> None:
    spec = source_spec(folder="x", split={"train": 0.9, "val": 0.1})
    assert spec == source_spec(folder="x", split=(("train", 0.9), ("val", 0.1)))
    assert hash(spec) == hash(source_spec(folder="x", split=(("train", 0.9), ("val", 0.1))))
    assert spec.kind == "folder"
    assert source_spec(listing="x", classes=["b", "a"]).classes == ("b", "a")
    assert sum(share for _, share in source_spec(tar="x", split={str(i): 0.1 for i in range(10)}).fractions) <= 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "source config.conflict"),
        ({"folder": "a", "tar": "b"}, "source config.conflict"),
        ({"tar": "b", "root": "c"}, "source.root config.conflict"),
        ({"tar": "b", "classes": 0}, "source.classes config.range, got 0"),
        ({"tar": "b", "classes": ()}, "source.classes config.range, got []"),
        ({"tar": "b", "classes": ("a", "a")}, "source.classes config.range, got ['a', 'a']"),
        ({"tar": "b", "window": 0}, "source.window config.range, got 0"),
        ({"folder": "a", "split": {"val": 0}}, "source.split.val config.range, got 0"),
        ({"folder": "a", "split": {"val": -0.5}}, "source.split.val config.range, got -0.5"),
        ({"folder": "a", "split": {"val": float("nan")}}, "source.split.val config.range, got nan"),
        ({"folder": "a", "split": {"train": 0.9, "val": 0.2}}, "source.split config.conflict"),
        ({"folder": "a", "split": (("val", 0.1), ("val", 0.2))}, "source.split config.conflict, got ['val', 'val']"),
    ],
)
def test_rules_of_a_spec(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        source_spec(**fields)
    assert outline(caught.value) == message


def test_shares_of_a_folder(tmp_path: Path) -> None:
    for label in ("a", "b"):
        for i in range(10):
            (tmp_path / label).mkdir(exist_ok=True)
            (tmp_path / label / f"{i}.jpg").write_bytes(b"x")
    spec = source_spec(folder=str(tmp_path), split={"train": 0.8, "val": 0.2})
    source = open_source(spec)
    paths = [{part.path(i) for i in range(len(part))} for part in (subset(source, spec, n) for n in ("train", "val"))]
    assert [len(part) for part in paths] == [16, 4]
    assert not paths[0] & paths[1]
