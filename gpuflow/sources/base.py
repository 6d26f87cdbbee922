"""The protocol of a source, and the spec that describes one.

A source is indexed once, when it is opened, and read-only afterwards: many threads may call `read`. It provides labels,
paths and encoded bytes; only the decoder interprets the bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Protocol, TypeVar

from numpy.typing import NDArray

from gpuflow.errors import ConfigError, Problem
from gpuflow.pipeline.bounds import Bounds, out_of_bounds
from gpuflow.sources.field_spec import Fields, FieldSpec, field_problems, pairs_of_fields
from gpuflow.sources.payload import Allocate, Payload
from gpuflow.sources.storage import CacheSpec, Storage

__all__ = ["Fraction", "MixEntry", "Source", "SourceSpec", "WeightsSpec", "is_read_remotely"]

T = TypeVar("T")


class Source(Protocol):
    """The operations of every source. `len(source)` is its number of samples.

    A source may have a `fingerprint: str`, too, by which states and ranks know its samples again. Where it has none,
    `gpuflow.sources.fingerprint_of` makes one of its paths, labels and classes. One whose samples carry more than an
    image and a label is a `gpuflow.sources.RecordSource`.
    """

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names; a label is an index into this tuple. Empty where labels are numbers."""

    @property
    def labels(self) -> NDArray[Any]:
        """The label of each sample along the first axis: int64 [n] of one class each, uint8 [n, C] of several (1: the
        sample has the class), float32 [n] or [n, D] of numbers."""

    @property
    def shard_sizes(self) -> tuple[int, ...] | None:
        """The number of samples in each shard; None if neighbouring samples are not cheaper to read together."""

    @property
    def storage(self) -> Storage | None:
        """The storage that its samples are read from; None if they are in memory."""

    def on(self, storage: Storage) -> Source:
        """The same samples, read through another storage, such as one whose worker processes read."""

    def __len__(self) -> int: ...

    def path(self, index: int) -> str:
        """The place of sample `index`, for messages: a path, a URL, or shard.tar/member."""

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        """Read the bytes of these samples, in this order. A sample that cannot be read is an error in the payload, not
        an exception; temporary failures are retried first. `allocate` is called once. Raises what `Storage` says."""

    def close(self) -> None:
        """Close its storage. The source must not be read afterwards."""


def is_read_remotely(source: Source) -> bool:
    """Whether a source's samples are behind URLs, where its index may be local: worker processes must not read it."""
    return source.storage is not None and source.storage.remote


