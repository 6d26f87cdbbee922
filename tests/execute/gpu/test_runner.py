"""Which image ends in which slot: the GPU runner with threads, calls that images of several chunks share, and failures.

A decoder that writes each file's number takes the place of nvJPEG, and a copy of that number the place of the
resampling kernel. All else is real, on the CPU.
"""

from __future__ import annotations

import ctypes
import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpuflow.decode.codecs import TEST_JPEG
from gpuflow.decode.nvjpeg import NvjpegError
from gpuflow.execute.gpu import device_passes, nvjpeg_decoders
from gpuflow.execute.gpu.passes import passes_of
from gpuflow.execute.gpu.runner import GpuRunner
from gpuflow.pipeline.stage import Keys
from gpuflow.sources import Payload
from gpuflow.stages import CenterCrop, Decode, Resize
from tests import images
from tests.execute.gpu.fake_driver import FakeDriver, copy_images, use_c_code
from tests.host_stream import HostStream
from tests.running import program_of, run

PROGRAM = program_of(Decode(), CenterCrop(size=12), Resize(height=8, width=9), CenterCrop(size=8))
NUMBER, WIDTH = b"number=%06d", 13
SAMPLINGS = ("4:2:0", "4:2:0", "4:2:0", "4:4:4", "4:2:2", "4:4:0")
CHUNK, CHUNKS = 40, 14
REFUSED, DAMAGED = 7, 11
"""Files with numbers that are divisible by these are refused by the decoder, or lack their last bytes."""


@cache
def contents() -> tuple[bytes, ...]:
    """Files of several sizes and samplings, each with its number; some are damaged, every thirteenth one is a PNG."""
    rng, found = random.Random(0), []
    for number in range(CHUNK * CHUNKS):
        pixels = images.photo(rng.choice([16, 24, 60]), rng.choice([16, 40, 70]), seed=number % 9)
        data = images.jpeg(pixels, rng.choice(SAMPLINGS))
        comment = NUMBER % number
        data = data[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2) + comment + data[2:]
        data = data[:-7] + data[-2:] if number % DAMAGED == 0 else data
        found.append(images.png(pixels) if number % 13 == 5 else data)
    return tuple(found)


def number_in(data: bytes) -> int:
    at = data.index(NUMBER[:7])
    return int(data[at + 7 : at + WIDTH])


class NumberDecoder:
    """Replaces `BatchedDecoder`: writes each file's number, as four bytes, where the part of its image belongs."""

    def __init__(self, *arguments: Any) -> None:
        self.batch_size = 0

    def parameters(self, count: int) -> ctypes.Array[ctypes.c_void_p]:
        return (ctypes.c_void_p * count)()

    def decode_by(self, run: Callable[..., None], count: int) -> None:
        number, former = id(self), self.batch_size
        self.batch_size = 0
        run(number, number, 5, initialize=count != former)
        self.batch_size = count

    def decode(
        self, data: NDArray[np.uint64], lengths: NDArray[np.uint64], images: NDArray[np.uint64], *rest: Any
    ) -> None:
        self.batch_size = 0  # the C code's library does not know of it
        if status := decode(data, lengths, images):
            raise NvjpegError("nvjpegDecodeBatched", status)


def decode(data: NDArray[np.uint64], lengths: NDArray[np.uint64], images: NDArray[np.uint64]) -> int:
    """The status of a call of nvJPEG."""
    files = [ctypes.string_at(int(at), int(length)) for at, length in zip(data, lengths, strict=True)]
    if files == [TEST_JPEG.tobytes()]:
        return 0  # its image stays black
    numbers = [number_in(file) for file in files]
    assert all(number % DAMAGED for number in numbers), "it gets complete files alone"
    if any(number % REFUSED == 0 for number in numbers):
        return 6
    for number, target in zip(numbers, images[:, 0].tolist(), strict=True):
        ctypes.memmove(target, number.to_bytes(4), 4)
    return 0


def resample_all(plan: torch.Tensor, table: torch.Tensor, target: torch.Tensor, **options: Any) -> None:
    """Copies the first bytes of the box that the plan reads, where the decoded part begins."""
    for row in plan.tolist():
        address, down, across, y, x = row[:5]
        ctypes.memmove(target.data_ptr() + row[-1], address + y * down + x * across, 4)


class MakeRunner(Protocol):
    """Makes a runner. decode_bytes: the size of its buffers for decoded images. The others: see `GpuRunner`."""

    def __call__(self, decode_bytes: int, later_images: int = 120) -> GpuRunner: ...


@pytest.fixture(params=["Python", "C"])
def make_runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRunner]:
    """Python code queues the runner's work, or C code does."""
    monkeypatch.setattr(nvjpeg_decoders, "BatchedDecoder", NumberDecoder)
    monkeypatch.setattr(nvjpeg_decoders, "_MANY_REFUSED", 10**9)
    monkeypatch.setattr(device_passes, "resample_all", resample_all)
    driver = FakeDriver(decode)
    if request.param == "C":
        use_c_code(monkeypatch, copy_images, lambda library: driver)

    def make(decode_bytes: int, later_images: int = 120) -> GpuRunner:
        passes = passes_of(PROGRAM)
        assert not isinstance(passes, str)
        substitutes: Any = (HostStream(), SimpleNamespace(version_info=(13, 3, 2)))
        return GpuRunner(
            PROGRAM,
            [passes],
            *substitutes,
            backend="hardware",
            decode_bytes=decode_bytes,
            buffers=3,
            threads=2,
            later_images=later_images,
        )

    yield make
    driver.check()
    made = {name for name, *_ in driver.calls}
    by_c = {"wait", "transfer", "initialize", "set region", "with", "decode", "record", "launch"}
    assert made == (by_c if request.param == "C" else set())


