"""Numbers that a stage takes from each sample's record: which field they stand in, and in which form.

A stage declares them (`Stage.record_values`) and finds them in its keys (`StageKeys.values`), one row for each sample.
They are read in the training process, as random numbers are drawn there, and travel with the keys to where the
stage draws, so that boxes, masks and keypoints follow the same moves as pixels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gpuflow.arrays import Bools, Floats
from gpuflow.errors import Key, Problem, show, suggest
from gpuflow.pipeline.records import Column, Ragged, Records

LARGEST = 1e9
"""Of a number in a record, so that products and inverses of maps stay finite."""
_FLAT = 1e-9
"""The least determinant of two vectors, in proportion to the products that it is the difference of."""


@dataclass(frozen=True, slots=True)
class FromRecord:
    """A stage's parameter that each sample's record gives: `{field: NAME}` in YAML.

    Args:
        field: the name of a field in source.fields.
    """

    field: str

    def __repr__(self) -> str:
        return f"{{field: {self.field}}}"


@dataclass(frozen=True, slots=True)
class RecordValue:
    """What a stage takes from a field of each sample's record, as float64.

    form: `matrix`: an invertible map [2, 3]. `points`: three points x, y that do not lie on one line, [3, 2], in
        numbers of pixels: (0, 0) is the centre of the first one. Both are lists in a field of type `any`; points are
        the first three of a field of `keypoints`, too, whose coordinates are measured from the image's corner.
    """

    field: str
    form: Literal["matrix", "points"]

    @property
    def types(self) -> tuple[str, ...]:
        """The types of fields that can hold it."""
        return ("any",) if self.form == "matrix" else ("any", "keypoints")

    @property
    def stand_in(self) -> Floats:
        """What a bad record has in its place, so that the other samples of its chunk can be drawn."""
        return np.eye(2, 3) if self.form == "matrix" else np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])

    @property
    def rule(self) -> str:
        """What a value in a record must be."""
        wanted = "two rows of three numbers" if self.form == "matrix" else "at least three points [x, y]"
        return f"must be {wanted}, each finite and at most {LARGEST:g}"

    def read(self, column: Column) -> Floats:
        """The numbers of N samples [N, ...]; NaN for a sample that has none of this form."""
        if isinstance(column, Ragged):
            return _first_points(column)
        shape = self.stand_in.shape
        if (whole := _numbers(list(column), self.form)) is not None:
            return whole.reshape(len(column), *shape)
        rows = [_numbers([value], self.form) for value in column]
        return np.array([np.full(shape, np.nan) if row is None else row[0] for row in rows]).reshape(-1, *shape)

    def singular(self, values: Floats) -> Bools:
        """Which of N samples' numbers are no invertible map, or lie on one line, [N]."""
        return ~independent(values[:, :, :2] if self.form == "matrix" else values[:, 1:] - values[:, :1])

    def fault(self, column: Column, i: int, values: Floats) -> str:
        """Why the numbers [...] of sample i cannot be used."""
        if isinstance(column, Ragged):
            found, rows = "", column[i]
            if len(rows) != 1:
                return f"{self.field} must have one instance, whose keypoints are points of the warp, got {len(rows)}"
            if rows.shape[1] < 3:
                return f"{self.field} must have at least 3 keypoints, got {rows.shape[1]}"
            if not (rows[0, :3, 2] > 0).all():
                return f"{self.field} must have the first 3 keypoints labelled: visibility 1 or 2"
            found = show(rows[0, :3, :2].tolist())
        else:
            found = show(_plain(column[i]))
        if not (np.abs(values) <= LARGEST).all():
            return f"{self.field} {self.rule}, got {found}"
        rule = "must be invertible" if self.form == "matrix" else "must be points that do not lie on one line"
        return f"{self.field} {rule}, got {found}"


def values_of(wanted: Sequence[RecordValue], records: Records) -> tuple[dict[RecordValue, Floats], list[str | None]]:
    """The wanted numbers of N samples, and for each sample None, or why its record is bad."""
    values: dict[RecordValue, Floats] = {}
    errors = list(records.errors)
    for one in wanted:
        column = records.columns[one.field]
        values[one] = found = one.read(column)
        with np.errstate(invalid="ignore", over="ignore"):
            bad = ~(np.abs(found) <= LARGEST).all(axis=(1, 2)) | one.singular(found)
        for i in np.flatnonzero(bad).tolist():
            errors[i] = errors[i] or one.fault(column, i, found[i])
        found[bad] = one.stand_in
    return values, errors


def field_problems_of(
    taken: Mapping[tuple[Key, ...], RecordValue], types: Mapping[str, str | None]
) -> Iterator[Problem]:
    """A problem for each value whose field a source lacks, or has with another type.

    taken: by the keys that lead to the parameters. types: the source's fields and their types.
    """
    for at, value in taken.items():
        allowed = " or ".join(value.types)
        if value.field not in types:
            action = suggest(value.field, types, else_all=False)
            action = action or f"declare it there: {value.field}: {{type: any}}"
            rule = "must name a field of source.fields"
            yield Problem.of((*at, "field"), rule, value.field, action, code="config.conflict")
        elif types[value.field] not in value.types:
            rule = f"must name a field of type {allowed}, got {value.field}, which is of type {types[value.field]}"
            yield Problem.of((*at, "field"), rule, action="name another field", code="config.conflict")


def independent(vectors: Floats) -> Bools:
    """Whether two vectors, the rows of [..., 2, 2], do not lie on one line."""
    (a, b), (c, d) = np.moveaxis(vectors, (-2, -1), (0, 1))
    size = np.abs(a * d) + np.abs(b * c)
    found: Bools = np.abs(a * d - b * c) > _FLAT * np.maximum(size, _FLAT)
    return found


def _first_points(keypoints: Ragged) -> Floats:
    """The first three keypoints [N, 3, 2] of samples with one instance, as numbers of pixels; NaN for other samples."""
    found = np.full((len(keypoints), 3, 2), np.nan)
    if keypoints.values.shape[1] >= 3:
        (alone,) = np.nonzero(np.diff(keypoints.offsets) == 1)
        points = keypoints.values[keypoints.offsets[alone], :3].astype(np.float64)
        labelled = (points[:, :, 2] > 0).all(axis=1)
        found[alone[labelled]] = points[labelled, :, :2] - 0.5
    return found


def _numbers(values: Sequence[Any], form: str) -> Floats | None:
    """Values of several samples as one array, [N, 2, 3] or [N, 3, 2]; None if one is of another form. Text is JSON."""
    try:
        parsed = [json.loads(value) if isinstance(value, str) else value for value in values]
        numbers = np.array(parsed)
    except (ValueError, RecursionError):  # text that is no JSON or nested too deeply, or lists of different lengths
        return None
    if numbers.dtype.kind not in "iuf" or numbers.ndim != 3:
        return None
    if form == "points" and numbers.shape[1] >= 3 and numbers.shape[2] == 2:
        return numbers[:, :3].astype(np.float64)
    return numbers.astype(np.float64) if form == "matrix" and numbers.shape[1:] == (2, 3) else None


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
