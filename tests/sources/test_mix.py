"""Mixes: the samples, labels, fields and errors of several sources as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuflow.errors import ConfigError, SourceError
from gpuflow.sources import (
    MixSource,
    Source,
    SourceSpec,
    fields_of,
    has_labels,
    open_source,
    records_of,
    source_spec,
    subset,
)
from gpuflow.sources.base import fingerprint_of
from tests.datasets import make_photos
from tests.sources.conftest import ReadAll
from tests.texts import outline


def write(path: Path, rows: list[tuple[str, str]]) -> str:
    path.write_text("path,label\n" + "".join(f"{name},{label}\n" for name, label in rows))
    for name, _ in rows:
        (path.parent / name).write_bytes(name.encode())
    return str(path)


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    a = write(tmp_path / "a.csv", [("1.jpg", "cat"), ("2.jpg", "dog"), ("3.jpg", "cat")])
    return a, write(tmp_path / "b.csv", [("4.jpg", "dog"), ("5.jpg", "owl"), ("6.jpg", "ant")])


def mix(*entries: dict[str, Any], **keys: Any) -> SourceSpec:
    return source_spec(mix=tuple({"source": entry} for entry in entries), **keys)


def test_samples_stand_one_source_after_the_other(two: tuple[str, str], read_all: ReadAll, tmp_path: Path) -> None:
    make_photos(tmp_path / "c", classes=2, each=2)
    spec = mix({"listing": two[0]}, {"listing": two[1]}, {"folder": str(tmp_path / "c")}, unite_classes=True)
    source = open_source(spec)
    assert isinstance(source, MixSource)
    assert (len(source), source.sizes) == (10, (3, 3, 4))
    assert [Path(source.path(i)).name for i in range(7)] == [*(f"{i}.jpg" for i in range(1, 7)), "000.jpg"]
    found = read_all(source, [5, 0, 9, 4, 1, 6])
    assert [found[0], found[1], found[3], found[4]] == [b"6.jpg", b"1.jpg", b"5.jpg", b"2.jpg"]
    assert found[2] == (tmp_path / "c/class_1/001.jpg").read_bytes()
    (tmp_path / "5.jpg").unlink()
    assert read_all(source, [5, 4, 0]) == [b"6.jpg", "no such file", b"1.jpg"]
    source.close()


def test_a_mix_of_one_source_has_labels_if_the_source_has(two: tuple[str, str], tmp_path: Path) -> None:
    assert has_labels(open_source(mix({"listing": two[0]})))
    boxes = detection(tmp_path / "boxes.jsonl", {"boxes": [[0, 0, 1, 1]], "kinds": ["a"]})
    assert not has_labels(open_source(mix(boxes)))


def test_classes_are_united_by_name_or_listed(two: tuple[str, str]) -> None:
    united = open_source(mix({"listing": two[0]}, {"listing": two[1]}, unite_classes=True))
    assert united.classes == ("cat", "dog", "ant", "owl")
    assert united.labels.tolist() == [0, 1, 0, 1, 3, 2]
    names = ("owl", "dog", "cat", "ant", "bee")
    listed = open_source(mix({"listing": two[0]}, {"listing": two[1]}, classes=names))
    assert [listed.classes[i] for i in listed.labels] == ["cat", "dog", "cat", "dog", "owl", "ant"]
    same = open_source(mix({"listing": two[0]}, {"listing": two[0]}))
    assert (same.classes, same.labels.tolist()) == (("cat", "dog"), [0, 1, 0, 0, 1, 0])


def test_other_classes_are_an_error_unless_united(two: tuple[str, str]) -> None:
    with pytest.raises(SourceError) as error:
        open_source(mix({"listing": two[0]}, {"listing": two[1]}))
    assert outline(error.value) == "source.mix[1]"
    with pytest.raises(SourceError) as error:
        open_source(mix({"listing": two[0]}, {"listing": two[1]}, classes=("cat", "dog", "owl")))
    assert outline(error.value) == "source.mix[1], got 'ant' (1 of 3 are not)"


def test_each_source_is_split_by_itself(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_photos(tmp_path / name, classes=2, each=6 if name == "a" else 10)
    spec = mix({"folder": str(tmp_path / "a")}, {"folder": str(tmp_path / "b")}, split={"train": 0.5, "val": 0.5})
    whole = open_source(spec)
    parts = [subset(whole, spec, name) for name in ("train", "val")]
    assert [part.sizes for part in parts if isinstance(part, MixSource)] == [(6, 10), (6, 10)]
    paths = [part.path(i) for part in parts for i in range(len(part))]
    assert sorted(paths) == sorted(whole.path(i) for i in range(len(whole)))
    assert np.bincount(parts[0].labels).tolist() == [8, 8]
    assert len({fingerprint_of(source) for source in (whole, *parts)}) == 3


def test_fields_are_joined_in_the_order_that_is_asked_for(tmp_path: Path) -> None:
    entries = []
    for name, count in (("a", 2), ("b", 3)):
        rows = []
        for i in range(count):
            listed = [[0, 0, i + 1, k + 1] for k in range(i)]
            rows.append(f'{{"path": "{i}.jpg", "boxes": {listed}, "caption": "{name}{i}", "n": {i}}}\n')
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
        fields = {"boxes": None, "caption": {"type": "text"}, "n": {"type": "number"}}
        entries.append({"listing": str(tmp_path / f"{name}.jsonl"), "fields": fields})
    source = open_source(mix(*entries))
    records = records_of(source, [4, 1, 0, 3])
    assert records.columns["caption"] == ["b2", "a1", "a0", "b1"]
    assert np.asarray(records.columns["n"]).tolist() == [2, 1, 0, 1]
    boxes: Any = records.columns["boxes"]
    assert boxes.offsets.tolist() == [0, 2, 3, 3, 4]
    assert boxes[0].tolist() == [[0, 0, 3, 1], [0, 0, 3, 2]]
    other = {**entries[1], "fields": {"boxes": None}}
    with pytest.raises(
        SourceError, match=r"^source\.mix\[1\]: its fields must be those of source\.mix\[0\] \(boxes, capt"
    ):
        open_source(mix(entries[0], other))
    assert [field.name for field in fields_of(source)] == ["boxes", "caption", "n"]


def detection(path: Path, *rows: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A listing of these rows, of boxes with labels and other fields."""
    path.write_text("".join(json.dumps({"path": f"{i}.jpg", **row}) + "\n" for i, row in enumerate(rows)))
    return {"listing": str(path), "fields": {"boxes": {"labels": "kinds"}, **fields}}


