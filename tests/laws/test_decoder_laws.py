"""Laws of decoders: a file's pixels or error depend only on its bytes, not on files decoded before.

Each place where images are decoded gets sequences of sound and damaged files and must say of each what a decoder says
that has seen nothing else.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, ClassVar, Protocol

import cv2
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from gpuflow.decode.codecs import CpuDecoder, is_test_image, pixels_of_test_image, probe
from gpuflow.decode.header import TEST_HEIGHT, TEST_JPEG, TEST_WIDTH
from gpuflow.decode.libjpeg_turbo import find_libjpeg_turbo
from gpuflow.decode.preset import Preset
from gpuflow.errors import BadSampleError, DecoderError
from gpuflow.execute.cpu.runner import CpuRunner
from gpuflow.loader.decode import DecodeWorkers
from gpuflow.pipeline.program import Program
from gpuflow.runtime.memory import shared
from gpuflow.sources import Payload
from gpuflow.stages import CenterCrop, Decode, Normalize, RandomResizedCrop, Resize
from gpuflow.torchpipe.graph import chain
from gpuflow.torchpipe.nodes import CpuPreprocessor
from gpuflow.torchpipe.running_graph import RunningGraph
from tests import damaged
from tests.datasets import MemorySource
from tests.images import as_array, jpeg, photo, png_bytes
from tests.running import keys_of, program_of, run

POOL = damaged.pool()
SIDE = 24
WHOLE = program_of(Decode(), Resize(height=SIDE, width=SIDE))
REGION = program_of(Decode(), RandomResizedCrop(size=SIDE))
SERVED = program_of(Decode(), Resize(height=SIDE, width=SIDE), Normalize(), name="serve", serving=True)
PRESET = program_of(Preset(name="torchpipe_cpu", height=SIDE, width=SIDE), serving=True)
GUARD = 0xA5

Outcome = bytes | str
"""An image's bytes, or why it is bad."""


def outcome(image: torch.Tensor, fault: object) -> Outcome:
    return str(fault) if fault is not None else image.contiguous().numpy().tobytes()


@cache
def fresh(program_name: str, number: int) -> Outcome:
    """The result of a new decoder for a file of the pool."""
    program = {"whole": WHOLE, "region": REGION, "served": SERVED, "preset": PRESET}[program_name]
    (image,), (fault,) = run(program, [POOL[number]])
    return outcome(image, fault)


class Place(Protocol):
    """A place where images are decoded. program: the name of the program that it runs."""

    program: str

    def run(self, numbers: Sequence[int]) -> list[Outcome]: ...

    def close(self) -> None: ...


def slots_for(program: Program, count: int) -> Any:
    height, width, channels = program.result.shape
    assert height and width
    memory = shared(count * height * width * channels)
    memory.fill(GUARD)
    return memory.reshape(count, height, width, channels)


class Threads:
    """A pool of runners that threads share, as in a loader."""

    def __init__(self, program: str, threads: int) -> None:
        self.program, self._threads = program, ThreadPoolExecutor(threads)
        self._runners = CpuRunner(WHOLE if program == "whole" else REGION)

    def run(self, numbers: Sequence[int]) -> list[Outcome]:
        return list(self._threads.map(self._one, numbers))

    def _one(self, number: int) -> Outcome:
        slots = np.full((1, SIDE, SIDE, 3), GUARD, np.uint8)
        (fault,) = self._runners.run(Payload.of([POOL[number]]), keys_of(1), slots)
        self._runners.check()
        return outcome(torch.from_numpy(slots[0]).permute(2, 0, 1), fault)

    def close(self) -> None:
        self._threads.shutdown()


class Processes:
    """The worker processes of a loader."""

    program = "region"

    def __init__(self) -> None:
        self._workers = DecodeWorkers(REGION, MemorySource(list(POOL)), threads=2, processes=2)

    def run(self, numbers: Sequence[int]) -> list[Outcome]:
        found = []
        for number in numbers:
            slots, done = slots_for(REGION, 1), None
            while done is None:  # until the processes have started
                done = self._workers.decode([number], keys_of(1), slots, 0)
            found.append(outcome(torch.from_numpy(slots[0]).permute(2, 0, 1), done.faults[0]))
        return found

    def close(self) -> None:
        self._workers.close()


