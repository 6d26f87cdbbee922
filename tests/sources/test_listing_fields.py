"""Listings with declared fields, as CSV and as JSON lines: what is read, and errors that name the line."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpuflow.errors import SourceError, SystemFault
from gpuflow.pipeline.records import Field, MaskFile, Polygons, Ragged, Records, Rle
from gpuflow.sources import (
    Source,
    Subset,
    fields_of,
    fingerprint_of,
    has_labels,
    left_out_of,
    open_source,
    records_of,
    source_spec,
    subset,
    without_records,
)
from tests.datasets import no_more_files
from tests.sources.conftest import FileServer, ReadAll
from tests.texts import outline


@pytest.fixture(autouse=True)
def in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jpg", "b.jpg", "a.png", "b.png"):
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def lines(*rows: Any, **keys: Any) -> Source:
    """A listing of JSON lines; rows that are text are lines as they are."""
    Path("list.jsonl").write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return open_source(source_spec(listing="list.jsonl", **keys))


def table(text: str, **keys: Any) -> Source:
    Path("list.csv").write_text(text)
    return open_source(source_spec(listing="list.csv", **keys))


def row(**values: Any) -> dict[str, Any]:
    return {"path": "a.jpg", **values}


def values(records: Records, name: str) -> Any:
    """A column as plain lists."""
    column = records.columns[name]
    if isinstance(column, Ragged):
        return [column[i].tolist() for i in range(len(column))]
    return column.tolist() if isinstance(column, np.ndarray) else column


def refused(*rows: Any, **keys: Any) -> str:
    with pytest.raises(SourceError) as caught:
        lines(*rows, **keys)
    return outline(caught.value)


def refused_table(text: str, **keys: Any) -> str:
    with pytest.raises(SourceError) as caught:
        table(text, **keys)
    return outline(caught.value)


# What is read.


def test_a_column_of_csv_for_each_field(read_all: ReadAll) -> None:
    source = table(
        "image,kind,boxes,names,mask,weight,caption\n"
        'a.jpg,1,"[[1, 2, 3, 4], [0, 0, 1.5, 1]]",cat|dog,a.png,2.5,"one, two"\n'
        "b.jpg,0,,,b.png,1e3,\n"
        'a.jpg,1,"[[0, 0, 2, 2]]","[""dog""]",a.png,0,x\n',
        fields={
            "image": {},
            "label": {"column": "kind"},
            "boxes": {"labels": "names"},
            "mask": {"fill": 255},
            "weight": {"type": "number"},
            "caption": {"type": "text"},
        },
    )
    assert read_all(source) == [b"a.jpg", b"b.jpg", b"a.jpg"]
    assert source.labels.tolist() == [1, 0, 1] and source.classes == ("0", "1") and has_labels(source)
    assert fields_of(source) == (
        Field(name="boxes", type="boxes", labels="names", classes=("cat", "dog")),
        Field(name="mask", type="mask", fill=255),
        Field(name="weight", type="number"),
        Field(name="caption", type="text"),
    )
    records = records_of(source, [2, 1, 0])
    assert records.errors == [None, None, None]
    assert values(records, "boxes") == [[[0, 0, 2, 2]], [], [[1, 2, 3, 4], [0, 0, 1.5, 1]]]
    assert values(records, "names") == [[1], [], [0, 1]]
    assert values(records, "mask") == [MaskFile(b"a.png"), MaskFile(b"b.png"), MaskFile(b"a.png")]
    assert values(records, "weight") == [0, 1000, 2.5]
    assert values(records, "caption") == ["x", "", "one, two"]
    boxes, names = records.columns["boxes"], records.columns["names"]
    assert isinstance(boxes, Ragged) and isinstance(names, Ragged)
    assert boxes.values.dtype == np.float32 and names.values.dtype == boxes.offsets.dtype == np.int64


@pytest.mark.parametrize(
    ("form", "written"), [("xyxy", [1, 2, 4, 8]), ("xywh", [1, 2, 3, 6]), ("cxcywh", [2.5, 5, 3, 6])]
)
def test_formats_of_boxes(form: str, written: list[float]) -> None:
    source = lines(row(boxes=[written]), fields={"boxes": {"format": form}})
    assert values(records_of(source, [0]), "boxes") == [[[1, 2, 4, 8]]]
    assert not has_labels(source) and source.labels.tolist() == [0]


def test_keypoints_flat_and_in_triples() -> None:
    source = lines(
        row(points=[[1, 2, 2, 3, 4, 0]]),
        row(points=[]),
        row(points=[[[5, 6, 1], [7, 8, 2]], [0] * 6]),
        fields={"points": {"type": "keypoints"}},
    )
    points = records_of(source, [2, 1, 0]).columns["points"]
    assert isinstance(points, Ragged)
    assert points.values.shape == (3, 2, 3) and points.values.dtype == np.float32
    assert points[2].tolist() == [[[1, 2, 2], [3, 4, 0]]]
    assert points[0][0].tolist() == [[5, 6, 1], [7, 8, 2]]


def test_flip_pairs_name_keypoints_that_there_are() -> None:
    def fields(*pairs: list[int]) -> dict[str, Any]:
        return {"points": {"type": "keypoints", "flip_pairs": list(pairs)}}

    some, none = row(points=[[1, 2, 2, 3, 4, 0]]), row(points=[])
    (field,) = fields_of(lines(some, fields=fields([1, 0])))
    assert field.flip_pairs == ((1, 0),)
    assert refused(some, none, fields=fields([0, 1], [2, 3])) == "list.jsonl, got 3"
    assert fields_of(lines(none, fields=fields([2, 3])))[0].flip_pairs == ((2, 3),)


def test_masks_of_instances() -> None:
    source = lines(
        row(shapes=[[[0, 0, 4, 0, 4, 4]], [[[1, 1], [2, 1], [2, 2]], [3, 3, 4, 3, 4, 4]]], runs=[]),
        row(shapes=[], runs=[{"size": [2, 3], "counts": [1, 5]}]),
        fields={"shapes": {"type": "mask", "kind": "polygons"}, "runs": {"type": "mask", "kind": "rle"}},
    )
    assert [field.instances for field in fields_of(source)] == [True, True]
    first, second = (records_of(source, [i]) for i in (0, 1))
    shapes = values(first, "shapes")[0]
    assert all(isinstance(shape, Polygons) for shape in shapes)
    assert [[outline.tolist() for outline in shape.outlines] for shape in shapes] == [
        [[[0, 0], [4, 0], [4, 4]]],
        [[[1, 1], [2, 1], [2, 2]], [[3, 3], [4, 3], [4, 4]]],
    ]
    assert values(first, "runs") == [()] == values(second, "shapes")
    (run,) = values(second, "runs")[0]
    assert isinstance(run, Rle) and run.size == (2, 3) and run.counts.tolist() == [1, 5]


@pytest.mark.parametrize("is_csv", [True, False])
def test_kinds_of_labels(is_csv: bool) -> None:
    def source(label: list[str], written: list[Any], kind: str, **keys: Any) -> Source:
        fields = {"label": {"kind": kind}}
        if is_csv:
            quoted = (text.replace('"', '""') for text in label)
            return table("path,label\n" + "".join(f'a.jpg,"{text}"\n' for text in quoted), fields=fields, **keys)
        return lines(*(row(label=value) for value in written), fields=fields, **keys)

    several = source(["dog|cat", "", '["dog"]'], [["dog", "cat"], [], ["dog"]], "classes")
    assert several.labels.tolist() == [[1, 1], [0, 0], [0, 1]] and several.labels.dtype == np.uint8
    assert several.classes == ("cat", "dog")
    numbered = source(["2|0", "1", ""], [[2, 0], [1], []], "classes", classes=4)
    assert numbered.labels.tolist() == [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    number = source(["1.5", "2"], [1.5, 2], "number")
    assert number.labels.tolist() == [1.5, 2] and number.labels.dtype == np.float32 and number.classes == ()
    vector = source(["[1, 2]", "[3, 4.5]"], [[1, 2], [3, 4.5]], "vector")
    assert vector.labels.tolist() == [[1, 2], [3, 4.5]] and vector.labels.dtype == np.float32


@pytest.mark.parametrize("separator", [",", ";", " ", "|"])
@pytest.mark.parametrize("is_csv", [True, False])
def test_labels_with_a_separator(separator: str, is_csv: bool) -> None:
    written = [f"dog{separator}cat", "", "dog"]
    fields = {"label": {"kind": "classes", "separator": separator}}
    if is_csv:
        source = table("path,label\n" + "".join(f'a.jpg,"{text}"\n' for text in written), fields=fields)
    else:
        source = lines(*(row(label=text) for text in written), row(label=["cat"]), fields=fields)
    assert source.labels.tolist() == [[1, 1], [0, 0], [0, 1], [1, 0]][: 3 if is_csv else 4]
    assert source.classes == ("cat", "dog")


def test_classes_belong_to_the_label_else_to_the_boxes() -> None:
    both = lines(
        row(label="x", boxes=[[0, 0, 1, 1]], kinds=["cat"]),
        classes=("x", "y"),
        fields={"label": {}, "boxes": {"labels": "kinds", "classes": ("dog", "cat")}},
    )
    assert both.classes == ("x", "y") and fields_of(both)[0].classes == ("dog", "cat")
    assert values(records_of(both, [0]), "kinds") == [[1]]
    boxes = lines(row(boxes=[[0, 0, 1, 1]], kinds=[2]), classes=3, fields={"boxes": {"labels": "kinds"}})
    assert boxes.classes == fields_of(boxes)[0].classes == ("0", "1", "2")


def test_any_value_of_json_passes() -> None:
    source = lines(row(extra={"x": [1]}), row(extra=None), fields={"extra": {"type": "any"}})
    assert values(records_of(source, [1, 0]), "extra") == [None, {"x": [1]}]


def test_a_loop_may_change_what_it_gets() -> None:
    """A transform that pops a key of a sample's `meta` would find it gone in the next epoch, and states be refused."""
    source = lines(row(meta={"x": [1]}), row(meta=[]), fields={"meta": {"type": "any"}})
    for value in values(records_of(source, [0, 1]), "meta"):
        value.clear()
    assert values(records_of(source, [0, 1]), "meta") == [{"x": [1]}, []]
    unchanged = lines(row(meta={"x": [1]}), row(meta=[]), fields={"meta": {"type": "any"}})
    assert fingerprint_of(source) == fingerprint_of(unchanged)


