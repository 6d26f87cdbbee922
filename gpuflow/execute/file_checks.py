"""Which files of a chunk are complete: each is checked once in a run, and complete ones are remembered between runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpuflow.decode.chunk_headers import Headers
from gpuflow.decode.complete_scan import COMPLETE, DAMAGED, NOT_CHECKED, check_scans
from gpuflow.execute.complete_contents import CompleteContents
from gpuflow.execute.known_files import KnownFiles
from gpuflow.sources import Payload

__all__ = ["FileChecks"]

_FEW_NEW = 1 / 16
"""If a chunk has a smaller share of new files, those of the next one are checked where it is prepared, and no longer by
the workers that read it, which do not know which files are new."""


class FileChecks:
    """The checks of one loader's or service's files. Any thread may call any method.

    Args:
        contents: the files that earlier runs found complete; None if nothing is remembered between runs.
        threads: to check with, of this process. reader_threads: of each process that reads.
    """

    def __init__(self, contents: CompleteContents | None, threads: int, reader_threads: int) -> None:
        self._contents, self._threads = contents, threads
        self._reader_threads, self._many_new = reader_threads, True
        self._complete, self._damaged = KnownFiles(), KnownFiles()

    @property
    def threads_while_reading(self) -> int:
        """Threads with which a process should check what it reads next; 0 if nearly all files are known."""
        return self._reader_threads if self._many_new else 0

    def states(
        self, rows: NDArray[np.int64], payload: Payload, headers: Headers, indices: Sequence[int] | None
    ) -> NDArray[np.int8]:
        """COMPLETE, DAMAGED or MARKED (`complete_scan`) for each of these rows of a payload.

        indices: of the payload's samples in the source. Without them every file is new, as those that a service gets.
        """
        state = headers.complete[rows]
        if indices is None:
            self._check(state, rows, payload, headers)
            return state
        samples, lengths = (np.asarray(x, np.int64)[rows] for x in (indices, payload.sizes))
        new, hashes = np.ones(len(rows), bool), np.zeros(len(rows), np.uint64)
        for files, found in ((self._damaged, DAMAGED), (self._complete, COMPLETE)):
            known = files.known(samples, lengths)
            state[known], new[known] = found, False
        if self._contents is not None and new.any():
            hashes[new] = self._contents.hashes(payload, rows[new])
            known = new & self._contents.known(hashes)
            state[known], new[known] = COMPLETE, False
            self._complete.add(samples[known], lengths[known])
        self._many_new = bool(new.sum() > len(rows) * _FEW_NEW)
        self._check(state, rows, payload, headers)
        complete, damaged = new & (state == COMPLETE), new & (state == DAMAGED)
        self._complete.add(samples[complete], lengths[complete])
        self._damaged.add(samples[damaged], lengths[damaged])
        if self._contents is not None:
            self._contents.add(hashes[complete])
        return state

    def _check(self, state: NDArray[np.int8], rows: NDArray[np.int64], payload: Payload, headers: Headers) -> None:
        """Replace NOT_CHECKED in the states of these rows."""
        unchecked = state == NOT_CHECKED
        if unchecked.any():
            state[unchecked] = check_scans(payload, rows[unchecked], headers, self._threads)

    def save_soon(self) -> None:
        """Begin to save which files are complete, for later runs."""
        if self._contents is not None:
            self._contents.save_soon()

    def close(self) -> None:
        """Save which files are complete, and end the thread that does."""
        if self._contents is not None:
            self._contents.close()
