"""The protocol of a storage, the paths that it is asked for, and the encoded bytes that it reads, in one buffer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, Self, TypeVar, final, overload

import numpy as np

from gpuflow.arrays import Array, Bytes, Ints
from gpuflow.errors import SourceError

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
        """Return the error for a shard that is not the one that was indexed. size: bytes that it has now."""
        return SourceError(
            f"{self.path}: shard must stay as it was indexed, but has changed ({self.size} bytes then, {size} now); "
            "open the source again, and write new shards under new names"
        )


Range = tuple[Shard, int, int]
"""Where the bytes of a sample lie: the file, the first byte, and the size, which is 0 if it cannot be read."""

Allocate = Callable[[int], Bytes]
"""Returns a writable uint8 array of at least the given number of bytes; the source fills it and returns it in its
payload."""

SPARE_BYTES = 16
"""Unused bytes after each sample, for a decoder that reads a little ahead. Where they must be zeros, it clears them."""


def lay_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Lay out samples of these sizes in a payload's buffer: each sample's offset, and the buffer's size in bytes.

    A size below 0, of damaged data, has no bytes. Such a sample lies in no other one's place, and `Payload` refuses it.

    Examples:
        >>> lay_out([100, 0, 50])
        ([0, 116, 132], 198)
    """
    *offsets, end = accumulate([size + SPARE_BYTES if size > 0 else SPARE_BYTES for size in sizes], initial=0)
    return offsets, end


