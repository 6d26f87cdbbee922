"""The protocol of a source, and the spec that describes one.

A source is indexed once, when it is opened, and read-only afterwards: many threads may call `read`. It provides labels,
paths and encoded bytes; only the decoder interprets the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

from numpy.typing import NDArray

from gpuflow.errors import ConfigError, Problem
from gpuflow.pipeline.bounds import Bounds, out_of_bounds
from gpuflow.sources.field_spec import Fields, FieldSpec, field_problems, pairs_of_fields
from gpuflow.sources.payload import Allocate, Payload
from gpuflow.sources.storage import CacheSpec, Storage

__all__ = ["Fraction", "Source", "SourceSpec", "is_read_remotely"]

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
    """Whether a source's samples are behind URLs, wherever its index is: worker processes must not read it."""
    return source.storage is not None and source.storage.remote


_KINDS = ("folder", "listing", "tar", "coco")
_NAMED_BY = {"folder": "its directories name the classes", "coco": "its categories name the classes"}
_FRACTION = Bounds(above=0, most=1, words="a fraction within (0, 1]")
Fraction = Annotated[float, _FRACTION]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpec:
    """Where the samples are: exactly one of `folder`, `listing`, `tar` and `coco`, or a source of another package.

    Args:
        folder: a directory with one directory for each class.
        listing: a CSV or JSON-lines file of paths and labels.
        tar: WebDataset-style shards, a path with brace ranges: `shards/{000..012}.tar`.
        coco: a file of annotations in COCO's format, such as instances_train2017.json.
        images: of `coco`: the directory of its images.
        root: the directory that a listing's relative paths start from; by default the listing's own.
        classes: of a listing or of shards: how many classes there are, or their names; by default as many as occur.
        split: the fraction of each named part, in order; a pipeline reads the part that has its name.
        seed: the seed of the split.
        window: of shards: how many neighbouring samples are shuffled among each other.
        fields: what a sample carries, by name; by default an image and a label.
        cache: where files behind URLs are kept on a local disk; by default they are not.
        other: the name and the value of a source of another package, which is a key of its own in YAML.
    """

    folder: str | None = None
    listing: str | None = None
    tar: str | None = None
    coco: str | None = None
    images: str | None = None
    root: str | None = None
    classes: Annotated[int, Bounds(least=1)] | tuple[str, ...] | None = None
    split: Mapping[str, Fraction] | tuple[tuple[str, Fraction], ...] = ()
    seed: Annotated[int, Bounds(least=0)] = 0
    window: Annotated[int, Bounds(least=1)] = 8192
    fields: Fields = ()
    cache: CacheSpec | Mapping[str, Any] | None = None
    other: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "split", _pairs(self.split))
        object.__setattr__(self, "fields", pairs_of_fields(self.fields))
        object.__setattr__(self, "other", _pairs(self.other))
        if self.classes is not None and not isinstance(self.classes, int):
            object.__setattr__(self, "classes", tuple(self.classes))
        if problems := [*out_of_bounds(self), *self._problems()]:
            raise ConfigError([problem.below("source") for problem in problems])

    def _problems(self) -> Iterator[Problem]:
        given = [
            *(name for name in _KINDS if getattr(self, name) is not None),
            *(name for name, _ in _pairs(self.other)),
        ]
        if len(given) != 1:
            rule = f"needs exactly one of folder, listing, tar and coco, got {' and '.join(given) or 'none of them'}"
            yield Problem.of((), rule, code="config.conflict")
        elif (self.images is None) == (self.coco is not None):
            if self.coco is not None:
                rule = "needs the key 'images' with source.coco: the directory of its images"
                yield Problem.of((), rule, code="config.missing_key")
            else:
                rule = f"must go with source.coco, got source.{given[0]}"
                yield Problem.of("images", rule, action="remove images", code="config.conflict")
        elif self.root is not None and self.listing is None:
            rule = f"must go with source.listing, got source.{given[0]}"
            yield Problem.of("root", rule, action="remove root", code="config.conflict")
        elif self.classes is not None and given[0] in _NAMED_BY:
            rule = f"must go with listing or tar, got source.{given[0]}"
            yield Problem.of("classes", rule, action=_NAMED_BY[given[0]], code="config.conflict")
        if isinstance(self.classes, tuple) and (not self.classes or len(set(self.classes)) < len(self.classes)):
            yield Problem.of("classes", "must be distinct names, at least one", self.classes, code="config.range")
        yield from (problem.below("fields") for problem in field_problems(self.declared, self.kind))
        for name, fraction in self.fractions:
            if rule := _FRACTION.broken_rule(fraction):
                yield Problem.of(("split", name), rule, fraction, code="config.range")
        if self.cache_spec is not None:
            yield from (problem.below("cache") for problem in out_of_bounds(self.cache_spec))
        total = sum(fraction for _, fraction in self.fractions)
        if total > 1 + 1e-9:
            rule = f"must add up to at most 1, got {total:g}"
            yield Problem.of("split", rule, action="lower a fraction", code="config.conflict")
        names = [name for name, _ in self.fractions]
        if len(set(names)) < len(names):
            yield Problem.of("split", "must name each split once", names, code="config.conflict")

    @property
    def kind(self) -> str:
        """Which of `folder`, `listing`, `tar` and `coco` is given, or the name of another package's source."""
        if self.other:
            return _pairs(self.other)[0][0]
        return next((name for name in _KINDS if getattr(self, name) is not None), _KINDS[0])

    @property
    def where(self) -> str:
        """The path or URL that is given; of another package's source its name and its value."""
        if self.other:
            [(name, value)] = _pairs(self.other)
            return f"{name}: {value}"
        return str(getattr(self, self.kind))

    @property
    def declared(self) -> tuple[tuple[str, FieldSpec], ...]:
        """The declared fields as pairs of name and spec; empty if a sample is an image and a label."""
        return pairs_of_fields(self.fields)

    @property
    def cache_spec(self) -> CacheSpec | None:
        """The key `cache`."""
        return CacheSpec(**self.cache) if isinstance(self.cache, Mapping) else self.cache

    @property
    def fractions(self) -> tuple[tuple[str, float], ...]:
        """The splits as pairs."""
        return _pairs(self.split)


def _pairs(values: Mapping[str, T] | tuple[tuple[str, T], ...]) -> tuple[tuple[str, T], ...]:
    return tuple(values.items()) if isinstance(values, Mapping) else tuple((name, value) for name, value in values)
