"""The text of a listing: loading it, its lines, and the paths in it."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any

from gpuflow.errors import SourceError, near_word
from gpuflow.sources.storage import PathTable, PathTableBuilder, is_over_http, is_remote, open_storage
from gpuflow.sources.storage.local import missing_path

_LARGEST_CELL = 1 << 24
"""Characters of a cell of CSV: the masks of an image's instances take millions. More are a quote that never ends."""
_ESCAPES = str.maketrans({mark: f"%{ord(mark):02X}" for mark in "%#?"})
"""What would end the path of a URL, or begin an escape. The other characters are escaped when a URL is requested."""
_WHOLE = re.compile(r"[+-]?[0-9]+")


def load(place: str, key: str) -> bytes:
    """Read a file that lists samples, without the mark of its encoding. Raises SourceError.

    key: of the configuration, which names the file.
    """
    if not is_remote(place) and not os.path.exists(place):
        raise SourceError(f"{key} must be a file, got {place!r}, which does not exist{missing_path(place)}")
    return open_storage(place).load(place).removeprefix(BOM_UTF8)


def resolved(table: PathTableBuilder, root: str, locate: Callable[[int], str]) -> PathTable:
    """Build the table with relative paths prefixed by `root`. All paths must be on one file system.

    Relative paths are names of files, and are percent-encoded where `root` is a URL over HTTP; others stay as written.

    locate: returns the place of sample i, for messages.
    """
    prefix = os.path.join(root, "")
    escapes = _ESCAPES if is_over_http(root) else {}
    if not (escapes or table.has_absolute):
        return table.build(prefix)
    lead = prefix if table.has_absolute else ""
    whole = PathTableBuilder()
    schemes: list[str] = []
    for chunk in table.chunks():
        paths = [path if _is_absolute(path) else lead + path.translate(escapes) for path in chunk]
        schemes += map(_scheme, paths)
        whole.add(paths)
    other = next((i for i, scheme in enumerate(schemes) if scheme != schemes[0]), None)
    if other is not None:
        path = next(islice(chain.from_iterable(table.chunks()), other, None))
        raise SourceError(
            f"{locate(other)}: path must be on the first row's file system ({schemes[0] or 'local'}), "
            f"got {path!r}; copy the files to one place, or make a listing for each"
        )
    return whole.build("" if lead else prefix)


def _is_absolute(path: str) -> bool:
    return path[0] == "/" or is_remote(path)


def _scheme(path: str) -> str:
    return path.partition("://")[0] if is_remote(path) else ""


def csv_lines(data: bytes) -> Any:
    """Return a reader of the rows of CSV. A mark of the encoding may begin a line, as in files that were joined."""
    csv.field_size_limit(max(csv.field_size_limit(), _LARGEST_CELL))  # of all readers of this process: it has no other
    lines: Iterable[str] = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", newline="")
    if BOM_UTF8 in data:
        lines = (line.removeprefix("\ufeff") for line in lines)
    return csv.reader(lines, strict=True)


def csv_rows(data: bytes, place: str, lines: MutableSequence[int]) -> Iterator[list[str]]:
    """Yield each row of CSV that is not empty. Appends the line on which it starts. Raises SourceError at a faulty one.

    Examples:
        >>> lines = []
        >>> list(csv_rows(b'a.jpg,cat\\n\\nb.jpg,"a\\ndog"\\nc.jpg,cat\\n', "list.csv", lines))
        [['a.jpg', 'cat'], ['b.jpg', 'a\\ndog'], ['c.jpg', 'cat']]
        >>> lines
        [1, 3, 5]
    """
    reader = csv_lines(data)
    start = 1
    try:
        for row in reader:
            if row:
                lines.append(start)
                yield row
            start = reader.line_num + 1
    except csv.Error as fault:
        raise SourceError(f"{place}:{start}: row must be valid CSV, got: {fault}; check its quotes") from fault
    except UnicodeDecodeError:  # of a block, which begins anywhere
        try:
            data.decode()
        except UnicodeDecodeError as fault:
            raise _not_utf8(fault, data.count(b"\n", 0, fault.start) + 1, place) from fault
        raise


