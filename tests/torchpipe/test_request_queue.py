"""RequestQueue: which requests start an instance, which wait, and how long an instance waits for more."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier

import pytest
import torch

from gpuflow.errors import BadSampleError, PredictorTimeout
from gpuflow.torchpipe.request_queue import AnswerRate, Backlog, Request, RequestGroup, RequestQueue, callers, joined

LONG = 20.0


class Started:
    """Takes the place of torchpipe: records the requests that it is given, or refuses them."""

    def __init__(self) -> None:
        self.given: list[bytes] = []
        self.refuses = False

    def __call__(self, requests: Sequence[Request]) -> None:
        if self.refuses:
            raise RuntimeError("no")
        self.given.append(b"".join(request.begin_decoding() or b"" for request in requests))


@pytest.fixture
def started() -> Started:
    return Started()


def add(queue: RequestQueue, *data: bytes) -> None:
    for each in data:
        queue.add([Request(each, lambda request: None, wrap=lambda value: value)])


def group_of(data: bytes, *, ends_call: bool = True) -> list[Request]:
    """A list of images of one byte each."""
    images = (data[row : row + 1] for row in range(len(data)))
    requests = [Request(image, lambda request: None, wrap=lambda value: value) for image in images]
    RequestGroup(requests)
    for request in requests if not ends_call else requests[:-1]:
        request.ends_call = False
    return requests


def next_batch(queue: RequestQueue, *, arrived: int = 0, seconds: float = 0.0) -> list[bytes]:
    return [request.begin_decoding() or b"" for request in queue.next_batch(arrived=arrived, seconds=seconds)]


def test_a_request_starts_a_free_instance(started: Started) -> None:
    queue = RequestQueue(started, instances=2, batch=4)
    add(queue, b"a", b"b", b"c")
    assert started.given == [b"a", b"b"]
    queue.mark_started(1)
    add(queue, b"d")
    assert started.given == [b"a", b"b"], "the second instance has not started yet"
    assert next_batch(queue) == [b"c", b"d"]


def test_an_instance_is_free_again_once_no_request_waits(started: Started) -> None:
    queue = RequestQueue(started, instances=1, batch=4)
    add(queue, b"a")
    queue.mark_started(1)
    add(queue, b"b")
    assert next_batch(queue) == [b"b"]
    add(queue, b"c")
    assert next_batch(queue) == [b"c"]
    assert next_batch(queue) == []
    assert started.given == [b"a"]
    add(queue, b"d")
    assert started.given == [b"a", b"d"]


def test_two_requests_that_torchpipe_joins_in_one_batch_leave_an_instance_free(started: Started) -> None:
    queue = RequestQueue(started, instances=2, batch=4)
    add(queue, b"a", b"b")
    queue.mark_started(2)
    add(queue, b"c")
    assert started.given == [b"a", b"b", b"c"]


def test_batches_are_taken_in_order_and_none_is_too_large(started: Started) -> None:
    queue = RequestQueue(started, instances=1, batch=4)
    add(queue, b"-")
    queue.mark_started(1)
    add(queue, *(bytes([number]) for number in range(9)))
    taken = [next_batch(queue) for _ in range(4)]
    assert [len(each) for each in taken] == [4, 4, 1, 0]
    assert b"".join(data for each in taken for data in each) == bytes(range(9))


def test_an_instance_waits_for_the_expected_requests_and_no_longer(started: Started) -> None:
    queue = RequestQueue(started, instances=1, batch=4)
    add(queue, b"-")
    queue.mark_started(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next_batch, queue, arrived=3, seconds=LONG)
        time.sleep(0.05)
        add(queue, b"a")
        time.sleep(0.05)
        assert not waiting.done()
        add(queue, b"b")
        assert waiting.result(LONG) == [b"a", b"b"]
    add(queue, b"c")
    begun = time.monotonic()
    assert next_batch(queue, arrived=9, seconds=0.1) == [b"c"]
    assert 0.1 <= time.monotonic() - begun < LONG


def test_an_instance_does_not_wait_once_its_batch_is_full(started: Started) -> None:
    queue = RequestQueue(started, instances=1, batch=4)
    add(queue, b"-")
    queue.mark_started(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next_batch, queue, arrived=99, seconds=LONG)
        time.sleep(0.05)
        add(queue, b"a", b"b", b"c", b"d")
        assert waiting.result(LONG / 2) == [b"a", b"b", b"c", b"d"]
    add(queue, b"e", b"f", b"g", b"h", b"i")
    assert next_batch(queue, arrived=99, seconds=LONG) == [b"e", b"f", b"g", b"h"]


def test_an_error_of_torchpipe_is_raised_and_the_next_request_may_start(started: Started) -> None:
    queue = RequestQueue(started, instances=1, batch=4)
    started.refuses = True
    with pytest.raises(RuntimeError, match="no"):
        add(queue, b"a")
    started.refuses = False
    add(queue, b"b")
    assert started.given == [b"b"]


def test_many_threads_lose_nothing(started: Started) -> None:
    queue = RequestQueue(started, instances=1, batch=4)
    ready = Barrier(8)

    def ask(number: int) -> None:
        ready.wait(LONG)
        for turn in range(200):
            add(queue, bytes([number, turn]))

    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(ask, number) for number in range(8)]
        for each in done:
            each.result(LONG)
    assert len(started.given) == 1
    queue.mark_started(1)
    found = list(started.given)
    while batch := next_batch(queue):
        found += batch
    assert len(found) == len(set(found)) == queue.arrived == 1600
    for number in range(8):
        assert [data[1] for data in found if data[0] == number] == list(range(200)), "of one thread in order"


# --- lists ------------------------------------------------------------------------------------------------------------


def test_a_list_starts_one_instance(started: Started) -> None:
    queue = RequestQueue(started, instances=2, batch=4)
    queue.add(group_of(b"abc"))
    add(queue, b"d")
    queue.add(group_of(b"efg"))
    assert started.given == [b"abc", b"d"]
    assert queue.arrived == 3
    queue.mark_started(2)
    assert next_batch(queue) == [b"e", b"f", b"g"]


def test_instances_that_are_free_share_what_arrives_together(started: Started) -> None:
    queue = RequestQueue(started, instances=2, batch=3)
    single = [Request(data, lambda request: None, wrap=lambda value: value) for data in (b"a", b"b", b"f", b"g")]
    queue.add([single[0]], [single[1]], group_of(b"cde"), [single[2]], [single[3]])
    assert started.given == [b"ab", b"cde"]
    queue.mark_started(2)
    assert next_batch(queue) == [b"f", b"g"]


def test_an_error_of_torchpipe_frees_all_instances_that_would_start(started: Started) -> None:
    queue = RequestQueue(started, instances=2, batch=4)
    requests = [Request(data, lambda request: None, wrap=lambda value: value) for data in (b"a", b"b")]
    started.refuses = True
    queue.add_decoded(requests)
    assert [str(request.future.exception(0)) for request in requests] == 2 * [
        "the model cannot be started: RuntimeError('no')"
    ]
    started.refuses = False
    add(queue, b"c", b"d")
    assert started.given == [b"c", b"d"]


def test_a_list_that_waits_is_never_divided(started: Started) -> None:
    queue = RequestQueue(started, instances=1, batch=4)
    add(queue, b"-")
    queue.mark_started(1)
    add(queue, b"a", b"b")
    queue.add(group_of(b"cde"))
    add(queue, b"f")
    queue.add(group_of(b"gh"))
    assert [b"".join(next_batch(queue)) for _ in range(4)] == [b"ab", b"cdef", b"gh", b""]


def test_an_instance_waits_for_callers_and_not_for_as_many_images(started: Started) -> None:
    """Who sent a list of 3 sends a single image next; of a list in two parts only the last one is followed by more."""
    queue = RequestQueue(started, instances=1, batch=4)
    batch = group_of(b"abc")
    queue.add(batch)
    queue.mark_started(1)
    assert (queue.arrived, callers(batch)) == (1, 1)
    add(queue, b"d")
    begun = time.monotonic()
    assert next_batch(queue, arrived=2, seconds=LONG) == [b"d"]
    first, last = group_of(b"efgh", ends_call=False), group_of(b"ij")
    queue.add(first)
    queue.add(last)
    assert (queue.arrived, callers(first), callers(last)) == (4, 0, 1)
    assert next_batch(queue, arrived=4, seconds=LONG) == [b"e", b"f", b"g", b"h"]
    assert next_batch(queue, arrived=4 + callers(first), seconds=LONG) == [b"i", b"j"]
    assert time.monotonic() - begun < LONG


def test_a_cancelled_image_leaves_its_list(started: Started) -> None:
    queue = RequestQueue(started, instances=1, batch=4)
    add(queue, b"-")
    queue.mark_started(1)
    members = group_of(b"abcd")
    queue.add(members)
    queue.discard(members[2])
    assert next_batch(queue) == [b"a", b"b", b"d"]


def test_parts_that_torchpipe_joins_are_batches_of_whole_parts() -> None:
    parts = [group_of(data) for data in (b"ab", b"c", b"de", b"fghi", b"j")]
    batches = [b"".join(request.begin_decoding() or b"" for request in batch) for batch in joined(parts, 4)]
    assert batches == [b"abc", b"de", b"fghi", b"j"]


def test_the_last_report_of_a_list_returns_what_was_decoded_in_order() -> None:
    members = group_of(b"abcd")
    group = members[0].group
    assert group is not None
    reports = [group.report(members[row], decoded=row != 1) for row in (2, 1, 3, 0)]
    assert reports == [[], [], [], [members[0], members[2], members[3]]]


def test_a_group_does_not_wait_for_members_that_have_ended(started: Started) -> None:
    """One was cancelled before it was decoded, one afterwards."""
    queue = RequestQueue(started, instances=1, batch=4)
    members = [Request(data, queue.discard, wrap=lambda value: value) for data in (b"a", b"b", b"c", b"d")]
    RequestGroup(members)
    queue.add_decoded([members[1]])
    assert members[1].future.cancel()
    queue.add_decoded([members[0]])
    assert members[2].future.cancel()
    assert started.given == []
    queue.add_decoded([members[3]])
    assert started.given == [b"ad"]


# --- deadlines --------------------------------------------------------------------------------------------------------


def waiting(backlog: Backlog, *seconds: float) -> list[Request]:
    """Requests that wait, each with so many seconds left."""
    now = time.monotonic()
    requests = [
        Request(bytes([65 + row]), backlog.discard, wrap=lambda value: value, deadline=now + left)
        for row, left in enumerate(seconds)
    ]
    for request in requests:
        backlog.add([request])
    return requests


def is_dropped(request: Request) -> bool:
    return request.ended and isinstance(request.future.exception(0), PredictorTimeout)


def test_a_request_that_cannot_be_answered_in_time_is_dropped_before_it_runs() -> None:
    backlog = Backlog()
    backlog.measured(1, 10.0)
    requests = waiting(backlog, LONG, -1.0, 9.0, LONG)
    assert backlog.take(4) == [requests[0], requests[3]]
    assert [is_dropped(request) for request in requests] == [False, True, True, False]
    assert len(backlog) == 0
    assert requests[1].begin_decoding() is None
    assert requests[1].held_bytes == 0


def test_a_request_whose_deadline_has_passed_starts_no_instance(started: Started) -> None:
    queue = RequestQueue(started, instances=1, batch=4)
    late = Request(b"a", queue.discard, wrap=lambda value: value, deadline=time.monotonic() - 1.0)
    queue.add([late])
    assert (started.given, is_dropped(late)) == ([], True)
    add(queue, b"b")
    assert started.given == [b"b"]


def test_one_slow_batch_does_not_make_the_next_ones_late() -> None:
    backlog = Backlog()
    for seconds in (0.1, 3.0):
        backlog.measured(1, seconds)
    requests = waiting(backlog, 2.0)
    assert backlog.take(1) == requests


def test_a_batch_is_no_larger_than_its_members_have_time_for() -> None:
    backlog = Backlog()
    for size, seconds in ((1, 1.0), (3, 10.0), (4, LONG)):
        backlog.measured(size, seconds)
    requests = waiting(backlog, 1000.0, 15.0, 1000.0, 1000.0)
    assert backlog.take(4) == requests[:3]
    assert backlog.take(4) == requests[3:]


def test_a_group_that_cannot_be_answered_in_time_is_dropped_whole(started: Started) -> None:
    queue = RequestQueue(started, instances=1, batch=4)
    add(queue, b"-")
    queue.mark_started(1)
    queue.backlog.measured(3, 1e9)
    late, alone = group_of(b"abc"), Request(b"d", queue.discard, wrap=lambda value: value)
    for member in late:
        member.deadline = time.monotonic() + LONG
    queue.add(late)
    queue.add([alone])
    assert queue.next_batch(arrived=0, seconds=0.0) == [alone]
    assert all(map(is_dropped, late))
    assert next_batch(queue) == [], "the instance is free"
    add(queue, b"e")
    assert started.given == [b"-", b"e"]


@pytest.mark.parametrize("gives_up", ["cancelled", "late"])
def test_the_newest_requests_are_taken_first_once_a_caller_gave_up(gives_up: str) -> None:
    """The next to give up are the oldest ones, perhaps while they run."""
    backlog = Backlog()
    requests = waiting(backlog, *[LONG] * 6)
    assert backlog.take(2) == requests[:2]
    assert not backlog.newest_first
    if gives_up == "late":
        waiting(backlog, -1.0)
    else:
        requests[5].future.cancel()
        del requests[5]
    assert backlog.take(2) == requests[-2:]


def test_a_rate_is_measured_while_there_is_more_to_do_than_the_nodes_can_at_a_time() -> None:
    now = 0.0
    rate = AnswerRate(4, lambda: now)
    for left in (3, 2, 1):
        now += 1.0
        rate.count(left)
    assert rate.seconds(100) == 0.0, "there was time for more"
    rate.count(4)
    for _ in range(50):
        now += 0.5
        rate.count(9)
    assert rate.seconds(100) == pytest.approx(50.0)
    assert rate.seconds(8) == 0.0, "they are in work, or the next to be"
    for _ in range(200):
        now += 0.25
        rate.count(9)
    assert rate.seconds(100) == pytest.approx(25.0, rel=0.05), "it follows"
    now += 10.1
    assert rate.seconds(100) == 0.0, "no longer known"


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_cancelled_request_leaves_the_queue_and_memory_at_once(started: Started) -> None:
    queue = RequestQueue(started, instances=1, batch=4)
    add(queue, b"a")
    queue.mark_started(1)
    requests = [Request(bytes([65 + i]) * 100, queue.discard, wrap=lambda value: value) for i in range(3)]
    for request in requests:
        queue.add([request])
    assert requests[1].future.cancel()
    assert [request.held_bytes for request in requests] == [100, 0, 100]
    assert requests[1].begin_decoding() is None
    assert next_batch(queue) == [b"A" * 100, b"C" * 100]


def test_a_request_that_is_being_decoded_keeps_its_bytes_until_then() -> None:
    done: list[Request] = []
    request = Request(b"abc", done.append, wrap=lambda value: value)
    assert request.begin_decoding() == b"abc"
    assert request.future.cancel(), "the model has not started"
    assert (request.held_bytes, done) == (3, [])
    request.end_decoding()
    request.set_result(torch.zeros(1))
    assert (request.held_bytes, done) == (0, [request])


def test_a_decoded_request_that_is_cancelled_ends_at_once() -> None:
    done: list[Request] = []
    request = Request(b"abc", done.append, wrap=lambda value: value)
    assert request.begin_decoding()
    request.image = torch.zeros(1)
    request.end_decoding()
    assert request.future.cancel()
    assert done == [request]
    assert vars(request)["image"] is None


def test_a_cancelled_request_is_done_once() -> None:
    done: list[Request] = []
    request = Request(b"abc", done.append, wrap=lambda value: value)
    request.future.cancel()
    assert not wait([request.future], timeout=0).not_done, "close waits for it"
    request.set_result(torch.zeros(1))
    assert done == [request]


def test_a_request_is_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        request = Request(b"abc", lambda request: None, wrap=lambda value: value)
        reference, future = weakref.ref(request), request.future
        request.set_result(torch.zeros(1))
        del request
        assert reference() is None
        assert future.result(0) == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("value", [torch.ones(3), BadSampleError("decode", "no image")], ids=["answer", "fault"])
def test_a_request_is_done_before_its_answer_can_be_seen(value: torch.Tensor | Exception) -> None:
    """Otherwise a client that has its answer could find its own place in the queue still taken."""
    seen = []
    request = Request(b"", lambda request: seen.append(request.future.done()), wrap=lambda logits: logits)
    request.set_result(value)
    assert (seen, request.future.done()) == ([False], True)


def test_an_error_of_wrap_is_the_answer() -> None:
    def wrap(image: torch.Tensor) -> None:
        raise RuntimeError("the GPU does not answer")

    done: list[Request] = []
    request = Request(b"", done.append, wrap=wrap)
    request.set_result(torch.ones(3))
    assert str(request.future.exception(0)) == "the GPU does not answer"
    assert done == [request]
