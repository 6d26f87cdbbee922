"""The records of all samples in few arrays: a column for each field, and why some records are bad.

`RecordBuilder` builds the table of records from values as they are written: lists and numbers of JSON.

A fault of a file's structure is a SourceError that says where it is: a value of another type, a row of another length,
labels or instances of another number than boxes. A number of the sample itself that is not finite makes its record bad.
An instance whose annotation is incomplete is left out and counted: a box without area, an empty mask, numbers that are
not finite, run lengths that do not fill their mask.

Values are checked and converted in blocks of thousands of samples. Only if a check of a block fails, its values are
looked at one by one to find the faulty one.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Protocol, Self, final

import numpy as np
from numpy.typing import NDArray

from gpuflow.arrays import Array, Floats, Ints
from gpuflow.errors import SourceError, redacted, show
from gpuflow.pipeline.records import GEOMETRIC, Column, Field, LeftOut, MaskFile, Polygons, Ragged, Records, Rle
from gpuflow.sources.base import fingerprint, names_of
from gpuflow.sources.field_spec import FieldPairs, FieldSpec, GivenClasses
from gpuflow.sources.labels import Labels, Locate
from gpuflow.sources.storage import Allocate, PathTable, Payload, Range, Shard, Shards, Storage


class Store(Protocol):
    """A column of all samples."""

    def take(self, samples: Ints, errors: list[str | None]) -> Column:
        """Read the values of these samples. Set `errors[i]` where that of sample i cannot be read."""

    def parts(self) -> Iterator[bytes]:
        """Yield all values as bytes, for a fingerprint."""


@final
@dataclass(frozen=True, slots=True)
class RecordTable:
    """The fields of a source's samples.

    fields: besides image and label. stores: their columns, those of boxes' labels included.
    errors: why records are bad, by the number of the sample.
    storages: what masks are read from. sizes: of the images, see `Records`.
    left_out: the instances that are left out, by the number of the sample.
    """

    fields: tuple[Field, ...]
    stores: Mapping[str, Store]
    errors: Mapping[int, str]
    storages: tuple[Storage, ...] = ()
    sizes: Ints | None = None
    left_out: Mapping[int, LeftOut] = field(default_factory=dict)

    @property
    def box_classes(self) -> tuple[str, ...]:
        """Return the names of the classes of boxes; empty without boxes or their labels."""
        return next((field.classes for field in self.fields if field.type == "boxes"), ())

    def records(self, indices: Sequence[int]) -> Records:
        """Read the fields of these samples. Raises what `Storage` says."""
        samples = np.asarray(indices, dtype=np.int64)
        errors = [self.errors.get(i) for i in samples.tolist()]
        columns = {name: store.take(samples, errors) for name, store in self.stores.items()}
        return Records(columns, errors, None if self.sizes is None else self.sizes[samples])

    def digest(self) -> str:
        """Hash all fields and values to 16 hex digits; an empty text without fields. Masks' files are not read."""
        if not self.fields:
            return ""
        digest = hashlib.blake2b(repr(self.fields).encode(), digest_size=8)
        for name, store in self.stores.items():
            for part in (name.encode(), *store.parts()):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
        return digest.hexdigest()

    def close(self) -> None:
        """Close what masks are read from."""
        for storage in self.storages:
            storage.close()


NO_FIELDS = RecordTable((), {}, {})
"""The table of a source without fields."""


class Files(Protocol):
    """One encoded file per sample: an image or a mask."""

    @property
    def storage(self) -> Storage | None:
        """See `Source.storage`."""

    @property
    def shard_sizes(self) -> tuple[int, ...] | None:
        """See `Source.shard_sizes`."""

    def path(self, index: int) -> str:
        """See `Source.path`."""

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        """See `Source.read`."""

    def entries(self) -> bytes:
        """See `gpuflow.sources.base.entries_of`."""

    def names(self) -> list[str]:
        """See `gpuflow.sources.split_values.names_of_samples`."""

    def numbers(self) -> Sequence[Sequence[int] | Ints]:
        """Return columns of whole numbers that a fingerprint of images includes, such as the files' sizes."""

    def parts(self) -> Iterator[bytes]:
        """Yield what a fingerprint of masks includes."""

    def close(self) -> None:
        """Close what they are read from."""


