"""Remembers which files have a property, such as being complete, so that each file is checked only once."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_REMEMBERED", "KnownFiles"]

MAX_REMEMBERED = 1 << 26
"""The largest number of samples that are remembered, with four bytes each."""


class KnownFiles:
    """Samples' files of one kind, such as complete ones, by index in the source and size in bytes.

    Any thread may call any method.
    """

    def __init__(self) -> None:
        self._sizes, self._lock = np.zeros(0, np.uint32), threading.Lock()
        self._most = MAX_REMEMBERED

    def share(self, memory: NDArray[np.uint32]) -> None:
        """From now on remember files in this memory [number of samples], which other processes use, too.

        Where nothing is known it has zeros. What is known here already is written to it.
        """
        with self._lock:
            own = self._sizes[: len(memory)]
            np.copyto(memory[: len(own)], own, where=own > 0)
            self._sizes, self._most = memory, len(memory)

    def known(self, indices: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these samples [N] are known to have such files, of these sizes."""
        remembered = self._sizes
        inside = indices < len(remembered)
        held = np.zeros(len(indices), np.uint32)  # 0 where none is
        held[inside] = remembered[indices[inside]]
        known: NDArray[np.bool_] = (held > 0) & (held == sizes)
        return known

    def add(self, indices: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Remember samples [N] that have such files, of these sizes. Very high indices are not remembered."""
        with self._lock:
            kept = (indices < self._most) & (sizes <= np.iinfo(np.uint32).max)
            if not kept.any():
                return
            indices, sizes = indices[kept], sizes[kept]
            if (need := int(indices.max()) + 1) > len(self._sizes):
                grown = np.zeros(min(max(need, 2 * len(self._sizes)), self._most), np.uint32)
                grown[: len(self._sizes)] = self._sizes
                self._sizes = grown
            self._sizes[indices] = sizes
