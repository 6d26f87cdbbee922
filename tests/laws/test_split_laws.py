"""Laws of rules that divide a source, for all kinds: parts are disjoint and complete, groups stay together, and a
stable part depends on the seed, the shares and the sample's own name alone."""

from __future__ import annotations

import importlib.util
import io
import json
import random
import tarfile
import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpuflow.pipeline.rng import key64
from gpuflow.sources import KINDS, Division, Source, divide, open_source, source_spec, subset
from gpuflow.sources.split import _by_groups, parts_by_fractions
from gpuflow.sources.split_values import names_of_samples


class Item(NamedTuple):
    """A sample: its name without folder and extension, its class, its patient, its bytes."""

    name: str
    label: str
    patient: str
    data: bytes


def items(count: int) -> list[Item]:
    found = []
    for i in range(count):
        patient = f"p{i % (count // 4)}"
        label = ("cat", "dog", "eel")[i % 3]
        found.append(Item(f"{patient}-{i:03d}", label, patient, f"content {i % (count // 2)}".encode()))
    return found


def _listing(root: Path, samples: Sequence[Item], name: str = "list.csv") -> dict[str, Any]:
    rows = [f"{item.label}/{item.name}.jpg,{item.label},{item.patient}" for item in samples]
    (root / name).write_text("\n".join(["path,label,patient", *rows]) + "\n")
    _files(root, samples)
    return {"listing": str(root / name)}


def _files(root: Path, samples: Sequence[Item]) -> None:
    for item in samples:
        (root / item.label).mkdir(exist_ok=True)
        (root / item.label / f"{item.name}.jpg").write_bytes(item.data)


def _tar(root: Path, samples: Sequence[Item]) -> dict[str, Any]:
    with tarfile.open(root / "0.tar", "w") as shard:
        for item in samples:
            keys = {"label": item.label, "patient": item.patient}
            for suffix, data in (("jpg", item.data), ("json", json.dumps(keys).encode())):
                member = tarfile.TarInfo(f"{item.name}.{suffix}")
                member.size = len(data)
                shard.addfile(member, io.BytesIO(data))
    return {"tar": str(root / "0.tar")}


def _coco(root: Path, samples: Sequence[Item]) -> dict[str, Any]:
    _files(root, samples)
    images = [
        {"id": i, "file_name": f"{item.label}/{item.name}.jpg", "patient": item.patient}
        for i, item in enumerate(samples)
    ]
    document = {"images": images, "annotations": [], "categories": [{"id": 1, "name": "cat"}]}
    (root / "all.json").write_text(json.dumps(document))
    return {"coco": str(root / "all.json"), "images": str(root)}


def _hf(root: Path, samples: Sequence[Item]) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "image": [item.data for item in samples],
        "label": [item.label for item in samples],
        "patient": [item.patient for item in samples],
    }
    pq.write_table(pa.table(columns), root / "0.parquet")
    return {"hf": str(root)}


def block(kind: str, root: Path, samples: Sequence[Item]) -> dict[str, Any]:
    """Writes the samples in this order, and returns the keys of their source."""
    root.mkdir(parents=True)
    match kind:
        case "folder":
            _files(root, samples)
            return {"folder": str(root)}
        case "listing":
            return _listing(root, samples)
        case "tar":
            return _tar(root, samples)
        case "coco":
            return _coco(root, samples)
        case "hf":
            return _hf(root, samples)
        case "mix":
            half = len(samples) // 2
            first = _listing(root, samples[:half], "a.csv")
            second = _listing(root, samples[half:], "b.csv")
            classes = ["cat", "dog", "eel"]
            return {"mix": [{"source": {**one, "classes": classes}} for one in (first, second)]}
        case other:
            raise AssertionError(f"no samples for {other}")


