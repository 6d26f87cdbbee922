"""The spec of a split: which part each sample belongs to, and what must stay together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from fractions import Fraction as Exact
from typing import Annotated, Any, TypeVar

from gpuflow.errors import Code, Problem
from gpuflow.pipeline.bounds import Bounds, out_of_bounds
from gpuflow.sources.field_spec import conflict

T = TypeVar("T")
Pairs = tuple[tuple[str, T], ...]

_FRACTION = Bounds(above=0, most=1, words="a fraction within (0, 1]")
Fraction = Annotated[float, _FRACTION]
CONTENT = "content"
"""The value of `group` that keeps samples of equal bytes together."""
TRAIN, VAL, TEST = "train", "val", "test"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpec:
    """What the samples of a group share: a value of `column`, or a piece of their `path`.

    Args:
        column: the column whose values name the groups.
        path: a regular expression with one group in parentheses, which finds the name of the group in each path below
            the source's root.
    """

    column: str | None = None
    path: str | None = None

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each broken rule between keys, its path from this block on."""
        if (self.column is None) == (self.path is None):
            yield conflict((), "needs column or path, one of them")
        try:
            count = 1 if self.path is None else re.compile(self.path).groups
        except re.error as fault:
            rule = f"must be a regular expression ({fault})"
            yield Problem.of("path", rule, self.path, "correct it", code="config.range")
            return
        if count != 1:
            action = "put what names the group in parentheses, and write others as (?:...)"
            yield Problem.of("path", "must have exactly one group", self.path, action, code="config.range")


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSpec:
    """How a source is divided into parts: by a `column`, by `files`, by shares (`parts`), or into `folds`.

    Args:
        column: the column that names the part of each sample, of the source or of `file`; an empty value is no part.
        file: a CSV file with the columns `path` and `column`, which lists each sample, as `gpuflow split` writes it.
        files: for each part a text file with one path below the source's root on each line.
        parts: the share of each part. Samples are assigned by a hash.
        test: the share of the part test, which all folds have in common.
        folds: the number of folds. Fold number `fold` is the part val, and the others are the part train.
        fold: the fold that is the part val, from 0 on. With `column`, that column has the number of each sample's fold,
            or `test`.
        group: what keeps samples together in one part: a column, `content` for equal bytes, or a block.
        stratify: what each part has in equal proportions: `label` or true for the class, or a column; `false` for
            nothing. By default the class, where there is one.
        stable: with `parts`: whether a sample keeps its part when others are added or removed; sizes are then
            approximate. By default true, without `stratify`.
    """

    column: str | None = None
    file: str | None = None
    files: Mapping[str, str] | Pairs[str] = ()
    parts: Mapping[str, Fraction] | Pairs[Fraction] = ()
    test: Fraction | None = None
    folds: Annotated[int, Bounds(least=2, limit=10_000)] | None = None
    fold: Annotated[int, Bounds(least=0)] | None = None
    group: str | GroupSpec | None = None
    stratify: str | bool | None = None
    stable: bool | None = None

    def __post_init__(self) -> None:
        for key in ("files", "parts"):
            object.__setattr__(self, key, pairs(getattr(self, key)))
        make_nested(self, "group", GroupSpec)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the parts; none where a column has them."""
        if self.folds is not None or self.fold is not None:
            return (TRAIN, VAL, TEST) if self.folds is None or self.test is not None else (TRAIN, VAL)
        return tuple(name for name, _ in pairs(self.files or self.parts))

    @property
    def shares(self) -> tuple[Exact, ...]:
        """Return the share of each part as it is written, or of each fold. One that is missing to 1 is of no part."""
        if self.folds is not None:
            return (Exact(1, self.folds),) * self.folds
        return tuple(Exact(str(share)) for _, share in pairs(self.parts))

    @property
    def test_shares(self) -> tuple[Exact, ...]:
        """Return the share of the part test that folds have in common; none without it."""
        return () if self.test is None else (Exact(str(self.test)),)

    @property
    def group_block(self) -> GroupSpec | None:
        """Return what names the groups; None for equal bytes, and without groups."""
        if isinstance(self.group, str):
            return None if self.group == CONTENT else GroupSpec(column=self.group)
        return self.group

    @property
    def is_stable(self) -> bool:
        """Return True if a sample's part depends on nothing but the seed, the shares, and its path or group."""
        return bool(self.parts) and (not self.stratify if self.stable is None else self.stable)

    @property
    def stratify_column(self) -> str | None:
        """Return the column whose values each part has in equal proportions; None for the class."""
        return self.stratify if isinstance(self.stratify, str) and self.stratify != "label" else None

    @property
    def columns(self) -> Iterator[tuple[str, ...]]:
        """Yield the keys that name columns of the source."""
        if self.column is not None and self.file is None:
            yield ("column",)
        if (group := self.group_block) is not None and group.column is not None:
            yield ("group",) if isinstance(self.group, str) else ("group", "column")
        if self.stratify_column is not None:
            yield ("stratify",)

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each broken rule between keys, its path from this block on."""
        yield from out_of_bounds(self)
        ways = [key for key in ("column", "files", "parts", "folds") if getattr(self, key) not in (None, ())]
        if len(ways) != 1:
            got = " and ".join(ways) or "none of them"
            yield conflict((), f"needs one of column, files, parts and folds, got {got}")
            return
        for key, others in _ONLY_WITH.items():
            if getattr(self, key) is not None and ways[0] not in others:
                yield conflict(key, f"must go with {' or '.join(others)}, got {ways[0]}", f"remove {key}")
        yield from share_problems("parts", pairs(self.parts), "config.range")
        if self.test == 1:
            yield Problem.of("test", "must be below 1", self.test, "leave samples for the folds", code="config.range")
        if self.folds is not None and self.fold is None:
            rule = f"needs the key 'fold', the number of the fold that is {VAL}: 0 to {self.folds - 1}"
            yield Problem.of((), rule, code="config.missing_key")
        elif self.folds is not None and self.fold is not None and self.fold >= self.folds:
            action = f"choose one of 0 to {self.folds - 1}"
            yield Problem.of("fold", f"must be below folds, {self.folds}", self.fold, action, code="config.range")
        if isinstance(self.group, GroupSpec):
            yield from (problem.below("group") for problem in self.group.problems())
        if self.stable and self.stratify:
            yield conflict(
                "stable",
                "must not stand next to stratify: a sample that never moves cannot make up for others",
                "set stable: false for exact shares of each class, or remove stratify",
            )


_ONLY_WITH = {
    "file": ("column",),
    "test": ("folds",),
    "fold": ("folds", "column"),
    "group": ("parts", "folds"),
    "stratify": ("parts", "folds"),
    "stable": ("parts",),
}
_KEYS = frozenset(field.name for field in fields(SplitSpec)) - {TEST}


def is_rule(block: Any) -> bool:
    """Return True if a block `split` is a `SplitSpec`, False if it has the fraction of each part by name.

    Examples:
        >>> is_rule({"train": 0.9, "files": 0.1}), is_rule({"folds": 5, "fold": 0}), is_rule({"column": "part"})
        (False, True, True)
    """
    if not isinstance(block, Mapping):
        return isinstance(block, SplitSpec)
    for key, value in block.items():
        is_number = type(value) in (int, float) and not (type(value) is int and key in ("fold", "folds"))
        if not is_number and get_close_matches(
            str(key), _KEYS, n=1, cutoff=0.8
        ):  # so that an error names what is meant
            return True
    return False


def make_nested(spec: object, key: str, kind: type[object]) -> None:
    """Replace a mapping under a key of a spec by the spec that it describes."""
    value = getattr(spec, key)
    if isinstance(value, Mapping):
        object.__setattr__(spec, key, kind(**value))


def pairs(values: Mapping[str, T] | Pairs[T]) -> Pairs[T]:
    """Return a mapping as pairs; pairs as they are."""
    return tuple(values.items()) if isinstance(values, Mapping) else tuple((name, value) for name, value in values)


def share_problems(key: str, shares: Pairs[float], code: Code) -> Iterator[Problem]:
    """Yield a problem for each broken rule of shares by name. code: of a sum above 1."""
    for name, share in shares:
        if rule := _FRACTION.broken_rule(share):
            yield Problem.of((key, name), rule, share, code="config.range")
    total = sum(share for _, share in shares)
    if total > 1 + 1e-9:
        rule = f"must add up to at most 1, got {total:g}"
        yield Problem.of(key, rule, action="lower a fraction", code=code)
    names = [name for name, _ in shares]
    if len(set(names)) < len(names):
        yield Problem.of(key, "must name each split once", names, code="config.conflict")
