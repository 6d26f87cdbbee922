"""The labels of samples: one class each, several classes, a number or a vector.

Labels of classes, as written numbers or names, are resolved to the names of the classes and numbers from 0.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import chain
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from gpuflow.arrays import Array, Bools, Bytes, Ints
from gpuflow.errors import SourceError, near_word, show
from gpuflow.sources.field_spec import FieldSpec, GivenClasses

_MAX_INFERRED = 1_000_000


class Codes(dict[object, int]):
    """Numbers distinct values in order of first use: `codes[value]` assigns the next number to a new value.

    Examples:
        >>> codes = Codes()
        >>> [codes[name] for name in ("dog", "cat", "dog")]
        [0, 1, 0]
    """

    def __missing__(self, value: object) -> int:
        code = self[value] = len(self)
        return code


def texts_of(labels: Iterable[object], classes: GivenClasses) -> list[str]:
    """Return labels as texts for `resolve_labels`. Outer spaces stay if they belong to the name of a class."""
    names = frozenset(classes if isinstance(classes, tuple) else ())
    return [text if text in names else text.strip() for text in map(str, labels)]


def resolve_labels(
    values: Sequence[str], classes: GivenClasses, locate: Callable[[int], str], place: str
) -> tuple[tuple[str, ...], Ints]:
    """Return the class names, and the label of each distinct value.

    The first value decides whether labels are names or numbers; where integers are among the given names, they are
    names. Unless the names are given, decimal numbers such as `3.0` are neither, the first value must not be the only
    name, and none may be several others in one, such as `cat|dog`.

    Args:
        values: the distinct values as written, in order of first occurrence.
        classes: the number of classes, their names, or None for as many classes as occur.
        locate: returns the place where `values[i]` first occurs, for messages.
        place: the place of the whole source, for messages.

    Examples:
        >>> resolve_labels(["dog", "cat"], None, lambda i: f"list.csv:{i + 1}", "list.csv")
        (('cat', 'dog'), array([1, 0]))
    """
    numeric = _integer(values[0]) is not None
    if isinstance(classes, tuple):
        if not numeric or any(_integer(name) is not None for name in classes):
            return classes, _named(values, classes, locate)
        return classes, _numbered(values, len(classes), locate)
    _check_names(values, locate)
    if numeric:
        labels = _numbered(values, classes, locate)
        count = classes if classes is not None else int(labels.max()) + 1
        return tuple(map(str, range(count))), labels
    names = tuple(sorted(set(values)))
    labels = _named(values, names, locate)
    if classes is not None and len(names) != classes:
        raise SourceError(
            f"{place}: labels must be {classes} class names (source.classes), found {len(names)}; "
            f"give source.classes the names instead, or correct the labels"
        )
    return names, labels


_DIGITS = re.compile(r"-?[0-9]{1,4000}")
"""Python's `int` takes more, such as `1_0` for 10, which would give two names one label; and no more digits at once."""


def _integer(text: str) -> int | None:
    """Parse decimal digits; None for any other text. A sign is understood, so that it can be refused."""
    return int(text) if _DIGITS.fullmatch(text) else None


_SEPARATORS = "|;,"


def _several(text: str, names: Container[str]) -> str:
    """Suggest what to do about a label that is several names or integers in one; empty if it is not."""
    for separator in _SEPARATORS:
        parts = [part.strip() for part in text.split(separator)]
        if len(parts) > 1 and all(part in names or _integer(part) is not None for part in parts):
            keys = f'{{kind: classes, separator: "{separator}"}}'
            return f"; where samples have several labels, declare source.fields.label: {keys}"
    return ""


