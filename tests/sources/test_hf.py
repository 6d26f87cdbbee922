"""The source `hf` on what pyarrow alone writes: tests/integrations has what needs `datasets`."""

from __future__ import annotations

import errno
import importlib.util
import itertools
import json
import os
import pickle
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuflow.errors import MissingExtra, SourceError, SystemFault
from gpuflow.pipeline.records import Ragged
from gpuflow.sources import Source, fields_of, open_source, records_of, source_spec, subset, weights_of
from tests.datasets import jpeg, no_more_files
from tests.sources.conftest import ReadAll
from tests.texts import outline

with_pyarrow = pytest.mark.skipif(
    importlib.util.find_spec("pyarrow") is None, reason="the package pyarrow is not installed"
)

NAMES = ("1", "0", "2")
"""Of digits: a number must not be taken for a name."""


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_without_pyarrow_the_extra_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingExtra, match=r"source\.hf needs pyarrow.*pip install 'gpuflow\[hf\]'"):
        open_source(source_spec(hf=str(tmp_path)))


Write = Callable[..., Path]


def table(columns: dict[str, Any], features: dict[str, Any] | None = None) -> Any:
    """A table with what `datasets` writes of its columns."""
    import pyarrow as pa

    known = json.dumps({"info": {"features": features}})
    return pa.table(columns).replace_schema_metadata({"huggingface": known} if features else {})


def write_parquet(path: Path, columns: dict[str, Any], features: dict[str, Any] | None = None) -> Path:
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table(columns, features), path)
    return path


def write_saved(
    folder: Path, columns: dict[str, Any], features: dict[str, Any] | None = None, *, files: int = 1
) -> Path:
    """A folder as `save_to_disk` writes it, with the same rows in each file."""
    import pyarrow as pa

    folder.mkdir(parents=True)
    data, names = table(columns, features), [f"data-{i:05d}.arrow" for i in range(files)]
    for name in names:
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, data.schema) as writer:
            writer.write_table(data)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder


forms = pytest.mark.parametrize("write", [write_parquet, write_saved], ids=["Parquet", "Arrow"])


@with_pyarrow
def test_a_parquet_file(tmp_path: Path, read_all: ReadAll) -> None:
    data = [jpeg(0, i) for i in range(9)]
    path = write_parquet(tmp_path / "x.parquet", {"image": [*data[:8], None], "label": ["b", "a", "b"] * 3})
    source = open_source(source_spec(hf=str(path)))
    assert (source.classes, source.labels.tolist()) == (("a", "b"), [1, 0, 1] * 3)
    assert read_all(source, [7, 8, 0]) == [
        data[7],
        "has no image: its cell is null, or a path without the image",
        data[0],
    ]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(
        SourceError, match=r"x\.parquet: must be a whole Parquet file, got an error: .*; copy or write it"
    ):
        open_source(source_spec(hf=str(path)))


@with_pyarrow
@forms
def test_a_relative_path_stays_what_it_was_when_the_process_changes_its_directory(
    write: Any, tmp_path: Path, read_all: ReadAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [jpeg(0, i) for i in range(4)]
    write(tmp_path / "x.parquet", {"image": data, "label": ["a", "b"] * 2})
    monkeypatch.chdir(tmp_path)
    source = open_source(source_spec(hf="x.parquet"))
    monkeypatch.chdir("/")
    assert read_all(source, range(4)) == data
    assert read_all(pickle.loads(pickle.dumps(source)), range(4)) == data


@with_pyarrow
def test_arrows_file_format_is_named(tmp_path: Path) -> None:
    import pyarrow as pa

    folder = write_saved(tmp_path / "x", {"image": [jpeg(0, 0)], "label": ["a"]})
    [path] = folder.glob("*.arrow")
    data = pa.ipc.open_stream(path.read_bytes()).read_all()
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, data.schema) as writer:
        writer.write_table(data)
    with pytest.raises(SourceError) as caught:
        open_source(source_spec(hf=str(folder)))
    assert (
        outline(caught.value)
        == f"{path}, got an error: it has Arrow's file format, and not the stream format that datasets writes"
    )


