"""Preprocessing on the CPU where a model is served, by threads and by processes: the pixels of one thread."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import gpuflow.serve
from gpuflow.errors import BadSampleError, DecoderError
from gpuflow.execute.cpu.runner import CpuRunner
from gpuflow.parity.images import hostile_images
from gpuflow.pipeline import stage as s
from gpuflow.stages import CenterCrop, Decode, Normalize, Resize
from gpuflow.torchpipe.nodes import CpuPreprocessor, _parts
from tests.datasets import Entries, await_children, children, jpeg, nothing_left_behind, program, write_config
from tests.hostile import BAD, HOSTILE
from tests.images import jpeg as jpeg_of
from tests.images import photo
from tests.running import images, program_of, run
from tests.serve.fakes import mean_color

STAGES: Entries = [
    {"decode": {}},
    {"resize": {"shorter": 40}},
    {"center_crop": {"size": 32}},
    {"normalize": {"layout": "nhwc"}},
]
DATA = [jpeg(i % 3, i) for i in range(12)]


@pytest.fixture(scope="module", params=[0, 2], ids=["threads", "processes"])
def preprocessor(request: pytest.FixtureRequest) -> Iterator[CpuPreprocessor]:
    preprocessor = CpuPreprocessor(program(STAGES), batch=16, threads=3, processes=request.param)
    yield preprocessor
    preprocessor.close()


def at_work(preprocessor: CpuPreprocessor) -> int:
    return preprocessor._pool.counts()["at_work"]


def expected(files: list[bytes]) -> torch.Tensor:
    return images(program(STAGES), files)


def test_the_images_are_those_of_one_thread(preprocessor: CpuPreprocessor) -> None:
    whole = expected(DATA)
    for count in (1, 2, 3, 12):
        found = preprocessor.run(DATA[:count])
        assert torch.equal(torch.cat(found), whole[:count])  # type: ignore[arg-type]
        assert found[0].is_contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr]


def test_images_are_not_overwritten_while_somebody_has_them(preprocessor: CpuPreprocessor) -> None:
    whole, kept = expected(DATA), []
    for i in range(12):
        kept += preprocessor.run([DATA[i], b"no image", DATA[0]])[:1]
    assert torch.equal(torch.cat(kept), whole)  # type: ignore[arg-type]


def test_many_threads_get_their_own_images(preprocessor: CpuPreprocessor) -> None:
    whole = expected(DATA)

    def ask(number: int) -> bool:
        rows = [(number * 5 + i) % 12 for i in range(1 + number % 4)]
        return torch.equal(torch.cat(preprocessor.run([DATA[row] for row in rows])), whole[rows])  # type: ignore[arg-type]

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(ask, range(60)))


def test_files_of_all_formats_and_bad_ones_are_what_each_gives_alone(preprocessor: CpuPreprocessor) -> None:
    files = [*HOSTILE.values(), *(data for data, _ in BAD.values())]
    alone = [run(program(STAGES), [data]) for data in files]

    def ask(seed: int) -> None:
        numbers = random.Random(seed).sample(range(len(files)), 1 + seed % 16)
        for number, image in zip(numbers, preprocessor.run([files[i] for i in numbers]), strict=True):
            pixels, (fault,) = alone[number]
            if fault is None:
                assert isinstance(image, torch.Tensor) and torch.equal(image, pixels)
            else:
                assert isinstance(image, BadSampleError) and str(image) == str(fault)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(48)))


def test_threads_end_and_memory_is_freed() -> None:
    def native_threads() -> int:
        return sum("gpuflow_native" in path.read_text() for path in Path("/proc/self/task").glob("*/comm"))

    before = native_threads()
    with nothing_left_behind():
        preprocessor = CpuPreprocessor(program(STAGES), batch=16, threads=3)
        preprocessor.run(list(HOSTILE.values())[:16])
        assert native_threads() == before + 3
        preprocessor.close()
    assert native_threads() == before


@pytest.mark.parametrize(("files", "seconds"), [(1, 60), (3, 120)])
def test_a_decoder_that_is_busy_works_unless_it_never_ends(
    files: int, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image takes less than a minute, and two threads share those of a call."""
    now, entered, go_on = [1000.0], threading.Event(), threading.Event()

    def hang(runner: object, payload: object, keys: object, slots: object) -> list[None]:
        entered.set()
        assert go_on.wait(30)
        return [None] * files

    preprocessor = CpuPreprocessor(program(STAGES), batch=16, threads=2)
    monkeypatch.setattr("gpuflow.torchpipe.nodes.time.monotonic", lambda: now[0])
    monkeypatch.setattr(CpuRunner, "run", hang)
    decoding = threading.Thread(target=preprocessor.run, args=(DATA[:files],))
    decoding.start()
    try:
        assert entered.wait(30)
        now[0] += seconds
        preprocessor.check()
        now[0] += 1
        with pytest.raises(
            DecoderError, match=f"has worked on {files} image.* for {seconds + 1} s; restart the service"
        ):
            preprocessor.check()
    finally:
        go_on.set()
        decoding.join(30)
    preprocessor.check()
    preprocessor.close()


def test_a_killed_process_spoils_nothing(caplog: pytest.LogCaptureFixture) -> None:
    before, whole = children(), expected(DATA)
    preprocessor = CpuPreprocessor(program(STAGES), batch=16, threads=2, processes=2)
    mine = sorted(children() - before)
    with caplog.at_level(logging.WARNING):
        for process in mine:
            os.kill(process, signal.SIGKILL)
            for _ in range(3):
                assert torch.equal(torch.cat(preprocessor.run(DATA)), whole)  # type: ignore[arg-type]
    assert "threads decode instead" in caplog.text
    preprocessor.close()
    await_children(0, before)


