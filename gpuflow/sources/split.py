"""Divides a source into disjoint parts: by fractions, or by a rule (`SplitSpec`).

Fractions: every class is divided in the same proportions as the whole. Part s gets the floor or the ceiling of
fraction_s * n_c samples of class c, and the totals of the parts are exact. The samples that the floors leave over go,
class by class, to the parts that are furthest below their totals (error diffusion), so each class compensates the
rounding of earlier classes.

Stable shares: the hash of a sample's name, or of its group's, is a point in [0, 1), and the shares are intervals there.
No other sample matters.

Exact shares and folds: the samples of a class in the order of their hashes are cut, or dealt out in turn. Groups are
placed whole, the largest first, each where the parts' counts of classes then deviate least from their shares (as in
scikit-learn's StratifiedGroupKFold, in whole numbers, so that all machines agree).
"""

from __future__ import annotations

import csv
import io
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction as Exact
from functools import cached_property
from itertools import accumulate
from typing import final
from weakref import WeakKeyDictionary

import numpy as np

from gpuflow.arrays import Array, Ints
from gpuflow.errors import SourceError, suggest
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
from gpuflow.sources.split_spec import TEST, TRAIN, VAL, SplitSpec, pairs
from gpuflow.sources.split_values import column_texts, file_texts, group_names, names_of_samples
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


def subset(source: Source, spec: SourceSpec, name: str, known: Sequence[str] = ()) -> Source:
    """Select the part called `name`, or the whole source where `spec` declares no such part.

    known: the names that a column of parts may hold, besides train, val and test; by default any.
    """
    by_column = spec.rule is not None and not spec.part_names
    if name not in spec.part_names and not by_column:
        return source
    division = divide(source, spec, known)
    chosen = division.parts == (division.names.index(name) if name in division.names else -2)
    if not isinstance(source, MixSource):
        return _part(source, spec, name, np.flatnonzero(chosen))
    parts = zip(source.parts, np.split(chosen, np.cumsum(source.sizes)[:-1]), strict=True)
    return MixSource([_part(part, spec, name, np.flatnonzero(own)) for part, own in parts], source.classes)


def _part(source: Source, spec: SourceSpec, name: str, indices: Ints) -> Subset:
    """Return these samples of a source as its part `name`. Raises SourceError if there are none."""
    if not len(indices) and not spec.splits:
        share = dict(spec.fractions if spec.rule is None else pairs(spec.rule.parts)).get(name)
        size = f"{len(source)} samples" if share is None else f"{share:g} of {len(source)} samples"
        action = "give it samples" if share is None else "raise the fraction or add samples"
        raise SourceError(f"source.split.{name} must hold at least one sample, got none: {size}; {action}")
    return Subset(source, indices)


