"""The contract of a source, and the values that describe one.

A source indexes once, when it is opened, and is read-only afterwards: `read` may be called from many threads. It knows
labels and paths, never pixels; what the bytes mean is the decoder's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["Allocate", "Look", "Payload", "Source", "SourceSpec"]

Allocate = Callable[[int], NDArray[np.uint8]]
"""Gives a writable uint8 array of at least so many bytes; the source fills it and returns it in its payload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """The encoded bytes of some samples, back to back in one buffer.

    buffer: uint8 array, possibly longer than what is used.
    offsets, sizes: one a sample, in bytes; sample i is buffer[offsets[i] : offsets[i] + sizes[i]].
    errors: one a sample: None, or why it cannot be read (its size is then 0).
    found: what a `Look` found in them in the process that read them; None where none did.
    cpu_s: processor seconds that another process spent on it.
    """

    buffer: NDArray[np.uint8]
    offsets: Sequence[int]
    sizes: Sequence[int]
    errors: Sequence[str | None]
    found: Any = None
    cpu_s: float = 0.0

    @classmethod
    def of(cls, files: Sequence[bytes | NDArray[np.uint8]], allocate: Allocate) -> Self:
        """Files that are in memory, copied into a buffer of `allocate`."""
        sizes = [len(data) for data in files]
        *offsets, end = accumulate(sizes, initial=0)
        buffer = allocate(end)
        for offset, data in zip(offsets, files, strict=True):
            buffer[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        return cls(buffer=buffer, offsets=offsets, sizes=sizes, errors=[None] * len(sizes))

    def __len__(self) -> int:
        return len(self.sizes)

    def sample(self, i: int) -> NDArray[np.uint8]:
        """A view of sample i's bytes."""
        return self.buffer[self.offsets[i] : self.offsets[i] + self.sizes[i]]


Look = Callable[[Payload], Any]
"""What a decoder wants to know of a payload before it decodes it. Can be pickled, and so can what it gives."""


class Source(Protocol):
    """What every source offers. `len(source)` is its number of samples."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; a label is a place in this tuple."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """One label a sample, shape (n,)."""

    @property
    def shard_sizes(self) -> tuple[int, ...] | None:
        """Samples in each shard where neighbours are cheap to read together, else None."""

    def __len__(self) -> int: ...

    def path(self, index: int) -> str:
        """Where sample `index` lives, for messages: a path, a URL, or shard.tar/member."""

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        """The bytes of these samples, in this order. A sample that cannot be read is an error in the payload, never
        an exception; a short-lived fault is retried first. `allocate` is called once."""

    def read_in_processes(self, count: int, look: Look | None = None) -> None:
        """From now on `read` may leave the work to so many processes, where they read faster than threads; `look` then
        is called there."""

    def close(self) -> None:
        """Gives back open files and ends those processes. The source must not be read afterwards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpec:
    """Where the samples are: values only, exactly one of `folder`, `listing` and `tar`.

    Args:
        folder: directory with one directory per class.
        listing: CSV or JSON-lines file of paths and labels.
        tar: WebDataset-style shards, a path with brace ranges: `shards/{000..012}.tar`.
        root: what a listing's relative paths start from; its own directory by default.
        classes: of a listing or of shards: how many classes there are, or their names. By default as many as occur.
        split: name and fraction of each split, in order; a mapping or pairs.
        seed: of the split.
        window: of shards: how many neighbours are shuffled among each other.
    """

    folder: str | None = None
    listing: str | None = None
    tar: str | None = None
    root: str | None = None
    classes: int | tuple[str, ...] | None = None
    split: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    seed: int = 0
    window: int = 8192

    def __post_init__(self) -> None:
        given = [name for name in ("folder", "listing", "tar") if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise ValueError(f"source must name exactly one of folder, listing, tar, got {got}; keep one")
        if self.root is not None and self.listing is None:
            raise ValueError(f"source.root must go with source.listing, got source.{given[0]}; remove root")
        if self.classes is not None and self.folder is not None:
            raise ValueError(
                "source.classes must go with listing or tar, got source.folder; its directories name the classes"
            )
        if isinstance(self.classes, int):
            if self.classes < 1:
                raise ValueError(f"source.classes must be >= 1, got {self.classes}")
        elif self.classes is not None:
            object.__setattr__(self, "classes", tuple(self.classes))
            if not self.classes or len(set(self.classes)) < len(self.classes):
                raise ValueError(f"source.classes must be distinct names, at least one, got {list(self.classes)}")
        if self.window < 1:
            raise ValueError(f"source.window must be >= 1, got {self.window}")
        object.__setattr__(self, "split", _pairs(self.split))
        for name, fraction in self.fractions:
            if not (math.isfinite(fraction) and fraction > 0):
                raise ValueError(f"source.split.{name} must be > 0, got {fraction}")
        total = sum(fraction for _, fraction in self.fractions)
        if total > 1 + 1e-9:
            raise ValueError(f"source.split must sum to 1 or less, got {total:g}; lower a fraction")
        names = [name for name, _ in self.fractions]
        if len(set(names)) < len(names):
            raise ValueError(f"source.split must name each split once, got {names}")

    @property
    def kind(self) -> str:
        """Which of `folder`, `listing` and `tar` is given."""
        return "folder" if self.folder is not None else "listing" if self.listing is not None else "tar"

    @property
    def where(self) -> str:
        """The path or URL that is given."""
        return str(getattr(self, self.kind))

    @property
    def fractions(self) -> tuple[tuple[str, float], ...]:
        """The splits as pairs."""
        return _pairs(self.split)


def _pairs(split: Mapping[str, float] | tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
    return tuple(split.items()) if isinstance(split, Mapping) else tuple((name, value) for name, value in split)
