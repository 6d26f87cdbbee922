"""A mix: several sources as one, whose samples stand one source after the other. The sampler decides their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, final

import numpy as np

from gpuflow.arrays import Array, Bytes, Ints
from gpuflow.errors import ConfigError, Problem, SourceError, show
from gpuflow.pipeline.bounds import Bounds, out_of_bounds
from gpuflow.pipeline.records import Column, Field, LeftOut, Ragged, Records
from gpuflow.sources.base import (
    Source,
    fields_of,
    fingerprint,
    fingerprint_of,
    has_labels,
    is_read_remotely,
    left_out_of,
    records_of,
    without_records,
)
from gpuflow.sources.field_spec import FieldPairs, conflict
from gpuflow.sources.spec import SourceSpec, WithSplits
from gpuflow.sources.storage import Allocate, Payload, Storage


@final
class MixSource:
    """The samples of several sources, those of the first one first. Closing it closes them.

    Args:
        parts: the sources. All have the same fields and the same kind of labels.
        classes: the names of all classes, those of each source among them; empty where labels are numbers. They are
            those of the samples' labels, or of the boxes where no label is declared.
    """

    shard_sizes = None

    def __init__(self, parts: Sequence[Source], classes: tuple[str, ...]) -> None:
        self.parts = tuple(parts)
        self.classes = classes
        self._ends = np.cumsum([len(part) for part in parts])
        self._lookups = [_lookup(part, classes) for part in parts]
        self.labels: Array = np.concatenate(
            [_relabelled(part, lookup, len(classes)) for part, lookup in zip(parts, self._lookups, strict=True)]
        )
        first = parts[0]
        self.fields: tuple[Field, ...] = tuple(
            replace(field, classes=classes) if _has_the_classes(field, first) else field for field in fields_of(first)
        )
        self._keypoints = _keypoint_counts(parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of samples of each source."""
        return tuple(map(len, self.parts))

    @cached_property
    def fingerprint(self) -> str:
        """See `gpuflow.sources.base.fingerprint`: those of all sources."""
        known = " ".join(map(fingerprint_of, self.parts))
        return fingerprint(b"", self.labels, self.classes, self.sizes, known=known)

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, index: int) -> str:
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self.parts[number].path(index - self._first(number))

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        """Read each source into its share of one buffer, which is allocated once all know how many bytes they
        need."""
        shares = self._shares(indices)
        payloads: dict[int, tuple[int, Payload]] = {}
        buffers: list[Bytes] = []

        def read_from(number: int, start: int) -> None:
            if number == len(shares):
                buffers.append(allocate(start))
                return

            def allocate_share(size: int) -> Bytes:
                if not buffers:
                    read_from(number + 1, start + size)
                return buffers[0][start : start + size]

            part, _, own = shares[number]
            payloads[number] = start, self.parts[part].read(own, allocate_share)

        read_from(0, 0)
        count = len(indices)
        offsets = [0] * count
        sizes = [0] * count
        errors = list[str | None]([None] * count)
        for number, (start, payload) in payloads.items():
            for k, i in enumerate(shares[number][1].tolist()):
                offsets[i], sizes[i], errors[i] = start + payload.offsets[k], payload.sizes[k], payload.errors[k]
        return Payload(buffer=buffers[0], offsets=offsets, sizes=sizes, errors=errors)

    @property
    def has_labels(self) -> bool:
        return has_labels(self.parts[0])

    def records(self, indices: Sequence[int]) -> Records:
        shares = self._shares(indices)
        found = [self._records_of(part, own) for part, _, own in shares]
        order = np.argsort(np.concatenate([rows for _, rows, _ in shares]))
        columns = {
            name: _joined([records.columns[name] for records in found], self._keypoints.get(name))
            for name in found[0].columns
        }
        errors = [error for records in found for error in records.errors]
        sizes: Ints | None = None
        if any(records.sizes is not None for records in found):
            each = (np.zeros((len(own.errors), 2), np.int64) if own.sizes is None else own.sizes for own in found)
            sizes = np.concatenate(list(each))
        return Records(columns, errors, sizes).take(order)

    def _shares(self, indices: Sequence[int]) -> list[tuple[int, Ints, list[int]]]:
        """Return each source that has some of these samples: its number, which ones it has, and their indices in it."""
        places = np.asarray(indices, dtype=np.int64)
        owners = np.searchsorted(self._ends, places, side="right")
        rows_of = [(number, np.flatnonzero(owners == number)) for number in np.unique(owners).tolist()]
        return [(number, rows, (places[rows] - self._first(number)).tolist()) for number, rows in rows_of]

    def _records_of(self, number: int, own: Sequence[int]) -> Records:
        """Read the records of samples of one source; its boxes get the labels of the mix."""
        part = self.parts[number]
        lookup = self._lookups[number]
        records = records_of(part, own)
        if lookup is None:
            return records
        columns = dict(records.columns)
        for field in fields_of(part):
            if _has_the_classes(field, part):
                labels = columns[field.labels]
                assert isinstance(labels, Ragged)
                columns[field.labels] = Ragged(lookup[labels.values], labels.offsets)
        return replace(records, columns=columns)

    @property
    def left_out(self) -> Mapping[int, LeftOut]:
        parts = enumerate(map(left_out_of, self.parts))
        return {self._first(number) + i: left_out for number, part in parts for i, left_out in part.items()}

    def without_records(self) -> MixSource:
        return MixSource([without_records(part) for part in self.parts], self.classes)

    @property
    def storage(self) -> Storage | None:
        """Return the storage of a source behind URLs, if there is one. Local files are on several storages, and this is
        none."""
        return next((part.storage for part in self.parts if is_read_remotely(part)), None)

    def close(self) -> None:
        for part in self.parts:
            part.close()

    def _first(self, number: int) -> int:
        """Return the index of a source's first sample."""
        return int(self._ends[number]) - len(self.parts[number])


