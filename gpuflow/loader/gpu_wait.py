"""How long the consumer's GPU waits for batches, measured by events on the consumer's stream."""

from __future__ import annotations

from collections import deque

import torch

__all__ = ["GpuWait"]

_BATCHES = 16
_FIRST_BATCHES = 8
"""The first batches of an epoch are always late and are not measured."""


class GpuWait:
    """Which part of its time the GPU of one consumer waits for batches, over the last sixteen or so.

    A loop may ask for batches long before the GPU needs them, or launch too little for the GPU. So what counts is the
    time between two events with timing: `asked`, recorded before the consumer waits for a batch, and `begun`, recorded
    after its stream waits for it.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._last: torch.cuda.Event | None = None
        self._waited = self._total = 0.0
        self._count = 0

    def add(self, asked: torch.cuda.Event, begun: torch.cuda.Event) -> None:
        """One more batch."""
        self._marks.append((asked, begun))
        while self._marks and self._marks[0][1].query():  # type: ignore[no-untyped-call]
            asked, begun = self._marks.popleft()
            if self._last is not None:
                self._waited += _milliseconds(asked, begun) - self._waited / _BATCHES
                self._total += _milliseconds(self._last, begun) - self._total / _BATCHES
            self._last, self._count = begun, self._count + 1

    @property
    def share(self) -> float:
        """0 to 1; 0 for the first batches."""
        if self._count < _FIRST_BATCHES or self._total <= 0:
            return 0.0
        return min(1.0, max(0.0, self._waited / self._total))


def _milliseconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    elapsed: float = start.elapsed_time(end)
    return elapsed