@final
@dataclass(frozen=True, slots=True)
class WholeFiles:
    """Files on one storage. root: the folder that whole paths may lie below; of no matter to a fingerprint."""

    storage: Storage
    paths: PathTable
    root: str = ""
    shard_sizes: None = field(default=None, init=False)

    def path(self, index: int) -> str:
        return redacted(self.paths[index])

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        return self.storage.read(self.paths.take(indices), allocate)

    def ranges(self, indices: Sequence[int]) -> list[Range]:
        """Ask the storage where the bytes of these samples lie."""
        paths = [os.fsdecode(path) for path in self.paths.take(indices)]
        found = zip(paths, self.storage.inspect(paths), strict=True)
        files = [file if isinstance(file, Shard) else Shard(path=path, size=0, stamp="") for path, file in found]
        return [(file, 0, file.size) for file in files]

    def entries(self) -> bytes:
        return self.paths.entries_below(self.root)

    def names(self) -> list[str]:
        return os.fsdecode(self.entries()).split("\0")[:-1]

    def numbers(self) -> Sequence[Ints]:
        return ()

    def parts(self) -> Iterator[bytes]:
        yield self.entries()

    def close(self) -> None:
        self.storage.close()


@final
@dataclass(frozen=True, slots=True)
class Members:
    """Members of shards. members: their names. starts, sizes: int64 [n], in bytes."""

    storage: Storage
    shards: Shards
    members: PathTable
    starts: Ints
    sizes: Ints

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        return self.shards.sizes

    def path(self, index: int) -> str:
        return redacted(f"{self.shards.place(index)[0].path}/{self.members[index]}")

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        places = np.asarray(indices, dtype=np.int64)
        starts, sizes = self.starts[places].tolist(), self.sizes[places].tolist()
        return self.storage.read_ranges(self.shards.of(places), starts, sizes, allocate)

    def ranges(self, indices: Sequence[int]) -> list[Range]:
        return self.shards.ranges(indices, self.starts, self.sizes)

    def entries(self) -> bytes:
        return self.members.blob + names_of([shard.path for shard in self.shards.files])

    def names(self) -> list[str]:
        return self.shards.names(self.members.entries())

    def numbers(self) -> Sequence[Sequence[int] | Ints]:
        return self.sizes, self.shard_sizes

    def parts(self) -> Iterator[bytes]:
        yield from (self.members.blob, self.sizes.tobytes())

    def close(self) -> None:
        self.storage.close()


class TableSource:
    """A source whose labels and records are in memory: see `Source` and `RecordSource`.

    Args:
        files: its images.
        has_labels: whether its samples have labels.
        table: the declared fields besides image and label.
        splits: for each split that the source itself has, by name, the range of its indices (first, after the last).
        note: how its index was read, for `gpuflow explain`; empty if there was nothing to decide.
        locate: returns the place of sample i in errors; by default its path. Copies and other processes lack it.
    """

    locate: Callable[[int], str] | None = None

    def __init__(
        self,
        files: Files,
        labels: Array,
        classes: tuple[str, ...],
        *,
        has_labels: bool = True,
        table: RecordTable = NO_FIELDS,
        splits: Mapping[str, tuple[int, int]] | None = None,
        note: str = "",
        locate: Callable[[int], str] | None = None,
    ) -> None:
        self.files = files
        self.storage = files.storage
        self.shard_sizes = files.shard_sizes
        self.classes = classes
        self.labels = labels
        self.has_labels = has_labels
        self.splits = dict(splits or {})
        self.note = note
        self.locate = locate
        self._table = table

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "locate"}

    @cached_property
    def fingerprint(self) -> str:
        """See `gpuflow.sources.base.fingerprint`."""
        known = self._table.digest()
        return fingerprint(self.entries, self.labels, self.classes, *self.files.numbers(), known=known)

    @property
    def entries(self) -> bytes:
        """See `gpuflow.sources.base.entries_of`."""
        return self.files.entries()

    @property
    def fields(self) -> tuple[Field, ...]:
        return self._table.fields

    @property
    def left_out(self) -> Mapping[int, LeftOut]:
        return self._table.left_out

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        return self.files.path(index)

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        return self.files.read(indices, allocate)

    def records(self, indices: Sequence[int]) -> Records:
        return self._table.records(indices)

    def is_read_remotely(self) -> bool:
        """Return True if images or masks are behind URLs."""
        return any(storage is not None and storage.remote for storage in (self.storage, *self._table.storages))

    def without_records(self) -> Self:
        source = copy.copy(self)
        source._table = NO_FIELDS
        return source

    def close(self) -> None:
        self.files.close()
        self._table.close()


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """Boxes, their labels or keypoints: rows of different numbers per sample."""

    rows: Ragged

    def take(self, samples: Ints, errors: list[str | None]) -> Ragged:
        return self.rows.take(samples)

    def parts(self) -> Iterator[bytes]:
        yield from (self.rows.values.tobytes(), self.rows.offsets.tobytes())


