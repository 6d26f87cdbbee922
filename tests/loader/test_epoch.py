"""One epoch's pipeline, from its start to its end, around a pipeline that does nothing."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from gpuflow.loader.batch import Assembly
from gpuflow.loader.epoch import Admission, EpochRun, RunningPipeline
from gpuflow.runtime.threads import DaemonPool, QuickSwitching

SECONDS = 30.0
BATCHES = [cast(Assembly, object()) for _ in range(200)]


class Idle:
    """A pipeline that does nothing. `stopped`: the time limits of all calls of `stop`."""

    def __init__(self, fails: bool = False) -> None:
        self.stopped: list[float | None] = []
        self._fails = fails

    def stop(self, *, timeout: float | None = None) -> None:
        self.stopped.append(timeout)
        if self._fails:
            raise TimeoutError


class Parts:
    """The parts of a running pipeline."""

    def __init__(self, *, fails: bool = False, begun: bool = True) -> None:
        self.pipeline, self.finished = Idle(fails), queue.SimpleQueue[Assembly | None]()
        self.pool, self.begun = DaemonPool(1, "test_epoch"), threading.Event()
        self.admission, self.ahead = Admission(1, spare=1), Admission(1)
        self.switching = QuickSwitching(0.00002)
        if begun:
            self.begun.set()

    def begin(self) -> RunningPipeline:
        return RunningPipeline(
            pipeline=self.pipeline,
            finished=self.finished,
            pools=[self.pool],
            begun=self.begun,
            admission=self.admission,
            ahead=self.ahead,
            switching=self.switching,
        )

    def run(self, culprit: str = "decode") -> EpochRun:
        return EpochRun(self.begin, lambda: culprit)


def alive(name: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(name)]


def await_true(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_stopping_ends_everything_and_refuses_all_who_wait() -> None:
    parts = Parts()
    assert parts.admission.acquire(0) and parts.ahead.acquire(0)
    answers: list[bool] = []
    waiting = [
        threading.Thread(target=lambda of=of: answers.append(of.acquire(1))) for of in (parts.admission, parts.ahead)
    ]
    for thread in waiting:
        thread.start()
    assert parts.begin().stop(SECONDS)
    for thread in waiting:
        thread.join(SECONDS)
    assert answers == [False, False]
    assert parts.pipeline.stopped == [SECONDS]
    assert not alive("gpuflow_test_epoch")


def test_a_pipeline_that_does_not_stop_is_reported_and_its_threads_end(caplog: pytest.LogCaptureFixture) -> None:
    parts = Parts(fails=True)
    with caplog.at_level(logging.WARNING):
        run = parts.run(culprit="a slow stage")
        run.stop()
    assert not run.owner.is_alive()
    assert [record.getMessage() for record in caplog.records] == ["a thread stays behind: a slow stage"]
    assert not alive("gpuflow_test_epoch")


def test_stop_waits_until_the_pipeline_has_begun() -> None:
    parts = Parts(begun=False)
    stopping = threading.Thread(target=parts.begin().stop, args=(SECONDS,))
    stopping.start()
    assert not parts.admission.acquire(5), "closed, so the end is under way"
    assert parts.pipeline.stopped == []
    parts.begun.set()
    stopping.join(SECONDS)
    assert parts.pipeline.stopped == [SECONDS]


def test_stopping_waits_and_dropping_does_not() -> None:
    parts = Parts()
    run = parts.run()
    run.stop()
    assert not run.owner.is_alive() and parts.pipeline.stopped
    parts = Parts()
    run = parts.run()
    owner = run.owner
    del run
    owner.join(SECONDS)
    assert not owner.is_alive() and parts.pipeline.stopped


def test_an_error_at_the_start_is_raised_to_the_caller() -> None:
    def begin() -> RunningPipeline:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        EpochRun(begin, str)
    await_true(lambda: not alive("gpuflow_epoch"))


def test_batches_come_in_order_and_an_empty_queue_times_out() -> None:
    parts = Parts()
    run = parts.run()
    for batch in BATCHES[:3]:
        parts.finished.put(batch)
    assert [run.get(SECONDS) for _ in range(3)] == BATCHES[:3]
    with pytest.raises(TimeoutError):
        run.get(0.01)
    run.stop()


def test_one_more_batch_may_be_in_flight_once_the_run_has_grown() -> None:
    parts = Parts()
    run = parts.run()
    run.grow()
    assert parts.admission.acquire(0) and parts.admission.acquire(1)
    run.stop()


def test_a_batch_is_in_flight_until_it_is_released() -> None:
    parts = Parts()
    run = parts.run()
    assert parts.admission.acquire(0)
    admitted: list[bool] = []
    waiting = threading.Thread(target=lambda: admitted.append(parts.admission.acquire(1)))
    waiting.start()
    run.release()
    waiting.join(SECONDS)
    assert admitted == [True]
    run.stop()