_DECIMAL = re.compile(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def _check_names(values: Sequence[str], locate: Callable[[int], str]) -> None:
    """Raise SourceError for labels that would be names, but were hardly meant as names."""
    for code, text in enumerate(values):
        try:
            text.encode("utf-8", "surrogateescape")  # as of a directory whose name is no text
        except UnicodeEncodeError:
            rule = "must be text without lone surrogates"
            raise SourceError(f"{locate(code)}: label {rule}, got {text!r}; correct it") from None
        if _DECIMAL.fullmatch(text):
            raise SourceError(
                f"{locate(code)}: label must be an integer or a class name, got {text!r}; write integers, or list "
                "the names in source.classes"
            )
    names = frozenset(values)
    for code, text in enumerate(values):
        if action := _several(text, names):
            rule = "label must be one class, got several in one"
            raise SourceError(f"{locate(code)}: {rule}, {text!r}{action}; else list the names in source.classes")
    first, *others = values
    if first and _integer(first) is None and others and all(_integer(text) is not None for text in others):
        raise SourceError(
            f"{locate(0)}: label must be an integer like all others, got {first!r}; correct it, or list the names in "
            "source.classes"
        )


def _numbered(values: Sequence[str], count: int | None, locate: Callable[[int], str]) -> Ints:
    labels = np.empty(len(values), dtype=np.int64)
    for code, text in enumerate(values):
        label = _integer(text)
        if label is None:
            raise SourceError(
                f"{locate(code)}: label must be an integer like the first one, got {text!r}; "
                f"write every label as a number, or every label as a name"
            )
        given = show(label)
        if label < 0:
            raise SourceError(f"{locate(code)}: label must be >= 0, got {given}; number the classes from 0")
        if count is not None and label >= count:
            raise SourceError(
                f"{locate(code)}: label must be in 0..{count - 1}, got {given}; raise source.classes or correct it"
            )
        if count is None and label >= _MAX_INFERRED:
            raise SourceError(
                f"{locate(code)}: label must be below {_MAX_INFERRED} unless source.classes is given, got {given}; "
                f"number the classes from 0 without gaps"
            )
        labels[code] = label
    return labels


def _named(values: Sequence[str], names: tuple[str, ...], locate: Callable[[int], str]) -> Ints:
    places = {name: label for label, name in enumerate(names)}
    labels = np.empty(len(values), dtype=np.int64)
    for code, text in enumerate(values):
        if not text:
            raise SourceError(f"{locate(code)}: label must not be empty; give a class name or a number")
        if text not in places:
            raise SourceError(
                f"{locate(code)}: label must be one of source.classes, got {text!r}"
                f"{_several(text, names) or near_word(text, names)}"
            )
        labels[code] = places[text]
    return labels


# --- the labels of samples --------------------------------------------------------------------------------------------


@final
class Locate:
    """Where values stand, for messages.

    Args:
        sample: returns the place of sample i: `list.jsonl:17`.
        value: returns the place of one of its values, by default `list.jsonl:17: boxes`.
        row: returns the place of row j of a value, by default `list.jsonl:17: boxes[2]`.
    """

    def __init__(
        self,
        sample: Callable[[int], str],
        value: Callable[[int, str], str] | None = None,
        row: Callable[[int, str, int], str] | None = None,
    ) -> None:
        self.sample = sample
        self.value = value or (lambda i, column: f"{sample(i)}: {column}")
        self.row = row or (lambda i, column, j: f"{self.value(i, column)}[{j}]")


@final
class Labels:
    """The labels of samples, or of boxes, in the making: each distinct one has a number.

    Args:
        classes: see `resolve_labels`.
        place: the place of the whole source, for messages.
    """

    def __init__(self, classes: GivenClasses, place: str) -> None:
        self._classes = classes
        self._place = place
        self._codes = Codes()
        self._numbers = array("i")
        self._firsts = list[str]()

    def add(self, labels: Sequence[int | str], locate: Callable[[int], str]) -> None:
        """Append labels. locate: returns the place of labels[i]."""
        codes = [self._codes[label] for label in labels]
        self._numbers.extend(codes)
        if len(self._codes) > len(self._firsts):
            for i, code in enumerate(codes):
                if code == len(self._firsts):
                    self._firsts.append(locate(i))

    def build(self) -> tuple[tuple[str, ...], Ints]:
        """Resolve the labels to the names of the classes and indices into them. Raises SourceError."""
        if not self._codes:
            names = self._classes if isinstance(self._classes, tuple) else map(str, range(self._classes or 0))
            return tuple(names), np.zeros(0, np.int64)
        written = texts_of(self._codes, self._classes)
        names, labels = resolve_labels(written, self._classes, self._firsts.__getitem__, self._place)
        return names, labels[np.frombuffer(self._numbers, dtype=np.int32)]


def loses_digits(numbers: Array) -> Bools:
    """Return which of these are whole numbers that float32 does not hold, such as time stamps.

    Python's numbers, in an array of objects, are compared as they are: float64 may round one to a number of float32.

    Examples:
        >>> loses_digits(np.array([1.5, 2**24, 2**24 + 1]))
        array([False, False,  True])
    """
    rounded = numbers.astype(np.float64)
    with np.errstate(over="ignore"):
        held = rounded.astype(np.float32)
    lost = np.asarray((np.floor(rounded) == rounded) & (held != rounded))
    large = np.abs(rounded) >= 2.0**53
    lost[large] = held[large].astype(object) != numbers[large].astype(object)
    return lost


def names_in(text: str, separator: str) -> list[str]:
    """Split a text such as `cat|dog` to labels; an empty one has none.

    Examples:
        >>> names_in("cat | dog", "|")
        ['cat', 'dog']
    """
    return [name.strip() for name in text.split(separator)] if text.strip() else []


def label_values(columns: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """Return the label of each sample: of one column its value, of several a list of their values."""
    return columns[0] if len(columns) == 1 else list(map(list, zip(*columns, strict=True)))


class SampleLabels(Protocol):
    """Collects labels, block by block."""

    def add(self, values: Sequence[Any]) -> None:
        """Append the labels of the next samples. Raises SourceError at the faulty one."""

    def build(self) -> tuple[tuple[str, ...], Array]:
        """Build the names of the classes, and the labels: see `Source.labels`."""


def sample_labels(spec: FieldSpec, column: str, classes: GivenClasses, place: str, locate: Locate) -> SampleLabels:
    """Return the collector of the labels that a field declares.

    Args:
        column: where they stand.
        classes: see `resolve_labels`.
        place: the place of the whole source.
        locate: the places of single samples.
    """
    match spec.kind:
        case "classes":
            return _ClassesEach(Labels(classes, place), column, locate, spec.separator)
        case "number" | "vector":
            return _Numbers(spec.columns or (column,), locate, is_vector=spec.kind == "vector")
        case "class" | None:
            return _OneClassEach(Labels(classes, place), column, locate)
        case other:
            raise AssertionError(f"no kind of label: {other!r}")


@final
class _OneClassEach:
    def __init__(self, labels: Labels, column: str, locate: Locate) -> None:
        self._labels = labels
        self._column = column
        self._locate = locate
        self._count = 0

    def add(self, values: Sequence[Any]) -> None:
        if not set(map(type, values)) <= {int, str}:
            i, value = next((i, value) for i, value in enumerate(values) if type(value) not in (int, str))
            here = self._locate.value(self._count + i, self._column)
            raise SourceError(f"{here} must be an integer or a class name, got {show(value)}; correct it")
        self._labels.add(values, lambda i: self._locate.sample(self._count + i))
        self._count += len(values)

    def build(self) -> tuple[tuple[str, ...], Ints]:
        return self._labels.build()


@final
class _ClassesEach:
    def __init__(self, labels: Labels, column: str, locate: Locate, separator: str | None) -> None:
        self._labels = labels
        self._column = column
        self._locate = locate
        self._separator = separator
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
    def __init__(self, columns: Sequence[str], locate: Locate, *, is_vector: bool) -> None:
        self._columns = columns
        self._locate = locate
        self._is_vector = is_vector
        self._blocks: list[NDArray[np.float32]] = []
        self._count = 0
        self._length = -1

    def add(self, values: Sequence[Any]) -> None:
        for i, value in enumerate(values):
            self._check(self._count + i, value)
        numbers = np.array(list(values), object)
        for i in np.flatnonzero(loses_digits(numbers))[:1]:
            row, place = divmod(int(i), self._length)
            several = len(self._columns) > 1
            here = self._locate.value(self._count + row, self._columns[place * several])
            raise SourceError(
                f"{here} must have no more digits than float32 holds, got "
                f"{show(values[row][place] if several else values[row])}; subtract an offset, or declare a field of "
                "type number, which is float64"
            )
        self._blocks.append(numbers.astype(np.float32))
        self._count += len(values)

    def _check(self, i: int, value: Any) -> None:
        numbers = value if self._is_vector else [value]
        rule = "must be a list of finite numbers" if self._is_vector else "must be a finite number"
        here = self._locate.value(i, self._columns[0])
        if len(self._columns) > 1 and (wrong := [k for k, number in enumerate(numbers) if not _is_number(number)]):
            rule, value = "must be a finite number", value[wrong[0]]
            here = self._locate.value(i, self._columns[wrong[0]])
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
