"""The cache of a Parquet file's row groups, which needs no pyarrow."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from gpuflow.sources.hf_tables import _Group, _GroupCache

BYTES, KEPT = 1000, 3


@pytest.fixture
def often_switched() -> Iterator[None]:
    """Threads take turns after a microsecond."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def load(number: int) -> _Group:
    return _Group(np.zeros(1, np.int64), np.full(BYTES, number, np.uint8), None)


@pytest.mark.usefixtures("often_switched")
def test_threads_that_read_at_random_keep_no_more_than_the_limit() -> None:
    cache, wrong = _GroupCache(KEPT * BYTES), list[int]()

    def read(seed: int) -> None:
        chosen = random.Random(seed)
        for _ in range(1000):
            number = chosen.randrange(12)
            if cache.get(number, load).data[0] != number:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    held = [entry.group.data.nbytes for entry in cache._entries.values() if entry.group is not None]
    assert not wrong and sum(held) == cache._bytes <= KEPT * BYTES


def test_the_groups_that_were_read_last_are_kept() -> None:
    cache = _GroupCache(KEPT * BYTES)
    for number in (0, 1, 2, 0, 3):
        cache.get(number, load)
    assert list(cache._entries) == [2, 0, 3] and cache.loads == 4


def test_a_group_above_the_limit_is_kept_alone() -> None:
    cache = _GroupCache(BYTES // 2)
    for number in (0, 1):
        assert cache.get(number, load).data[0] == number
    assert list(cache._entries) == [1] and cache._bytes == BYTES
