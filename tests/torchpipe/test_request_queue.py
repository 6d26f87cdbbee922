"""The backlog of a node that does everything: who starts an instance, who waits, how long an instance does."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from gpuflow.torchpipe.request_queue import Backlog, Request

LONG = 20.0


class Started:
    """Stands for torchpipe: keeps what it is given, or refuses it."""

    def __init__(self) -> None:
        self.given: list[bytes] = []
        self.refuses = False

    def __call__(self, data: bytes, request: Request) -> None:
        if self.refuses:
            raise RuntimeError("no")
        self.given.append(data)


@pytest.fixture
def started() -> Started:
    return Started()


def add(backlog: Backlog, *data: bytes) -> None:
    for each in data:
        backlog.add(each, Request(lambda request: None, wrap=lambda value: value))


def take(backlog: Backlog, *, arrived: int = 0, seconds: float = 0.0) -> list[bytes]:
    return [data for data, _ in backlog.take(arrived=arrived, seconds=seconds)]


def test_a_request_starts_an_instance_where_one_is_free(started: Started) -> None:
    backlog = Backlog(started, instances=2, batch=4)
    add(backlog, b"a", b"b", b"c")
    assert started.given == [b"a", b"b"]
    backlog.begin(1)
    add(backlog, b"d")
    assert started.given == [b"a", b"b"], "the other is to begin yet"
    assert take(backlog) == [b"c", b"d"]


def test_an_instance_is_free_again_once_nothing_is_left(started: Started) -> None:
    backlog = Backlog(started, instances=1, batch=4)
    add(backlog, b"a")
    backlog.begin(1)
    add(backlog, b"b")
    assert take(backlog) == [b"b"]
    add(backlog, b"c")
    assert take(backlog) == [b"c"]
    assert take(backlog) == []
    assert started.given == [b"a"]
    add(backlog, b"d")
    assert started.given == [b"a", b"d"]


def test_two_requests_that_torchpipe_makes_one_batch_of_leave_an_instance_free(started: Started) -> None:
    backlog = Backlog(started, instances=2, batch=4)
    add(backlog, b"a", b"b")
    backlog.begin(2)
    add(backlog, b"c")
    assert started.given == [b"a", b"b", b"c"]


def test_batches_are_taken_in_order_and_none_is_too_large(started: Started) -> None:
    backlog = Backlog(started, instances=1, batch=4)
    add(backlog, b"-")
    backlog.begin(1)
    add(backlog, *(bytes([number]) for number in range(9)))
    taken = [take(backlog) for _ in range(4)]
    assert [len(each) for each in taken] == [4, 4, 1, 0]
    assert b"".join(data for each in taken for data in each) == bytes(range(9))


def test_an_instance_waits_for_so_many_and_no_longer(started: Started) -> None:
    backlog = Backlog(started, instances=1, batch=4)
    add(backlog, b"-")
    backlog.begin(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take, backlog, arrived=3, seconds=LONG)
        time.sleep(0.05)
        add(backlog, b"a")
        time.sleep(0.05)
        assert not waiting.done()
        add(backlog, b"b")
        assert waiting.result(LONG) == [b"a", b"b"]
    add(backlog, b"c")
    begun = time.monotonic()
    assert take(backlog, arrived=9, seconds=0.1) == [b"c"]
    assert 0.1 <= time.monotonic() - begun < LONG


def test_an_instance_does_not_wait_once_its_batch_is_full(started: Started) -> None:
    backlog = Backlog(started, instances=1, batch=4)
    add(backlog, b"-")
    backlog.begin(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take, backlog, arrived=99, seconds=LONG)
        time.sleep(0.05)
        add(backlog, b"a", b"b", b"c", b"d")
        assert waiting.result(LONG / 2) == [b"a", b"b", b"c", b"d"]
    add(backlog, b"e", b"f", b"g", b"h", b"i")
    assert take(backlog, arrived=99, seconds=LONG) == [b"e", b"f", b"g", b"h"]


def test_what_torchpipe_refuses_is_told_and_the_next_may_start(started: Started) -> None:
    backlog = Backlog(started, instances=1, batch=4)
    started.refuses = True
    with pytest.raises(RuntimeError, match="no"):
        add(backlog, b"a")
    started.refuses = False
    add(backlog, b"b")
    assert started.given == [b"b"]


def test_many_threads_lose_nothing(started: Started) -> None:
    backlog = Backlog(started, instances=1, batch=4)
    ready = Barrier(8)

    def ask(number: int) -> None:
        ready.wait(LONG)
        for turn in range(200):
            add(backlog, bytes([number, turn]))

    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(ask, number) for number in range(8)]
        for each in done:
            each.result(LONG)
    assert len(started.given) == 1
    backlog.begin(1)
    found = list(started.given)
    while batch := take(backlog):
        found += batch
    assert len(found) == len(set(found)) == backlog.arrived == 1600
    for number in range(8):
        assert [data[1] for data in found if data[0] == number] == list(range(200)), "of one thread in order"
