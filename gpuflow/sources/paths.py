"""Stores millions of paths compactly: one bytes object with all of them, and an array of offsets.

A list of a million strings takes 100 MB and slows each garbage collection. This table takes little more memory than the
text itself, and returns `bytes`, which system calls accept without conversion.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, final, overload

import numpy as np

from gpuflow.arrays import Ints


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
    """Builds a table from blocks of paths. has_absolute: whether any path starts with a slash or is a URL."""

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
