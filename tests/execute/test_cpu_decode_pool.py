"""Images that the CPU decodes ahead, in worker processes and without: always those of `CpuRunner`."""

from __future__ import annotations

import functools
import gc
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpuflow.execute.cpu import runner_of
from gpuflow.execute.cpu_decode_pool import CpuDecodePool, PendingImages
from gpuflow.pipeline.program import fold
from gpuflow.pipeline.stage import Keys, Pipeline
from gpuflow.pipeline.validate import trace
from gpuflow.pipeline.views import AnyProgram, slot_of, slots_of, split
from gpuflow.runtime.memory import heap, shared
from gpuflow.sources import Payload
from gpuflow.stages import Decode, Flip, RandomResizedCrop
from tests import images
from tests.datasets import Entries, views_program

PIPELINE = Pipeline("train", (Decode(), RandomResizedCrop(size=12), Flip(horizontal=0.5)))
LARGE: Entries = [{"decode": {}}, {"resize": {"height": 9, "width": 7}}, {"normalize": {"dtype": "bfloat16"}}]
PROGRAMS: dict[str, AnyProgram] = {
    "stages": fold(PIPELINE, trace(PIPELINE)),
    "views": views_program({"small": (2, [{"decode": {}}, {"random_resized_crop": {"size": 5}}]), "large": (1, LARGE)}),
}
SECONDS = 60.0
FILES = [images.jpeg(images.photo(30 + i, 44 - i, seed=i), progressive=True) for i in range(23)]
FILES[7] = b"no image"
KEYS = Keys(3, 1, np.arange(500, 500 + len(FILES)))


@functools.cache
def expected(name: str) -> tuple[list[torch.Tensor], list[str]]:
    """The images of each output, [N, C, H, W], and the faults."""
    program = PROGRAMS[name]
    shape, dtype = slot_of(program)
    memory = np.zeros((len(FILES), *shape), dtype)
    samples = [np.frombuffer(data, np.uint8) for data in FILES]
    faults = runner_of(program).run(samples, KEYS, slots_of(program, memory))
    return split(slots_of(program, torch.from_numpy(memory))), [str(fault) for fault in faults]


def pool_of(processes: int, cores: int = 16, name: str = "stages") -> CpuDecodePool:
    return CpuDecodePool(PROGRAMS[name], processes=processes, cores=cores, make=shared)


def begin(pool: CpuDecodePool, rows: NDArray[np.int64], make: Callable[[int], Any] = shared) -> PendingImages:
    return pool.begin(Payload.of(FILES, make), rows, KEYS)


def check(pending: PendingImages, name: str = "stages") -> None:
    """A chunk's images and faults are those of the CPU's runner, in the order of `rows`."""
    results, faults = pending.result()
    right, right_faults = expected(name)
    assert [str(fault) for fault in faults] == [right_faults[i] for i in pending.rows]
    good = [place for place, fault in enumerate(faults) if fault is None]
    assert len(good) == len(pending.rows) - int(7 in pending.rows)
    for found, whole in zip(split(slots_of(PROGRAMS[name], results)), right, strict=True):
        assert torch.equal(found[good], whole[pending.rows[good]])


@contextmanager
def at_work(name: str = "stages") -> Iterator[CpuDecodePool]:
    """A pool whose workers are at work."""
    pool = pool_of(3, name=name)
    deadline = time.monotonic() + SECONDS
    while not pool._workers:
        check(begin(pool, np.arange(len(FILES))), name)
        assert time.monotonic() < deadline
        time.sleep(0.05)  # leaves the cores to the workers
    assert pool.counts() == {"at_work": 3, "starting": 0}
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def working() -> Iterator[CpuDecodePool]:
    """A pool for all tests that leave it as it is."""
    with at_work() as pool:
        yield pool


@pytest.fixture
def own() -> Iterator[CpuDecodePool]:
    """A pool for a test that kills its workers or closes it."""
    with at_work() as pool:
        yield pool


