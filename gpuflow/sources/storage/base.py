"""The protocol of a storage: the operations that sources need from a file system, each on many files at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gpuflow.errors import SourceError
from gpuflow.sources.payload import Allocate, Payload

T = TypeVar("T")

HTTP = ("http", "https")
"""The schemes of its URLs."""

ReadAt = Callable[[int, int], bytes]
"""read_at(offset, size) returns `size` bytes from `offset` on; fewer at the end of the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file that is read in ranges.

    stamp: mtime, or a server's tag, which changes if the file changes. made: when a local file was put where it is, or
    anything about it was changed; another file may have the same size and, where programs set that, the same mtime.
    """

    path: str
    size: int
    stamp: str
    made: str = ""

    def changed(self, size: int) -> SourceError:
        """The error for a shard that is not the one that was indexed. size: bytes that it has now."""
        return SourceError(
            f"{self.path}: shard must stay as it was indexed, but has changed ({self.size} bytes then, {size} now); "
            "open the source again, and write new shards under new names"
        )


class Storage(Protocol):
    """A file system that sources read from.

    Reading raises only what is no sample's fault: SystemFault or MemoryError where the system refuses a file descriptor
    or memory, and SourceError where a shard is not the one that was indexed.
    """

    @property
    def remote(self) -> bool:
        """Whether it reads through connections of this process, which no forked process can use."""

    def read(self, paths: Sequence[bytes], allocate: Allocate) -> Payload:
        """Read whole files. A file that cannot be read is an error in the payload, not an exception."""

    def read_ranges(
        self, shards: Sequence[Shard], starts: Sequence[int], sizes: Sequence[int], allocate: Allocate
    ) -> Payload:
        """Read `sizes[i]` bytes of `shards[i]` from `starts[i]` on. A range that cannot be read is an error in the
        payload, not an exception."""

    def load(self, path: str) -> bytes:
        """Read one whole file. Raises SourceError if it cannot be read."""

    def inspect(self, paths: Sequence[str]) -> list[Shard | str]:
        """The size and stamp of each file, or why it cannot be read."""

    def scan(self, shards: Sequence[Shard], scanner: Callable[[Shard, ReadAt], T]) -> Iterator[T]:
        """Call `scanner` on each shard with a function that reads from it, and yield the results in order."""

    def close(self) -> None:
        """Close open files."""


def is_remote(path: str) -> bool:
    """Whether a path is a URL, such as s3://bucket/key."""
    return "://" in path


def is_over_http(path: str) -> bool:
    """Whether a path is a URL of HTTP or HTTPS, in which names are percent-encoded."""
    return path.partition("://")[0] in HTTP


def parent_of(path: str) -> str:
    """The directory of a path or URL, with its last slash; nothing for a bare name."""
    return path[: path.rfind("/") + 1]
