"""Checks which files of a chunk are complete. Each file of a source is checked once in a run, by one rank of a host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpuflow.decode.chunk_headers import Headers
from gpuflow.decode.complete import find_complete
from gpuflow.execute.known_files import MAX_REMEMBERED, KnownFiles
from gpuflow.native.pool import NativePool
from gpuflow.sources import Payload

__all__ = ["FileChecks"]


class FileChecks:
    """Checks the files of one loader or service, and remembers the results. Any thread may call any method."""

    def __init__(self) -> None:
        self._complete, self._damaged = KnownFiles(), KnownFiles()

    @staticmethod
    def shared_bytes(samples: int) -> int:
        """The size of memory for `share`, for a source of that many samples."""
        return 2 * min(samples, MAX_REMEMBERED) * np.dtype(np.uint32).itemsize

    def share(self, memory: NDArray[np.uint8]) -> None:
        """From now on remember in this memory which files were checked, and with what result.

        memory: uint8 [shared_bytes], zeros at first, that other processes with the same source use, too.
        """
        for files, own in zip((self._complete, self._damaged), memory.view(np.uint32).reshape(2, -1), strict=True):
            files.share(own)

    def complete(
        self,
        rows: NDArray[np.int64],
        payload: Payload,
        headers: Headers,
        indices: Sequence[int] | NDArray[np.int64] | None,
        pool: NativePool | None = None,
    ) -> NDArray[np.bool_]:
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
