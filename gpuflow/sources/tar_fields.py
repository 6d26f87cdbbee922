"""Shards whose samples carry declared fields: keys of their `.json` member, or separate members.

What the members hold that are no images and no masks is cached, as the places of all images are: see `tar`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import numpy as np

from gpuflow.arrays import Array, Ints
from gpuflow.errors import SourceError, show
from gpuflow.sources.field_spec import FieldSpec, classes_of_boxes, label_field
from gpuflow.sources.hints import near_word
from gpuflow.sources.keys import Named
from gpuflow.sources.listing_text import parsed_json
from gpuflow.sources.paths import PathTable, PathTableBuilder
from gpuflow.sources.record_builder import Locate, RecordBuilder
from gpuflow.sources.record_table import MaskMembers, RecordTable
from gpuflow.sources.sample_labels import names_in, sample_labels
from gpuflow.sources.storage import Shard, Storage
from gpuflow.sources.tar_members import (
    SCAN_FORMAT,
    Member,
    Sample,
    cache_path,
    json_of,
    key_of,
    label_in,
    load_arrays,
    no_label,
    samples_of,
    save_arrays,
    text_of,
)

_ROWS = 4096
"""Number of samples in one block."""
_LABEL = ".cls or .json"
"""The column of a label that is not given: the member `.cls`, else the key `label` or `cls` of `.json`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TarFields:
    """What shards hold: the places of all images, and the records of all samples."""

    images: PathTable
    starts: Ints
    sizes: Ints
    shard_sizes: Ints
    classes: tuple[str, ...]
    labels: Array
    has_labels: bool
    table: RecordTable


@final
class _Members:
    """The images of all samples and, by suffix, their other members, as arrays that can be cached.

    `images`, `image_starts`: the table of the images' names. `starts`, `sizes`: their places. `shard_sizes`.
    For each suffix of content `.x`: `text.x`, all contents, and `text.x.ends`; -1 - end where there is no member.
    For each suffix of masks: `mask.x`, `mask.x.names`, the table of names, `mask.x.starts`, `mask.x.sizes`.
    """

    def __init__(self, arrays: Mapping[str, Array], shards: Sequence[Shard]) -> None:
        self.arrays, self._shards = arrays, shards
        self.images = PathTable(arrays["images"].tobytes(), arrays["image_starts"])
        self.ends = np.cumsum(arrays["shard_sizes"])

    def content(self, suffix: str, i: int) -> bytes | None:
        """The content of the member of sample i with this suffix; None if it has none."""
        ends = self.arrays[f"text.{suffix}.ends"]
        if ends[i] < 0:
            return None
        start = 0 if i == 0 else ends[i - 1]
        start = -1 - start if start < 0 else start
        return bytes(self.arrays[f"text.{suffix}"][start : ends[i]])

    def masks(self, suffix: str, storage: Storage) -> MaskMembers:
        """The members with a suffix of masks, as a column of records."""
        name = f"mask.{suffix}"
        names = PathTable(self.arrays[f"{name}.names"].tobytes(), self.arrays[name])
        starts, sizes = self.arrays[f"{name}.starts"], self.arrays[f"{name}.sizes"]
        return MaskMembers(storage, tuple(self._shards), self.ends, names, starts, sizes)

    def shard(self, i: int) -> str:
        return self._shards[int(np.searchsorted(self.ends, i, side="right"))].path

    def sample(self, i: int) -> str:
        return f"{self.shard(i)}/{self.images[i]}"

    def member(self, i: int, suffix: str) -> str:
        """The path of a sample's member, whether or not there is one."""
        return f"{self.shard(i)}/{key_of(self.images[i])[0]}.{suffix}"

    @property
    def locate(self) -> Locate:
        return Locate(self.sample, self._value, self._row)

    def _value(self, i: int, column: str) -> str:
        if column == _LABEL:
            return f"{self.member(i, 'json' if self.content('cls', i) is None else 'cls')}: label"
        return self.member(i, column[1:]) if column.startswith(".") else f"{self.member(i, 'json')}: {column}"

    def _row(self, i: int, column: str, j: int) -> str:
        return f"{self._value(i, column)}{': ' if column.startswith('.') else ''}[{j}]"


