"""The records of all samples in few arrays: a column for each field, and why some records are bad."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, final

import numpy as np
from numpy.typing import NDArray

from gpuflow.arrays import Array, Bytes, Floats, Ints
from gpuflow.pipeline.records import Column, Field, LeftOut, MaskFile, Polygons, Ragged, Records, Rle
from gpuflow.sources.paths import PathTable
from gpuflow.sources.storage import Payload, Shards, Storage


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


class TableSource:
    """What sources have in common whose labels and records are in memory: see `Source` and `RecordSource`."""

    def __init__(self, classes: tuple[str, ...], labels: Array, has_labels: bool, table: RecordTable) -> None:
        self.classes = classes
        self.labels = labels
        self.has_labels = has_labels
        self._table = table

    @property
    def fields(self) -> tuple[Field, ...]:
        return self._table.fields

    @property
    def left_out(self) -> Mapping[int, LeftOut]:
        return self._table.left_out

    def __len__(self) -> int:
        return len(self.labels)

    def records(self, indices: Sequence[int]) -> Records:
        return self._table.records(indices)

    def without_records(self) -> Self:
        source = copy.copy(self)
        source._table = NO_FIELDS
        return source


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
class MaskFiles:
    """One file per sample, read when its record is."""

    storage: Storage
    paths: PathTable
    root: str = ""

    def take(self, samples: Ints, errors: list[str | None]) -> list[MaskFile]:
        payload = self.storage.read(self.paths.take(samples.tolist()), memory)
        return masks_of(payload, lambda i: self.paths[int(samples[i])], errors)

    def parts(self) -> Iterator[bytes]:
        yield self.paths.entries_below(self.root)


@final
@dataclass(frozen=True, slots=True)
class MaskMembers:
    """One member of a shard per sample, read when its record is.

    names: of the members. starts, sizes: int64 [n].
    """

    storage: Storage
    shards: Shards
    names: PathTable
    starts: Ints
    sizes: Ints

    def take(self, samples: Ints, errors: list[str | None]) -> list[MaskFile]:
        shards = self.shards.of(samples)
        starts, sizes = self.starts[samples].tolist(), self.sizes[samples].tolist()
        payload = self.storage.read_ranges(shards, starts, sizes, memory)
        return masks_of(payload, lambda i: f"{shards[i].path}/{self.names[int(samples[i])]}", errors)

    def parts(self) -> Iterator[bytes]:
        yield from (self.names.blob, self.sizes.tobytes())


def memory(size: int) -> Bytes:
    """Allocate memory of this size."""
    return np.empty(size, np.uint8)


def masks_of(payload: Payload, place: Callable[[int], str], errors: list[str | None]) -> list[MaskFile]:
    """Return the files as masks. Each one that could not be read, or is empty, is an error of its sample's record.

    place: returns that of file i.
    """
    for i, error in enumerate(payload.errors):
        if error is not None and errors[i] is None:
            errors[i] = f"mask {place(i)}: {error}"
    return [MaskFile(payload.sample(i).tobytes()) for i in range(len(payload))]
