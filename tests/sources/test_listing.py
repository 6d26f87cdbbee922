"""The listing source: CSV and JSON lines, labels as numbers or names, and errors that name the line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpuflow.errors import SourceError
from gpuflow.sources import Source, open_source, source_spec
from gpuflow.sources.record_table import TableSource
from tests.sources.conftest import ReadAll
from tests.texts import outline


@pytest.fixture(autouse=True)
def in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jpg", "b.jpg", "c, d.jpg", "sub/e.jpg"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path


def listing(text: str | bytes, *, name: str = "list.csv", **fields: object) -> Source:
    Path(name).write_bytes(text.encode() if isinstance(text, str) else text)
    return open_source(source_spec(listing=name, **fields))


def fails(message: str, text: str | bytes, *, name: str = "list.csv", **fields: object) -> None:
    with pytest.raises(SourceError) as caught:
        listing(text, name=name, **fields)
    assert outline(caught.value) == message


def contents(source: Source) -> tuple[list[str], list[int], tuple[str, ...]]:
    return [source.path(i) for i in range(len(source))], source.labels.tolist(), source.classes


# What is read.


def test_csv_without_a_header(read_all: ReadAll) -> None:
    source = listing('a.jpg,2\nb.jpg,0\n"c, d.jpg",1\n')
    assert contents(source) == (["a.jpg", "b.jpg", "c, d.jpg"], [2, 0, 1], ("0", "1", "2"))
    assert source.labels.dtype == np.int64
    assert source.shard_sizes is None
    assert read_all(source, [2, 0]) == [b"c, d.jpg", b"a.jpg"]
    source.close()


def test_csv_with_a_header_and_other_columns(read_all: ReadAll) -> None:
    source = listing("id,label,Path\r\n\r\n7,dog,a.jpg\r\n8,cat,sub/e.jpg\r\n")
    assert contents(source) == (["a.jpg", "sub/e.jpg"], [1, 0], ("cat", "dog"))
    assert read_all(source) == [b"a.jpg", b"sub/e.jpg"]


@pytest.mark.parametrize(
    ("header", "rows", "note"),
    [
        ("id,breed", "a.jpg,dog\nb.jpg,cat\n", "paths from 'id', labels from 'breed'"),
        ("id,breed", "a,dog\nb,cat\n", "paths from 'id', labels from 'breed'"),
        ("id,breed", "a.jpg,1\nb.jpg,0\n", "paths from 'id', labels from 'breed'"),
        ("picture,breed", "sub/a,dog\nsub/b,cat\n", "paths from 'picture', labels from 'breed'"),
        ("picture,breed", "a,1\nb,0\n", "paths from 'picture', labels from 'breed'"),
        ("breed,picture", "1,a.jpg\n0,b.jpg\n", "paths from 'picture', labels from 'breed'"),
        ("filename,class", "a.jpg,1\nb.jpg,0\n", "paths from 'filename', labels from 'class'"),
        ("label,picture", "1,a.jpg\n0,b.jpg\n", "paths from 'picture', labels from 'label'"),
        ("Path,lable", "a,dog\nb,cat\n", "paths from 'Path', labels from 'lable'"),
        ("label,path", "1,a.jpg\n0,b.jpg\n", "paths from 'path', labels from 'label'"),
        ("image/path,image/label", "x/a.jpg,1\nb.jpg,0\n", "paths from 'image/path', labels from 'image/label'"),
        ("file.name,class", "a.jpg,dog\nb.jpg,cat\n", "paths from 'file.name', labels from 'class'"),
        ("image/path,label", "x/a.jpg,dog\nx/b.jpg,cat\n", "paths from 'image/path', labels from 'label'"),
        ("image/label,image/path", "1,a.jpg\n0,b.jpg\n", "paths from 'image/path', labels from 'image/label'"),
    ],
)
def test_a_header_is_known_by_the_rows_below_it(header: str, rows: str, note: str) -> None:
    source = listing(f"{header}\n{rows}")
    paths, labels, classes = contents(source)
    assert isinstance(source, TableSource)
    assert source.note == f"header {header}: {note}"
    assert [path.rpartition("/")[2].partition(".")[0] for path in paths] == ["a", "b"]
    assert labels == [1, 0]
    assert classes in (("0", "1"), ("cat", "dog"))


@pytest.mark.parametrize(
    "rows",
    [
        "a.jpg,breed\nb.jpg,dog\n",
        "a.jpg,name\nb.jpg,0_1\n",
        "0001,dog\na.jpg,dog\n",
        "image.gif,dog\nb.jpg,1_\n",
        "x,dog\na.jpg,dog\n",
        "sub/a,label\nb,dog\n",
        "sub/a,dog\nsub/b.jpg,cat\n",
        "sub/a,3\nsub/b.jpg,1\n",
    ],
)
def test_a_first_row_that_is_a_sample(rows: str) -> None:
    source = listing(rows)
    assert isinstance(source, TableSource)
    assert (len(source), source.note) == (2, "no header, its first row is a sample")


@pytest.mark.parametrize("column", [{}, {"column": "path"}])
@pytest.mark.parametrize(
    "text", ["a.jpg\nsub/e.jpg\n", "a.jpg\n\nsub/e.jpg", "\ufeffPath\na.jpg\nsub/e.jpg\n", '"a.jpg"\r\n"sub/e.jpg"\r\n']
)
def test_paths_alone(text: str, column: dict[str, str]) -> None:
    source = listing(text, fields={"image": column})
    assert isinstance(source, TableSource) and not source.has_labels and not source.fields
    assert contents(source) == (["a.jpg", "sub/e.jpg"], [0, 0], ())
    assert source.note == ("" if "Path" in text else "no header, its first row is a sample")


@pytest.mark.parametrize("name", ["image", "file", "photos"])
def test_the_column_of_paths_alone_may_have_any_name_unless_one_is_given(name: str) -> None:
    text = f"{name}\na.jpg\nb.jpg\n"
    assert contents(listing(text, fields={"image": {}}))[0] == ["a.jpg", "b.jpg"]
    fails(f"list.csv:1, got {name}", text, fields={"image": {"column": "path"}})


def test_paths_alone_without_extensions_have_no_header() -> None:
    assert contents(listing("one\ntwo\n", fields={"image": {}}))[0] == ["one", "two"]


def test_faults_of_paths_alone() -> None:
    fails("list.csv:2, got 2 fields", "a.jpg\nb.jpg,1\n", fields={"image": {}})
    fails("list.csv:1, got path", "path\na.jpg\n")
    fails("list.csv:1, got path, label", "path,label\na.jpg,0\n", fields={"image": {}})
    fails("list.csv:1, got a.jpg", "a.jpg\nb.jpg\n", fields={"image": {}, "score": {"type": "number"}})


def test_one_row_with_and_without_a_line_end() -> None:
    assert contents(listing("a.jpg,0")) == (["a.jpg"], [0], ("0",))
    assert contents(listing("path,label\na.jpg,0")) == (["a.jpg"], [0], ("0",))


def test_a_byte_order_mark_is_no_part_of_the_header() -> None:
    assert contents(listing(b"\xef\xbb\xbfpath,label\na.jpg,0\n"))[0] == ["a.jpg"]


def test_spaces_around_labels_are_ignored() -> None:
    assert contents(listing("a.jpg, 1\nb.jpg, 0\n"))[1:] == ([1, 0], ("0", "1"))
    assert contents(listing("a.jpg, dog\nb.jpg,dog\n"))[1:] == ([0, 0], ("dog",))


@pytest.mark.parametrize("name", ["list.jsonl", "list.json", "list.ndjson", "LIST.JSONL"])
def test_json_lines(name: str, read_all: ReadAll) -> None:
    text = '{"path": "a.jpg", "label": 1}\n\n{"label": 0, "path": "c, d.jpg", "width": 3}\n'
    source = listing(text, name=name)
    assert contents(source) == (["a.jpg", "c, d.jpg"], [1, 0], ("0", "1"))
    assert read_all(source) == [b"a.jpg", b"c, d.jpg"]
    assert contents(listing('{"path": "a.jpg", "label": "dog"}', name=name))[2] == ("dog",)


def test_given_classes() -> None:
    assert contents(listing("a.jpg,1\n", classes=3))[1:] == ([1], ("0", "1", "2"))
    assert contents(listing("a.jpg,1\n", classes=("dog", "cat")))[1:] == ([1], ("dog", "cat"))
    assert contents(listing("a.jpg,cat\n", classes=("dog", "cat")))[1:] == ([1], ("dog", "cat"))
    assert contents(listing("a.jpg,10\n", classes=("20", "10")))[1:] == ([1], ("20", "10"))


def test_relative_paths_start_from_the_listing_or_the_root(in_directory: Path, read_all: ReadAll) -> None:
    (in_directory / "lists").mkdir()
    assert listing("a.jpg,0\n", name="lists/list.csv").path(0) == "lists/a.jpg"
    below = listing("e.jpg,0\n", name="lists/list.csv", root="sub/")
    assert below.path(0) == "sub/e.jpg"
    assert read_all(below) == [b"sub/e.jpg"]


def test_absolute_and_relative_paths_together(in_directory: Path, read_all: ReadAll) -> None:
    source = listing(f"sub/e.jpg,0\n{in_directory}/a.jpg,1\nb.jpg,1\n", root="../" + in_directory.name)
    assert source.path(1) == f"{in_directory}/a.jpg"
    assert read_all(source) == [b"sub/e.jpg", b"a.jpg", b"b.jpg"]


def test_many_chunks_keep_their_order() -> None:
    rows = [(f"x/{i}.jpg", i * 7 % 1000) for i in range(50_000)]
    expected = ([path for path, _ in rows], [label for _, label in rows])
    assert contents(listing("".join(f"{path},{label}\n" for path, label in rows)))[:2] == expected
    text = "".join(f'{{"path": "{path}", "label": {label}}}\n' for path, label in rows)
    assert contents(listing(text, name="list.jsonl"))[:2] == expected


def test_a_listed_file_that_is_missing_is_an_error_of_its_own_sample_only(read_all: ReadAll) -> None:
    assert read_all(listing("a.jpg,0\nnone.jpg,0\nb.jpg,1\n")) == [b"a.jpg", "no such file", b"b.jpg"]


# What is refused.


def test_labels_out_of_range() -> None:
    rows = "path,label\n" + "a.jpg,3\n" * 15
    fails(
        "list.csv:17, got 12",
        rows + "b.jpg,12\na.jpg,12\n",
        classes=10,
    )
    fails("list.csv:17, got -1", rows + "b.jpg,-1\n")
    fails(
        "list.csv:1, got 1000000",
        "a.jpg,1000000\n",
    )
    fails(
        "list.csv:2, got 2",
        "a.jpg,0\nb.jpg,2\n",
        classes=("dog", "cat"),
    )


def test_names_and_numbers_mixed() -> None:
    fails(
        "list.csv:2, got 'dog'",
        "a.jpg,0\nb.jpg,dog\n",
    )


@pytest.mark.parametrize("form", ["3.0", "10.", "-.5", "+1.5e3"])
def test_decimal_numbers_are_no_names(form: str) -> None:
    """In the order of their text, `10.0` would come before `2.0`."""
    fails(f"list.csv:3, got '{form}'", f"path,label\na.jpg,dog\nb.jpg,{form}\n")
    fails(f"list.jsonl:1, got '{form}'", f'{{"path": "a.jpg", "label": "{form}"}}\n', name="list.jsonl")
    assert contents(listing(f"a.jpg,{form}\n", classes=("1", form)))[1:] == ([1], ("1", form))


def test_a_name_above_numbers_alone() -> None:
    """Of a header that is not known by the paths below it, for one."""
    fails(
        "list.csv:1, got 'image/label'",
        "sub/x,image/label\nsub/a,0\nsub/b,1\n",
    )
    fails(
        "list.csv:2, got 'dog'",
        "path,label\na.jpg,dog\nb.jpg,10\nc.jpg,2\n",
    )
    assert contents(listing("a.jpg,dog\nb.jpg,1\n", classes=("1", "dog")))[1] == [1, 0]


def test_unknown_class_names() -> None:
    names = ("dog", "cat")
    fails("list.csv:2, got 'catt'", "a.jpg,cat\nb.jpg,catt\n", classes=names)
    fails("list.csv:2, got 'x'", "a.jpg,cat\nb.jpg,x\n", classes=names)
    many = tuple(f"class{i}" for i in range(1000))
    fails("list.csv:2, got 'clas77'", "a.jpg,class1\nb.jpg,clas77\n", classes=many)
    fails("list.csv:2, got 'x'", "a.jpg,class1\nb.jpg,x\n", classes=many)


def test_number_of_class_names() -> None:
    fails(
        "list.csv",
        "a.jpg,cat\nb.jpg,dog\n",
        classes=3,
    )


def test_empty_fields() -> None:
    fails("list.csv:2", "a.jpg,0\n,0\n")
    fails("list.csv:2", "a.jpg,cat\nb.jpg,\n")
    fails("list.csv:2, got 'b\\x00.jpg'", "a.jpg,0\nb\0.jpg,0\n")


def test_headers_that_leave_the_columns_open() -> None:
    fails("list.csv:1, got path, lable, x", "path,lable,x\na.jpg,0,1\n")
    fails("list.csv:2, got one, two, three", "\none,two,three\na.jpg,0,x\n")


@pytest.mark.parametrize("form", ["1_0", "+10", "\u0661\u0660", " 10_", "0x10", "1e1"])
def test_only_decimal_digits_are_numbers(form: str) -> None:
    """Python reads most of these as the number 10."""
    assert contents(listing(f"a.jpg,{form}\nb.jpg,10\nc.jpg,x\n"))[2] == tuple(sorted([form.strip(), "10", "x"]))
    fails(
        f"list.csv:2, got {form.strip()!r}",
        f"a.jpg,10\nb.jpg,{form}\n",
    )


def test_number_of_fields() -> None:
    fails("list.csv:1, got 1 field", "a.jpg\n")
    fails("list.csv:2, got 3 fields", "a.jpg,0\nc, d.jpg,0\n")
    fails(
        "list.csv:3, got 3 fields",
        "path,label\na.jpg,0\nc, d.jpg,0\n",
    )


def test_lines_are_counted_through_quoted_line_ends() -> None:
    fails(
        "list.csv:5, got -1",
        'path,note,label\na.jpg,"one\n\ntwo",0\nb.jpg,,-1\n',
    )


def test_quotes() -> None:
    fails(
        "list.csv:2, got unexpected end of data",
        'a.jpg,0\n"b.jpg,0\nc.jpg,0\n',
    )


def test_encoding() -> None:
    fails("list.csv:2, got byte 0xe9", b"a.jpg,0\n\xe9.jpg,0\n")
    fails(
        "list.jsonl:2, got byte 0xe9",
        b'{"path": "a", "label": 0}\n{"path": "\xe9", "label": 0}\n',
        name="list.jsonl",
    )
    fails(  # Python's json would take it for UTF-32
        "list.jsonl:1, got invalid JSON (Expecting property name enclosed in double quotes at column 2)",
        b'{\0\0\0"path": "a", "label": 0}\n',
        name="list.jsonl",
    )


def test_a_cell_of_millions_of_characters() -> None:
    note = "x" * 3_000_000
    assert contents(listing(f"path,label,note\na.jpg,3,{note}\n"))[:2] == (["a.jpg"], [3])
    with pytest.raises(SourceError) as caught:
        listing(f'path,label,note\na.jpg,3,"{"x" * (1 << 24)}\n')
    assert outline(caught.value) == "list.csv:2, got field larger than field limit (16777216)"


@pytest.mark.parametrize("fields", [{}, {"label": None}])
def test_json_lines_of_joined_files(fields: dict[str, None]) -> None:
    """Each file may begin with the mark of its encoding, and one may hold nothing else."""
    bom, row = b"\xef\xbb\xbf", b'{"path": "%s.jpg", "label": %d}\n'
    text = bom + row % (b"a", 0) + bom + row % (b"b", 1) + bom + b"\n" + bom
    assert contents(listing(text, name="list.jsonl", fields=fields))[:2] == (["a.jpg", "b.jpg"], [0, 1])


@pytest.mark.parametrize("header", [b"", b"path,label\n"])
def test_csv_of_joined_files(header: bytes) -> None:
    """A mark of the encoding may begin each line, also in front of a quote."""
    bom = b"\xef\xbb\xbf"
    text = bom + header + b"a.jpg,cat\n" + bom + b'"b, c.jpg",dog\n' + bom + b"\r\n" + bom + b"d.jpg,dog\n" + bom
    assert contents(listing(text)) == (["a.jpg", "b, c.jpg", "d.jpg"], [0, 1, 1], ("cat", "dog"))
    line = 5 + header.count(b"\n")
    fails(f"list.csv:{line}", text[: -len(bom)] + b",1\n")


@pytest.mark.parametrize("fields", [{}, {"label": None}])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_the_header_of_a_second_file_is_no_sample(bom: bytes, fields: dict[str, None]) -> None:
    part = bom + b"path,label\na.jpg,cat\n"
    with pytest.raises(SourceError) as error:
        listing(part + part, fields=fields)
    assert outline(error.value) == "list.csv:3, got the header again: path,label"


@pytest.mark.parametrize("text", ["", "\n\n", "path,label\n"])
def test_empty_csv(text: str) -> None:
    fails("list.csv, got none", text)


def test_empty_json_lines() -> None:
    fails("list.jsonl, got none", "\n", name="list.jsonl")


GOOD = '{"path": "a.jpg", "label": 0}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"path": "a.jpg" "label": 0}',
            ", got invalid JSON (Expecting ',' delimiter at column 18)",
        ),
        ("[1]", ", got list"),
        ('{"path": "a.jpg"}', ", got path"),
        ("{}", ", got none"),
        ('{"path": "a.jpg", "label": true}', ", got true"),
        ('{"path": "a.jpg", "label": 1.5}', ", got 1.5"),
        ('{"path": "a.jpg", "label": [1]}', ", got [1]"),
        ('{"path": 3, "label": 1}', ", got 3"),
        ('{"path": "", "label": 1}', ""),
        ('{"path": "\\ud800", "label": 1}', ", got '\\ud800'"),
        (
            '{"path": "a.jpg", "label": 1, "more": ' + "[" * 100_000 + "]" * 100_000 + "}",
            ", got an error: it is nested too deeply",
        ),
        ('{"path": "a.jpg", "label": ' + "1" * 5000 + "}", None),
        ('{"path": "a", "label": 1}, {}', None),
        ('{"path": "a"', None),
    ],
)
def test_malformed_json_lines(line: str, message: str | None) -> None:
    with pytest.raises(SourceError) as caught:
        listing(GOOD * 2 + line + "\n" + GOOD, name="list.jsonl")
    assert str(caught.value).startswith("list.jsonl:3: ")
    assert message is None or outline(caught.value) == f"list.jsonl:3{message}"


@pytest.mark.parametrize("fields", [{}, {"label": None}])
@pytest.mark.parametrize("second", ['"label": 0}', '"label": 0}, {"path": "b.jpg", "label": 1}'])
@pytest.mark.parametrize("first", ["{", '{"path": "a.jpg",', '{"path": "a.jpg"', '{"path": "a.j', '{"path":  '])
def test_an_object_on_two_lines(first: str, second: str, fields: dict[str, None]) -> None:
    with pytest.raises(SourceError) as caught:
        listing(GOOD + first + "\n" + second + "\n" + GOOD, name="list.jsonl", fields=fields)
    assert str(caught.value).startswith("list.jsonl:2: line must be a JSON object, got ")
    assert str(caught.value).endswith("; write one object a line")
    assert first.endswith(".j") or "got one that does not end in this line;" in str(caught.value)


def test_lines_that_are_objects_only_together() -> None:
    """They are as many as the objects that they make."""
    fails(
        "list.jsonl:1, got one that does not end in this line",
        '{"path": "a.jpg"\n"label": 0}, {"path": "b.jpg", "label": 1}\n',
        name="list.jsonl",
    )


def test_files(in_directory: Path) -> None:
    def refused(name: str) -> str:
        with pytest.raises(SourceError) as caught:
            open_source(source_spec(listing=name))
        return outline(caught.value)

    listing("a.jpg,0\n")
    assert refused("lst.csv") == "source.listing, got 'lst.csv', which does not exist"
    assert refused("list.txt") == "source.listing, got 'list.txt'"
    (in_directory / "dir.csv").mkdir()
    assert refused("dir.csv") == "dir.csv"


def test_a_listing_of_two_file_systems() -> None:
    fails(
        "list.csv:2, got 'memory://b.jpg'",
        "a.jpg,0\nmemory://b.jpg,0\n",
    )


# How fast.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["big.csv", "big.jsonl"])
def test_a_million_rows(name: str, in_directory: Path) -> None:
    """Sooner than Python's json module parses one and a half million such rows, and in bounded memory."""
    with open(name, "w") as file:
        for i in range(1_000_000):
            path, label = f"train/n{i % 1000:08d}/n{i % 1000:08d}_{i}.JPEG", i % 1000
            file.write(f"{path},{label}\n" if name == "big.csv" else f'{{"path": "{path}", "label": {label}}}\n')
    script = rf"""
import json, re, time
from gpuflow.sources import open_source, source_spec
def memory_mb(name):
    return int(re.search(name + r":\s+(\d+) kB", open("/proc/self/status").read())[1]) / 1e3
before = memory_mb("VmRSS")
row = '{{"path": "train/n00000999/n00000999_999999.JPEG", "label": 999}}'
start = time.process_time()  # other programs may keep the cores busy
for _ in range(1_500_000):
    json.loads(row)
limit = time.process_time() - start
start = time.process_time()
source = open_source(source_spec(listing={str(in_directory / name)!r}))
seconds = time.process_time() - start
peak_mb = memory_mb("VmHWM") - before
assert len(source) == 1_000_000 and source.path(999_999).endswith("n00000999_999999.JPEG")
assert seconds < limit, (seconds, limit)
assert peak_mb < 250, peak_mb
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])