def test_blocks_and_lines_are_counted_through() -> None:
    rows = [row(boxes=[[0, 0, i + 1, 1]] * (i % 3)) for i in range(9000)]
    rows[8500] = row(boxes=[[0, 0, 1, 1], [5, 0, 5, 1]])
    source = lines(*rows, fields={"boxes": {}})
    records = records_of(source, [8999, 4096, 8500])
    assert values(records, "boxes") == [[[0, 0, 9000, 1]] * 2, [[0, 0, 4097, 1]], [[0, 0, 1, 1]]]
    reason = "list.jsonl:8501: boxes[1] must have x1 < x2 and y1 < y2, got [5.0, 0.0, 5.0, 1.0]"
    assert left_out_of(source) == {8500: (1, reason)}


def test_only_image_and_label_are_the_same_samples_as_without_fields() -> None:
    plain = table("path,label\na.jpg,cat\nb.jpg,dog\n")
    declared = open_source(source_spec(listing="list.csv", fields={"image": {"column": "path"}, "label": {}}))
    assert fingerprint_of(declared) == fingerprint_of(plain)
    assert declared.classes == plain.classes and declared.labels.tolist() == plain.labels.tolist()
    assert records_of(plain, [1, 0]) == records_of(declared, [1, 0]) == Records({}, [None, None])
    assert fields_of(plain) == () and has_labels(plain)


