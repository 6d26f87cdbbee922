"""Which batches count as in use, by the consumer or by queued GPU work, and until when."""

from __future__ import annotations

import weakref

import pytest
import torch

from gpuflow.loader import iterator
from gpuflow.loader.iterator import BatchesInUse, Unused
from tests.host_stream import FakeEvent


@pytest.fixture(name="event")
def _event() -> FakeEvent:
    return FakeEvent()


def test_it_is_unused_once_the_gpu_has_passed_the_event_and_the_consumer_has_dropped_it(event: FakeEvent) -> None:
    images = torch.zeros(3)
    unused = Unused(event, weakref.ref(images))
    assert not any(unused.query() for _ in range(100))
    event.passed = True
    assert not unused.query()
    del images
    assert unused.query()


def test_a_consumer_that_keeps_all_batches_is_not_waited_for(event: FakeEvent) -> None:
    images = torch.zeros(3)
    event.passed = True
    unused = Unused(event, weakref.ref(images))
    assert [unused.query() for _ in range(iterator._MOST_QUERIES)] == [False, False, False, True]
    assert len(images) == 3


def test_dropped_images_do_not_free_the_place_before_the_gpu_is_done_with_them(event: FakeEvent) -> None:
    unused = Unused(event, weakref.ref(torch.zeros(3)))
    assert not unused.query()
    event.passed = True
    assert unused.query()


def test_batches_in_use_are_in_flight_in_the_next_epoch() -> None:
    in_use, events = BatchesInUse(), [FakeEvent() for _ in range(6)]
    assert in_use.in_flight(events[0]) == []
    first = torch.zeros(3)
    assert in_use.add(first, events[0]) is None, "there is none before it"
    assert in_use.in_flight(events[1]) == [None], "the consumer has it"
    second = torch.zeros(3)
    unused = in_use.add({"a": second, "b": torch.zeros(3)}, events[1])
    assert in_use.in_flight(events[2]) == [unused, None]
    events[1].passed = True
    del first
    assert in_use.in_flight(events[2]) == [None]
    del second
    assert in_use.in_flight(events[2]) == [events[2]], "the consumer has dropped it, the GPU may still use it"
    third = torch.zeros(3)
    assert in_use.add(third, events[3]) is None, "its event is in flight already"
    assert in_use.in_flight(events[4]) == [events[2], None]
    events[2].passed = True
    assert in_use.in_flight(events[4]) == [None]