@dataclass(frozen=True, kw_only=True, slots=True)
class MixEntry:
    """One source of a mix.

    Args:
        source: where its samples are.
        weight: how much of the mix comes from it, in proportion to the weights of the other sources.
    """

    source: SourceSpec
    weight: Annotated[float, Bounds(above=0)] = 1.0


@final
@dataclass(frozen=True, kw_only=True)
class Mix(WithSplits):
    """Several sources, each with a weight.

    Args:
        mix: several sources, each with a weight: where a pipeline shuffles, it draws from them in these proportions.
        by: whether each `sample` is drawn from any of the sources, or each `batch` from one of them.
        samples: samples of an epoch where a pipeline shuffles; by default as many as all sources have.
        classes: the names of the classes; by default all its sources have the same.
        unite_classes: unite the classes of its sources by name.
    """

    kind = "mix"
    instead: ClassVar[Mapping[str, str]] = {
        key: f"give each source of the mix its own {key}" for key in ("fields", "weights", "cache", "window")
    }
    is_path = False

    mix: tuple[MixEntry, ...]
    by: Literal["sample", "batch"] = "sample"
    samples: Annotated[int, Bounds(least=1)] | None = None
    classes: tuple[str, ...] | None = None
    unite_classes: bool = False

    @classmethod
    def of(cls, keys: Mapping[str, Any], make: Callable[[Any], SourceSpec]) -> Self:
        entries = list[MixEntry]()
        problems = list[Problem]()
        for i, entry in enumerate(keys["mix"]):
            try:
                if not isinstance(entry, MixEntry):
                    entry = MixEntry(**{**entry, "source": make(entry["source"])})
                entries.append(entry)
            except ConfigError as error:
                problems += (problem.below("source", "mix", i) for problem in error.problems)
        if problems:
            raise ConfigError(problems)
        return cls(**{**keys, "mix": tuple(entries)})

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.classes is not None and self.unite_classes:
            yield conflict("unite_classes", "must not stand next to classes", "remove one of them")
        if not self.mix:
            yield Problem.of("mix", "must list at least one source", (), code="config.range")
        for i, entry in enumerate(self.mix):
            yield from (problem.below("mix", i) for problem in out_of_bounds(entry))
            at = ("mix", i, "source")
            if isinstance(entry.source, Mix):
                yield conflict((*at, "mix"), "must not be in a mix", "list its sources in the other mix")
            for key in ("split", "seed"):
                if getattr(entry.source, key):
                    yield conflict((*at, key), "must stand next to mix, and is for all its sources", "move it there")
            if self.splits and not isinstance(entry.source, WithSplits):
                rule = f"must be those of sources that have splits, got source.{entry.source.kind}"
                yield conflict("splits", rule, "give the fractions of parts with split")

    def open(self) -> MixSource:
        """Index all sources of a mix."""
        parts: list[Source] = []
        for i, part in enumerate(self.sources):
            try:
                parts.append(part.open())
                _check(parts)
            except SourceError as error:
                for opened in parts:
                    opened.close()
                raise SourceError(f"source.mix[{i}]: {error}") from error
        return MixSource(parts, _classes(self, parts))

    @property
    def sources(self) -> tuple[SourceSpec, ...]:
        """Return the sources, each with the splits that the mix names."""
        return tuple(
            replace(entry.source, splits=self.splits)
            if self.splits and isinstance(entry.source, WithSplits)
            else entry.source
            for entry in self.mix
        )

    @property
    def where(self) -> str:
        return " and ".join(entry.source.where for entry in self.mix)

    @property
    def declared(self) -> FieldPairs:
        return self.mix[0].source.declared

    @property
    def fields_in_full(self) -> FieldPairs:
        return self.mix[0].source.fields_in_full


