"""Mixes: the samples, labels, fields and errors of several sources as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuflow.errors import ConfigError, SourceError
from gpuflow.sources import MixSource, SourceSpec, fields_of, open_source, records_of, subset
from gpuflow.sources.fingerprint import fingerprint_of
from tests.datasets import make_photos
from tests.sources.conftest import ReadAll


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
    return SourceSpec(mix=tuple({"source": entry} for entry in entries), **keys)


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
    assert str(error.value) == (
        "source.mix[1]: its 3 classes must be the 2 of source.mix[0], in the same order, and 'ant' is not; "
        "set unite_classes: true to unite them by name, or list all names in source.classes"
    )
    with pytest.raises(SourceError) as error:
        open_source(mix({"listing": two[0]}, {"listing": two[1]}, classes=("cat", "dog", "owl")))
    assert str(error.value) == (
        "source.mix[1]: its classes must be among source.classes, got 'ant' (1 of 3 are not); add them, or set "
        "unite_classes: true"
    )


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


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"mix": ({"source": {"folder": "a", "split": {"x": 0.5}}},)},
            "source.mix[0].source.split must stand next to mix",
        ),
        ({"mix": ({"source": {"folder": "a", "seed": 3}},)}, "source.mix[0].source.seed must stand next to mix"),
        ({"mix": ({"source": {"folder": "a"}, "weight": 0},)}, "source.mix[0].weight must be > 0, got 0"),
        ({"mix": ({"source": {"folder": "a"}, "weight": float("nan")},)}, "source.mix[0].weight must be > 0, got nan"),
        ({"mix": ({"source": {"folder": "a", "tar": "b"}},)}, "source.mix[0].source needs exactly one of folder, lis"),
        (
            {"mix": ({"source": {"folder": "a"}},), "classes": 3},
            "source.classes must be names for source.mix, got 3; or",
        ),
        (
            {"mix": ({"source": {"folder": "a"}},), "fields": {"label": None}},
            "source.fields must not stand next to mix",
        ),
        (
            {"mix": ({"source": {"folder": "a"}},), "weights": {"file": "w"}},
            "source.weights must not stand next to mix",
        ),
        (
            {"mix": ({"source": {"folder": "a"}},), "splits": ("x",)},
            "source.splits must be those of source.hf alone, got",
        ),
        ({"folder": "a", "by": "batch"}, "source.by must go with source.mix, got source.folder; remove by"),
        ({"folder": "a", "unite_classes": True}, "source.unite_classes must go with source.mix, got source.folder"),
        (
            {"folder": "a", "splits": ("x",)},
            "source.splits must go with source.hf, whose splits have names, got source.f",
        ),
    ],
)
def test_keys_that_do_not_go_together(keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        SourceSpec(**keys)
    assert str(error.value).startswith(expected)


def test_the_sources_of_a_mix_have_its_splits() -> None:
    """Weights in a column are read by these, so that they are those of the same parts."""
    spec = mix({"hf": "a", "weights": {"column": "w"}}, {"hf": "b"}, splits=("train", "test"))
    assert [(part.hf, part.splits) for part in spec.mixed] == [("a", ("train", "test")), ("b", ("train", "test"))]
    assert [part.splits for part in mix({"hf": "a"}).mixed] == [()]
    assert SourceSpec(folder="a").mixed == ()
