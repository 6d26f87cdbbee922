"""Numbers of records: the forms that are read, and random keys that carry them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from gpuflow.pipeline.records import Column, Ragged, Records, RecordValue, values_of
from gpuflow.pipeline.stage import Keys

MATRIX, POINTS = RecordValue("a", "matrix"), RecordValue("a", "points")
IDENTITY = [[1, 0, 0], [0, 1, 0]]
CORNERS = [[0, 0], [5, 0], [0, 5]]


def read(value: RecordValue, column: Column, errors: list[str | None] | None = None) -> tuple[Any, list[str | None]]:
    count = len(column)
    values, found = values_of([value], Records({"a": column}, errors or [None] * count))
    return values[value], found


@pytest.mark.parametrize(
    ("value", "column", "expected"),
    [
        (MATRIX, [IDENTITY, [[2, 0.5, 1], [0, 2, -3.25]]], [IDENTITY, [[2, 0.5, 1], [0, 2, -3.25]]]),
        (MATRIX, ["[[1, 0, 0], [0, 1, 0]]", IDENTITY], [IDENTITY, IDENTITY]),
        (MATRIX, [np.array(IDENTITY, np.float32)], [IDENTITY]),
        (MATRIX, [], np.empty((0, 2, 3))),
        (POINTS, [CORNERS, [*CORNERS, [9, 9]]], [CORNERS, CORNERS]),
        (POINTS, [[*CORNERS, [9, 9]]] * 2, [CORNERS, CORNERS]),
    ],
    ids=["lists", "text", "arrays", "none", "three and four points", "four points"],
)
def test_forms(value: RecordValue, column: Column, expected: Any) -> None:
    found, errors = read(value, column)
    assert found.dtype == np.float64 and np.array_equal(found, expected)
    assert errors == [None] * len(column)


@pytest.mark.parametrize("count", [3, 5])
def test_keypoints_become_numbers_of_pixels(count: int) -> None:
    rows = np.random.default_rng(0).uniform(1, 40, (2, 1, count, 3)).astype(np.float32)
    rows[..., 2] = 2
    empty = np.empty((0, count, 3), np.float32)
    found, errors = read(POINTS, Ragged.of([rows[0], empty, rows[1], np.concatenate([*rows])], empty))
    assert np.array_equal(found[[0, 2]], rows[:, 0, :3, :2].astype(np.float64) - 0.5)
    assert np.array_equal(found[[1, 3]], [POINTS.stand_in] * 2)
    assert [error and error[-5:] for error in errors] == [None, "got 0", None, "got 2"]


def test_two_keypoints_are_too_few() -> None:
    rows = np.ones((1, 2, 3), np.float32)
    _, errors = read(POINTS, Ragged.of([rows], rows[:0]))
    assert errors == ["a must have at least 3 keypoints, got 2"]


def test_a_bad_record_keeps_its_reason_and_leaves_the_others() -> None:
    found, errors = read(MATRIX, [None, IDENTITY, "x", [[1, 1, 0], [1, 1, 0]]], ["gone", None, None, None])
    assert np.array_equal(found[1], IDENTITY) and np.isfinite(found).all()
    assert errors[:2] == ["gone", None] and all(errors[2:])


@pytest.mark.parametrize(
    "value", ["[" * 100_000, 10**400, [[10**400, 0, 0], [0, 1, 0]], {"a": 1}, True, [[1], [2, 3]]], ids=type
)
@pytest.mark.parametrize("form", [MATRIX, POINTS], ids=lambda form: form.form)
def test_any_other_value_is_a_bad_record(form: RecordValue, value: Any) -> None:
    found, (error,) = read(form, [value])
    assert error is not None and error.startswith(f"a {form.rule}, got ") and len(error) < 200
    assert np.array_equal(found, [form.stand_in])


@pytest.mark.parametrize("rows", [slice(1, 3), np.array([3, 0])], ids=str)
def test_keys_take_values_with_them(rows: Any) -> None:
    values = {MATRIX: np.arange(24, dtype=np.float64).reshape(4, 2, 3)}
    keys = Keys(3, 1, np.arange(10, 14), values=values).of_view("small", 2)
    some = pickle.loads(pickle.dumps(keys.take(rows)))
    assert (some.seed, some.epoch, some.view) == (3, 1, ("small", 2))
    assert np.array_equal(some.positions, keys.positions[rows])
    assert np.array_equal(some.stage("warp_affine", 0).values[MATRIX], values[MATRIX][rows])
    assert np.array_equal(keys[2].values[MATRIX], values[MATRIX][2:3])