@with_pyarrow
@forms
def test_columns_that_are_written_as_a_dictionary(write: Write, tmp_path: Path) -> None:
    """As pandas writes its categories."""
    import pyarrow as pa

    names = pa.array(["b", "a", "b"], pa.large_string()).dictionary_encode()
    tags = pa.ListArray.from_arrays([0, 1, 1, 3], names)
    path = str(write(tmp_path / "x.parquet", {"image": [b"image"] * 3, "label": names, "tags": tags}))
    source = open_source(source_spec(hf=path))
    assert (source.classes, source.labels.tolist()) == (("a", "b"), [1, 0, 1])
    fields = {"label": {"kind": "classes", "column": "tags"}, "text": {"column": "label"}}
    source = open_source(source_spec(hf=path, fields=fields))
    assert (source.classes, source.labels.tolist()) == (("a", "b"), [[0, 1], [0, 0], [1, 1]])
    assert records_of(source, range(3)).columns["text"] == ["b", "a", "b"]
    missing = pa.array([None, "a"]).dictionary_encode()
    path = str(write(tmp_path / "y.parquet", {"image": [b"image"] * 2, "label": missing}))
    with pytest.raises(SourceError) as caught:
        open_source(source_spec(hf=path))
    assert outline(caught.value).endswith("[0], got null")


@with_pyarrow
def test_files_must_agree_in_the_columns_that_are_read(tmp_path: Path, read_all: ReadAll) -> None:
    """Not in others, in their order, or in whether a column may hold nulls."""
    import pyarrow as pa

    data = [jpeg(0, i) for i in range(4)]
    features = {"label": {"_type": "ClassLabel", "names": ["a", "b"]}}
    write_parquet(tmp_path / "0.parquet", {"image": data[:2], "label": [0, 1], "note": ["x", "y"]}, features)
    schema = pa.schema([("note", pa.null()), pa.field("label", pa.int64(), nullable=False), ("image", pa.binary())])
    schema = schema.append(pa.field("more", pa.int64()))
    rows = pa.table([pa.nulls(2), pa.array([1, 0]), pa.array(data[2:]), pa.array([1, 2])], schema=schema)
    write_parquet(tmp_path / "1.parquet", rows, features)
    source = open_source(source_spec(hf=str(tmp_path)))
    assert (source.classes, source.labels.tolist()) == (("a", "b"), [0, 1, 1, 0])
    assert read_all(source, [3, 2, 1, 0]) == data[::-1]
    fields = {"image": None, "text": {"column": "note"}}
    with pytest.raises(SourceError) as caught:
        open_source(source_spec(hf=str(tmp_path), fields=fields))
    assert outline(caught.value) == f"{tmp_path}/1.parquet, got null"
    others: list[tuple[dict[str, Any], dict[str, Any] | None, str]] = [
        ({"image": data, "text": list("abab")}, features, "none among image, text"),
        ({"image": data, "label": pa.array([0, 1] * 2, pa.int8())}, features, "int8"),
        ({"image": data, "label": [0, 1] * 2}, None, ""),
    ]
    for table_columns, known, got in others:
        write_parquet(tmp_path / "1.parquet", table_columns, known)
        with pytest.raises(SourceError) as caught:
            open_source(source_spec(hf=str(tmp_path)))
        assert outline(caught.value) == f"{tmp_path}/1.parquet" + (f", got {got}" if got else "")


@with_pyarrow
@forms
def test_columns_of_arrows_views(write: Write, tmp_path: Path, read_all: ReadAll) -> None:
    """As `pyarrow.table` makes them of a polars DataFrame."""
    import pyarrow as pa

    data = [jpeg(0, 0), None, jpeg(0, 1)]
    names = pa.array(["b", "a", "b"], pa.string_view())
    tags = pa.array([["b"], [], ["a", "b"]], pa.list_view(pa.string_view()))
    columns = {"image": pa.array(data, pa.binary_view()), "label": names, "tags": tags}
    try:
        path = str(write(tmp_path / "x.parquet", columns))
    except pa.ArrowNotImplementedError as error:
        pytest.skip(f"pyarrow {pa.__version__} cannot write the file: {error}")
    if write is write_saved:
        with pytest.raises(SourceError) as caught:
            open_source(source_spec(hf=path))
        assert outline(caught.value) == f"{path}, got binary_view"
        columns["image"] = pa.array(data, pa.large_binary())
        path = str(write(tmp_path / "y.parquet", columns))
    source = open_source(source_spec(hf=path))
    assert (source.classes, source.labels.tolist()) == (("a", "b"), [1, 0, 1])
    assert read_all(source, [2, 1, 0]) == [
        data[2],
        "has no image: its cell is null, or a path without the image",
        data[0],
    ]
    fields = {"label": {"kind": "classes", "column": "tags"}, "text": {"column": "label"}}
    source = open_source(source_spec(hf=path, fields=fields))
    assert (source.classes, source.labels.tolist()) == (("a", "b"), [[0, 1], [0, 0], [1, 1]])
    assert records_of(source, range(3)).columns["text"] == ["b", "a", "b"]


