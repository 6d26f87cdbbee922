"""Checks which files of a chunk are complete, and remembers them.

Each file of a source is checked once in a run, by one rank of a host.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpuflow.arrays import Bools, Bytes, Ints
from gpuflow.decode.chunk_files import Headers, find_complete
from gpuflow.native.pool import NativePool
from gpuflow.sources import Payload

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

    def known(self, indices: Ints, sizes: Ints) -> Bools:
        """Return which of these samples [N] are known to have such files, of these sizes."""
        remembered = self._sizes
        inside = indices < len(remembered)
        held = np.zeros(len(indices), np.uint32)  # 0 where none is
        held[inside] = remembered[indices[inside]]
        known: Bools = (held > 0) & (held == sizes)
        return known

    def add(self, indices: Ints, sizes: Ints) -> None:
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


class FileChecks:
    """Checks the files of one loader or service, and remembers the results. Any thread may call any method."""

    def __init__(self) -> None:
        self._complete, self._damaged = KnownFiles(), KnownFiles()

    @staticmethod
    def shared_bytes(samples: int) -> int:
        """The size of memory for `share`, for a source of that many samples."""
        return 2 * min(samples, MAX_REMEMBERED) * np.dtype(np.uint32).itemsize

    def share(self, memory: Bytes) -> None:
        """From now on remember in this memory which files were checked, and with what result.

        memory: uint8 [shared_bytes], zeros at first, that other processes with the same source use, too.
        """
        for files, own in zip((self._complete, self._damaged), memory.view(np.uint32).reshape(2, -1), strict=True):
            files.share(own)

    def complete(
        self,
        rows: Ints,
        payload: Payload,
        headers: Headers,
        indices: Sequence[int] | Ints | None,
        pool: NativePool | None = None,
    ) -> Bools:
        """Return which of these rows [n] of a payload are complete files.

        headers: of all files of the payload; those of the rows are files that the engines decode.
        indices: of the payload's samples in the source. Without them every file is new, as those that a service gets.
        pool: whose threads read the new files; by default the calling thread does.
        """
        if indices is None:
            return find_complete(rows, payload, headers, pool)
        samples, lengths = (np.asarray(x, np.int64)[rows] for x in (indices, payload.sizes))
        complete = self._complete.known(samples, lengths)
        new = ~(complete | self._damaged.known(samples, lengths))
        if new.any():
            complete[new] = find_complete(rows[new], payload, headers, pool)
            for files, which in ((self._complete, complete), (self._damaged, ~complete)):
                files.add(samples[new & which], lengths[new & which])
        return complete
