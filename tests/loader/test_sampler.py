"""Order: a permutation by index, shards in windows, and how positions fall into steps over ranks."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.loader.sampler import ShardedOrder, ShuffledOrder, Steps
from gpuflow.pipeline.rng import key64, permute
from tests.random_reference import permuted

key_numbers = st.integers(0, 2**64 - 1)
CHI_SQUARE_24_ONE_IN_A_MILLION = 72.0
PERMUTED_10 = [9, 4, 2, 6, 7, 8, 5, 3, 1, 0]
PERMUTED_HUGE = [339668373856]


# --- permute ---------------------------------------------------------------------------------------------------------


@given(size=st.integers(1, 5000), key=key_numbers)
def test_permute_is_a_bijection(size: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@given(size=st.integers(1, 2**62), key=key_numbers, data=st.data())
def test_permute_stays_in_range_and_is_one_to_one_at_any_size(size: int, key: int, data: st.DataObject) -> None:
    places = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=50))
    values = permute(sorted(places), size, key)
    assert values.dtype == np.int64
    assert len(set(values.tolist())) == len(places)
    assert values.min() >= 0 and values.max() < size


@given(size=st.integers(2, 3000), key=key_numbers, data=st.data())
def test_permute_does_not_depend_on_how_positions_are_grouped(size: int, key: int, data: st.DataObject) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=6, max_size=6)))
    together = permute(places, size, key)
    assert [int(permute(place, size, key)) for place in places] == together.tolist()
    assert np.array_equal(permute(places.reshape(2, 3), size, key), together.reshape(2, 3))


@pytest.mark.parametrize("size", [1, 2, 128, 5000, 10**6 + 3, 2**32 + 1, 10**12, 2**62 - 1, 2**62])
@pytest.mark.parametrize("count", [1, 127, 5000])
def test_permute_is_that_of_the_reference(size: int, count: int) -> None:
    places = np.random.default_rng(count).integers(0, size, count)
    places[:2] = [0, size - 1][:count]
    for key in (0, 2**63, 2**64 - 1, key64("order", 0, count)):
        found = permute(places, size, key)
        assert np.array_equal(found[:300], permuted(places[:300], size, key))


def test_permute_leaves_its_argument_alone() -> None:
    places = np.arange(10)
    permute(places, 10, 1)
    assert places.tolist() == list(range(10))


def test_permute_is_the_same_in_every_process_and_version() -> None:
    assert permute(np.arange(10), 10, 0).tolist() == PERMUTED_10
    assert permute([10**9], 10**12, key64("order", 0, 0)).tolist() == PERMUTED_HUGE
    code = "from gpuflow.pipeline.rng import *; print(key64('order', 0, 1), permute(range(10), 10, 0).tolist())"
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert again.stdout.split(maxsplit=1) == [str(key64("order", 0, 1)), f"{PERMUTED_10}\n"]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4, 5, 7])
def test_every_place_is_about_equally_likely(size: int) -> None:
    trials = 3000
    counts = np.zeros((size, size))
    for key in range(trials):
        counts[np.arange(size), permute(np.arange(size), size, key64("uniform", key))] += 1
    expected = trials / size
    assert ((counts - expected) ** 2 / expected).sum() < CHI_SQUARE_24_ONE_IN_A_MILLION


def test_every_permutation_of_four_is_about_equally_likely() -> None:
    trials = 6000
    seen = Counter(tuple(permute(np.arange(4), 4, key64("uniform", key)).tolist()) for key in range(trials))
    expected = trials / 24
    assert len(seen) == 24
    assert sum((count - expected) ** 2 / expected for count in seen.values()) < CHI_SQUARE_24_ONE_IN_A_MILLION


def test_neighbours_land_far_apart() -> None:
    size = 100_000
    steps = np.abs(np.diff(permute(np.arange(size), size, 7)))
    assert abs(steps.mean() / (size / 3) - 1) < 0.02


def test_key64_tells_its_parts_apart() -> None:
    assert len({key64("a", 1, 2), key64("a", 12), key64("a1", 2), key64("a", 2, 1), key64("b", 1, 2)}) == 5
    assert all(0 <= key64("bits", i) < 2**64 for i in range(100))


# --- orders ----------------------------------------------------------------------------------------------------------

shards = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) > 0).map(tuple)


def test_seeking_in_10_to_the_12_samples_takes_less_than_a_millisecond() -> None:
    order = ShuffledOrder(size=10**12, seed=1)
    order.indices(0, [0])
    seconds = []
    for i in range(21):
        start = time.thread_time()
        (index,) = order.indices(3, [10**9 + i])
        seconds.append(time.thread_time() - start)
        assert 0 <= index < 10**12
    assert statistics.median(seconds) < 1e-3


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**31), epoch=st.integers(0, 1000))
def test_an_epoch_holds_every_index_once(size: int, seed: int, epoch: int) -> None:
    order = ShuffledOrder(size=size, seed=seed)
    assert np.array_equal(np.sort(order.indices(epoch, np.arange(size))), np.arange(size))


def test_epochs_and_seeds_differ() -> None:
    orders = [
        tuple(ShuffledOrder(size=500, seed=seed).indices(epoch, np.arange(500)).tolist())
        for seed in range(3)
        for epoch in range(3)
    ]
    assert len(set(orders)) == 9
    fixed_points = [sum(i == index for i, index in enumerate(order)) for order in orders]
    assert max(fixed_points) < 10


def test_without_shuffle_the_source_keeps_its_order() -> None:
    order = ShuffledOrder(size=7, shuffle=False)
    assert order.indices(5, [3, 0, 6]).tolist() == [3, 0, 6]
    places = np.arange(7)
    order.indices(0, places)[0] = 99
    assert places[0] == 0


@pytest.mark.parametrize(
    "order",
    [
        ShuffledOrder(size=57, seed=2),
        ShuffledOrder(size=57, shuffle=False),
        ShuffledOrder(size=1),
        ShardedOrder(shard_sizes=(20, 0, 30, 7), seed=2, window=16),
    ],
    ids=repr,
)
def test_attempts_at_a_replacement_run_through_every_index_once(order: ShuffledOrder | ShardedOrder) -> None:
    for position in (0, 3):
        tried = [order.replacement(1, position, attempt) for attempt in range(order.size)]
        assert sorted(tried) == list(range(order.size))
    if order.size > 10:
        first = {order.replacement(epoch, position, 0) for epoch in range(5) for position in range(20)}
        assert len(first) > 20, "another position gets another stand-in"


@given(sizes=shards, window=st.integers(1, 200), seed=st.integers(0, 100), epoch=st.integers(0, 5))
def test_sharded_order_is_a_permutation(sizes: tuple[int, ...], window: int, seed: int, epoch: int) -> None:
    order = ShardedOrder(shard_sizes=sizes, seed=seed, window=window)
    indices = order.indices(epoch, np.arange(order.size))
    assert np.array_equal(np.sort(indices), np.arange(order.size))
    some = np.arange(order.size)[::3]
    assert np.array_equal(order.indices(epoch, some), indices[::3])
    assert order.indices(epoch, some[None]).shape == (1, len(some))


@given(sizes=shards, window=st.integers(1, 60), seed=st.integers(0, 100))
def test_a_window_reads_few_shards_and_every_shard_in_few_windows(
    sizes: tuple[int, ...], window: int, seed: int
) -> None:
    order = ShardedOrder(shard_sizes=sizes, seed=seed, window=window)
    shard_of = np.repeat(np.arange(len(sizes)), sizes)[order.indices(0, np.arange(order.size))]
    windows_of: dict[int, set[int]] = {}
    for start in range(0, order.size, window):
        for shard in set(shard_of[start : start + window].tolist()):
            windows_of.setdefault(shard, set()).add(start // window)
    for shard, windows in windows_of.items():
        assert max(windows) - min(windows) + 1 == len(windows), "a shard's windows are neighbours"
        assert len(windows) <= -(-sizes[shard] // window) + 1


def test_shards_change_places_from_epoch_to_epoch() -> None:
    order = ShardedOrder(shard_sizes=(10,) * 20, window=10)
    firsts = {int(order.indices(epoch, [0])[0]) // 10 for epoch in range(20)}
    assert len(firsts) > 5


# --- steps -----------------------------------------------------------------------------------------------------------

plans = {
    "size": st.integers(0, 200),
    "batch_size": st.integers(1, 17),
    "world_size": st.integers(1, 6),
    "drop_last": st.booleans(),
}


def ranks_of(size: int, batch_size: int, world_size: int, drop_last: bool, start: int = 0) -> list[Steps]:
    return [
        Steps(size=size, batch_size=batch_size, rank=rank, world_size=world_size, drop_last=drop_last, start=start)
        for rank in range(world_size)
    ]


def sequence(ranks: list[Steps]) -> list[int]:
    """The valid positions of all ranks, in the order of the epoch."""
    found = []
    for step in range(len(ranks[0])):
        for rank in ranks:
            places, valid = rank.positions(step)
            found += places[valid].tolist()
    return found


@given(start=st.integers(0, 220), **plans)
def test_ranks_make_equal_steps_and_share_all_positions(
    size: int, batch_size: int, world_size: int, drop_last: bool, start: int
) -> None:
    ranks = ranks_of(size, batch_size, world_size, drop_last, start)
    assert len({len(rank) for rank in ranks}) == 1
    covered = sequence(ranks)
    left = max(size - start, 0)
    count = left // (batch_size * world_size) * batch_size * world_size if drop_last else left
    assert covered == list(range(start, start + count))


@given(**plans)
def test_batches_are_full_but_for_one_ranks_last(size: int, batch_size: int, world_size: int, drop_last: bool) -> None:
    for rank in ranks_of(size, batch_size, world_size, drop_last):
        for step in range(len(rank)):
            places, valid = rank.positions(step)
            last = step == len(rank) - 1
            short = size % batch_size if last and world_size == 1 and not drop_last else 0
            assert len(places) == (short or batch_size)
            assert len(valid) == len(places)
            assert ((places >= 0) & (places < size)).all()
            assert valid.all() or (last and world_size > 1 and not drop_last)


@given(size=st.integers(1, 200), batch_size=st.integers(1, 9), world_size=st.integers(1, 6), data=st.data())
def test_start_resumes_on_any_number_of_ranks(size: int, batch_size: int, world_size: int, data: st.DataObject) -> None:
    first = ranks_of(size, batch_size, world_size, False)
    done = data.draw(st.integers(0, len(first[0])))
    seen = sequence(first)[: done * batch_size * world_size]
    second = ranks_of(size, data.draw(st.integers(1, 9)), data.draw(st.integers(1, 6)), False, start=len(seen))
    assert seen + sequence(second) == list(range(size))


def test_one_rank_gets_a_short_last_batch() -> None:
    places, valid = Steps(size=10, batch_size=4).positions(2)
    assert places.tolist() == [8, 9]
    assert valid.all()


def test_several_ranks_wrap_around_and_mark_it() -> None:
    ranks = ranks_of(10, 4, 2, False)
    assert [rank.positions(1)[0].tolist() for rank in ranks] == [[8, 9, 0, 1], [2, 3, 4, 5]]
    assert [rank.positions(1)[1].tolist() for rank in ranks] == [[True, True, False, False], [False] * 4]


def test_the_tail_wraps_more_than_once_around_a_tiny_epoch() -> None:
    ranks = ranks_of(2, 3, 2, False)
    assert [rank.positions(0)[0].tolist() for rank in ranks] == [[0, 1, 0], [1, 0, 1]]
    assert [rank.positions(0)[1].tolist() for rank in ranks] == [[True, True, False], [False] * 3]


def test_drop_last_drops_what_does_not_fill_all_ranks() -> None:
    assert len(Steps(size=11, batch_size=2, world_size=3, drop_last=True)) == 1
    assert len(Steps(size=5, batch_size=2, world_size=3, drop_last=True)) == 0
    assert len(Steps(size=5, batch_size=2, world_size=3)) == 1
