"""The listing source: a CSV or JSON-lines file of paths and labels, or of declared fields.

The file is read and checked in blocks of thousands of rows. Only if a check fails, it is read again row by row to find
the faulty row.
"""

from __future__ import annotations

import csv
import os
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, final

from gpuflow.errors import SourceError, near_word, show
from gpuflow.sources.field_spec import (
    IMAGES_ALONE,
    FieldPairs,
    FieldSpec,
    columns_of,
    pairs_of_fields,
)
from gpuflow.sources.labels import Locate, names_in
from gpuflow.sources.listing_text import (
    check_path,
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
from gpuflow.sources.record_table import SourceBuilder, TableSource, WholeFiles
from gpuflow.sources.spec import Listed, Named
from gpuflow.sources.storage import PathTableBuilder, is_remote, open_storage, parent_of

_EXTENSIONS = (".csv", ".jsonl", ".ndjson", ".json")
_ROWS = 4096
"""Number of rows in one block."""
_DEFAULT_FIELDS = pairs_of_fields({"image": FieldSpec(column="path"), "label": None})

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

    header: the names in its first row, or None if that is a sample. places: where the columns that are read stand in a
    row. width: fields in each row.
    """

    header: list[str] | None
    places: dict[str, int]
    width: int


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

    def index(self) -> TableSource:
        """Index the listing. Samples have the order of its rows."""
        place = self.listing if is_remote(self.listing) else os.path.expanduser(self.listing)
        extension = os.path.splitext(place)[1].lower()
        if extension not in _EXTENSIONS:
            action = "did you mean source.hf?" if extension in (".parquet", ".arrow") else "rename the file"
            raise SourceError(f"source.listing must end in {', '.join(_EXTENSIONS)}, got {self.listing!r}; {action}")
        root = self.root if self.root is not None else parent_of(place)
        root = root if is_remote(root) else os.path.expanduser(root)
        return _indexed(self, place, root, is_csv=extension == ".csv")

    @property
    def folder_of_images(self) -> str:
        return self.root or self.listing


def _columns(data: bytes, place: str, columns: Sequence[str] | None, alone: FieldSpec | None) -> Columns:
    """Find these columns by the header; without them those of paths and labels. Raises SourceError.

    alone: the field of the images, if it is the only one: the file may have one column without a header.
    """
    lines = list[int]()
    header = next(csv_rows(data, place, lines), [])
    if columns is not None and header:
        names = [name.strip() for name in header]
        if alone is not None and len(names) == 1 and names[0].lower() != columns[0].lower():
            named = _is_header([names[0].lower()], _first_rows(data)[1:])
            if not named or alone.column is None:
                return Columns(header if named else None, {columns[0]: 0}, 1)
        return Columns(
            header, {column: column_of(column, names, f"{place}:{lines[0]}") for column in columns}, len(header)
        )
    try:
        return _guessed(data)
    except ValueError as fault:
        action = "rename the columns that are meant" if len(header) > 1 else f"add labels, or {IMAGES_ALONE}"
        raise SourceError(
            f"{place}:{lines[0]}: header must name the columns path and label, got {', '.join(header)}; {action}"
        ) from fault


def _guessed(data: bytes) -> Columns:
    """Find paths and labels by the first rows. Raises ValueError for a header that leaves open which ones are meant."""
    first, *rows = _first_rows(data) or [[]]
    names = [name.strip().lower() for name in first]
    if "path" in names and "label" in names:
        if names.count("path") > 1 or names.count("label") > 1:
            raise ValueError("a header with two of them")
        return Columns(first, {name: names.index(name) for name in ("path", "label")}, len(first))
    if not _is_header(names, rows):
        return Columns(None, {"path": 0, "label": 1}, 2)
    if len(names) != 2:
        raise ValueError("a header without path or label")
    path = _path_column(names, rows)
    return Columns(first, {"path": path, "label": 1 - path}, 2)


def _first_rows(data: bytes) -> list[list[str]]:
    """Return the rows that say whether the first of them is a header."""
    rows = list[list[str]]()
    with suppress(csv.Error, UnicodeDecodeError):  # a faulty row is found again when it is read
        rows.extend(islice(filter(None, csv_lines(data)), _LOOKED_AT + 1))
    return rows


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


def _note(table: Columns) -> str:
    """Describe the first row for `gpuflow explain`."""
    header, places, _ = table
    if header is None:
        return "no header, its first row is a sample"
    path, label = header[places["path"]], header[places["label"]]
    return f"header {','.join(header)}: paths from {path!r}, labels from {label!r}"


# --- samples ----------------------------------------------------------------------------------------------------------


Block = dict[str, list[Any]]


@final
class _Lines:
    """Where samples stand: their lines in the file."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.numbers = array("q")
        self.locate = Locate(lambda i: f"{place}:{self.numbers[i]}")


def _indexed(spec: Listing, place: str, root: str, *, is_csv: bool) -> TableSource:
    """Index a listing. Samples have the order of its rows. root: the directory that relative paths start from."""
    declared = spec.declared or _DEFAULT_FIELDS
    image = next((field.column or name for name, field in declared if field.type == "image"), "path")
    lines = _Lines(place)
    builder = SourceBuilder(declared, spec.classes, place, lines.locate)
    masks = {name: field.column or name for name, field in declared if field.is_mask_file}
    tables = {column: PathTableBuilder() for column in (image, *masks.values())}
    columns = list(dict.fromkeys([*tables, *columns_of(declared)]))
    data = load(place, "source.listing")
    note = ""
    if is_csv:
        alone = spec.declared[0][1] if columns == [image] and len(spec.declared) == 1 else None
        table = _columns(data, place, columns if spec.declared else None, alone)
        note = "" if spec.declared and table.header is not None else _note(table)
        blocks = _csv_blocks(data, lines, table, _parsers(declared, place))
    else:
        blocks = _json_blocks(data, lines, columns)
    for first, block in blocks:
        for column, paths in tables.items():
            _add_paths(paths, block[column], column, first, lines.locate)
        builder.add(block, len(block[image]))
    if not lines.numbers:
        raise SourceError(f"{place}: must list at least one sample, got none; add rows")
    located = {column: resolved(paths, root, lines.locate.sample) for column, paths in tables.items()}
    storage = open_storage(located[image][0], spec.cache)
    files = {}
    for name, column in masks.items():
        path = located[column][0]
        same = is_remote(path) == storage.remote
        files[name] = WholeFiles(storage if same else open_storage(path, spec.cache), located[column], root)
    whole = WholeFiles(storage, located[image], root)
    return builder.source(TableSource, whole, len(lines.numbers), files, note=note, locate=lines.locate.sample)


def _add_paths(table: PathTableBuilder, paths: Sequence[Any], column: str, first: int, locate: Locate) -> None:
    """Append the paths of a block. Raises SourceError at a faulty one. first: the number of the first sample."""
    try:
        table.add(paths)
    except (ValueError, TypeError):
        for i, path in enumerate(paths, start=first):
            here = locate.value(i, column)
            if not isinstance(path, str):
                raise SourceError(f"{here} must be the path of a file, got {show(path)}; correct it") from None
            check_path(path, here)
        raise


# --- CSV --------------------------------------------------------------------------------------------------------------


class _Parser(NamedTuple):
    """How a cell becomes a value, and what such a cell is called."""

    parse: Callable[[str], Any]
    form: str


def _csv_blocks(
    data: bytes, lines: _Lines, table: Columns, parsers: Mapping[str, _Parser]
) -> Iterator[tuple[int, Block]]:
    """Yield blocks of samples, and the number of the first one in each. Cells are parsed to what JSON lines hold."""
    header, places, width = table
    reader = csv_rows(data, lines.place, lines.numbers)
    if header is not None:
        next(reader)
        lines.numbers.pop()
    first = 0
    while rows := list(islice(reader, _ROWS)):
        for row in rows if set(map(len, rows)) != {width} or header in rows else ():
            here = lines.locate.sample(first + rows.index(row))
            if len(row) != width:
                rule = f"the header's {width} fields" if header else "path,label" if width > 1 else "one path"
                action = "separate fields by commas" if len(row) == 1 else "quote a field that has a comma"
                action += f", or {IMAGES_ALONE}" if rule == "path,label" and len(row) == 1 else ""
                got = f"{len(row)} field{'s' * (len(row) != 1)}"
                raise SourceError(f"{here}: row must have {rule}, got {got}; {action}")
            if row == header:
                got = f"the header again: {','.join(row)}"
                raise SourceError(f"{here}: row must be a sample, got {got}; remove the row")
        cells = {column: [row[place] for row in rows] for column, place in places.items()}
        yield (
            first,
            {
                column: _parsed(texts, column, first, lines, parsers.get(column, _TEXT))
                for column, texts in cells.items()
            },
        )


def _parsed(texts: list[str], column: str, first: int, lines: _Lines, parser: _Parser) -> list[Any]:
    """Parse cells. first: the number of the first sample."""
    if parser is _TEXT:
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
        read = [(column, _parser(spec)) for column in spec.columns or (spec.column or name,)]
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
    if spec.type == "number" or spec.kind == "number" or spec.columns:
        return _ONE_NUMBER
    if spec.type in ("boxes", "keypoints") or spec.kind in ("rle", "polygons", "vector"):
        return _LIST
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
    """Yield blocks of samples of JSON lines, see `_csv_blocks`."""
    numbered = json_lines(data)
    while block := list(islice(numbered, _ROWS)):
        first = len(lines.numbers)
        lines.numbers.extend(number for number, _ in block)
        rows = json_objects(block, lines.place)
        for column in columns:
            for i, row in enumerate(rows, start=first):
                if column not in row:
                    raise SourceError(
                        f"{lines.locate.sample(i)}: object must have the key {column!r}, got {', '.join(row) or 'none'}"
                        f"{near_word(column, list(row))}"
                    )
        yield first, {column: [row[column] for row in rows] for column in columns}
