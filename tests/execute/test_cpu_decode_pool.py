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
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpuflow.execute import cpu_decode_pool
from gpuflow.execute.cpu import CpuRunner
from gpuflow.execute.cpu_decode_pool import CpuDecodePool, PendingImages
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import fold
from gpuflow.pipeline.stage import Keys, Pipeline
from gpuflow.pipeline.validate import trace
from gpuflow.pipeline.views import AnyProgram, slot_of, slots_of, split
from gpuflow.runtime import worker_pool
from gpuflow.runtime.memory import heap, shared
from gpuflow.sources import Payload
from gpuflow.stages import Decode, Flip, RandomResizedCrop
from tests import images
from tests.datasets import Entries, deadline, views_program

FAILS, WAITS = 40, 41
"""Positions of samples for which `Faulty` raises in every process, or does not end in a worker process."""
_PARENT = "GPUFLOW_TEST_PARENT"


@dataclass(frozen=True, kw_only=True, repr=False)
class Faulty(s.Geometry):
    """A custom stage with faults of its own."""

    stage_name: ClassVar[str] = "faulty"

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        return spec

    def draw(self, keys: s.StageKeys, height: s.Ints, width: s.Ints) -> tuple[s.Move, ...]:
        if (keys.positions == FAILS).any():
            raise RuntimeError("mine")
        while (keys.positions == WAITS).any() and os.environ[_PARENT] != str(os.getpid()):
            time.sleep(0.1)
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
FILES = [images.jpeg(images.photo(30 + i, 44 - i, seed=i), progressive=True) for i in range(23)]
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
def at_work(name: str = "stages", processes: int = 3) -> Iterator[CpuDecodePool]:
    """A pool whose workers are at work."""
    pool = pool_of(processes, name=name)
    deadline = time.monotonic() + SECONDS
    while not pool._workers:
        check(begin(pool, np.arange(len(FILES))), name)
        assert time.monotonic() < deadline
        time.sleep(0.05)  # leaves the cores to the workers
    assert sum(map(len, pool._workers)) == processes and not pool.is_starting
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def working() -> Iterator[CpuDecodePool]:
    """A pool for all tests that leave it as it is."""
    with at_work() as pool:
        yield pool


@pytest.fixture(scope="module")
def own() -> Iterator[CpuDecodePool]:
    """A pool for a test that kills workers of it, and for one that closes it later."""
    with at_work() as pool:
        yield pool


@pytest.mark.parametrize("rows", [[0], [5, 7, 9], list(range(23))])
@pytest.mark.parametrize("make", [shared, heap])
def test_without_processes_the_calling_thread_decodes(rows: list[int], make: Callable[[int], Any]) -> None:
    pool = pool_of(0)
    check(begin(pool, np.array(rows), make))
    assert not pool._workers and not pool.is_starting
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


def test_requests_have_about_equally_much_to_decode(working: CpuDecodePool) -> None:
    """And each its largest file first."""
    pending = begin(working, np.arange(len(FILES)))
    sizes = [[len(FILES[i]) for i in part.rows] for part in pending.parts]
    totals = list(map(sum, sizes))
    assert len(totals) > 1 and max(totals) - min(totals) <= max(map(len, FILES))
    assert all(part == sorted(part, reverse=True) for part in sizes)
    check(pending)


@pytest.mark.parametrize(
    ("sizes", "parts"), [([900, 5, 4, 3, 2, 1], [[0], [1, 4, 5], [2, 3]]), ([7], [[0]]), ([0, 0], [[0, 1]])]
)
def test_a_file_that_takes_long_is_alone_in_its_request(sizes: list[int], parts: list[list[int]]) -> None:
    dealt = cpu_decode_pool._deal(np.array(sizes), 3)
    assert [part.tolist() for part in dealt] == parts


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


@pytest.fixture(scope="module")
def faulty() -> Iterator[CpuDecodePool]:
    """A pool with one worker whose stage has faults, for a test that leaves it as it is and one that loses the worker
    later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_PARENT, str(os.getpid()))
        with at_work("faulty", 1) as pool:
            yield pool


@pytest.fixture
def in_time() -> Iterator[None]:
    with deadline(SECONDS):
        yield


def begin_at(pool: CpuDecodePool, position: int) -> PendingImages:
    """Begin two images of samples at this position."""
    return pool.begin(Payload.of(FILES, shared), np.array([2, 3]), Keys(3, 1, np.full(len(FILES), position)))


def answered(pending: PendingImages) -> None:
    """Wait until the workers have decoded these images."""
    while not all(part.pending is not None and part.pending.is_answered() for part in pending.parts):
        time.sleep(0.01)


@pytest.mark.usefixtures("in_time")
def test_a_request_whose_decoding_raises_takes_no_answer_of_others(faulty: CpuDecodePool) -> None:
    """Its connection serves other requests once the worker has answered, also while the chunk still exists."""
    for _ in range(3):
        failed = begin_at(faulty, FAILS)
        with pytest.raises(RuntimeError, match="mine"):
            failed.result()
        del failed
        first = begin(faulty, np.arange(4))
        answered(first)
        second = begin(faulty, np.arange(4, 9))  # receives the answers that nobody asks for
        check(first, "faulty")
        check(second, "faulty")
    (workers,) = faulty._workers
    assert len(workers._idle) == len(set(map(id, workers._idle))) == 4, "each connection is free once"
    assert workers.load == 0
    assert not faulty._left


@pytest.mark.usefixtures("in_time")
def test_an_abandoned_request_without_an_answer_costs_its_worker_and_holds_no_memory(
    faulty: CpuDecodePool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_pool, "_ANSWER_SECONDS", 1.0)
    pending = begin_at(faulty, WAITS)
    memory = weakref.ref(pending.memory)
    del pending
    faulty.count(1)
    assert memory() is not None, "the worker may still write there"
    time.sleep(1.1)
    faulty.count(1)
    assert memory() is None and not faulty._left
    assert sum(map(len, faulty._workers)) == 0
    assert "a process that decodes has ended: TimeoutError" in caplog.text
    check(begin(faulty, np.arange(9)), "faulty")


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
