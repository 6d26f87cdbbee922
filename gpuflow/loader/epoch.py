"""One epoch under way: what runs it, who ends it, and how its batches are waited for."""

from __future__ import annotations

import atexit
import functools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from gpuflow.loader.batch import Assembly
from gpuflow.runtime.threads import DaemonPool, Gate, Passing, QuickSwitching

__all__ = ["START_SECONDS", "STOP_SECONDS", "Machinery", "Run"]

START_SECONDS, STOP_SECONDS = 30.0, 3.0
_LOOK_SECONDS = 0.002
_PATIENCE = 8
"""Batches that a GPU has waited for, one after the other, before the machinery hurries. The first of an epoch are late
in any case."""
_LOG = logging.getLogger(__name__)


class _Stoppable(Protocol):
    """A pipeline of SPDL."""

    def stop(self, *, timeout: float | None = None) -> None:
        """Raises TimeoutError."""


@dataclass(frozen=True, slots=True)
class Machinery:
    """What runs one epoch.

    finished: its batches in order. begun: SPDL has asked for the first chunk. gate: how many may exist.
    ahead: how many the CPU may have begun to share in. hurry: told whether the GPU keeps waiting for batches.
    """

    pipeline: _Stoppable
    finished: queue.SimpleQueue[Assembly]
    pools: Sequence[DaemonPool]
    begun: threading.Event
    gate: Gate
    ahead: Gate
    hurry: Callable[[bool], None]
    switching: QuickSwitching | None

    def stop(self, timeout: float) -> bool:
        """End the pipeline and its threads; what is under way is waited for. Returns whether all ended in time."""
        deadline = time.monotonic() + timeout
        self.gate.close()
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


class Run:
    """One epoch's pipeline under way. Letting go of it, on purpose or by dropping it, ends it.

    A thread of its own begins and ends the machinery: a Ctrl-C in the middle of either, or several in a row, would
    leave threads behind.

    Raises whatever keeps it from beginning.
    """

    def __init__(self, begin: Callable[[], Machinery], culprit: Callable[[], str]) -> None:
        begun: queue.SimpleQueue[Machinery | BaseException] = queue.SimpleQueue()
        end: queue.SimpleQueue[object] = queue.SimpleQueue()
        # No frame of Python's, at whose beginning a Ctrl-C could come in between. The owner keeps the reference.
        collected = weakref.ref(self, end.put)
        self.let_go: Callable[[], None] = functools.partial(end.put, None)
        """Ends the epoch, and does not wait for that."""
        self.owner = threading.Thread(
            target=_own, args=(begin, culprit, begun, end, collected), name="gpuflow_epoch", daemon=True
        )
        self.owner.start()
        machinery = begun.get(timeout=2 * START_SECONDS)
        if isinstance(machinery, BaseException):
            raise machinery
        self._machinery = machinery
        self._hunger = 0

    def stop(self) -> None:
        """End the epoch and wait for that, within limits; what is under way comes to its end."""
        self.let_go()
        self.owner.join(2 * STOP_SECONDS)

    def get(self, timeout: float, starved: Callable[[], bool] | None = None) -> Assembly:
        """The next batch in order. It takes a place of the gate, which `leave` frees.

        starved: whether a GPU has nothing to do without it. Asked while there is none. Once that has been so for
            several batches, the machinery hurries.

        Raises TimeoutError after so many seconds.
        """
        finished = self._machinery.finished
        try:
            if starved is None:
                return finished.get(timeout=timeout)
            if finished.empty():
                return self._wait(timeout, starved)
            self._hunger = max(0, self._hunger - 1)
            return finished.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None

    def _wait(self, timeout: float, starved: Callable[[], bool]) -> Assembly:
        machinery, deadline = self._machinery, time.monotonic() + timeout
        hungry = False
        try:
            while (left := deadline - time.monotonic()) > _LOOK_SECONDS:
                starving = starved()
                hungry = hungry or starving
                machinery.hurry(starving and self._hunger >= _PATIENCE)
                with suppress(queue.Empty):
                    return machinery.finished.get(timeout=_LOOK_SECONDS)
            return machinery.finished.get(timeout=max(0.0, left))
        finally:
            machinery.hurry(False)
            self._hunger = min(2 * _PATIENCE, self._hunger + 1) if hungry else max(0, self._hunger - 1)

    def leave(self, passing: Passing | None = None) -> None:
        """A batch is not needed any more: now, or once that has come to pass."""
        self._machinery.gate.leave(passing)


def _own(
    begin: Callable[[], Machinery],
    culprit: Callable[[], str],
    begun: queue.SimpleQueue[Machinery | BaseException],
    end: queue.SimpleQueue[object],
    collected: weakref.ref[Run],
) -> None:
    """The life of an epoch, on its owner's thread. It ends when something is put in `end`."""
    owner = threading.current_thread()

    def leave() -> None:
        end.put(None)
        owner.join(2 * STOP_SECONDS)

    atexit.register(leave)
    try:
        machinery = begin()
    except BaseException as error:
        begun.put(error)
    else:
        begun.put(machinery)
        end.get()
        if not machinery.stop(STOP_SECONDS):
            _LOG.warning("a thread stays behind: %s", culprit())
    finally:
        atexit.unregister(leave)
