"""Bounds: what a parameter's numbers may be, and the rule in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from gpuflow.pipeline.bounds import Bounds, out_of_bounds

PAIR = Bounds(above=0, most=1, ascending=True)


@pytest.mark.parametrize(
    ("bounds", "rule", "good", "bad"),
    [
        (Bounds(least=1), "must be >= 1", [1, 5, (1, 2), ()], [0, (3, 0), math.nan]),
        (Bounds(above=0), "must be > 0", [0.1], [0, (1, 0)]),
        (Bounds(most=3), "must be <= 3", [3, -9], [4]),
        (Bounds(least=0, most=1), "must be within [0, 1]", [0, 1, 0.5], [-0.1, 1.1]),
        (Bounds(above=0, most=1), "must be within (0, 1]", [1], [0]),
        (Bounds(least=0, most=1, words="a probability"), "must be a probability", [1], [2]),
        (PAIR, "must be [low, high] with 0 < low <= high <= 1", [(0.1, 1), (0.5, 0.5)], [(0, 1), (1, 0.5), (0.5, 2)]),
        (Bounds(ascending=True), "must be [low, high] with low <= high", [(-3, 2)], [(2, -3)]),
        (Bounds(), "must be finite", [0, -1e9], [math.nan, math.inf, (0, -math.inf)]),
    ],
)
def test_bounds(bounds: Bounds, rule: str, good: list[Any], bad: list[Any]) -> None:
    assert bounds.rule == rule
    assert [bounds.broken_rule(value) for value in good] == [""] * len(good)
    assert [bounds.broken_rule(value) for value in bad] == [rule] * len(bad)


@pytest.mark.parametrize(
    ("bounds", "rule", "good", "bad"),
    [
        (Bounds(least=1, limit=99), "must be <= 99", [1, 99], [100, (3, 10**400), 10**400]),
        (Bounds(above=0, limit=9), "must be <= 9", [1e-200, 9], [9.1]),
        (Bounds(limit=1e9), "must be within [-1e+09, 1e+09]", [-1e9, ((1, 2), (3, 4))], [1e300, ((1, 2), (-1e300, 4))]),
        (Bounds(least=0, limit=9, ascending=True, words="a pair"), "must be <= 9", [(1, 2)], [(1, 10)]),
    ],
)
def test_a_limit_is_named_only_where_it_is_exceeded(bounds: Bounds, rule: str, good: list[Any], bad: list[Any]) -> None:
    assert [bounds.broken_rule(value) for value in good] == [""] * len(good)
    assert [bounds.broken_rule(value) for value in bad] == [rule] * len(bad)
    assert bounds.broken_rule(-1) in ("", bounds.rule) and "9" not in bounds.rule
    assert bounds.highest == bounds.limit
    assert bounds.lowest == (-1e9 if bounds.least is None and bounds.above is None else bounds.least)


@pytest.mark.parametrize("bounds", [Bounds(least=1), Bounds(above=0), Bounds(most=3), Bounds(least=0, most=1)])
def test_integers_that_no_float_holds_are_compared(bounds: Bounds) -> None:
    huge = 10**400
    assert bounds.broken_rule(huge) == ("" if bounds.most is None else bounds.rule)
    assert bounds.broken_rule(-huge) == ("" if bounds.least is bounds.above is None else bounds.rule)


def test_infinity_is_told_apart() -> None:
    assert Bounds(least=0).broken_rule(math.inf) == "must be finite"
    assert Bounds(least=0).broken_rule(math.nan) == "must be >= 0"


@dataclass(frozen=True)
class Values:
    """Every form of a parameter that may have bounds."""

    plain: int = -1
    one: Annotated[int, Bounds(least=1)] | None = None
    name_or_numbers: str | Annotated[tuple[float, ...], Bounds(above=0)] = "x"
    one_or_pair: Annotated[float, Bounds(least=0)] | Annotated[tuple[float, float], Bounds(least=-1)] = 0.0
    either: Annotated[int | tuple[int, int], Bounds(least=1)] = 1


@pytest.mark.parametrize(
    ("fields", "paths"),
    [
        ({}, []),
        ({"one": 0, "name_or_numbers": (1.0, 0.0)}, ["one", "name_or_numbers"]),
        ({"one_or_pair": -0.5}, ["one_or_pair"]),
        ({"one_or_pair": (-0.5, 0)}, []),
        ({"one_or_pair": (-1.5, 0)}, ["one_or_pair"]),
        ({"either": 0}, ["either"]),
        ({"either": (1, 0)}, ["either"]),
        ({"one": True, "either": "text"}, []),  # not a number: of the wrong type, which is another check
    ],
)
def test_fields_out_of_bounds(fields: dict[str, Any], paths: list[str]) -> None:
    problems = list(out_of_bounds(Values(**fields)))
    assert [problem.path for problem in problems] == [(path,) for path in paths]
    assert [problem.value for problem in problems] == [fields[path] for path in paths]
    assert {problem.code for problem in problems} <= {"config.range"}
