"""Buffers for decoded images: how many there are and how large, and what happens if none becomes free."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from gpuflow.errors import LoaderTimeout
from gpuflow.execute.gpu import decode_buffers
from gpuflow.execute.gpu.decode_buffers import BUFFERS, DecodeBuffers

MB = 1 << 20


class OnCpu:
    """Stands where `DeviceStream` does, and for its events. What it queues is done at once."""

    device = torch.device("cpu")
    fails = False

    def queued(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def record_event(self, *, blocking: bool) -> OnCpu:
        return self

    def synchronize(self) -> None:
        if self.fails:
            raise RuntimeError("the GPU has failed")


def test_one_decode_buffer_does_until_more_are_asked_for() -> None:
    here: Any = OnCpu()
    buffers = DecodeBuffers(here, 1 << 27, 1)
    addresses = set()
    for _ in range(4):
        with buffers.acquire(1 << 20) as buffer:
            addresses.add(buffer.address)
    assert len(addresses) == 1
    for most in (1, 2, 2, 2):
        buffers.grow(most)
    assert buffers._free.qsize() == 2
    for _ in range(BUFFERS + 2):
        buffers.grow(BUFFERS)
    with contextlib.ExitStack() as held:
        lent = [held.enter_context(buffers.acquire(1 << 20)).address for _ in range(BUFFERS)]
        assert len(set(lent)) == BUFFERS
        assert buffers._free.empty(), "and no more than that"


def test_buffers_that_nothing_uses_are_freed_and_come_back() -> None:
    here: Any = OnCpu()
    buffers = DecodeBuffers(here, 1 << 27, BUFFERS)
    with contextlib.ExitStack() as held:
        lent = [held.enter_context(buffers.acquire(MB)) for _ in range(BUFFERS)]
        buffers.shrink(2)
        assert all(buffer.size == 8 * MB for buffer in lent), "they are in use"
    for most in (3, 2, 2):
        buffers.shrink(most)
    assert (buffers._free.qsize(), buffers._spare.qsize()) == (2, 1)
    buffers.shrink(0)
    assert buffers._free.empty()
    for _ in range(BUFFERS):
        buffers.grow(BUFFERS)
    with contextlib.ExitStack() as held:
        again = [held.enter_context(buffers.acquire(MB)) for _ in range(BUFFERS)]
        assert not {id(buffer) for buffer in again} & {id(buffer) for buffer in lent}


def test_a_buffer_that_the_gpu_still_reads_is_freed_once_that_is_over() -> None:
    waits: list[int] = []

    class Event(OnCpu):
        def synchronize(self) -> None:
            waits.append(buffers._free.qsize())

    class Stream(OnCpu):
        def record_event(self, *, blocking: bool) -> OnCpu:
            return Event()

    here: Any = Stream()
    buffers = DecodeBuffers(here, 1 << 27, 1)
    with buffers.acquire(MB):
        pass
    waits.clear()
    buffers.shrink(0)
    assert waits == [0] and buffers._spare.qsize() == BUFFERS


@pytest.mark.parametrize(
    ("size", "most", "allocated"),
    [(MB, 128 * MB, 8 * MB), (9 * MB, 128 * MB, 16 * MB), (MB, 3 * MB, 3 * MB), (20 * MB, 3 * MB, 20 * MB)],
)
def test_a_buffer_is_no_larger_than_the_most_but_for_a_larger_image(size: int, most: int, allocated: int) -> None:
    here: Any = OnCpu()
    with DecodeBuffers(here, most).acquire(size) as buffer:
        assert buffer.size == allocated


def test_a_buffer_that_is_too_small_is_replaced_by_one_with_room_to_spare() -> None:
    """So that calls whose sizes differ replace it a few times alone: that may wait for the GPU."""
    here: Any = OnCpu()
    buffers, sizes = DecodeBuffers(here, 128 * MB, 1), set()
    for need in range(40, 129):
        with buffers.acquire(need * MB) as buffer:
            sizes.add(buffer.size // MB)
    assert sizes == {40, 56, 72, 96, 120, 128}


def test_a_buffer_that_does_not_become_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_buffers, "_ACQUIRE_SECONDS", 0.01)
    here: Any = OnCpu()
    buffers = DecodeBuffers(here, 128 * MB, 1)
    with buffers.acquire(MB), pytest.raises(LoaderTimeout) as caught, buffers.acquire(MB):
        pass
    assert str(caught.value).startswith("the GPU did not release a decode buffer within 0.01 s; ")


def test_a_failure_of_the_gpu_loses_no_buffer() -> None:
    here: Any = OnCpu()
    buffers = DecodeBuffers(here, 128 * MB, 1)
    for _ in range(2):
        here.fails = True
        with pytest.raises(RuntimeError, match="the GPU has failed"), buffers.acquire(MB):
            pass
        here.fails = False
        with buffers.acquire(MB):
            pass
