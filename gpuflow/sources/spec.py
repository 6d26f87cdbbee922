"""The spec of a source: the base of the classes of all kinds, and the keys that several kinds have, with their rules.

Each kind has its own class, in its file. It inherits the keys that it uses.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

from gpuflow.errors import ConfigError, GpuflowError, Problem, SourceError, redacted, suggest
from gpuflow.pipeline.bounds import Bounds, out_of_bounds
from gpuflow.sources.base import Source, has_labels, is_read_remotely
from gpuflow.sources.field_spec import (
    FieldPairs,
    Fields,
    FieldSpec,
    GivenClasses,
    conflict,
    field_problems,
    pairs_of_fields,
)
from gpuflow.sources.record_table import TableSource
from gpuflow.sources.split_spec import Fraction, Pairs, SplitSpec, is_rule, make_nested, pairs, share_problems
from gpuflow.sources.storage import CacheSpec, is_remote
from gpuflow.sources.storage.local import missing_file
from gpuflow.version import entry_points

_WINDOW = 8192
_WITHOUT_COLUMNS = {
    "column": "name a CSV file that has it, with file",
    "group": "take a part of each path, {path: REGEX}",
    "stratify": "write label or false",
}
"""What to do instead of naming a column in `split`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceSpec:
    """What is drawn equally often.

    Args:
        column: a column of the source, whose values are drawn equally often; of one value, each sample.
    """

    column: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsSpec:
    """How often each sample is drawn where a pipeline shuffles: in proportion to its number >= 0, or in balance.

    Args:
        balance: in place of numbers: `class` draws each class equally often, `{column: NAME}` each value of a column,
            among the samples of the part that is read.
        column: the column that holds the samples' weights: of the source, or of `file` if that is a CSV file.
        file: a file with one weight for each sample of the whole source, in its order: one number a line, a CSV file
            or a NumPy array (.npy).
        replacement: whether a sample may come more than once in an epoch.
        samples: samples of an epoch; by default as many as the part that is read has; without replacement as many of
            them as have a weight above 0.
    """

    balance: Literal["class"] | BalanceSpec | None = None
    column: str | None = None
    file: str | None = None
    replacement: bool = True
    samples: Annotated[int, Bounds(least=1)] | None = None

    def __post_init__(self) -> None:
        make_nested(self, "balance", BalanceSpec)

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each broken rule between keys, its path from this block on."""
        yield from out_of_bounds(self)
        numbers = [key for key in ("column", "file") if getattr(self, key) is not None]
        if self.balance is not None and numbers:
            yield conflict("balance", f"must not stand next to {numbers[0]}", "remove one of them")
        if self.balance is None and not numbers:
            yield Problem.of((), "needs balance, a column of the source, or a file", code="config.missing_key")
        if self.column is not None and self.file is not None and not self.file.lower().endswith(".csv"):
            yield conflict("column", "must go with a CSV file", "remove it, or name a .csv file")


class NotMeasuredError(Exception):
    """A source is of a kind whose files are not measured, and is not at fault."""


class Extent(NamedTuple):
    """The bytes of an image: `size` bytes of a file from offset `start`, or the whole file where `size` is None."""

    path: str
    start: int = 0
    size: int | None = None


@dataclass(frozen=True, kw_only=True)
class SourceSpec(ABC):
    """Where the samples are. Each kind of source is a subclass: its fields are the keys that the kind has.

    `kind` names the key that says where the samples are. What gpuflow asks of every kind has its answer here for kinds
    without such a key.

    Args:
        seed: the seed of the split, of every order and of all random numbers.
        split: the fraction of each named part, in order, or a block that says how samples are divided; a pipeline reads
            the part that has its name.
    """

    kind: ClassVar[str]
    instead: ClassVar[Mapping[str, str]] = {"splits": "give the fractions of parts with split"}
    """What to do instead of giving a key that only other kinds have."""
    is_path: ClassVar[bool] = True
    """Whether the key that is called like the kind is one path, pattern or URL."""
    by_class: ClassVar[bool] = False
    """Whether the samples of each class stand together."""
    has_other_fields: ClassVar[bool] = False
    """Whether samples may have fields that are not declared."""

    seed: Annotated[int, Bounds(least=0)] = 0
    split: Mapping[str, Fraction] | Pairs[Fraction] | SplitSpec = ()

    def __post_init__(self) -> None:
        split: Any = self.split
        if not isinstance(split, SplitSpec):
            object.__setattr__(self, "split", SplitSpec(**split) if is_rule(split) else pairs(split))
        for name in self.key_fields():
            if isinstance(value := getattr(self, name), list) and name != self.kind:
                object.__setattr__(self, name, tuple(value))
        if problems := [*out_of_bounds(self), *self.problems()]:
            raise ConfigError([problem.below("source") for problem in problems])

    @classmethod
    def of(cls, keys: Mapping[str, Any], make: Callable[[Any], SourceSpec]) -> Self:  # for a mix
        """Return the spec with these keys. make: makes the spec of a block `source` that is in one of them."""
        return cls(**keys)

    @classmethod
    def key_fields(cls) -> dict[str, dataclasses.Field[Any]]:
        """Return the keys of this kind in YAML, that of its place first."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        return {cls.kind: fields.pop(cls.kind), **fields}

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each broken rule between keys, its path from this block on."""
        if self.rule is not None:
            yield from (problem.below("split") for problem in self.rule.problems())
            for source in self.sources:
                for at in self.rule.columns if isinstance(source, Samples) and not source.has_columns else ():
                    yield conflict(
                        ("split", *at),
                        f"must not name a column of source.{source.kind}, which has none",
                        _WITHOUT_COLUMNS[at[0]],
                    )
        yield from share_problems("split", self.fractions, "config.conflict")
        if len(set(self.splits)) < len(self.splits):
            yield Problem.of("splits", "must name each split once", list(self.splits), code="config.conflict")
        if self.splits and self.split:
            yield conflict("splits", "must not stand next to split", "remove one of them")
        classes = self.classes
        if isinstance(classes, tuple) and len(set(classes)) < max(1, len(classes)):
            yield Problem.of("classes", "must be distinct names, at least one", classes, code="config.range")

    @abstractmethod
    def open(self) -> Source:
        """Index the whole source, all splits together.

        Raises:
            SourceError: it cannot be indexed; the message says where and why.
            MissingExtra: the path is a URL and fsspec is not installed.
        """

    def find_images(self, limit: int, deadline: float, chance: random.Random) -> list[Extent]:
        """Return where at most about `limit` images lie on local disks, for measurements.

        The search ends at `deadline`, a time of `time.monotonic`. chance: chooses among the images.

        Raises:
            NotMeasuredError: the files of this kind of source are not measured.
            SourceError: they cannot be listed.
        """
        raise NotMeasuredError(f"{redacted(self.where)} is no folder of images")

    def shard_window(self, source: Source | None = None) -> int:
        """Return how many neighbouring samples of a source with shards are shuffled among each other.

        source: the open source, of which the number may be a property.
        """
        return _WINDOW

    @property
    def where(self) -> str:
        """Return the path or URL that is given, several of a mix; of another package's source its name and its
        value."""
        return str(getattr(self, self.kind))

    def missing(self) -> str:
        """Return what the source names that does not exist, and a hint; empty if it exists, or is no single local
        path."""
        path = self.where
        return "" if not self.is_path or is_remote(path) or any(mark in path for mark in "*?[{") else missing_file(path)

    @property
    def folder_of_images(self) -> str:
        """Return the path or URL that images are below."""
        return self.where

    @property
    def sources(self) -> tuple[SourceSpec, ...]:
        """Return the sources of a mix; any other source alone."""
        return (self,)

    @property
    def classes(self) -> GivenClasses:
        """Return how many classes there are, or their names; None where the source says it."""
        return None

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the names of the source's own splits that are the named parts."""
        return ()

    @property
    def weights(self) -> WeightsSpec | None:
        """Return how often each sample is drawn where a pipeline shuffles; None if equally often."""
        return None

    @property
    def declared(self) -> FieldPairs:
        """Return the declared fields as pairs of name and spec; empty if a sample is an image and a label. Of a mix
        those of its first source, which all have."""
        return ()

    @property
    def fields_in_full(self) -> FieldPairs:
        """Return `declared` with what the kind of source adds: fields that need no declaration, and their forms."""
        return self.declared

    @property
    def fractions(self) -> tuple[tuple[str, float], ...]:
        """Return the fraction of each part by name; none where a `rule` divides the source."""
        return () if isinstance(self.split, SplitSpec) else pairs(self.split)

    @property
    def rule(self) -> SplitSpec | None:
        """Return what divides the source; None for fractions, and without parts."""
        return self.split if isinstance(self.split, SplitSpec) else None

    @property
    def part_names(self) -> tuple[str, ...]:
        """Return the names of all parts; none where a column has them."""
        return self.splits or (tuple(name for name, _ in self.fractions) if self.rule is None else self.rule.names)


