"""Rules that divide a source: what they give, and the error of each wrong value."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuflow.errors import ConfigError, SourceError
from gpuflow.sources import (
    Division,
    GroupSpec,
    Source,
    SplitSpec,
    divide,
    fingerprint_of,
    open_source,
    source_spec,
    subset,
)
from gpuflow.sources.split_values import column_texts
from tests.texts import outline, pin

SHARES = {"train": 0.8, "val": 0.1, "test": 0.1}
PARTS = ("train", "val", "test")


@pytest.fixture(autouse=True)
def listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory has all.csv: 40 samples of 8 patients, two classes; row i + 2 is sample i."""
    monkeypatch.chdir(tmp_path)
    rows = [f"a/{i:02d}.jpg,{'cat' if i % 4 else 'dog'},p{i // 5},{PARTS[i % 3]},{i % 4}" for i in range(40)]
    Path("all.csv").write_text("\n".join(["path,label,patient,part,fold", *rows]) + "\n")


def division(split: Any, known: tuple[str, ...] = (), **keys: Any) -> Division:
    spec = source_spec(**(keys or {"listing": "all.csv"}), split=split)
    return divide(open_source(spec), spec, known)


def part(split: Any, name: str, known: tuple[str, ...] = (), **keys: Any) -> Source:
    spec = source_spec(**(keys or {"listing": "all.csv"}), split=split)
    return subset(open_source(spec), spec, name, known)


def edited(line: int, old: str, new: str) -> None:
    """Replaces a text in one line of all.csv."""
    lines = Path("all.csv").read_text().split("\n")
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new)
    Path("all.csv").write_text("\n".join(lines))


# --- what they give ---------------------------------------------------------------------------------------------------


def test_a_rule_is_a_value() -> None:
    block = {"parts": SHARES, "group": {"path": "(.)/"}}
    spec = source_spec(listing="x", split=block)
    assert spec == source_spec(listing="x", split=SplitSpec(parts=SHARES, group=GroupSpec(path="(.)/")))
    assert hash(spec) == hash(source_spec(listing="x", split=block))
    assert (spec.part_names, spec.fractions) == (PARTS, ())
    assert source_spec(listing="x", split={"folds": 3, "fold": 0}).part_names == ("train", "val")
    assert source_spec(listing="x", split={"column": "part"}).part_names == ()


@pytest.mark.parametrize("split", [{"files": 0.5, "group": 0.25}, {"column": 0.5, "folds": 0.5}, {"parts": 1}])
def test_fractions_may_have_the_names_of_keys(split: dict[str, float]) -> None:
    assert source_spec(listing="x", split=split).fractions == tuple(split.items())


def test_known_parts_of_a_stable_split() -> None:
    """A part that changes is a validation sample that a trained model has seen."""
    assert division({"parts": SHARES}).parts.tolist()[:12] == [2, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0]
    with pytest.warns(UserWarning, match="^source.split: group 'p1' has 5 of the 40 samples"):
        assert division({"parts": SHARES, "group": "patient"}).parts.tolist()[::5] == [0, 1, 0, 0, 0, 0, 2, 0]


def test_exact_shares_move_few_samples_for_one_that_is_added() -> None:
    before = division({"parts": SHARES, "stable": False}).parts
    with open("all.csv", "a") as file:
        file.write("a/000.jpg,cat,p9,,\n")
    after = division({"parts": SHARES, "stable": False}).parts[:40]
    assert np.bincount(before).tolist() == [32, 4, 4]
    assert (before != after).sum() <= 4


def test_stratified_groups_have_the_classes_in_each_part() -> None:
    found = division({"parts": {"train": 0.5, "val": 0.5}, "group": "patient", "stratify": "label"})
    labels = part({"parts": {"train": 0.5, "val": 0.5}, "group": "patient", "stratify": "label"}, "val").labels
    assert found.sizes == {"train": 20, "val": 20, "": 0}
    assert np.bincount(labels).tolist() == [15, 5]


