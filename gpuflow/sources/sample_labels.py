"""Builds the labels of samples: one class each, several classes, a number or a vector."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from gpuflow.arrays import Array, Bools, Bytes, Ints
from gpuflow.errors import SourceError, show
from gpuflow.sources.field_spec import FieldSpec
from gpuflow.sources.record_builder import Labels, Locate


def loses_digits(numbers: Array) -> Bools:
    """Which of these are whole numbers that float32 does not hold, such as time stamps.

    Python's numbers, in an array of objects, are compared as they are: float64 may round one to a number of float32.
    """
    rounded = numbers.astype(np.float64)
    with np.errstate(over="ignore"):
        held = rounded.astype(np.float32)
    lost = np.asarray((np.floor(rounded) == rounded) & (held != rounded))
    large = np.abs(rounded) >= 2.0**53
    lost[large] = held[large].astype(object) != numbers[large].astype(object)
    return lost


def names_in(text: str, separator: str) -> list[str]:
    """The labels in a text such as `cat|dog`; none in an empty one."""
    return [name.strip() for name in text.split(separator)] if text.strip() else []


class SampleLabels(Protocol):
    """Collects labels, block by block."""

    def add(self, values: Sequence[Any]) -> None:
        """Append the labels of the next samples. Raises SourceError at the faulty one."""

    def build(self) -> tuple[tuple[str, ...], Array]:
        """The names of the classes, and the labels: see `Source.labels`."""


def sample_labels(
    spec: FieldSpec | None, column: str, classes: int | tuple[str, ...] | None, place: str, locate: Locate
) -> SampleLabels:
    """What collects the labels that a field declares; None: no labels.

    Args:
        column: where they stand.
        classes: see `resolve_labels`.
        place: the place of the whole source.
        locate: the places of single samples.
    """
    if spec is None:
        return _NoLabels()
    match spec.kind:
        case "classes":
            return _ClassesEach(Labels(classes, place), column, locate, spec.separator)
        case "number" | "vector":
            return _Numbers(column, locate, is_vector=spec.kind == "vector")
        case "class" | None:
            return _OneClassEach(Labels(classes, place), column, locate)
        case other:
            raise AssertionError(f"no kind of label: {other!r}")


@final
class _NoLabels:
    def __init__(self) -> None:
        self._count = 0

    def add(self, values: Sequence[Any]) -> None:
        self._count += len(values)

    def build(self) -> tuple[tuple[str, ...], Ints]:
        return (), np.zeros(self._count, np.int64)


@final
class _OneClassEach:
    def __init__(self, labels: Labels, column: str, locate: Locate) -> None:
        self._labels, self._column, self._locate, self._count = labels, column, locate, 0

    def add(self, values: Sequence[Any]) -> None:
        for i, value in enumerate(values):
            if type(value) not in (int, str):
                here = self._locate.value(self._count + i, self._column)
                raise SourceError(f"{here} must be an integer or a class name, got {show(value)}; correct it")
        self._labels.add(values, lambda i: self._locate.sample(self._count + i))
        self._count += len(values)

    def build(self) -> tuple[tuple[str, ...], Ints]:
        return self._labels.build()


@final
class _ClassesEach:
    def __init__(self, labels: Labels, column: str, locate: Locate, separator: str | None) -> None:
        self._labels, self._column, self._locate, self._separator = labels, column, locate, separator
        self._counts: list[int] = []

    def add(self, values: Sequence[Any]) -> None:
        first = len(self._counts)
        if self._separator is not None:
            values = [names_in(value, self._separator) if type(value) is str else value for value in values]
        for i, value in enumerate(values):
            if type(value) is not list or not set(map(type, value)) <= {int, str}:
                here = self._locate.value(first + i, self._column)
                raise SourceError(f"{here} must be a list of integers or class names, got {show(value)}; correct it")
        counts = [len(value) for value in values]
        owners = np.repeat(np.arange(first, first + len(values)), counts)
        self._labels.add(list(chain.from_iterable(values)), lambda k: self._locate.sample(int(owners[k])))
        self._counts += counts

    def build(self) -> tuple[tuple[str, ...], Bytes]:
        classes, labels = self._labels.build()
        if not classes:
            here = self._locate.value(0, self._column)
            raise SourceError(f"{here} must name a class in at least one sample, got none; add labels")
        held = np.zeros((len(self._counts), len(classes)), np.uint8)
        held[np.repeat(np.arange(len(self._counts)), self._counts), labels] = 1
        return classes, held


@final
class _Numbers:
    def __init__(self, column: str, locate: Locate, *, is_vector: bool) -> None:
        self._column, self._locate, self._is_vector = column, locate, is_vector
        self._blocks: list[NDArray[np.float32]] = []
        self._count, self._length = 0, -1

    def add(self, values: Sequence[Any]) -> None:
        for i, value in enumerate(values):
            self._check(self._count + i, value)
        numbers = np.array(list(values), object)
        for i in np.flatnonzero(loses_digits(numbers))[:1]:
            row = int(i) // self._length
            here = self._locate.value(self._count + row, self._column)
            raise SourceError(
                f"{here} must have no more digits than float32 holds, got {show(values[row])}; subtract an offset, or "
                "declare a field of type number, which is float64"
            )
        self._blocks.append(numbers.astype(np.float32))
        self._count += len(values)

    def _check(self, i: int, value: Any) -> None:
        numbers = value if self._is_vector else [value]
        here = self._locate.value(i, self._column)
        rule = "must be a list of finite numbers" if self._is_vector else "must be a finite number"
        if type(numbers) is not list or not numbers or not all(map(_is_number, numbers)):
            raise SourceError(f"{here} {rule}, got {show(value)}; correct it")
        if self._length < 0:
            self._length = len(numbers)
        if len(numbers) != self._length:
            rule = f"must have {self._length} numbers like the first one"
            raise SourceError(f"{here} {rule}, got {len(numbers)}; correct it")

    def build(self) -> tuple[tuple[str, ...], NDArray[np.float32]]:
        return (), np.concatenate(self._blocks)


_LARGEST = float(np.finfo(np.float32).max)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST  # which NaN is not either