@dataclass(frozen=True, kw_only=True)
class Samples(SourceSpec):
    """Samples of one source: any kind but a mix.

    Args:
        weights: how often each sample is drawn where a pipeline shuffles.
        fields: what a sample carries, by name; by default an image and a label.
    """

    has_columns: ClassVar[bool] = True
    """Whether the samples have columns, one of which may hold weights."""

    weights: WeightsSpec | None = None
    fields: Fields = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", pairs_of_fields(self.fields))
        make_nested(self, "weights", WeightsSpec)
        super().__post_init__()

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.weights is not None:
            yield from (problem.below("weights") for problem in self.weights.problems())
            by_class = self.weights.balance == "class"
            if self.weights.file is None and not by_class and not self.has_columns:
                yield conflict(
                    "weights", f"must be a file, or balance: class, for source.{self.kind}, which has no columns"
                )
            labels = [field.kind in (None, "class") for _, field in self.declared if field.type == "label"]
            if by_class and self.declared and not any(labels):
                rule = "must name a column, {column: NAME}, where fields declare no label of one class each"
                yield conflict(("weights", "balance"), rule)
        yield from (problem.below("fields") for problem in field_problems(self.declared, self.labels_of))
        for name, field in self.declared:
            if field.type is not None:
                yield from (problem.below("fields", name) for problem in self.field_problems(field))

    def field_problems(self, field: FieldSpec) -> Iterator[Problem]:
        """Yield a problem for each rule between this kind and a field with a type, its path from the field on."""
        yield from ()

    def labels_of(self, field: FieldSpec) -> str | None:
        """Return the column with the labels of boxes; None if they have none."""
        return field.labels

    def with_one_column(self, name: str, column: str, kind: Literal["number", "any"] = "number") -> Self:
        """Return a spec of the same samples that have this column as their only field besides files. kind: its type."""
        # in shards, the suffix of a mask's member may be one of images
        files = [(key, field) for key, field in self.declared if field.type == "image" or field.is_mask_file]
        unset: dict[str, Any] = {key: None for key in ("weights", "classes") if key in self.key_fields()}
        return replace(self, fields=(*files, (name, FieldSpec(type=kind, column=column))), **unset)

    @property
    def declared(self) -> FieldPairs:
        return pairs_of_fields(self.fields)