@final
@dataclass(frozen=True, slots=True)
class Numbers:
    """One number per sample: float64 [n]."""

    values: Floats

    def take(self, samples: Ints, errors: list[str | None]) -> Floats:
        return self.values[samples]

    def parts(self) -> Iterator[bytes]:
        yield self.values.tobytes()


@final
@dataclass(frozen=True, slots=True)
class Objects:
    """One text, or one value of JSON, per sample.

    Each `take` copies the values: a loop that changes those of its batch must not change those of later epochs.
    """

    values: list[Any]

    def take(self, samples: Ints, errors: list[str | None]) -> list[Any]:
        return [copy.deepcopy(self.values[i]) for i in samples.tolist()]

    def parts(self) -> Iterator[bytes]:
        yield json.dumps(self.values).encode()


@final
@dataclass(frozen=True, slots=True)
class Instances:
    """The masks of all instances in a few arrays. Sample -> instances -> parts -> values.

    An instance's parts are the outlines of polygons, or one list of run lengths.

    instances: int64 [n + 1], offsets into instances. parts_of: int64 [I + 1], offsets into parts.
    values_of: int64 [P + 1], offsets into values. values: float64, x and y in turn or run lengths.
    sizes: int32 [I, 2], height and width of run lengths; zeros for polygons.
    """

    instances: Ints
    parts_of: Ints
    values_of: Ints
    values: Floats
    sizes: NDArray[np.int32]

    def take(self, samples: Ints, errors: list[str | None]) -> list[tuple[Polygons | Rle, ...]]:
        spans = zip(self.instances[samples].tolist(), self.instances[samples + 1].tolist(), strict=True)
        return [tuple(map(self._instance, range(first, last))) for first, last in spans]

    def without(self, numbers: Ints) -> Instances:
        """Return all instances but those of these numbers."""
        instances = Ragged(np.arange(len(self.sizes)), self.instances).without(numbers)
        parts = Ragged(np.arange(len(self.values_of) - 1), self.parts_of).take(instances.values)
        values = Ragged(self.values, self.values_of).take(parts.values)
        return Instances(
            instances=instances.offsets,
            parts_of=parts.offsets,
            values_of=values.offsets,
            values=values.values,
            sizes=self.sizes[instances.values],
        )

    def _instance(self, k: int) -> Polygons | Rle:
        first, last = self.parts_of[k], self.parts_of[k + 1]
        parts = [self.values[self.values_of[p] : self.values_of[p + 1]] for p in range(first, last)]
        if self.sizes[k].any():
            return Rle((int(self.sizes[k, 0]), int(self.sizes[k, 1])), parts[0].astype(np.int64))
        return Polygons(tuple(part.reshape(-1, 2) for part in parts))

    def parts(self) -> Iterator[bytes]:
        arrays = (self.instances, self.parts_of, self.values_of, self.values, self.sizes)
        yield from (array.tobytes() for array in arrays)


@final
@dataclass(frozen=True, slots=True)
class Masks:
    """One mask in a file per sample, read when its record is."""

    files: Files

    def take(self, samples: Ints, errors: list[str | None]) -> list[MaskFile]:
        """Read these files. One that cannot be read, or is empty, is an error of its sample's record."""
        payload = self.files.read(samples.tolist(), lambda size: np.empty(size, np.uint8))
        for i, error in enumerate(payload.errors):
            if error is not None and errors[i] is None:
                errors[i] = f"mask {self.files.path(int(samples[i]))}: {error}"
        return [MaskFile(payload.sample(i).tobytes()) for i in range(len(payload))]

    def parts(self) -> Iterator[bytes]:
        yield from self.files.parts()


# --- building ---------------------------------------------------------------------------------------------------------


