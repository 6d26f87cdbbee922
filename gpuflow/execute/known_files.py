"""Remembers what is known of samples' files, so that each is checked once and not in every epoch."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

__all__ = ["KnownFiles"]

_MAX_REMEMBERED = 1 << 26
"""The largest number of samples that are remembered, with four bytes each."""


class KnownFiles:
    """Samples' files of one kind, such as complete ones, by index in the source and size in bytes.

    Any thread may call any method.
    """

    def __init__(self) -> None:
        self._sizes, self._lock = np.zeros(0, np.uint32), threading.Lock()

    def known(self, indices: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these samples [N] are known to have such files, of these sizes."""
        held = self._sizes
        inside = indices < len(held)
        found: NDArray[np.bool_] = inside & (held[np.where(inside, indices, 0)] == sizes) if len(held) else inside
        return found

    def add(self, indices: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Remember samples [N] that have such files, of these sizes. Very high indices are not remembered."""
        kept = (indices < _MAX_REMEMBERED) & (sizes <= np.iinfo(np.uint32).max)
        if not kept.any():
            return
        indices, sizes = indices[kept], sizes[kept]
        with self._lock:
            if (need := int(indices.max()) + 1) > len(self._sizes):
                grown = np.zeros(min(max(need, 2 * len(self._sizes)), _MAX_REMEMBERED), np.uint32)
                grown[: len(self._sizes)] = self._sizes
                self._sizes = grown
            self._sizes[indices] = sizes
