"""Counts what each stage of a running loader does: samples, busy time, the current operation."""

from __future__ import annotations

import operator
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

Ranges = Callable[[str], AbstractContextManager[Any]]
"""Marks what a thread does under this name, for a profiler."""


def nvtx(enabled: bool) -> Ranges:
    """Return what marks NVTX ranges, which Nsight Systems shows. Without `enabled` or a GPU, it does nothing."""
    if enabled:
        import torch

        if torch.cuda.is_available():
            ranges: Ranges = torch.cuda.nvtx.range
            return ranges
    return nullcontext


class RunningOperation:
    """Describes one operation of a stage that is running on a thread.

    stage: its name. subject: what it works on, as its stage gave it. thread: its thread's identifier. start: seconds.
    outer: the operation that it is part of, such as the decoding that reads a replacement for a bad sample.
    """

    __slots__ = ("_inner", "_inside", "outer", "stage", "start", "subject", "thread")

    def __init__(self, stage: str, subject: Any, outer: RunningOperation | None) -> None:
        self.stage, self.subject, self.outer = stage, subject, outer
        self.thread, self.start = threading.get_ident(), time.perf_counter()
        self._inside = defaultdict[str, float](
            float
        )  # seconds of ended operations that were part of this one, by their stage
        self._inner: RunningOperation | None = None
        if outer is not None:
            outer._inner = self

    @property
    def seconds(self) -> float:
        """Return how long it has been running."""
        return time.perf_counter() - self.start

    def end(self) -> None:
        """Add its time to that of the outer operation."""
        if self.outer is not None:
            self.outer._inner = None
            self.outer._inside[self.stage] += self.seconds

    def slowest(self) -> str:
        """Return the name of the stage that most of its time went to."""
        spent, inner = self._inside.copy(), self._inner
        if inner is not None:
            spent[inner.stage] += inner.seconds
        spent[self.stage] = self.seconds - sum(spent.values())
        return max(spent, key=spent.__getitem__)

    def __str__(self) -> str:
        return f"the stage {self.slowest()!r} has been at one operation for {self.seconds:.1f} s"


_on_this_thread = threading.local()


class StageTotals(NamedTuple):
    """Counts what a stage did since its loader was made, or since the start of an epoch."""

    samples: int = 0
    read_bytes: int = 0
    busy_s: float = 0.0
    cpu_s: float = 0.0


@dataclass(eq=False)
class Meter:
    """Counts the work of one stage, whose operations run on `threads` threads. Time is taken inside the operation.

    totals: what the stage did since its loader was made, also before `reset`.
    ranges: marks each operation for a profiler.
    by_processor: an operation's threads are as busy as they take processor time, because others do its work.

    Examples:
        >>> meter = Meter("decode", threads=2)
        >>> with meter.work(8):
        ...     meter.add(read_bytes=4096)
        >>> meter.totals.samples, meter.totals.read_bytes
        (8, 4096)
    """

    name: str
    threads: int
    ranges: Ranges = nullcontext
    by_processor: bool = False

    def __post_init__(self) -> None:
        self.totals = StageTotals()
        self._lock = threading.Lock()
        self._running: dict[int, RunningOperation] = {}
        self.reset()

    def reset(self) -> None:
        """Count from here on."""
        self._former = self.totals

    @property
    def _since_reset(self) -> StageTotals:
        return StageTotals(*map(operator.sub, self.totals, self._former))

    @contextmanager
    def work(self, samples: int, subject: Any = None) -> Iterator[None]:
        """Measure one operation on this number of samples. subject: see `RunningOperation`."""
        cpu = time.thread_time()
        outer: RunningOperation | None = getattr(_on_this_thread, "operation", None)
        operation = _on_this_thread.operation = RunningOperation(self.name, subject, outer)
        self._running[operation.thread] = operation
        try:
            with self.ranges(f"gpuflow.{self.name}"):
                yield
        finally:
            del self._running[operation.thread]
            operation.end()
            _on_this_thread.operation = outer
            cpu = time.thread_time() - cpu
            self.add(samples=samples, busy_s=cpu if self.by_processor else operation.seconds, cpu_s=cpu)

    def add(self, *, samples: int = 0, read_bytes: int = 0, busy_s: float = 0.0, cpu_s: float = 0.0) -> None:
        """Add what an operation did that `work` did not measure: in another process, or as part of another stage."""
        with self._lock:
            self.totals = StageTotals(*map(operator.add, self.totals, (samples, read_bytes, busy_s, cpu_s)))

    def operations(self) -> list[RunningOperation]:
        """Return the running operations, without those that are part of another one."""
        return [operation for operation in list(self._running.values()) if operation.outer is None]

    def capacity(self) -> float:
        """Return how many samples a second its threads would finish if they never waited."""
        done = self._since_reset
        return done.samples / done.busy_s * self.threads if done.busy_s else 0.0

    def busy_share(self, elapsed: float) -> float:
        """Return the part of `elapsed` seconds for which its threads worked, 0 to 1."""
        return min(1.0, self._since_reset.busy_s / (elapsed * self.threads)) if elapsed else 0.0

    def read(self, elapsed: float) -> dict[str, Any]:
        """Report what the stage did in `elapsed` seconds.

        samples; images_per_s; busy_share of its threads, 0 to 1; cpu_s, processor seconds; threads; bytes that it read.
        """
        done = self._since_reset
        return {
            "samples": done.samples,
            "images_per_s": round(done.samples / elapsed, 1) if elapsed else 0.0,
            "busy_share": round(self.busy_share(elapsed), 4),
            "cpu_s": round(done.cpu_s, 4),
            "threads": self.threads,
            "bytes": done.read_bytes,
        }


