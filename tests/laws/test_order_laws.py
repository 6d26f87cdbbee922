"""Laws of orders: what stands at a position depends on seed, epoch and window, and on each of them alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from gpuflow.loader.sampler import ShardedOrder, ShuffledOrder
from gpuflow.sources.split import parts_by_fractions

SIZE = 400
"""Places in each permutation."""
LARGEST = 6 / np.sqrt(SIZE)
"""A correlation that is not reached by chance: six standard deviations, for at most a few thousand pairs."""

Permutation = NDArray[np.int64]


def of_windows(seed: int, epoch: int) -> list[Permutation]:
    """How each window of a tar is shuffled. There is one shard, so nothing else moves a sample."""
    order = ShardedOrder(shard_sizes=(4 * SIZE,), seed=seed, window=SIZE)
    indices = order.indices(epoch, np.arange(order.size)).reshape(4, SIZE)
    assert (indices // SIZE == np.arange(4)[:, None]).all(), "a sample stays in its window"
    return list(indices % SIZE)


def of_shards(seed: int, epoch: int) -> list[Permutation]:
    """In which order the shards of a tar come: each holds one sample, in a separate window."""
    order = ShardedOrder(shard_sizes=(1,) * SIZE, seed=seed, window=1)
    return [order.indices(epoch, np.arange(SIZE))]


def of_all(seed: int, epoch: int) -> list[Permutation]:
    return [ShuffledOrder(size=SIZE, seed=seed).indices(epoch, np.arange(SIZE))]


def of_replacements(order: ShuffledOrder | ShardedOrder, epoch: int) -> list[Permutation]:
    """What is tried in place of the bad samples at three positions."""
    return [np.array([order.replacement(epoch, place, i) for i in range(SIZE)]) for place in (0, 1, SIZE // 2)]


def of_shuffled_replacements(seed: int, epoch: int) -> list[Permutation]:
    return of_replacements(ShuffledOrder(size=SIZE, seed=seed), epoch)


def of_sharded_replacements(seed: int, epoch: int) -> list[Permutation]:
    return of_replacements(ShardedOrder(shard_sizes=(SIZE,), seed=seed, window=10), epoch)


Draw = Callable[[int, int], list[Permutation]]
DRAWS: dict[str, Draw] = {
    "windows of a tar": of_windows,
    "shards of a tar": of_shards,
    "a whole source": of_all,
    "replacements": of_shuffled_replacements,
    "replacements in a tar": of_sharded_replacements,
}
SEEDS, EPOCHS = (0, 1, 7), (0, 1, 2)


@pytest.fixture(scope="module", params=DRAWS)
def drawn(request: pytest.FixtureRequest) -> list[Permutation]:
    """Of every seed and epoch, and of each window or position."""
    draw = DRAWS[request.param]
    return [permutation for seed in SEEDS for epoch in EPOCHS for permutation in draw(seed, epoch)]


@pytest.mark.slow
def test_each_is_a_permutation(drawn: list[Permutation]) -> None:
    for permutation in drawn:
        assert np.array_equal(np.sort(permutation), np.arange(SIZE))


def test_any_two_are_independent(drawn: list[Permutation]) -> None:
    """Of another seed, another epoch, another window or another position: no two have anything in common."""
    assert largest_correlation(drawn) < LARGEST
    for a, b in combinations(drawn, 2):
        assert (a == b).sum() < 12, "of two random permutations one place is equal, on average"


def test_none_follows_the_order_of_the_source(drawn: list[Permutation]) -> None:
    for permutation in drawn:
        assert largest_correlation([permutation, np.arange(SIZE)]) < LARGEST


def largest_correlation(rows: list[Permutation]) -> float:
    """Between any two of them."""
    found = np.corrcoef(np.array(rows, dtype=np.float64))
    return float(np.abs(found - np.eye(len(rows))).max())


def test_windows_shards_and_the_whole_are_independent_of_each_other() -> None:
    """With one seed and epoch."""
    names = ("windows of a tar", "shards of a tar", "a whole source", "replacements")
    assert largest_correlation([permutation for name in names for permutation in DRAWS[name](0, 0)]) < LARGEST


def test_which_samples_a_split_takes_depends_on_seed_and_class() -> None:
    labels, classes = np.arange(4 * SIZE) % 4, ("a", "b", "c", "d")
    taken = []
    for seed in SEEDS:
        part = np.flatnonzero(parts_by_fractions(labels, classes, [0.5, 0.5], seed) == 0)
        for label in range(4):
            chosen = np.zeros(SIZE, np.int64)
            chosen[part[part % 4 == label] // 4] = 1
            taken.append(chosen)
    assert largest_correlation(taken) < LARGEST