def _check(parts: Sequence[Source]) -> None:
    """Raise SourceError if the last source carries something else than the first one."""
    first, last = parts[0], parts[-1]
    wanted = _comparable_fields(first)
    fields = _comparable_fields(last)
    names = [", ".join(field.name for field in own) or "none" for own in (wanted, fields)]
    if names[0] != names[1]:
        raise SourceError(
            f"its fields must be those of source.mix[0] ({names[0]}), got {names[1]}; declare the same fields in each "
            "source"
        )
    for one, other in zip(map(asdict, wanted), map(asdict, fields), strict=True):
        for key in one:
            if one[key] != other[key]:
                raise SourceError(
                    f"its {one['name']} must have the {key} of source.mix[0], {show(one[key])}, got "
                    f"{show(other[key])}; declare the same in each source"
                )
    kinds = [(has_labels(part), part.labels.dtype.kind, part.labels.ndim) for part in (first, last)]
    if kinds[0] != kinds[1] or (last.labels.dtype.kind == "f" and first.labels.shape[1:] != last.labels.shape[1:]):
        raise SourceError("its labels must be of the same kind as those of source.mix[0]; declare the same label")
    known = _keypoint_counts(parts[:-1])
    own = _keypoint_counts([last])
    if differ := [name for name in own if 0 not in (known.get(name, 0), own[name]) and known[name] != own[name]]:
        name = differ[0]
        raise SourceError(
            f"its {name} must be {known[name]} keypoints for each instance, like those of the sources before it, got "
            f"{own[name]}; leave the field out, or load the source by itself"
        )


def _has_the_classes(field: Field, source: Source) -> bool:
    """Return True if the labels of boxes are of the source's classes, because no label is declared that they belong
    to."""
    return bool(field.labels) and not has_labels(source) and field.classes == source.classes


def _comparable_fields(source: Source) -> list[Field]:
    """Return the fields, without the classes that are compared as those of the source."""
    return [replace(field, classes=()) if _has_the_classes(field, source) else field for field in fields_of(source)]


def _keypoint_counts(parts: Sequence[Source]) -> dict[str, int]:
    """Return the number of keypoints of an instance, by field; 0 if no source has instances."""
    counts = dict[str, int]()
    for part in parts:
        names = [field.name for field in fields_of(part) if field.type == "keypoints"]
        columns = records_of(part, []).columns if names else {}
        for name in names:
            column = columns[name]
            assert isinstance(column, Ragged)
            counts[name] = max(counts.get(name, 0), column.values.shape[1])
    return counts


def _classes(spec: Mix, parts: Sequence[Source]) -> tuple[str, ...]:
    """Return the classes of a mix: those of all sources, or those that `spec` names. Raises SourceError."""
    if spec.classes is not None:
        if has_labels(parts[0]) and parts[0].labels.dtype.kind == "f":
            raise SourceError("source.classes must go with labels that are classes, got numbers; remove it")
        for i, part in enumerate(parts):
            if lacking := [name for name in part.classes if name not in spec.classes]:
                raise SourceError(
                    f"source.mix[{i}]: its classes must be among source.classes, got {lacking[0]!r} "
                    f"({len(lacking)} of {len(part.classes)} are not); add them, or set unite_classes: true"
                )
        return spec.classes
    if spec.unite_classes:
        return tuple(dict.fromkeys(name for part in parts for name in part.classes))
    first = parts[0].classes
    for i, part in enumerate(parts):
        if part.classes != first:
            names = (*part.classes, *first)
            differ = next(name for name in names if _place(part.classes, name) != _place(first, name))
            raise SourceError(
                f"source.mix[{i}]: its {len(part.classes)} classes must be the {len(first)} of source.mix[0], in the "
                f"same order, and {differ!r} is not; set unite_classes: true to unite them by name, or list "
                "all names in source.classes"
            )
    return first


def _place(classes: tuple[str, ...], name: str) -> int:
    return classes.index(name) if name in classes else -1


def _lookup(part: Source, classes: tuple[str, ...]) -> Ints | None:
    """Return the place of each class of a source among all classes; None if it has just these."""
    if part.classes == classes:
        return None
    places = {name: place for place, name in enumerate(classes)}
    return np.array([places[name] for name in part.classes], np.int64)


def _relabelled(part: Source, lookup: Ints | None, count: int) -> Array:
    """Return a source's labels as numbers of all `count` classes of the mix."""
    labels: Array = part.labels
    if lookup is None or not has_labels(part):
        return labels
    if labels.ndim == 1:
        placed: Array = lookup[labels]
        return placed
    held = np.zeros((len(part), count), labels.dtype)
    held[:, lookup] = labels
    return held


def _joined(parts: Sequence[Column], keypoints: int | None) -> Column:
    """Join columns one after the other.

    keypoints: of a column of keypoints, how many an instance has: where no sample has one, the column does not say.
    """
    first = parts[0]
    if isinstance(first, Ragged):
        empty = first.values[:0] if keypoints is None else np.zeros((0, keypoints, 3), first.values.dtype)
        rows = [part[i] for part in parts if isinstance(part, Ragged) for i in range(len(part))]
        return Ragged.of([row if len(row) else empty for row in rows], empty)
    if isinstance(first, list):
        return [value for part in parts if isinstance(part, list) for value in part]
    dense: Array = np.concatenate([np.asarray(part) for part in parts])
    return dense
