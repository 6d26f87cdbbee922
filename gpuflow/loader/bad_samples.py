"""Which samples of a loader are bad, and whether there are too many of them."""

from __future__ import annotations

import json
import threading
from io import FileIO

from gpuflow.errors import BadSampleError, LoaderError, TooManyBadSamples

__all__ = ["BadSamples"]


class BadSamples:
    """Counts them. Any thread may `record`.

    Args:
        policy: `raise`, `replace` or `skip`.
        limit: distinct bad samples that are allowed, or None for any number.
        path: a file to which each bad sample is appended once, as a JSON line (index, path, stage, reason).
    """

    def __init__(self, *, policy: str, limit: int | None, path: str | None) -> None:
        self.policy, self.limit = policy, limit
        self.count = 0
        self._known: set[int] = set()
        self._path = path
        self._file = open(path, "ab", buffering=0) if path else None  # noqa: SIM115
        self._lock = threading.Lock()

    @property
    def distinct(self) -> int:
        return len(self._known)

    def record(self, fault: BadSampleError) -> None:
        """Count one bad sample. Raises TooManyBadSamples above the limit, LoaderError if it cannot be listed."""
        with self._lock:
            self.count += 1
            if fault.index not in self._known:
                self._known.add(fault.index)
                if self._file is not None:
                    row = {"index": fault.index, "path": fault.path, "stage": fault.stage, "reason": fault.reason}
                    self._append(self._file, json.dumps(row).encode() + b"\n")
        if self.limit is not None and self.distinct > self.limit:
            raise TooManyBadSamples(
                f"{self.distinct} bad samples are more than run.max_bad allows ({self.limit}); the last: {fault}; "
                "run `gpuflow scan` to list them all"
            ) from fault

    def _append(self, file: FileIO, line: bytes) -> None:
        """Write a line at once. Raises LoaderError, with the key, where the disk is full or fails."""
        try:
            while line:
                line = line[file.write(line) :]
        except OSError as error:
            raise LoaderError(
                f"run.bad_file cannot be written: {error.strerror}: {self._path!r}; free space, name a file elsewhere, "
                "or remove the key"
            ) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
