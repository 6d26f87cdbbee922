"""Counts what each stage of a running loader does: samples, busy time, the operation under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Meter", "Stats", "WaitingSamples", "culprit"]


class WaitingSamples:
    """Counts samples between two stages: finished by one, not begun by the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self._start = self._last = time.perf_counter()
        self._waiting, self._area = 0, 0.0

    def change(self, samples: int) -> None:
        """Add a number of samples, or remove them if it is negative."""
        with self._lock:
            now = time.perf_counter()
            self._area += self._waiting * (now - self._last)
            self._waiting, self._last = max(0, self._waiting + samples), now

    def mean(self) -> float:
        """The average number of waiting samples, from the reset to the last change."""
        elapsed = self._last - self._start
        return self._area / elapsed if elapsed else 0.0


class _Operation:
    """One operation of a stage under way on a thread.

    outer: the one that it is part of, such as the decoding that reads a replacement for a bad sample. inside: seconds
    of ended operations that were part of this one, by their stage's name. inner: the one under way now.
    """

    __slots__ = ("inner", "inside", "name", "outer", "start")

    def __init__(self, name: str, outer: _Operation | None) -> None:
        self.name, self.outer, self.start = name, outer, time.perf_counter()
        self.inside: dict[str, float] = {}
        self.inner: _Operation | None = None

    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self.start

    def end(self) -> None:
        """Add its time to that of the outer operation."""
        if self.outer is not None:
            self.outer.inner = None
            self.outer.inside[self.name] = self.outer.inside.get(self.name, 0.0) + self.seconds()

    def slowest(self) -> str:
        """The name of the stage that most of its time went to."""
        spent, inner = dict(self.inside), self.inner
        if inner is not None:
            spent[inner.name] = spent.get(inner.name, 0.0) + inner.seconds()
        spent[self.name] = self.seconds() - sum(spent.values())
        return max(spent, key=spent.__getitem__)


_on_this_thread = threading.local()


class Meter:
    """Counts the work of one stage, whose operations run on `threads` threads. Time is taken inside the operation.

    after: the samples that wait behind the stage; two stages that feed the same one share it.
    before: those that wait in front of it, if another stage produces them.
    """

    def __init__(
        self, name: str, threads: int, *, before: WaitingSamples | None = None, after: WaitingSamples | None = None
    ) -> None:
        self.name, self.threads = name, threads
        self.before, self.after = before, after or WaitingSamples()
        self._lock = threading.Lock()
        self._running: dict[int, _Operation] = {}
        self.reset()

    def reset(self) -> None:
        self.after.reset()
        self._samples, self._bytes, self._busy, self._cpu = 0, 0, 0.0, 0.0

    @contextmanager
    def work(self, samples: int) -> Iterator[None]:
        """Measure one operation on this number of samples."""
        me, cpu = threading.get_ident(), time.thread_time()
        outer: _Operation | None = getattr(_on_this_thread, "operation", None)
        self._running[me] = _on_this_thread.operation = operation = _Operation(self.name, outer)
        if outer is not None:
            outer.inner = operation
        if self.before is not None:
            self.before.change(-samples)
        try:
            yield
        finally:
            del self._running[me]
            operation.end()
            _on_this_thread.operation = outer
            self.after.change(samples)
            with self._lock:
                self._busy += operation.seconds()
                self._cpu += time.thread_time() - cpu
                self._samples += samples

    def add(self, *, samples: int = 0, read_bytes: int = 0, busy_s: float = 0.0, cpu_s: float = 0.0) -> None:
        """Add what an operation did that `work` did not measure: in another process, or as part of another stage."""
        with self._lock:
            self._samples += samples
            self._bytes += read_bytes
            self._busy += busy_s
            self._cpu += cpu_s

    def longest_running(self) -> tuple[float, str] | None:
        """Of the oldest operation under way: seconds since it began, and the stage that most of them went to; or None.

        An operation that is part of another stage's counts as that stage's.
        """
        found = [operation for operation in list(self._running.values()) if operation.outer is None]
        return max(((operation.seconds(), operation.slowest()) for operation in found), default=None)

    def capacity(self) -> float:
        """Samples a second that its threads would finish if they never waited."""
        return self._samples / self._busy * self.threads if self._busy else 0.0

    def read(self, elapsed: float) -> dict[str, Any]:
        """Report what the stage did in `elapsed` seconds.

        samples; images_per_s; busy_share of its threads, 0 to 1; cpu_s, processor seconds; threads; bytes that it read;
        waiting: average number of samples that were ready for the next stage or the consumer.
        """
        busy = self._busy / (elapsed * self.threads) if elapsed else 0.0
        rate = self._samples / elapsed if elapsed else 0.0
        return {
            "samples": self._samples,
            "images_per_s": round(rate, 1),
            "busy_share": round(min(busy, 1.0), 4),
            "cpu_s": round(self._cpu, 4),
            "threads": self.threads,
            "bytes": self._bytes,
            "waiting": round(self.after.mean(), 1),
        }


def culprit(*meters: Meter) -> str:
    """Which stage has been at one operation for the longest time, in words."""
    running = [longest for meter in meters if (longest := meter.longest_running()) is not None]
    if not running:
        return "no stage is at work"
    seconds, name = max(running)
    return f"the stage {name!r} has been at one operation for {seconds:.1f} s"


class Stats:
    """The meters of a loader's stages, and how long its consumer waited. Counts run from the start of an epoch."""

    def __init__(self, *meters: Meter) -> None:
        self.meters = meters
        self.start_epoch(0)

    def start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._start, self._end = time.perf_counter(), 0.0
        self._batches, self._waited = 0, 0.0
        for meter in self.meters:
            meter.reset()

    def count_batch(self, waited: float, samples: int) -> None:
        """Count a batch of `samples` that the consumer got after waiting `waited` seconds."""
        self._batches += 1
        self._waited += waited
        self.meters[-1].after.change(-samples)

    def end_epoch(self) -> None:
        self._end = time.perf_counter()

    def read(self) -> dict[str, Any]:
        elapsed = (self._end or time.perf_counter()) - self._start
        return {
            "epoch": self._epoch,
            "batches": self._batches,
            "elapsed_s": round(elapsed, 4),
            "consumer_wait_s": round(self._waited, 4),
            "stages": {meter.name: meter.read(elapsed) for meter in self.meters},
        }
