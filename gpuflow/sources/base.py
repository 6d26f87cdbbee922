"""The protocol of a source, and what a source may offer besides: records of declared fields, and a fingerprint.

A source is indexed once, when it is opened, and read-only afterwards: many threads may call `read`. It provides labels,
paths and encoded bytes; only the decoder interprets the bytes.

A fingerprint is a hash of which samples a source holds, without where they lie. It is equal for a copy of the same
files under another root, and differs if a file is added, removed, renamed or gets another label. The files' content is
not read. A million entries take 0.2 s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from gpuflow.arrays import Array
from gpuflow.pipeline.records import Field, LeftOut, Records
from gpuflow.sources.storage import Allocate, Payload, Storage


class Source(Protocol):
    """The operations of every source. `len(source)` is its number of samples.

    A source may have a `fingerprint: str`, too, by which states and ranks know its samples again. Where it has none,
    `gpuflow.sources.fingerprint_of` makes one of its paths, labels and classes. One whose samples carry more than an
    image and a label is a `gpuflow.sources.RecordSource`.
    """

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the class names; a label is an index into this tuple. Empty where labels are numbers."""

    @property
    def labels(self) -> Array:
        """Return the label of each sample along the first axis: int64 [n] of one class each, uint8 [n, C] of several
        (1: the sample has the class), float32 [n] or [n, D] of numbers."""

    @property
    def shard_sizes(self) -> tuple[int, ...] | None:
        """Return the number of samples in each shard; None if neighbouring samples are not cheaper to read together."""

    @property
    def storage(self) -> Storage | None:
        """Return the storage that its samples are read from; None if they are in memory."""

    def __len__(self) -> int: ...

    def path(self, index: int) -> str:
        """Return the place of sample `index`, for messages: a path, a URL, or shard.tar/member."""

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        """Read the bytes of these samples, in this order. A sample that cannot be read is an error in the payload, not
        an exception; temporary failures are retried first. `allocate` is called once. Raises what `Storage` says."""

    def close(self) -> None:
        """Close its storage. The source must not be read afterwards."""


def is_read_remotely(source: Source) -> bool:
    """Return True if a source's samples are behind URLs, where its index may be local: worker processes must not read
    it."""
    return source.storage is not None and source.storage.remote


def spread(total: int, count: int) -> list[int]:
    """Choose at most `count` of the numbers below `total`, spread evenly from the first to the last, ascending.

    Examples:
        >>> spread(100, 3)
        [0, 49, 99]
    """
    return sorted({int(i) for i in np.linspace(0, max(total - 1, 0), min(total, count))})


# --- records ----------------------------------------------------------------------------------------------------------


class RecordSource(Source, Protocol):
    """A source whose samples have a record: the declared fields besides the image and the label."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """Return these fields; empty if only the image and the label are declared."""

    @property
    def has_labels(self) -> bool:
        """Return True if a label is declared. If not, `labels` are zeros, and a batch has no labels."""

    def records(self, indices: Sequence[int]) -> Records:
        """Read the fields of these samples, in this order; any thread may call it. Masks may be read from files: one
        that cannot be read is an error in the result, not an exception. Raises what `Storage` says."""

    @property
    def left_out(self) -> Mapping[int, LeftOut]:
        """Return the instances that are left out because their annotations are incomplete, by the index of the
        sample."""

    def without_records(self) -> Source:
        """Return the same samples without their fields, for processes that only read images."""


def fields_of(source: Source) -> tuple[Field, ...]:
    """Return the fields of a source's records besides image and label; none for a source that declares none."""
    fields: tuple[Field, ...] = getattr(source, "fields", ())
    return fields


def has_labels(source: Source) -> bool:
    """Return True if a source's samples have labels: true unless its fields declare none."""
    declared: bool = getattr(source, "has_labels", True)
    return declared


def has_one_class(source: Source) -> bool:
    """Return True if each sample has one class: labels are then numbers of classes, int64 [n]."""
    return has_labels(source) and source.labels.ndim == 1 and source.labels.dtype.kind == "i"


def records_of(source: Source, indices: Sequence[int]) -> Records:
    """Read the records of these samples; without columns and errors for a source that declares no fields."""
    if not fields_of(source):
        return Records({}, [None] * len(indices))
    records: Records = source.records(indices)  # type: ignore[attr-defined]  # a source with fields has it
    return records


def left_out_of(source: Source) -> Mapping[int, LeftOut]:
    """Return the instances that a source leaves out, by the index of the sample. Samples without any are not in it."""
    left_out: Mapping[int, LeftOut] = getattr(source, "left_out", {})
    return left_out


def without_records(source: Source) -> Source:
    """Return the same samples without their records: what a process that only reads images needs."""
    stripped: Source = source.without_records() if hasattr(source, "without_records") else source
    return stripped


# --- fingerprints -----------------------------------------------------------------------------------------------------


def fingerprint(entries: bytes, labels: Array, classes: Sequence[str], *numbers: Iterable[int], known: str = "") -> str:
    """Hash what a source knows of its samples to 16 hex digits.

    Args:
        entries: the paths of all samples relative to the source's root, each followed by a NUL.
        labels, classes: those of the source.
        numbers: more columns of whole numbers, such as the files' sizes.
        known: the fingerprint of another source that this one is a part of, or of its fields.
    """
    digest = hashlib.blake2b(digest_size=8)
    names = "\0".join(classes).encode("utf-8", "surrogateescape")
    columns = (np.asarray(column, dtype="<i8").tobytes() for column in numbers)
    for part in (known.encode(), names, entries, _bytes(labels), *columns):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _bytes(labels: Array) -> bytes:
    """Return labels as bytes. Numbers of one class each give the same bytes for each type of numbers."""
    if labels.ndim == 1 and labels.dtype.kind in "iu":
        return np.asarray(labels, dtype="<i8").tobytes()
    return repr((labels.dtype.kind, labels.shape[1:])).encode() + labels.tobytes()


def fingerprint_of(source: Source) -> str:
    """Return a source's own `fingerprint`; where it has none, that of its paths, labels and classes."""
    own: str | None = getattr(source, "fingerprint", None)
    return own if own is not None else fingerprint(entries_of(source), source.labels, source.classes)


def entries_of(source: Source) -> bytes:
    """Return bytes that name a source's samples, in their order, without their labels and fields. Equal for equal
    samples."""
    own: bytes | None = getattr(source, "entries", None)
    if own is not None:
        return own
    return names_of([source.path(index) for index in range(len(source))])


def names_of(paths: Sequence[str]) -> bytes:
    """Return paths relative to their common folder, each followed by a NUL."""
    return "".join(f"{path}\0" for path in relative(paths)).encode("utf-8", "surrogateescape")


def relative(paths: Sequence[str]) -> list[str]:
    """Remove from paths the folder that all of them begin with.

    Examples:
        >>> relative(["photos/cat/1.jpg", "photos/dog/2.jpg"])
        ['cat/1.jpg', 'dog/2.jpg']
    """
    first, last = min(paths), max(paths)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    start = first.rfind("/", 0, length) + 1
    return [path[start:] for path in paths]
