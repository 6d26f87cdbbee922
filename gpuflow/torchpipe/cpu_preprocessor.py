"""Preprocessing on many cores where a model is served: a batch's images decoded by processes, by `CpuRunner` there too.

A thread that decodes needs the interpreter a dozen times an image, from the threads that do the same, that launch the
model and that answer. Where there are more than a few, processes do more (measured in experiments/many_cores). They get
the encoded bytes and give the pixels through memory that they share with this process.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.errors import BadSampleError, DecoderError
from gpuflow.execute.cpu import CpuRunner, CpuRunners
from gpuflow.execute.cpu_workers import READY, Told, faults_of, open_runner, prepare, slots_in, told
from gpuflow.pipeline.image_spec import STORAGE, as_batch, slot_shape
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.stage import Keys
from gpuflow.runtime.buffers import BytePool, SlotPool, shared
from gpuflow.runtime.threads import use_torch_threads
from gpuflow.runtime.worker_pool import Channel, Crew, Peer
from gpuflow.sources import Payload

__all__ = ["CpuPreprocessor", "prepare", "work"]

_LOG = logging.getLogger(__name__)
_START_SECONDS, _LOOK_SECONDS = 30.0, 0.02
_KEPT_BATCHES = 4


class CpuPreprocessor:
    """Encoded images to images, several at a time. Any thread may call any method.

    Waits until the processes have started, for half a minute at most. What no process can do just now, the caller's
    thread does.

    Args:
        program: of the block `serve`. batch: how many files `run` gets at most. processes: to start, one at least.
    """

    def __init__(self, program: Program, *, batch: int, processes: int) -> None:
        self._program = program
        self._runners = CpuRunners(program)
        self._bytes = BytePool(make=shared)
        dtype = np.dtype(STORAGE[program.result.dtype])
        self._slots = SlotPool((batch, *slot_shape(program.result)), dtype, keep=_KEPT_BATCHES, make=shared)
        self._crew = Crew()
        try:
            starting = self._crew.hire(__name__, connections=[1] * processes, setup=pickle.dumps(program))
        except Exception as error:  # whatever a stage raises when it is pickled
            _LOG.warning("no process to decode with: %s; threads decode instead", error)
        else:
            self._welcome(starting)

    def _welcome(self, starting: Sequence[Channel]) -> None:
        deadline = time.monotonic() + _START_SECONDS
        for channel in starting:
            try:
                while not channel.answered() and time.monotonic() < deadline:
                    time.sleep(_LOOK_SECONDS)
                word = channel.answer() if channel.answered() else f"it did not start within {_START_SECONDS:g} s"
            except (OSError, EOFError) as error:
                word = repr(error)
            if word == READY:
                self._crew.give(channel)
            elif self._crew.lose(channel):
                _LOG.warning("a process cannot decode: %s; threads decode instead", word)

    def run(self, files: Sequence[bytes]) -> list[torch.Tensor | BadSampleError]:
        """For each file its image [1, C, H, W], or why it is bad. The images lie side by side."""
        payload = Payload.of(files, self._bytes.take)
        slots = self._slots.take(len(files))
        here, asked = list[slice](), list[tuple[Channel, slice]]()
        for part in _parts(len(files), max(1, len(self._crew))):
            channel = self._crew.take()
            if channel is not None and self._ask(channel, payload, part, slots):
                asked.append((channel, part))
            else:
                here.append(part)
        faults: list[BadSampleError | None] = [None] * len(files)
        try:
            for part in here:
                faults[part] = self._run(payload, part, slots)
            while asked:
                channel, part = asked.pop()
                answer = self._answer(channel)
                faults[part] = answer if answer is not None else self._run(payload, part, slots)
        except BaseException:
            for channel, _ in asked:
                self._crew.lose(channel)  # nobody will take their answers
            raise
        self._bytes.give(payload.buffer)
        batch = as_batch(slots, self._program.result)
        return [batch[i : i + 1] if fault is None else fault for i, fault in enumerate(faults)]

    def check(self) -> None:
        """Have each process that is idle, and this one, decode gpuflow's own test image. One that fails is ended.

        Raises DecoderError where this process fails.
        """
        for channel in list(iter(self._crew.take, None)):
            try:
                channel.send(None)
                channel.answer()
            except (OSError, EOFError) as error:
                self._lose(channel, error)
            else:
                self._crew.give(channel)
        self._runners.check()

    def _ask(self, channel: Channel, payload: Payload, part: slice, slots: NDArray[Any]) -> bool:
        try:
            channel.send((part.start, payload.offsets[part], payload.sizes[part]))
            return channel.share(payload.buffer) and channel.share(slots)
        except (OSError, EOFError) as error:
            self._lose(channel, error)
            return False

    def _answer(self, channel: Channel) -> list[BadSampleError | None] | None:
        """What became of a part; None where its process is gone."""
        try:
            answer: list[Told] | None = channel.answer()
        except (OSError, EOFError) as error:
            self._lose(channel, error)
            return None
        self._crew.give(channel)
        return None if answer is None else faults_of(answer)

    def _lose(self, channel: Channel, error: BaseException) -> None:
        if self._crew.lose(channel):
            _LOG.warning("a process that decodes has ended: %r; threads decode instead", error)

    def _run(self, payload: Payload, part: slice, slots: NDArray[Any]) -> list[BadSampleError | None]:
        """A part of the files on this thread."""
        use_torch_threads(1)
        samples = [payload.sample(i) for i in range(part.start, part.stop)]
        return self._runners.run(samples, _keys(len(samples)), slots[part])

    def close(self) -> None:
        """End the processes, and let go of the memory."""
        self._crew.close()
        self._bytes.clear()
        self._slots.clear()
        self._runners.clear()


def _parts(count: int, most: int) -> Iterator[slice]:
    """Neighbours in so many parts at most, whose lengths differ by one at most."""
    parts = min(count, most)
    ends = [count * (number + 1) // parts for number in range(parts)]
    return itertools.starmap(slice, itertools.pairwise([0, *ends]))


def _keys(count: int) -> Keys:
    """Nothing is drawn where a model is served."""
    return Keys(0, 0, np.zeros(count, np.int64))


# --- in the process ---------------------------------------------------------------------------------------------------


def work(peer: Peer, program: Program | str) -> None:
    """Decodes what it is told to until nobody tells it any more."""
    if isinstance(program, str):
        peer.send(program)
        return
    runner = open_runner(peer, program)
    with suppress(DecoderError):  # the end of this process
        while runner is not None:
            _answer(peer, program, runner)


def _answer(peer: Peer, program: Program, runner: CpuRunner) -> None:
    """One request: files to decode, or None for gpuflow's test image. Raises DecoderError."""
    request = peer.recv()
    if request is None:
        runner.check()
        peer.send(None)
        return
    start, offsets, sizes = request
    encoded, pixels = peer.memory(), peer.memory()
    assert encoded is not None and pixels is not None
    samples = [encoded[offset : offset + length] for offset, length in zip(offsets, sizes, strict=True)]
    try:
        answer = told(runner.run(samples, _keys(len(samples)), slots_in(pixels, program, start, len(samples))))
    except DecoderError:
        raise
    except Exception:  # it will be raised again where it is seen, by the thread that does this instead
        answer = None
    peer.send(answer)