# --- parts ------------------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """Which part each sample of a whole source is in.

    names: of the parts. parts: int64 [n], the number of each sample's part, -1 for none.
    folds: int64 [n], the number of each sample's fold, -1 for those of the part test; None without folds.
    deviations: of each part with a stable share, the standard deviation of its size; None for others.
    """

    names: tuple[str, ...]
    parts: Ints
    folds: Ints | None = None
    deviations: tuple[float, ...] | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """Return the number of samples in each part, and under an empty name in none."""
        counts = np.bincount(self.parts + 1, minlength=len(self.names) + 1).tolist()
        return dict(zip(self.names, counts[1:], strict=True)) | {"": counts[0]}

    def __str__(self) -> str:
        """Return the sizes of the parts as a text."""
        sizes = self.sizes
        texts = [f"{name} {sizes[name]:,}" for name in self.names]
        if self.deviations is not None:
            texts = [f"{text} (+- {sd:.1f})" for text, sd in zip(texts, self.deviations, strict=True)]
        return ", ".join(texts) + (f"; {sizes['']:,} in no part" if sizes[""] else "")

    def describe(self, index: int) -> str:
        """Name a sample and its part.

        Examples:
            >>> Division(("train", "val"), np.array([0, 1, 0])).describe(1), Division(("",), np.array([0])).describe(0)
            ('sample 1 (val)', 'sample 0')
        """
        return f"sample {index} ({self.names[self.parts[index]]})".removesuffix(" ()")

    def lacking(self, source: Source) -> dict[str, list[str]]:
        """Return the classes of a source of which a part has no sample, by the name of the part."""
        if not has_one_class(source):
            return {}
        held = {name: set(source.labels[self.parts == i].tolist()) for i, name in enumerate(self.names)}
        whole = np.unique(source.labels).tolist()
        found = {name: [source.classes[c] for c in whole if c not in own] for name, own in held.items() if own}
        return {name: classes for name, classes in found.items() if classes}


def divide(source: Source, spec: SourceSpec, known: Sequence[str] = ()) -> Division:
    """Assign each sample of a whole source to a part. known: see `subset`.

    Raises SourceError: a value of a column or a file is wrong, or there are fewer groups than folds.

    Examples:
        >>> from pathlib import Path
        >>> from gpuflow.sources import source_spec
        >>> Path("list.csv").write_text("path,label,part\\n1.jpg,cat,train\\n2.jpg,dog,val\\n3.jpg,cat,\\n")
        57
        >>> spec = source_spec(listing="list.csv", split={"column": "part"})
        >>> print(divide(spec.open(), spec))
        train 1, val 1; 1 in no part
    """
    asked = spec, tuple(known)
    try:
        former, division = _DIVISIONS.get(source, (None, None))
    except TypeError:  # a source of another package, which cannot be a key
        return _divided(source, spec, known)
    if former != asked or division is None:
        division = _divided(source, spec, known)
        _DIVISIONS[source] = asked, division
    return division


_DIVISIONS: WeakKeyDictionary[Source, tuple[object, Division]] = WeakKeyDictionary()
"""The last division of each open source: its parts are opened one after the other."""


def parts_csv(source: Source, division: Division) -> str:
    """Return the part of each sample as CSV: `path`, its class as `label` where it has one, `part`, and `fold` if there
    are folds.

    `source.split` reads it with `{column: part, file: NAME}`, or with `{column: fold, fold: 2, file: NAME}`.
    """
    names = (*division.names, "")
    columns: dict[str, Iterable[object]] = {"path": names_of_samples(source)}
    if has_one_class(source):
        columns["label"] = [source.classes[label] for label in source.labels.tolist()]
    columns["part"] = [names[part] for part in division.parts.tolist()]
    if division.folds is not None:
        columns["fold"] = [TEST if fold < 0 else fold for fold in division.folds.tolist()]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue()


def _divided(source: Source, spec: SourceSpec, known: Sequence[str]) -> Division:
    rule = spec.rule
    sources = source.parts if isinstance(source, MixSource) else (source,)
    if rule is None:
        by_name = _named_splits if spec.splits else _by_fractions
        return Division(spec.part_names, np.concatenate([by_name(part, spec) for part in sources]))
    if rule.column is not None or rule.files:
        return _by_texts(source, spec, rule, known)
    names = group_names(source, spec, rule, names_of_samples(source))
    groups, numbers = np.unique(np.array(names, object), return_inverse=True)
    points = np.array([key64("part", spec.seed, name) for name in groups.tolist()], np.uint64)
    strata = _strata(source, spec, rule)
    deviations = None
    if rule.is_stable:
        chosen = _by_points(points, rule.shares)[numbers]
        spread = float(np.linalg.norm(np.bincount(numbers)))
        deviations = tuple(spread * math.sqrt(float(share * (1 - share))) for share in rule.shares)
    else:
        chosen = np.full(len(source), -1, np.int64)
        rest = np.flatnonzero(_by_points(points, rule.test_shares)[numbers] < 0)
        _check_folds(rule, len(np.unique(numbers[rest])))
        owners = np.zeros(len(source), np.int64)
        if rule.group is None:  # each source of a mix has its shares
            owners = np.repeat(np.arange(len(sources)), [len(part) for part in sources])
        for owner in np.unique(owners[rest]).tolist():
            own = rest[owners[rest] == owner]
            if rule.group is None and len(np.unique(numbers[own])) == len(own):
                own = own[np.lexsort((points[numbers[own]], strata[own]))]
                chosen[own] = _cut(strata[own], rule.shares) if rule.folds is None else np.arange(len(own)) % rule.folds
            else:
                chosen[own] = _by_groups(numbers[own], points.tolist(), strata[own], rule.shares)
    _warn_of_large_groups(rule, chosen, groups, numbers, strata)
    if rule.folds is None:
        return Division(rule.names, chosen, deviations=deviations)
    return Division(rule.names, np.where(chosen < 0, 2, chosen == rule.fold), chosen)


def _check_folds(rule: SplitSpec, count: int) -> None:
    """Raise SourceError for more folds than there are groups outside the part test."""
    if rule.folds is not None and count < rule.folds:
        what = "samples" if rule.group is None else f"groups ({_group_words(rule)})"
        outside = " outside the part test" * (rule.test is not None)
        raise SourceError(
            f"source.split.folds must be at most the number of {what}{outside}, {count}, got {rule.folds}; lower it"
        )


def _named_splits(source: Source, spec: SourceSpec) -> Ints:
    """Return the part of each sample of a source whose splits have names."""
    parts = np.full(len(source), -1, np.int64)
    for place, name in enumerate(spec.splits):
        start, stop = source.splits[name]  # type: ignore[attr-defined]  # a source whose splits have names
        parts[start:stop] = place
    return parts


def _by_fractions(source: Source, spec: SourceSpec) -> Ints:
    """Return the part of each sample by the fractions of the parts."""
    labels, classes = source.labels, source.classes
    if not has_one_class(source):
        labels, classes = np.zeros(len(source), np.int64), ("",)
    return parts_by_fractions(labels, classes, [share for _, share in spec.fractions], spec.seed)


def _by_texts(source: Source, spec: SourceSpec, rule: SplitSpec, known: Sequence[str]) -> Division:
    """Divide a source by the texts of a column or of files: names of parts, or numbers of folds."""
    key = "source.split.column"
    if rule.column is None or rule.file is not None:
        values, place = file_texts(source, rule)
    else:
        values, place = column_texts(source, spec, rule.column, key)
    names: Sequence[str] = rule.names
    texts = sorted(set(values) - {""})
    if rule.fold is not None:
        folds = {text: int(text) for text in texts if text.isascii() and text.isdecimal()}
        if rule.fold not in folds.values():
            raise SourceError(
                f"source.split.fold must be the number of a fold in {rule.column}, got {rule.fold}; choose one of "
                f"{', '.join(map(str, sorted(set(folds.values())))) or 'none'}"
            )
        lookup = {text: int(fold == rule.fold) for text, fold in folds.items()} | {TEST: 2}
        allowed: Sequence[str] = (TEST,)
        words = f"the number of a fold, or {TEST}"
        action = "correct it"
    else:
        names = names or tuple(dict.fromkeys((*known, *texts)))
        allowed = tuple(dict.fromkeys((*known, TRAIN, VAL, TEST))) if known else names
        lookup = {name: number for number, name in enumerate(names) if name in allowed}
        words, action = (
            f"one of {', '.join(allowed)} (the pipelines' names)",
            "correct it, or give a pipeline this name",
        )
    lookup[""] = -1
    if wrong := [text for text in values if text not in lookup]:
        close = suggest(wrong[0], allowed, else_all=False)
        here = f"{key}: {place(values.index(wrong[0]))}"
        raise SourceError(f"{here}: {rule.column} must be {words}, got {wrong[0]!r}; {close or action}")
    return Division(tuple(names), np.array([lookup[text] for text in values], np.int64))


def _strata(source: Source, spec: SourceSpec, rule: SplitSpec) -> Ints:
    """Return the number of what each part is to have in equal proportions, of each sample: of its class, or value."""
    if rule.stratify_column is not None:
        values = column_texts(source, spec, rule.stratify_column, "source.split.stratify").values
        return np.unique(np.array(values, object), return_inverse=True)[1].astype(np.int64)
    if rule.stratify is not False and not rule.is_stable and has_one_class(source):
        labels: Ints = source.labels
        return labels
    if rule.stratify:
        fields = [field.name for field in fields_of(source)]
        held = f"has {', '.join(fields)}" if fields else "has other labels"
        raise SourceError(
            f"source.split.stratify needs one class for each sample, and this source {held}; name a column, or set it "
            "to false"
        )
    return np.zeros(len(source), np.int64)


def _by_points(points: Array, shares: Sequence[Exact]) -> Ints:
    """Return the number of the share that each point lies in, -1 in none. points: uint64, in [0, 2**64)."""
    ends = [min(int(end * 2**64), 2**64 - 1) for end in accumulate(shares)]
    if 1 - sum(shares) < 1e-9:
        ends.pop()
    places = np.searchsorted(np.array(ends, np.uint64), points, side="right")
    return np.where(places < len(shares), places, -1)


def _cut(strata: Ints, shares: Sequence[float | Exact]) -> Ints:
    """Return the part of each sample of ascending strata, each of which is cut at its shares; -1 for the rest."""
    sizes = np.unique(strata, return_counts=True)[1]
    numbers = [*range(len(shares)), -1]
    return np.concatenate([np.repeat(numbers, counts) for counts in split_counts(sizes, list(map(float, shares)))])


def _by_groups(numbers: Ints, points: Sequence[int], strata: Ints, shares: Sequence[Exact]) -> Ints:
    """Place groups, the largest first, each where the counts of strata deviate least from the parts' shares.

    The deviation of a part with share f is the sum of (count - f n)^2 / f over strata, each weighted by 1 / n^2, and a
    tenth of the same over all samples. Every part gets a group, if there are enough.

    Args:
        numbers: of each sample, its group.
        points: of each group, a hash, which decides between groups of one size.
        strata: of each sample, its stratum.
        shares: of the parts.

    Returns:
        of each sample, the number of its part, or -1 for what the shares leave.
    """
    real = range(len(shares))
    if (rest := 1 - sum(shares, Exact(0))) > 1e-9:
        shares = (*shares, rest)
    present, strata = np.unique(strata, return_inverse=True)
    weights = [_ONE // size**2 for size in np.bincount(strata).tolist()]
    whole = len(present) * _ONE // (10 * len(numbers) ** 2)
    cells, amounts = np.unique(numbers * len(present) + strata, return_counts=True)
    held: dict[int, list[tuple[int, int]]] = {}
    for cell, amount in zip(cells.tolist(), amounts.tolist(), strict=True):
        held.setdefault(cell // len(present), []).append((cell % len(present), amount))
    sizes = np.bincount(numbers).tolist()
    counts = [[0] * len(present) for _ in shares]
    placed = [0] * len(shares)
    part_of: dict[int, int] = {}
    for done, group in enumerate(sorted(held, key=lambda group: (-sizes[group], points[group]))):
        empty = [part for part in real if not placed[part]]

        def cost(part: int, group: int = group) -> Exact:
            count = counts[part]
            own = sum(weights[c] * (2 * count[c] + amount) * amount for c, amount in held[group])
            own += whole * (2 * placed[part] + sizes[group]) * sizes[group]
            return Exact(own) / shares[part]

        part = min(empty if len(held) - done <= len(empty) else range(len(shares)), key=cost)
        part_of[group] = part if part in real else -1
        placed[part] += sizes[group]
        for c, amount in held[group]:
            counts[part][c] += amount
    return np.array([part_of[group] for group in numbers.tolist()], np.int64)


_ONE = 1 << 80
"""What stands for 1 in the weights of `_by_groups`, which are whole numbers."""


def _group_words(rule: SplitSpec) -> str:
    block = rule.group_block
    return "equal content" if block is None else block.column or "paths"


def _warn_of_large_groups(rule: SplitSpec, parts: Ints, groups: Array, numbers: Ints, strata: Ints) -> None:
    """Warn where one group has more samples of a stratum than the share of its part."""
    if rule.group is None:
        return
    count = int(strata.max()) + 1
    cells, firsts, amounts = np.unique(numbers * count + strata, return_index=True, return_counts=True)
    own = parts[firsts]
    totals = np.bincount(strata)[cells % count]
    shares = np.array([*map(float, rule.shares), 1.0])  # the last one is of no part
    excess = amounts - np.ceil(shares[own] * totals)
    k = int(np.argmax(excess))
    if excess[k] > 0:
        what = f"{amounts[k]} of the {totals[k]} samples" + " of one class" * (count > 1)
        held = np.count_nonzero((strata == strata[firsts[k]]) & (parts == own[k])) / totals[k]
        warnings.warn(
            f"source.split: group {groups[cells[k] // count]!r} has {what}, "
            f"more than the share of its part, {shares[own[k]]:.3g}, which holds {held:.3g} of them; divide the "
            "group, or change the shares",
            stacklevel=2,
        )


# --- fractions --------------------------------------------------------------------------------------------------------


def parts_by_fractions(labels: Ints, classes: Sequence[str], fractions: Sequence[float], seed: int) -> Ints:
    """Return the number of each sample's part, -1 for none: a permutation orders each class, which is then cut.

    Examples:
        >>> parts_by_fractions(np.array([0, 0, 0, 0, 1, 1]), ("cat", "dog"), [0.5, 0.5], seed=0).tolist()
        [0, 1, 0, 1, 1, 0]
    """
    sizes = np.bincount(labels, minlength=len(classes))
    members = np.split(np.argsort(labels, kind="stable"), np.cumsum(sizes)[:-1])
    orders = [
        own[permute(np.arange(len(own)), len(own), key64("split", seed, name))]
        for name, own in zip(classes, members, strict=True)
        if len(own)
    ]
    order = np.concatenate(orders)
    parts = np.empty(len(labels), np.int64)
    parts[order] = _cut(labels[order], fractions)
    return parts


def split_counts(class_sizes: Ints, fractions: Sequence[float]) -> Ints:
    """Compute how many samples of each class go to each split.

    Args:
        class_sizes: number of samples of each class, shape (C,).
        fractions: fraction of each of the S splits; their sum is at most 1.

    Returns:
        int64 of shape (C, S + 1); the last column counts samples that are in no split. Rows sum to `class_sizes`; the
        first s columns together hold round(sum(fractions[:s]) * n) of all n samples.

    Examples:
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