def run_lengths(text: str) -> Ints:
    """Expand the run lengths that pycocotools compressed to a text. Raises ValueError if it is none of its texts.

    A character holds 5 bits of a number, lowest first, and whether more follow; the last one's highest bit is the sign.
    From the fourth number on, each is the difference to the one two places before it.

    Examples:
        >>> run_lengths("52203")
        array([5, 2, 2, 2, 5])
    """
    if not text:
        return np.zeros(0, np.int64)
    groups = np.frombuffer(text.encode("ascii") if text.isascii() else b" ", np.uint8).astype(np.int64) - 48
    if groups.min() < 0 or groups.max() > 63:
        raise ValueError("a character that is none of run lengths")
    is_last = groups & 0x20 == 0
    if not is_last[-1]:
        raise ValueError("the last run length is cut off")
    ends = np.flatnonzero(is_last)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > 12:
        raise ValueError("a run length of more than 60 bits")
    places = np.arange(len(groups)) - np.repeat(starts, lengths)
    numbers = np.add.reduceat((groups & 0x1F) << (5 * places), starts)
    numbers -= np.where(groups[ends] & 0x10 != 0, np.int64(1) << (5 * lengths), 0)
    numbers[1::2] = np.cumsum(numbers[1::2])
    numbers[2::2] = np.cumsum(numbers[2::2])
    return numbers


_MANTISSA = 2.0**53
"""Below this, float64 holds every whole number."""


