"""Limits on concurrent nvJPEG calls, tested with a slow fake library."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpuflow.decode import self_test
from gpuflow.errors import LoaderTimeout
from gpuflow.execute.nvjpeg_decoders import JpegBatch, NvjpegDecoderPool


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

    def record_event(self, *, stream: Stream) -> Stream:
        return stream

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


FRAMES = np.full((4, 3), self_test.SAMPLING, np.int64)


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
    decoders = NvjpegDecoderPool(*substitutes, "rgb", backend)
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
    decoders = NvjpegDecoderPool(*substitutes, "rgb", "hardware")
    switches = iter(range(10_000))
    work(decoders, threads=4, turns=40, between=lambda: decoders.set_starved(next(switches) % 3 == 0))
    assert library.calls == 160
    decoders.set_starved(True)
    library.most = 0
    work(decoders)
    assert library.most == 2


def test_a_call_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuflow.execute.nvjpeg_decoders.CALL_SECONDS", 0.05)
    substitutes: tuple[Any, Any] = (DeviceStream(), SlowLibrary())
    decoders = NvjpegDecoderPool(*substitutes, "rgb", "hardware")
    named = pytest.raises(LoaderTimeout, match=r"nvJPEG did not end a call within 0\.05 s")
    with decoders.acquire(), named, decoders.acquire():
        pass


class Event(Stream):
    """Counts how often it was waited for."""

    waits = 0

    def synchronize(self) -> None:
        Event.waits += 1


def test_a_state_is_not_initialized_while_an_earlier_call_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that failed leaves no number of images behind, and one before it may still be running."""
    library, device_stream = SlowLibrary(), DeviceStream()
    monkeypatch.setattr(device_stream, "record_event", lambda *, stream: Event(9), raising=False)
    statuses = iter([0, 6, 0, 0])
    monkeypatch.setattr(library, "decode", lambda *arguments: next(statuses))
    substitutes: tuple[Any, Any] = (device_stream, library)
    decoders = NvjpegDecoderPool(*substitutes, "rgb", "hardware")
    numbers = np.ones(4, np.uint64)
    with decoders.acquire() as decoder:
        decoder.decode(JpegBatch(numbers, numbers, np.ones((4, 8), np.uint64), FRAMES))
        assert Event.waits == 0
        decoder.decode(JpegBatch(numbers, numbers, np.ones((4, 8), np.uint64), FRAMES))  # fails, then halves
    assert Event.waits == 1
