"""The tar source: WebDataset-style shards whose members share a key, `0001.jpg` with `0001.cls` or `0001.json`.

A key is a member's path up to the first dot of its file name. Declared fields are keys of the `.json` member, or
separate members. The headers are walked once; where each image lies, and what the other members hold that are no masks,
is cached in the user's cache folder (`~/.cache/gpuflow`). From then on a sample is one read at an offset.
"""

from __future__ import annotations

import json
import os
import random
import re
import tarfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, final

import numpy as np

from gpuflow.arrays import Array, Ints
from gpuflow.errors import Problem, SourceError, near_word, show
from gpuflow.sources.field_spec import FieldPairs, FieldSpec, columns_of, conflict
from gpuflow.sources.labels import Codes, Locate, names_in, resolve_labels
from gpuflow.sources.listing_text import parsed_json
from gpuflow.sources.record_table import Members, SourceBuilder, TableSource
from gpuflow.sources.spec import Cached, Extent, Named, WithExtensions, WithWindow
from gpuflow.sources.storage import (
    CachedStorage,
    ReadAt,
    Shard,
    Shards,
    Storage,
    is_remote,
    open_storage,
)
from gpuflow.sources.storage.local import missing_path
from gpuflow.sources.tar_members import (
    Member,
    MemberTable,
    Places,
    Sample,
    cached_arrays,
    json_of,
    key_of,
    label_in,
    no_label,
    samples_of,
    text_of,
)

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp")

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_ROWS = 4096
"""Number of samples in one block."""
_LABEL = ".cls or .json"
"""The column of a label that is not given: the member `.cls`, else the key `label` or `cls` of `.json`."""


@final
@dataclass(frozen=True, kw_only=True)
class Tar(WithExtensions, WithWindow, Cached, Named):
    """WebDataset-style shards.

    Args:
        tar: a path with brace ranges: `shards/{000..012}.tar`.
    """

    kind = "tar"

    tar: str

    def open(self) -> TableSource:
        """Index the shards, or load the index from the cache. Samples have the order of shards, then of members."""
        pattern = self.tar if is_remote(self.tar) else os.path.expanduser(self.tar)
        names = expand_braces(pattern)
        storage = open_storage(pattern, self.cache)
        shards = _inspected(storage, names)
        source = (_with_fields if self.declared else _with_labels)(self, storage, shards)
        _warn_of_small_cache(self, storage, shards, len(source))
        return source

    def find_images(self, limit: int, deadline: float, chance: random.Random) -> list[Extent]:
        shards = expand_braces(os.path.expanduser(self.tar))
        return extents_in_shards(shards, self.extensions, limit, deadline, chance)

    def field_problems(self, field: FieldSpec) -> Iterator[Problem]:
        if field.type == "image" and field.column is not None:
            yield conflict(
                "column", "must not be given in a source.tar", "the image is the member with an image's suffix"
            )

    @property
    def image_suffixes(self) -> tuple[str, ...]:
        """Return the suffixes of the members that are images, without a dot."""
        return (*IMAGE_EXTENSIONS, *self.extensions)


def extents_in_shards(
    shards: Sequence[str], extensions: Sequence[str], limit: int, deadline: float, chance: random.Random
) -> list[Extent]:
    """Return where images of local shards lie, see `SourceSpec.find_images`. extensions: see `Tar`."""
    suffixes = tuple(f".{name}" for name in (*IMAGE_EXTENSIONS, *extensions))
    images: list[Extent] = []
    for path in chance.sample(shards, len(shards)):
        try:
            with tarfile.open(path, "r:") as shard:
                for member in shard:
                    if member.isreg() and member.name.lower().endswith(suffixes):
                        images.append(Extent(path, member.offset_data, member.size))
                    if len(images) == limit or time.monotonic() > deadline:
                        return images
        except tarfile.TarError as fault:
            raise SourceError(f"{path}: not a tar file ({fault}); check what it is") from fault
    return images


