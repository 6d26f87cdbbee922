"""Limits on concurrent nvJPEG calls, tested with a slow fake library."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

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

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.stream = Stream(7)
        self.branches: list[Stream] = []
        self.joined: list[Stream] = []

    def new_stream(self) -> Stream:
        self.branches.append(Stream(5))
        return self.branches[-1]

    def queued(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def pinned(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

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
    states = 2  # one with which the backend is found, one for calls of eight images
    assert (library.most, library.made, library.streams) == (1, states, {7}), (
        "the GPU does not wait: one call at a time"
    )
    decoders.set_starved(True)
    work(decoders)
    assert (library.most, library.made) == (most, hurried * states)
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
    monkeypatch.setattr("gpuflow.execute.nvjpeg_decoders.CALL_SECONDS", 0.05)
    substitutes: tuple[Any, Any] = (DeviceStream(), SlowLibrary())
    decoders = NvjpegDecoderPool(*substitutes, "rgb", "hardware", count=no_engines)
    named = pytest.raises(LoaderTimeout, match=r"nvJPEG did not end a call within 0\.05 s")
    with decoders.acquire(), named, decoders.acquire():
        pass


class ForgetfulLibrary(SlowLibrary):
    """Has no memory for a second state."""

    def create_state(self, *arguments: Any) -> int:
        return 5 if self.made > 1 else 0

    def decode(self, *arguments: Any) -> int:
        return 0

    def initialize(self, *arguments: Any) -> int:
        return 0


def test_without_memory_for_one_more_state_another_one_decodes() -> None:
    substitutes: tuple[Any, Any] = (DeviceStream(), ForgetfulLibrary())
    decoders = NvjpegDecoderPool(*substitutes, "rgb", "hardware", count=no_engines)
    work(decoders)
    assert substitutes[1].made == 2, "it is tried once"