def test_the_fingerprint_covers_every_value() -> None:
    fields = {"boxes": {}, "text": {}, "weight": {"type": "number"}, "mask": {}}
    base: dict[str, Any] = {"boxes": [[0, 0, 1, 1]], "text": "x", "weight": 1, "mask": "a.png"}
    changes: list[dict[str, Any]] = [{}, {"boxes": [[0, 0, 1, 2]]}, {"text": "y"}, {"weight": 2}, {"mask": "b.png"}]
    found = [fingerprint_of(lines(row(**base | change), fields=fields)) for change in changes]
    assert len(set(found)) == len(changes)
    assert fingerprint_of(lines(row(**base), fields=fields)) == found[0]
    numbers = [fingerprint_of(lines(row(label=number), fields={"label": {"kind": "number"}})) for number in (1.25, 1.5)]
    assert numbers[0] != numbers[1]


def test_splits_are_stratified_by_one_class_alone() -> None:
    rows = [row(path=f"{i}.jpg", label=[i % 2], n=i) for i in range(10)]
    spec = source_spec(listing="list.jsonl", split={"train": 0.8, "val": 0.2})
    whole = lines(*rows, fields={"label": {"kind": "classes"}, "n": {"type": "number"}})
    train, val = subset(whole, spec, "train"), subset(whole, spec, "val")
    assert isinstance(train, Subset) and isinstance(val, Subset)
    assert sorted([*train.indices, *val.indices]) == list(range(10)) and len(val) == 2
    assert values(records_of(val, [1, 0]), "n") == val.indices[[1, 0]].tolist()
    assert val.labels.tolist() == whole.labels[val.indices].tolist()


