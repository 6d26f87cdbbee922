"""A running epoch: the pipeline that runs it, the thread that ends it, and waiting for its batches."""

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
from dataclasses import dataclass
from typing import Protocol

from gpuflow.loader.batch import Assembly
from gpuflow.runtime.admission import Admission, Completion
from gpuflow.runtime.threads import DaemonPool, QuickSwitching

START_SECONDS, STOP_SECONDS = 30.0, 3.0
_LOG = logging.getLogger(__name__)


class _Stoppable(Protocol):
    """A pipeline of SPDL."""

    def stop(self, *, timeout: float | None = None) -> None:
        """Raises TimeoutError."""


@dataclass(frozen=True, slots=True)
class RunningPipeline:
    """The pipeline of one epoch and its threads.

    finished: its batches in order, and None to wake the consumer. begun: set once SPDL has asked for the first chunk.
    admission: of batches into memory. ahead: of batches whose share the CPU may begin. set_gpu_wait: is called with the
    part of its time for which the consumer's GPU waits for batches; None without such a GPU.
    """

    pipeline: _Stoppable
    finished: queue.SimpleQueue[Assembly | None]
    pools: Sequence[DaemonPool]
    begun: threading.Event
    admission: Admission
    ahead: Admission
    set_gpu_wait: Callable[[float], None] | None
    switching: QuickSwitching | None

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
            if self.switching is not None:
                self.switching.end()
        return all(ended)


class EpochRun:
    """The pipeline of one epoch, from its start to its end. Dropping this, or `request_stop`, ends it.

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
        """The next batch in order. It stays in flight until `release`. Raises TimeoutError after `timeout` seconds."""
        try:
            return self._running.finished.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None

    def set_gpu_wait(self, share: float) -> None:
        """Set the share of its time for which the consumer's GPU waits for batches, 0 to 1."""
        if self._running.set_gpu_wait is not None:
            self._running.set_gpu_wait(share)

    def release(self, completion: Completion | None = None) -> None:
        """A batch is not in flight any more: now, or once `completion` is done."""
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
    """The thread of an epoch: starts its pipeline, waits until something is put in `end`, and ends it."""
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
