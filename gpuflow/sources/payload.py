"""The encoded bytes of several samples in one buffer, and their layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np

from gpuflow.arrays import Array, Bytes

Allocate = Callable[[int], Bytes]
"""Returns a writable uint8 array of at least the given number of bytes; the source fills it and returns it in its
payload."""

SPARE_BYTES = 16
"""Unused bytes after each sample, for a decoder that reads a little ahead. Where they must be zeros, it clears them."""


def lay_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Lay out samples of these sizes in a payload's buffer: each sample's offset, and the buffer's size in bytes.

    A size below 0, of damaged data, has no bytes. Such a sample lies in no other one's place, and `Payload` refuses it.
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
        offsets, sizes, errors = list(self.offsets), list(self.sizes), list(self.errors)
        for i in wrong:
            rule = f"its place must be within the {room} bytes that were read, got {sizes[i]} bytes at {offsets[i]}"
            offsets[i], sizes[i], errors[i] = 0, 0, errors[i] or f"{rule}; repair the file that gives its size"
        for name, values in (("offsets", offsets), ("sizes", sizes), ("errors", errors)):
            object.__setattr__(self, name, values)

    @classmethod
    def of(cls, files: Sequence[bytes | Bytes], allocate: Allocate | None = None) -> Self:
        """Copy files that are in memory into a buffer from `allocate`, by default into new memory."""
        sizes = [len(data) for data in files]
        offsets, end = lay_out(sizes)
        buffer = np.empty(end, np.uint8) if allocate is None else allocate(end)
        for offset, data in zip(offsets, files, strict=True):
            buffer[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        return cls(buffer=buffer, offsets=offsets, sizes=sizes, errors=[None] * len(sizes))

    def __len__(self) -> int:
        return len(self.sizes)

    def take(self, rows: Sequence[int]) -> Payload:
        """Return some of the samples, in the same buffer."""
        return Payload(
            buffer=self.buffer,
            offsets=[self.offsets[i] for i in rows],
            sizes=[self.sizes[i] for i in rows],
            errors=[self.errors[i] for i in rows],
        )

    def sample(self, i: int) -> Bytes:
        """A view of the bytes of sample i."""
        return self.buffer[self.offsets[i] : self.offsets[i] + self.sizes[i]]
