"""What each stage of a running loader does: samples, busy time, what it is doing right now."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Meter", "Stats"]


class Meter:
    """Counts the work of one stage, whose operations run on `threads` threads. Time is taken inside the operation."""

    def __init__(self, name: str, threads: int) -> None:
        self.name, self.threads = name, threads
        self._lock = threading.Lock()
        self._running: dict[int, float] = {}
        self.reset()

    def reset(self) -> None:
        self._samples, self._bytes, self._busy = 0, 0, 0.0

    @contextmanager
    def work(self, samples: int) -> Iterator[None]:
        """Around one operation on so many samples."""
        me, start = threading.get_ident(), time.perf_counter()
        self._running[me] = start
        try:
            yield
        finally:
            del self._running[me]
            with self._lock:
                self._busy += time.perf_counter() - start
                self._samples += samples

    def add_bytes(self, count: int) -> None:
        with self._lock:
            self._bytes += count

    def longest_running(self) -> float | None:
        """Seconds since the oldest operation still under way began, or None."""
        starts = list(self._running.values())
        return time.perf_counter() - min(starts) if starts else None

    def read(self, elapsed: float) -> dict[str, Any]:
        """samples; images_per_s over `elapsed` seconds; busy_share of the stage's threads, 0 to 1; bytes."""
        busy = self._busy / (elapsed * self.threads) if elapsed else 0.0
        rate = self._samples / elapsed if elapsed else 0.0
        return {
            "samples": self._samples,
            "images_per_s": round(rate, 1),
            "busy_share": round(min(busy, 1.0), 4),
            "threads": self.threads,
            "bytes": self._bytes,
        }


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

    def hand_over(self, waited: float) -> None:
        """One batch went to the consumer, who waited so many seconds for it."""
        self._batches += 1
        self._waited += waited

    def end_epoch(self) -> None:
        self._end = time.perf_counter()

    def culprit(self) -> str:
        """Which stage has been at one operation for the longest time, in words."""
        running = [(seconds, meter.name) for meter in self.meters if (seconds := meter.longest_running()) is not None]
        if not running:
            return "no stage is at work"
        seconds, name = max(running)
        return f"the stage {name!r} has been at one operation for {seconds:.1f} s"

    def read(self) -> dict[str, Any]:
        elapsed = (self._end or time.perf_counter()) - self._start
        return {
            "epoch": self._epoch,
            "batches": self._batches,
            "elapsed_s": round(elapsed, 4),
            "consumer_wait_s": round(self._waited, 4),
            "stages": {meter.name: meter.read(elapsed) for meter in self.meters},
        }