@final
class RecordBuilder:
    """Collects the declared fields of samples, block by block, and builds their table.

    Args:
        declared: names and specs of the fields; those of images, labels and masks' files are ignored.
        classes: of boxes' labels: see `resolve_labels`.
        place: the place of the whole source.
        locate: the places of single samples.
        mixed_masks: whether a mask of one instance may be polygons or run lengths, for each kind.
    """

    def __init__(
        self,
        declared: FieldPairs,
        classes: GivenClasses,
        place: str,
        locate: Locate,
        *,
        mixed_masks: bool = False,
    ) -> None:
        self._mixed_masks = mixed_masks
        self._declared = [(name, spec) for name, spec in declared if spec.type not in ("image", "label")]
        self._locate = locate
        self._place = place
        self._count = 0
        self._bad: dict[int, str] = {}
        self._invalid: dict[str, dict[int, tuple[int, str]]] = {name: {} for name, _ in self._declared}
        self._box_labels = Labels(classes, place)
        self._arrays: dict[str, list[Array]] = {name: [] for name, _ in self._declared}
        self._counts: dict[str, list[Ints]] = {name: [] for name, _ in self._declared}
        self._objects: dict[str, list[Any]] = {name: [] for name, _ in self._declared}
        self._masks: dict[str, _InstanceBuilder] = {}
        self._keypoints: dict[str, int] = {}

    def columns(self) -> list[str]:
        """Return the columns that `add` needs."""
        columns = [spec.column or name for name, spec in self._declared if not spec.is_mask_file]
        return columns + [spec.labels for _, spec in self._declared if spec.labels is not None]

    def add(self, columns: Mapping[str, Sequence[Any]], count: int) -> None:
        """Append the next `count` samples: for each column a value of each. Raises SourceError at the faulty one."""
        boxes: Ints | None = None
        for name, spec in sorted(self._declared, key=lambda field: field[1].type != "boxes"):
            if spec.is_mask_file:
                continue
            column = spec.column or name
            values = columns[column]
            match spec.type:
                case "boxes":
                    counts = self._add_boxes(name, spec, column, values)
                    if spec.labels is not None:
                        self._add_box_labels(spec.labels, columns[spec.labels], counts)
                    boxes = counts if boxes is None else boxes
                case "keypoints":
                    self._check_counts(column, boxes, self._add_keypoints(name, column, values))
                case "mask":
                    masks = self._masks.setdefault(name, _InstanceBuilder())
                    counts = self._lists(column, values)
                    self._check_counts(column, boxes, counts)
                    for i, value in enumerate(values):
                        self._add_instances(name, masks, spec, column, i, value)
                    masks.add_block(counts)
                case "number":
                    self._add_numbers(name, column, values)
                case "text":
                    for i, value in enumerate(values):
                        if not isinstance(value, str):
                            raise self._value_fault(i, column, "must be text", value)
                    self._objects[name] += values
                case "any":
                    self._objects[name] += values
                case other:
                    raise AssertionError(f"{name} is no field of a record: {other!r}")
        self._count += count

    def build(
        self,
        files: Mapping[str, Store] | None = None,
        storages: tuple[Storage, ...] = (),
        box_labels: tuple[tuple[str, ...], Ints] | None = None,
    ) -> RecordTable:
        """Build the table of all samples.

        Args:
            files: the columns of masks that are files.
            storages: what they are read from.
            box_labels: classes and the label of each box, in a column `labels`, where they are known from elsewhere.
        """
        fields = []
        stores = dict[str, Store](files or {})
        groups = self._groups()
        invalid = {group: self._invalid_of([name for name in groups if groups[name] == group]) for group in groups}
        rows = {name: np.array(sorted(invalid[group]), np.int64) for name, group in groups.items()}
        for name, spec in self._declared:
            labels = spec.labels or ""
            classes = tuple[str, ...]()
            instances = spec.type == "mask" and not spec.is_mask_file
            match spec.type:
                case "boxes":
                    boxes = self._ragged(name, (0, 4))
                    stores[name] = Rows(boxes.without(rows[name]))
                    labels = labels if box_labels is None else "labels"
                    if labels:
                        classes, numbers = box_labels or self._box_labels.build()
                        stores[labels] = Rows(Ragged(numbers, boxes.offsets).without(rows[name]))
                case "keypoints":
                    count = self._keypoints.get(name, 0)
                    self._check_flip_pairs(name, spec, count)
                    stores[name] = Rows(self._ragged(name, (0, count, 3)).without(rows[name]))
                case "mask":
                    if instances:
                        stores[name] = self._masks.setdefault(name, _InstanceBuilder()).build(rows[name])
                case "number":
                    stores[name] = Numbers(np.concatenate([np.zeros(0), *self._arrays[name]]))
                case "text" | "any":
                    stores[name] = Objects(self._objects[name])
                case other:
                    raise AssertionError(f"{name} is no field of a record: {other!r}")
            fields.append(
                Field(
                    name=name,
                    type=spec.type,
                    labels=labels,
                    classes=classes,
                    instances=instances,
                    fill=spec.fill or 0,
                    formats=spec.formats or (),
                    flip_pairs=spec.flip_pairs or (),
                )
            )
        left_out = dict[int, LeftOut]()
        for sample, reason in chain.from_iterable(found.values() for found in invalid.values()):
            known = left_out.get(sample)
            left_out[sample] = LeftOut(1, reason) if known is None else LeftOut(known.instances + 1, known.reason)
        return RecordTable(tuple(fields), stores, self._bad, storages, left_out=left_out)

    def _groups(self) -> dict[str, str]:
        """Return the field that decides the rows of each field with instances: the first boxes, or itself."""
        names = [(name, spec) for name, spec in self._declared if spec.type in GEOMETRIC and not spec.is_mask_file]
        first = next((name for name, spec in names if spec.type == "boxes"), None)
        return {name: name if first is None or spec.type == "boxes" else first for name, spec in names}

    def _invalid_of(self, names: Sequence[str]) -> dict[int, tuple[int, str]]:
        """Return the rows of a group of fields that are left out, in order: the sample of each, and why."""
        rows = dict(chain.from_iterable(self._invalid[name].items() for name in reversed(names)))
        return dict(sorted(rows.items()))

    # --- faults -----------------------------------------------------------------------------------------------------

    def _fault(self, i: int, column: str, rule: str, value: Any, row: int | None = None) -> SourceError:
        """Return the error for the value, or for one of its rows, of sample i of the block."""
        i += self._count
        here = self._locate.value(i, column) if row is None else self._locate.row(i, column, row)
        return SourceError(f"{here} {rule}, got {show(value)}; correct it")

    def _value_fault(self, i: int, column: str, rule: str, value: Any) -> SourceError:
        """Return the error for a number or a text."""
        action = ", or declare it with type: any, which keeps missing values" if value is None else ""
        return SourceError(f"{self._fault(i, column, rule, value)}{action}")

    def _leave_out(self, name: str, rows: Ints, column: str, counts: Ints, rule: str) -> None:
        """Note that these rows of the block, numbered across its samples, are left out."""
        starts = np.cumsum(counts) - counts
        owners = np.repeat(np.arange(len(counts)), counts)[rows]
        before = sum(int(earlier.sum()) for earlier in self._counts[name]) if len(rows) else 0
        for row, i in zip(rows.tolist(), owners.tolist(), strict=True):
            place = self._locate.row(i + self._count, column, row - int(starts[i]))
            self._invalid[name].setdefault(before + row, (i + self._count, f"{place} {rule}"))

    def _lists(self, column: str, values: Sequence[Any]) -> Ints:
        """Return the lengths of values. Raises SourceError for a value that is no list."""
        for i, value in enumerate(values):
            if type(value) is not list:
                raise self._fault(i, column, "must be a list with an entry for each instance", value)
        return np.fromiter(map(len, values), np.int64, len(values))

    def _check_rows(self, column: str, values: Sequence[Any], rule: str, is_sound: Callable[[Any], bool]) -> None:
        """Raise SourceError at the first row of values that is not sound."""
        for i, value in enumerate(values):
            for j, row in enumerate(value):
                if not is_sound(row):
                    raise self._fault(i, column, rule, row, j)

    def _check_counts(self, column: str, boxes: Ints | None, counts: Ints) -> None:
        """Raise SourceError where a sample has not one entry for each box."""
        if boxes is not None and (differ := np.flatnonzero(boxes != counts)).size:
            i = int(differ[0])
            here = self._locate.value(i + self._count, column)
            raise SourceError(
                f"{here} must have one entry for each of the {boxes[i]} boxes, got {counts[i]}; correct it"
            )

    def _check_flip_pairs(self, name: str, spec: FieldSpec, count: int) -> None:
        """Raise SourceError if pairs name other keypoints than the instances have; `count` is 0 without instances."""
        highest = max(chain((0,), *(spec.flip_pairs or ())))
        if count and highest >= count:
            rule = f"must name keypoints in 0..{count - 1}, got {highest}; correct it"
            raise SourceError(f"{self._place}: source.fields.{name}.flip_pairs {rule}")

    # --- types ------------------------------------------------------------------------------------------------------

    def _add_boxes(self, name: str, spec: FieldSpec, column: str, values: Sequence[Any]) -> Ints:
        counts = self._lists(column, values)
        missing = [math.nan] * 4  # stands for null and for an empty list
        rows = _numeric([missing if box in (None, []) else box for box in chain.from_iterable(values)], (4,))
        if rows is None:
            self._check_rows(
                column, values, "must be 4 numbers", lambda box: box in (None, []) or _numeric([box], (4,)) is not None
            )
            raise AssertionError("a check of boxes failed, but no box is faulty")
        given = rows
        if spec.format == "xywh":
            rows = np.concatenate([given[:, :2], given[:, :2] + given[:, 2:]], axis=1)
        elif spec.format == "cxcywh":
            rows = np.concatenate([given[:, :2] - given[:, 2:] / 2, given[:, :2] + given[:, 2:] / 2], axis=1)
        boxes = _float32(rows)
        finite = np.isfinite(boxes).all(axis=1)
        self._leave_out(name, np.flatnonzero(~finite), column, counts, "must have finite numbers")
        flat = finite & ~((boxes[:, 2:] > boxes[:, :2]).all(axis=1))
        corners = spec.format in (None, "xyxy")
        rule = "must have x1 < x2 and y1 < y2" if corners else "must have a width and a height above 0"
        for row in np.flatnonzero(flat).tolist():
            self._leave_out(name, np.array([row]), column, counts, f"{rule}, got {show(given[row].tolist())}")
        self._arrays[name].append(boxes)
        self._counts[name].append(counts)
        return counts

    def _add_box_labels(self, column: str, values: Sequence[Any], boxes: Ints) -> None:
        counts = self._lists(column, values)
        self._check_counts(column, boxes, counts)
        labels = list(chain.from_iterable(values))
        if not set(map(type, labels)) <= {int, str}:
            rule = "must be an integer or a class name"
            self._check_rows(column, values, rule, lambda label: type(label) in (int, str))
        ends = np.cumsum(counts)

        def place(row: int) -> str:
            i = int(np.searchsorted(ends, row, side="right"))
            return self._locate.row(i + self._count, column, row - int(ends[i] - counts[i]))

        self._box_labels.add(labels, place)

    def _add_keypoints(self, name: str, column: str, values: Sequence[Any]) -> Ints:
        counts = self._lists(column, values)
        rows = list(chain.from_iterable(values))
        if rows:
            known = self._keypoints.get(name)
            if known is None:
                known = self._keypoints[name] = self._keypoint_count(column, values)
            flat = (3 * known,)
            triples = (known, 3)
            numbers = _numeric(rows, flat)
            if numbers is None:
                numbers = _numeric(rows, triples)
            if numbers is None:
                self._check_rows(
                    column,
                    values,
                    f"must be {known} keypoints, each x, y and visibility",
                    lambda points: any(_numeric([points], shape) is not None for shape in (flat, triples)),
                )
                numbers = np.concatenate([np.asarray(row, dtype=np.float64).reshape(1, -1) for row in rows])
            points_MK3 = _float32(numbers.reshape(-1, known, 3))
            finite = np.isfinite(points_MK3).all(axis=(1, 2))
            self._leave_out(name, np.flatnonzero(~finite), column, counts, "must have finite numbers")
            visible = np.isin(points_MK3[:, :, 2], (0, 1, 2)).all(axis=1)
            rule = "must have a visibility of 0, 1 or 2"
            self._leave_out(name, np.flatnonzero(finite & ~visible), column, counts, rule)
            self._arrays[name].append(points_MK3)
        self._counts[name].append(counts)
        return counts

    def _keypoint_count(self, column: str, values: Sequence[Any]) -> int:
        """Return how many keypoints the first instance has."""
        i, j, first = next((i, j, row) for i, value in enumerate(values) for j, row in enumerate(value))
        flat = _numeric([first], None)
        if (
            flat is None
            or flat.ndim not in (2, 3)
            or not flat.size
            or flat.size % 3
            or flat.shape[2:] not in ((), (3,))
        ):
            raise self._fault(i, column, "must be keypoints, each x, y and visibility", first, j)
        return flat.size // 3

    def _add_instances(
        self, name: str, masks: _InstanceBuilder, spec: FieldSpec, column: str, i: int, value: list[Any]
    ) -> None:
        for j, mask in enumerate(value):
            if mask is None or mask == [] or mask == {}:
                masks.add([], (0, 0))
                reason = f"must have an outline or run lengths, got {show(mask)}"
            elif isinstance(mask, dict) and (spec.kind == "rle" or self._mixed_masks):
                reason = self._add_rle(masks, column, i, j, mask)
            elif isinstance(mask, list) and (spec.kind == "polygons" or self._mixed_masks):
                reason = self._add_polygons(masks, column, i, j, mask)
            else:
                wanted = "a mapping of size and counts" if spec.kind == "rle" else "a list of outlines"
                raise self._fault(i, column, f"must be {wanted}", mask, j)
            if reason:
                place = self._locate.row(i + self._count, column, j)
                self._invalid[name][len(masks) - 1] = i + self._count, f"{place} {reason}"

    def _add_polygons(self, masks: _InstanceBuilder, column: str, i: int, j: int, outlines: list[Any]) -> str:
        """Append an instance. Returns why it is left out, or nothing."""
        parts = []
        reason = ""
        for outline in outlines:
            points = _outline(outline)
            if points is None:
                raise self._fault(i, column, "must be outlines, each a list of x and y in turn", outline, j)
            parts.append(points)
            if points.size < 6:
                reason = f"must have outlines of at least 3 points, got {points.size // 2}"
            elif not np.isfinite(points).all():
                reason = "must have finite numbers"
        masks.add(parts, (0, 0))
        return reason

    def _add_rle(self, masks: _InstanceBuilder, column: str, i: int, j: int, rle: dict[str, Any]) -> str:
        """Append an instance. Returns why it is left out, or nothing."""
        size = rle.get("size")
        counts = rle.get("counts")
        if not (isinstance(size, list) and list(map(type, size)) == [int, int] and min(size) > 0 and max(size) < 2**31):
            raise self._fault(i, column, "must have a size [height, width]", size, j)
        if not isinstance(counts, str | list):
            raise self._fault(i, column, "must have counts, a list of numbers or a text", counts, j)
        reason = ""
        try:
            lengths = run_lengths(counts) if isinstance(counts, str) else np.array(counts or [0])
        except ValueError as fault:
            lengths = np.zeros(1, np.int64)
            reason = f"must have the run lengths of COCO as counts, got {fault}"
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
            raise self._fault(i, column, "must have counts, a list of whole numbers or a text", counts, j)
        height, width = size
        runs = Rle((height, width), lengths)
        if not reason and not runs.fills:
            reason = f"must have run lengths >= 0 that add up to {height} x {width}, got {runs.total} in all"
        elif not reason and not lengths[1::2].any():
            reason = "must have at least one pixel, got none"
        masks.add([lengths.astype(np.float64)], (height, width))
        return reason

    def _add_numbers(self, name: str, column: str, values: Sequence[Any]) -> None:
        numbers = _numeric(list(values), ())
        if numbers is None:
            for i, value in enumerate(values):
                if _numeric([value], ()) is None:
                    raise self._value_fault(i, column, "must be a number", value)
            raise AssertionError("a check of numbers failed, but no number is faulty")
        for i in np.flatnonzero(np.abs(numbers) >= _MANTISSA).tolist():
            if type(values[i]) is int and values[i] != int(numbers[i]):
                raise SourceError(
                    f"{self._locate.value(i + self._count, column)} must have no more digits than float64 holds, got "
                    f"{show(values[i])}; declare a field of type any"
                )
        for i in np.flatnonzero(~np.isfinite(numbers)).tolist():
            place = self._locate.value(i + self._count, column)
            self._bad.setdefault(i + self._count, f"{place} must be finite, got {numbers[i]}")
        self._arrays[name].append(numbers)

    def _ragged(self, name: str, empty: tuple[int, ...]) -> Ragged:
        counts = np.concatenate([np.zeros(0, np.int64), *self._counts[name]])
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return Ragged(np.concatenate([np.zeros(empty, np.float32), *self._arrays[name]]), offsets)


