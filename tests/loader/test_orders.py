"""Laws of every order: seed, epoch, window and position each select a permutation that is independent of others."""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import gpuflow
from gpuflow.loader.sampler import Order, ShardedOrder, ShuffledOrder
from tests import datasets
from tests.images import jpeg, photo

SEEDS = (0, 1, 2, 10**9)
EPOCHS = (0, 1, 2, 3, 100)


def check_independent(permutations: Iterable[NDArray[np.int64]]) -> None:
    """Pairs of permutations of n elements have a rank correlation of about 0, and agree in about one place."""
    ranks = np.array([*permutations])
    count, size = ranks.shape
    correlations = np.corrcoef(ranks)[np.triu_indices(count, 1)]
    assert abs(correlations).max() < 5.5 / np.sqrt(size), "five and a half standard deviations of chance"
    assert abs(correlations.mean()) < 5 / np.sqrt(size * len(correlations))
    assert max((a == b).sum() for a, b in itertools.combinations(ranks, 2)) <= 10
    assert max((ranks == np.arange(size)).sum(axis=1)) <= 10, "and none is the identity"


def test_the_order_over_seeds_and_epochs() -> None:
    orders = {seed: ShuffledOrder(size=1000, seed=seed) for seed in SEEDS}
    check_independent(orders[seed].indices(epoch, np.arange(1000)) for seed in SEEDS for epoch in EPOCHS)


def test_the_order_of_shards_over_seeds_and_epochs() -> None:
    """In windows of 1, over shards of one sample, nothing but the order of the shards is permuted."""
    orders = {seed: ShardedOrder(shard_sizes=(1,) * 300, seed=seed, window=1) for seed in SEEDS}
    check_independent(orders[seed].indices(epoch, np.arange(300)) for seed in SEEDS for epoch in EPOCHS)


def test_windows_over_seeds_epochs_and_places() -> None:
    """Over a single shard, nothing but the places within the windows is permuted."""
    window, count = 500, 4
    found = []
    for seed, epoch in itertools.product(SEEDS, EPOCHS):
        order = ShardedOrder(shard_sizes=(window * count,), seed=seed, window=window)
        found += [*order.indices(epoch, np.arange(window * count)).reshape(count, window) % window]
    check_independent(found)


def test_a_window_is_neither_shuffled_as_the_shards_nor_as_the_whole() -> None:
    size = 1000
    check_independent(
        [
            ShardedOrder(shard_sizes=(size,), window=size).indices(0, np.arange(size)),
            ShardedOrder(shard_sizes=(1,) * size, window=1).indices(0, np.arange(size)),
            ShuffledOrder(size=size).indices(0, np.arange(size)),
        ]
    )


@pytest.mark.parametrize("kind", ["shuffled", "in order", "sharded"])
def test_replacements_over_seeds_epochs_and_positions(kind: str) -> None:
    def order(seed: int) -> Order:
        if kind == "sharded":
            return ShardedOrder(shard_sizes=(50, 50, 100), seed=seed, window=64)
        return ShuffledOrder(size=200, seed=seed, shuffle=kind == "shuffled")

    check_independent(
        np.array([order(seed).replacement(epoch, position, attempt) for attempt in range(200)])
        for seed, epoch, position in itertools.product((0, 1), (0, 1), (0, 1, 199))
    )


def test_a_loader_takes_seed_epoch_and_window_from_its_file_and_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = jpeg(photo(9, 8))
    for shard in range(3):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as archive:
            for number in range(20):
                for name, content in ((f"{number:03}.jpg", data), (f"{number:03}.cls", b"0")):
                    header = tarfile.TarInfo(name)
                    header.size = len(content)
                    archive.addfile(header, io.BytesIO(content))
    seen = set()
    for seed, window in itertools.product((0, 1), (8, 60)):
        source = {"tar": str(tmp_path / "{0..2}.tar"), "seed": seed, "window": window}
        config = datasets.write_config(tmp_path / "tar.yaml", "", source=source, run={"processes": 0})
        order = ShardedOrder(shard_sizes=(20, 20, 20), seed=seed, window=window)
        with gpuflow.load(config) as loader:
            for epoch in range(2):
                indices = [int(index) for batch in loader for index in batch.indices]
                assert indices == order.indices(epoch, np.arange(60)).tolist()
                seen.add(tuple(indices))
    assert len(seen) == 8


def test_the_seed_is_0_where_none_is_given() -> None:
    assert ShardedOrder(shard_sizes=(9,)) == ShardedOrder(shard_sizes=(9,), seed=0, window=8192)
    assert ShuffledOrder(size=9) == ShuffledOrder(size=9, seed=0, shuffle=True)
