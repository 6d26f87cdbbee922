"""Orders that draw: frequencies by chi-square, permutations, pure functions, whole passes of each source of a mix."""

from __future__ import annotations

import math
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpuflow.loader.sampler import (
    MixedOrder,
    MixInOrder,
    Order,
    ShardedOrder,
    ShuffledOrder,
    WeightedOrder,
    _log,
    apportion,
)

WEIGHTS = np.array([0.0, 1.0, 2.0, 3.0, 0.5, 0.0, 10.0, 1e-3])


def chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def limit(classes: int) -> float:
    """Of chi-square with classes - 1 degrees of freedom, reached by chance once in 10^6 (Wilson and Hilferty)."""
    degrees = classes - 1
    return float(degrees * (1 - 2 / (9 * degrees) + 4.75 * math.sqrt(2 / (9 * degrees))) ** 3)


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_with_replacement_samples_come_in_proportion_to_their_weights(seed: int) -> None:
    order = WeightedOrder(WEIGHTS, size=100_000, seed=seed)
    counts = np.bincount(order.indices(3, np.arange(order.size)), minlength=len(WEIGHTS))
    chosen = WEIGHTS > 0
    assert not counts[~chosen].any(), "a weight of 0 is never drawn"
    assert chi_square(counts[chosen], 100_000 * WEIGHTS[chosen] / WEIGHTS.sum()) < limit(int(chosen.sum()))


def test_with_replacement_neighbouring_positions_and_epochs_are_independent() -> None:
    order = WeightedOrder(np.ones(8), size=40_000, seed=5)
    a, b = order.indices(0, np.arange(order.size)), order.indices(1, np.arange(order.size))
    for one, other in ((a[:-1], a[1:]), (a, b)):
        pairs = np.bincount(8 * one + other, minlength=64)
        assert chi_square(pairs, np.full(64, len(one) / 64)) < limit(64)


@pytest.mark.parametrize("seed", [0, 1])
def test_without_replacement_each_place_is_drawn_in_proportion_to_what_is_left(seed: int) -> None:
    """The first two places of many epochs, against the exact probabilities of pairs."""
    weights = np.array([1.0, 2.0, 0.0, 4.0, 3.0])
    order = WeightedOrder(weights, size=4, seed=seed, replacement=False)
    epochs = 3000
    pairs = Counter(tuple(order.indices(epoch, [0, 1]).tolist()) for epoch in range(epochs))
    exact = {
        (i, j): weights[i] / 10 * weights[j] / (10 - weights[i])
        for i in range(5)
        for j in range(5)
        if i != j and weights[i] and weights[j]
    }
    assert set(pairs) <= set(exact)
    counts = np.array([pairs[pair] for pair in exact])
    assert chi_square(counts, epochs * np.array(list(exact.values()))) < limit(len(exact))


def test_without_replacement_an_epoch_is_a_permutation_of_what_has_a_weight() -> None:
    order = WeightedOrder(WEIGHTS, size=6, seed=1, replacement=False)
    for epoch in range(3):
        assert sorted(order.indices(epoch, np.arange(6))) == [1, 2, 3, 4, 6, 7]
    short = WeightedOrder(WEIGHTS, size=3, seed=1, replacement=False)
    assert short.indices(0, np.arange(3)).tolist() == order.indices(0, np.arange(3)).tolist()


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_the_scale_of_weights_is_of_no_matter(scale: float) -> None:
    for replacement in (True, False):
        order = WeightedOrder(WEIGHTS * scale, size=6, seed=1, replacement=replacement)
        plain = WeightedOrder(WEIGHTS, size=6, seed=1, replacement=replacement)
        assert order.indices(0, np.arange(6)).tolist() == plain.indices(0, np.arange(6)).tolist()
        assert (order.digest == plain.digest) == (scale == 1.0)


def test_stand_ins_run_through_every_sample_with_a_weight_once() -> None:
    order = WeightedOrder(WEIGHTS, size=50, seed=1)
    tried = [order.replacement(0, 7, attempt) for attempt in range(order.candidates(0, 7))]
    assert sorted(tried) == [1, 2, 3, 4, 6, 7]