def box_labels(source: Source, indices: list[int]) -> list[list[int]]:
    column: Any = records_of(source, indices).columns["kinds"]
    assert column.values.dtype == np.int64
    return [column[i].tolist() for i in range(len(indices))]


BOX = [0, 0, 1, 1]


def test_labels_of_boxes_are_places_among_the_classes_of_the_mix(tmp_path: Path) -> None:
    cats = detection(tmp_path / "a.jsonl", {"boxes": [BOX, BOX], "kinds": ["cat", "dog"]}, {"boxes": [], "kinds": []})
    owls = detection(tmp_path / "b.jsonl", {"boxes": [BOX, BOX], "kinds": ["owl", "cat"]})
    none = detection(tmp_path / "c.jsonl", {"boxes": [], "kinds": []})
    names = ("owl", "bee", "dog", "cat")
    for parts, keys, classes in (
        ((cats, owls, none), {"unite_classes": True}, ("cat", "dog", "owl")),
        ((cats, owls, none), {"classes": names}, names),
        ((cats, cats, cats), {"classes": names}, names),
        ((cats, cats, cats), {}, ("cat", "dog")),
    ):
        source = open_source(mix(*parts, **keys))
        assert source.classes == fields_of(source)[0].classes == classes
        found = [[classes[label] for label in labels] for labels in box_labels(source, [2, 0, 1])]
        assert found == [["owl", "cat"] if parts[1] is owls else ["cat", "dog"], ["cat", "dog"], []]
        part = subset(source, source_spec(mix=({"source": {"folder": "x"}},), split={"all": 1.0}), "all")
        assert fields_of(part) == fields_of(source) and box_labels(part, [2, 0]) == box_labels(source, [2, 0])
    with pytest.raises(SourceError) as caught:
        open_source(mix(cats, owls))
    assert outline(caught.value) == "source.mix[1]"


def test_masks_of_one_mix_have_one_fill(tmp_path: Path) -> None:
    row = {"boxes": [BOX], "kinds": ["dog"], "mask": "a.png"}
    parts = [detection(tmp_path / f"{i}.jsonl", row, mask={"fill": fill}) for i, fill in enumerate((255, 0))]
    assert fields_of(open_source(mix(parts[0], parts[0])))[1].fill == 255
    with pytest.raises(SourceError) as found:
        open_source(mix(*parts))
    assert outline(found.value) == "source.mix[1], got 0"


