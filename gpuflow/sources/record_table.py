"""The records of all samples in few arrays: a column for each field, and why some records are bad.

`SourceBuilder` builds a source with its table of records from values as they are written: lists and numbers of JSON.

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
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Protocol, Self, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from gpuflow.arrays import Array, Floats, Ints
from gpuflow.errors import SourceError, redacted, show
from gpuflow.pipeline.records import GEOMETRIC, Column, Field, LeftOut, MaskFile, Polygons, Ragged, Records, Rle
from gpuflow.sources.base import fingerprint, names_of
from gpuflow.sources.field_spec import FieldPairs, FieldSpec, GivenClasses, classes_of_boxes, label_field
from gpuflow.sources.labels import Labels, Locate, label_values, sample_labels
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


S = TypeVar("S", bound=TableSource)

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
class _Block:
    """The block of samples that is being added.

    locate: the places of single samples. place: that of the whole source. mixed_masks: see `SourceBuilder`.
    first: the number of the block's first sample. bad: why records are bad, by the number of the sample.
    """

    def __init__(self, locate: Locate, place: str, *, mixed_masks: bool) -> None:
        self.locate = locate
        self.place = place
        self.mixed_masks = mixed_masks
        self.first = 0
        self.bad: dict[int, str] = {}


class _FieldBuilder(ABC):
    """Collects the values of one field, block by block.

    invalid: the rows of instances that are incomplete: the sample of each, and why. left_out: the rows that are left
    out, which are those of all fields that describe the same instances.
    """

    def __init__(self, name: str, column: str, spec: FieldSpec, block: _Block) -> None:
        self.name = name
        self.column = column
        self.spec = spec
        self.block = block
        self.invalid: dict[int, tuple[int, str]] = {}
        self.left_out = np.zeros(0, np.int64)
        self.counts = [np.zeros(0, np.int64)]
        self.arrays: list[Array] = []

    @abstractmethod
    def add(self, values: Sequence[Any]) -> Ints | None:
        """Append the values of a block. Return the number of instances of each sample; None for a field without."""

    @abstractmethod
    def build(self) -> Store:
        """Build the column of all samples."""

    def place(self, i: int, row: int | None = None) -> str:
        """Return the place of the value of sample i of the block, or of one of its rows."""
        locate = self.block.locate
        i += self.block.first
        return locate.value(i, self.column) if row is None else locate.row(i, self.column, row)

    def fault(self, i: int, rule: str, value: Any, row: int | None = None, action: str = "correct it") -> SourceError:
        """Return the error for the value, or for one of its rows, of sample i of the block."""
        return SourceError(f"{self.place(i, row)} {rule}, got {show(value)}; {action}")

    def missing_fault(self, i: int, rule: str, value: Any) -> SourceError:
        """Return the error for a number or a text."""
        keep = ", or declare it with type: any, which keeps missing values" if value is None else ""
        return self.fault(i, rule, value, action=f"correct it{keep}")

    def lengths(self, values: Sequence[Any]) -> Ints:
        """Return the lengths of values. Raises SourceError for a value that is no list."""
        for i, value in enumerate(values):
            if type(value) is not list:
                raise self.fault(i, "must be a list with an entry for each instance", value)
        return np.fromiter(map(len, values), np.int64, len(values))

    def rows(self, values: Sequence[Any], rule: str, parse: Callable[[list[Any]], Floats | None]) -> Floats:
        """Parse all rows of the block together; one by one to find the first that breaks the rule. Raises SourceError.

        parse: returns None for rows that it cannot parse.
        """
        numbers = parse(list(chain.from_iterable(values)))
        if numbers is not None:
            return numbers
        found = []
        for i, value in enumerate(values):
            for j, row in enumerate(value):
                if (parsed := parse([row])) is None:
                    raise self.fault(i, rule, row, j)
                found.append(parsed)
        return np.concatenate(found)

    def check_counts(self, boxes: Ints | None, counts: Ints) -> None:
        """Raise SourceError where a sample has not one entry for each box."""
        if boxes is not None and (differ := np.flatnonzero(boxes != counts)).size:
            i = int(differ[0])
            raise self.fault(i, f"must have one entry for each of the {boxes[i]} boxes", int(counts[i]))

    def leave_out(self, rows: Ints, counts: Ints, rule: Callable[[int], str]) -> None:
        """Note that these rows of the block, numbered across its samples, are left out. rule: the one that a row
        breaks."""
        before = sum(int(earlier.sum()) for earlier in self.counts) if len(rows) else 0
        for row in rows.tolist():
            i, j = _owner(counts, row)
            reason = f"{self.place(i, j)} {rule(row)}"
            self.invalid.setdefault(before + row, (i + self.block.first, reason))

    def ragged(self, empty: tuple[int, ...]) -> Ragged:
        """Return all rows that were added. empty: the shape of none."""
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(self.counts))]).astype(np.int64)
        return Ragged(np.concatenate([np.zeros(empty, np.float32), *self.arrays]), offsets)


@final
class _Boxes(_FieldBuilder):
    def add(self, values: Sequence[Any]) -> Ints:
        counts = self.lengths(values)
        missing = [math.nan] * 4  # stands for null and for an empty list

        def parse(rows: list[Any]) -> Floats | None:
            return _numeric([missing if box in (None, []) else box for box in rows], (4,))

        given = self.rows(values, "must be 4 numbers", parse)
        first, second = given[:, :2], given[:, 2:]
        corners = (first, second)
        if self.spec.format == "xywh":
            corners = (first, first + second)
        elif self.spec.format == "cxcywh":
            corners = (first - second / 2, first + second / 2)
        boxes = _float32(np.concatenate(corners, axis=1))
        finite = np.isfinite(boxes).all(axis=1)
        self.leave_out(np.flatnonzero(~finite), counts, lambda _: "must have finite numbers")
        flat = finite & ~((boxes[:, 2:] > boxes[:, :2]).all(axis=1))
        has_corners = self.spec.format in (None, "xyxy")
        rule = "must have x1 < x2 and y1 < y2" if has_corners else "must have a width and a height above 0"
        self.leave_out(np.flatnonzero(flat), counts, lambda row: f"{rule}, got {show(given[row].tolist())}")
        self.arrays.append(boxes)
        self.counts.append(counts)
        return counts

    def build(self) -> Rows:
        return Rows(self.ragged((0, 4)).without(self.left_out))


@final
class _BoxLabels(_FieldBuilder):
    """Collects the labels of boxes. classes: see `resolve_labels`."""

    def __init__(self, column: str, spec: FieldSpec, block: _Block, classes: GivenClasses) -> None:
        super().__init__(column, column, spec, block)
        self._labels = Labels(classes, block.place)
        self.classes: tuple[str, ...] = ()

    def add(self, values: Sequence[Any]) -> Ints:
        counts = self.lengths(values)
        labels = list(chain.from_iterable(values))
        for row in (row for row, label in enumerate(labels) if type(label) not in (int, str)):
            i, j = _owner(counts, row)
            raise self.fault(i, "must be an integer or a class name", labels[row], j)
        self._labels.add(labels, lambda row: self.place(*_owner(counts, row)))
        self.counts.append(counts)
        return counts

    def build(self) -> Rows:
        self.classes, labels = self._labels.build()
        return Rows(Ragged(labels, self.ragged((0,)).offsets).without(self.left_out))


@final
class _Keypoints(_FieldBuilder):
    _known = 0
    """How many keypoints an instance has; 0 before the first one."""

    def add(self, values: Sequence[Any]) -> Ints:
        counts = self.lengths(values)
        self._known = known = self._known or self._count(values)
        if counts.any():

            def parse(rows: list[Any]) -> Floats | None:
                parsed = (_numeric(rows, shape) for shape in ((3 * known,), (known, 3)))
                numbers = next((numbers for numbers in parsed if numbers is not None), None)
                return None if numbers is None else numbers.reshape(-1, known, 3)

            points_MK3 = _float32(self.rows(values, f"must be {known} keypoints, each x, y and visibility", parse))
            finite = np.isfinite(points_MK3).all(axis=(1, 2))
            self.leave_out(np.flatnonzero(~finite), counts, lambda _: "must have finite numbers")
            visible = np.isin(points_MK3[:, :, 2], (0, 1, 2)).all(axis=1)
            rule = "must have a visibility of 0, 1 or 2"
            self.leave_out(np.flatnonzero(finite & ~visible), counts, lambda _: rule)
            self.arrays.append(points_MK3)
        self.counts.append(counts)
        return counts

    def _count(self, values: Sequence[Any]) -> int:
        """Return how many keypoints the first instance has; 0 without instances."""
        for i, j, first in ((i, j, row) for i, value in enumerate(values) for j, row in enumerate(value)):
            numbers = _numeric([first], None)
            if numbers is None or not numbers.size or numbers.size % 3 or numbers.shape[2:] not in ((), (3,)):
                raise self.fault(i, "must be keypoints, each x, y and visibility", first, j)
            return numbers.size // 3
        return 0

    def build(self) -> Rows:
        highest = max(chain((0,), *(self.spec.flip_pairs or ())))
        if self._known and highest >= self._known:
            rule = f"must name keypoints in 0..{self._known - 1}, got {highest}; correct it"
            raise SourceError(f"{self.block.place}: source.fields.{self.name}.flip_pairs {rule}")
        return Rows(self.ragged((0, self._known, 3)).without(self.left_out))


@final
class _InstanceMasks(_FieldBuilder):
    """Collects the masks of instances: see `Instances`."""

    def __init__(self, name: str, column: str, spec: FieldSpec, block: _Block) -> None:
        super().__init__(name, column, spec, block)
        self._parts = array("q", [0])
        self._lengths = array("q", [0])
        self._sizes = array("i")

    def add(self, values: Sequence[Any]) -> Ints:
        counts = self.lengths(values)
        block = [np.zeros(0)]
        for i, value in enumerate(values):
            for j, mask in enumerate(value):
                parts, size, reason = self._parsed(i, j, mask)
                if reason:
                    self.invalid[len(self._parts) - 1] = i + self.block.first, f"{self.place(i, j)} {reason}"
                self._parts.append(len(parts))
                self._lengths.extend(map(len, parts))
                self._sizes.extend(size)
                block += parts
        self.arrays.append(np.concatenate(block))
        self.counts.append(counts)
        return counts

    def _parsed(self, i: int, j: int, mask: Any) -> tuple[list[Floats], tuple[int, int], str]:
        """Return the outlines of an instance, or one part of run lengths and its size; and why it is left out, if it
        is."""
        if mask is None or mask == [] or mask == {}:
            return [], (0, 0), f"must have an outline or run lengths, got {show(mask)}"
        if isinstance(mask, dict) and (self.spec.kind == "rle" or self.block.mixed_masks):
            return self._run_lengths(i, j, mask)
        if isinstance(mask, list) and (self.spec.kind == "polygons" or self.block.mixed_masks):
            return self._outlines(i, j, mask)
        wanted = "a mapping of size and counts" if self.spec.kind == "rle" else "a list of outlines"
        raise self.fault(i, f"must be {wanted}", mask, j)

    def _outlines(self, i: int, j: int, outlines: list[Any]) -> tuple[list[Floats], tuple[int, int], str]:
        parts = []
        reason = ""
        for outline in outlines:
            points = _outline(outline)
            if points is None:
                raise self.fault(i, "must be outlines, each a list of x and y in turn", outline, j)
            parts.append(points)
            if points.size < 6:
                reason = f"must have outlines of at least 3 points, got {points.size // 2}"
            elif not np.isfinite(points).all():
                reason = "must have finite numbers"
        return parts, (0, 0), reason

    def _run_lengths(self, i: int, j: int, rle: dict[str, Any]) -> tuple[list[Floats], tuple[int, int], str]:
        size = rle.get("size")
        counts = rle.get("counts")
        if not (isinstance(size, list) and list(map(type, size)) == [int, int] and min(size) > 0 and max(size) < 2**31):
            raise self.fault(i, "must have a size [height, width]", size, j)
        if not isinstance(counts, str | list):
            raise self.fault(i, "must have counts, a list of numbers or a text", counts, j)
        reason = ""
        try:
            lengths = run_lengths(counts) if isinstance(counts, str) else np.array(counts or [0])
        except ValueError as fault:
            lengths = np.zeros(1, np.int64)
            reason = f"must have the run lengths of COCO as counts, got {fault}"
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
            raise self.fault(i, "must have counts, a list of whole numbers or a text", counts, j)
        height, width = size
        runs = Rle((height, width), lengths)
        if not reason and not runs.fills:
            reason = f"must have run lengths >= 0 that add up to {height} x {width}, got {runs.total} in all"
        elif not reason and not lengths[1::2].any():
            reason = "must have at least one pixel, got none"
        return [lengths.astype(np.float64)], (height, width), reason

    def build(self) -> Instances:
        whole = Instances(
            instances=np.concatenate([[0], np.cumsum(np.concatenate(self.counts))]),
            parts_of=np.cumsum(np.frombuffer(self._parts, dtype=np.int64)),
            values_of=np.cumsum(np.frombuffer(self._lengths, dtype=np.int64)),
            values=np.concatenate([np.zeros(0), *self.arrays]),
            sizes=np.array(self._sizes, dtype=np.int32).reshape(-1, 2),
        )
        return whole.without(self.left_out) if len(self.left_out) else whole


@final
class _Numbers(_FieldBuilder):
    def add(self, values: Sequence[Any]) -> None:
        numbers = _numeric(list(values), ())
        if numbers is None:
            i = next(i for i, value in enumerate(values) if _numeric([value], ()) is None)
            raise self.missing_fault(i, "must be a number", values[i])
        for i in np.flatnonzero(np.abs(numbers) >= _MANTISSA).tolist():
            if type(values[i]) is int and values[i] != int(numbers[i]):
                rule = "must have no more digits than float64 holds"
                raise self.fault(i, rule, values[i], action="declare a field of type any")
        for i in np.flatnonzero(~np.isfinite(numbers)).tolist():
            self.block.bad.setdefault(i + self.block.first, f"{self.place(i)} must be finite, got {numbers[i]}")
        self.arrays.append(numbers)

    def build(self) -> Numbers:
        return Numbers(np.concatenate([np.zeros(0), *self.arrays]))


@final
class _Objects(_FieldBuilder):
    def __init__(self, name: str, column: str, spec: FieldSpec, block: _Block) -> None:
        super().__init__(name, column, spec, block)
        self._values: list[Any] = []

    def add(self, values: Sequence[Any]) -> None:
        for i, value in enumerate(values) if self.spec.type == "text" else ():
            if not isinstance(value, str):
                raise self.missing_fault(i, "must be text", value)
        self._values += values

    def build(self) -> Objects:
        return Objects(self._values)


_BUILDERS: dict[str | None, type[_FieldBuilder]] = {
    "boxes": _Boxes,
    "keypoints": _Keypoints,
    "mask": _InstanceMasks,
    "number": _Numbers,
    "text": _Objects,
    "any": _Objects,
}


@final
class SourceBuilder:
    """Collects the labels and the declared fields of samples, block by block, and builds their source.

    Args:
        declared: names and specs of the fields; those of images and masks' files are ignored.
        classes: those of the source: see `resolve_labels`.
        place: the place of the whole source.
        locate: the places of single samples.
        mixed_masks: whether a mask of one instance may be polygons or run lengths, for each kind.
        known: returns the classes of a column's values, from those that are given for it.
    """

    def __init__(
        self,
        declared: FieldPairs,
        classes: GivenClasses,
        place: str,
        locate: Locate,
        *,
        mixed_masks: bool = False,
        known: Callable[[str, GivenClasses], GivenClasses] = lambda _, given: given,
    ) -> None:
        self._block = _Block(locate, place, mixed_masks=mixed_masks)
        self._declared = [(name, spec) for name, spec in declared if spec.type not in ("image", "label")]
        self.class_columns: list[str] = []
        """Columns whose values are classes."""
        column, label, given = label_field(declared, classes)
        self._label_columns = () if label is None else label.columns or (column,)
        self._labels = None
        if label is not None:
            if label.kind not in ("number", "vector"):
                self.class_columns.append(column)
                given = known(column, given)
            self._labels = sample_labels(label, column, given, place, locate)
        self._fields: dict[str, _FieldBuilder] = {}
        for name, spec in self._declared:
            if not spec.is_mask_file:
                self._fields[name] = _BUILDERS[spec.type](name, spec.column or name, spec, self._block)
            if spec.labels is not None:
                self.class_columns.append(spec.labels)
                own = known(spec.labels, classes_of_boxes(declared, classes))
                self._fields[spec.labels] = _BoxLabels(spec.labels, spec, self._block, own)

    def add(self, columns: Mapping[str, Sequence[Any]], count: int) -> None:
        """Append the next `count` samples: for each of `columns_of` a value of each. Raises SourceError."""
        if self._labels is not None:
            self._labels.add(label_values([columns[column] for column in self._label_columns]))
        boxes: Ints | None = None
        for builder in sorted(self._fields.values(), key=lambda builder: not isinstance(builder, _Boxes)):
            counts = builder.add(columns[builder.column])
            if counts is not None:
                builder.check_counts(boxes, counts)
                boxes = counts if isinstance(builder, _Boxes) else boxes
        self._block.first += count

    def source(
        self,
        kind: type[S],
        files: Files,
        count: int,
        masks: Mapping[str, Files],
        sizes: Ints | None = None,
        **keys: Any,
    ) -> S:
        """Build the source of all samples.

        Args:
            kind: its class.
            files: its images.
            count: the number of samples.
            masks: the files of masks, by field.
            sizes: of the images, see `Records`.
            keys: other arguments of the class.
        """
        classes, labels = ((), np.zeros(count, np.int64)) if self._labels is None else self._labels.build()
        table = self._table(files, masks, sizes)
        has_labels = self._labels is not None
        classes = classes if has_labels else table.box_classes
        return kind(files, labels, classes, has_labels=has_labels, table=table, **keys)

    def _table(self, files: Files, masks: Mapping[str, Files], sizes: Ints | None) -> RecordTable:
        left_out = self._left_out()
        stores: dict[str, Store] = {name: Masks(own) for name, own in masks.items()}
        stores |= {name: builder.build() for name, builder in self._fields.items()}
        storages = dict.fromkeys(own.storage for own in (files, *masks.values()) if own.storage is not None)
        fields = []
        for name, spec in self._declared:
            labels = self._fields.get(spec.labels or "")
            fields.append(
                Field(
                    name=name,
                    type=spec.type,  # type: ignore[arg-type]  # `field_problems` has checked it
                    labels=spec.labels or "",
                    classes=labels.classes if isinstance(labels, _BoxLabels) else (),
                    instances=isinstance(self._fields.get(name), _InstanceMasks),
                    fill=spec.fill or 0,
                    formats=spec.formats or (),
                    flip_pairs=spec.flip_pairs or (),
                )
            )
        return RecordTable(
            tuple(fields), stores, self._block.bad, tuple(storages) if masks else (), sizes, left_out=left_out
        )

    def _left_out(self) -> dict[int, LeftOut]:
        """Have fields with instances leave out those that one of them lacks: all fields together if there are boxes."""
        geometric = [builder for builder in self._fields.values() if builder.spec.type in GEOMETRIC]
        has_boxes = any(isinstance(builder, _Boxes) for builder in geometric)
        left_out: dict[int, LeftOut] = {}
        for group in [geometric] if has_boxes else [[builder] for builder in geometric]:
            invalid = dict(chain.from_iterable(builder.invalid.items() for builder in reversed(group)))
            rows = sorted(invalid)
            for builder in group:
                builder.left_out = np.array(rows, np.int64)
            for sample, reason in (invalid[row] for row in rows):
                known = left_out.get(sample, LeftOut(0, reason))
                left_out[sample] = LeftOut(known.instances + 1, known.reason)
        return left_out


def _owner(counts: Ints, row: int) -> tuple[int, int]:
    """Return the sample of a row that is numbered across samples, and its number there. counts: of each sample's
    rows."""
    ends = np.cumsum(counts)
    i = int(np.searchsorted(ends, row, side="right"))
    return i, row - int(ends[i] - counts[i])


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
