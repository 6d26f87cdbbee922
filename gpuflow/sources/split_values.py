"""Reads what a split depends on: the names of samples, columns of text, lists of files, groups."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import numpy as np

from gpuflow.errors import SourceError, near_word, show
from gpuflow.sources.base import Source, entries_of, records_of
from gpuflow.sources.listing_text import column_of, csv_rows, load
from gpuflow.sources.mix import MixSource
from gpuflow.sources.record_table import TableSource
from gpuflow.sources.spec import Samples, SourceSpec
from gpuflow.sources.split_spec import SplitSpec, pairs

_FIELD = "value of a column"
_READ_AT_ONCE = 64
"""Samples whose bytes are in memory together."""
_SEARCHED = 10_000
"""Names of a source among which a similar one is searched for."""


class Texts(NamedTuple):
    """A text for each sample. place: returns where that of sample i stands, for messages."""

    values: list[str]
    place: Callable[[int], str]


def names_of_samples(source: Source) -> list[str]:
    """Return the path of each sample below its source's root, which is the same wherever the root is.

    In shards it is SHARD/MEMBER, and in a dataset FILE/ROW. A source of another package has the paths that it gives.
    """
    if isinstance(source, MixSource):
        return [name for part in source.parts for name in names_of_samples(part)]
    return source.files.names() if isinstance(source, TableSource) else [source.path(i) for i in range(len(source))]


# --- columns ----------------------------------------------------------------------------------------------------------


def column_texts(source: Source, spec: SourceSpec, column: str, key: str, action: str = "") -> Texts:
    """Read a column of all samples as texts, without outer spaces; an empty one where there is no value.

    Numbers are texts as JSON writes them.

    Args:
        source: the whole source that `spec` describes.
        column: its name, the same in all sources of a mix.
        key: the key in YAML that names it, for messages.
        action: what to do about a sample without a value; by default none needs one.

    Raises SourceError: there is no such column, or a value is neither text nor a number.
    """
    parts = source.parts if isinstance(source, MixSource) else (source,)
    ends = np.cumsum([len(part) for part in parts])
    values = list[str]()
    places = list[Callable[[int], str]]()
    for part, one in zip(parts, spec.sources, strict=True):
        found, place = column_values(part, one, column, "any", key)
        for i, value in enumerate(found):
            values.append(_text(value))
            if not isinstance(value, str | int | float | None) or (action and not values[-1]):
                rule = "must be text, but not empty, or a number" if action else "must be text or a number"
                here = f"{key}: {place(i)}: {column}"
                raise SourceError(f"{here} {rule}, got {show(value)}; {action or 'correct it'}")
        places.append(place)

    def place_of(i: int) -> str:
        number = int(np.searchsorted(ends, i, side="right"))
        return places[number](i - int(ends[number]) + len(parts[number]))

    return Texts(values, place_of)


def column_values(
    source: Source, spec: SourceSpec, column: str, kind: Literal["number", "any"], key: str
) -> tuple[Any, Callable[[int], str]]:
    """Read the values of a column, and where each stands. The source is indexed again, with it as its only field.

    kind: the type of the field. key: see `column_texts`. Raises SourceError.
    """
    assert isinstance(spec, Samples)
    try:
        other = spec.with_one_column(_FIELD, column, kind).open()
    except SourceError as error:
        raise SourceError(f"{key}: {error}") from error
    try:
        if len(other) != len(source) or entries_of(other) != entries_of(source):
            paths = ([one.path(i) for i in range(len(one))] for one in (source, other))
            pairs_of_paths = enumerate(zip_longest(*paths, fillvalue="none"))
            i, (first, second) = next((i, pair) for i, pair in pairs_of_paths if pair[0] != pair[1])
            raise SourceError(
                f"{key}: {spec.where}: must give the same samples with the column {column!r} as without it, but sample "
                f"{i} is {second} and not {first}; write its values into a file, and name that with the key file"
            )
        place = getattr(other, "locate", None) or other.path
        return records_of(other, range(len(other))).columns[_FIELD], place
    finally:
        other.close()


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value.strip()
    return json.dumps(value) if isinstance(value, int | float) and value == value else ""


# --- files ------------------------------------------------------------------------------------------------------------


def file_texts(source: Source, rule: SplitSpec) -> Texts:
    """Read which part, or value of `rule.column`, files give each sample; an empty text where they give none.

    Raises SourceError: a file cannot be read, names a path that the source lacks, or gives one path two values; or
    `rule.file` does not list each sample.
    """
    names = names_of_samples(source)
    numbers: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        numbers.setdefault(name, []).append(i)
    by_path: dict[str, list[int]] = {}
    values = list[str | None]([None] * len(names))
    places = [""] * len(names)
    key = "source.split.files" if rule.file is None else "source.split.file"
    for place, path, value in _rows_of_file(rule) if rule.file is not None else _rows_of_lists(rule):
        found = numbers.get(path) or numbers.get(path.removeprefix("./"))
        if found is None:
            by_path = by_path or {source.path(i): [i] for i in range(len(names))}
            found = by_path.get(path)
        if found is None:
            hint = (
                near_word(path, numbers if len(numbers) < _SEARCHED else ())
                or "; correct it, or write it as it is below the source's root"
            )
            raise SourceError(f"{key}: {place}: {path} is not in the source, which has {names[0]}{hint}")
        for i in found:
            if values[i] not in (None, value):
                raise SourceError(f"{key}: {place}: {path} is also in {places[i]}; remove one of the lines")
            values[i], places[i] = value, place
    lacking = [i for i, value in enumerate(values) if value is None]
    if rule.file is not None and lacking:
        raise SourceError(
            f"{key}: {rule.file} must list each sample, and {names[lacking[0]]} is not in it ({len(lacking)} of "
            f"{len(names)} are not); add a row, with an empty {rule.column} for a sample in no part"
        )
    return Texts([value or "" for value in values], places.__getitem__)


def _rows_of_lists(rule: SplitSpec) -> Iterator[tuple[str, str, str]]:
    """Yield the place, the path and the part of each line."""
    for part, file in pairs(rule.files):
        for number, line in enumerate(
            load(os.path.expanduser(file), f"source.split.files.{part}").split(b"\n"), start=1
        ):
            if path := os.fsdecode(line.removesuffix(b"\r")):
                yield f"{file}:{number}", path, part


def _rows_of_file(rule: SplitSpec) -> Iterator[tuple[str, str, str]]:
    """Yield the place, the path and the value of each row."""
    file, column = rule.file or "", rule.column or ""
    lines = list[int]()
    rows = csv_rows(load(os.path.expanduser(file), "source.split.file"), file, lines)
    header = [name.strip() for name in next(rows, [])]
    cells = [column_of(name, header, f"source.split.file: {file}:1") for name in ("path", column)]
    for row in rows:
        here = f"{file}:{lines[-1]}"
        if len(row) != len(header):
            raise SourceError(
                f"source.split.file: {here}: row must have the header's {len(header)} fields, got {len(row)}; "
                "correct it"
            )
        yield here, row[cells[0]], row[cells[1]].strip()


# --- groups -----------------------------------------------------------------------------------------------------------


def group_names(source: Source, spec: SourceSpec, rule: SplitSpec, names: Sequence[str]) -> Sequence[str]:
    """Return the name of the group of each sample. Without groups, samples of one path are one. Raises SourceError."""
    if rule.group is None:
        return names
    block = rule.group_block
    if block is None:
        return _digests(source)
    if block.column is not None:
        action = "a sample without a group is in no part that can be kept apart: name its group"
        return column_texts(source, spec, block.column, "source.split.group", action).values
    groups = list[str]()
    for name in names:
        match = re.search(block.path or "", name)
        if match is None or not match[1]:
            what = "does not match" if match is None else "gives an empty name"
            raise SourceError(
                f"source.split.group.path must match every path; {name} {what}, got {block.path!r}; correct it"
            )
        groups.append(match[1])
    return groups


def _digests(source: Source) -> list[str]:
    """Hash the bytes of each sample to 128 bits."""
    digests = list[str]()
    for first in range(0, len(source), _READ_AT_ONCE):
        indices = range(first, min(first + _READ_AT_ONCE, len(source)))
        payload = source.read(indices, lambda size: np.empty(size, np.uint8))
        for k, error in enumerate(payload.errors):
            if error is not None:
                raise SourceError(
                    f"source.split.group: content must be read of each sample, and {source.path(first + k)} cannot be: "
                    f"{error}; repair or remove it"
                )
            digests.append(hashlib.blake2b(payload.sample(k).tobytes(), digest_size=16).hexdigest())
    return digests
