"""When a batch counts as unused, so that its place can be given to another one."""

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
