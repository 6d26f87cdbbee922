"""Limits on concurrent nvJPEG calls, tested with a slow fake library."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gpuflow.decode.header import TEST_HEIGHT, TEST_JPEG, TEST_SAMPLING, TEST_WIDTH
from gpuflow.errors import DecoderError, LoaderTimeout, SystemFault, is_system_fault
from gpuflow.execute.gpu.nvjpeg_decoders import JpegBatch, NvjpegDecoder, NvjpegDecoderPool
from tests.host_stream import HostStream


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

    device = torch.device("cpu")

    def pinned(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def synchronize(self) -> None:
        pass

    def on_new_stream(self) -> DeviceStream:
        other = DeviceStream()
        other.stream = Stream(5)
        self.branches.append(other.stream)
        return other

    def queued(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def record_event(self, *, stream: Stream) -> Stream:
        return stream

    def wait_stream(self, stream: Stream) -> None:
        if stream is not self.stream:
            self.joined.append(stream)


class SlowLibrary:
    """Counts concurrent calls, all calls, and the streams that they use."""

    version_info: tuple[int, ...] = (13, 3, 2)

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


SAMPLING = TEST_SAMPLING


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
                    assert decoder.decode(JpegBatch(numbers, numbers, np.ones((4, 8), np.uint64), SAMPLING)).all()
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


def test_the_second_decoder_is_freed_when_the_gpu_no_longer_waits_and_made_again_when_it_does() -> None:
    library = SlowLibrary()
    substitutes: tuple[Any, Any] = (DeviceStream(), library)
    decoders = NvjpegDecoderPool(*substitutes, "rgb", "hardware")
    decoders.release_second()
    decoders.set_starved(True)
    work(decoders)
    decoders.release_second()
    second = weakref.ref(decoders._decoders[1])
    assert library.made == 2 and second() is not None, "it is of use"
    decoders.set_starved(False)
    work(decoders)
    for _ in range(2):
        decoders.release_second()
    assert second() is None
    work(decoders)
    assert library.made == 2
    for again in (3, 3):
        decoders.set_starved(True)
        library.most = 0
        work(decoders)
        assert (library.most, library.made) == (2, again)


@pytest.mark.parametrize(("backend", "waits"), [("hardware", 1), ("cuda", 3), ("cuda_few", 3)])
def test_cuda_kernels_have_one_call_at_a_time(backend: str, waits: int) -> None:
    """The engines may have several, unless their state is set up anew for another number of images."""
    stream: Any = HostStream()
    library: Any = SlowLibrary()
    decoder = NvjpegDecoder(stream, library, "rgb", backend, second=False)
    stream.calls.clear()
    for count in (4, 4, 3, 3):
        numbers = np.ones(count, np.uint64)
        assert decoder.decode(JpegBatch(numbers, numbers, np.ones((count, 8), np.uint64), SAMPLING)).all()
    assert stream.calls["synchronize"] == waits


def test_switching_starvation_on_and_off_loses_no_place() -> None:
    library = SlowLibrary()
    substitutes: tuple[Any, Any] = (DeviceStream(), library)
    decoders = NvjpegDecoderPool(*substitutes, "rgb", "hardware")
    switches = iter(range(10_000))

    def switch() -> None:
        turn = next(switches)
        decoders.set_starved(turn % 3 == 0)
        if turn % 4 == 1:
            decoders.release_second()

    work(decoders, threads=4, turns=40, between=switch)
    assert library.calls == 160
    decoders.set_starved(True)
    library.most = 0
    work(decoders)
    assert library.most == 2


def test_a_call_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuflow.execute.gpu.nvjpeg_decoders.CALL_SECONDS", 0.05)
    substitutes: tuple[Any, Any] = (DeviceStream(), SlowLibrary())
    decoders = NvjpegDecoderPool(*substitutes, "rgb", "hardware")
    named = pytest.raises(LoaderTimeout, match=r"nvJPEG did not end a call within 0\.05 s")
    with decoders.acquire(), named, decoders.acquire():
        pass


class FaultyLibrary(SlowLibrary):
    """Fails calls that decode: `fails` gets the number of images and the stream, and returns a status of nvJPEG."""

    def __init__(self, fails: Callable[[int, int], int]) -> None:
        super().__init__()
        self._fails, self.decoded = fails, list[tuple[int, int]]()
        self.most_decoders = 1 << 10

    def create(self, *arguments: Any) -> int:
        super().create()
        return 0 if self.made <= self.most_decoders else NO_MEMORY

    def initialize(self, handle: Any, state: Any, count: int, *arguments: Any) -> int:
        self._count = count
        return 0

    def decode(self, handle: Any, state: Any, data: int, lengths: int, images: int, stream: int) -> int:
        status = self._fails(self._count, stream)
        if not status:
            self.decoded.append((self._count, stream))
        return status


NO_MEMORY = 5
FIRST, SECOND = 7, 5
"""The streams of the two decoders."""


def pool_on(library: SlowLibrary) -> NvjpegDecoderPool:
    substitutes: tuple[Any, Any] = (DeviceStream(), library)
    return NvjpegDecoderPool(*substitutes, "rgb", "hardware")


def four() -> JpegBatch:
    numbers = np.ones(4, np.uint64)
    return JpegBatch(numbers, numbers, np.ones((4, 8), np.uint64), SAMPLING)


def test_without_memory_for_a_call_smaller_ones_decode_its_images(caplog: pytest.LogCaptureFixture) -> None:
    library = FaultyLibrary(lambda count, stream: NO_MEMORY if count > 2 else 0)
    decoders = pool_on(library)
    for _ in range(3):
        assert decoders.decode(four()).all()
    assert set(library.decoded) == {(2, FIRST)}
    (record,) = caplog.records
    assert record.getMessage() == (
        "nvJPEG: nvjpegDecodeBatched returned 5 (allocation failed); "
        "the images of such a call are decoded in smaller calls, or by the CPU"
    )


def many(count: int) -> JpegBatch:
    numbers = np.arange(count).astype(np.uint64)
    return JpegBatch(numbers, numbers, np.ones((count, 8), np.uint64), SAMPLING)


def test_what_is_too_large_for_the_free_memory_is_left_to_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    library = FaultyLibrary(lambda count, stream: 0)
    large = {3, 70}

    def decode(handle: Any, state: Any, data: int, lengths: int, images: int, stream: int) -> int:
        files = np.ctypeslib.as_array((ctypes.c_uint64 * library._count).from_address(data))
        return NO_MEMORY if large & set(files.tolist()) else 0

    library.decode = decode  # type: ignore[method-assign]
    decoders = pool_on(library)
    for _ in range(2):
        assert set(np.flatnonzero(~decoders.decode(many(128))).tolist()) == large
    assert len(caplog.records) == 1


def test_a_gpu_without_memory_is_no_images_fault() -> None:
    decoders = pool_on(FaultyLibrary(lambda count, stream: NO_MEMORY))
    with pytest.raises(SystemFault) as caught:
        decoders.decode(many(128))
    assert is_system_fault(caught.value)
    assert caught.value.strerror == (
        "nvJPEG: nvjpegDecodeBatched returned 5 (allocation failed); free GPU memory, let fewer processes decode on "
        "this GPU, or lower batch.size"
    )
    with pytest.raises(SystemFault):
        decoders.decode(many(9))  # the decoder is free again
    assert not decoders.decode(many(8)).any()


def test_without_memory_for_a_state_it_is_no_images_fault() -> None:
    library = FaultyLibrary(lambda count, stream: 0)
    library.most_decoders = 1
    decoders = pool_on(library)
    other = many(128)._replace(sampling=SAMPLING + 1)
    with pytest.raises(SystemFault, match="nvjpegCreateEx"):
        decoders.decode(other)
    assert decoders.decode(many(128)).all()


def test_a_check_without_memory_is_an_error_of_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(decoder: NvjpegDecoder) -> None:
        decoder._decode_by_halves(many(9))

    monkeypatch.setattr(NvjpegDecoder, "_test_image", fail)
    decoders = pool_on(FaultyLibrary(lambda count, stream: NO_MEMORY))
    text = r"gpuflow's test image: nvJPEG: .*\(allocation failed\)"
    with decoders.acquire() as decoder, pytest.raises(DecoderError, match=text) as caught:
        decoder.check()
    assert is_system_fault(caught.value)


@pytest.mark.parametrize(
    ("backend", "expected"), [("cuda", {128}), ("cuda_few", {1, 2, 3, 5}), ("hardware", {1, 2, 3, 5})]
)
def test_calls_of_cuda_kernels_are_filled_up(backend: str, expected: set[int]) -> None:
    """With copies of one image, written to memory that no other image has; also the halves of a call that fails."""
    bad, counts = 3, set[int]()

    def decode(handle: Any, state: Any, data: int, lengths: int, images: int, stream: int) -> int:
        count = library._count
        counts.add(count)
        files = np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(data)).tolist()
        targets = np.ctypeslib.as_array((ctypes.c_uint64 * (8 * count)).from_address(images)).reshape(-1, 8)
        sizes = np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(lengths)).tolist()
        own = [i for i, file in enumerate(files) if file < 5]
        assert [sizes[i] for i in own] == [files[i] for i in own] and (targets[own] == 1).all()
        for i in set(range(count)) - set(own):
            assert sizes[i] == len(TEST_JPEG) and ctypes.string_at(files[i], sizes[i]) == TEST_JPEG.tobytes()
            assert targets[i, 0] > 5 and targets[i, 4] == TEST_WIDTH * 3
        return 3 if bad in files else 0

    library = FaultyLibrary(lambda count, stream: 0)
    library.decode = decode  # type: ignore[method-assign]
    substitutes: tuple[Any, Any] = (DeviceStream(), library)
    decoders = NvjpegDecoderPool(*substitutes, "rgb", backend)
    assert decoders.decode(many(5)).tolist() == [True, True, True, False, True]
    assert counts == expected


class PartsLibrary(SlowLibrary):
    """Writes a pattern for an image, and for a part of it the same pattern plus `wrong`, or fails with `status`."""

    PATTERN = np.arange(TEST_HEIGHT * TEST_WIDTH * 3).reshape(TEST_HEIGHT, TEST_WIDTH, 3) % 251

    def __init__(self, wrong: int = 0, status: int = 0, version: tuple[int, ...] = (13, 3, 2)) -> None:
        super().__init__()
        self.version_info = version
        self._wrong, self._status, self._region = wrong, status, (0, 0, 0, 0)

    def create_parameters(self, *arguments: Any) -> int:
        return 0

    set_format = destroy_parameters = create_parameters

    def set_region(self, parameters: Any, x: int, y: int, width: int, height: int) -> int:
        self._region = x, y, width, height
        return 0

    def decode(self, handle: Any, state: Any, data: int, lengths: int, images: int, stream: int) -> int:
        self._write(images, self.PATTERN)
        return 0

    def decode_regions(self, *arguments: Any) -> int:
        x, y, width, height = self._region
        self._write(arguments[4], self.PATTERN[y : y + height, x : x + width] + self._wrong)
        return self._status

    def _write(self, images: int, pixels: Any) -> None:
        data = np.ascontiguousarray(pixels, np.uint8)
        target = (ctypes.c_uint64 * 8).from_address(images)
        assert target[4] == data[0].nbytes
        ctypes.memmove(target[0], data.ctypes.data, data.nbytes)


@pytest.mark.parametrize(
    ("backend", "library", "expected"),
    [
        ("hardware", PartsLibrary(), True),
        ("hardware", PartsLibrary(wrong=1), False),
        ("hardware", PartsLibrary(version=(13, 0, 1)), False),
        ("hardware", PartsLibrary(status=9), False),
        ("cuda", PartsLibrary(), False),
    ],
)
def test_parts_of_images_are_decoded_if_they_have_the_pixels_of_the_whole(
    backend: str, library: Any, expected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stream: Any = HostStream()
    assert NvjpegDecoder(stream, library, "rgb", backend, second=False).decodes_regions() == expected
    assert not caplog.records


@pytest.mark.parametrize(("status", "logged"), [(3, 0), (4, 0), (9, 0), (10, 0), (1, 1), (6, 1), (8, 1)])
def test_failures_that_are_not_of_a_file_are_logged_once(
    status: int, logged: int, caplog: pytest.LogCaptureFixture
) -> None:
    decoders = pool_on(FaultyLibrary(lambda count, stream: status))
    for _ in range(3):
        assert not decoders.decode(four()).any()
    assert len(caplog.records) == logged


@pytest.mark.parametrize("when", ["it is created", "it decodes"])
def test_without_memory_for_the_second_decoder_the_first_one_goes_on(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    library = FaultyLibrary(lambda count, stream: NO_MEMORY if stream == SECOND else 0)
    if when == "it is created":
        library.most_decoders = 1
    decoders = pool_on(library)
    decoders.set_starved(True)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            decoders.set_starved(True)
            assert decoders.decode(four()).all()
        work(decoders)
    assert {stream for _, stream in library.decoded} == {FIRST}
    assert library.made == 2, "it is tried once"
    text = "nvJPEG decodes one call at a time, not two"
    assert [record.getMessage().endswith(text) for record in caplog.records].count(True) == 1


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
        decoder.decode(JpegBatch(numbers, numbers, np.ones((4, 8), np.uint64), SAMPLING))
        assert Event.waits == 0
        decoder.decode(JpegBatch(numbers, numbers, np.ones((4, 8), np.uint64), SAMPLING))  # fails, then halves
    assert Event.waits == 1
