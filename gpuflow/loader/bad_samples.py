"""Which samples of a loader are bad, and whether there are too many of them."""

from __future__ import annotations

import json
import threading
from typing import TextIO

from gpuflow.errors import BadSampleError, TooManyBadSamples

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
        self._file: TextIO | None = open(path, "a", encoding="utf-8") if path else None  # noqa: SIM115
        self._lock = threading.Lock()

    @property
    def distinct(self) -> int:
        return len(self._known)

    def record(self, fault: BadSampleError) -> None:
        """Count one bad sample. Raises TooManyBadSamples above the limit."""
        with self._lock:
            self.count += 1
            if fault.index not in self._known:
                self._known.add(fault.index)
                if self._file is not None:
                    row = {"index": fault.index, "path": fault.path, "stage": fault.stage, "reason": fault.reason}
                    self._file.write(json.dumps(row) + "\n")
                    self._file.flush()
        if self.limit is not None and self.distinct > self.limit:
            raise TooManyBadSamples(
                f"{self.distinct} bad samples are more than run.max_bad allows ({self.limit}); the last: {fault}; "
                "run `gpuflow scan` to list them all"
            ) from fault

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