def oldest_operation(*meters: Meter) -> RunningOperation | None:
    """Return the operation of any stage that has run for the longest time; None if no stage is running one."""
    running = [operation for meter in meters for operation in meter.operations()]
    return min(running, key=lambda operation: operation.start, default=None)


class Stats:
    """Holds the meters of a loader's stages, and how long its consumer waited. Counts run from the start of an epoch.

    gpu_wait_share: the part of its time for which the consumer's GPU waited for the last batches; None if not measured.
    """

    def __init__(self, *meters: Meter) -> None:
        self.meters = meters
        self._former_batches, self._former_waited = 0, 0.0
        self._batches, self._waited = 0, 0.0
        self.start_epoch(0)

    def start_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self._start, self._end = time.perf_counter(), 0.0
        self._former_batches, self._former_waited = self.totals()
        self._batches, self._waited = 0, 0.0
        self.gpu_wait_share: float | None = None
        for meter in self.meters:
            meter.reset()

    def count_batch(self, waited: float) -> None:
        """Count a batch for which the consumer waited `waited` seconds."""
        self._batches += 1
        self._waited += waited

    def end_epoch(self) -> None:
        self._end = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """Return the seconds since the epoch's start, up to its end."""
        return (self._end or time.perf_counter()) - self._start

    def totals(self) -> tuple[int, float]:
        """Return how many batches the consumer got since the loader was made, and for how many seconds it waited."""
        return self._former_batches + self._batches, self._former_waited + self._waited

    def summary(self) -> str:
        """Describe the epoch so far in a sentence: which part of its time the loop waited, and which stage was busiest.

        Where a GPU decodes, that is the part for which the GPU waited. Empty before the first batch.
        """
        elapsed = self.elapsed
        if not self._batches or elapsed <= 0:
            return ""
        waited = min(1.0, self._waited / elapsed) if self.gpu_wait_share is None else self.gpu_wait_share
        busiest = max(self.meters, key=lambda meter: meter.busy_share(elapsed))
        return f"the step waited {waited:.0%} on data; {busiest.name} is busy {busiest.busy_share(elapsed):.0%}"

    def read(self) -> dict[str, Any]:
        """Report the epoch so far: its batches, seconds and waits, and `Meter.read` of each stage."""
        elapsed = self.elapsed
        return {
            "epoch": self.epoch,
            "batches": self._batches,
            "elapsed_s": round(elapsed, 4),
            "consumer_wait_s": round(self._waited, 4),
            **({} if self.gpu_wait_share is None else {"gpu_wait_share": round(self.gpu_wait_share, 4)}),
            "stages": {meter.name: meter.read(elapsed) for meter in self.meters},
        }
