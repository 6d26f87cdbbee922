"""Images that the CPU decodes ahead for a GPU: always those of `CpuRunner`."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpuflow.arrays import Ints
from gpuflow.errors import LoaderError, LoaderTimeout
from gpuflow.execute.cpu import decode_pool
from gpuflow.execute.cpu.decode_pool import CpuDecodePool, PendingImages
from gpuflow.execute.cpu.runner import CpuRunner
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import fold, trace
from gpuflow.pipeline.stage import Keys, Pipeline
from gpuflow.pipeline.views import AnyProgram, slot_of, slots_of, split
from gpuflow.runtime.memory import heap
from gpuflow.runtime.threads import StopFlag, use_stop_flag
from gpuflow.sources import Payload
from gpuflow.stages import Decode, Flip, RandomResizedCrop
from tests import images
from tests.datasets import Entries, deadline, views_program

FAILS, WAITS = 40, 41
"""Positions of samples for which `Faulty` raises, or waits for `go_on`."""
go_on = threading.Event()


@dataclass(frozen=True, kw_only=True, repr=False)
class Faulty(s.Geometry):
    """A custom stage with faults of its own."""

    stage_name: ClassVar[str] = "faulty"

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        return spec

    def draw(self, keys: s.StageKeys, height: Ints, width: Ints) -> tuple[s.Move, ...]:
        if (keys.positions == FAILS).any():
            raise RuntimeError("mine")
        if (keys.positions == WAITS).any():
            assert go_on.wait(SECONDS)
        return ()


PIPELINE = Pipeline("train", (Decode(), RandomResizedCrop(size=12), Flip(horizontal=0.5)))
FAULTY = Pipeline("train", (Decode(), Faulty(), RandomResizedCrop(size=12), Flip(horizontal=0.5)))
LARGE: Entries = [{"decode": {}}, {"resize": {"height": 9, "width": 7}}, {"normalize": {"dtype": "bfloat16"}}]
PROGRAMS: dict[str, AnyProgram] = {
    "stages": fold(PIPELINE, trace(PIPELINE)),
    "faulty": fold(FAULTY, trace(FAULTY)),
    "views": views_program({"small": (2, [{"decode": {}}, {"random_resized_crop": {"size": 5}}]), "large": (1, LARGE)}),
}
SECONDS = 60.0
FILES = [images.jpeg(images.photo(30 + i, 44 - i, seed=i), progressive=True) for i in range(19)]
FILES += [images.png(images.photo(30 + i, 44 - i, seed=i)) for i in range(4)]
FILES[7] = b"no image"
KEYS = Keys(3, 1, np.arange(500, 500 + len(FILES)))


@functools.cache
def expected(name: str) -> tuple[list[torch.Tensor], list[str]]:
    """The images of each output, [N, C, H, W], and the faults."""
    program = PROGRAMS[name]
    shape, dtype = slot_of(program)
    memory = np.zeros((len(FILES), *shape), dtype)
    faults = CpuRunner(program).run(Payload.of(FILES), KEYS, slots_of(program, memory))
    return split(slots_of(program, torch.from_numpy(memory))), [str(fault) for fault in faults]


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[CpuDecodePool]:
    made = CpuDecodePool(PROGRAMS[getattr(request, "param", "stages")], threads=3, make=heap)
    go_on.clear()
    with deadline(SECONDS):
        yield made
    go_on.set()
    made.close()


def begin(pool: CpuDecodePool, rows: NDArray[np.int64], position: int | None = None) -> PendingImages:
    """Begin to decode these files, all of the samples at one position if that is given."""
    keys = KEYS if position is None else Keys(3, 1, np.full(len(FILES), position))
    return pool.begin(Payload.of(FILES), rows, keys)


def check(pending: PendingImages, name: str = "stages") -> None:
    """A chunk's images and faults are those of the CPU's runner, in the order of `rows`."""
    results, faults = pending.result()
    right, right_faults = expected(name)
    assert [str(fault) for fault in faults] == [right_faults[i] for i in pending.rows]
    good = [place for place, fault in enumerate(faults) if fault is None]
    assert len(good) == len(pending.rows) - int(7 in pending.rows)
    for found, whole in zip(split(slots_of(PROGRAMS[name], results)), right, strict=True):
        assert torch.equal(found[good], whole[pending.rows[good]])


@pytest.mark.parametrize("pool", ["stages"], indirect=True)
@pytest.mark.parametrize("rows", [[0], [5, 7, 21], list(range(23))])
def test_some_files_of_a_chunk(pool: CpuDecodePool, rows: list[int]) -> None:
    check(begin(pool, np.array(rows)))


def test_many_chunks_in_any_number_and_order(pool: CpuDecodePool) -> None:
    rng = np.random.default_rng(0)
    for _ in range(4):
        chunks = [begin(pool, rng.permutation(23)[: rng.integers(1, 23)]) for _ in range(12)]
        for chunk in rng.permutation(np.array(chunks, object)):
            check(chunk)
            pool.release(chunk.memory)


@pytest.mark.parametrize("pool", ["views"], indirect=True)
def test_views(pool: CpuDecodePool) -> None:
    for rows in ([3], [7, 2, 11], list(range(23))):
        check(begin(pool, np.array(rows)), "views")


@pytest.mark.parametrize("pool", ["faulty"], indirect=True)
def test_what_decoding_raises_is_raised_where_the_result_is_needed(pool: CpuDecodePool) -> None:
    failed, other = begin(pool, np.array([2, 3]), FAILS), begin(pool, np.arange(9))
    with pytest.raises(RuntimeError, match="mine"):
        failed.result()
    check(other, "faulty")


@pytest.mark.parametrize("pool", ["faulty"], indirect=True)
def test_a_chunk_that_is_never_launched_is_not_decoded(pool: CpuDecodePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its memory is free once those that were begun before have ended."""
    monkeypatch.setattr(decode_pool, "_CHUNKS", 1)
    begun, waiting = begin(pool, np.array([2, 3]), WAITS), begin(pool, np.array([2, 3]), FAILS)
    memory = weakref.ref(waiting.memory)
    del waiting
    go_on.set()
    begun.result()
    check(begin(pool, np.arange(9)), "faulty")
    gc.collect()
    assert memory() is None


