"""Which image ends in which slot: the GPU runner with threads, calls that images of several chunks share, and failures.

A decoder that writes each file's number takes the place of nvJPEG, and a copy of that number the place of the sampling
kernel. All else is real, on the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpuflow.decode import complete_scan
from gpuflow.decode.complete_scan import check_scan
from gpuflow.decode.libjpeg_turbo import find_libjpeg_turbo
from gpuflow.decode.nvjpeg import NvjpegError
from gpuflow.execute import gpu, gpu_passes, nvjpeg_decoders
from gpuflow.execute.gpu import GpuRunner
from gpuflow.execute.gpu_passes import passes_of
from gpuflow.pipeline.stage import Keys
from gpuflow.sources import Payload
from gpuflow.stages import CenterCrop, Decode, Resize
from tests import images
from tests.running import program_of, run

PROGRAM = program_of(Decode(), Resize(height=8, width=9), CenterCrop(size=8))
NUMBER, WIDTH = b"number=%06d", 13
SAMPLINGS = ("4:2:0", "4:2:0", "4:2:0", "4:4:4", "4:2:2", "4:4:0")
CHUNK, CHUNKS, ENGINES = 40, 14, 3
REFUSED, DAMAGED = 7, 11
"""Numbers that are divisible by these are refused by the decoder, or left incomplete by it."""


@cache
def contents() -> tuple[bytes, ...]:
    """Files of several sizes and samplings, each with its number; every thirteenth one is a PNG."""
    rng, found = random.Random(0), []
    for number in range(CHUNK * CHUNKS):
        pixels = images.photo(rng.choice([16, 24, 60]), rng.choice([16, 40, 70]), seed=number % 9)
        data = images.jpeg(pixels, rng.choice(SAMPLINGS))
        comment = NUMBER % number
        data = data[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2) + comment + data[2:]
        found.append(images.png(pixels) if number % 13 == 5 else data)
    return tuple(found)


def number_in(data: bytes) -> int | None:
    """The number of a file; None for a blank image."""
    at = data.find(NUMBER[:7])
    return None if at < 0 else int(data[at + 7 : at + WIDTH])


class Event:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """What it stands for has passed."""


class CpuStream:
    """Replaces `DeviceStream` and its CUDA stream: queued work runs immediately."""

    device, cuda_stream = torch.device("cpu"), 7

    def __init__(self) -> None:
        self.stream = self

    def queued(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def new_stream(self) -> CpuStream:
        return self

    def wait_stream(self, other: CpuStream) -> None:
        assert other is self

    def record_event(self, *, blocking: bool = False, stream: Any = None) -> Event:
        return Event()

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def send(self, host: torch.Tensor) -> torch.Tensor:
        return host.clone()

    def send_all(self, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        return [torch.from_numpy(np.array(array)) for array in arrays]

    def retain_until_done(self, memory: Any, on_done: Any = None) -> None:
        """What was queued is done."""

    def synchronize(self) -> None:
        """All work is done."""


class NumberDecoder:
    """Replaces `BatchedDecoder`: writes each file's number, as four bytes, where its image belongs."""

    def __init__(self, *arguments: Any) -> None:
        self.batch_size = 0

    def decode(
        self, data: NDArray[np.uint64], lengths: NDArray[np.uint64], images: NDArray[np.uint64], stream: int
    ) -> None:
        self.batch_size = len(data)
        files = [ctypes.string_at(int(at), int(length)) for at, length in zip(data, lengths, strict=True)]
        numbers = [number_in(file) for file in files]
        if any(number is not None and number % REFUSED == 0 for number in numbers):
            raise NvjpegError("nvjpegDecodeBatched", 6)
        for number, target in zip(numbers, images[:, 0].tolist(), strict=True):
            if number is not None:
                ctypes.memmove(target, number.to_bytes(4), 4)


def unwritten(runner: GpuRunner, found: NDArray[np.uint64], frames: NDArray[np.int64]) -> NDArray[np.bool_]:
    numbers = [int.from_bytes(ctypes.string_at(address, 4)) for address in found[:, 0].tolist()]
    return np.array([number % DAMAGED == 0 for number in numbers])


def sample(plan: torch.Tensor, table: torch.Tensor, target: torch.Tensor, **options: Any) -> None:
    for row in plan.tolist():
        ctypes.memmove(target.data_ptr() + row[-1], row[0], 4)


MakeRunner = Callable[[int], GpuRunner]


