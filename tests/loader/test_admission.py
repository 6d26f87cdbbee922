"""How many batches are in flight: order, capacity, completion, closing."""

from __future__ import annotations

import itertools
import queue
import threading
import time

from gpuflow.loader.epoch import Admission
from tests.host_stream import FakeEvent


def test_no_more_are_admitted_than_the_capacity() -> None:
    admission, inside, most = Admission(3), [0], [0]
    lock, turns = threading.Lock(), itertools.count()

    def work() -> None:
        for _ in range(50):
            assert admission.acquire(next(turns))
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            time.sleep(0.0002)
            with lock:
                inside[0] -= 1
            admission.release()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == [3] and inside == [0]


def test_no_batch_takes_the_place_of_an_earlier_one() -> None:
    """Else the earlier one would wait for the later ones, and they for whoever wants the earlier one first."""
    admission, inside = Admission(2), list[int]()
    entered = queue.SimpleQueue[int]()

    def work(turn: int) -> None:
        assert admission.acquire(turn)
        entered.put(turn)

    threads = [threading.Thread(target=work, args=(turn,), daemon=True) for turn in (4, 3, 2, 1, 0)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for left in range(5):
        while len(inside) < min(left + 2, 5):
            inside.append(entered.get(timeout=10))
        assert sorted(inside) == list(range(min(left + 2, 5))) and entered.empty()
        admission.release()


def test_a_closed_admission_turns_away_whoever_waits_or_comes() -> None:
    admission = Admission(1)
    assert admission.acquire(0)
    answers: list[bool] = []
    waiting = [threading.Thread(target=lambda turn=turn: answers.append(admission.acquire(turn))) for turn in (1, 2, 3)]
    for thread in waiting:
        thread.start()
    time.sleep(0.05)
    assert answers == []
    admission.close()
    for thread in waiting:
        thread.join(5)
    assert answers == [False] * 3 and not admission.acquire(4)


def test_a_place_is_free_once_its_completion_is_done() -> None:
    admission, later, entered = Admission(1), FakeEvent(), threading.Event()
    assert admission.acquire(0)
    admission.release(later)

    def enter() -> None:
        if admission.acquire(1):
            entered.set()

    waiting = threading.Thread(target=enter)
    waiting.start()
    assert not entered.wait(0.05)
    later.passed = True
    assert entered.wait(5)
    waiting.join(5)


class LateEvent:
    """Passes a while after it was made, and counts how often it was asked."""

    SECONDS = 0.03

    def __init__(self) -> None:
        self._passes, self.asked = time.monotonic() + self.SECONDS, 0

    def query(self) -> bool:
        self.asked += 1
        return time.monotonic() >= self._passes


def test_a_completion_is_asked_seldom_where_waits_are_alike() -> None:
    """Asking each millisecond would be 30 times. A busy machine asks less often, not more."""
    admission, events = Admission(1), list[LateEvent]()
    assert admission.acquire(0)
    for turn in range(1, 25):
        events.append(LateEvent())
        admission.release(events[-1])
        assert admission.acquire(turn)
    asked = [event.asked for event in events[12:]]
    assert min(asked) >= 2 and sorted(asked)[len(asked) // 2] <= 12


def test_a_short_wait_after_a_long_one_is_noticed() -> None:
    admission, late = Admission(1), LateEvent()
    late._passes += 1.0
    assert admission.acquire(0)
    admission.release(late)
    assert admission.acquire(1)
    assert admission._usual_wait <= 0.1
    for turn in range(2, 40):
        event = FakeEvent()
        event.passed = True
        admission.release(event)
        assert admission.acquire(turn)
    assert admission._usual_wait < 0.001


def test_closing_ends_the_wait_for_an_event_that_never_passes() -> None:
    admission, answers = Admission(0), list[bool]()
    admission.release(FakeEvent())
    waiting = threading.Thread(target=lambda: answers.append(admission.acquire(0)))
    waiting.start()
    time.sleep(0.02)
    admission.close()
    waiting.join(5)
    assert answers == [False]


def test_the_capacity_grows_by_its_spare_places_and_no_more() -> None:
    admission, inside = Admission(1, spare=2), queue.SimpleQueue[int]()

    def work() -> None:
        for turn in range(5):
            if admission.acquire(turn):
                inside.put(turn)

    thread = threading.Thread(target=work)
    thread.start()
    for widened in range(5):
        assert inside.get(timeout=5) == widened if widened < 3 else inside.empty()
        time.sleep(0.02)
        admission.grow()
    admission.close()
    thread.join(5)
    assert inside.empty()
