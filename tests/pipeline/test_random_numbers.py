"""The random numbers of a stage: the first ones do not depend on how many are drawn, nor on other samples."""

from __future__ import annotations

import numpy as np

from tests.running import keys_of

ONCE = 5.5
"""Standard deviations that chance does not reach among the few hundred pairs below."""


def test_the_first_numbers_are_the_same_however_many_are_drawn() -> None:
    keys = keys_of(20, seed=3, epoch=1).stage("a", 0)
    many = keys.uniform(22)
    assert many.shape == (20, 22)
    for count in range(1, 22):
        assert np.array_equal(keys.uniform(count), many[:, :count])


def test_numbers_positions_epochs_seeds_names_and_occurrences_are_independent() -> None:
    found = [
        keys_of(400, seed=seed, epoch=epoch, first=first).stage(name, occurrence).uniform(6).T
        for seed, epoch, first, name, occurrence in (
            (0, 0, 0, "a", 0),
            (1, 0, 0, "a", 0),
            (0, 1, 0, "a", 0),
            (0, 0, 400, "a", 0),
            (0, 0, 2**32, "a", 0),
            (0, 0, 0, "b", 0),
            (0, 0, 0, "a", 1),
        )
    ]
    columns = np.concatenate(found)
    correlations = np.corrcoef(columns)[np.triu_indices(len(columns), 1)]
    assert abs(correlations).max() < ONCE / np.sqrt(400)
    assert abs(columns.mean(axis=1) - 0.5).max() < ONCE / np.sqrt(12 * 400)
    assert columns.min() >= 0 and columns.max() < 1
