"""Splits a source into disjoint parts, seeded and, where each sample has one class, stratified.

Every class is divided in the same proportions as the whole: split s gets the floor or the ceiling of fraction_s * n_c
samples of class c, and the totals of the splits are exact. The samples that the floors leave over go, class by class,
to the splits that are furthest below their totals (error diffusion), so each class compensates the rounding of earlier
classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import final

import numpy as np

from gpuflow.arrays import Ints
from gpuflow.errors import SourceError
from gpuflow.pipeline.records import Field, LeftOut, Records
from gpuflow.pipeline.rng import key64, permute
from gpuflow.sources.base import (
    Source,
    fields_of,
    fingerprint,
    fingerprint_of,
    has_labels,
    has_one_class,
    left_out_of,
    records_of,
    without_records,
)
from gpuflow.sources.mix import MixSource
from gpuflow.sources.spec import SourceSpec
from gpuflow.sources.storage import Allocate, Payload, Storage


@final
class Subset:
    """A source that holds some samples of another source. Closing it closes the other source.

    Args:
        source: the other source.
        indices: the indices of the samples, sorted int64.
    """

    def __init__(self, source: Source, indices: Ints) -> None:
        self.source = source
        self.indices = indices
        self.labels = source.labels[indices]
        self.shard_sizes = _shard_sizes(source.shard_sizes, indices)

    @cached_property
    def fingerprint(self) -> str:
        """See `gpuflow.sources.base.fingerprint`: that of the other source, and which of its samples these are."""
        return fingerprint(b"", self.labels, self.classes, self.indices, known=fingerprint_of(self.source))

    @property
    def classes(self) -> tuple[str, ...]:
        return self.source.classes

    def __len__(self) -> int:
        return len(self.indices)

    def path(self, index: int) -> str:
        return self.source.path(int(self.indices[index]))

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        return self.source.read(self.indices[np.asarray(indices, dtype=np.int64)].tolist(), allocate)

    @property
    def storage(self) -> Storage | None:
        return self.source.storage

    @property
    def fields(self) -> tuple[Field, ...]:
        return fields_of(self.source)

    @property
    def has_labels(self) -> bool:
        return has_labels(self.source)

    def records(self, indices: Sequence[int]) -> Records:
        return records_of(self.source, self.indices[np.asarray(indices, dtype=np.int64)].tolist())

    @property
    def left_out(self) -> Mapping[int, LeftOut]:
        whole = left_out_of(self.source)
        places = np.flatnonzero(np.isin(self.indices, list(whole))) if whole else ()
        return {int(place): whole[int(self.indices[place])] for place in places}

    def without_records(self) -> Subset:
        return Subset(without_records(self.source), self.indices)

    def close(self) -> None:
        self.source.close()


def subset(source: Source, spec: SourceSpec, name: str) -> Source:
    """Select the split called `name`, or the whole source where `spec` declares no such split."""
    if name not in spec.part_names:
        return source
    if isinstance(source, MixSource):
        return source.with_parts([subset(part, spec, name) for part in source.parts])
    if spec.splits:
        start, stop = source.splits[name]  # type: ignore[attr-defined]  # a source whose splits have names
        return Subset(source, np.arange(start, stop))
    place = spec.part_names.index(name)
    labels = source.labels
    classes = source.classes
    if not has_one_class(source):
        labels = np.zeros(len(source), np.int64)
        classes = ("",)
    indices = split_indices(labels, classes, [share for _, share in spec.fractions], spec.seed, place)
    if not len(indices):
        raise SourceError(
            f"source.split.{name} must hold at least one sample, got none: "
            f"{spec.fractions[place][1]:g} of {len(source)} samples; raise the fraction or add samples"
        )
    return Subset(source, indices)


def split_indices(labels: Ints, classes: Sequence[str], fractions: Sequence[float], seed: int, place: int) -> Ints:
    """Draw the sorted indices of the samples in split number `place`."""
    class_sizes = np.bincount(labels, minlength=len(classes))
    ends = np.cumsum(split_counts(class_sizes, fractions), axis=1)
    members = np.argsort(labels, kind="stable")
    class_ends = np.cumsum(class_sizes)
    chosen = []
    for label in np.flatnonzero(class_sizes).tolist():
        size = int(class_sizes[label])
        first = 0 if place == 0 else int(ends[label, place - 1])
        picked = permute(np.arange(first, ends[label, place]), size, key64("split", seed, classes[label]))
        chosen.append(members[class_ends[label] - size + picked])
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def split_counts(class_sizes: Ints, fractions: Sequence[float]) -> Ints:
    """Compute how many samples of each class go to each split.

    Args:
        class_sizes: number of samples of each class, shape (C,).
        fractions: fraction of each of the S splits; their sum is at most 1.

    Returns:
        int64 of shape (C, S + 1); the last column counts samples that are in no split. Rows sum to `class_sizes`; the
        first s columns together hold round(sum(fractions[:s]) * n) of all n samples.

    >>> split_counts(np.array([10, 5]), [0.8, 0.2]).tolist()
    [[8, 2, 0], [4, 1, 0]]
    """
    total = int(class_sizes.sum())
    shares = np.append(fractions, max(0.0, 1.0 - sum(fractions)))
    bounds = np.floor(np.cumsum(shares) * total + 0.5 + 1e-9).astype(np.int64)
    bounds[-1] = total
    ideal = np.outer(class_sizes, shares)
    counts = np.floor(ideal + 1e-9).astype(np.int64)
    still_owed = np.diff(np.minimum(bounds, total), prepend=0) - counts.sum(axis=0)
    left_over = class_sizes - counts.sum(axis=1)
    to_come = (ideal - counts).sum(axis=0)
    for label in np.flatnonzero(left_over).tolist():
        to_come -= ideal[label] - counts[label]
        units = int(left_over[label])
        while units:
            due = np.where(still_owed > 0, still_owed - to_come, -np.inf)
            takers = np.argsort(-due, kind="stable")[:units]
            takers = takers[still_owed[takers] > 0]
            counts[label, takers] += 1
            still_owed[takers] -= 1
            units -= len(takers)
    return counts


def _shard_sizes(sizes: tuple[int, ...] | None, indices: Ints) -> tuple[int, ...] | None:
    """Count the samples in `indices` from each shard, without shards that have none."""
    if sizes is None:
        return None
    held = np.diff(np.searchsorted(indices, np.cumsum(sizes)), prepend=0)
    return tuple(held[held > 0].tolist())
