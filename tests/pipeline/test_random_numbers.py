"""The random numbers of a stage: the first ones do not depend on how many are drawn, nor on other samples."""

from __future__ import annotations

import pickle
from unittest.mock import Mock

import numpy as np
import pytest

from gpuflow.pipeline import rng
from tests import random_reference as reference
from tests.running import keys_of

ONCE = 5.5
"""Standard deviations that chance does not reach among the few hundred pairs below."""


def test_the_first_numbers_are_the_same_however_many_are_drawn() -> None:
    many = keys_of(20, seed=3, epoch=1).stage("a", 0).uniform(22)
    assert many.shape == (20, 22)
    for count in range(1, 22):
        assert np.array_equal(keys_of(20, seed=3, epoch=1).stage("a", 0).uniform(count), many[:, :count])


@pytest.mark.parametrize("epoch", [0, 7, 2**32 - 1, 2**32 + 5, 2**63 - 1])
def test_numbers_are_those_of_the_reference(epoch: int) -> None:
    """In calls that keep the interpreter and calls that release it."""
    key = 2**64 - 3
    for places in (1, 3, 50, 400):
        positions = np.random.default_rng(epoch % 97).integers(0, 2**63 - 1, places)
        positions[:3] = [0, 2**32 - 1, 2**32][:places]
        for some in (positions, positions[::3]):  # also if they do not lie side by side
            for count in (1, 4, 5, 22):
                found = rng.StageKeys(key, epoch, some).uniform(count)
                assert np.array_equal(found, reference.uniform(some, count, epoch, key))


def test_a_stage_that_draws_in_parts_gets_the_same_numbers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it asks for more numbers or fewer, and if a returned array was changed. The numbers are computed once for
    the largest request so far, and a pickled `Keys` does not contain them."""
    keys = keys_of(20, seed=3, epoch=1)
    right = keys_of(20, seed=3, epoch=1).stage("a", 0).uniform(9)
    draw = Mock(side_effect=rng._random_numbers)
    monkeypatch.setattr(rng, "_random_numbers", draw)
    for count in (2, 9, 4, 1, 9):
        drawn = keys.stage("a", 0).uniform(count)
        assert np.array_equal(drawn, right[:, :count])
        drawn[:] = 7
    assert draw.call_count == 2, "for two numbers, then for nine"
    fresh = keys_of(20, seed=3, epoch=1)
    assert len(pickle.dumps(keys)) == len(pickle.dumps(fresh))
    copied = pickle.loads(pickle.dumps(keys))
    assert np.array_equal(copied.stage("a", 0).uniform(9), right)
    assert not np.array_equal(keys.stage("a", 1).uniform(9), right)
    assert not np.array_equal(keys.of_view("large", 0).stage("a", 0).uniform(9), right)
    assert np.array_equal(keys.take(slice(3, 5)).stage("a", 0).uniform(9), right[3:5])


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