@pytest.mark.parametrize("rows", [[0], [5, 7, 9], list(range(23))])
@pytest.mark.parametrize("make", [shared, heap])
def test_without_processes_the_calling_thread_decodes(rows: list[int], make: Callable[[int], Any]) -> None:
    pool = pool_of(0)
    check(begin(pool, np.array(rows), make))
    assert pool.counts() == {"at_work": 0, "starting": 0}
    pool.close()


def test_workers_decode_chunks_in_any_number_and_order(working: CpuDecodePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuDecodePool, "_decode_here", lambda *arguments: pytest.fail("a worker was free"))
    rng = np.random.default_rng(0)
    for _ in range(4):
        chunks = [begin(working, rng.permutation(23)[: rng.integers(1, 4)]) for _ in range(3)]
        for chunk in rng.permutation(np.array(chunks, object)):
            check(chunk)


def test_workers_make_views_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with at_work("views") as pool:
        monkeypatch.setattr(CpuDecodePool, "_decode_here", lambda *arguments: pytest.fail("a worker was free"))
        for rows in ([3], [7, 2, 11], list(range(9))):
            check(begin(pool, np.array(rows)), "views")


def test_more_requests_than_workers_take_lose_nothing(working: CpuDecodePool) -> None:
    chunks = [begin(working, np.arange(len(FILES))) for _ in range(12)]
    for chunk in reversed(chunks):
        check(chunk)


def test_the_largest_files_are_decoded_first(working: CpuDecodePool) -> None:
    pending = begin(working, np.arange(len(FILES)))
    sizes = [len(FILES[i]) for i in pending.rows]
    assert sizes == sorted(sizes, reverse=True)
    check(pending)


def test_memory_that_cannot_be_shared_is_decoded_here(working: CpuDecodePool) -> None:
    check(begin(working, np.arange(9), heap))


def test_a_lost_worker_costs_no_image(own: CpuDecodePool) -> None:
    chunks = [begin(own, np.arange(len(FILES))) for _ in range(6)]
    (pool,) = own._workers
    for pid in pool._servers[0]._workers()[1:]:
        os.kill(pid, signal.SIGKILL)
    for chunk in chunks:
        check(chunk)
    check(begin(own, np.arange(len(FILES))))


def test_answers_that_nobody_asks_for_leave_the_workers_free(
    working: CpuDecodePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [begin(working, np.arange(len(FILES))) for _ in range(9)]
    del chunks
    deadline = time.monotonic() + SECONDS
    while working._left or working._unsent:
        check(begin(working, np.arange(2)))
        assert time.monotonic() < deadline
    monkeypatch.setattr(CpuDecodePool, "_decode_here", lambda *arguments: pytest.fail("a worker was free"))
    check(begin(working, np.arange(12)))


@pytest.mark.parametrize(
    ("seen", "taken", "processes"),
    [
        (100_000, 50, 0),
        (20_000, 7, 0),
        (20_000, 100, 2),
        (256, 7, 0),
        (256, 9, 12),
        (20_000, 600, 10),
        (20_000, 4_000, 13),
    ],
)
def test_there_are_as_many_processes_as_the_share_needs(seen: int, taken: int, processes: int) -> None:
    """None for a rare image, a few for one in 200, more for 3%, even of one chunk, all that are allowed for a fifth."""
    pool = pool_of(13)
    pool.count(seen - max(200, taken))
    pool._adapt(max(200, taken), taken)
    assert (len(pool._starting) if pool._starting is not None else 0) == processes
    pool.close()


def test_a_closed_pool_decodes_nothing(own: CpuDecodePool) -> None:
    own.close()
    with pytest.raises(ConnectionAbortedError, match="closed"):
        begin(own, np.arange(3))


def test_results_hold_no_memory_once_nobody_refers_to_them(working: CpuDecodePool) -> None:
    pending = begin(working, np.arange(4))
    check(pending)
    gone = weakref.ref(pending)
    gc.disable()
    try:
        del pending
        assert gone() is None
    finally:
        gc.enable()