def expand_braces(pattern: str) -> list[str]:
    """Expand a pattern to paths: `{08..11}` counts with leading zeros, `{0..11}` without, `{a,b}` lists names; several
    braces combine.

    Examples:
        >>> expand_braces("shards/{08..10}.tar")
        ['shards/08.tar', 'shards/09.tar', 'shards/10.tar']
    """
    parts = _BRACES.split(pattern)
    if any("{" in text or "}" in text for text in parts[::2]):
        raise SourceError(f"source.tar must have matching braces without nesting, got {pattern!r}; correct it")
    choices = [_choices(part, pattern) if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


def _choices(body: str, pattern: str) -> list[str]:
    span = _RANGE.fullmatch(body)
    if span is None:
        if "," not in body:
            raise SourceError(
                f"source.tar must have {{first..last}} or {{a,b}} in braces, got {{{body}}} in {pattern!r}; correct it"
            )
        return body.split(",")
    first, last = span[1], span[2]
    if int(first) > int(last):
        raise SourceError(f"source.tar must count upwards, got {{{body}}} in {pattern!r}; swap the ends")
    padded = any(end.startswith("0") and len(end) > 1 for end in (first, last))
    width = max(len(first), len(last)) if padded else 0
    return [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]


def _inspected(storage: Storage, names: Sequence[str]) -> list[Shard]:
    found = storage.inspect(names)
    shards = [shard for shard in found if isinstance(shard, Shard)]
    if len(shards) < len(names):
        bad = [(name, why) for name, why in zip(names, found, strict=True) if isinstance(why, str)]
        name, why = bad[0]
        count = f" ({len(bad)} of {len(names)} shards cannot be read)" if len(names) > 1 else ""
        hint = missing_path(name) if why == "no such file" and not is_remote(name) else "; check source.tar"
        raise SourceError(f"{name}: {why}{count}{hint}")
    return shards


def _warn_of_small_cache(spec: Tar, storage: Storage, shards: Sequence[Shard], samples: int) -> None:
    """Warn of a cache that is smaller than a window: it downloads blocks anew for each sample that they serve."""
    cache = spec.cache
    if cache is None or not isinstance(storage, CachedStorage):
        return
    window = spec.shard_window()
    size = sum(shard.size for shard in shards) * min(window, samples) // samples
    if size > cache.size:
        warnings.warn(
            f"source.cache.size must hold the {window:,} samples of source.window ({size / 1e6:,.0f} MB), "
            f"got {cache.size / 1e6:,.0f} MB: shuffled batches will download blocks more than once; raise it, or lower "
            "source.window",
            stacklevel=2,
        )


# --- the index --------------------------------------------------------------------------------------------------------


@final
class _Index:
    """The images of all samples and, by suffix, their other members, as arrays that can be cached.

    `names`, `name_starts`, `starts`, `sizes`: of the images, see `MemberTable`. `shard_sizes`: numbers of samples.
    Without fields: `codes`, each sample's label, and `values`, the distinct ones as written, in JSON.
    With fields, for each suffix of content `.x`: `text.x`, all contents, and `text.x.ends`; -1 - end where there is no
    member. For each suffix of masks: `mask.x.names` and so on, as of the images.

    Raises SourceError if there is no image.
    """

    def __init__(self, spec: Tar, shards: Sequence[Shard], arrays: Mapping[str, Array]) -> None:
        self.arrays = arrays
        self.images = Places.of(arrays)
        self.shards = Shards(tuple(shards), np.cumsum(arrays["shard_sizes"]))
        self.locate = Locate(self.sample, self._value, self._row)
        if not len(self.images.names):
            suffixes = ", ".join(spec.image_suffixes)
            raise SourceError(f"{spec.tar}: must hold at least one image ({suffixes}), got none; check what is in it")

    def content(self, suffix: str, i: int) -> bytes | None:
        """Return the content of the member of sample i with this suffix; None if it has none."""
        ends = self.arrays[f"text.{suffix}.ends"]
        if ends[i] < 0:
            return None
        start = 0 if i == 0 else ends[i - 1]
        start = -1 - start if start < 0 else start
        return bytes(self.arrays[f"text.{suffix}"][start : ends[i]])

    def members(self, storage: Storage, prefix: str = "") -> Members:
        """Return the images, or the members with a suffix of masks. prefix: see `MemberTable.arrays`."""
        return Members(storage, self.shards, *Places.of(self.arrays, prefix))

    def sample(self, i: int) -> str:
        """Return the place of sample i."""
        return f"{self._shard(i)}/{self.images.names[i]}"

    def member(self, i: int, suffix: str) -> str:
        """Return the path of a sample's member, whether or not there is one."""
        return f"{self._shard(i)}/{self.key(i)}.{suffix}"

    def key(self, i: int) -> str:
        """Return the key that the members of sample i share."""
        return key_of(self.images.names[i])[0]

    def _shard(self, i: int) -> str:
        return self.shards.place(i)[0].path

    def _value(self, i: int, column: str) -> str:
        if column == _LABEL:
            return f"{self.member(i, 'json' if self.content('cls', i) is None else 'cls')}: label"
        return self.member(i, column[1:]) if column.startswith(".") else f"{self.member(i, 'json')}: {column}"

    def _row(self, i: int, column: str, j: int) -> str:
        return f"{self._value(i, column)}{': ' if column.startswith('.') else ''}[{j}]"


def _with_labels(spec: Tar, storage: Storage, shards: Sequence[Shard]) -> TableSource:
    """Index shards whose samples have a label and no fields."""
    scan = partial(_labelled_images, extensions=spec.image_suffixes)

    def make() -> dict[str, Array]:
        images = MemberTable()
        codes = list[Ints]()
        values = Codes()
        counts = list[int]()
        for labelled in storage.scan(shards, scan):
            images.add([image for image, _ in labelled])
            codes.append(np.array([values[label] for _, label in labelled], np.int64))
            counts.append(len(labelled))
        written = np.frombuffer(json.dumps(list(values)).encode(), np.uint8)
        sizes = np.array(counts, np.int64)
        return images.arrays() | {"codes": np.concatenate(codes), "values": written, "shard_sizes": sizes}

    names = {*MemberTable().arrays(), "codes", "values", "shard_sizes"}
    index = _Index(spec, shards, cached_arrays("tar", shards, spec.extensions, names, make))
    codes = index.arrays["codes"]
    values = json.loads(index.arrays["values"].tobytes())
    classes, labels = resolve_labels(
        values, spec.classes, lambda code: index.sample(int(np.argmax(codes == code))), spec.tar
    )
    return TableSource(index.members(storage), labels[codes], classes)


def _labelled_images(shard: Shard, read_at: ReadAt, extensions: tuple[str, ...]) -> list[tuple[Member, str]]:
    """Scan one shard for its images and their labels as written."""
    samples = samples_of(shard, read_at, images=extensions, contents=("cls", "json"))
    return [(sample.image, _label(shard, sample)) for sample in samples]


def _label(shard: Shard, sample: Sample) -> str:
    """Return the label as written in a sample's .cls member, else in its .json member."""
    image, members, contents = sample
    here = f"{shard.path}/{image.name}"
    label = None
    if "cls" in members:
        here = f"{shard.path}/{members['cls'].name}"
        label = text_of(contents["cls"], here)
    elif "json" in members:
        here = f"{shard.path}/{members['json'].name}"
        label = label_in(json_of(contents["json"], here))
    if label is None:
        raise no_label(f"{shard.path}/{image.name}", key_of(image.name)[0])
    if type(label) not in (int, str):
        raise SourceError(f"{here}: label must be an integer or a class name, got {json.dumps(label)}; correct it")
    text = str(label).strip()
    if not text:
        raise SourceError(f"{here}: label must not be empty; give a class name or a number")
    return text


# --- fields -----------------------------------------------------------------------------------------------------------


def _with_fields(spec: Tar, storage: Storage, shards: Sequence[Shard]) -> TableSource:
    """Index shards with the fields that `spec` declares."""
    columns = {name: field.column or _default_column(name, field) for name, field in spec.declared}
    columns = {name: column.lower() if column.startswith(".") else column for name, column in columns.items()}
    declared = tuple((name, replace(field, column=columns[name])) for name, field in spec.declared)
    _check_members(spec.declared, columns, spec.where)
    masks = {name: columns[name][1:] for name, field in declared if field.is_mask_file}
    mask_suffixes = tuple(dict.fromkeys(masks.values()))
    others = columns_of(declared)
    required = {column[1:] if column.startswith(".") else "json" for column in others if column != _LABEL}
    suffixes = tuple(sorted(required | {"cls", "json"} if _LABEL in others else required))
    scan = partial(samples_of, images=spec.image_suffixes, contents=suffixes, others=mask_suffixes, required=required)
    asked = spec.image_suffixes, suffixes, mask_suffixes, tuple(sorted(required))
    names = set(_arrays_of([], suffixes, mask_suffixes))
    arrays = cached_arrays(
        "tar-fields", shards, asked, names, lambda: _arrays_of(storage.scan(shards, scan), suffixes, mask_suffixes)
    )
    index = _Index(spec, shards, arrays)
    for suffix in sorted(required):
        _check_present(index, suffix, arrays[f"text.{suffix}.ends"])
    for suffix in mask_suffixes:
        _check_present(index, suffix, arrays[f"mask.{suffix}.starts"])
    builder = SourceBuilder(declared, spec.classes, spec.where, index.locate)
    readers = {column: _reader_of(index, column, declared) for column in others}
    count = len(index.images.names)
    for first in range(0, count, _ROWS):
        numbers = range(first, min(first + _ROWS, count))
        rows = _Rows(index)
        builder.add({column: [read(i, rows) for i in numbers] for column, read in readers.items()}, len(numbers))
    files = {name: index.members(storage, f"mask.{suffix}.") for name, suffix in masks.items()}
    return builder.source(TableSource, index.members(storage), count, files)


def _default_column(name: str, field: FieldSpec) -> str:
    if field.is_mask_file:
        return ".mask.png"
    return {"text": ".txt", "label": _LABEL}.get(str(field.type), name)


def _check_members(declared: FieldPairs, columns: Mapping[str, str], place: str) -> None:
    """Raise SourceError if two fields would read one member differently, or both by default. Keys of a `.json` member
    may be shared."""
    first: dict[str, tuple[str, FieldSpec]] = {}
    for name, field in declared:
        column = columns[name]
        other, known = first.setdefault(column, (name, field))
        if other == name or not column.startswith("."):
            continue
        if field.column is None and known.column is None:
            own = f".{name}.png" if field.is_mask_file else name
            raise SourceError(
                f"{place}: the fields {other} and {name} must not both read {column}, the member of their type; give "
                f"one of them its column, such as {name}: {{type: {field.type}, column: {own}}}"
            )
        if (field.type, field.kind) != (known.type, known.kind):
            raise SourceError(
                f"{place}: the fields {other} and {name} must not read the member {column} in two ways; name another "
                "member for one of them"
            )


@final
class _Rows:
    """The parsed `.json` members of a block."""

    def __init__(self, index: _Index) -> None:
        self._index = index
        self._known: dict[int, Any] = {}

    def value(self, i: int) -> Any:
        """Return the value of sample i, an empty object if it has no such member."""
        if i not in self._known:
            self._known[i] = json_of(self._index.content("json", i) or b"{}", self._index.member(i, "json"))
        return self._known[i]

    def __getitem__(self, i: int) -> dict[str, Any]:
        """Return the value of sample i, which must be an object."""
        row = self.value(i)
        if not isinstance(row, dict):
            raise SourceError(f"{self._index.member(i, 'json')}: must be a JSON object, got {show(row)}; correct it")
        return row


_Reader = Callable[[int, _Rows], Any]


def _reader_of(index: _Index, column: str, declared: FieldPairs) -> _Reader:
    """Return the function that reads a column of sample i."""
    owner = next((field for _, field in declared if field.column == column), None)

    def label(i: int, rows: _Rows) -> Any:
        content = index.content("cls", i)
        if content is not None:
            return _parsed_label(text_of(content, index.member(i, "cls")), owner)
        value = label_in(rows.value(i))
        if value is None:
            raise no_label(index.sample(i), index.key(i))
        return value

    def key(i: int, rows: _Rows) -> Any:
        row = rows[i]
        if column not in row:
            here = index.member(i, "json")
            known = list(row)
            raise SourceError(
                f"{here}: object must have the key {column!r}, got {', '.join(known) or 'none'}"
                f"{near_word(column, known)}"
            )
        return row[column]

    def whole(i: int, rows: _Rows) -> Any:
        here = index.member(i, column[1:])
        content = index.content(column[1:], i)
        assert content is not None
        if owner is not None and owner.type == "text":
            return text_of(content, here)
        if owner is not None and owner.type == "label":
            return _parsed_label(text_of(content, here), owner)
        return json_of(content, here)

    return label if column == _LABEL else whole if column.startswith(".") else key


def _parsed_label(text: str, field: FieldSpec | None) -> Any:
    """Parse a label from the text of a member."""
    text = text.strip()
    if field is not None and field.kind == "classes" and (field.separator or not text.startswith("[")):
        return names_in(text, field.separator or "|")
    if field is not None and field.kind in ("classes", "number", "vector"):
        try:
            return parsed_json(text)
        except ValueError:
            return text
    return text


def _arrays_of(shards: Iterable[list[Sample]], suffixes: Sequence[str], masks: Sequence[str]) -> dict[str, Array]:
    """Return the arrays of `_Index` with fields.

    shards: the samples of each. suffixes, masks: of members that are contents and masks.
    """
    images = MemberTable()
    shard_sizes = list[int]()
    texts: dict[str, tuple[bytearray, list[int]]] = {suffix: (bytearray(), []) for suffix in suffixes}
    mask_tables = {suffix: MemberTable() for suffix in masks}
    for samples in shards:
        images.add([sample.image for sample in samples])
        shard_sizes.append(len(samples))
        for suffix, (blob, ends) in texts.items():
            for sample in samples:
                blob += sample.contents.get(suffix, b"")
                ends.append(len(blob) if suffix in sample.contents else -1 - len(blob))
        for suffix, table in mask_tables.items():
            table.add([x.members.get(suffix, Member(f"{x.image.name}: none", -1, 0)) for x in samples])
    arrays = images.arrays() | {"shard_sizes": np.array(shard_sizes, np.int64)}
    for suffix, table in mask_tables.items():
        arrays |= table.arrays(f"mask.{suffix}.")
    for suffix, (blob, ends) in texts.items():
        arrays[f"text.{suffix}"] = np.frombuffer(bytes(blob), np.uint8)
        arrays[f"text.{suffix}.ends"] = np.array(ends, np.int64)
    return arrays


def _check_present(index: _Index, suffix: str, held: Ints) -> None:
    """Raise SourceError for a sample without the member of a suffix. held: negative where there is none."""
    if (lacking := np.flatnonzero(held < 0)).size:
        i = int(lacking[0])
        raise SourceError(
            f"{index.sample(i)}: sample must have the member {index.key(i)}.{suffix}, got none ({lacking.size} of "
            f"{len(held)} samples); add it, or correct source.fields"
        )