class ServingProcesses:
    """The worker processes of a service."""

    program = "served"

    def __init__(self) -> None:
        self._preprocessor = CpuPreprocessor(SERVED, batch=16, threads=2, processes=2)

    def run(self, numbers: Sequence[int]) -> list[Outcome]:
        found = self._preprocessor.run([POOL[number] for number in numbers])
        self._preprocessor.check()
        return [str(x) if isinstance(x, BadSampleError) else outcome(x[0], None) for x in found]

    def close(self) -> None:
        self._preprocessor.close()


class Graph:
    """The graph of a service, with gpuflow's own decoder or torchpipe's."""

    def __init__(self, program: str) -> None:
        self.program = program
        folded = SERVED if program == "served" else PRESET
        self._graph = RunningGraph(chain(folded, None, origin="x.yaml", threads=2, device="cpu"))

    def run(self, numbers: Sequence[int]) -> list[Outcome]:
        waiting = [self._graph.submit([POOL[i]], wrap=lambda image: image, wants_image=True)[0] for i in numbers]
        found = []
        for future in waiting:
            try:
                found.append(outcome(future.result(30), None))
            except BadSampleError as fault:
                found.append(str(fault))
        self._graph.check()
        return found

    def close(self) -> None:
        assert self._graph.close(30)


PLACES: dict[str, Callable[[], Place]] = {
    "one thread": lambda: Threads("whole", 1),
    "one thread, regions": lambda: Threads("region", 1),
    "threads": lambda: Threads("region", 4),
    "processes": Processes,
    "a service's processes": ServingProcesses,
    "a service's graph": lambda: Graph("served"),
    "torchpipe's operators": lambda: Graph("preset"),
}
SLOW = {"processes", "a service's processes"}


class Sequences(RuleBasedStateMachine):
    """Decodes files of the pool in any order, one at a time and several at a time."""

    place: ClassVar[Place]

    @rule(number=st.integers(0, len(POOL) - 1))
    def one(self, number: int) -> None:
        self.several([number])

    @rule(numbers=st.lists(st.integers(0, len(POOL) - 1), min_size=2, max_size=12))
    def several(self, numbers: list[int]) -> None:
        found = self.place.run(numbers)
        for number, mine in zip(numbers, found, strict=True):
            assert mine == fresh(self.place.program, number), number