@dataclass(frozen=True, kw_only=True)
class Named(Samples):
    """Samples whose classes may be named.

    Args:
        classes: how many classes there are, or their names; by default as many as occur.
    """

    classes: Annotated[int, Bounds(least=1, limit=10_000_000)] | tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class WithSplits(SourceSpec):
    """A source with splits that have names.

    Args:
        splits: the names of the dataset's own splits that are the named parts. Those of a folder are directories in it,
            each with directories of the classes.
    """

    splits: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WithWindow(SourceSpec):
    """A source in which neighbouring samples may be cheaper to read together.

    Args:
        window: how many neighbouring samples are shuffled among each other; by default 8192, and of Parquet files as
            many as take 256 MB, at most 8192.
    """

    window: Annotated[int, Bounds(least=1)] | None = None

    def shard_window(self, source: Source | None = None) -> int:
        return super().shard_window(source) if self.window is None else self.window

    def check_window(self, source: Source) -> None:
        """Raise SourceError, and close the source, if there is a window and neighbours are not read together."""
        if self.window is not None and source.shard_sizes is None:
            source.close()
            raise SourceError(
                f"source.window must go with shards or Parquet files, got {self.where!r}, where any sample is as cheap "
                "to read as its neighbour; remove window"
            )


@dataclass(frozen=True, kw_only=True)
class WithExtensions(SourceSpec):
    """A source whose images are known by their extensions.

    Args:
        extensions: names of files that are images, too, such as heic; see `decode.formats`.
    """

    extensions: tuple[str, ...] = ()

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if wrong := [name for name in self.extensions if not (name.isalnum() and name.islower())]:
            rule = "must be file extensions in lower case without a dot, such as heic"
            yield Problem.of("extensions", rule, wrong[0], code="config.range")