@pytest.fixture
def make_runner(monkeypatch: pytest.MonkeyPatch) -> MakeRunner:
    """A function that makes a runner; its argument is the size in bytes of the buffers for decoded images."""
    monkeypatch.setattr(nvjpeg_decoders, "BatchedDecoder", NumberDecoder)
    monkeypatch.setattr(nvjpeg_decoders, "_MANY_REFUSED", 10**9)
    monkeypatch.setattr(gpu_passes, "sample", sample)
    monkeypatch.setattr(gpu.GpuRunner, "_unwritten", unwritten)
    defaults: Any = nvjpeg_decoders.NvjpegDecoderPool.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "count", lambda decoder: ENGINES)

    def make(decode_bytes: int) -> GpuRunner:
        passes = passes_of(PROGRAM)
        assert not isinstance(passes, str)
        substitutes: Any = (CpuStream(), object())
        return GpuRunner(PROGRAM, [passes], *substitutes, backend="hardware", decode_bytes=decode_bytes, buffers=3)

    return make


def is_decoded(number: int, *, blanks: bool) -> bool:
    """Whether the decoder decodes this file, so that its result is its number. blanks: after a blank image at first,
    which shows that it leaves some incomplete."""
    return number % REFUSED != 0 and not (blanks and number % DAMAGED == 0) and number % 13 != 5


def number_of(slot: torch.Tensor) -> int:
    """The first four bytes of a slot, as they lie in memory."""
    return int.from_bytes(bytes(slot.as_strided((4,), (1,)).tolist()))


@pytest.mark.parametrize("decode_bytes", [1 << 20, 60_000, 20_000, 9_000])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("blanks", [True, False])
def test_each_slot_gets_its_own_image(
    make_runner: MakeRunner, blanks: bool, threads: int, decode_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a first epoch, where files are unknown, and in later ones. Calls hold images of up to five chunks.

    blanks: without libjpeg-turbo, so that new files are decoded after blank images.
    """
    if blanks:
        monkeypatch.setattr("gpuflow.decode.libjpeg_turbo.find_libjpeg_turbo", lambda: None)
    elif find_libjpeg_turbo() is None:
        pytest.skip("needs libjpeg-turbo 3: pip install 'gpuflow[turbo]'")
    runner = make_runner(decode_bytes)
    expected, faults = run(PROGRAM, contents())
    assert not any(faults)
    for epoch in range(3):
        order = np.random.default_rng(epoch).permutation(len(contents())).reshape(CHUNKS, CHUNK).tolist()
        payloads = [
            Payload.of([contents()[i] for i in numbers], lambda size: np.full(size, 0xAB, np.uint8))
            for numbers in order
        ]
        prepared = [
            runner.prepare(payload, Keys(0, epoch, np.array(numbers)), numbers)
            for payload, numbers in zip(payloads, order, strict=True)
        ]
        slots = [runner.slots(CHUNK).fill_(0) for _ in order]
        launch_all(runner, prepared, slots, threads)
        for images_of_chunk, numbers in zip(slots, order, strict=True):
            for slot, number in zip(images_of_chunk, numbers, strict=True):
                if is_decoded(number, blanks=blanks):
                    assert number_of(slot) == number
                else:
                    assert torch.equal(slot, expected[number]), number


@pytest.mark.skipif(find_libjpeg_turbo() is None, reason="needs libjpeg-turbo 3: pip install 'gpuflow[turbo]'")
def test_each_file_is_checked_once(make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged ones, too. Reading workers check files as long as many are unknown."""
    files = [data[:-7] + data[-2:] if i % 5 == 0 else data for i, data in enumerate(contents()[: 2 * CHUNK])]
    runner, checked = make_runner(1 << 20), Counter[int]()

    def check(data: NDArray[np.uint8], *arguments: Any) -> int:
        checked[number_in(data.tobytes()) or 0] += 1
        return check_scan(data, *arguments)

    monkeypatch.setattr(complete_scan, "check_scan", check)
    for epoch, expects in enumerate([True, False]):
        for start in (0, CHUNK):
            numbers = range(start, start + CHUNK)
            payload = Payload.of([files[i] for i in numbers], lambda size: np.zeros(size, np.uint8))
            prepared = runner.prepare(payload, Keys(0, epoch, np.array(numbers)), numbers)
            assert set(prepared.rows) == {i - start for i in numbers if i % 5 and i % 13 != 5}
            prescan: Any = runner.prescan
            assert bool(prescan.keywords["check_threads"]) is expects
    assert checked == Counter(i for i in range(2 * CHUNK) if i % 13 != 5)


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
