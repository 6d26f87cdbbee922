"""A listing whose samples carry declared fields: each is a column of the CSV file or a key of the JSON lines."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, final

from gpuflow.errors import SourceError, show
from gpuflow.sources.field_spec import FieldSpec, classes_of_boxes, label_field
from gpuflow.sources.files import FileSource
from gpuflow.sources.hints import near_word
from gpuflow.sources.keys import Named
from gpuflow.sources.listing_text import (
    check_path,
    check_sample,
    column_of,
    csv_rows,
    json_objects,
    load,
    parsed_json,
    parsed_number,
    resolved,
)
from gpuflow.sources.paths import PathTableBuilder
from gpuflow.sources.record_builder import Locate, RecordBuilder
from gpuflow.sources.record_table import MaskFiles
from gpuflow.sources.sample_labels import names_in, sample_labels
from gpuflow.sources.storage import CacheSpec, is_remote, open_storage

_ROWS = 4096
"""Number of samples in one block."""

Block = dict[str, list[Any]]


@final
class _Lines:
    """Where samples stand: their lines in the file."""

    def __init__(self, place: str) -> None:
        self.place, self.numbers = place, array("q")
        self.locate = Locate(lambda i: f"{place}:{self.numbers[i]}")


def open_with_fields(spec: Named, place: str, root: str, cache: CacheSpec | None, *, is_csv: bool) -> FileSource:
    """Index a listing with the fields that `spec` declares. Samples have the order of its rows.

    root: the directory that relative paths start from. cache: where files behind URLs are kept.
    """
    declared = dict(spec.declared)
    image = next((field.column or name for name, field in declared.items() if field.type == "image"), "path")
    label_column, label = label_field(spec.declared)
    lines = _Lines(place)
    builder = RecordBuilder(spec.declared, classes_of_boxes(spec.declared, spec.classes), place, lines.locate)
    label_classes = label.classes if label is not None and label.classes is not None else spec.classes
    labels = sample_labels(label, label_column, label_classes, place, lines.locate)
    masks = {name: field.column or name for name, field in declared.items() if field.is_mask_file}
    tables = {column: PathTableBuilder() for column in (image, *masks.values())}
    columns = list(dict.fromkeys([*tables, *([label_column] if label is not None else []), *builder.columns()]))
    data = load(place)
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
        labels.add(block[label_column if label is not None else image])
        builder.add(block, len(block[image]))
    if not lines.numbers:
        raise SourceError(f"{place}: must list at least one sample, got none; add rows")
    paths = {column: resolved(table, root, lines.locate.sample) for column, table in tables.items()}
    storage = open_storage(paths[image][0], cache)
    files = {}
    for name, column in masks.items():
        path = paths[column][0]
        same = is_remote(path) == storage.remote
        files[name] = MaskFiles(storage if same else open_storage(path, cache), paths[column], root)
    storages = tuple(dict.fromkeys([storage, *(file.storage for file in files.values())])) if files else ()
    classes, values = labels.build()
    records = builder.build(files, storages)
    if label is None:
        classes = records.box_classes
    return FileSource(storage, paths[image], values, classes, root=root, has_labels=label is not None, table=records)


# --- CSV --------------------------------------------------------------------------------------------------------------

Parser = Callable[[str], Any]


def _csv_blocks(
    data: bytes, lines: _Lines, columns: Sequence[str], parsers: Mapping[str, tuple[Parser, str]]
) -> Iterator[tuple[int, Block]]:
    """Yield blocks of samples, and the number of the first one in each. Cells are parsed to what JSON lines hold."""
    rows = csv_rows(data, lines.place)
    line, header = next(rows, (1, None))
    if header is None:
        return
    names = [name.strip() for name in header]
    places = {column: column_of(column, names, f"{lines.place}:{line}") for column in columns}
    first = 0
    while block := list(islice(rows, _ROWS)):
        lines.numbers.extend(line for line, _ in block)
        for line, row in block:
            if len(row) != len(names):
                raise SourceError(
                    f"{lines.place}:{line}: row must have the header's {len(names)} fields, got {len(row)} "
                    f"field{'s' * (len(row) != 1)}; quote a field that has a comma"
                )
            check_sample(row, header, f"{lines.place}:{line}")
        cells = {column: [row[place] for _, row in block] for column, place in places.items()}
        yield (
            first,
            {
                column: _parsed(texts, column, first, lines, *parsers[column]) if column in parsers else texts
                for column, texts in cells.items()
            },
        )
        first += len(block)


def _parsed(texts: Sequence[str], column: str, first: int, lines: _Lines, parser: Parser, form: str) -> list[Any]:
    try:
        return list(map(parser, texts))
    except ValueError:
        for i, text in enumerate(texts, start=first):
            try:
                parser(text)
            except ValueError as fault:
                here = lines.locate.value(i, column)
                raise SourceError(f"{here} must be {form}, got {show(text)}; correct it") from fault
        raise


def _parsers(declared: Sequence[tuple[str, FieldSpec]], place: str) -> dict[str, tuple[Parser, str]]:
    """How the cells of columns become values, and what that is called. Columns of text are not among them.

    Raises SourceError if two fields would read one column differently.
    """
    found: dict[str, tuple[str, tuple[Parser, str] | None]] = {}
    for name, spec in declared:
        read = [(spec.column or name, _parser(spec))]
        if spec.labels is not None:
            read.append((spec.labels, _NAMES))
        for column, parser in read:
            other, known = found.setdefault(column, (name, parser))
            if known != parser:
                raise SourceError(
                    f"{place}: the fields {other} and {name} must not read the column {column!r} in two ways "
                    f"({_form(known)}, {_form(parser)}); name another column for one of them"
                )
    return {column: parser for column, (_, parser) in found.items() if parser is not None}


def _parser(spec: FieldSpec) -> tuple[Parser, str] | None:
    """How a cell becomes the value of a field, and what that is called; None if it stays text."""
    if spec.type in ("boxes", "keypoints") or (spec.type == "mask" and spec.kind in ("rle", "polygons")):
        return _LIST
    if spec.type == "number" or (spec.type == "label" and spec.kind == "number"):
        return _NUMBER
    if spec.type == "label" and spec.kind == "vector":
        return _LIST
    return _NAMES if spec.type == "label" and spec.kind == "classes" and spec.separator is None else None


def _form(parser: tuple[Parser, str] | None) -> str:
    return "text" if parser is None else parser[1]


def _list(text: str) -> Any:
    """A list in JSON; no text is an empty list."""
    return parsed_json(text) if text.strip() else []


def _names(text: str) -> Any:
    """`cat|dog`, or a list in JSON."""
    if text.lstrip().startswith("["):
        return parsed_json(text)
    return names_in(text, "|")


_LIST: tuple[Parser, str] = _list, "a list in JSON"
_NUMBER: tuple[Parser, str] = parsed_number, "a number"
_NAMES: tuple[Parser, str] = _names, "labels separated by |, or a list in JSON"


# --- JSON lines -------------------------------------------------------------------------------------------------------


def _json_blocks(data: bytes, lines: _Lines, columns: Sequence[str]) -> Iterator[tuple[int, Block]]:
    """Like `_csv_blocks`, for JSON lines."""
    rows = _json_rows(data, lines.place, columns)
    first = 0
    while block := list(islice(rows, _ROWS)):
        lines.numbers.extend(line for line, _ in block)
        yield first, {column: [row[column] for _, row in block] for column in columns}
        first += len(block)


def _json_rows(data: bytes, place: str, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each object with these keys, and its line."""
    for number, row in json_objects(data, place):
        for column in columns:
            if column not in row:
                raise SourceError(
                    f"{place}:{number}: object must have the key {column!r}, got {', '.join(row)}"
                    f"{near_word(column, list(row))}"
                )
        yield number, row
