"""Bounds of numeric parameters, declared with their types: the source of checks, error texts and the JSON Schema."""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

from gpuflow.errors import Problem

UNIONS = typing.Union, types.UnionType
"""The origins of unions of types."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The allowed range of a number, or of each number in lists: `Annotated[float, Bounds(least=0, most=1)]`.

    Args:
        least: the smallest allowed value.
        above: an exclusive lower limit.
        most: the largest allowed value.
        limit: the largest allowed absolute value, where all values in use are far below it: it keeps a mistyped number
            from exhausting memory or leaving the range of floats. An error names it only if it is exceeded.
        ascending: in a pair [low, high], high must not be less than low.
        words: a text that describes the allowed values, if the bounds do not suffice.

    Examples:
        >>> share = Bounds(least=0, most=1)
        >>> share.broken_rule(1.5), share.broken_rule((0.25, 0.5))
        ('must be within [0, 1]', '')
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    limit: float | None = None
    ascending: bool = False
    words: str = ""

    def broken_rule(self, value: Any) -> str:
        """Return the rule that a number or a tuple of numbers, or of tuples, breaks; empty if it breaks none.

        Integers are compared as integers: they may be too large for a float.
        """
        numbers = tuple(_numbers(value))
        descending = self.ascending and any(low > high for low, high in pairwise(numbers))
        if descending or not all(self._holds(number) for number in numbers):
            return self.rule
        if not all(-math.inf < number < math.inf for number in numbers):
            return "must be finite"
        if self.limit is None or all(abs(number) <= self.limit for number in numbers):
            return ""
        signed = self.lowest == -self.limit
        limit = f"{self.limit:.9g}"
        return f"must be within [-{limit}, {limit}]" if signed else f"must be <= {limit}"

    def _holds(self, number: float) -> bool:
        return (
            number == number  # not NaN
            and (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.most is None or number <= self.most)
        )

    @property
    def lowest(self) -> float | None:
        """Return the smallest allowed value; None if there is none, or an exclusive lower limit."""
        if self.limit is not None and self.least is None and self.above is None:
            return -self.limit
        return self.least

    @property
    def highest(self) -> float | None:
        """Return the largest allowed value; None if there is none."""
        return self.limit if self.most is None else self.most

    @property
    def rule(self) -> str:
        """Return the rule as text: `must be within [0, 1]`."""
        return f"must be {self.words or self._words}"

    @property
    def _words(self) -> str:
        start, sign = (self.above, "<") if self.above is not None else (self.least, "<=")
        if self.ascending:
            low = f"{start:g} {sign} low" if start is not None else "low"
            return f"[low, high] with {low} <= high" + (f" <= {self.most:g}" if self.most is not None else "")
        if start is None:
            return f"<= {self.most:g}" if self.most is not None else "finite"
        if self.most is None:
            return f"{'>' if sign == '<' else '>='} {start:g}"
        return f"within {'(' if sign == '<' else '['}{start:g}, {self.most:g}]"


def _numbers(value: Any) -> Iterator[Any]:
    """Yield what a value holds: itself, or the items of a tuple, those of tuples in it included."""
    if isinstance(value, tuple):
        for item in value:
            yield from _numbers(item)
    else:
        yield value


def out_of_bounds(values: object) -> Iterator[Problem]:
    """Yield a problem for each field of a dataclass instance whose value breaks the bounds in the field's type."""
    for name, hint in field_types(type(values), include_extras=True).items():  # type: ignore[arg-type]
        value = getattr(values, name, None)
        if rule := _broken_rule(hint, value):
            yield Problem.of(name, rule, value, code="config.range")


@functools.lru_cache(maxsize=1024)
def field_types(kind: Any, *, include_extras: bool = False) -> dict[str, Any]:
    """Return the types of a dataclass's fields, as `typing.get_type_hints` gives them."""
    return typing.get_type_hints(kind, include_extras=include_extras)


def _broken_rule(hint: Any, value: Any) -> str:
    """Return the rule that a value breaks; empty if it breaks none.

    Bounds in one alternative of a union apply to values of its form: number or list.
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        if _is_numeric(value) and _takes(parts[0], value):
            rules = (bounds.broken_rule(value) for bounds in hint.__metadata__ if isinstance(bounds, Bounds))
            return next(filter(None, rules), "")
        return ""
    if origin in UNIONS:
        return next(filter(None, (_broken_rule(part, value) for part in parts)), "")
    return ""


def _is_numeric(value: Any) -> bool:
    return all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in _numbers(value))


def _takes(hint: Any, value: Any) -> bool:
    """Return True if a type has an alternative of the value's form."""
    if typing.get_origin(hint) in UNIONS:
        return any(_takes(part, value) for part in typing.get_args(hint))
    return (typing.get_origin(hint) is tuple) == isinstance(value, tuple)
