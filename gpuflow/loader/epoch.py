"""Runs one epoch: its pipeline, the thread that ends it, how many batches are in flight, and waiting for them."""

from __future__ import annotations

import _thread
import atexit
import functools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from gpuflow.loader.batch import Assembly
from gpuflow.runtime.threads import DaemonPool, QuickSwitching, StopFlag

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02
"""Seconds between two queries of whether a batch is done, each of which takes the interpreter from the training."""
_LONGEST_WAIT, _WAITS = 0.1, 8
"""For the running mean of waits: the longest wait that counts, in seconds, and the number of waits averaged."""


class Completion(Protocol):
    """Says when something is done, as a `torch.cuda.Event` does."""

    def query(self) -> bool:
        """Return True once it is done."""


class Admission:
    """Admits batch n once fewer than `capacity` of the batches before it are in flight: an ordered semaphore.

    Batches are admitted in order, whichever thread comes first: a later batch that took the place of an earlier one
    would wait for it forever. `release` is one call of a queue, which a Ctrl-C cannot interrupt halfway; only threads
    that receive no signals should call `acquire`.

    capacity: batches in flight. spare: how far `grow` can raise that.

    Examples:
        >>> admission = Admission(1)
        >>> admission.acquire(0)
        True
        >>> admission.release()  # batch 0 is not in flight any more
        >>> admission.acquire(1)
        True
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
        """Take a batch out of those in flight: now, or once `completion` is done."""
        self._places.put(completion)

    def grow(self) -> None:
        """Raise the capacity by one for good, if there is a spare place left."""
        with suppress(queue.Empty):
            self._places.put(self._spare.get_nowait())

    def close(self) -> None:
        """Refuse all threads that wait now or call `acquire` later."""
        self.stop.set()
        self.release()


START_SECONDS, STOP_SECONDS = 30.0, 3.0
_LOG = logging.getLogger(__name__)


class _Stoppable(Protocol):
    """Stands for a pipeline of SPDL."""

    def stop(self, *, timeout: float | None = None) -> None:
        """End the pipeline. Raises TimeoutError."""


@dataclass(frozen=True, slots=True)
class RunningPipeline:
    """Holds the pipeline of one epoch and its threads.

    finished: its batches in order, and None to wake the consumer. begun: set once SPDL has asked for the first chunk.
    admission: of batches into memory. ahead: of batches whose share the CPU may begin.
    """

    pipeline: _Stoppable
    finished: queue.SimpleQueue[Assembly | None]
    pools: Sequence[DaemonPool]
    begun: threading.Event
    admission: Admission
    ahead: Admission
    switching: QuickSwitching

    def stop(self, timeout: float) -> bool:
        """End the pipeline and its threads, and wait for running operations. Returns whether all ended in time."""
        deadline = time.monotonic() + timeout
        self.admission.close()
        self.ahead.close()
        self.begun.wait(timeout)  # SPDL warns of coroutines that were never awaited when it is stopped before
        try:
            self.pipeline.stop(timeout=timeout)
        except TimeoutError:
            return False
        finally:
            ended = [pool.end(max(0.0, deadline - time.monotonic())) for pool in self.pools]
            self.switching.end()
        return all(ended)


class EpochRun:
    """Runs the pipeline of one epoch, from its start to its end. Dropping this, or `request_stop`, ends it.

    A separate thread starts and ends the pipeline: a Ctrl-C in the middle of either, or several in a row, would
    leave threads behind.

    Raises the error that keeps the pipeline from starting.
    """

    def __init__(self, begin: Callable[[], RunningPipeline], culprit: Callable[[], str]) -> None:
        begun: queue.SimpleQueue[RunningPipeline | BaseException] = queue.SimpleQueue()
        end: queue.SimpleQueue[object] = queue.SimpleQueue()
        # Neither callback runs a Python frame, where a Ctrl-C could be raised. The thread keeps the reference.
        collected = weakref.ref(self, end.put)
        self.request_stop: Callable[[], None] = functools.partial(end.put, None)
        """Ends the epoch without waiting until it has ended."""
        self.owner = threading.Thread(
            target=_run_epoch, args=(begin, culprit, begun, end, collected), name="gpuflow_epoch", daemon=True
        )
        try:
            _thread.start_new_thread(_start, (self.owner, begun))
            running = begun.get(timeout=2 * START_SECONDS)
        except queue.Empty:
            self.request_stop()
            raise TimeoutError(f"its threads did not start within {2 * START_SECONDS:g} s") from None
        except BaseException:
            # A Ctrl-C. Its traceback may keep this object until the interpreter waits for the pipeline's thread.
            self.request_stop()
            raise
        if isinstance(running, BaseException):
            if self.owner.ident is not None:
                self.owner.join(2 * STOP_SECONDS)
            raise running
        self._running = running

    def stop(self) -> None:
        """End the epoch and wait for that, within limits; running operations are finished."""
        self.request_stop()
        self.owner.join(2 * STOP_SECONDS)

    def wake(self) -> None:
        """Have the thread that waits in `get`, if there is one, return None."""
        self._running.finished.put(None)

    def get(self, timeout: float) -> Assembly | None:
        """Return the next batch in order. It stays in flight until `release`. Raises TimeoutError after `timeout`
        seconds."""
        try:
            return self._running.finished.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None

    def grow(self) -> None:
        """Let one more batch be in flight, if there is a spare place left."""
        self._running.admission.grow()

    def release(self, completion: Completion | None = None) -> None:
        """Take a batch out of those in flight: now, or once `completion` is done."""
        self._running.admission.release(completion)


def _start(owner: threading.Thread, begun: queue.SimpleQueue[RunningPipeline | BaseException]) -> None:
    """Start a thread. Call this on another thread than the main thread.

    On the main thread a Ctrl-C can interrupt `Thread.start`. That leaves locks held, or the new thread forever in the
    state of being started.
    """
    try:
        owner.start()
    except BaseException as error:
        begun.put(error)


def _run_epoch(
    begin: Callable[[], RunningPipeline],
    culprit: Callable[[], str],
    begun: queue.SimpleQueue[RunningPipeline | BaseException],
    end: queue.SimpleQueue[object],
    collected: weakref.ref[EpochRun],
) -> None:
    """Run an epoch on its thread: start its pipeline, wait until something is put in `end`, and end it."""
    owner, pid = threading.current_thread(), os.getpid()

    def stop_at_exit() -> None:
        if os.getpid() == pid:  # and not a forked child, which has no such thread
            end.put(None)
            owner.join(2 * STOP_SECONDS)

    atexit.register(stop_at_exit)
    try:
        running = begin()
    except BaseException as error:
        begun.put(error)
    else:
        begun.put(running)
        end.get()
        if not running.stop(STOP_SECONDS):
            _LOG.warning("a thread stays behind: %s", culprit())
    finally:
        atexit.unregister(stop_at_exit)