@final
class _InstanceBuilder:
    """Collects the masks of instances: see `Instances`."""

    def __init__(self) -> None:
        self._counts: list[Ints] = []
        self._parts = array("q", [0])
        self._lengths = array("q", [0])
        self._blocks: list[Floats] = []
        self._block: list[Floats] = []
        self._sizes = array("i")

    def __len__(self) -> int:
        return len(self._parts) - 1

    def add(self, parts: Sequence[Floats], size: tuple[int, int]) -> None:
        """Append an instance of these outlines, or of one part of run lengths and a size."""
        self._parts.append(len(parts))
        self._lengths.extend(map(len, parts))
        self._block += parts
        self._sizes.extend(size)

    def add_block(self, counts: Ints) -> None:
        """End a block of samples that have `counts` instances each."""
        self._counts.append(counts)
        self._blocks.append(np.concatenate([np.zeros(0), *self._block]))
        self._block = []

    def build(self, left_out: Ints) -> Instances:
        """Return the masks without those of these numbers."""
        whole = Instances(
            instances=np.concatenate([[0], np.cumsum(np.concatenate([np.zeros(0, np.int64), *self._counts]))]),
            parts_of=np.cumsum(np.frombuffer(self._parts, dtype=np.int64)),
            values_of=np.cumsum(np.frombuffer(self._lengths, dtype=np.int64)),
            values=np.concatenate([np.zeros(0), *self._blocks]),
            sizes=np.array(self._sizes, dtype=np.int32).reshape(-1, 2),
        )
        return whole.without(left_out) if len(left_out) else whole


