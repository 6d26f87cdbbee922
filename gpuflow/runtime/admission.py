"""How many batches may exist at once: an ordered semaphore that GPU events can release."""

from __future__ import annotations

import queue
import threading
import time
from contextlib import suppress
from typing import Protocol

from gpuflow.runtime.threads import StopFlag

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02
"""Seconds between two queries of whether a batch is done, each of which takes the interpreter from the training."""
_LONGEST_WAIT, _WAITS = 0.1, 8
"""For the running mean of waits: the longest wait that counts, in seconds, and the number of waits averaged."""


class Completion(Protocol):
    """Something that is done at some time, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether it is done."""


class Admission:
    """Ordered semaphore: admits batch n once fewer than `capacity` of the batches before it are in flight.

    Batches are admitted in order, whichever thread comes first: a later batch that took the place of an earlier one
    would wait for it forever. `release` is one call of a queue, which a Ctrl-C cannot interrupt halfway; only threads
    that receive no signals should call `acquire`.

    capacity: batches in flight. spare: how far `grow` can raise that.
    """

    def __init__(self, capacity: int, spare: int = 0) -> None:
        self._places: queue.SimpleQueue[Completion | None] = queue.SimpleQueue()
        self._spare: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._change = threading.Condition()
        self._admitted, self._watched = 0, False
        self.stop = StopFlag()
        """Set once this is closed."""
        self._usual_wait = 0.0
        for _ in range(capacity):
            self.release()
        for _ in range(spare):
            self._spare.put(None)

    def acquire(self, number: int) -> bool:
        """Wait until batch `number` is admitted. False once this is closed, as it always is at the end of an epoch."""
        with self._change:
            while self._admitted <= number and not self.stop:
                if self._watched:
                    self._change.wait()
                else:
                    self._watch()
        return not self.stop

    def _watch(self) -> None:
        """Wait for one more place for all waiting threads. The lock is held before and after, not while waiting.

        It queries at half of the time that a wait usually takes, then at half of the rest, and so on.
        """
        self._watched = True
        self._change.release()
        try:
            completion, begun = self._places.get(), time.monotonic()
            while completion is not None and not completion.query() and not self.stop:
                left = self._usual_wait - (time.monotonic() - begun)
                time.sleep(min(max(left / 2, _SHORTEST_PAUSE), _LONGEST_PAUSE))
            self._usual_wait += (min(time.monotonic() - begun, _LONGEST_WAIT) - self._usual_wait) / _WAITS
        finally:
            self._change.acquire()
            self._watched = False
            self._admitted += 1
            self._change.notify_all()

    def release(self, completion: Completion | None = None) -> None:
        """A batch is not in flight any more: now, or once `completion` is done."""
        self._places.put(completion)

    def grow(self) -> None:
        """Raise the capacity by one for good, if there is a spare place left."""
        with suppress(queue.Empty):
            self._places.put(self._spare.get_nowait())

    @property
    def closed(self) -> bool:
        return bool(self.stop)

    def close(self) -> None:
        """Refuse all threads that wait now or call `acquire` later."""
        self.stop.set()
        self.release()
