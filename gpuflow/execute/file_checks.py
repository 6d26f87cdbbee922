"""Which files of a chunk are complete: each is checked once in a run, and complete ones are remembered between runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpuflow.decode.chunk_headers import Headers
from gpuflow.decode.complete_scan import COMPLETE, DAMAGED, NOT_CHECKED, ScanCheck, check_scans
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
        state, hashes = self._known(rows, payload, indices)
        new = state == NOT_CHECKED
        self._many_new = bool(new.sum() > len(rows) * _FEW_NEW)
        state = np.where(new, headers.complete[rows], state)
        unchecked = state == NOT_CHECKED
        if unchecked.any():
            state[unchecked] = check_scans(_scans(rows[unchecked], payload, headers), self._threads)
        if indices is not None:
            samples, lengths = _samples(rows, payload, indices)
            complete, damaged = new & (state == COMPLETE), new & (state == DAMAGED)
            self._complete.add(samples[complete], lengths[complete])
            self._damaged.add(samples[damaged], lengths[damaged])
            if self._contents is not None:
                self._contents.add(hashes[complete])
        return state

    def _known(
        self, rows: NDArray[np.int64], payload: Payload, indices: Sequence[int] | None
    ) -> tuple[NDArray[np.int8], NDArray[np.uint64]]:
        """COMPLETE, DAMAGED or NOT_CHECKED for each row; and hashes of the last ones, if there are contents."""
        state, hashes = np.full(len(rows), NOT_CHECKED, np.int8), np.zeros(len(rows), np.uint64)
        if indices is None:
            return state, hashes
        samples, lengths = _samples(rows, payload, indices)
        state[self._damaged.known(samples, lengths)] = DAMAGED
        state[self._complete.known(samples, lengths)] = COMPLETE
        others = np.flatnonzero(state == NOT_CHECKED)
        if self._contents is not None and len(others):
            hashes[others] = self._contents.hashes(payload, rows[others])
            found = others[self._contents.known(hashes[others])]
            self._complete.add(samples[found], lengths[found])
            state[found] = COMPLETE
        return state, hashes

    def save_soon(self) -> None:
        """Begin to save which files are complete, for later runs."""
        if self._contents is not None:
            self._contents.save_soon()

    def close(self) -> None:
        """Save which files are complete, and end the thread that does."""
        if self._contents is not None:
            self._contents.close()


def _scans(rows: NDArray[np.int64], payload: Payload, headers: Headers) -> list[ScanCheck]:
    """What `check_scans` needs of these rows."""
    frames = np.column_stack([headers.sizes, headers.sampling])[rows].tolist()
    scans, intervals = headers.scans[rows].tolist(), headers.intervals[rows].tolist()
    return [
        (payload.sample(row), start, (height, width, sampling), interval)
        for row, start, (height, width, sampling), interval in zip(rows.tolist(), scans, frames, intervals, strict=True)
    ]


def _samples(
    rows: NDArray[np.int64], payload: Payload, indices: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The indices of the rows' samples and the sizes of their files in bytes."""
    return np.asarray(indices, np.int64)[rows], np.asarray(payload.sizes, np.int64)[rows]