@with_pyarrow
def test_a_column_of_a_type_that_json_has_not(tmp_path: Path) -> None:
    import pyarrow as pa

    path = str(write_parquet(tmp_path / "x.parquet", {"image": [jpeg(0, 0)], "taken": pa.array([0], pa.date32())}))
    with pytest.raises(SourceError) as caught:
        open_source(source_spec(hf=path, fields={"image": None, "taken": {"type": "any"}}))
    assert outline(caught.value) == f"{path}, got date32[day]"


@with_pyarrow
@pytest.mark.parametrize("keys", [{}, {"fields": {"image": None, "label": {"kind": "number"}}}])
def test_a_column_that_a_file_has_twice(keys: dict[str, Any], tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = [pa.array([b"image"]), pa.array([1]), pa.array([0])]
    pq.write_table(pa.Table.from_arrays(columns, names=["image", "label", "label"]), tmp_path / "x.parquet")
    with pytest.raises(SourceError) as caught:
        open_source(source_spec(hf=str(tmp_path / "x.parquet"), **keys))
    assert outline(caught.value) == f"{tmp_path}/x.parquet, got image, label, label"


# --- classes that `datasets` knows by name ----------------------------------------------------------------------------


def features_of(names: Sequence[str]) -> dict[str, Any]:
    """What `datasets` writes of the columns of `labelled`."""
    label = {"names": list(names), "_type": "ClassLabel"}
    return {
        "tags": {"feature": label, "_type": "List"},
        "about": {"kind": label},
        "objects": {"feature": {"bbox": {"_type": "List"}, "kind": label}, "_type": "List"},
    }


FEATURES = features_of(NAMES)


def labelled(numbers: list[int | None]) -> dict[str, Any]:
    """A sample for each number: in a list, in a structure, and as the label of a box."""
    return {
        "image": [b"image"] * len(numbers),
        "tags": [[number] for number in numbers],
        "about": [{"kind": number} for number in numbers],
        "objects": [[{"bbox": [0, 0, 1, 1], "kind": number}] for number in numbers],
    }


BOXES: dict[str, Any] = {"boxes": {"column": "objects.bbox", "labels": "objects.kind"}}


def box_labels(source: Source) -> list[str]:
    """The classes of all boxes, by name."""
    column = records_of(source, range(len(source))).columns["objects.kind"]
    assert isinstance(column, Ragged)
    return [fields_of(source)[0].classes[label] for label in column.values]


@with_pyarrow
@forms
@pytest.mark.parametrize("given", [None, ("2", "1", "0", "more")])
def test_numbers_of_classes_are_no_names(write: Write, given: tuple[str, ...] | None, tmp_path: Path) -> None:
    numbers = [0, 1, 2, 1]
    expected, classes = [NAMES[number] for number in numbers], given or NAMES
    path = str(write(tmp_path / "x.parquet", labelled(list(numbers)), FEATURES))

    several = open_source(source_spec(hf=path, classes=given, fields={"label": {"kind": "classes", "column": "tags"}}))
    assert several.classes == classes
    assert [[several.classes[i] for i in row.nonzero()[0]] for row in several.labels] == [[name] for name in expected]

    nested = open_source(source_spec(hf=path, classes=given, fields={"label": {"column": "about.kind"}}))
    assert nested.classes == classes and [nested.classes[label] for label in nested.labels] == expected

    boxes = open_source(source_spec(hf=path, classes=given, fields=BOXES))
    assert fields_of(boxes)[0].classes == classes and box_labels(boxes) == expected


@with_pyarrow
@forms
def test_names_of_classes_keep_their_outer_spaces(write: Write, tmp_path: Path) -> None:
    names = ("x ", "x", " y")
    path = str(write(tmp_path / "x.parquet", labelled([0, 1, 2]), features_of(names)))
    several = open_source(source_spec(hf=path, fields={"label": {"kind": "classes", "column": "tags"}}))
    assert several.classes == names and several.labels.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    nested = open_source(source_spec(hf=path, fields={"label": {"column": "about.kind"}}))
    assert nested.classes == names and nested.labels.tolist() == [0, 1, 2]
    assert box_labels(open_source(source_spec(hf=path, fields=BOXES))) == list(names)


@with_pyarrow
def test_numbers_that_are_no_classes(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", labelled([0, -1]), FEATURES)
    for fields, place in (
        ({"label": {"kind": "classes", "column": "tags"}}, "tags[0]"),
        ({"label": {"column": "about.kind"}}, "about.kind"),
        (BOXES, "objects.kind[0]"),
    ):
        with pytest.raises(SourceError) as error:
            open_source(source_spec(hf=str(path), fields=fields))
        assert place in str(error.value)
        assert outline(error.value) == f"{path}[1], got -1"
    write_parquet(path, labelled([0, None]), FEATURES)
    with pytest.raises(SourceError) as caught:
        open_source(source_spec(hf=str(path), fields=BOXES))
    assert outline(caught.value) == f"{path}[1], got null"


@with_pyarrow
def test_members_of_structures(tmp_path: Path) -> None:
    path = str(write_parquet(tmp_path / "x.parquet", labelled([0, 2]), FEATURES))
    plain = open_source(source_spec(hf=path, label="about.kind"))
    assert [plain.classes[label] for label in plain.labels] == ["1", "2"]

    def refused(**keys: Any) -> str:
        with pytest.raises(SourceError) as error:
            open_source(source_spec(hf=path, **keys))
        return str(error.value)

    kind = f"{path}: the column 'about' must have the member 'knd', got kind; did you mean 'kind'?"
    assert refused(label="about.knd") == kind
    assert refused(fields={"note": {"type": "any", "column": "about.knd"}, "image": {}}) == kind
    assert refused(fields={"boxes": {"column": "objects.box", "labels": "objects.kind"}}) == (
        f"{path}: the column 'objects' must have the member 'box', got bbox, kind; did you mean 'bbox'?"
    )
    assert refused(label="image.kind") == f"{path}: the column 'image' must have the member 'kind', got binary"
    assert refused(image="about.kind").startswith(
        f"{path}: the column 'about.kind' must hold encoded images (bytes, or the structure of datasets' Image), got a "
        "member of a structure"
    )


# --- files ------------------------------------------------------------------------------------------------------------


def samples(count: int, label: int = 0) -> dict[str, Any]:
    return {"image": [b"image"] * count, "label": [label] * count}


@with_pyarrow
@pytest.mark.parametrize("place", ["", "*.parquet", "**/*.parquet"], ids=["directory", "pattern", "deep pattern"])
def test_splits_are_names_below_the_given_directory(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of a directory above it; a relative directory is one, too."""
    root = tmp_path / "train" / "data"
    for name, label in (("train", 0), ("test", 1)):
        write_parquet(root / f"{name}-00000-of-00001.parquet", samples(3 - label, label))
        if place != "*.parquet":
            write_parquet(root / name / "more.parquet", samples(2, label))
    monkeypatch.chdir(tmp_path)
    for start in (root, Path("train/data")):
        spec = source_spec(hf=str(start / place), splits=("train", "test"))
        source = open_source(spec)
        assert [set(subset(source, spec, name).labels.tolist()) for name in spec.splits] == [{0}, {1}]
        assert len(source) == (5 if place == "*.parquet" else 9)


@with_pyarrow
@pytest.mark.parametrize(("place", "link"), [("", "."), ("", "../.."), ("**/*.parquet", ".")])
def test_links_to_directories_are_followed_but_not_back_to_one_above(place: str, link: str, tmp_path: Path) -> None:
    write_parquet(tmp_path / "far" / "x.parquet", samples(2))
    write_parquet(tmp_path / "data" / "a" / "y.parquet", samples(3))
    (tmp_path / "data" / "far").symlink_to("../far")
    (tmp_path / "data" / "a" / "back").symlink_to(link)
    source = open_source(source_spec(hf=str(tmp_path / "data" / place)))
    assert [source.path(i) for i in (0, 3)] == [f"{tmp_path}/data/a/y.parquet[0]", f"{tmp_path}/data/far/x.parquet[0]"]
    assert len(source) == 5


@with_pyarrow
def test_a_directory_with_the_extension_of_a_file(tmp_path: Path) -> None:
    """As other programs write them, with the files inside."""
    write_parquet(tmp_path / "x.parquet" / "part-0.parquet", samples(2))
    assert len(open_source(source_spec(hf=str(tmp_path)))) == 2


@with_pyarrow
def test_a_file_of_two_splits(tmp_path: Path) -> None:
    for name in ("train", "test"):
        write_parquet(tmp_path / "train" / f"{name}.parquet", samples(1))
    with pytest.raises(SourceError) as error:
        open_source(source_spec(hf=str(tmp_path), splits=("train", "test")))
    assert outline(error.value) == f"{tmp_path}/train/test.parquet, got the names of 'train' and 'test'"


@with_pyarrow
def test_files_of_both_forms(tmp_path: Path) -> None:
    write_saved(tmp_path / "x", samples(1))
    write_parquet(tmp_path / "x" / "y.parquet", samples(1))
    with pytest.raises(SourceError) as caught:
        open_source(source_spec(hf=f"{tmp_path}/x/[dy]*.*"))
    assert outline(caught.value) == f"{tmp_path}/x/y.parquet, got Parquet"


@contextmanager
def few_files(count: int) -> Iterator[None]:
    """This process may open `count` more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = set(map(int, os.listdir("/proc/self/fd")))
    free = (number for number in itertools.count() if number not in used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, count, None)), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@with_pyarrow
@forms
def test_files_are_not_kept_open(write: Write, tmp_path: Path, read_all: ReadAll) -> None:
    if write is write_saved:
        path = write_saved(tmp_path / "saved", samples(2), files=60)
    else:
        path = tmp_path / "many"
        for number in range(60):
            write_parquet(path / f"{number:02}.parquet", samples(2))
    fields: dict[str, Any] = {"label": None, "n": {"type": "number", "column": "label"}}
    open_source(source_spec(hf=str(path)))  # what imports on first use opens files, too
    with few_files(10):
        source = open_source(source_spec(hf=str(path), fields=fields))
        assert read_all(source, range(0, 120, 50)) == [b"image"] * 3
        source.close()


@with_pyarrow
@forms
def test_without_file_descriptors_opening_raises(write: Write, tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", samples(2))
    open_source(source_spec(hf=str(path)))
    path = path / "data-00000.arrow" if write is write_saved else path
    with no_more_files(), pytest.raises(SystemFault) as caught:
        open_source(source_spec(hf=str(path)))
    assert (caught.value.errno, caught.value.filename) == (errno.EMFILE, str(path))


@with_pyarrow
def test_a_file_that_changes_while_it_is_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    path = write_parquet(tmp_path / "x.parquet", samples(2))
    real = pq.ParquetFile.read_row_group

    def write_then_read(*arguments: Any, **keys: Any) -> Any:
        with path.open("ab") as file:
            file.write(b"more")
        return real(*arguments, **keys)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", write_then_read)
    with pytest.raises(
        SourceError, match=r"x\.parquet: shard must stay as it was indexed"
    ):  # its size differs by version
        open_source(source_spec(hf=str(path)))


# --- weights ----------------------------------------------------------------------------------------------------------


@with_pyarrow
@forms
@pytest.mark.parametrize(
    "keys",
    [{}, {"image": "photo", "label": "label"}, {"fields": {"label": None}}, {"fields": {"image": {"column": "photo"}}}],
    ids=["found", "named", "found, with fields", "named by fields"],
)
def test_weights_where_the_images_have_any_name(write: Write, keys: dict[str, Any], tmp_path: Path) -> None:
    columns = {"photo": [b"image"] * 3, "label": [0, 1, 0], "w": [0.5, 1, 2]}
    spec = source_spec(hf=str(write(tmp_path / "x.parquet", columns)), weights={"column": "w"}, **keys)
    found = weights_of(spec, open_source(spec))
    assert found is not None and found.tolist() == [0.5, 1, 2]