def test_a_copy_for_readers_has_no_records_but_the_same_labels() -> None:
    source = lines(*(row(label=i % 2, text="x" * 1000) for i in range(100)), fields={"label": {}, "text": {}})
    stripped = without_records(Subset(source, np.arange(0, 100, 2)))
    assert len(pickle.dumps(stripped)) < 5000 < len(pickle.dumps(source))
    assert fields_of(stripped) == () and has_labels(stripped) and len(stripped) == 50
    assert values(records_of(source, [3]), "text") == ["x" * 1000]


# Masks are read when their record is.


def test_a_mask_that_cannot_be_read_is_a_bad_record() -> None:
    source = lines(row(mask="gone.png"), row(mask="b.png"), fields={"mask": {}})
    records = records_of(source, [0, 1])
    assert records.errors == ["mask gone.png: no such file", None]
    assert values(records, "mask") == [MaskFile(b""), MaskFile(b"b.png")]


def test_no_descriptors_left_is_no_fault_of_a_mask() -> None:
    source = lines(row(mask="a.png"), fields={"mask": {}})
    with no_more_files(), pytest.raises(SystemFault):
        records_of(source, [0])


def test_masks_of_a_server_are_retried(server: FileServer) -> None:
    server.files = {
        "/list.jsonl": b'{"path": "a.jpg", "mask": "a.png"}\n',
        "/a.jpg": b"image",
        "/a.png": b"mask",
    }
    server.failures["/a.png"], server.status = 1, 503
    source = open_source(source_spec(listing=f"{server.url}/list.jsonl", fields={"mask": {}}))
    assert values(records_of(source, [0]), "mask") == [MaskFile(b"mask")]