@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """The encoded bytes of several samples in one buffer, laid out by `lay_out`.

    buffer: uint8 array, which may be longer than needed.
    offsets, sizes: for each sample, in bytes; sample i is buffer[offsets[i] : offsets[i] + sizes[i]].
    errors: for each sample None, or why it cannot be read (its size is then 0). A sample whose place is not within the
        buffer becomes an error.
    labels: of the samples, [n, ...], where each comes with its sample; None if `Source.labels` has them.
    """

    buffer: Bytes
    offsets: Sequence[int]
    sizes: Sequence[int]
    errors: Sequence[str | None]
    labels: Array | None = None

    def __post_init__(self) -> None:
        places = zip(self.offsets, self.sizes, strict=True)
        room = len(self.buffer)
        wrong = [i for i, (offset, size) in enumerate(places) if not 0 <= offset <= offset + size <= room]
        if not wrong:
            return
        offsets = list(self.offsets)
        sizes = list(self.sizes)
        errors = list(self.errors)
        for i in wrong:
            rule = f"its place must be within the {room} bytes that were read, got {sizes[i]} bytes at {offsets[i]}"
            offsets[i], sizes[i], errors[i] = 0, 0, errors[i] or f"{rule}; repair the file that gives its size"
        for name, values in (("offsets", offsets), ("sizes", sizes), ("errors", errors)):
            object.__setattr__(self, name, values)

    @classmethod
    def of(cls, files: Sequence[bytes | memoryview | Bytes | str], allocate: Allocate | None = None) -> Self:
        """Copy files that are in memory into a buffer from `allocate`, by default into new memory.

        files: the bytes of each, or why it cannot be read.

        Examples:
            >>> payload = Payload.of([b"abc", "no such file"])
            >>> payload.sample(0).tobytes(), payload.errors
            (b'abc', [None, 'no such file'])
        """
        found = [b"" if isinstance(file, str) else file for file in files]
        sizes = list(map(len, found))
        offsets, end = lay_out(sizes)
        buffer = np.empty(end, np.uint8) if allocate is None else allocate(end)
        for offset, data in zip(offsets, found, strict=True):
            buffer[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        errors = [file if isinstance(file, str) else None for file in files]
        return cls(buffer=buffer, offsets=offsets, sizes=sizes, errors=errors)

    def __len__(self) -> int:
        return len(self.sizes)

    def take(self, rows: Sequence[int]) -> Payload:
        """Select some of the samples, in the same buffer.

        Examples:
            >>> Payload.of([b"abc", b"de"]).take([1]).sample(0).tobytes()
            b'de'
        """
        return Payload(
            buffer=self.buffer,
            offsets=[self.offsets[i] for i in rows],
            sizes=[self.sizes[i] for i in rows],
            errors=[self.errors[i] for i in rows],
        )

    def sample(self, i: int) -> Bytes:
        """Return a view of the bytes of sample i."""
        return self.buffer[self.offsets[i] : self.offsets[i] + self.sizes[i]]


@dataclass(frozen=True, slots=True)
class Shards:
    """The files of samples that lie in files one after the other.

    ends [F]: the number of samples up to the end of each file.
    """

    files: tuple[Shard, ...]
    ends: Ints

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of samples in each file."""
        return tuple(np.diff(self.ends, prepend=0).tolist())

    def of(self, indices: Ints) -> list[Shard]:
        """Return the file of each of these samples."""
        return [self.files[number] for number in np.searchsorted(self.ends, indices, side="right").tolist()]

    def ranges(self, indices: Sequence[int], starts: Ints, sizes: Ints) -> list[Range]:
        """Return where the bytes of these samples lie. starts, sizes: of all samples."""
        places = np.asarray(indices, dtype=np.int64)
        return list(zip(self.of(places), starts[places].tolist(), sizes[places].tolist(), strict=True))

    def names(self, entries: Iterable[object]) -> list[str]:
        """Return the samples' names, FILE/ENTRY: each entry behind the name of its file, without directories."""
        files = [shard.path.rpartition("/")[2] for shard in self.files]
        owners = np.repeat(np.arange(len(files)), self.sizes).tolist()
        return [f"{files[owner]}/{entry}" for owner, entry in zip(owners, entries, strict=True)]

    def place(self, index: int) -> tuple[Shard, int]:
        """Return the file of a sample, and the number of the sample in it."""
        number = int(np.searchsorted(self.ends, index, side="right"))
        return self.files[number], index - (int(self.ends[number - 1]) if number else 0)


# --- paths ------------------------------------------------------------------------------------------------------------


@final
class Paths(Sequence[bytes]):
    """Some paths, which are split only when they are asked for: another process gets them as one object.

    Args:
        prefix: precedes every entry.
        text: the entries, each followed by a NUL.
    """

    __slots__ = ("_entries", "prefix", "text")

    def __init__(self, prefix: bytes, text: bytes) -> None:
        self.prefix = prefix
        self.text = text
        self._entries: list[bytes] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Paths, (self.prefix, self.text)

    def __len__(self) -> int:
        return self.text.count(b"\0")

    @overload
    def __getitem__(self, place: int) -> bytes: ...
    @overload
    def __getitem__(self, place: slice) -> list[bytes]: ...
    def __getitem__(self, place: int | slice) -> bytes | list[bytes]:
        return self._split()[place]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._split())

    def _split(self) -> list[bytes]:
        if self._entries is None:
            self._entries = [self.prefix + entry for entry in self.text.split(b"\0")[:-1]]
        return self._entries


@final
class PathTable:
    """Paths by index. Each path is the common `prefix` followed by an entry.

    Args:
        blob: the entries, each followed by a NUL.
        starts: int64 of shape (n + 1,): the offset of each entry in `blob`, and the length of `blob`.
        prefix: precedes every entry.
    """

    __slots__ = ("blob", "prefix", "starts")

    def __init__(self, blob: bytes, starts: Ints, prefix: str = "") -> None:
        self.blob = blob
        self.starts = starts
        self.prefix = os.fsencode(prefix)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> str:
        return os.fsdecode(self.take([index])[0])

    def entries(self) -> list[str]:
        """Decode all entries to text, without the prefix."""
        return os.fsdecode(self.blob[:-1]).split("\0") if len(self) else []

    def entries_below(self, root: str) -> bytes:
        """Return all entries, each followed by a NUL; of whole paths without `root` where they begin with it."""
        start = os.fsencode(os.path.join(root, ""))
        if self.prefix or not start:
            return self.blob
        return (b"\0" + self.blob).replace(b"\0" + start, b"\0")[1:]

    def take(self, indices: Sequence[int]) -> Paths:
        """Select the paths at these indices."""
        places = np.asarray(indices, dtype=np.int64)
        firsts, nexts = self.starts[places].tolist(), self.starts[places + 1].tolist()
        blob = self.blob
        return Paths(self.prefix, b"".join([blob[start:end] for start, end in zip(firsts, nexts, strict=True)]))


