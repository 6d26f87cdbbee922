"""What a source may offer besides images and labels: declared fields, and their values for each sample.

These members are no part of the protocol `Source`: a source without them, such as one of another package, is a source
of images and labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from gpuflow.pipeline.records import Field, LeftOut, Records
from gpuflow.sources.base import Source


class RecordSource(Source, Protocol):
    """A source whose samples have a record: the declared fields besides the image and the label."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """These fields; empty if only the image and the label are declared."""

    @property
    def has_labels(self) -> bool:
        """Whether a label is declared. If not, `labels` are zeros, and a batch has no labels."""

    def records(self, indices: Sequence[int]) -> Records:
        """The fields of these samples, in this order; any thread may call it. Masks may be read from files: one that
        cannot be read is an error in the result, not an exception. Raises what `Storage` says."""

    @property
    def left_out(self) -> Mapping[int, LeftOut]:
        """The instances that are left out because their annotations are incomplete, by the index of the sample."""

    def without_records(self) -> Source:
        """The same samples without their fields, for processes that only read images."""


def fields_of(source: Source) -> tuple[Field, ...]:
    """The fields of a source's records besides image and label; none for a source that declares none."""
    fields: tuple[Field, ...] = getattr(source, "fields", ())
    return fields


def has_labels(source: Source) -> bool:
    """Whether a source's samples have labels: true unless its fields declare none."""
    declared: bool = getattr(source, "has_labels", True)
    return declared


def has_one_class(source: Source) -> bool:
    """Whether each sample has one class: labels are then numbers of classes, int64 [n]."""
    return has_labels(source) and source.labels.ndim == 1 and source.labels.dtype.kind == "i"


def records_of(source: Source, indices: Sequence[int]) -> Records:
    """The records of these samples; without columns and errors for a source that declares no fields."""
    if not fields_of(source):
        return Records({}, [None] * len(indices))
    records: Records = source.records(indices)  # type: ignore[attr-defined]  # a source with fields has it
    return records


def left_out_of(source: Source) -> Mapping[int, LeftOut]:
    """Return the instances that a source leaves out, by the index of the sample. Samples without any are not in it."""
    left_out: Mapping[int, LeftOut] = getattr(source, "left_out", {})
    return left_out


def without_records(source: Source) -> Source:
    """The same samples without their records: what a process that only reads images needs."""
    stripped: Source = source.without_records() if hasattr(source, "without_records") else source
    return stripped