def test_keypoints_of_one_mix_have_the_same_flip_pairs(tmp_path: Path) -> None:
    row = {"boxes": [BOX], "kinds": ["dog"], "keypoints": [[1, 2, 2, 3, 4, 0]]}
    first = detection(tmp_path / "a.jsonl", row, keypoints={})
    other = detection(tmp_path / "b.jsonl", row, keypoints={"flip_pairs": [[0, 1]]})
    with pytest.raises(SourceError) as found:
        open_source(mix(first, other))
    assert outline(found.value) == "source.mix[1], got [[0, 1]]"


def test_where_a_label_is_declared_classes_of_boxes_stay_their_own(tmp_path: Path) -> None:
    row = {"boxes": [BOX], "kinds": ["dog"], "label": "b"}
    first = detection(tmp_path / "a.jsonl", row, {**row, "kinds": ["cat"], "label": "a"}, label=None)
    other = detection(tmp_path / "b.jsonl", {**row, "kinds": ["owl"]}, label=None)
    source = open_source(mix(first, first, classes=("b", "a")))
    assert (source.classes, source.labels.tolist()) == (("b", "a"), [0, 1, 0, 1])
    assert fields_of(source)[0].classes == ("cat", "dog") and box_labels(source, [0, 3]) == [[1], [0]]
    with pytest.raises(SourceError) as found:
        open_source(mix(first, other, unite_classes=True))
    assert outline(found.value) == "source.mix[1], got ['owl']"


def test_keypoints_of_sources_of_which_one_has_no_instance(tmp_path: Path) -> None:
    def points(name: str, *instances: list[list[float]]) -> dict[str, Any]:
        rows = [{"boxes": [BOX] * len(held), "kinds": [0] * len(held), "points": held} for held in instances]
        return detection(tmp_path / name, *rows, points={"type": "keypoints"})

    none, some = points("a.jsonl", [], []), points("b.jsonl", [[1, 2, 2, 3, 4, 0]], [])
    for parts in ((none, some), (some, none), (none, some, none)):
        source = open_source(mix(*parts, unite_classes=True))
        held = 0 if parts[0] is some else 2
        for indices in ([held, 1 if held else 2], [3 - held], [held, held]):
            column: Any = records_of(source, indices).columns["points"]
            assert column.values.shape[1:] == (2, 3) and column.values.dtype == np.float32
            assert [len(column[i]) for i in range(len(indices))] == [int(i == held) for i in indices]
    assert records_of(open_source(mix(none, none)), [3, 0]).errors == [None, None]
    with pytest.raises(SourceError) as error:
        open_source(mix(none, some, points("c.jsonl", [[1, 2, 2]]), unite_classes=True))
    assert outline(error.value) == "source.mix[2], got 1"


def test_classes_for_labels_that_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("path,label\na.jpg,1.5\n")
    part = {"listing": str(tmp_path / "a.csv"), "fields": {"label": {"kind": "number"}}}
    assert open_source(mix(part, part)).labels.tolist() == [1.5, 1.5]
    with pytest.raises(
        SourceError, match=r"^source\.classes must go with labels that are classes, got numbers; remove"
    ):
        open_source(mix(part, part, classes=("a",)))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"mix": ({"source": {"folder": "a", "split": {"x": 0.5}}},)}, "source.mix[0].source.split config.conflict"),
        ({"mix": ({"source": {"folder": "a", "seed": 3}},)}, "source.mix[0].source.seed config.conflict"),
        ({"mix": ({"source": {"folder": "a"}, "weight": 0},)}, "source.mix[0].weight config.range, got 0"),
        ({"mix": ({"source": {"folder": "a"}, "weight": float("nan")},)}, "source.mix[0].weight config.range, got nan"),
        ({"mix": ({"source": {"folder": "a", "tar": "b"}},)}, "source.mix[0].source config.conflict"),
        ({"mix": ({"source": {"listing": "a"}},), "splits": ("x",)}, "source.splits config.conflict"),
        ({"folder": "a", "by": "batch"}, "source.by config.conflict"),
        ({"folder": "a", "unite_classes": True}, "source.unite_classes config.conflict"),
    ],
)
def test_keys_that_do_not_go_together(keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        source_spec(**keys)
    assert outline(error.value) == expected


def test_the_sources_of_a_mix_have_its_splits() -> None:
    """Weights in a column are read by these, so that they are those of the same parts."""
    spec = mix({"hf": "a", "weights": {"column": "w"}}, {"hf": "b"}, splits=("train", "test"))
    assert [(part.where, part.splits) for part in spec.sources] == [("a", ("train", "test")), ("b", ("train", "test"))]
    assert [part.splits for part in mix({"hf": "a"}).sources] == [()]