def is_decoded(number: int) -> bool:
    """Whether the decoder decodes this file, so that its result is its number."""
    return bool(number % REFUSED and number % DAMAGED and number % 13 != 5)


def number_of(slot: torch.Tensor) -> int:
    """The first four bytes of a slot, as they lie in memory."""
    return int.from_bytes(bytes(slot.as_strided((4,), (1,)).tolist()))


@pytest.mark.parametrize("decode_bytes", [1 << 20, 60_000, 20_000, 9_000])
@pytest.mark.parametrize("threads", [1, 3])
def test_each_slot_gets_its_own_image(make_runner: MakeRunner, threads: int, decode_bytes: int) -> None:
    """In a first epoch, where files are unknown, and in later ones. Calls hold images of up to five chunks."""
    check_slots(make_runner(decode_bytes), threads)


@pytest.mark.parametrize("threads", [1, 3])
def test_results_of_later_chunks_take_no_more_memory_than_allowed(make_runner: MakeRunner, threads: int) -> None:
    """And all of it is free again, also that of chunks that are never launched."""
    runner = make_runner(60_000, later_images=11)
    check_slots(runner, threads)
    assert [len(images) for images in runner._later.images] == [11] and runner._later.reserve(0) == 11
    numbers = [i for i in range(len(contents())) if is_decoded(i)]
    order = np.array(numbers[: 2 * CHUNK]).reshape(2, CHUNK)
    payloads = [Payload.of([contents()[i] for i in own], lambda size: np.zeros(size, np.uint8)) for own in order]
    first, never = (runner.prepare(one, Keys(0, 9, own)) for one, own in zip(payloads, order, strict=True))
    runner.launch(first, runner.slots(CHUNK), [never])
    assert never.early and runner._later.reserve(0) < 11
    del never
    assert runner._later.reserve(0) == 11


def check_slots(runner: GpuRunner, threads: int) -> None:
    expected, faults = run(PROGRAM, contents())
    assert not any(faults)
    for epoch in range(3):
        order = np.random.default_rng(epoch).permutation(len(contents())).reshape(CHUNKS, CHUNK).tolist()
        payloads = [
            Payload.of([contents()[i] for i in numbers], lambda size: np.full(size, 0xAB, np.uint8))
            for numbers in order
        ]
        keys = [Keys(0, epoch, np.array(numbers)) for numbers in order]
        prepared = [runner.prepare(*one) for one in zip(payloads, keys, order, strict=True)]
        slots = [runner.slots(CHUNK).fill_(0) for _ in order]
        launch_all(runner, prepared, slots, threads)
        for images_of_chunk, numbers in zip(slots, order, strict=True):
            for slot, number in zip(images_of_chunk, numbers, strict=True):
                if is_decoded(number):
                    assert number_of(slot) == number
                else:
                    assert torch.equal(slot, expected[number]), number


def test_a_launched_batch_is_free_before_later_chunks_that_its_calls_decoded_too(make_runner: MakeRunner) -> None:
    """Its memory is used again once the consumer drops it, while chunks that wait for their turn refer to its calls."""
    runner, decoded = make_runner(1 << 20), np.array([i for i in range(len(contents())) if is_decoded(i)])
    order = decoded[: 4 * CHUNK].reshape(4, CHUNK)
    for epoch in range(2):  # C code queues from the second launch on
        prepared = [
            runner.prepare(
                Payload.of([contents()[i] for i in numbers], lambda size: np.zeros(size, np.uint8)),
                Keys(0, epoch, numbers),
                numbers.tolist(),
            )
            for numbers in order
        ]
        slots = runner.slots(CHUNK)
        runner.launch(prepared[0], slots, prepared[1:])
        assert any(one.early for one in prepared[1:])
        batch = weakref.ref(slots)
        del slots
        assert batch() is None
        launch_all(runner, prepared[1:], [runner.slots(CHUNK) for _ in prepared[1:]], 1)


def test_a_closed_runner_is_freed_at_once(make_runner: MakeRunner) -> None:
    """Its decoders have memory on the GPU, which must not wait for Python's garbage collector."""
    runner = make_runner(1 << 20)
    check_slots(runner, 1)
    gc.collect()
    gc.disable()
    try:
        runner.close()
        freed = weakref.ref(runner)
        del runner
        assert freed() is None
    finally:
        gc.enable()


def launch_all(runner: GpuRunner, prepared: Sequence[Any], slots: Sequence[Any], threads: int) -> None:
    """Launch chunks in their order, as the loader's threads do."""
    left, lock = list(range(len(prepared))), threading.Lock()

    def launch() -> None:
        while True:
            with lock:
                if not left:
                    return
                place = left.pop(0)
                ahead = [prepared[i] for i in left[:4]]
            assert not any(runner.launch(prepared[place], slots[place], ahead))

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(launch) for _ in range(threads)]:
            future.result(60)
