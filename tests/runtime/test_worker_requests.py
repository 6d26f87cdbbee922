"""A worker pool alone: requests, workers that are lost or cannot start, and what closing leaves."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from gpuflow.runtime.memory import shared as shared_memory
from gpuflow.runtime.worker_pool import ForkServer, ParentConnection, WorkerConnection, WorkerPool
from tests.datasets import deadline
from tests.forking import ROOT

Make = Callable[..., WorkerPool]
SECONDS = 60.0


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes pools of workers that echo, and closes them."""
    pools = []

    def pool(workers: int = 1, setup: object = "setup", connections: int = 1) -> WorkerPool:
        pools.append(
            WorkerPool("tests.runtime.echo_worker", connections=[connections] * workers, setup=setup, task="echo")
        )
        pools[-1].wait_until_ready(SECONDS)
        return pools[-1]

    yield pool
    for made in pools:
        made.close()


def echo(message: object) -> Callable[[WorkerConnection], Any]:
    def exchange(connection: WorkerConnection) -> Any:
        connection.send(message)
        return connection.answer()

    return exchange


def ask(pool: WorkerPool, message: object) -> Any:
    """What a worker answers: its setup and the message."""
    answer = pool.request(echo(message))
    assert answer is not None
    return answer[:2]


def post(message: object) -> Callable[[WorkerConnection], bool]:
    """Sends a message and does not wait for its answer."""

    def send(connection: WorkerConnection) -> bool:
        connection.send(message)
        return True

    return send


def setups_open() -> int:
    """How many descriptors this process holds on what it sent to worker processes."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            count += "gpuflow_setup" in os.readlink(link)
    return count


def test_requests_get_their_answers(make: Make) -> None:
    pool = make(2)
    assert len(pool) == 2 and pool.counts() == {"at_work": 2, "starting": 0}
    assert [ask(pool, n) for n in range(3)] == [("setup", n) for n in range(3)]
    ids: list[int] = []
    pool.each_idle(lambda connection: ids.append(echo(None)(connection)[2]))
    assert len(set(ids)) == 2 and os.getpid() not in ids


def test_workers_that_have_started_are_counted_before_any_request(tmp_path: Path) -> None:
    start = tmp_path / "start"
    pool = WorkerPool("tests.runtime.echo_worker", connections=[1, 1], setup=start, task="echo")
    try:
        assert pool.counts() == {"at_work": 0, "starting": 2}
        start.touch()
        with deadline(SECONDS):
            while pool.counts() != {"at_work": 2, "starting": 0}:
                time.sleep(0.02)
    finally:
        pool.close()
    assert pool.counts()["starting"] == 0


def test_each_request_goes_to_the_worker_with_the_fewest(make: Make) -> None:
    """In any order in which answers are received. So no request waits while another worker has nothing to do."""
    pool, rng = make(3, connections=4), np.random.default_rng(0)
    under_way: list[tuple[tuple[object, int], Any]] = []
    for number in range(60):
        while len(under_way) == 12 or (under_way and rng.random() < 0.4):
            _, pending = under_way.pop(rng.integers(len(under_way)))
            assert pending.result()[0] == "setup"
        counts = Counter(worker for worker, _ in under_way)
        pending = pool.begin(post(number))
        assert pending is not None
        worker = pending.connection.worker
        assert len(counts) < 3 or counts[worker] == min(counts.values())
        assert counts[worker] == 0 or len(counts) == 3
        under_way.append((worker, pending))
    for _, pending in under_way:
        pending.result()
    assert len(pool._idle) == 12


def test_a_lost_worker_takes_its_other_connections_along(make: Make) -> None:
    pool = make(2, connections=3)
    kept = [pool.begin(post(number)) for number in range(2)]
    assert pool.request(echo("end")) is None
    assert len(pool) == 1
    for pending in kept:
        assert pending is not None
        pending.result()
    assert [ask(pool, number) for number in range(6)] == [("setup", number) for number in range(6)]
    assert len(pool._idle) == 3


def test_a_connection_that_is_found_ready_after_its_worker_was_lost_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = WorkerPool("tests.runtime.echo_worker", connections=[2], setup="setup", task="echo")
    try:
        with deadline(SECONDS):
            while not all(one.has_answer() for one in pool._starting):
                time.sleep(0.01)
        with monkeypatch.context() as changed:
            changed.setattr(pool, "_accept_started", lambda: None)
            pool._accept(pool._starting.pop())
            assert pool.request(echo("end")) is None
        assert pool.request(echo("x")) is None
        assert (len(pool), pool._starting) == (0, [])
    finally:
        pool.close()


def test_a_request_that_was_not_sent_leaves_its_worker_free(make: Make) -> None:
    pool = make()
    assert pool.begin(lambda connection: False) is None
    pending = pool.begin(post("later"))
    assert pending is not None
    assert pool.request(echo(1)) is None, "the only worker is at another request"
    assert pending.result()[:2] == ("setup", "later")
    assert ask(pool, 2) == ("setup", 2)


def test_a_request_that_is_abandoned_costs_its_worker_without_a_message(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make(2)
    pending = pool.begin(post("never read"))
    assert pending is not None
    pending.abandon()
    assert len(pool) == 1
    assert ask(pool, 1) == ("setup", 1)
    assert not caplog.records


def test_an_error_in_an_exchange_is_raised_and_costs_the_worker(make: Make) -> None:
    def fail(connection: WorkerConnection) -> None:
        connection.send("half")
        raise KeyError("mine")

    pool = make(2)
    with pytest.raises(KeyError):
        pool.request(fail)
    assert len(pool) == 1
    assert ask(pool, 1) == ("setup", 1), "and not the answer to the other request"


def test_a_worker_that_ends_costs_no_request(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    pool = make()
    assert pool.counts()["at_work"]
    with caplog.at_level(logging.WARNING):
        assert pool.request(echo("end")) is None
    assert len(pool) == 0 and pool.request(echo(1)) is None
    (record,) = caplog.records
    assert record.getMessage().startswith("a process that echos has ended: ")
    assert record.getMessage().endswith("; threads echo instead")


@pytest.mark.parametrize(
    ("setup", "start"), [("end", "a process that echos has ended: "), ("refuse", "a process cannot echo: refuse")]
)
def test_workers_that_do_not_start_are_said_and_given_up(
    setup: str, start: str, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        pool = make(2, setup=setup)
    assert len(pool) == 0 and pool.counts() == {"at_work": 0, "starting": 0}
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (1 if setup == "refuse" else 2), "the same reason is said once"
    assert all(message.startswith(start) and message.endswith("; threads echo instead") for message in messages)


FORKED = """
import os, time
from gpuflow.runtime import worker_pool
ids, (reports, report) = os.memfd_create("ids"), os.pipe()
write = os.write
def write_late(*arguments):
    time.sleep(0.3)
    write(*arguments)