def read_fields(spec: Named, storage: Storage, shards: Sequence[Shard], images: Sequence[str]) -> TarFields:
    """Index shards with the fields that `spec` declares. Samples have the order of shards, then of members.

    images: the suffixes of images.
    """
    declared = tuple((name, _with_column(name, field)) for name, field in spec.declared)
    _check_default_members(spec.declared, spec.where)
    _check_shared_members(declared, spec.where)
    mask_suffixes = tuple(dict.fromkeys(_column(field)[1:] for _, field in declared if field.is_mask_file))
    others = [_column(field) for _, field in declared if field.type != "image" and not field.is_mask_file]
    others += [field.labels for _, field in declared if field.labels is not None]
    required = {column[1:] if column.startswith(".") else "json" for column in others if column != _LABEL}
    suffixes = tuple(sorted(required | {"cls", "json"} if _LABEL in others else required))
    asked = tuple(images), suffixes, mask_suffixes, tuple(sorted(required))
    cache = cache_path("tar-fields", shards, SCAN_FORMAT, *asked)
    arrays = load_arrays(cache)
    if arrays is None or set(arrays) != _names_of(suffixes, mask_suffixes):
        scan = partial(samples_of, images=images, contents=suffixes, others=mask_suffixes, required=required)
        arrays = _arrays_of(storage.scan(shards, scan), suffixes, mask_suffixes)
        save_arrays(cache, arrays)
    members = _Members(arrays, shards)
    count = len(members.images)
    if not count:
        raise SourceError(
            f"{spec.where}: must hold at least one image ({', '.join(images)}), got none; check what is in it"
        )
    for suffix in sorted(required):
        _check_present(members, suffix, members.arrays[f"text.{suffix}.ends"])
    for suffix in mask_suffixes:
        _check_present(members, suffix, members.arrays[f"mask.{suffix}.starts"])
    label_column, label = label_field(declared)
    label_classes = label.classes if label is not None and label.classes is not None else spec.classes
    builder = RecordBuilder(declared, classes_of_boxes(declared, spec.classes), spec.where, members.locate)
    labels = sample_labels(label, label_column, label_classes, spec.where, members.locate)
    columns = {column: _reader_of(members, column, declared) for column in builder.columns()}
    label_reader = _reader_of(members, label_column, declared) if label is not None else None
    for first in range(0, count, _ROWS):
        numbers = range(first, min(first + _ROWS, count))
        rows = _Rows(members)
        labels.add([label_reader(i, rows) for i in numbers] if label_reader is not None else [None] * len(numbers))
        builder.add({column: [read(i, rows) for i in numbers] for column, read in columns.items()}, len(numbers))
    classes, values = labels.build()
    files = {name: members.masks(_column(field)[1:], storage) for name, field in declared if field.is_mask_file}
    table = builder.build(files, (storage,) if files else ())
    if label is None:
        classes = table.box_classes
    return TarFields(
        images=members.images,
        starts=arrays["starts"],
        sizes=arrays["sizes"],
        shard_sizes=arrays["shard_sizes"],
        classes=classes,
        labels=values,
        has_labels=label is not None,
        table=table,
    )


# --- columns ----------------------------------------------------------------------------------------------------------


def _with_column(name: str, field: FieldSpec) -> FieldSpec:
    """The field with its column, by default that of its type."""
    column = field.column or _default_column(name, field)
    return replace(field, column=column.lower() if column.startswith(".") else column)  # as suffixes of members are


def _default_column(name: str, field: FieldSpec) -> str:
    if field.is_mask_file:
        return ".mask.png"
    return {"text": ".txt", "label": _LABEL}.get(str(field.type), name)


def _check_default_members(declared: Sequence[tuple[str, FieldSpec]], place: str) -> None:
    """Raise SourceError if two fields without a column would both read the member of their type, such as `.txt`."""
    first: dict[str, str] = {}
    for name, field in declared:
        column = _default_column(name, field)
        if field.column is not None or not column.startswith(".") or column == _LABEL:
            continue
        if (other := first.setdefault(column, name)) != name:
            own = f".{name}.png" if field.is_mask_file else name
            raise SourceError(
                f"{place}: the fields {other} and {name} must not both read {column}, the member of their type; give "
                f"one of them its column, such as {name}: {{type: {field.type}, column: {own}}}"
            )


def _check_shared_members(declared: Sequence[tuple[str, FieldSpec]], place: str) -> None:
    """Raise SourceError if two fields would read one member differently. Keys of a `.json` member may be shared."""
    first: dict[str, tuple[str, FieldSpec]] = {}
    for name, field in declared:
        column = _column(field)
        other, known = first.setdefault(column, (name, field))
        if column.startswith(".") and (field.type, field.kind) != (known.type, known.kind):
            raise SourceError(
                f"{place}: the fields {other} and {name} must not read the member {column} in two ways; name another "
                "member for one of them"
            )


def _column(field: FieldSpec) -> str:
    assert field.column is not None
    return field.column


@final
class _Rows:
    """The parsed `.json` members of a block."""

    def __init__(self, members: _Members) -> None:
        self._members = members
        self._known: dict[int, Any] = {}

    def value(self, i: int) -> Any:
        """The value of sample i, an empty object if it has no such member."""
        if i not in self._known:
            self._known[i] = json_of(self._members.content("json", i) or b"{}", self._members.member(i, "json"))
        return self._known[i]

    def __getitem__(self, i: int) -> dict[str, Any]:
        """The value of sample i, which must be an object."""
        row = self.value(i)
        if not isinstance(row, dict):
            raise SourceError(f"{self._members.member(i, 'json')}: must be a JSON object, got {show(row)}; correct it")
        return row


