"""Limits on concurrent nvJPEG calls, tested with a slow fake library."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpuflow.errors import LoaderTimeout
from gpuflow.execute.nvjpeg_decoders import JpegBatch, NvjpegDecoderPool
from gpuflow.loader.epoch import _LATE_BATCHES, EpochRun, RunningPipeline
from gpuflow.runtime.admission import Admission


class Stream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle

    def synchronize(self) -> None:
        pass


class DeviceStream:
    """Replaces `DeviceStream`, and records new streams and streams that were waited for."""

    def __init__(self) -> None:
        self.stream = Stream(7)
        self.branches: list[Stream] = []
        self.joined: list[Stream] = []

    def new_stream(self) -> Stream:
        self.branches.append(Stream(5))
        return self.branches[-1]

    def wait_stream(self, stream: Stream) -> None:
        if stream is not self.stream:
            self.joined.append(stream)


class SlowLibrary:
    """Counts concurrent calls, all calls, and the streams that they use."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self.most, self.calls, self.made = 0, 0, 0
        self.streams: set[int] = set()

    def create(self, *arguments: Any) -> int:
        self.made += 1
        return 0

    def create_state(self, *arguments: Any) -> int:
        return 0

    initialize = create_state

    def decode(self, handle: Any, state: Any, data: int, lengths: int, images: int, stream: int) -> int:
        with self._lock:
            self._inside += 1
            self.calls += 1
            self.most = max(self.most, self._inside)
            self.streams.add(stream)
        time.sleep(0.002)
        with self._lock:
            self._inside -= 1
        return 0


FRAMES = np.ones((4, 3), np.int64)


def no_engines(decoder: Any) -> int:
    """The fake library decodes nothing, so no engines can be counted."""
    return 0


def work(
    decoders: NvjpegDecoderPool, threads: int = 3, turns: int = 12, between: Callable[[], None] = lambda: None
) -> None:
    faults: list[BaseException] = []

    def one() -> None:
        try:
            for _ in range(turns):
                between()
                with decoders.acquire() as decoder:
                    numbers = np.ones(4, np.uint64)
                    assert decoder.decode(JpegBatch(numbers, numbers, np.ones((4, 8), np.uint64), FRAMES)).all()
        except BaseException as fault:
            faults.append(fault)

    running = [threading.Thread(target=one) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(30)
    assert not faults


@pytest.mark.parametrize(("backend", "hurried", "most"), [("hardware", 2, 2), ("cuda", 1, 1)])
def test_a_second_concurrent_call_runs_only_while_the_gpu_waits(backend: str, hurried: int, most: int) -> None:
    library, device_stream = SlowLibrary(), DeviceStream()
    substitutes: tuple[Any, Any] = (device_stream, library)
    decoders = NvjpegDecoderPool(*substitutes, "rgb", backend, count=no_engines)
    work(decoders)
    assert (library.most, library.made, library.streams) == (1, 1, {7}), "the GPU does not wait: one call at a time"
    decoders.set_starved(True)
    work(decoders)
    assert (library.most, library.made) == (most, hurried)
    assert len(device_stream.branches) == hurried - 1, "it has a stream of its own"
    assert bool(device_stream.joined) == (hurried == 2), "what is queued later waits for it"
    decoders.set_starved(False)
    library.most = 0
    work(decoders)
    assert library.most == 1


def test_switching_starvation_on_and_off_loses_no_place() -> None:
    library = SlowLibrary()
    substitutes: tuple[Any, Any] = (DeviceStream(), library)
    decoders = NvjpegDecoderPool(*substitutes, "rgb", "hardware", count=no_engines)
    switches = iter(range(10_000))
    work(decoders, threads=4, turns=40, between=lambda: decoders.set_starved(next(switches) % 3 == 0))
    assert library.calls == 160
    decoders.set_starved(True)
    library.most = 0
    work(decoders)
    assert library.most == 2


def test_a_call_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuflow.execute.nvjpeg_decoders._CALL_SECONDS", 0.05)
    substitutes: tuple[Any, Any] = (DeviceStream(), SlowLibrary())
    decoders = NvjpegDecoderPool(*substitutes, "rgb", "hardware", count=no_engines)
    named = pytest.raises(LoaderTimeout, match=r"nvJPEG did not end a call within 0\.05 s")
    with decoders.acquire(), named, decoders.acquire():
        pass


class Idle:
    """Replaces SPDL's pipeline and the GPU runner."""

    def __init__(self) -> None:
        self.starved: list[bool] = []

    def stop(self, *, timeout: float | None = None) -> None:
        pass

    def set_starved(self, starved: bool) -> None:
        self.starved.append(starved)


class Consumer:
    """Requests batches from a run; each is ready immediately or after a delay."""

    def __init__(self) -> None:
        self._finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._idle: Any = Idle()
        begun = threading.Event()
        begun.set()
        idle, finished = self._idle, self._finished
        self.run = EpochRun(
            lambda: RunningPipeline(idle, finished, (), begun, Admission(2), Admission(1), idle.set_starved, None),
            lambda: "nobody",
        )

    def get(self, starved: Callable[[], bool] | None, *, late: bool = True) -> list[bool]:
        """The values that the machinery received meanwhile."""
        self._idle.starved.clear()
        if not late:
            self._finished.put("a batch")
        else:
            threading.Timer(0.03, self._finished.put, ["a batch"]).start()
        batch: Any = self.run.get(10.0, starved)
        assert batch == "a batch"
        return list(self._idle.starved)


def test_the_machinery_hurries_once_the_gpu_has_waited_for_many_batches() -> None:
    consumer = Consumer()
    assert consumer.get(lambda: True, late=False) == [], "the consumer did not wait"
    for _ in range(_LATE_BATCHES):
        assert True not in consumer.get(lambda: True), "the first batches of an epoch are late in any case"
    values = consumer.get(lambda: True)
    assert values[0] is True and values[-1] is False, "the consumer no longer waits"
    answers = iter([False, False, True])
    assert consumer.get(lambda: next(answers, True))[:4] == [False, False, True, True]
    assert consumer.get(None) == [], "no GPU"
    for _ in range(2):
        assert True not in consumer.get(lambda: False), "the GPU has work"
    for _ in range(2):
        assert consumer.get(lambda: True, late=False) == []
    assert True not in consumer.get(lambda: True), "it has not waited lately"
    consumer.run.stop()


def test_a_batch_that_does_not_arrive_times_out() -> None:
    consumer = Consumer()
    for starved in (lambda: True), (lambda: False), None:
        with pytest.raises(TimeoutError):
            consumer.run.get(0.01, starved)
    consumer.run.stop()
