"""What sources need of a file system: a few reads of many files at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gpuflow.sources.payload import Allocate, Payload

__all__ = ["ReadAt", "Shard", "Storage", "is_remote", "parent_of"]

T = TypeVar("T")

ReadAt = Callable[[int, int], bytes]
"""read_at(offset, size) gives the bytes there, fewer at the end of the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file that is read in ranges. `stamp` (mtime, or a server's tag) tells whether it is still the same."""

    path: str
    size: int
    stamp: str


class Storage(Protocol):
    """A file system, as far as sources need one."""

    def read(self, paths: Sequence[bytes], allocate: Allocate) -> Payload:
        """Whole files. Never raises for a file that cannot be read."""

    def read_ranges(
        self, shards: Sequence[Shard], starts: Sequence[int], sizes: Sequence[int], allocate: Allocate
    ) -> Payload:
        """`sizes[i]` bytes of `shards[i]` from `starts[i]` on. Never raises for a range that cannot be read."""

    def load(self, path: str) -> bytes:
        """One whole file. Raises SourceError."""

    def inspect(self, paths: Sequence[str]) -> list[Shard | str]:
        """Size and stamp of each file, or why it cannot be read."""

    def scan(self, shards: Sequence[Shard], scanner: Callable[[Shard, ReadAt], T]) -> Iterator[T]:
        """`scanner` over each shard, given a way to read it front to back."""

    def close(self) -> None:
        """Closes what is open."""


def is_remote(path: str) -> bool:
    """Whether a path is a URL, such as s3://bucket/key."""
    return "://" in path


def parent_of(path: str) -> str:
    """The directory of a path or URL, with its last slash; nothing for a bare name."""
    return path[: path.rfind("/") + 1]