def _numeric(rows: list[Any], shape: tuple[int, ...] | None) -> Floats | None:
    """Convert rows to float64 [len(rows), *shape], or of any one shape; None if one is of another shape or not of
    numbers."""
    if not rows and shape is not None:
        return np.zeros((0, *shape))
    try:
        numbers = np.array(rows)
        if numbers.dtype == object and set(map(type, numbers.flat)) <= {int, float}:  # too large for 64 bits
            numbers = np.array(rows, np.float64)
    except (ValueError, OverflowError):
        return None
    if numbers.dtype.kind not in "iuf" or (shape is not None and numbers.shape[1:] != shape):
        return None
    for _ in numbers.shape[1:]:
        rows = list(chain.from_iterable(rows))
    if bool in set(map(type, rows)):  # of which numpy makes numbers next to numbers
        return None
    return numbers.astype(np.float64)


def _outline(value: Any) -> Floats | None:
    """Return x and y in turn, from such a list or from a list of pairs; None if it is neither."""
    if not isinstance(value, list):
        return None
    try:
        numbers = np.array(array("d", value))
    except (TypeError, OverflowError):
        pairs = _numeric(value, (2,))
        return None if pairs is None else pairs.reshape(-1)
    return numbers if len(numbers) % 2 == 0 else None


def _float32(numbers: Floats) -> NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        return numbers.astype(np.float32)