def test_integers_of_more_than_64_bits_next_to_floats() -> None:
    rows = [row(weight=weight, boxes=[[0, 0, 2**64, 1.5], [0, 0, 1, 2]]) for weight in (1.5, 2**64, -(2**70), 3)]
    source = lines(*rows, fields={"weight": {"type": "number"}, "boxes": {}})
    records = records_of(source, range(4))
    assert values(records, "weight") == [1.5, 2.0**64, -(2.0**70), 3.0]
    assert values(records, "boxes") == [[[0, 0, 2.0**64, 1.5], [0, 0, 1, 2]]] * 4


# Bad records.


@pytest.mark.parametrize(
    ("fields", "values_of_row", "reason"),
    [
        ({"boxes": {}}, {"boxes": [[0, 0, 1, 1], [0, float("nan"), 1, 1]]}, "boxes[1] must have finite numbers"),
        ({"boxes": {}}, {"boxes": [[0, 0, 1e40, 1]]}, "boxes[0] must have finite numbers"),
        (
            {"boxes": {"format": "cxcywh"}},
            {"boxes": [[4, 4, 0, 2]]},
            "boxes[0] must have a width and a height above 0, got [4.0, 4.0, 0.0, 2.0]",
        ),
        (
            {"keypoints": {}},
            {"keypoints": [[1, 2, 0, 1, 2, 3]]},
            "keypoints[0] must have a visibility of 0, 1 or 2",
        ),
        ({"keypoints": {}}, {"keypoints": [[1, float("inf"), 0]]}, "keypoints[0] must have finite numbers"),
        (
            {"mask": {"kind": "polygons"}},
            {"mask": [[[1, 1, 2, 2]]]},
            "mask[0] must have outlines of at least 3 points, got 2",
        ),
        (
            {"mask": {"kind": "rle"}},
            {"mask": [{"size": [2, 2], "counts": [1, 1]}]},
            "mask[0] must have run lengths >= 0 that add up to 2 x 2, got 2 in all",
        ),
    ],
)
def test_instances_that_are_left_out(fields: Any, values_of_row: Any, reason: str) -> None:
    source = lines(row(**values_of_row), fields=fields)
    assert records_of(source, [0, 0]).errors == [None] * 2
    assert left_out_of(source) == {0: (1, f"list.jsonl:1: {reason}")}


def test_a_number_that_is_not_finite_makes_the_record_bad() -> None:
    source = lines(row(weight=float("nan")), fields={"weight": {"type": "number"}})
    assert records_of(source, [0, 0]).errors == ["list.jsonl:1: weight must be finite, got nan"] * 2


# Errors at opening.