os.write = write_late
share = worker_pool._fork([[0], [1], [2]], ids)
if share != [0]:
    write(report, b"known " if os.fstat(ids).st_size else b"unknown ")
    os._exit(0)
os.close(report)
with open(reports) as file:
    print(file.read())
"""


def test_a_worker_starts_when_the_ids_of_all_are_known() -> None:
    """A worker that was killed before, because it refuses, ended all others with it."""
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "known known", "")


def test_closing_leaves_no_descriptor_while_the_pool_is_still_held(make: Make) -> None:
    before = setups_open()
    pool = make(2)
    assert setups_open() == before + 1
    pool.close()
    assert setups_open() == before
    assert pool.closed and pool.request(echo(1)) is None


def test_memory_is_mapped_once_for_all_requests() -> None:
    ours, theirs = Pipe()
    connection, worker = WorkerConnection(ours, cast(ForkServer, None), 0), ParentConnection(theirs)

    def shared(memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        assert connection.send("memory", memory)
        assert worker.recv() == "memory"
        mapped = worker.memory()
        assert mapped is not None
        return mapped

    first, second = (shared_memory(4096) for _ in range(2))
    first[:], second[:] = 1, 2
    seen = [shared(memory) for memory in (first, second, first, second)]
    assert [int(mapped[0]) for mapped in seen] == [1, 2, 1, 2]
    places = [mapped.ctypes.data for mapped in seen]
    assert places[:2] == places[2:]
    assert not connection.send("memory", first, np.zeros(10, np.uint8)), "the second is ordinary memory"
    assert worker.recv() == "memory"
    mapped = worker.memory()
    assert mapped is not None and mapped[0] == 1
    assert worker.memory() is None
    ours.close()
    theirs.close()


def test_a_worker_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuflow.runtime.worker_pool._ANSWER_SECONDS", 0.01)
    ours, theirs = Pipe()
    with pytest.raises(TimeoutError, match=r"^no answer within 0\.01 s$"):
        WorkerConnection(ours, cast(ForkServer, None), 0).answer()
    theirs.close()
    with pytest.raises(EOFError):
        WorkerConnection(ours, cast(ForkServer, None), 0).answer()
    ours.close()


def test_a_process_that_cannot_be_started_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = setups_open()
    monkeypatch.setattr("sys.executable", "/absent/python3")
    with caplog.at_level(logging.WARNING):
        pool = WorkerPool("tests.runtime.echo_worker", connections=[1, 1], setup=None, task="echo")
    assert len(pool) == 0 and pool.request(echo(1)) is None
    (record,) = caplog.records
    assert record.getMessage().startswith("no process to echo with: ")
    assert setups_open() == before
    pool.close()