def divided(keys: Mapping[str, Any], split: Mapping[str, Any], seed: int = 0) -> tuple[Source, Division]:
    spec = source_spec(**keys, split=split, seed=seed)
    source = open_source(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of groups that are larger than a share
        return source, divide(source, spec)


def parts_by_name(keys: Mapping[str, Any], split: Mapping[str, Any], seed: int = 0) -> dict[str, int]:
    source, division = divided(keys, split, seed)
    return dict(zip(names_of_samples(source), division.parts.tolist(), strict=True))


SHARES = {"train": 0.6, "val": 0.2, "test": 0.2}
HAS_PYARROW = importlib.util.find_spec("pyarrow") is not None
NEEDS_PYARROW = pytest.mark.skipif(not HAS_PYARROW, reason="pyarrow is not installed")
kinds = pytest.mark.parametrize("kind", [pytest.param(k, marks=NEEDS_PYARROW) if k == "hf" else k for k in KINDS])


def rules(kind: str) -> list[dict[str, Any]]:
    """Rules that a kind takes: with and without groups, stable and exact, shares and folds."""
    groups: list[Any] = [None, "content"]
    if kind != "hf":
        groups.append({"path": r"(p\d+)-\d+\.jpg$"})
    if kind != "folder":
        groups += ["patient", {"column": "patient"}]
    ways: list[dict[str, Any]] = [
        {"parts": SHARES},
        {"parts": SHARES, "stable": False},
        {"parts": {"train": 0.5, "val": 0.25}, "stable": False},
        {"folds": 3, "fold": 1},
        {"folds": 3, "fold": 0, "test": 0.2, "stratify": False},
    ]
    return [way if group is None else {**way, "group": group} for way in ways for group in groups]


@kinds
def test_parts_are_disjoint_and_complete_and_groups_stay_together(kind: str, tmp_path: Path) -> None:
    samples = items(48)
    keys = block(kind, tmp_path / "a", samples)
    by_stem = {item.name: item for item in samples}
    for rule in rules(kind):
        source, division = divided(keys, rule)
        assert len(division.parts) == len(source) == 48 and sum(division.sizes.values()) == 48
        assert set(division.parts.tolist()) <= set(range(-1, len(division.names)))
        if sum(dict(rule.get("parts", {"": 1})).values()) == 1:
            assert -1 not in division.parts
        spec = source_spec(**keys, split=rule)
        for number, name in enumerate(division.names):
            if number in division.parts and kind != "mix":
                part = subset(source, spec, name)
                assert part.classes == source.classes
                assert [part.path(i) for i in range(len(part))] == [
                    source.path(i) for i in np.flatnonzero(division.parts == number).tolist()
                ]
        if kind == "hf":
            own = samples
        else:
            own = [by_stem[name.rpartition("/")[2].removesuffix(".jpg")] for name in names_of_samples(source)]
        group = rule.get("group")
        if group is not None:
            values = [item.data if group == "content" else item.patient for item in own]
            pairs = set(zip(values, division.parts.tolist(), strict=True))
            assert len(pairs) == len(set(values)), rule


@kinds
def test_a_stable_part_depends_on_the_seed_the_shares_and_the_name_alone(kind: str, tmp_path: Path) -> None:
    samples = items(48)
    changed = [*samples[5:], Item("0-new", "cat", "p1", b"new"), Item("zz-new", "eel", "p99", b"more")]
    random.Random(3).shuffle(changed)
    before = block(kind, tmp_path / "a", samples)
    after = block(kind, tmp_path / "deep/er/b", changed)
    group = {"path": r"(\w+)-\w+\.jpg$"} if kind == "folder" else "patient"
    for rule in ({"parts": SHARES}, {"parts": SHARES, "group": group}):
        if kind == "hf":  # a row has no name, so that its group decides
            if "group" not in rule:
                continue
            one = [(i.patient, p) for i, p in zip(samples, divided(before, rule)[1].parts.tolist(), strict=True)]
            two = [(i.patient, p) for i, p in zip(changed, divided(after, rule)[1].parts.tolist(), strict=True)]
            assert {pair for pair in two if pair[0] != "p99"} <= set(one)
            continue
        first, second = parts_by_name(before, rule), parts_by_name(after, rule)
        assert len(set(first) & set(second)) == 43
        assert all(first[name] == second[name] for name in set(first) & set(second))
        assert parts_by_name(before, rule, seed=1) != first
        smaller = {**rule, "parts": {"train": 0.6, "val": 0.1, "test": 0.3}}
        moved = {(first[name], part) for name, part in parts_by_name(before, smaller).items() if first[name] != part}
        assert moved <= {(1, 2)}


@kinds
def test_folds_partition_what_is_not_the_test_part(kind: str, tmp_path: Path) -> None:
    keys = block(kind, tmp_path / "a", items(48))
    group = "content" if kind == "folder" else "patient"
    for base in ({"test": 0.2}, {"test": 0.2, "group": group}, {"group": group}, {}):
        found = [divided(keys, {"folds": 4, "fold": fold, **base})[1] for fold in range(4)]
        test = found[0].parts == 2
        assert test.any() == ("test" in base)
        assert all(((division.parts == 2) == test).all() for division in found)
        validated = np.sum([division.parts == 1 for division in found], axis=0)
        assert (validated == ~test).all()
        assert all((division.parts == 1).any() for division in found)
        other = divided(keys, {"folds": 3, "fold": 0, **base})[1]
        assert ((other.parts == 2) == test).all()


@kinds
def test_a_frozen_split_gives_the_same_parts(kind: str, tmp_path: Path) -> None:
    from gpuflow.sources import parts_csv

    keys = block(kind, tmp_path / "a", items(48))
    source, division = divided(keys, {"folds": 4, "fold": 2, "test": 0.2})
    frozen = tmp_path / "parts.csv"
    frozen.write_text(parts_csv(source, division))
    _, by_part = divided(keys, {"column": "part", "file": str(frozen)})
    _, by_fold = divided(keys, {"column": "fold", "fold": 2, "file": str(frozen)})
    assert by_fold.names == division.names and (by_fold.parts == division.parts).all()
    names = np.array(division.names)[division.parts]
    assert (np.array(by_part.names)[by_part.parts] == names).all()


@kinds
def test_lists_of_files_give_the_parts(kind: str, tmp_path: Path) -> None:
    keys = block(kind, tmp_path / "a", items(48))
    source = open_source(source_spec(**keys))
    names = names_of_samples(source)
    whole = [source.path(i) for i in range(48)]
    lists = {"train": names[:20], "val": [f"./{names[20]}", *whole[21:30]]}
    for part, lines in lists.items():
        (tmp_path / f"{part}.txt").write_text("\r\n".join(lines) + "\n\n")
    _, division = divided(keys, {"files": {part: str(tmp_path / f"{part}.txt") for part in lists}})
    assert division.parts.tolist() == [0] * 20 + [1] * 10 + [-1] * 18
    assert str(division) == "train 20, val 10; 18 in no part"


@kinds
def test_exact_parts_have_their_sizes_in_each_class(kind: str, tmp_path: Path) -> None:
    keys = block(kind, tmp_path / "a", items(48))
    source, division = divided(keys, {"parts": SHARES, "stable": False})
    whole = np.zeros(48, int) if kind == "coco" else source.labels
    sources = 2 if kind == "mix" else 1
    for number, share in enumerate(SHARES.values()):
        own = division.parts == number
        assert abs(own.sum() - share * 48) <= sources
        assert (abs(np.bincount(whole[own]) - share * np.bincount(whole)) <= sources).all()


@kinds
def test_fractions_give_what_they_gave(kind: str, tmp_path: Path) -> None:
    """The indices of a part are those of `parts_by_fractions`, which a test of sources pins."""
    keys = block(kind, tmp_path / "a", items(48))
    spec = source_spec(**keys, split=SHARES, seed=7)
    source = open_source(spec)
    for place, name in enumerate(SHARES):
        found: list[NDArray[np.int64]] = []
        for part, chosen in _sources(source, subset(source, spec, name)):
            labels, classes = (np.zeros(len(part), int), [""]) if kind == "coco" else (part.labels, part.classes)
            found.append(np.flatnonzero(parts_by_fractions(labels, classes, list(SHARES.values()), 7) == place))
            assert chosen.indices.dtype == np.int64 and (chosen.indices == found[-1]).all()


def _sources(whole: Any, part: Any) -> list[tuple[Any, Any]]:
    return list(zip(whole.parts, part.parts, strict=True)) if hasattr(whole, "parts") else [(whole, part)]


# --- groups -----------------------------------------------------------------------------------------------------------


def placed(groups: NDArray[np.int64], labels: NDArray[np.int64], shares: Sequence[Fraction]) -> NDArray[np.int64]:
    return _by_groups(groups, [key64("part", 0, i) for i in range(int(groups.max()) + 1)], labels, shares)


def quality(folds: NDArray[np.int64], labels: NDArray[np.int64], count: int) -> tuple[float, float]:
    """The mean deviation of a class's share in a fold, and the size of the largest fold for their mean size."""
    table = np.zeros((count, int(labels.max()) + 1))
    np.add.at(table, (folds, labels), 1)
    sizes = table.sum(1)
    return float(abs(table / table.sum(0) - 1 / count).mean()), float(sizes.max() / sizes.mean())


def test_groups_in_folds_are_no_worse_than_those_of_scikit_learn() -> None:
    selection = pytest.importorskip("sklearn.model_selection")
    draw = np.random.default_rng(0)
    ours = list[tuple[float, float]]()
    theirs = list[tuple[float, float]]()
    while len(ours) < 100:
        count, number, classes = int(draw.integers(2, 7)), int(draw.integers(6, 60)), int(draw.integers(2, 6))
        mixtures = draw.dirichlet(np.ones(classes) * 0.5, number)
        sizes = draw.geometric(0.08, number)
        groups = np.repeat(np.arange(number), sizes)
        labels = np.concatenate([draw.choice(classes, sizes[i], p=mixtures[i]) for i in range(number)])
        labels = np.unique(labels, return_inverse=True)[1]
        other = np.empty(len(labels), int)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                for fold, (_, held) in enumerate(selection.StratifiedGroupKFold(count).split(labels, labels, groups)):
                    other[held] = fold
            except ValueError:  # a class has fewer samples than there are folds
                continue
        own = placed(groups, labels, [Fraction(1, count)] * count)
        assert set(own.tolist()) == set(range(count))
        ours.append(quality(own, labels, count))
        theirs.append(quality(other, labels, count))
    assert (np.mean(ours, axis=0) <= np.mean(theirs, axis=0)).all()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 5), st.integers(0, 9), st.randoms())
def test_groups_are_placed_whole_in_any_order(sizes: list[int], parts: int, left: int, chance: random.Random) -> None:
    groups = np.repeat(np.arange(len(sizes)), sizes)
    labels = np.array([chance.randrange(3) for _ in groups])
    shares = [Fraction(1, parts + left)] * parts
    first = placed(groups, labels, shares)
    assert all(len(set(first[groups == group].tolist())) == 1 for group in range(len(sizes)))
    assert set(first.tolist()) <= set(range(parts)) | ({-1} if left else set())
    if len(sizes) >= parts:
        assert set(range(parts)) <= set(first.tolist())
    order = np.array(chance.sample(range(len(groups)), len(groups)))
    assert (placed(groups[order], labels[order], shares) == first[order]).all()


def test_ten_million_samples_of_a_class_keep_a_weight() -> None:
    groups = np.repeat(np.arange(4), 2_500_000)
    assert sorted(placed(groups, np.zeros(len(groups), int), [Fraction(1, 2)] * 2)[::2_500_000].tolist()) == [
        0,
        0,
        1,
        1,
    ]