@dataclass(frozen=True, kw_only=True)
class Cached(SourceSpec):
    """A source whose files may be behind URLs.

    Args:
        cache: where files behind URLs are kept on a local disk; by default they are not.
    """

    lists_urls: ClassVar[bool] = False
    """Whether a file may list URLs of images, so that it shows only when the source is open where they are."""

    cache: CacheSpec | None = None

    def __post_init__(self) -> None:
        make_nested(self, "cache", CacheSpec)
        super().__post_init__()

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.cache is not None:
            yield from (problem.below("cache") for problem in out_of_bounds(self.cache))
            if not self.lists_urls and not is_remote(self.folder_of_images):
                yield conflict(
                    "cache",
                    f"must go with URLs, got {self.folder_of_images!r}, whose files are not copied",
                    "remove cache",
                )


@dataclass(frozen=True, kw_only=True)
class Listed(Cached):
    """A source whose images are the files that one file lists, which may be URLs."""

    lists_urls = True

    @abstractmethod
    def index(self) -> TableSource:
        """Index the source. Raises SourceError."""

    def open(self) -> TableSource:
        source = self.index()
        if self.cache is not None and not source.is_read_remotely():
            source.close()
            raise SourceError(
                f"source.cache must go with URLs, got {self.where!r}, which lists local files, and these are not "
                "copied; remove cache"
            )
        return source

    def find_images(self, limit: int, deadline: float, chance: random.Random) -> list[Extent]:
        source = self.open()
        try:
            if is_read_remotely(source):
                raise NotMeasuredError(f"{redacted(self.where)} lists files behind URLs")
            return [Extent(source.path(i)) for i in chance.sample(range(len(source)), min(limit, len(source)))]
        finally:
            source.close()


def spec_class(
    keys: Mapping[str, Any],
    kinds: Mapping[str, type[SourceSpec]],
    advise: Callable[[str, Iterable[str]], str] = suggest,
) -> tuple[type[SourceSpec] | None, list[Problem]]:
    """Return the class that a block `source` is of, and a problem for each key that does not belong into the block.

    A key with the value None is not given. The class is None where the block does not say it.

    advise: returns what to do about a key that no kind has, from the key and those that may stand there.
    """
    owners: dict[str, list[str]] = {}
    for kind, spec in kinds.items():
        for key in spec.key_fields():
            owners.setdefault(key, []).append(f"source.{kind}")
    given = [key for key, value in keys.items() if value is not None]
    named = [kind for kind in kinds if kind in given]
    chosen = kinds[named[0]] if len(named) == 1 else None
    known = owners if chosen is None else chosen.key_fields()
    problems = [
        Problem.of(key, "is not a key here", action=advise(key, known), code="config.unknown_key")
        for key in keys
        if key not in owners
    ]
    if chosen is None:
        if named or not problems:
            got = " and ".join(named) or "none of them"
            problems.append(conflict((), f"needs exactly one of {_listed(kinds, 'and')}, got {got}"))
        return None, problems
    for key in given:
        if key in owners and key not in known:
            rule = f"must go with {_listed(owners[key], 'or')}, got source.{chosen.kind}"
            problems.append(conflict(key, rule, chosen.instead.get(key, f"remove {key}")))
    for key, field in chosen.key_fields().items():
        if field.default is dataclasses.MISSING and key not in given:
            rule = f"needs the key {key!r} with source.{chosen.kind}"
            problems.append(Problem.of((), rule, code="config.missing_key"))
    return chosen, problems


