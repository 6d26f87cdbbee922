"""The listing source: a CSV or JSON-lines file of paths and labels, or of declared fields.

The file is read and checked in blocks of thousands of rows. Only if a check fails, it is read again row by row to find
the faulty row.
"""

from __future__ import annotations

import csv
import json
import os
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, final

import numpy as np

from gpuflow.errors import SourceError, near_word, show
from gpuflow.sources.field_spec import FieldPairs, FieldSpec, classes_of_boxes, label_field
from gpuflow.sources.files import FileSource, Listed
from gpuflow.sources.labels import Codes, Locate, names_in, resolve_labels, sample_labels, texts_of
from gpuflow.sources.listing_text import (
    check_path,
    check_sample,
    column_of,
    csv_lines,
    csv_rows,
    json_lines,
    json_objects,
    load,
    parsed_json,
    parsed_number,
    resolved,
)
from gpuflow.sources.paths import PathTableBuilder
from gpuflow.sources.record_builder import RecordBuilder
from gpuflow.sources.record_table import MaskFiles
from gpuflow.sources.spec import Named
from gpuflow.sources.storage import is_remote, open_storage, parent_of

_ROWS = 16_384
"""Number of rows in one block."""
_ROWS_WITH_FIELDS = 4096
"""The same where samples have fields, which take more memory."""

_LOOKED_AT = 1000
"""Number of rows that say whether the first one is a header."""

_PATH_WORDS = {"file", "file_name", "file_path", "filename", "filepath", "id", "image", "image_id", "image_path", "img"}
_PATH_WORDS |= {"path", "url"}
_LABEL_WORDS = {"category", "class", "class_id", "class_name", "label", "label_id", "labels", "name", "target"}
_LABEL_WORDS |= {"target_id"}
"""Usual names of the columns of paths and of labels."""
_FILE = re.compile(r"(?s).*(/|\\|\.\w{1,5}$)")
"""What paths have and names of columns mostly have not: a slash, or an extension."""
_WITH_EXTENSION = re.compile(r"(?s).*\.\w{1,5}$")
_NUMBER = re.compile(r"-?[0-9]+")


class Columns(NamedTuple):
    """The columns of a CSV file.

    header: the names in its first row, or None if that is a sample. width: fields in each row.
    """

    header: tuple[str, ...] | None
    path: int
    label: int
    width: int


class Row(NamedTuple):
    """One sample as written in the file, and the line on which it starts."""

    line: int
    path: str
    label: int | str


@final
@dataclass(frozen=True, kw_only=True)
class Listing(Listed, Named):
    """A CSV or JSON-lines file of paths and labels.

    Args:
        listing: a CSV or JSON-lines file of paths and labels.
        root: the directory that a listing's relative paths start from; by default the listing's own.
    """

    kind = "listing"

    listing: str
    root: str | None = None

    def index(self) -> FileSource:
        """Index the listing. Samples have the order of its rows."""
        place = self.listing if is_remote(self.listing) else os.path.expanduser(self.listing)
        extension = os.path.splitext(place)[1].lower()
        if extension not in _FORMATS:
            action = "did you mean source.hf?" if extension in (".parquet", ".arrow") else "rename the file"
            raise SourceError(f"source.listing must end in {', '.join(_FORMATS)}, got {self.listing!r}; {action}")
        root = self.root if self.root is not None else parent_of(place)
        root = root if is_remote(root) else os.path.expanduser(root)
        if self.declared:
            return _with_fields(self, place, root, is_csv=extension == ".csv")
        chunks, rows = _FORMATS[extension]
        data = load(place, "source.listing")
        table = PathTableBuilder()
        codes = Codes()
        parts = []
        try:
            for paths, labels in chunks(data):
                if not set(map(type, labels)) <= {int, str}:
                    raise ValueError("a label is neither a number nor a name")
                table.add(paths)
                parts.append(np.fromiter(map(codes.__getitem__, labels), dtype=np.int32, count=len(labels)))
        except (ValueError, KeyError, TypeError, csv.Error) as fault:
            for _ in rows(data, place):
                pass
            raise AssertionError(f"{place}: a check of blocks failed, but no row is faulty") from fault
        if not codes:
            raise SourceError(f"{place}: must list at least one sample, got none; add rows of path and label")
        row_codes = np.concatenate(parts)
        del parts

        def locate(code: int) -> str:
            first = int(np.argmax(row_codes == code))
            return f"{place}:{next(islice(rows(data, place), first, None)).line}"

        classes, values = resolve_labels(texts_of(codes, self.classes), self.classes, locate, place)
        located = resolved(table, root, lambda i: f"{place}:{next(islice(rows(data, place), i, None)).line}")
        note = _header_note(data) if extension == ".csv" else ""
        return FileSource(
            open_storage(located[0], self.cache), located, values[row_codes], classes, root=root, note=note
        )

    @property
    def folder_of_images(self) -> str:
        return self.root or self.listing


