"""Which batches count as in use, and when no more, so that their places can be given to others."""

from __future__ import annotations

import weakref

import pytest
import torch

from gpuflow.loader import iterator


class Event:
    """Takes the place of a `torch.cuda.Event`."""

    passed = False

    def query(self) -> bool:
        return self.passed


@pytest.fixture(name="event")
def _event() -> Event:
    return Event()


def test_it_is_unused_once_the_gpu_has_passed_the_event_and_the_consumer_has_dropped_it(event: Event) -> None:
    images = torch.zeros(3)
    unused = iterator._Unused(event, weakref.ref(images))
    assert not any(unused.query() for _ in range(100))
    event.passed = True
    assert not unused.query()
    del images
    assert unused.query()


def test_a_consumer_that_keeps_all_batches_is_not_waited_for(event: Event) -> None:
    images = torch.zeros(3)
    event.passed = True
    unused = iterator._Unused(event, weakref.ref(images))
    assert [unused.query() for _ in range(iterator._QUERIES_UNTIL_KEPT)] == [False, False, False, True]
    assert len(images) == 3


def test_dropped_images_do_not_free_the_place_before_the_gpu_is_done_with_them(event: Event) -> None:
    unused = iterator._Unused(event, weakref.ref(torch.zeros(3)))
    assert not unused.query()
    event.passed = True
    assert unused.query()


def test_batches_in_use_are_in_flight_in_the_next_epoch() -> None:
    in_use, events = iterator.InUse(), [Event() for _ in range(6)]
    assert in_use.in_flight(events[0]) == []
    first = torch.zeros(3)
    assert in_use.hand_over(first, events[0]) is None, "there is none before it"
    assert in_use.in_flight(events[1]) == [None], "the consumer has it"
    second = torch.zeros(3)
    unused = in_use.hand_over({"a": second, "b": torch.zeros(3)}, events[1])
    assert in_use.in_flight(events[2]) == [unused, None]
    events[1].passed = True
    del first
    assert in_use.in_flight(events[2]) == [None]
    del second
    assert in_use.in_flight(events[2]) == [events[2]], "the consumer has dropped it, the GPU may still use it"
    third = torch.zeros(3)
    assert in_use.hand_over(third, events[3]) is None, "its event is in flight already"
    assert in_use.in_flight(events[4]) == [events[2], None]
    events[2].passed = True
    assert in_use.in_flight(events[4]) == [None]
