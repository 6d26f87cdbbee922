"""Buffers that are used again, and never under somebody who still reads them."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from gpuflow.runtime.memory import BytePool, SlotPool


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 200_000, 1 << 20])
def test_byte_buffers_hold_what_is_asked_for(size: int) -> None:
    buffer = BytePool().acquire(size)
    assert (str(buffer.dtype), buffer.ndim) == ("uint8", 1)
    assert len(buffer) >= size
    assert len(buffer) & (len(buffer) - 1) == 0, "a power of two"
    assert len(buffer) <= max(2 * size, 1 << 17)


def test_byte_buffers_come_back() -> None:
    pool = BytePool()
    first = pool.acquire(100_000)
    second = pool.acquire(100_000)
    assert first is not second
    pool.release(first)
    assert pool.acquire(120_000) is first
    pool.release(second)
    assert pool.acquire(500_000) is not second


def test_no_more_free_bytes_are_kept_than_allowed() -> None:
    pool = BytePool(keep=3 << 17)
    buffers = [pool.acquire(1) for _ in range(5)]
    for buffer in buffers:
        pool.release(buffer)
    again = [pool.acquire(1) for _ in range(5)]
    assert sum(any(buffer is other for other in buffers) for buffer in again) == 3


def test_byte_buffers_are_never_shared_between_threads() -> None:
    pool = BytePool()
    clashes: list[int] = []

    def work(mark: int) -> None:
        for _ in range(300):
            buffer = pool.acquire(70_000)
            buffer[:64] = mark
            if not (buffer[:64] == mark).all():
                clashes.append(mark)
            pool.release(buffer)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert not clashes


def test_slots_come_back_when_nothing_refers_to_them() -> None:
    pool = SlotPool((4, 3, 2, 2), np.float32, keep=2)
    slots = pool.acquire(4)
    assert (slots.shape, str(slots.dtype)) == ((4, 3, 2, 2), "float32")
    place = slots.ctypes.data
    tensor = torch.from_numpy(slots)
    part = tensor[1:]
    del slots, tensor
    gc.collect()
    assert pool.acquire(4).ctypes.data != place, "a view still holds the memory"
    del part
    gc.collect()
    assert pool.acquire(4).ctypes.data == place


def test_a_short_batch_takes_the_front_of_a_full_ones_memory() -> None:
    pool = SlotPool((4, 8), np.uint8, keep=1)
    place = pool.acquire(4).ctypes.data
    short = pool.acquire(3)
    assert short.shape == (3, 8)
    assert short.ctypes.data == place


def test_no_more_free_slots_are_kept_than_allowed() -> None:
    pool = SlotPool((1, 1 << 12), np.uint8, keep=2)
    held = [pool.acquire(1) for _ in range(4)]
    places = {slots.ctypes.data for slots in held}
    held.clear()
    again = [pool.acquire(1)]
    assert len(pool._acquired) == 2, "one in use and one free"
    again.append(pool.acquire(1))
    assert {slots.ctypes.data for slots in again} <= places


def test_a_cleared_pool_keeps_nothing_but_takes_nothing_away() -> None:
    pool = SlotPool((2, 16), np.uint8, keep=3)
    slots = pool.acquire(2)
    slots[:] = 7
    del_me = pool.acquire(2)
    del del_me
    pool.clear()
    assert (slots == 7).all()
    del slots
    assert pool._acquired == []


def test_slots_outlive_their_pool() -> None:
    pool = SlotPool((2, 16), np.uint8, keep=3)
    slots = pool.acquire(2)
    slots[:] = 5
    del pool
    gc.collect()
    assert (slots == 5).all()


def test_slots_grow_with_the_largest_batch_and_smaller_ones_are_not_kept() -> None:
    pool = SlotPool((2, 16), np.uint8, keep=3)
    small, held = pool.acquire(2), pool.acquire(1)
    del small
    large = pool.acquire(5)
    assert (large.shape, held.shape) == ((5, 16), (1, 16))
    place = large.ctypes.data
    del large, held
    gc.collect()
    again = pool.acquire(3)
    assert (again.shape, again.ctypes.data) == ((3, 16), place)