_Reader = Callable[[int, _Rows], Any]


def _reader_of(members: _Members, column: str, declared: Sequence[tuple[str, FieldSpec]]) -> _Reader:
    """What reads the value of a column for sample i."""
    owner = next((field for _, field in declared if field.column == column), None)

    def label(i: int, rows: _Rows) -> Any:
        content = members.content("cls", i)
        if content is not None:
            return _label(text_of(content, members.member(i, "cls")), owner)
        value = label_in(rows.value(i))
        if value is None:
            raise no_label(members.sample(i), key_of(members.images[i])[0])
        return value

    def key(i: int, rows: _Rows) -> Any:
        row = rows[i]
        if column not in row:
            here = members.member(i, "json")
            known = list(row)
            raise SourceError(
                f"{here}: object must have the key {column!r}, got {', '.join(known) or 'none'}"
                f"{near_word(column, known)}"
            )
        return row[column]

    def whole(i: int, rows: _Rows) -> Any:
        here = members.member(i, column[1:])
        content = members.content(column[1:], i)
        assert content is not None
        if owner is not None and owner.type == "text":
            return text_of(content, here)
        if owner is not None and owner.type == "label":
            return _label(text_of(content, here), owner)
        return json_of(content, here)

    return label if column == _LABEL else whole if column.startswith(".") else key


def _label(text: str, field: FieldSpec | None) -> Any:
    """A label from the text of a member."""
    text = text.strip()
    if field is not None and field.kind == "classes" and (field.separator or not text.startswith("[")):
        return names_in(text, field.separator or "|")
    if field is not None and field.kind in ("classes", "number", "vector"):
        try:
            return parsed_json(text)
        except ValueError:
            return text
    return text


# --- members ----------------------------------------------------------------------------------------------------------


def _arrays_of(shards: Iterable[list[Sample]], suffixes: Sequence[str], masks: Sequence[str]) -> dict[str, Array]:
    """The arrays of `_Members`. shards: the samples of each. suffixes, masks: of contents and of masks."""
    names, places, shard_sizes = PathTableBuilder(), list[tuple[int, int]](), list[int]()
    texts: dict[str, tuple[bytearray, list[int]]] = {suffix: (bytearray(), []) for suffix in suffixes}
    mask_names = {suffix: PathTableBuilder() for suffix in masks}
    mask_places: dict[str, list[tuple[int, int]]] = {suffix: [] for suffix in masks}
    for samples in shards:
        names.add([sample.image.name for sample in samples])
        places += [(sample.image.start, sample.image.size) for sample in samples]
        shard_sizes.append(len(samples))
        for suffix, (blob, ends) in texts.items():
            for sample in samples:
                blob += sample.contents.get(suffix, b"")
                ends.append(len(blob) if suffix in sample.contents else -1 - len(blob))
        for suffix in masks:
            members = [x.members.get(suffix, Member(f"{x.image.name}: none", -1, 0)) for x in samples]
            mask_names[suffix].add([member.name for member in members])
            mask_places[suffix] += [(member.start, member.size) for member in members]
    arrays: dict[str, Array] = {"shard_sizes": np.array(shard_sizes, np.int64)}
    for table, blob_name, starts_name in (
        (names, "images", "image_starts"),
        *((mask_names[suffix], f"mask.{suffix}.names", f"mask.{suffix}") for suffix in masks),
    ):
        built = table.build()
        arrays |= {blob_name: np.frombuffer(built.blob, np.uint8), starts_name: built.starts}
    for pairs, prefix in ((places, ""), *((mask_places[suffix], f"mask.{suffix}.") for suffix in masks)):
        starts_sizes = np.array(pairs, np.int64).reshape(-1, 2)
        arrays |= {f"{prefix}starts": starts_sizes[:, 0].copy(), f"{prefix}sizes": starts_sizes[:, 1].copy()}
    for suffix, (blob, ends) in texts.items():
        arrays[f"text.{suffix}"] = np.frombuffer(bytes(blob), np.uint8)
        arrays[f"text.{suffix}.ends"] = np.array(ends, np.int64)
    return arrays


def _names_of(suffixes: Sequence[str], masks: Sequence[str]) -> set[str]:
    """The names of `_arrays_of`."""
    return set(_arrays_of([], suffixes, masks))


def _check_present(members: _Members, suffix: str, held: Ints) -> None:
    """Raise SourceError for a sample without the member of a suffix. held: negative where there is none."""
    if (lacking := np.flatnonzero(held < 0)).size:
        i = int(lacking[0])
        key = key_of(members.images[i])[0]
        raise SourceError(
            f"{members.sample(i)}: sample must have the member {key}.{suffix}, got none ({lacking.size} of {len(held)} "
            f"samples); add it, or correct source.fields"
        )