def test_any_column_may_be_in_equal_proportions() -> None:
    texts = column_texts(
        open_source(source_spec(listing="all.csv")), source_spec(listing="all.csv"), "fold", "x"
    ).values
    found = division({"parts": {"train": 0.8, "val": 0.2}, "stratify": "fold"}).parts
    counts = Counter(text for text, number in zip(texts, found.tolist(), strict=True) if number == 1)
    assert counts == {"0": 2, "1": 2, "2": 2, "3": 2}


def test_groups_are_compared_as_texts(tmp_path: Path) -> None:
    values: list[Any] = [1, "1", 1.0, "01", " 1 ", True, "true"]
    rows = [{"path": f"{i}.jpg", "label": 0, "site": value} for i, value in enumerate(values)]
    Path("all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = source_spec(listing="all.jsonl")
    texts = column_texts(open_source(spec), spec, "site", "x").values
    assert texts == ["1", "1", "1.0", "01", "1", "true", "true"]


def test_rows_of_one_path_stay_together() -> None:
    rows = [f"{i // 3}.jpg,{i % 2}" for i in range(30)]
    Path("twice.csv").write_text("path,label\n" + "\n".join(rows) + "\n")
    for split in ({"parts": SHARES, "stable": False}, {"folds": 3, "fold": 1}, {"parts": SHARES}):
        parts = division(split, listing="twice.csv").parts.reshape(10, 3)
        assert (parts == parts[:, :1]).all()


def test_a_group_of_two_sources_of_a_mix_is_one_group() -> None:
    Path("b.csv").write_text("path,label,patient\n" + "".join(f"b/{i}.jpg,cat,p{i % 8}\n" for i in range(800)))
    keys: Any = {"mix": [{"source": {"listing": name, "classes": ["cat", "dog"]}} for name in ("all.csv", "b.csv")]}
    shares = {"train": 0.5, "val": 0.25, "test": 0.25}
    for split in ({"folds": 4, "fold": 0, "group": "patient"}, {"parts": shares, "group": "patient"}):
        parts = division(split, **keys).parts
        patients = [i // 5 for i in range(40)] + [i % 8 for i in range(800)]
        assert len(set(zip(patients, parts.tolist(), strict=True))) == 8


def test_a_fold_is_another_source_for_a_state() -> None:
    prints = {
        fingerprint_of(part({"folds": 4, "fold": fold, "group": "patient"}, name))
        for fold in range(4)
        for name in ("train", "val")
    }
    assert len(prints) == 8


def test_a_column_gives_the_parts_and_empty_values_are_in_none() -> None:
    edited(5, ",train,", ",,")
    found = division({"column": "part"})
    assert found.sizes == {"test": 13, "train": 13, "val": 13, "": 1} and found.parts[3] == -1
    assert len(part({"column": "part"}, "val", ("train", "val"))) == 13
    folds = division({"column": "fold", "fold": 2})
    assert folds.sizes == {"train": 30, "val": 10, "test": 0, "": 0}


def test_classes_are_numbered_on_the_whole_source() -> None:
    edited(2, ",dog,p0,train,", ",ant,p0,val,")
    train = part({"column": "part"}, "train")
    assert train.classes == ("ant", "cat", "dog") and 0 not in train.labels
    spec = source_spec(listing="all.csv", split={"column": "part"})
    assert division({"column": "part"}).lacking(open_source(spec)) == {"test": ["ant"], "train": ["ant"]}


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"group": "patient"}, "source.split config.conflict"),
        ({"parts": SHARES, "folds": 3, "fold": 0}, "source.split config.conflict"),
        ({"parts": {"train": 0.9, "val": 0.2}, "stable": True}, "source.split.parts config.range"),
        ({"parts": {"train": 1.5}}, "source.split.parts.train config.range, got 1.5\nsource.split.parts config.range"),
        ({"folds": 1, "fold": 0}, "source.split.folds config.range, got 1"),
        ({"folds": 3, "fold": 3}, "source.split.fold config.range, got 3"),
        ({"folds": 3}, "source.split config.missing_key"),
        ({"folds": 3, "fold": 0, "test": 1.0}, "source.split.test config.range, got 1.0"),
        ({"parts": SHARES, "fold": 1}, "source.split.fold config.conflict"),
        ({"parts": SHARES, "test": 0.5}, "source.split.test config.conflict"),
        ({"parts": SHARES, "file": "a.csv"}, "source.split.file config.conflict"),
        ({"column": "part", "group": "patient"}, "source.split.group config.conflict"),
        ({"folds": 3, "fold": 0, "stable": True}, "source.split.stable config.conflict"),
        ({"parts": SHARES, "stable": True, "stratify": "label"}, "source.split.stable config.conflict"),
        ({"parts": SHARES, "group": {"path": "a("}}, "source.split.group.path config.range, got 'a('"),
        ({"parts": SHARES, "group": {"path": "a"}}, "source.split.group.path config.range, got 'a'"),
        ({"parts": SHARES, "group": {"path": "(a)(b)"}}, "source.split.group.path config.range, got '(a)(b)'"),
        ({"parts": SHARES, "group": {"path": "(a)", "column": "b"}}, "source.split.group config.conflict"),
        ({"parts": (("a", 0.5), ("a", 0.5))}, "source.split.parts config.conflict, got ['a', 'a']"),
    ],
)
def test_rules_between_keys(split: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        source_spec(listing="all.csv", split=split)
    assert outline(caught.value) == message


@pytest.mark.parametrize(
    ("split", "at"),
    [
        ({"parts": SHARES, "group": "patient"}, "group"),
        ({"parts": SHARES, "group": {"column": "patient"}}, "group.column"),
        ({"parts": SHARES, "stratify": "site"}, "stratify"),
        ({"column": "part"}, "column"),
    ],
)
def test_a_folder_has_no_columns(split: dict[str, Any], at: str) -> None:
    for keys in ({"folder": "x"}, {"mix": [{"source": {"folder": "x"}}]}):
        with pytest.raises(ConfigError) as caught:
            source_spec(**keys, split=split)
        assert outline(caught.value) == f"source.split.{at} config.conflict"
    source_spec(folder="x", split={"column": "part", "file": "parts.csv"})


def failed(split: Any, name: str = "train", known: tuple[str, ...] = (), **keys: Any) -> str:
    with pytest.raises(SourceError) as caught:
        part(split, name, known, **keys)
    return pin(caught.value)


def test_an_unknown_value_in_the_column() -> None:
    edited(17, ",train,", ",vall,")
    text = failed({"column": "part"}, known=("train", "val"))
    assert text.startswith("source.split.column: all.csv:17: part must be one of train, val, test") and "'val'?" in text
    edited(19, ",1", ",x")
    assert failed({"column": "fold", "fold": 1}).startswith("source.split.column: all.csv:19: fold must be the number")
    edited(19, ",x", ",1")
    assert failed({"column": "fold", "fold": 7}, "val").startswith("source.split.fold must be")


def test_no_such_column() -> None:
    assert failed({"column": "prt"}).startswith("source.split.column: all.csv:1: ")
    assert failed({"parts": SHARES, "group": "patent"}).startswith("source.split.group: all.csv:1: ")
    assert failed({"parts": SHARES, "stratify": "sit"}).startswith("source.split.stratify: all.csv:1: ")


def test_a_group_that_is_empty() -> None:
    edited(9, ",p1,", ",  ,")
    assert failed({"parts": SHARES, "group": "patient"}).startswith(
        "source.split.group: all.csv:9: patient must be text"
    )


def test_a_value_that_is_no_text() -> None:
    Path("all.jsonl").write_text(
        '{"path": "1.jpg", "label": 0, "site": 1}\n{"path": "2.jpg", "label": 0, "site": [2]}\n'
    )
    text = failed({"parts": SHARES, "group": "site"}, listing="all.jsonl")
    assert text.startswith("source.split.group: all.jsonl:2: site must be text, but not empty, or a number, got [2]")


def test_fewer_groups_than_folds() -> None:
    text = failed({"folds": 9, "fold": 0, "group": "patient"})
    assert text.startswith("source.split.folds must be at most the number of groups (patient), 8, got 9")
    assert failed({"folds": 8, "fold": 0, "test": 0.4, "group": "patient"}).startswith("source.split.folds must be at")
    assert failed({"folds": 41, "fold": 0}).startswith("source.split.folds must be at most the number of samples, 40")


def test_a_path_that_does_not_match() -> None:
    for pattern in (r"(\d)1\.jpg", r"(x?)\.jpg"):
        assert failed({"parts": SHARES, "group": {"path": pattern}}).startswith("source.split.group.path must match")


def test_lists_of_files_that_are_wrong() -> None:
    Path("a.txt").write_text("a/00.jpg\na/01.jpg\n")
    Path("b.txt").write_text("a/02.jpg\n\na/01.jpg\n")
    files = {"files": {"train": "a.txt", "val": "b.txt"}}
    assert failed(files).startswith("source.split.files: b.txt:3: a/01.jpg is also in a.txt:2")
    Path("b.txt").write_text("a/02.jpg\na/0x.jpg\n")
    assert failed(files).startswith("source.split.files: b.txt:2: a/0x.jpg is not in the source")
    Path("b.txt").unlink()
    assert failed(files).startswith("source.split.files.val must be a file, got 'b.txt', which does not exist")
    Path("b.txt").mkdir()
    assert failed(files).startswith("b.txt: ")
    Path("a.txt").write_text("a/00.jpg\na/00.jpg\n")
    assert len(part({"files": {"train": "a.txt"}}, "train")) == 1


def test_a_file_of_parts_that_is_wrong() -> None:
    rows = [f"a/{i:02d}.jpg,train" for i in range(40)]
    split = {"column": "part", "file": "parts.csv"}
    for text, start in [
        ("\n".join(["path,prt", *rows]), "source.split.file: parts.csv:1: "),
        ("\n".join(["path,part", *rows[1:]]), "source.split.file: parts.csv must list each sample, and a/00.jpg"),
        ("\n".join(["path,part", *rows, "a/00.jpg,val"]), "source.split.file: parts.csv:42: a/00.jpg is also in"),
        ("\n".join(["path,part", *rows, "a/00.jpg"]), "source.split.file: parts.csv:42: row must have"),
        ("\n".join(["path,part", *rows]).replace("3.jpg,train", "3.jpg,tran"), "source.split.column: parts.csv:5: "),
    ]:
        Path("parts.csv").write_text(text + "\n")
        assert failed(split, known=("train",)).startswith(start)


def test_stratify_needs_a_class_or_a_column() -> None:
    kinds = {"type": "label", "kind": "classes", "separator": "|", "column": "label"}
    fields = {"kinds": kinds, "image": {"column": "path"}}
    keys: Any = {"listing": "all.csv", "fields": fields}
    split = {"parts": SHARES, "stable": False}
    assert failed(split | {"stratify": True}, **keys).startswith("source.split.stratify needs one class")
    assert len(part(split, "train", **keys)) == len(part(split | {"stratify": "fold"}, "train", **keys)) == 32


def test_content_that_cannot_be_read() -> None:
    text = failed({"parts": SHARES, "group": "content"})
    assert text.startswith("source.split.group: content must be read of each sample, and a/00.jpg cannot be")


def test_a_part_without_samples() -> None:
    assert failed({"column": "part"}, "vall").startswith("source.split.vall must hold at least one sample, got none")
    assert failed({"parts": {"train": 0.9, "val": 0.001}}, "val").startswith("source.split.val must hold at least one")
    keys: Any = {"mix": [{"source": {"listing": "all.csv"}}]}
    assert failed({"parts": {"train": 0.9, "val": 0.001}}, "val", **keys).startswith("source.split.val must hold")


def test_a_group_that_is_larger_than_a_share() -> None:
    for row in range(2, 22):
        edited(row, f",p{(row - 2) // 5},", ",p0,")
    with pytest.warns(
        UserWarning, match=r"^source.split: group 'p0' has \d+ of the \d+ samples of one class, more than"
    ):
        division({"folds": 5, "fold": 0, "group": "patient"})