@final
class PathTableBuilder:
    """Builds a table from blocks of paths. has_absolute: whether any path starts with a slash or is a URL.

    Examples:
        >>> builder = PathTableBuilder()
        >>> builder.add(["a/1.jpg", "b/2.jpg"])
        >>> table = builder.build("photos/")
        >>> table[1], list(table.take([0]))
        ('photos/b/2.jpg', [b'photos/a/1.jpg'])
    """

    def __init__(self) -> None:
        self._blobs: list[bytes] = []
        self._lengths: list[Ints] = []
        self.has_absolute = False

    def add(self, paths: Sequence[str]) -> None:
        """Append paths. Raises ValueError if one is empty, contains a NUL or cannot be encoded."""
        if not paths:
            return
        text = "\0".join(paths)
        blob = text.encode("utf-8", "surrogateescape") + b"\0"
        ends = np.flatnonzero(np.frombuffer(blob, dtype=np.uint8) == 0)
        lengths = np.diff(ends, prepend=-1)
        if len(ends) != len(paths) or lengths.min() == 1:
            raise ValueError("a path is empty or holds a NUL")
        self._blobs.append(blob)
        self._lengths.append(lengths.astype(np.int64))
        self.has_absolute = self.has_absolute or text[0] == "/" or "\0/" in text or "://" in text

    def chunks(self) -> Iterator[list[str]]:
        """Yield the blocks of paths as they were added."""
        for blob in self._blobs:
            yield os.fsdecode(blob[:-1]).split("\0")

    def build(self, prefix: str = "") -> PathTable:
        """Build the table of all paths that were added."""
        starts = np.zeros(sum(map(len, self._lengths)) + 1, dtype=np.int64)
        if self._lengths:
            np.cumsum(np.concatenate(self._lengths), out=starts[1:])
        return PathTable(b"".join(self._blobs), starts, prefix)


# --- storages ---------------------------------------------------------------------------------------------------------


class Storage(Protocol):
    """A file system that sources read from.

    Reading raises only what is no sample's fault: SystemFault or MemoryError where the system refuses a file descriptor
    or memory, and SourceError where a shard is not the one that was indexed.
    """

    @property
    def remote(self) -> bool:
        """Return True if it reads through connections of this process, which no forked process can use."""

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
        """Ask for the size and stamp of each file; or return why it cannot be read."""

    def scan(self, shards: Sequence[Shard], scanner: Callable[[Shard, ReadAt], T]) -> Iterator[T]:
        """Call `scanner` on each shard with a function that reads from it, and yield the results in order."""

    def close(self) -> None:
        """Close open files."""


def is_remote(path: str) -> bool:
    """Return True if a path is a URL, such as s3://bucket/key.

    Examples:
        >>> is_remote("s3://bucket/1.jpg"), is_remote("photos/1.jpg")
        (True, False)
    """
    return "://" in path


def is_over_http(path: str) -> bool:
    """Return True if a path is a URL of HTTP or HTTPS, in which names are percent-encoded."""
    return path.partition("://")[0] in HTTP


def parent_of(path: str) -> str:
    """Return the directory of a path or URL, with its last slash; nothing for a bare name.

    Examples:
        >>> parent_of("s3://bucket/photos/1.jpg"), parent_of("1.jpg")
        ('s3://bucket/photos/', '')
    """
    return path[: path.rfind("/") + 1]
