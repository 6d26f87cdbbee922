"""Chunks that processes read and decode, straight into the slots of a batch.

A thread that decodes needs the interpreter a dozen times an image, a tenth of its time. Where more than a few threads
do, they spend more time on getting it than on images. So a loader with many threads has processes beside it and hands
chunks to them once they have started; until then, and where they cannot run the pipeline, its own threads do the work.
Either way it is `CpuRunner`'s, and the pixels are the same.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from gpuflow.errors import BadSampleError, DecoderError
from gpuflow.execute.cpu import CpuRunner, CpuRunners
from gpuflow.execute.cpu_workers import READY, Told, faults_of, open_runner, prepare, slots_in, told
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.stage import Keys
from gpuflow.runtime.buffers import BytePool
from gpuflow.runtime.worker_pool import Channel, Crew, Peer
from gpuflow.sources import Payload, Source

__all__ = ["Outcome", "Workers", "decode", "prepare", "work"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a chunk's samples.

    faults [n]: None, or the stage and the reason. read_bytes, read_s: of the source. cpu_s: processor seconds in all.
    """

    faults: list[Told]
    read_bytes: int
    read_s: float
    cpu_s: float

    def errors(self) -> list[BadSampleError | None]:
        return faults_of(self.faults)


def decode(
    runner: CpuRunner | CpuRunners, payload: Payload, keys: Keys, slots: NDArray[Any]
) -> list[BadSampleError | None]:
    """A payload's samples into their slots, as `CpuRunner.run`; an unreadable one is bad without further ado."""
    faults = runner.run([payload.sample(i) for i in range(len(payload))], keys, slots)
    for i, error in enumerate(payload.errors):
        if error is not None:
            faults[i] = BadSampleError("read", error)
    return faults


class Workers:
    """Processes for one loader. Any thread may call any method.

    Args:
        threads: chunks at a time, of all of them together. processes: that share those.
        idle: they get what nobody else wants of the cores, and give it back at once.
    """

    def __init__(self, program: Program, source: Source, *, threads: int, processes: int, idle: bool = False) -> None:
        self._crew, self._lock = Crew(), threading.Lock()
        self._starting: list[Channel] = []
        self._refusals: set[str] = set()
        try:
            setup = pickle.dumps((source, program, idle), pickle.HIGHEST_PROTOCOL)
            shares = [len(range(number, threads, processes)) for number in range(processes)]
            self._starting += self._crew.hire(__name__, connections=shares, setup=setup)
        except Exception as error:  # whatever a source or a stage raises when it is pickled
            _LOG.warning("no process to decode with: %s; threads decode instead", error)

    def run(self, indices: Sequence[int], keys: Keys, slots: NDArray[Any], start: int) -> Outcome | None:
        """Read and decode samples into slots [start, start + n) of a batch's; None where no process can just now.

        Then the slots hold anything, and the caller has to do it. Raises what ends the caller's wait only.
        """
        channel = self._free()
        if channel is None:
            return None
        try:
            channel.send((indices, keys, start))
            outcome: Outcome | None = channel.answer() if channel.share(slots) else None
        except (OSError, EOFError) as error:
            self._lose(channel, error)
            return None
        except BaseException as error:
            self._lose(channel, error)  # in the middle of an answer that nobody will take
            raise
        self._crew.give(channel)
        return outcome

    def ready(self) -> bool:
        """Whether there is a process that can be asked."""
        self._look()
        return self.counts()["at_work"] > 0

    def counts(self) -> dict[str, int]:
        """Processes `at_work`, and `starting`: not yet ready for chunks."""
        starting = {channel.process for channel in list(self._starting)}
        return {"at_work": len(self._crew) - len(starting), "starting": len(starting)}

    def _free(self) -> Channel | None:
        """A channel to a thread that waits for work."""
        self._look()
        return self._crew.take()

    def _look(self) -> None:
        """Which of those that were starting can be asked by now?"""
        if self._starting and self._crew.here:
            with self._lock:
                for channel in filter(Channel.answered, list(self._starting)):
                    self._starting.remove(channel)
                    self._welcome(channel)

    def _welcome(self, channel: Channel) -> None:
        try:
            word = channel.answer()
        except (OSError, EOFError) as error:
            self._lose(channel, error)
            return
        if word == READY:
            self._crew.give(channel)
        elif self._crew.lose(channel) and word not in self._refusals:  # all mostly have the same reason
            self._refusals.add(word)
            _LOG.warning("a process cannot decode: %s; threads decode instead", word)

    def _lose(self, channel: Channel, error: BaseException) -> None:
        if self._crew.lose(channel):
            _LOG.warning("a process that decodes has ended: %r; threads decode instead", error)

    def close(self) -> None:
        """End the processes, whatever they are at."""
        self._crew.close()
        with self._lock:
            for channel in self._starting:
                channel.close()
            self._starting.clear()


# --- in the process ---------------------------------------------------------------------------------------------------


Setup = tuple[Source, Program, bool]


def work(peer: Peer, prepared: Setup | str) -> None:
    """Reads and decodes what it is told to until nobody tells it any more."""
    if isinstance(prepared, str):
        peer.send(prepared)
        return
    source, program, idle = prepared
    if idle:
        with suppress(OSError):  # in a container that does not let us
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread
    runner, pool = open_runner(peer, program), BytePool()
    while runner is not None:
        indices, keys, start = peer.recv()
        memory = peer.memory()
        if memory is None:
            continue
        slots = slots_in(memory, program, start, len(indices))
        try:
            outcome = _run(source, runner, pool, indices, keys, slots)
        except DecoderError:
            return  # nobody asks this process any more
        except Exception:  # it will be raised again where it is seen, by the thread that does this instead
            outcome = None
        peer.send(outcome)


def _run(
    source: Source, runner: CpuRunner, pool: BytePool, indices: Sequence[int], keys: Keys, slots: NDArray[Any]
) -> Outcome:
    begun, cpu = time.perf_counter(), time.thread_time()
    payload = source.read(indices, pool.take)
    read_s = time.perf_counter() - begun
    faults = decode(runner, payload, keys, slots)
    pool.give(payload.buffer)
    return Outcome(told(faults), sum(payload.sizes), read_s, time.thread_time() - cpu)