def _columns(data: bytes) -> Columns:
    """Find the columns by the first rows. Raises ValueError for a header that leaves open which ones are meant."""
    first = list[str]()
    rows = list[list[str]]()
    with suppress(csv.Error, UnicodeDecodeError):  # a faulty row is found again when it is read
        reader = filter(None, csv_lines(data))
        first = next(reader, [])
        rows.extend(islice(reader, _LOOKED_AT))
    names = [name.strip().lower() for name in first]
    if "path" in names and "label" in names:
        if names.count("path") > 1 or names.count("label") > 1:
            raise ValueError("a header with two of them")
        return Columns(tuple(first), names.index("path"), names.index("label"), len(first))
    if not _is_header(names, rows):
        return Columns(None, 0, 1, 2)
    if len(names) != 2:
        raise ValueError("a header without path or label")
    path = _path_column(names, rows)
    return Columns(tuple(first), path, 1 - path, 2)


def _is_header(names: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """Return True if the first row, in lower case, names columns: it is unlike the rows below it, which are samples.

    A row with a path is a sample, with any label. Without one, it is a header if its words are usual names of columns,
    or if a column has paths or numbers in every row below and nothing that is equal to its name. Words with a slash or
    a dot, such as `image/path`, are no path if each part is a usual name of a column, or if the paths below have
    extensions and the labels below are numbers.
    """
    below = [[field.strip().lower() for field in row] for row in rows if len(row) == len(names)]
    columns = list(zip(names, zip(*below, strict=True), strict=bool(below)))
    over_numbers = any(all(map(_NUMBER.fullmatch, cells)) and not _NUMBER.fullmatch(name) for name, cells in columns)
    if any(map(_FILE.match, names)):
        words = [word for name in names for word in re.split(r"[/\\.]", name)]
        if (_PATH_WORDS | _LABEL_WORDS).issuperset(words):
            return True
        over_files = any(all(map(_WITH_EXTENSION.match, cells)) for _, cells in columns)
        return over_files and over_numbers and not any(map(_WITH_EXTENSION.match, names))
    if not _PATH_WORDS.isdisjoint(names) or "label" in names or _LABEL_WORDS.issuperset(names):
        return bool(names)
    if any(name in cells for name, cells in columns):
        return False
    over_paths = any(all(map(_FILE.match, cells)) for name, cells in columns if not _NUMBER.fullmatch(name))
    return over_paths or over_numbers


def _path_column(names: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return which of two columns has the paths: by its name or that of the other one, else by the rows."""
    if "path" in names or "label" in names:
        return names.index("path") if "path" in names else 1 - names.index("label")
    with_paths = [all(_FILE.match(row[i]) for row in rows if len(row) == 2) for i in (0, 1)]
    return 1 if with_paths == [False, True] else 0


def _header_note(data: bytes) -> str:
    """Describe the first row for `gpuflow explain`."""
    header, path, label, _ = _columns(data)
    if header is None:
        return "no header, its first row is a sample"
    return f"header {','.join(header)}: paths from {header[path]!r}, labels from {header[label]!r}"


def _csv_chunks(data: bytes) -> Iterator[tuple[list[str], list[str]]]:
    """Yield paths and labels in blocks of rows. Raises ValueError or csv.Error if anything is wrong."""
    header, path, label, width = _columns(data)
    reader = filter(None, csv_lines(data))
    if header is not None:
        next(reader)
    while rows := list(islice(reader, _ROWS)):
        if set(map(len, rows)) - {width}:
            raise ValueError("a row is too short or too long")
        if header is not None and list(header) in rows:
            raise ValueError("a row repeats the header")
        yield [row[path] for row in rows], [row[label] for row in rows]


def _csv_rows(data: bytes, place: str) -> Iterator[Row]:
    """Like `_csv_chunks`, but yields single rows with their lines. Raises SourceError at the faulty row."""
    columns = None
    for start, row in csv_rows(data, place):
        if columns is None:
            try:
                columns = _columns(data)
            except ValueError as fault:
                raise SourceError(
                    f"{place}:{start}: header must name the columns path and label, got {', '.join(row)}; "
                    f"rename the columns that are meant"
                ) from fault
            if columns.header is not None:
                continue
        header, path, label, width = columns
        if len(row) != width:
            rule = f"row must have the header's {width} fields" if header is not None else "row must be path,label"
            action = "separate fields by commas" if len(row) == 1 else "quote a path that has a comma"
            raise SourceError(f"{place}:{start}: {rule}, got {len(row)} field{'s' * (len(row) != 1)}; {action}")
        check_sample(row, header, f"{place}:{start}")
        check_path(row[path], f"{place}:{start}")
        yield Row(start, row[path], row[label])


def _json_lines(data: bytes) -> Iterator[tuple[list[str], list[int | str]]]:
    """Like `_csv_chunks`, for JSON lines."""
    reader = json_lines(data)
    while lines := [line for _, line in islice(reader, _ROWS)]:
        rows = parsed_json((b"[" + b",".join(lines) + b"]").decode())
        whole = all(line.lstrip()[:1] == b"{" and line.rstrip()[-1:] == b"}" for line in lines)
        if len(rows) != len(lines) or not whole:
            raise ValueError("a line is not one object")
        yield [row["path"] for row in rows], [row["label"] for row in rows]


def _json_rows(data: bytes, place: str) -> Iterator[Row]:
    """Like `_csv_rows`, for JSON lines."""
    for number, row in json_objects(data, place):
        here = f"{place}:{number}"
        lacking = [key for key in ("path", "label") if key not in row]
        if lacking:
            raise SourceError(
                f"{here}: object must have the keys path and label, got {', '.join(row) or 'none'}; add {lacking[0]!r}"
            )
        if type(row["label"]) not in (int, str):
            got = json.dumps(row["label"])
            raise SourceError(f"{here}: label must be an integer or a class name, got {got}; correct it")
        if not isinstance(row["path"], str):
            raise SourceError(f"{here}: path must be a string, got {json.dumps(row['path'])}; correct it")
        check_path(row["path"], here)
        yield Row(number, row["path"], row["label"])


_Chunks = Callable[[bytes], Iterator[tuple[Sequence[str], Sequence[int | str]]]]
_Rows = Callable[[bytes, str], Iterator[Row]]
_FORMATS: dict[str, tuple[_Chunks, _Rows]] = {
    ".csv": (_csv_chunks, _csv_rows),
    ".jsonl": (_json_lines, _json_rows),
    ".ndjson": (_json_lines, _json_rows),
    ".json": (_json_lines, _json_rows),
}


# --- fields -----------------------------------------------------------------------------------------------------------


Block = dict[str, list[Any]]


@final
class _Lines:
    """Where samples stand: their lines in the file."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.numbers = array("q")
        self.locate = Locate(lambda i: f"{place}:{self.numbers[i]}")


def _with_fields(spec: Listing, place: str, root: str, *, is_csv: bool) -> FileSource:
    """Index a listing with the fields that `spec` declares. Samples have the order of its rows.

    root: the directory that relative paths start from.
    """
    declared = dict(spec.declared)
    image = next((field.column or name for name, field in declared.items() if field.type == "image"), "path")
    label_column, label, label_classes = label_field(spec.declared, spec.classes)
    lines = _Lines(place)
    builder = RecordBuilder(spec.declared, classes_of_boxes(spec.declared, spec.classes), place, lines.locate)
    labels = None if label is None else sample_labels(label, label_column, label_classes, place, lines.locate)
    masks = {name: field.column or name for name, field in declared.items() if field.is_mask_file}
    tables = {column: PathTableBuilder() for column in (image, *masks.values())}
    columns = list(dict.fromkeys([*tables, *([label_column] if label is not None else []), *builder.columns()]))
    data = load(place, "source.listing")
    if is_csv:
        blocks = _csv_blocks(data, lines, columns, _parsers(spec.declared, place))
    else:
        blocks = _json_blocks(data, lines, columns)
    for first, block in blocks:
        for column, table in tables.items():
            for i, path in enumerate(block[column], start=first):
                if not isinstance(path, str):
                    here = lines.locate.value(i, column)
                    raise SourceError(f"{here} must be the path of a file, got {show(path)}; correct it")
                check_path(path, lines.locate.value(i, column))
            table.add(block[column])
        if labels is not None:
            labels.add(block[label_column])
        builder.add(block, len(block[image]))
    if not lines.numbers:
        raise SourceError(f"{place}: must list at least one sample, got none; add rows")
    paths = {column: resolved(table, root, lines.locate.sample) for column, table in tables.items()}
    storage = open_storage(paths[image][0], spec.cache)
    files = {}
    for name, column in masks.items():
        path = paths[column][0]
        same = is_remote(path) == storage.remote
        files[name] = MaskFiles(storage if same else open_storage(path, spec.cache), paths[column], root)
    storages = tuple(dict.fromkeys([storage, *(file.storage for file in files.values())])) if files else ()
    classes, values = ((), np.zeros(len(lines.numbers), np.int64)) if labels is None else labels.build()
    records = builder.build(files, storages)
    if labels is None:
        classes = records.box_classes
    return FileSource(storage, paths[image], values, classes, root=root, has_labels=labels is not None, table=records)


# --- CSV --------------------------------------------------------------------------------------------------------------


class _Parser(NamedTuple):
    """How a cell becomes a value, and what such a cell is called."""

    parse: Callable[[str], Any]
    form: str


def _csv_blocks(
    data: bytes, lines: _Lines, columns: Sequence[str], parsers: Mapping[str, _Parser]
) -> Iterator[tuple[int, Block]]:
    """Yield blocks of samples, and the number of the first one in each. Cells are parsed to what JSON lines hold."""
    rows = csv_rows(data, lines.place)
    line, header = next(rows, (1, None))
    if header is None:
        return
    names = [name.strip() for name in header]
    places = {column: column_of(column, names, f"{lines.place}:{line}") for column in columns}
    first = 0
    while block := list(islice(rows, _ROWS_WITH_FIELDS)):
        lines.numbers.extend(line for line, _ in block)
        for line, row in block:
            if len(row) != len(names):
                raise SourceError(
                    f"{lines.place}:{line}: row must have the header's {len(names)} fields, got {len(row)} "
                    f"field{'s' * (len(row) != 1)}; quote a field that has a comma"
                )
            check_sample(row, header, f"{lines.place}:{line}")
        cells = {column: [row[place] for _, row in block] for column, place in places.items()}
        parsed = {column: _parsed(texts, column, first, lines, parsers.get(column)) for column, texts in cells.items()}
        yield first, parsed
        first += len(block)


def _parsed(texts: list[str], column: str, first: int, lines: _Lines, parser: _Parser | None) -> list[Any]:
    """Parse cells; without a parser they stay text. first: the number of the first sample."""
    if parser is None or parser is _TEXT:
        return texts
    try:
        return list(map(parser.parse, texts))
    except ValueError:
        for i, text in enumerate(texts, start=first):
            try:
                parser.parse(text)
            except ValueError as fault:
                here = lines.locate.value(i, column)
                raise SourceError(f"{here} must be {parser.form}, got {show(text)}; correct it") from fault
        raise


def _parsers(declared: FieldPairs, place: str) -> dict[str, _Parser]:
    """Return how the cells of columns become values.

    Raises SourceError if two fields would read one column differently.
    """
    found: dict[str, tuple[str, _Parser]] = {}
    for name, spec in declared:
        read = [(spec.column or name, _parser(spec))]
        if spec.labels is not None:
            read.append((spec.labels, _NAMES))
        for column, parser in read:
            other, known = found.setdefault(column, (name, parser))
            if known != parser:
                raise SourceError(
                    f"{place}: the fields {other} and {name} must not read the column {column!r} in two ways "
                    f"({known.form}, {parser.form}); name another column for one of them"
                )
    return {column: parser for column, (_, parser) in found.items()}


def _parser(spec: FieldSpec) -> _Parser:
    """Return how a cell becomes the value of a field."""
    if spec.type in ("boxes", "keypoints") or spec.kind in ("rle", "polygons", "vector"):
        return _LIST
    if spec.type == "number" or spec.kind == "number":
        return _ONE_NUMBER
    return _NAMES if spec.kind == "classes" and spec.separator is None else _TEXT


def _list(text: str) -> Any:
    """Parse a list in JSON; no text is an empty list."""
    return parsed_json(text) if text.strip() else []


def _names(text: str) -> Any:
    """Parse `cat|dog`, or a list in JSON."""
    if text.lstrip().startswith("["):
        return parsed_json(text)
    return names_in(text, "|")


_TEXT = _Parser(str, "text")
_LIST = _Parser(_list, "a list in JSON")
_ONE_NUMBER = _Parser(parsed_number, "a number")
_NAMES = _Parser(_names, "labels separated by |, or a list in JSON")


# --- JSON lines -------------------------------------------------------------------------------------------------------


def _json_blocks(data: bytes, lines: _Lines, columns: Sequence[str]) -> Iterator[tuple[int, Block]]:
    """Like `_csv_blocks`, for JSON lines."""
    rows = _objects_with(data, lines.place, columns)
    first = 0
    while block := list(islice(rows, _ROWS_WITH_FIELDS)):
        lines.numbers.extend(line for line, _ in block)
        yield first, {column: [row[column] for _, row in block] for column in columns}
        first += len(block)


def _objects_with(data: bytes, place: str, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each object, and its line. Raises SourceError if it lacks one of these keys."""
    for number, row in json_objects(data, place):
        for column in columns:
            if column not in row:
                raise SourceError(
                    f"{place}:{number}: object must have the key {column!r}, got {', '.join(row)}"
                    f"{near_word(column, list(row))}"
                )
        yield number, row
