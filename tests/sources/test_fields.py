"""`source.fields`: defaults, and every rule between its keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuflow.config import read_config
from gpuflow.errors import ConfigError, SourceError
from gpuflow.sources import Source, fields_of, has_labels, open_source, records_of, source_spec, subset
from gpuflow.sources.field_spec import FieldSpec
from gpuflow.stages import STAGES
from tests.sources.conftest import with_columns
from tests.texts import outline


def problems(**keys: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        source_spec(**keys)
    return outline(caught.value).splitlines()


def test_a_name_that_is_a_type_needs_no_type() -> None:
    spec = source_spec(listing="x.csv", fields={"boxes": None, "seg": {"type": "mask"}, "text": FieldSpec(column="t")})
    assert spec.declared == (
        ("boxes", FieldSpec(type="boxes")),
        ("seg", FieldSpec(type="mask")),
        ("text", FieldSpec(type="text", column="t")),
    )
    assert spec == source_spec(listing="x.csv", fields=spec.declared)
    assert source_spec(listing="x.csv").declared == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"box": {}}, "box config.type"),
        ({"text": {"format": "xywh"}}, "text.format config.conflict"),
        ({"boxes": {"kind": "rle"}}, "boxes.kind config.conflict"),
        ({"label": {"kind": "rle"}}, "label.kind config.range, got 'rle'"),
        ({"mask": {"kind": "class"}}, "mask.kind config.range, got 'class'"),
        ({"label": {"columns": ["x", "y"]}}, "label.columns config.conflict"),
        ({"label": {"kind": "vector", "columns": ["x", "y"], "column": "z"}}, "label.columns config.conflict"),
        ({"label": {"kind": "vector", "columns": ["x"]}}, "label.columns config.range, got ['x']"),
        ({"label": {"kind": "vector", "columns": ["x", "x"]}}, "label.columns config.range, got ['x', 'x']"),
        ({"score": {"type": "number", "columns": ["x", "y"]}}, "score.columns config.conflict"),
        ({"label": {"kind": "vector", "classes": 3}}, "label.classes config.conflict"),
        ({"boxes": {"classes": 3}}, "boxes.classes config.conflict"),
        ({"boxes": {"labels": "l", "classes": ("a", "a")}}, "boxes.classes config.range, got ['a', 'a']"),
        ({"label": {"classes": 0}}, "label.classes config.range, got 0"),
        ({"label": {"separator": ";"}}, "label.separator config.conflict"),
        ({"label": {"kind": "classes", "separator": ""}}, "label.separator config.range, got ''"),
        ({"keypoints": {"flip_pairs": [[1, 2], [2, 3]]}}, "keypoints.flip_pairs config.range, got [[1, 2], [2, 3]]"),
        ({"keypoints": {"flip_pairs": [[-1, 2]]}}, "keypoints.flip_pairs config.range, got [[-1, 2]]"),
        ({"mask": {"fill": 256}}, "mask.fill config.range, got 256"),
        ({"mask": {"kind": "rle", "fill": 255}}, "mask.fill config.conflict"),
        ({"image": {}, "photo": {"type": "image"}}, "photo config.conflict"),
        ({"boxes": {"labels": "text"}, "text": {}}, "text config.conflict"),
    ],
)
def test_rules_between_keys(fields: Any, message: str) -> None:
    assert problems(listing="x.csv", fields=fields) == [f"source.fields.{message}"]


def test_every_problem_is_named() -> None:
    found = problems(listing="x.csv", fields={"a": {}, "text": {"kind": "file"}, "mask": {"labels": "x"}})
    assert len(found) == 3


def test_a_folder_has_images_and_labels_alone() -> None:
    assert problems(folder="x", fields={"boxes": {}}) == ["source.fields.boxes config.conflict"]
    assert problems(folder="x", fields={"label": {"column": "y"}}) == ["source.fields.label config.conflict"]


def test_a_folder_without_its_labels(tmp_path: Path) -> None:
    for name in ("cat/a.jpg", "cat/b.jpg", "dog/c.jpg", "dog/d.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    same: list[Any] = [{"image": {}, "label": {}}, {"image": {}, "label": {"kind": "class"}}]
    for fields in same:
        assert open_source(source_spec(folder=str(tmp_path), fields=fields)).labels.tolist() == [0, 0, 1, 1]
    spec = source_spec(folder=str(tmp_path), fields={"image": {}}, split={"train": 0.5})
    source = open_source(spec)
    assert not has_labels(source) and source.classes == () and source.labels.tolist() == [0, 0, 0, 0]
    part = subset(source, spec, "train")
    assert len(part) == 2 and not has_labels(part) and part.labels.dtype == np.int64


class Plain:
    """A source of another package, which knows nothing of fields."""

    def __len__(self) -> int:
        return 3


def test_a_source_without_fields_has_labels_and_empty_records() -> None:
    source: Any = Plain()
    assert fields_of(source) == () and has_labels(source)
    assert records_of(source, [2, 0]).errors == [None, None] and not records_of(source, [2]).columns


# In a YAML file.

HEAD = "pipelines:\n  train: {stages: [decode, {resize: {height: 8, width: 8}}], batch: {size: 2}}\nsource:\n"


def test_fields_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        HEAD
        + "  listing: train.csv\n"
        + "  fields: {image: {column: path}, boxes: {format: xywh, labels: box_labels, classes: [a, b]}, text: ,\n"
        + "    keypoints: {flip_pairs: [[1, 2], [3, 4]]}}\n"
    )
    assert read_config(path, STAGES).source.declared == (
        ("image", FieldSpec(type="image", column="path")),
        ("boxes", FieldSpec(type="boxes", format="xywh", labels="box_labels", classes=("a", "b"))),
        ("text", FieldSpec(type="text")),
        ("keypoints", FieldSpec(type="keypoints", flip_pairs=((1, 2), (3, 4)))),
    )
    changed = read_config(path, STAGES, ["source.fields.boxes.format=cxcywh"]).source.declared[1][1]
    assert changed.format == "cxcywh"


def test_every_problem_of_a_file_is_located(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        HEAD
        + "  listing: train.csv\n"
        + "  fields:\n"
        + "    boxes: {formt: xywh}\n"
        + "    mask: {kind: polygon}\n"
        + "    m: {type: maks}\n"
        + "    text: 3\n"
    )
    with pytest.raises(ConfigError) as caught:
        read_config(path, STAGES)
    assert [line.removeprefix(f"{path}:") for line in outline(caught.value).splitlines()] == [
        "6: source.fields.boxes.formt config.unknown_key",
        "7: source.fields.mask.kind config.range, got 'polygon'",
        "8: source.fields.m.type config.range, got 'maks'",
        "9: source.fields.text config.type, got 3",
    ]
    path.write_text(HEAD + "  listing: train.csv\n  fields:\n    boxes: {}\n    box: {}\n    text: {format: xywh}\n")
    with pytest.raises(ConfigError) as caught:
        read_config(path, STAGES)
    assert [problem.place.removeprefix(f"{path}:") for problem in caught.value.problems] == ["7:", "8:"]


# --- several columns as one label -------------------------------------------------------------------------------------


KINDS = ["csv", "jsonl", "tar", "hf"]
COLUMNS: dict[str, list[Any]] = {"x": [1, 2.5, -3], "y": [0, 4, 1e3], "z": [7, 8, 9]}


def of_columns(kind: str, folder: Path, columns: dict[str, list[Any]], names: list[str]) -> Source:
    image: dict[str, Any] = {"column": "path"} if kind in ("csv", "jsonl") else {}
    fields = {"image": image, "label": {"kind": "vector", "columns": names}, "z": {"type": "number"}}
    return open_source(source_spec(**with_columns(kind, folder, columns), fields=fields))


@pytest.mark.parametrize("kind", KINDS)
def test_columns_of_numbers_are_one_label(kind: str, tmp_path: Path) -> None:
    source = of_columns(kind, tmp_path, COLUMNS, ["z", "x"])
    assert source.labels.dtype == np.float32 and source.labels.tolist() == [[7, 1], [8, 2.5], [9, -3]]
    assert source.classes == () and has_labels(source)
    assert records_of(source, [2]).columns["z"].tolist() == [9]  # type: ignore[union-attr]


@pytest.mark.parametrize("value", [None, "far", 16777217, float("nan")])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "tar"])
def test_the_column_that_holds_no_number_is_named(kind: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        of_columns(kind, tmp_path, COLUMNS | {"y": [0, 4, value]}, ["x", "y"])
    place = {"csv": "l.csv:4", "jsonl": "l.jsonl:3", "tar": "s.tar/2.json"}[kind]
    assert outline(caught.value).startswith(f"{tmp_path}/{place}, got ")
    assert f"/{place}: y must " in str(caught.value)


def test_a_column_that_is_missing(tmp_path: Path) -> None:
    for kind in KINDS:
        with pytest.raises(SourceError, match="'w'"):
            of_columns(kind, tmp_path, COLUMNS, ["x", "w"])
