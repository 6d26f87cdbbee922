"""Counts the bad samples of a loader, lists them in a file, and raises an error once they are too many."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO

from gpuflow.errors import BadSampleError, LoaderError, TooManyBadSamples

_SHOWN = 3
"""How many faults an error names."""


@dataclass(eq=False, kw_only=True)
class BadSamples:
    """Counts the bad samples of one loader. Any thread may `record`.

    Args:
        policy: `raise`, `replace` or `skip`.
        limit: distinct bad samples that are allowed, or None for any number.
        path: a file to which each bad sample is appended once, as a JSON line (index, path, stage, reason).
        samples: the number of samples of the source if `limit` is for all of them. A process that has drawn only a part
            of them, such as one of several ranks, may find that part of `limit`, and what chance adds. None: `limit` is
            for this process.
        report: gets each bad sample before its batch is delivered. A batch may then be empty.
    """

    policy: str
    limit: int | None
    path: str | None
    samples: int | None = None
    report: Callable[[BadSampleError], None] | None = None

    def __post_init__(self) -> None:
        self.count, self._drawn = 0, 0
        self._known: set[int] = set()
        self._first: list[BadSampleError] = []
        self._file = open(self.path, "ab", buffering=0) if self.path else None  # noqa: SIM115
        self._lock = threading.Lock()

    def begin_epoch(self, samples: int) -> None:
        """Count the samples that this process draws in an epoch."""
        self._drawn += samples

    def allowed(self, limit: float, samples: int) -> int:
        """Return how many bad samples this process may find so far, if `limit` of the source's `samples` may be bad.

        Of a part drawn at random, four standard deviations more than expected, which chance alone exceeds once in
        30,000 times.
        """
        if self._drawn >= samples:
            return int(limit)
        expected = limit * self._drawn / samples
        return int(min(limit, expected + 4 * math.sqrt(expected)))

    @property
    def distinct(self) -> int:
        return len(self._known)

    @property
    def first(self) -> str:
        """Return the text of the first few faults."""
        return "; ".join(map(str, sorted(self._first, key=lambda fault: fault.index)))

    def record(self, fault: BadSampleError) -> None:
        """Count one bad sample. Raises TooManyBadSamples above the limit, LoaderError if it cannot be listed."""
        with self._lock:
            self.count += 1
            if self.report is not None:
                self.report(fault)
            if fault.index not in self._known:
                self._known.add(fault.index)
                self._first = [*self._first, fault][:_SHOWN]
                if self._file is not None:
                    row = {"index": fault.index, "path": fault.path, "stage": fault.stage, "reason": fault.reason}
                    self._append(self._file, json.dumps(row).encode() + b"\n")
        if self.limit is None:
            return
        allowed = self.limit if self.samples is None else self.allowed(self.limit, self.samples)
        if self.distinct > allowed:
            limit = str(allowed)
            if self.samples is not None and self._drawn < self.samples:
                limit = f"{self.limit} of {self.samples} samples: {allowed} of the {self._drawn} that this process drew"
            raise TooManyBadSamples(
                f"{self.distinct} bad samples are more than run.max_bad allows ({limit}); the last: {fault}; "
                "run `gpuflow scan` to list them all"
            ) from fault

    def _append(self, file: FileIO, line: bytes) -> None:
        """Write a line at once. Raises LoaderError, with the key, where the disk is full or fails."""
        try:
            while line:
                line = line[file.write(line) :]
        except OSError as error:
            raise LoaderError(
                f"run.bad_file cannot be written: {error.strerror}: {self.path!r}; free space, name a file elsewhere, "
                "or remove the key"
            ) from error

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