def _listed(words: Iterable[str], conjunction: str) -> str:
    """Return `a, b and c`."""
    *others, last = words
    return f"{', '.join(others)} {conjunction} {last}" if others else last


# --- sources of other packages ----------------------------------------------------------------------------------------


_MEMBERS = ("__len__", "classes", "labels", "shard_sizes", "storage", "path", "read", "close")


@dataclass(frozen=True, kw_only=True)
class Offered(WithWindow, Named):
    """A source of another package. `offered_kinds` makes a subclass for each, with its key."""

    entry: ClassVar[importlib.metadata.EntryPoint]
    is_path = False
    has_other_fields = True

    @property
    def where(self) -> str:
        return f"{self.kind}: {getattr(self, self.kind)}"

    def open(self) -> Source:
        try:
            source = self.entry.load()(getattr(self, self.kind), self)
        except (ImportError, AttributeError) as error:
            fault = f"{self.entry.value} cannot be used: {error}; repair its package"
            raise SourceError(f"source.{self.kind}: {fault}") from error
        except OSError as error:
            raise SourceError(f"source.{self.kind}: {error}; check the path") from error
        if missing := [member for member in _MEMBERS if not hasattr(source, member)]:
            raise SourceError(
                f"source.{self.kind}: {self.entry.value} must return a source, and its result has no "
                f"{', '.join(missing)}; repair its package"
            )
        opened: Source = source
        self.check_window(opened)
        if fault := _fault_of_labels(opened):
            opened.close()
            raise SourceError(f"source.{self.kind}: labels must be {fault}; repair {self.entry.value}, or its data")
        return opened


def _fault_of_labels(source: Source) -> str:
    """Return which rule the labels of a source break, and the value; empty if they break none."""
    labels, count = source.labels, len(source.classes)
    if len(labels) != len(source):
        return f"as many as the samples, {len(source)}, got {len(labels)}"
    if not count or not has_labels(source) or labels.ndim != 1 or labels.dtype == np.float32:
        return ""
    if labels.dtype.kind != "i":
        return f"int64 for classes, got {labels.dtype}"
    wrong = np.flatnonzero((labels < 0) | (labels >= count))
    return f"in 0..{count - 1}, got {labels[wrong[0]]} for {source.path(int(wrong[0]))}" if len(wrong) else ""


def offered_kinds(known: Collection[str]) -> dict[str, type[Offered]]:
    """Return what other packages offer, by the key in YAML. Nothing is imported. known: the keys that gpuflow has.

    Raises:
        GpuflowError: two packages offer a source of the same name, or one offers a key that gpuflow has.
    """
    kinds: dict[str, type[Offered]] = {}
    for entry in entry_points("gpuflow.sources"):
        if entry.name in known or entry.name in kinds:
            raise GpuflowError(
                f"source {entry.name!r} of {entry.value} is already known; rename it or uninstall its package"
            )
        kinds[entry.name] = _kind_of(entry)
    return kinds


@functools.cache
def _kind_of(entry: importlib.metadata.EntryPoint) -> type[Offered]:
    text = f"A source of another package: {entry.value}."
    members = {"kind": entry.name, "entry": entry, "__doc__": f"{text}\n\nArgs:\n    {entry.name}: {text}\n"}
    return dataclasses.make_dataclass(
        "Offered", [(entry.name, Any)], bases=(Offered,), namespace=members, frozen=True, kw_only=True
    )