_KINDS = ("folder", "listing", "tar", "coco", "hf", "mix")
_NAMED_BY = {"folder": "its directories name the classes", "coco": "its categories name the classes"}
_KINDS_OF = {
    "root": ("listing",),
    "image": ("hf",),
    "label": ("hf",),
    "by": ("mix",),
    "samples": ("mix",),
    "unite_classes": ("mix",),
}
"""Keys that only some kinds of sources have."""
_WITH_SPLITS = ("hf", "folder")
"""Kinds of sources whose own splits have names."""
_WINDOW = 8192
_FRACTION = Bounds(above=0, most=1, words="a fraction within (0, 1]")
Fraction = Annotated[float, _FRACTION]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsSpec:
    """How often each sample is drawn where a pipeline shuffles: in proportion to its number >= 0.

    Args:
        column: the column that holds the samples' weights: of the source, or of `file` if that is a CSV file.
        file: a file with one weight for each sample of the whole source, in its order: one number a line, a CSV file
            or a NumPy array (.npy).
        replacement: whether a sample may come more than once in an epoch.
        samples: samples of an epoch; by default as many as the part that is read has; without replacement as many of
            them as have a weight above 0.
    """

    column: str | None = None
    file: str | None = None
    replacement: bool = True
    samples: Annotated[int, Bounds(least=1)] | None = None

    def problems(self) -> Iterator[Problem]:
        """A problem for each broken rule between keys, its path from this block on."""
        yield from out_of_bounds(self)
        if self.column is None and self.file is None:
            yield Problem.of((), "needs a column of the source, or a file", code="config.missing_key")
        if self.column is not None and self.file is not None and not self.file.lower().endswith(".csv"):
            action = "remove it, or name a .csv file"
            yield Problem.of("column", "must go with a CSV file", action=action, code="config.conflict")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpec:
    """Where the samples are: exactly one of `folder`, `listing`, `tar`, `coco`, `hf` and `mix`, or a source of another
    package.

    Args:
        folder: a directory with one directory for each class.
        listing: a CSV or JSON-lines file of paths and labels.
        tar: WebDataset-style shards, a path with brace ranges: `shards/{000..012}.tar`.
        coco: a file of annotations in COCO's format, such as instances_train2017.json.
        hf: a dataset that Hugging Face's `datasets` saved (`save_to_disk`), or Parquet files: one, a
            directory of them, or a pattern.
        mix: several sources, each with a weight: where a pipeline shuffles, it draws from them in these proportions.
        images: of `coco`: the directory of its images.
        image: of `hf`: the column of the images; by default `image`, or the one that has images.
        label: of `hf`: the column of the labels; by default `label`, or the one that has classes.
        by: of `mix`: whether each `sample` is drawn from any of the sources, or each `batch` from one of them.
        samples: of `mix`: samples of an epoch where a pipeline shuffles; by default as many as all sources have.
        root: the directory that a listing's relative paths start from; by default the listing's own.
        classes: of a listing, of shards or of `hf`: how many classes there are, or their names; by default as many as
            occur. Of a mix: their names; by default all its sources have the same.
        unite_classes: of `mix`: unite the classes of its sources by name.
        split: the fraction of each named part, in order; a pipeline reads the part that has its name.
        splits: of `hf`, of `folder`, or of a mix of such: the names of the dataset's own splits that are the named
            parts. Those of a folder are directories in it, each with directories of the classes.
        seed: the seed of the split, of every order and of all random numbers.
        window: of shards, and of Parquet files: how many neighbouring samples are shuffled among each other; by default
            8192, and of Parquet files as many as take 256 MB, at most 8192.
        extensions: of a folder or of shards: names of files that are images, too, such as heic; see `decode.formats`.
        weights: how often each sample is drawn where a pipeline shuffles.
        fields: what a sample carries, by name; by default an image and a label.
        cache: where files behind URLs are kept on a local disk; by default they are not.
        other: the name and the value of a source of another package; in YAML the name is a key.
    """

    folder: str | None = None
    listing: str | None = None
    tar: str | None = None
    coco: str | None = None
    hf: str | None = None
    mix: tuple[MixEntry | Mapping[str, Any], ...] = ()
    images: str | None = None
    image: str | None = None
    label: str | None = None
    by: Literal["sample", "batch"] = "sample"
    samples: Annotated[int, Bounds(least=1)] | None = None
    root: str | None = None
    classes: Annotated[int, Bounds(least=1, limit=10_000_000)] | tuple[str, ...] | None = None
    unite_classes: bool = False
    split: Mapping[str, Fraction] | tuple[tuple[str, Fraction], ...] = ()
    splits: tuple[str, ...] = ()
    seed: Annotated[int, Bounds(least=0)] = 0
    window: Annotated[int, Bounds(least=1)] | None = None
    extensions: tuple[str, ...] = ()
    weights: WeightsSpec | Mapping[str, Any] | None = None
    fields: Fields = ()
    cache: CacheSpec | Mapping[str, Any] | None = None
    other: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        problems = list[Problem]()
        object.__setattr__(self, "split", _pairs(self.split))
        object.__setattr__(self, "splits", tuple(self.splits))
        object.__setattr__(self, "fields", pairs_of_fields(self.fields))
        object.__setattr__(self, "other", _pairs(self.other))
        if isinstance(self.weights, Mapping):
            object.__setattr__(self, "weights", WeightsSpec(**self.weights))
        if self.classes is not None and not isinstance(self.classes, int):
            object.__setattr__(self, "classes", tuple(self.classes))
        entries = []
        for i, entry in enumerate(self.mix):
            try:
                entries.append(entry if isinstance(entry, MixEntry) else MixEntry(**entry))
            except ConfigError as error:
                problems += (problem.below("mix", i) for problem in error.problems)
        if not problems:
            object.__setattr__(self, "mix", tuple(entries))
            problems += [*out_of_bounds(self), *self._problems()]
        if problems:
            raise ConfigError([problem.below("source") for problem in problems])

    def _problems(self) -> Iterator[Problem]:
        given = [
            *(name for name in _KINDS if getattr(self, name) not in (None, ())),
            *(name for name, _ in _pairs(self.other)),
        ]
        if len(given) != 1:
            kinds = f"{', '.join(_KINDS[:-1])} and {_KINDS[-1]}"
            rule = f"needs exactly one of {kinds}, got {' and '.join(given) or 'none of them'}"
            yield Problem.of((), rule, code="config.conflict")
        else:
            yield from self._kind_problems(given[0])
        if self.hf is not None and self.fields:
            for key in ("image", "label"):
                if getattr(self, key) is not None:
                    rule, action = "must not stand next to fields", f"move it there: {key}: {{column: NAME}}"
                    yield Problem.of(key, rule, action=action, code="config.conflict")
        if isinstance(self.weights, WeightsSpec):
            yield from (problem.below("weights") for problem in self.weights.problems())
            if self.weights.file is None and given in (["folder"], ["mix"]):
                rule = f"must be a file for source.{given[0]}, which has no columns"
                yield Problem.of("weights", rule, code="config.conflict")
        if self.extensions and given and given[0] not in ("folder", "tar"):
            rule = f"must go with folder or tar, got source.{given[0]}"
            yield Problem.of("extensions", rule, action="remove extensions", code="config.conflict")
        if wrong := [name for name in self.extensions if not (name.isalnum() and name.islower())]:
            rule = "must be file extensions in lower case without a dot, such as heic"
            yield Problem.of("extensions", rule, wrong[0], code="config.range")
        if isinstance(self.classes, tuple) and (not self.classes or len(set(self.classes)) < len(self.classes)):
            yield Problem.of("classes", "must be distinct names, at least one", self.classes, code="config.range")
        yield from (problem.below("fields") for problem in field_problems(self.declared, self.kind))
        yield from self._split_problems(given)

    def _kind_problems(self, kind: str) -> Iterator[Problem]:
        """The first broken rule between the kind of source and the other keys. For a mix, all rules of its sources."""
        if self.coco is not None and self.images is None:
            rule = "needs the key 'images' with source.coco: the directory of its images"
            yield Problem.of((), rule, code="config.missing_key")
        elif self.coco is None and self.images is not None:
            rule = f"must go with source.coco, got source.{kind}"
            yield Problem.of("images", rule, action="remove images", code="config.conflict")
        elif wrong := [key for key, kinds in _KINDS_OF.items() if kind not in kinds and self._is_set(key)]:
            rule = f"must go with source.{_KINDS_OF[wrong[0]][0]}, got source.{kind}"
            yield Problem.of(wrong[0], rule, action=f"remove {wrong[0]}", code="config.conflict")
        elif self.classes is not None and kind in _NAMED_BY:
            *others, last = (name for name in _KINDS if name not in _NAMED_BY)
            rule = f"must go with {', '.join(others)} or {last}, got source.{kind}"
            yield Problem.of("classes", rule, action=_NAMED_BY[kind], code="config.conflict")
        elif kind == "mix" and isinstance(self.classes, int):
            action = "or set unite_classes: true to unite those of its sources"
            yield Problem.of("classes", "must be names for source.mix", self.classes, action, code="config.conflict")
        elif self.classes is not None and self.unite_classes:
            rule = "must not stand next to classes"
            yield Problem.of("unite_classes", rule, action="remove one of them", code="config.conflict")
        elif kind == "mix":
            yield from self._mix_problems()

    def _is_set(self, key: str) -> bool:
        """Whether a key has another value than its default."""
        [default] = [field.default for field in dataclasses.fields(self) if field.name == key]
        return bool(getattr(self, key) != default)

    def _mix_problems(self) -> Iterator[Problem]:
        """Rules for a mix and its sources."""
        for key in ("fields", "weights"):
            if getattr(self, key):
                action = f"give each source of the mix its own {key}"
                yield Problem.of(key, "must not stand next to mix", action=action, code="config.conflict")
        for i, entry in enumerate(self.entries):
            at = ("mix", i, "source")
            if entry.spec.mix:
                rule, action = "must not be in a mix", "list its sources in the other mix"
                yield Problem.of((*at, "mix"), rule, action=action, code="config.conflict")
            for key in ("split", "seed"):
                if getattr(entry.spec, key):
                    rule = "must stand next to mix, and is for all its sources"
                    yield Problem.of((*at, key), rule, action="move it there", code="config.conflict")
            if self.splits and entry.spec.kind not in _WITH_SPLITS:
                rule, action = "must be those of source.hf or source.folder", "give the fractions of parts with split"
                yield Problem.of(
                    "splits", f"{rule}, got source.{entry.spec.kind}", action=action, code="config.conflict"
                )

    def _split_problems(self, given: Sequence[str]) -> Iterator[Problem]:
        for name, fraction in self.fractions:
            if rule := _FRACTION.broken_rule(fraction):
                yield Problem.of(("split", name), rule, fraction, code="config.range")
        if self.cache_spec is not None:
            yield from (problem.below("cache") for problem in out_of_bounds(self.cache_spec))
        total = sum(fraction for _, fraction in self.fractions)
        if total > 1 + 1e-9:
            rule = f"must add up to at most 1, got {total:g}"
            yield Problem.of("split", rule, action="lower a fraction", code="config.conflict")
        for key, names in (("split", [name for name, _ in self.fractions]), ("splits", list(self.splits))):
            if len(set(names)) < len(names):
                yield Problem.of(key, "must name each split once", names, code="config.conflict")
        if self.splits and self.fractions:
            yield Problem.of(
                "splits", "must not stand next to split", action="remove one of them", code="config.conflict"
            )
        if self.splits and given and given[0] not in (*_WITH_SPLITS, "mix"):
            rule = f"must go with source.hf or source.folder, whose splits have names, got source.{given[0]}"
            yield Problem.of("splits", rule, action="give the fractions of parts with split", code="config.conflict")

    @property
    def kind(self) -> str:
        """Which of gpuflow's kinds is given, or the name of another package's source."""
        if self.other:
            return _pairs(self.other)[0][0]
        return next((name for name in _KINDS if getattr(self, name) not in (None, ())), _KINDS[0])

    @property
    def where(self) -> str:
        """The path or URL that is given, several of a mix; of another package's source its name and its value."""
        if self.other:
            [(name, value)] = _pairs(self.other)
            return f"{name}: {value}"
        if self.mix:
            return " and ".join(entry.spec.where for entry in self.entries)
        return str(getattr(self, self.kind))

    @property
    def mixed(self) -> tuple[SourceSpec, ...]:
        """Of a mix its sources, each with the splits that the mix names; empty if this is no mix."""
        specs = tuple(entry.spec for entry in self.entries)
        return tuple(replace(spec, splits=self.splits) for spec in specs) if self.splits else specs

    @property
    def sources(self) -> tuple[SourceSpec, ...]:
        """The sources of a mix; any other source alone."""
        return self.mixed or (self,)

    @property
    def declared(self) -> tuple[tuple[str, FieldSpec], ...]:
        """The declared fields as pairs of name and spec; empty if a sample is an image and a label. Of a mix those
        of its first source, which all have."""
        if self.mix:
            return self.entries[0].spec.declared
        return pairs_of_fields(self.fields)

    @property
    def cache_spec(self) -> CacheSpec | None:
        """The key `cache`."""
        return CacheSpec(**self.cache) if isinstance(self.cache, Mapping) else self.cache

    @property
    def fractions(self) -> tuple[tuple[str, float], ...]:
        """The splits as pairs."""
        return _pairs(self.split)

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of all parts."""
        return self.splits or tuple(name for name, _ in self.fractions)

    @property
    def entries(self) -> tuple[MixEntry, ...]:
        """The sources of a mix."""
        return tuple(entry for entry in self.mix if isinstance(entry, MixEntry))

    @property
    def shard_window(self) -> int:
        """`window`, or what it is by default."""
        return _WINDOW if self.window is None else self.window


@dataclass(frozen=True, kw_only=True, slots=True)
class MixEntry:
    """One source of a mix.

    Args:
        source: where its samples are.
        weight: how much of the mix comes from it, in proportion to the weights of the other sources.
    """

    source: SourceSpec | Mapping[str, Any]
    weight: Annotated[float, Bounds(above=0)] = 1.0

    def __post_init__(self) -> None:
        if problems := list(out_of_bounds(self)):
            raise ConfigError(problems)
        if isinstance(self.source, Mapping):
            object.__setattr__(self, "source", SourceSpec(**self.source))

    @property
    def spec(self) -> SourceSpec:
        """The source, as a spec."""
        assert isinstance(self.source, SourceSpec)
        return self.source


def _pairs(values: Mapping[str, T] | tuple[tuple[str, T], ...]) -> tuple[tuple[str, T], ...]:
    return tuple(values.items()) if isinstance(values, Mapping) else tuple((name, value) for name, value in values)