@pytest.mark.parametrize("pool", ["faulty"], indirect=True)
def test_a_chunk_that_takes_too_long_is_named(pool: CpuDecodePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_pool, "_LONGEST_SECONDS", 0.1)
    with pytest.raises(LoaderTimeout, match=r"within 0\.1 s"):
        begin(pool, np.array([2, 3]), WAITS).result()


def test_the_end_of_an_epoch_ends_its_chunks_and_no_others(pool: CpuDecodePool) -> None:
    flag: Any = StopFlag()

    def begin_in_epoch() -> PendingImages:
        use_stop_flag(flag)
        return begin(pool, np.arange(23))

    flag.set()
    found: list[PendingImages] = []
    thread = threading.Thread(target=lambda: found.append(begin_in_epoch()))
    thread.start()
    thread.join()
    with pytest.raises(LoaderError, match="ended"):
        found[0].result()
    check(begin(pool, np.arange(23)))


def test_a_closed_pool_decodes_nothing(pool: CpuDecodePool) -> None:
    check(begin(pool, np.arange(3)))
    pool.close()
    with pytest.raises(ConnectionAbortedError, match="closed"):
        begin(pool, np.arange(3))


def test_results_hold_no_memory_once_nobody_refers_to_them(pool: CpuDecodePool) -> None:
    pending = begin(pool, np.arange(4))
    check(pending)
    gone = weakref.ref(pending)
    gc.disable()
    try:
        del pending
        assert gone() is None
    finally:
        gc.enable()
