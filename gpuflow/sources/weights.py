"""The weights of samples: a balance of classes or of values, a column of the source, or a file with one for each."""

from __future__ import annotations

import os
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from gpuflow.arrays import Floats, Ints
from gpuflow.errors import SourceError, show
from gpuflow.sources.base import Source, has_one_class
from gpuflow.sources.labels import Codes
from gpuflow.sources.listing_text import column_of, csv_rows, parsed_number
from gpuflow.sources.spec import Samples, SourceSpec, WeightsSpec
from gpuflow.sources.split import Subset
from gpuflow.sources.split_values import column_texts, column_values
from gpuflow.sources.storage.local import missing_path
from gpuflow.sources.tar_members import DAMAGED_ARRAY


def weights_of(spec: SourceSpec, source: Source) -> Floats | None:
    """Read the weight of each sample of a source, or of a part of it, float64; None where `spec` gives no weights.

    Raises:
        SourceError: there is not one finite weight >= 0 for each sample of the whole source, or all of the part are 0.

    Examples:
        >>> from gpuflow.sources import source_spec
        >>> Path("list.csv").write_text("path,label,weight\\n1.jpg,cat,1\\n2.jpg,dog,0.5\\n")
        44
        >>> spec = source_spec(listing="list.csv", weights={"column": "weight"})
        >>> weights_of(spec, spec.open())
        array([1. , 0.5])
        >>> spec = source_spec(listing="list.csv", weights={"balance": "class"})
        >>> weights_of(spec, spec.open())
        array([1., 1.])
    """
    if not isinstance(spec, Samples) or spec.weights is None:
        return None
    if spec.weights.balance is not None:
        names, groups = balanced_groups(spec, source)
        return 1.0 / np.bincount(groups, minlength=len(names))[groups]
    part: slice | Ints = slice(None)
    if isinstance(source, Subset):
        part = source.indices
        source = source.source
    if spec.weights.file is not None:
        place = os.path.expanduser(spec.weights.file)
        weights, lines = _from_file(place, spec.weights.column)
    else:
        place = spec.where
        lines = None
        weights, _ = column_values(source, spec, spec.weights.column or "", "number", "source.weights")
    if len(weights) != len(source):
        raise SourceError(
            f"source.weights: {place} must have one weight for each of the {len(source)} samples, got {len(weights)}; "
            "correct the file"
        )
    _check_finite(weights, place, lines, lambda i: f" ({source.path(i)})")
    chosen = weights[part]
    _check_above_0(chosen, place, "" if len(chosen) == len(weights) else f" of the {len(chosen)} samples of this part")
    return chosen


def balanced_groups(spec: Samples, source: Source) -> tuple[tuple[str, ...], Ints]:
    """Return the names of what `spec.weights.balance` draws equally often, and the number of each sample's.

    source: the open source, or a part of it.

    Raises SourceError: samples have not one class each, or a value of the column is missing or no text or number.
    """
    assert spec.weights is not None and spec.weights.balance is not None
    if spec.weights.balance == "class":
        if not has_one_class(source):
            rule = "is class, but samples have not one class each"
            raise SourceError(f"source.weights.balance {rule}; name a column: balance: {{column: NAME}}")
        return source.classes, source.labels
    part, whole = (source.indices, source.source) if isinstance(source, Subset) else (slice(None), source)
    codes = Codes()
    key = "source.weights.balance"
    texts = column_texts(whole, spec, spec.weights.balance.column, key, "correct it").values
    groups = [codes[text] for text in texts]
    return tuple(map(str, codes)), np.array(groups, np.int64)[part]


def check_weights_file(spec: WeightsSpec) -> None:
    """Raise SourceError where `spec.file` is wrong without regard to the source; nothing if it does not exist."""
    place = os.path.expanduser(spec.file or "")
    if os.path.exists(place):
        weights, lines = _from_file(place, spec.column)
        _check_finite(weights, place, lines, lambda _: "")
        _check_above_0(weights, place, "")


def _check_finite(weights: Floats, place: str, lines: Sequence[int] | None, named: Callable[[int], str]) -> None:
    """Raise SourceError unless all weights are finite and >= 0. named: what an error adds to a sample's number."""
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        i = int(wrong[0])
        line = f"{place}:{lines[i]}: " if lines is not None else f"{place}: "
        more = f" ({len(wrong)} of {len(weights)} are not)" if len(wrong) > 1 else ""
        raise SourceError(
            f"source.weights: {line}the weight of sample {i}{named(i)} must be a finite number >= 0, "
            f"got {weights[i]:g}{more}; correct it"
        )


def _check_above_0(weights: Floats, place: str, whole: str) -> None:
    """Raise SourceError if all weights are 0. whole: names the samples in the error."""
    if not weights.any():
        raise SourceError(
            f"source.weights: {place}: at least one weight{whole} must be above 0, got zeros alone; correct them"
        )


def _from_file(place: str, column: str | None) -> tuple[Floats, Sequence[int] | None]:
    """Read the numbers of a file, and the line of each; None in a file that has no lines."""
    try:
        if place.lower().endswith(".npy"):
            return _from_array(place), None
        lines = list[int]()
        rows = list(csv_rows(Path(place).read_bytes().removeprefix(BOM_UTF8), place, lines))
    except SourceError as error:
        raise SourceError(f"source.weights: {error}") from error
    except FileNotFoundError as fault:
        raise SourceError(
            f"source.weights.file must be a file, got {place!r}, which does not exist{missing_path(place)}"
        ) from fault
    except (OSError, *DAMAGED_ARRAY) as fault:
        raise SourceError(f"source.weights: {place} cannot be read: {fault}; check the file") from fault
    return _from_rows(place, column, rows, lines)


def _from_array(place: str) -> Floats:
    array = np.load(place, allow_pickle=False)
    if not isinstance(array, np.ndarray):
        array.close()
        raise ValueError("it is an archive of arrays (.npz)")
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        got = f"{array.dtype} of shape {list(array.shape)}"
        raise SourceError(f"{place} must be numbers in one axis, got {got}; correct the file")
    return array.astype(np.float64)


def _from_rows(place: str, column: str | None, rows: list[list[str]], lines: list[int]) -> tuple[Floats, Sequence[int]]:
    """Parse the numbers in a column of rows whose first one is a header, or of rows of one number each, and their
    lines."""
    cell = 0
    if column is not None:
        header = [name.strip() for name in rows[0]] if rows else []
        cell = column_of(column, header, f"source.weights: {place}:1")
        rows, lines = rows[1:], lines[1:]
    numbers = np.empty(len(rows))
    for i, (line, row) in enumerate(zip(lines, rows, strict=True)):
        if column is None and len(row) != 1:
            raise SourceError(
                f"source.weights: {place}:{line}: line must be one number, got {len(row)} fields; name the column: "
                "column: NAME"
            )
        try:
            numbers[i] = parsed_number(row[cell])
        except (ValueError, IndexError) as fault:
            got = show(row[cell]) if cell < len(row) else "no such field"
            action = f"if it names the column, write column: {row[0]}" if column is None and not i else "correct it"
            raise SourceError(f"source.weights: {place}:{line}: must be a number, got {got}; {action}") from fault
    return numbers, lines
