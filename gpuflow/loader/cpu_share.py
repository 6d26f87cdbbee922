"""How large a part of each batch the CPU decodes next to the GPU's engines, so that idle cores add to their speed.

It is a part of each batch, not a batch from time to time, so that neither waits long for the slower one: the engines
take a batch's first rows, the CPU the others, a few at a time and some batches ahead.
"""

from __future__ import annotations

import time

from gpuflow.config import Config
from gpuflow.config.resources import share_threads_of

_SMOOTHING = 1 / 16
"""The weight of the newest batch. A change takes about ten batches to show: those that were begun before it."""
_LATE_STEP = 1 / 64
"""The fraction by which the part shrinks after a batch that the CPU delayed."""


class Share:
    """How large the part is. While the consumer waits, it moves to where the engines and the CPU need the same time.

    For one thread.

    Args:
        part: to begin with, 0 to 1.
        threads: that decode it.
        adapts: false leaves the part as it is.
    """

    def __init__(self, part: float, *, threads: int, adapts: bool) -> None:
        self.part, self.threads, self.adapts = part, threads, adapts
        self._images, self._seconds = 0.0, 0.0
        self.begin()

    def begin(self) -> None:
        """An epoch begins."""
        self._last: float | None = None

    def rows(self, count: int) -> int:
        """Rows that the CPU decodes of a batch of `count`. One at least is left to the engines."""
        return max(0, min(round(self.part * count), count - 1))

    def update(self, own: int, *, late: bool, wanted: bool, rate: float) -> None:
        """After each batch, of which the engines had `own` rows.

        late: the CPU's rows were the last. wanted: the consumer's GPU has nothing to do without the batch.
        rate: images a second that the CPU's threads would decode if they never waited.
        """
        now, last = time.perf_counter(), self._last
        bound_by_engines = wanted and not late
        self._last = now if bound_by_engines else None
        if not self.adapts:
            return
        if late:
            self.part -= _LATE_STEP * self.part
        elif bound_by_engines and last is not None and rate:
            self._images += own - _SMOOTHING * self._images
            self._seconds += now - last - _SMOOTHING * self._seconds
            if self._seconds:
                engines = self._images / self._seconds
                self.part += _SMOOTHING * (rate / (rate + engines) - self.part)


def cpu_share_of(config: Config, name: str) -> Share | None:
    """What the CPU decodes of each batch next to a GPU's engines, `decode.cpu_share`; None for nothing."""
    part, run = config.any_program(name).decoder.cpu_share, config.run
    return Share(part, threads=share_threads_of(run), adapts=not run.deterministic) if part else None