REFLECT: Entries = [
    {"decode": {}},
    {"torchvision": {"name": "Pad", "parameters": (("padding", 40), ("padding_mode", "reflect"))}},
    *STAGES[1:],
]
SMALL, LARGE = jpeg_of(photo(20, 20)), [jpeg_of(photo(50, 60, seed=seed)) for seed in range(12)]


@dataclass(frozen=True, kw_only=True, repr=False)
class OutOfMemory(s.Opaque):
    """There is no memory for a small image."""

    stage_name: ClassVar[str] = "out_of_memory"

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        return spec

    def apply(self, image: torch.Tensor, seed: int) -> torch.Tensor:
        if image.shape[1] < 25:
            raise MemoryError("none left")
        return image


def test_what_a_stage_raises_for_one_image_is_a_fault_of_that_image() -> None:
    before = children()
    preprocessor = CpuPreprocessor(program(REFLECT), batch=16, threads=2, processes=2)
    mine, whole = children() - before, images(program(REFLECT), LARGE)
    for place in (0, 5, 12):
        found = preprocessor.run([*LARGE[:place], SMALL, *LARGE[place:]])
        fault = found.pop(place)
        assert isinstance(fault, BadSampleError)
        assert fault.stage == "torchvision" and "Padding size" in fault.reason
        assert torch.equal(torch.cat(found), whole)  # type: ignore[arg-type]
    assert children() - before == mine
    preprocessor.close()
    await_children(0, before)


def test_an_exception_of_one_file_is_raised_and_costs_no_process() -> None:
    stages = Decode(), OutOfMemory(), Resize(shorter=40), CenterCrop(size=32), Normalize()
    before = children()
    preprocessor = CpuPreprocessor(program_of(*stages), batch=16, threads=2, processes=2)
    mine, whole = children() - before, images(program_of(*stages), LARGE)
    for place in (0, 12):
        with pytest.raises(MemoryError, match="none left"):
            preprocessor.run([*LARGE[:place], SMALL, *LARGE[place:]])
        assert torch.equal(torch.cat(preprocessor.run(LARGE)), whole)  # type: ignore[arg-type]
        assert children() - before == mine and at_work(preprocessor) == 2
    preprocessor.close()
    await_children(0, before)


def test_processes_that_were_killed_are_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuflow.torchpipe.nodes._RESTART_SECONDS", 0.2)
    before, whole = children(), expected(DATA)
    preprocessor = CpuPreprocessor(program(STAGES), batch=16, threads=2, processes=2)
    for _ in range(2):
        mine = children() - before
        for process in mine:
            os.kill(process, signal.SIGKILL)
        limit = time.monotonic() + 180
        while at_work(preprocessor) < 2 or children() & mine:
            assert time.monotonic() < limit
            assert torch.equal(torch.cat(preprocessor.run(DATA)), whole)  # type: ignore[arg-type]
            preprocessor.check()
            time.sleep(0.05)  # leaves the cores to the processes that start
    preprocessor.close()
    await_children(0, before)


def test_processes_are_not_started_again_too_often() -> None:
    before = children()
    preprocessor = CpuPreprocessor(program(STAGES), batch=16, threads=2, processes=1)
    seen = set[int]()
    for _ in range(3):
        mine = children() - before
        seen |= mine
        for process in mine:
            os.kill(process, signal.SIGKILL)
        for _ in range(3):
            preprocessor.run(DATA)
    assert len(seen) == 2
    preprocessor.close()
    await_children(0, before)


def test_a_program_that_cannot_be_told_is_run_by_threads(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(program: object, protocol: int) -> bytes:
        raise TypeError("cannot pickle this stage")

    monkeypatch.setattr("gpuflow.runtime.worker_pool.pickle.dumps", refuse)
    with caplog.at_level(logging.WARNING):
        preprocessor = CpuPreprocessor(program(STAGES), batch=4, threads=2, processes=1)
    assert "cannot pickle this stage; threads decode instead" in caplog.text
    assert torch.equal(torch.cat(preprocessor.run(DATA[:3])), expected(DATA[:3]))  # type: ignore[arg-type]
    preprocessor.close()


@pytest.mark.parametrize(("count", "most"), [(1, 4), (4, 4), (5, 4), (16, 3), (0, 2)])
def test_parts_are_even_and_in_order(count: int, most: int) -> None:
    parts = list(_parts(count, most))
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(count))
    lengths = {part.stop - part.start for part in parts}
    assert len(parts) <= most and (not lengths or max(lengths) - min(lengths) <= 1)


def test_a_served_file_gives_the_same_with_processes(tmp_path: Path) -> None:
    (tmp_path / "photos" / "a").mkdir(parents=True)
    (tmp_path / "photos" / "a" / "0.jpg").write_bytes(DATA[0])
    config = write_config(tmp_path / "x.yaml", tmp_path / "photos", val=STAGES, serve={"stages": STAGES})
    files = [image.data.tobytes() for image in hostile_images()]
    before, answers = children(), []
    for processes in (0, 2):
        overrides = [f"run.processes={processes}", "run.threads=2"]
        with gpuflow.serve.load(config, device="cpu", model=mean_color, overrides=overrides) as predictor:
            assert predictor.describe()["processes"] == processes
            answers.append((predictor.predict(files), predictor.preprocess(DATA)))
    for one, other in zip(*(found for found, _ in answers), strict=True):
        if isinstance(one, BadSampleError):
            assert str(one) == str(other)
        else:
            assert not isinstance(other, BadSampleError) and torch.equal(one.logits, other.logits)
    assert torch.equal(*(made for _, made in answers))
    assert torch.equal(answers[1][1], expected(DATA))
    await_children(0, before)