@pytest.mark.parametrize(
    ("fields", "values_of_row", "message"),
    [
        (
            {"boxes": {}},
            {"boxs": []},
            ", got path, boxs",
        ),
        ({"boxes": {}}, {"boxes": None}, ", got null"),
        ({"boxes": {}}, {"boxes": [[1, 2, 3]]}, ", got [1, 2, 3]"),
        ({"boxes": {}}, {"boxes": [1, 2, 3, 4]}, ", got 1"),
        ({"boxes": {}}, {"boxes": [[1, 2, 3, "x"]]}, ", got [1, 2, 3, 'x']"),
        (
            {"boxes": {"labels": "kinds"}},
            {"boxes": [[0, 0, 1, 1]], "kinds": [1, 2]},
            ", got 2",
        ),
        (
            {"boxes": {"labels": "kinds"}},
            {"boxes": [[0, 0, 1, 1]], "kinds": [1.5]},
            ", got 1.5",
        ),
        (
            {"boxes": {}, "keypoints": {}},
            {"boxes": [[0, 0, 1, 1]], "keypoints": []},
            ", got 0",
        ),
        (
            {"keypoints": {}},
            {"keypoints": [[1, 2]]},
            ", got [1, 2]",
        ),
        (
            {"keypoints": {}},
            {"keypoints": [[1, 2, 0], [1, 2, 0, 1, 2, 0]]},
            ", got [1, 2, 0, 1, 2, 0]",
        ),
        ({"mask": {}}, {"mask": 3}, ", got 3"),
        ({"mask": {}}, {"mask": ""}, ""),
        (
            {"mask": {"kind": "rle"}},
            {"mask": [[[1, 1, 2, 2, 3, 3]]]},
            ", got [[1, 1, 2, 2, 3, 3]]",
        ),
        (
            {"mask": {"kind": "polygons"}},
            {"mask": [[[1, 1, 2]]]},
            ", got [1, 1, 2]",
        ),
        ({"weight": {"type": "number"}}, {"weight": "3"}, ", got '3'"),
        ({"weight": {"type": "number"}}, {"weight": True}, ", got true"),
        ({"boxes": {}}, {"boxes": [[True, 1, 9, 9]]}, ", got [True, 1, 9, 9]"),
        ({"text": {}}, {"text": 3}, ", got 3"),
        (
            {"text": {}},
            {"text": None},
            ", got null",
        ),
        (
            {"weight": {"type": "number"}},
            {"weight": None},
            ", got null",
        ),
        (
            {"label": {}},
            {"label": "\ud800"},
            ", got '\\ud800'",
        ),
        ({"label": {}}, {"label": 1.5}, ", got 1.5"),
        (
            {"label": {"kind": "classes"}},
            {"label": "cat"},
            ", got 'cat'",
        ),
        (
            {"label": {"kind": "number"}},
            {"label": float("nan")},
            ", got nan",
        ),
        (
            {"label": {"kind": "vector"}},
            {"label": []},
            ", got []",
        ),
    ],
)
def test_structural_faults(fields: Any, values_of_row: Any, message: str) -> None:
    assert refused("", row(**values_of_row), fields=fields) == f"list.jsonl:2{message}"


def test_vectors_of_different_lengths_and_unknown_classes() -> None:
    fields: Any = {"label": {"kind": "vector"}}
    assert refused(row(label=[1, 2]), row(label=[1]), fields=fields) == "list.jsonl:2, got 1"
    fields = {"boxes": {"labels": "kinds"}}
    rows = [row(boxes=[[0, 0, 1, 1]] * 2, kinds=kinds) for kinds in ([0, 1], [1, 7])]
    assert refused(*rows, fields=fields, classes=2) == "list.jsonl:2, got 7"
    assert refused(row(label=[]), fields={"label": {"kind": "classes"}}) == "list.jsonl:1, got none"


def test_a_column_may_differ_in_case_if_no_other_does() -> None:
    fields: Any = {"image": {"column": "path"}, "n": {"type": "number"}, "N": {"type": "number"}}
    source = table("Path,n,N\na.jpg,1,2\n", fields=fields)
    assert source.path(0) == "a.jpg"
    assert [values(records_of(source, [0]), name) for name in ("n", "N")] == [[1], [2]]
    assert refused_table("PATH,Path,n,N\na.jpg,b.jpg,1,2\n", fields=fields).startswith(
        "list.csv:1, got PATH, Path, n, N"
    )


def test_fields_may_share_a_column_that_they_read_alike() -> None:
    fields: Any = {"label": {"column": "y"}, "y": {"type": "text"}}
    source = table("path,y\na.jpg,3\nb.jpg,4\n", fields=fields)
    assert source.labels.tolist() == [3, 4] and values(records_of(source, [0, 1]), "y") == ["3", "4"]
    fields = {"label": {"column": "y"}, "score": {"type": "number", "column": "y"}}
    assert refused_table("path,y\na.jpg,3\n", fields=fields) == "list.csv"
    source = lines(row(y=3), row(y=4), fields=fields)
    assert source.labels.tolist() == [3, 4] and values(records_of(source, [0, 1]), "score") == [3, 4]


def test_a_column_that_a_header_names_twice() -> None:
    for keys in ({}, {"fields": {"label": None}}):
        assert "got path, label, label" in refused_table("path,label,label\na.jpg,x,y\n", **keys)


