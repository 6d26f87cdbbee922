"""Resolves labels as written, numbers or class names, to class names and label numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np

from gpuflow.arrays import Ints
from gpuflow.errors import SourceError, show
from gpuflow.sources.hints import near_word

_MAX_INFERRED = 1_000_000


class Codes(dict[object, int]):
    """Numbers distinct values in order of first use: `codes[value]` assigns the next number to a new value."""

    def __missing__(self, value: object) -> int:
        code = self[value] = len(self)
        return code


def texts_of(labels: Iterable[object], classes: int | tuple[str, ...] | None) -> list[str]:
    """Labels as texts for `resolve_labels`: without outer spaces, unless these belong to the name of a class."""
    names = frozenset(classes if isinstance(classes, tuple) else ())
    return [text if text in names else text.strip() for text in map(str, labels)]


def resolve_labels(
    values: Sequence[str], classes: int | tuple[str, ...] | None, locate: Callable[[int], str], place: str
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
    """The value of decimal digits; None for any other text. A sign is understood, so that it can be refused."""
    return int(text) if _DIGITS.fullmatch(text) else None


_SEPARATORS = "|;,"


def _several(text: str, names: Container[str]) -> str:
    """What to do about a label that is several names or integers in one; empty if it is not."""
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