def test_the_logarithm_is_that_of_the_library_to_the_last_digits() -> None:
    values = np.concatenate([np.linspace(1e-9, 1, 1001), 2.0 ** -np.arange(54.0), 1 - 2.0 ** -np.arange(1, 54.0)])
    assert np.allclose(_log(values), np.log(values), rtol=1e-13, atol=1e-16)
    assert _log(np.array([1.0]))[0] == 0.0


# --- mixes ------------------------------------------------------------------------------------------------------------


def mixed(
    lengths: tuple[int, ...], weights: tuple[float, ...], samples: int, *, run: int = 1, seed: int = 0
) -> MixedOrder:
    orders: list[Order] = [ShuffledOrder(size=length, seed=100 + i) for i, length in enumerate(lengths)]
    if len(lengths) > 1:
        orders[1] = ShardedOrder(shard_sizes=(lengths[1] // 2, lengths[1] - lengths[1] // 2), seed=7, window=3)
    return MixedOrder(orders, lengths, weights, samples=samples, seed=seed, run=run)


cases = st.lists(st.tuples(st.integers(2, 20), st.floats(0.3, 5)), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases=cases, samples=st.integers(20, 90), run=st.integers(1, 5), seed=st.integers(0, 9))
def test_a_mix_walks_each_source_in_whole_passes_across_epochs(
    cases: list[tuple[int, float]], samples: int, run: int, seed: int
) -> None:
    """In time, and from epoch to epoch: no sample comes again before all of its source have come as often."""
    lengths, weights = tuple(n for n, _ in cases), tuple(w for _, w in cases)
    order = mixed(lengths, weights, samples, run=run, seed=seed)
    assert order.size == -(-samples // run) * run
    sequence = np.concatenate([order.indices(epoch, np.arange(order.size)) for epoch in range(3)])
    ends = np.cumsum(lengths)
    sources = np.searchsorted(ends, sequence, side="right")
    assert (sources.reshape(-1, run) == sources.reshape(-1, run)[:, :1]).all(), "a run is of one source"
    assert np.bincount(sources, minlength=len(lengths)).tolist() == [3 * run * count for count in order.counts]
    for source, length in enumerate(lengths):
        own = iter((sequence[sources == source] - (ends[source] - length)).tolist())
        while walk := list(islice(own, length)):
            assert len(set(walk)) == len(walk)
    some = np.arange(order.size)[::3]
    assert np.array_equal(order.indices(1, some), sequence[order.size : 2 * order.size][::3])
    assert order.indices(1, some[None]).shape == (1, len(some))


def test_which_source_comes_when_differs_between_epochs_and_seeds() -> None:
    a = mixed((50, 60), (1, 1), 400)
    draws = [
        mixed((50, 60), (1, 1), 400, seed=seed).indices(epoch, np.arange(400)) >= 50
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    found = np.corrcoef(np.array(draws, np.float64)) - np.eye(4)
    assert np.abs(found).max() < 6 / math.sqrt(400)
    assert a.counts == [200, 200]


def test_a_mix_is_as_cheap_at_a_late_epoch() -> None:
    order = mixed((5, 7), (2, 1), 12)
    late = order.indices((1 << 63) - 1, np.arange(12))
    assert late.min() >= 0 and late.max() < 12


def test_a_stand_in_is_of_the_same_source() -> None:
    order = mixed((5, 7), (2, 1), 24)
    places = order.indices(0, np.arange(24))
    for position in range(24):
        tried = {order.replacement(0, position, attempt) for attempt in range(order.candidates(0, position))}
        assert tried == (set(range(5)) if places[position] < 5 else set(range(5, 12)))


def test_in_order_a_stand_in_is_of_the_same_source() -> None:
    order = MixInOrder((5, 0, 7), seed=3)
    assert order.size == 12 and order.indices(2, [[3, 11]]).tolist() == [[3, 11]]
    for position in range(12):
        tried = [order.replacement(0, position, attempt) for attempt in range(order.candidates(0, position))]
        assert sorted(tried) == list(range(5) if position < 5 else range(5, 12))


@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8), total=st.integers(0, 10_000))
def test_counts_add_up_and_none_is_one_from_its_share(weights: list[float], total: int) -> None:
    counts = apportion(weights, total)
    assert sum(counts) == total
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - total * weight / sum(weights)) < 1 + 1e-6
