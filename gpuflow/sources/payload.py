"""The encoded bytes of some samples in one buffer, and how they lie in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["SPARE_BYTES", "Allocate", "Payload", "lay_out"]

Allocate = Callable[[int], NDArray[np.uint8]]
"""Gives a writable uint8 array of at least so many bytes; the source fills it and returns it in its payload."""

SPARE_BYTES = 16
"""Free bytes behind each sample, where a decoder that reads a little ahead finds zeros instead of another sample."""


def lay_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each sample of so many bytes begins in a payload's buffer, and how many bytes the buffer needs."""
    *offsets, end = accumulate((size + SPARE_BYTES for size in sizes), initial=0)
    return offsets, end


@dataclass(frozen=True, kw_only=True, slots=True)
class Payload:
    """The encoded bytes of some samples, one behind the other in one buffer, as `lay_out` says.

    buffer: uint8 array, possibly longer than what is used.
    offsets, sizes: one a sample, in bytes; sample i is buffer[offsets[i] : offsets[i] + sizes[i]].
    errors: one a sample: None, or why it cannot be read (its size is then 0).
    prescan: what the worker that read them found in their headers; None where it did not look.
    cpu_s: processor seconds that another process spent on it.
    """

    buffer: NDArray[np.uint8]
    offsets: Sequence[int]
    sizes: Sequence[int]
    errors: Sequence[str | None]
    prescan: Any = None
    cpu_s: float = 0.0

    @classmethod
    def of(cls, files: Sequence[bytes | NDArray[np.uint8]], allocate: Allocate) -> Self:
        """Files that are in memory, copied into a buffer of `allocate`."""
        sizes = [len(data) for data in files]
        offsets, end = lay_out(sizes)
        buffer = allocate(end)
        for offset, data in zip(offsets, files, strict=True):
            buffer[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
        return cls(buffer=buffer, offsets=offsets, sizes=sizes, errors=[None] * len(sizes))

    def __len__(self) -> int:
        return len(self.sizes)

    def sample(self, i: int) -> NDArray[np.uint8]:
        """A view of sample i's bytes."""
        return self.buffer[self.offsets[i] : self.offsets[i] + self.sizes[i]]