def column_of(name: str, header: Sequence[str], here: str) -> int:
    """Find the only column of this very name, else the only one that differs in case alone.

    Raises SourceError, for a header that stands `here`, if there is none, or if there are several.

    Examples:
        >>> column_of("label", ["path", "Label"], "list.csv:1")
        1
    """
    same = [i for i, other in enumerate(header) if other == name]
    alike = same or [i for i, other in enumerate(header) if other.lower() == name.lower()]
    if len(alike) == 1:
        return alike[0]
    hint = near_word(name, [other for other in header if other != name])
    raise SourceError(f"{here}: header must have the column {name!r} once, got {', '.join(header) or 'none'}{hint}")


def parsed_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError, also for a value that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parsed_number(text: str) -> int | float:
    """Parse a number in ASCII digits, or `nan` or `inf`. Raises ValueError, also for `1_0`, which Python takes.

    Whole numbers keep all their digits, as in JSON, unless float64 has none of their size.

    Examples:
        >>> parsed_number("3"), parsed_number("2.5")
        (3, 2.5)
    """
    if "_" in text or not text.isascii():
        raise ValueError(f"no number: {text!r}")
    number = float(text)
    return int(text) if _WHOLE.fullmatch(text.strip()) and math.isfinite(number) else number


def json_lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not empty, and its number. A mark of the encoding may begin it, as in files that were
    joined."""
    for number, line in enumerate(io.BytesIO(data), start=1):
        line = line.removeprefix(BOM_UTF8)
        if line and not line.isspace():
            yield number, line


def json_objects(lines: Sequence[tuple[int, bytes]], place: str) -> list[dict[str, Any]]:
    """Parse lines and their numbers to JSON objects. Raises SourceError at a line that is none.

    They are parsed together. Only if that fails, they are parsed one by one to find the faulty line.
    """
    with suppress(ValueError):
        rows: list[Any] = parsed_json((b"[" + b",".join(line for _, line in lines) + b"]").decode())
        whole = all(line.lstrip()[:1] == b"{" and line.rstrip()[-1:] == b"}" for _, line in lines)
        if whole and len(rows) == len(lines):
            return rows
    return [_json_object(line, number, place) for number, line in lines]


def _json_object(line: bytes, number: int, place: str) -> dict[str, Any]:
    here = f"{place}:{number}"
    try:
        row = parsed_json(line.decode().strip(" \t\r\n"))  # of bytes, json would guess the encoding
    except UnicodeDecodeError as fault:
        raise _not_utf8(fault, number, place) from fault
    except json.JSONDecodeError as fault:
        got = f"invalid JSON ({fault.msg} at column {fault.colno})"
        if fault.pos == len(fault.doc) and fault.doc.startswith("{"):
            got = "one that does not end in this line"
        raise SourceError(f"{here}: line must be a JSON object, got {got}; write one object a line") from fault
    except ValueError as fault:
        raise SourceError(f"{here}: line must be a JSON object, got an error: {fault}; correct it") from fault
    if not isinstance(row, dict):
        raise SourceError(f"{here}: line must be a JSON object, got {type(row).__name__}; write one object a line")
    return row


def check_path(path: str, here: str) -> None:
    """Raise SourceError for a path that no file can have. here: its place."""
    if not path:
        raise SourceError(f"{here}: path must not be empty; name a file or remove the row")
    if "\0" in path:
        raise SourceError(f"{here}: path must not hold a NUL, got {path!r}; correct it")
    try:
        os.fsencode(path)
    except UnicodeEncodeError as fault:
        raise SourceError(f"{here}: path must be valid Unicode, got {path!r}; correct it") from fault


def _not_utf8(fault: UnicodeDecodeError, line: int, place: str) -> SourceError:
    """Return the error for a line that cannot be decoded. place: the file's."""
    return SourceError(
        f"{place}:{line}: text must be UTF-8, got byte 0x{fault.object[fault.start]:02x}; convert the file"
    )