@pytest.mark.parametrize("number", ["1" + 400 * "0", "1e39", "NaN", "Infinity", "-1e400"])
def test_numbers_that_are_no_float32(number: str) -> None:
    message = refused(f'{{"path": "a.jpg", "label": {number}}}', fields={"label": {"kind": "number"}})
    assert message.startswith("list.jsonl:1, got ")


@pytest.mark.parametrize("number", [2**53 + 1, 2**63 - 1, -(2**63) + 1, 2**64 - 1])
@pytest.mark.parametrize("kind", ["number", "vector"])
def test_labels_that_float64_rounds_to_a_number_of_float32(kind: str, number: int) -> None:
    written = [0.1, number] if kind == "vector" else number
    message = refused(f'{{"path": "a.jpg", "label": {written}}}', fields={"label": {"kind": kind}})
    assert message == f"list.jsonl:1, got {written}"


@pytest.mark.parametrize("kind", ["number", "vector"])
def test_labels_with_more_digits_than_float32(kind: str) -> None:
    def line(number: int) -> str:
        return f'{{"path": "a.jpg", "label": {[0.1, number] if kind == "vector" else number}}}'

    written = [0.1, 16777217] if kind == "vector" else 16777217
    message = refused(line(16777216), line(16777217), fields={"label": {"kind": kind}})
    assert message == f"list.jsonl:2, got {written}"


@pytest.mark.parametrize("number", [2**53 + 1, -(2**60) - 1, 12345678901234567890])
def test_numbers_with_more_digits_than_float64(number: int) -> None:
    fields = {"id": {"type": "number"}}
    held = f'{{"path": "a.jpg", "id": {2**53}}}'
    assert refused(held, f'{{"path": "b.jpg", "id": {number}}}', fields=fields) == f"list.jsonl:2, got {number}"
    assert refused_table(f"path,id\na.jpg,{2**53}\nb.jpg, {number}\n", fields=fields) == f"list.csv:3, got {number}"


def test_values_that_are_nested_too_deeply() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    assert refused_table(f'path,boxes\na.jpg,"{deep}"\n', fields={"boxes": {}}).startswith("list.csv:2, got '[[[")
    assert refused(f'{{"path": "a.jpg", "x": {deep}}}', fields={"x": {"type": "any"}}) == (
        "list.jsonl:1, got an error: it is nested too deeply"
    )


def test_faults_of_csv() -> None:
    fields: Any = {"boxes": {"labels": "kinds"}}
    assert refused_table("path,box,kinds\na.jpg,[],\n", fields=fields) == "list.csv:1, got path, box, kinds"
    assert refused_table("path,boxes,kinds\na.jpg,[],\nb.jpg,[1,\n", fields=fields) == "list.csv:3, got '[1'"
    assert refused_table("path,boxes,kinds\n\na.jpg,[]\n", fields=fields) == "list.csv:3, got 2 fields"
    assert refused_table('path,boxes,kinds\n"a.jpg,[]\n', fields=fields).startswith("list.csv:2, got ")
    for cell in ("x", "1_0", "٣"):
        assert refused_table(f"path,n\na.jpg,{cell}\n", fields={"n": {"type": "number"}}) == (
            f"list.csv:2, got {cell!r}"
        )
    for text in ("path,boxes,kinds\n", ""):
        assert refused_table(text, fields=fields) == "list.csv, got none"


def test_faults_of_json_lines() -> None:
    fields: Any = {"text": {}}
    assert refused("[]", fields=fields) == "list.jsonl:1, got list"
    assert refused(row(text="x"), "{", fields=fields) == "list.jsonl:2, got one that does not end in this line"
    assert refused(row(text="x"), "{]", fields=fields).startswith("list.jsonl:2, got invalid")
    assert refused("", fields=fields) == "list.jsonl, got none"