@pytest.mark.parametrize("name", PLACES)
def test_any_sequence_gives_what_a_new_decoder_gives(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    if name.startswith(("a service", "torchpipe")):
        pytest.importorskip("omniback")
    place = PLACES[name]()
    machine = type("Machine", (Sequences,), {"place": place})
    try:
        run_state_machine_as_test(machine, settings=settings(max_examples=6, stateful_step_count=20, deadline=None))
        every = list(range(len(POOL)))
        random.Random(1).shuffle(every)
        for start in range(0, len(every), 16):
            some = every[start : start + 16]
            assert place.run(some) == [fresh(place.program, number) for number in some]
    finally:
        place.close()
        capfd.readouterr()  # the libraries' own complaints


# --- flipped bits -----------------------------------------------------------------------------------------------------

SOUND = jpeg(photo(40, 56))
PROGRESSIVE = jpeg(photo(40, 56, seed=3), progressive=True)


def attempt(decoder: CpuDecoder, data: bytes, region: tuple[int, int, int, int] | None) -> Outcome:
    """Any exception other than BadSampleError fails the test."""
    try:
        header = probe(as_array(data), max_pixels=10**5)
        if region is not None and (header.height, header.width) != (40, 56):
            region = None
        image, (top, left) = decoder.decode(as_array(data), header, region)
    except BadSampleError as fault:
        return str(fault)
    if region is not None:
        y, x, height, width = region
        image = image[y - top : y - top + height, x - left : x - left + width]
    return np.ascontiguousarray(image).tobytes()


@pytest.mark.parametrize("part", ["header", "scan"])
@pytest.mark.parametrize("turbo", [True, False], ids=["turbo", "opencv"])
def test_flipped_bits_affect_no_later_file_and_show_no_other_image(
    part: str, turbo: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Flips each bit of the headers, and 7,000 bits of the scans, of a baseline and of a progressive photograph."""
    rng = random.Random(part)

    def new() -> CpuDecoder:
        return CpuDecoder("rgb") if turbo else CpuDecoder("rgb", library=None)

    used, region = new(), (5, 7, 20, 30)
    whole = {data: (attempt(new(), data, None), attempt(new(), data, region)) for data in (SOUND, PROGRESSIVE)}
    flips = []
    for data in (SOUND, PROGRESSIVE):
        _, scan = damaged.first(data, damaged.SCAN)
        start, stop = (2, scan) if part == "header" else (scan, len(data) - 2)
        flips += [(data, bit) for bit in range(8 * start, 8 * stop)]
    for number, (data, bit) in enumerate(rng.sample(flips, min(len(flips), 7000))):
        noisy = data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]
        box = region if number % 2 else None
        mine = attempt(used, noisy, box)
        other = new()
        other._buffer = np.full(1 << 20, GUARD, np.uint8)
        assert mine == attempt(other, noisy, box), noisy.hex()
        assert attempt(used, data, box) == whole[data][box is not None], noisy.hex()
        if number % 500 == 0:
            capfd.readouterr()
    used.check()


def test_a_picture_is_never_shown_for_a_file_that_failed_behind_a_warning() -> None:
    """libjpeg warns about the version, then fails before it has written a row; TurboJPEG reports only a warning."""
    secret, bogus = as_array(jpeg(photo(40, 56, seed=9))), as_array(damaged.warned_of_then_fatal(PROGRESSIVE))
    decoder = CpuDecoder("rgb")
    decoder.decode(secret, probe(secret))
    with pytest.raises(BadSampleError) as caught:
        decoder.decode(bogus, probe(bogus))
    assert str(caught.value) == "decode: the JPEG decoder gave up; the data is damaged"


@pytest.fixture
def perturbed() -> Iterator[Callable[[int], None]]:
    """A function that sets the byte that new heap memory holds until the test ends (mallopt(3), M_PERTURB)."""
    mallopt, most_mapped, perturb = ctypes.CDLL(None).mallopt, -4, -6
    mallopt(most_mapped, 0)
    yield lambda byte: mallopt(perturb, byte)
    mallopt(perturb, 0)
    mallopt(most_mapped, 65536)


@pytest.mark.parametrize("program", [WHOLE, REGION], ids=["whole", "region"])
def test_no_pixel_comes_from_uninitialized_memory(
    program: Program, perturbed: Callable[[int], None], capfd: pytest.CaptureFixture[str]
) -> None:
    found = []
    for byte in (0x11, 0xEE):
        perturbed(byte)
        batches = [run(program, [data]) for data in POOL]
        found.append([outcome(pixels[0], faults[0]) for pixels, faults in batches])
    assert found[0] == found[1]
    capfd.readouterr()


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded() -> None:
    progressive = jpeg(photo(60, 80), progressive=True)
    own = sum(kind == damaged.SCAN for kind, *_ in damaged.segments(progressive))
    assert probe(as_array(damaged.many_scans(progressive, 100 - own))).progressive
    cases: list[tuple[bytes, dict[str, Any]]] = [
        (damaged.many_scans(progressive, 101 - own), {}),
        (damaged.many_scans(progressive, 5000), {}),
        (progressive, {"max_scans": own - 1}),
    ]
    for data, options in cases:
        with pytest.raises(BadSampleError) as caught:
            probe(as_array(data), **options)
        limit = options.get("max_scans", 100)
        assert str(caught.value) == f"decode: more than max_scans = {limit} scans"


BOMB = program_of(Decode(), Resize(shorter=256), CenterCrop(size=SIDE), name="serve", serving=True)


def bombed_threads(data: bytes) -> object:
    return run(BOMB, [data])[1][0]


def bombed_processes(data: bytes) -> object:
    workers, done = DecodeWorkers(BOMB, MemorySource([data]), threads=2, processes=1), None
    try:
        while done is None:  # until the process has started
            done = workers.decode([0], keys_of(1), slots_for(BOMB, 1), 0)
    finally:
        workers.close()
    return done.faults[0]


def bombed_service(data: bytes) -> object:
    pytest.importorskip("omniback")
    graph = RunningGraph(chain(BOMB, None, origin="x.yaml", threads=1, device="cpu"))
    try:
        return graph.submit([data], wrap=lambda image: image, wants_image=True)[0].exception(30)
    finally:
        assert graph.close(30)


def bombed_service_processes(data: bytes) -> object:
    pytest.importorskip("omniback")
    preprocessor = CpuPreprocessor(BOMB, batch=16, threads=2, processes=2)
    try:
        return preprocessor.run([data])[0]
    finally:
        preprocessor.close()


@pytest.mark.parametrize(
    "place", [bombed_threads, bombed_processes, bombed_service, bombed_service_processes], ids=lambda x: x.__name__
)
def test_a_line_that_would_be_resized_to_a_huge_image_is_bad_everywhere(place: Callable[[bytes], object]) -> None:
    """A GPU says the same: tests/execute/kernels."""
    fault = place(png_bytes(65_500, 1, b"\0" * (1 + 3 * 65_500)))
    assert isinstance(fault, BadSampleError)
    assert (fault.stage, fault.code) == ("resize", "sample.too_large")
    assert fault.reason == (
        "the resized image would have 16768000x256 = 4,292,608,000 pixels, more than max_pixels = 179,000,000"
    )


def test_end_markers_and_scans_of_what_is_appended_do_not_count() -> None:
    """Phones append videos and other images to a JPEG."""
    progressive = jpeg(photo(60, 80), progressive=True)
    film = b"\xff\xda\x00\x08" * 500
    assert probe(as_array(progressive + film), max_scans=20).progressive
    hidden = progressive[:2] + b"\xff\xe2\x04\x02" + film[:1024] + progressive[2:]
    assert probe(as_array(hidden), max_scans=20).progressive


@pytest.mark.parametrize("filler", [b"\xff\xfe\0\2", b"\xff\xe1\0\4ab"])
def test_segments_without_end_are_refused_soon(filler: bytes) -> None:
    with pytest.raises(BadSampleError) as caught:
        probe(as_array(SOUND[:2] + filler * 2_000_000 + SOUND[2:]))
    assert str(caught.value) == "decode: more than 10,000 marker segments before the first scan"


# --- decoders that refuse everything ----------------------------------------------------------------------------------


class BrokenLibrary:
    """Replaces libjpeg-turbo, and refuses every file after `worked` calls."""

    version = "9.9"

    def __init__(self, worked: int) -> None:
        self.left, self.calls = worked, 0

    def decode(self, *arguments: Any) -> Any:
        self.calls += 1
        self.left -= 1
        library = find_libjpeg_turbo()
        assert library is not None
        return library.decode(*arguments) if self.left >= 0 else None


def test_a_library_that_fails_at_the_test_image_is_not_used_again(caplog: pytest.LogCaptureFixture) -> None:
    library: Any = BrokenLibrary(0)
    decoder, junk = CpuDecoder("rgb", library=library), as_array(damaged.without(SOUND, damaged.QUANTISATION))
    for _ in range(40):
        with pytest.raises(BadSampleError):
            decoder.decode(junk, probe(junk))
    assert library.calls == 33, "32 in a row, and the test image"
    assert [record.getMessage() for record in caplog.records] == [
        "libjpeg-turbo no longer decodes gpuflow's test image; OpenCV decodes instead"
    ]
    assert attempt(decoder, SOUND, None) == attempt(CpuDecoder("rgb"), SOUND, None)


def test_an_opencv_that_fails_at_the_test_image_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = CpuDecoder("rgb", library=None)
    decoder.check()
    monkeypatch.setattr(cv2, "imdecode", lambda data, flags: np.zeros((TEST_HEIGHT, TEST_WIDTH, 3), np.uint8))
    with pytest.raises(DecoderError) as caught:
        decoder.check()
    assert str(caught.value) == ("OpenCV does not decode gpuflow's test image; end this process and start another one")


def test_lack_of_memory_does_not_make_an_image_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    def imdecode(data: Any, flags: int) -> Any:
        error = cv2.error("no memory")
        error.code = cv2.Error.StsNoMem
        raise error

    monkeypatch.setattr(cv2, "imdecode", imdecode)
    with pytest.raises(MemoryError, match="not enough memory to decode an image of"):
        CpuDecoder("rgb", library=None).decode(as_array(SOUND), probe(as_array(SOUND)))


@pytest.mark.parametrize("color", ["rgb", "bgr", "gray"])
def test_the_test_image_is_what_every_decoder_gives(color: str) -> None:
    assert is_test_image(pixels_of_test_image(color), color)
    image, _ = CpuDecoder(color).decode(TEST_JPEG, probe(TEST_JPEG))
    assert is_test_image(image, color)
    assert not is_test_image(image[:-1], color) and not is_test_image(None, color)
    assert not is_test_image(np.bitwise_xor(image, np.uint8(1)), color)
