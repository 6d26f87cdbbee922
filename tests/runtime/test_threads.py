"""The thread pool: it runs what is submitted in order, and its end is never waited for longer than asked."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, wait

import pytest
import torch

from gpuflow.runtime.threads import DaemonPool, QuickSwitching, use_torch_threads
from tests.datasets import deadline, nothing_left_behind, python


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    with deadline(30):
        yield


def test_results_and_exceptions_come_back() -> None:
    pool = DaemonPool(2, "test")
    assert pool.submit(pow, 2, 5).result(5) == 32
    assert isinstance(pool.submit(int, "x").exception(5), ValueError)
    assert isinstance(pool.submit(exec, "raise SystemExit(3)").exception(5), SystemExit)
    assert pool.submit(pow, 2, 6).result(5) == 64, "the threads live on"
    assert pool.end(5)


def test_one_thread_runs_in_order() -> None:
    pool = DaemonPool(1, "test")
    seen: list[int] = []
    for i in range(50):
        pool.submit(seen.append, i)
    pool.submit(int).result(5)
    assert seen == list(range(50))
    assert pool.end(5)


def test_as_many_run_at_once_as_there_are_threads() -> None:
    pool, meeting = DaemonPool(3, "test"), threading.Barrier(3)
    futures = [pool.submit(meeting.wait, 5) for _ in range(3)]
    assert sorted(future.result(5) for future in futures) == [0, 1, 2]
    assert pool.end(5)


def test_threads_are_daemons_with_names_and_leave() -> None:
    with nothing_left_behind(seconds=0.5):
        pool = DaemonPool(2, "name")
        mine = [thread for thread in threading.enumerate() if thread.name.startswith("gpuflow_name_")]
        assert [thread.daemon for thread in mine] == [True, True]
        assert pool.end(5)


def test_an_initializer_that_raises_leaves_no_thread() -> None:
    calls = iter(range(3))

    def initialize() -> None:
        if next(calls) == 1:
            raise OSError("mine")

    with nothing_left_behind(seconds=0.0), pytest.raises(OSError, match="mine"):
        DaemonPool(3, "test", initialize)


def test_what_has_not_begun_is_cancelled_at_the_end() -> None:
    pool, release = DaemonPool(1, "test"), threading.Event()
    ran: list[int] = []
    first = pool.submit(release.wait, 10)
    while not first.running():
        time.sleep(0.001)
    second = pool.submit(ran.append, 1)
    threading.Timer(0.1, release.set).start()
    assert pool.end(5)
    assert first.result(1)
    assert not ran and second.cancelled()


def test_waiting_for_a_call_that_never_begins_ends_at_once() -> None:
    """Also if a thread is stuck, and for those who wait for several calls."""
    pool, release = DaemonPool(1, "test"), threading.Event()
    first = pool.submit(release.wait, 10)
    while not first.running():
        time.sleep(0.001)
    waiting = [pool.submit(int) for _ in range(3)]
    assert waiting[1].cancel()
    assert not pool.end(0.0)
    assert wait(waiting, 5).not_done == set()
    with pytest.raises(CancelledError):
        waiting[0].result(5)
    release.set()
    assert pool.end(5)


def test_a_pool_that_was_ended_takes_no_calls() -> None:
    pool = DaemonPool(2, "test")
    assert pool.end(5)
    with pytest.raises(RuntimeError, match="these threads were ended; they take no more calls"):
        pool.submit(int)


def test_no_call_is_lost_while_a_pool_ends() -> None:
    """Several threads submit while it ends: each call runs, or is cancelled, or is refused."""
    for _ in range(30):
        pool, futures, refused = DaemonPool(2, "test"), list[Future[int]](), list[str]()

        def work(pool: DaemonPool, futures: list[Future[int]], refused: list[str]) -> None:
            try:
                while True:
                    futures.append(pool.submit(int))
            except RuntimeError as error:
                refused.append(str(error))  # which ends the loop

        submitting = [threading.Thread(target=work, args=(pool, futures, refused)) for _ in range(2)]
        for thread in submitting:
            thread.start()
        while len(futures) < 20:
            time.sleep(0)
        assert pool.end(5)
        for thread in submitting:
            thread.join(5)
        assert wait(futures, 5).not_done == set()
        assert len(refused) == len(submitting)


def test_the_end_is_not_waited_for_longer_than_asked() -> None:
    pool, release = DaemonPool(2, "test"), threading.Event()
    stuck = pool.submit(release.wait)
    while not stuck.running():
        time.sleep(0.001)
    start = time.monotonic()
    assert not pool.end(0.2)
    assert 0.15 < time.monotonic() - start < 8, "by default it is 10 s"
    release.set()
    assert pool.end(5)


def test_a_cancelled_future_does_not_run() -> None:
    pool, release = DaemonPool(1, "test"), threading.Event()
    ran: list[int] = []
    pool.submit(release.wait)
    waiting = pool.submit(ran.append, 1)
    assert waiting.cancel()
    release.set()
    pool.submit(int).result(5)
    assert not ran
    pool.shutdown()


def test_a_pool_may_end_on_its_own_thread() -> None:
    pool = DaemonPool(1, "test")
    assert pool.submit(pool.end, 1.0).result(5) is False
    assert pool.end(5)


def test_a_stuck_thread_does_not_keep_the_process() -> None:
    done = python(
        "import threading; from gpuflow.runtime.threads import DaemonPool; "
        "DaemonPool(1, 'x').submit(threading.Event().wait)"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_quick_switching_ends_with_the_last_that_wants_it() -> None:
    before = sys.getswitchinterval()
    first, second = QuickSwitching(0.00002), QuickSwitching(0.00002)
    assert sys.getswitchinterval() == pytest.approx(0.00002)
    first.end()
    first.end()
    assert sys.getswitchinterval() == pytest.approx(0.00002)
    second.end()
    assert sys.getswitchinterval() == pytest.approx(before)


def test_quick_switching_slows_nothing_that_is_quicker_already() -> None:
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.00001)
        quick = sys.getswitchinterval()
        switching = QuickSwitching(0.00002)
        assert sys.getswitchinterval() == quick
        switching.end()
        assert sys.getswitchinterval() == quick
    finally:
        sys.setswitchinterval(before)


def test_torchs_threads_are_those_of_one_thread_alone() -> None:
    before = torch.get_num_threads()
    wanted = before + 1
    found: list[int] = []

    def work() -> None:
        use_torch_threads(wanted)
        use_torch_threads(wanted)
        found.append(torch.get_num_threads())

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(20)
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join(20)
    assert found == [wanted, wanted, before]
    assert torch.get_num_threads() == before
