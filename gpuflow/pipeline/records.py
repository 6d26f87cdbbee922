"""What a sample carries besides its image: the declared fields, and their values for several samples.

A column holds one field of N samples. Its form follows from the field's type:

    number      float64 [N]
    boxes       `Ragged` of float32 [M, 4]: x1, y1, x2, y2 in pixels of the upright image, corners at pixel edges
    keypoints   `Ragged` of float32 [M, K, 3]: x, y in the same coordinates, and visibility (0, 1 or 2 as in COCO)
    mask        a list with one `MaskFile`, or one tuple of `Polygons` and `Rle` (an instance each), per sample; instead
                of each of these there may be its pixels, uint8 [H, W] of the upright image: levels, or 0 and 1
    text, any   a list with one value per sample

The labels of boxes are a separate column: `Ragged` of int64 [M], under the name that `Field.labels` gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, assert_never

import numpy as np
from numpy.typing import ArrayLike

from gpuflow.arrays import Array, Bools, Floats, Ints
from gpuflow.errors import Key, Problem, show, suggest

FieldType = Literal["boxes", "keypoints", "mask", "number", "text", "any"]
GEOMETRIC: tuple[Literal["boxes", "keypoints", "mask"], ...] = ("boxes", "keypoints", "mask")
"""The types of fields that follow the moves of an image's pixels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One field of a source's records.

    labels: of boxes: the column that holds their labels; empty if they have none.
    classes: the names of these labels; a label is an index into them.
    instances: of a mask: whether each sample has one mask for each box; otherwise it has one mask of levels.
    fill: of a mask of levels: the level of pixels that lie outside the image.
    formats: of a mask: the formats besides PNG that its files may have, as `FieldSpec.formats` names them.
    flip_pairs: of keypoints: pairs of their numbers that change places in horizontal flips.
    """

    name: str
    type: FieldType
    labels: str = ""
    classes: tuple[str, ...] = ()
    instances: bool = False
    fill: int = 0
    formats: tuple[str, ...] = ()
    flip_pairs: tuple[tuple[int, int], ...] = ()


def offsets_of(counts: ArrayLike) -> Ints:
    """Return where the rows of each of N samples begin, and where the last ones end: int64 [N + 1]."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different numbers per sample: those of sample i are values[offsets[i] : offsets[i + 1]].

    values [M, ...]; offsets int64 [N + 1], ascending from 0 to M.
    """

    values: Array
    offsets: Ints

    @classmethod
    def of(cls, parts: Sequence[Array], empty: Array) -> Ragged:
        """Join the rows of all samples. empty: an array [0, ...] with the shape and dtype of rows.

        Examples:
            >>> boxes = Ragged.of([np.ones((2, 4)), np.ones((0, 4)), np.ones((1, 4))], np.empty((0, 4)))
            >>> boxes.offsets.tolist(), len(boxes[2])
            ([0, 2, 2, 3], 1)
        """
        return cls(np.concatenate([empty, *parts]), offsets_of([len(part) for part in parts]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> Array:
        """Return a view of the rows of sample i."""
        rows: Array = self.values[self.offsets[i] : self.offsets[i + 1]]
        return rows

    def take(self, samples: Ints) -> Ragged:
        """Return the rows of these samples, in this order.

        Examples:
            >>> words = Ragged(np.array([1, 2, 3]), np.array([0, 2, 3]))
            >>> words.take(np.array([1, 0])).values.tolist()
            [3, 1, 2]
        """
        counts = np.diff(self.offsets)[samples]
        offsets = offsets_of(counts)
        rows = np.repeat(self.offsets[samples] - offsets[:-1], counts) + np.arange(offsets[-1])
        return Ragged(self.values[rows], offsets)

    def without(self, rows: Ints) -> Ragged:
        """Return all rows but these."""
        if not len(rows):
            return self
        stays = np.ones(len(self.values), bool)
        stays[rows] = False
        return Ragged(self.values[stays], offsets_of(stays)[self.offsets])


@dataclass(frozen=True, slots=True)
class MaskFile:
    """A mask as an encoded image of one channel: its levels are the classes of pixels."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Polygons:
    """The mask of one instance as closed outlines: float64 [P, 2] of x, y each, in pixels, corners at pixel edges."""

    outlines: tuple[Floats, ...]


@dataclass(frozen=True, slots=True)
class Rle:
    """The mask of one instance as run lengths in column order, beginning with zeros, as in COCO.

    size: height, width. counts: int64 [R], which add up to height * width.

    Examples:
        >>> left_column = Rle((2, 3), np.array([0, 2, 4]))
        >>> left_column.fills
        True
    """

    size: tuple[int, int]
    counts: Ints

    @property
    def total(self) -> int:
        """Return the sum of the run lengths, which may be more than an int64 holds."""
        return sum(self.counts.tolist())

    @property
    def fills(self) -> bool:
        """Return True if the run lengths are at least 0 and add up to all pixels."""
        return bool((self.counts >= 0).all()) and self.total == self.size[0] * self.size[1]


Column = Array | Ragged | list[Any]


def taken(column: Column, samples: Ints) -> Column:
    """Return the values of these samples, in this order."""
    match column:
        case Ragged():
            return column.take(samples)
        case list():
            return [column[i] for i in samples.tolist()]
        case np.ndarray():
            return column[samples]
        case unknown:
            assert_never(unknown)


class LeftOut(NamedTuple):
    """How many instances of a sample are left out, because their annotations are incomplete, and why the first is."""

    instances: int
    reason: str


@dataclass(frozen=True, slots=True)
class Records:
    """Columns of N samples by name. errors: for each sample None, or why its record is bad.

    sizes: [N, 2], height and width of the upright images as the source's file gives them, zeros where it gives none;
    None if it never does.
    """

    columns: Mapping[str, Column]
    errors: Sequence[str | None]
    sizes: Ints | None = None

    def take(self, samples: Ints) -> Records:
        """Return the records of these samples, in this order."""
        columns = {name: taken(column, samples) for name, column in self.columns.items()}
        sizes = None if self.sizes is None else self.sizes[samples]
        return Records(columns, [self.errors[i] for i in samples.tolist()], sizes)


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
        `boxes`: those of a field of this type, [K, 4], with zeros after the last one of a sample.
    """

    field: str
    form: Literal["matrix", "points", "boxes"]

    @property
    def types(self) -> tuple[str, ...]:
        """Return the types of fields that can hold it."""
        return {"matrix": ("any",), "points": ("any", "keypoints"), "boxes": ("boxes",)}[self.form]

    @property
    def stand_in(self) -> Floats:
        """Return what a bad record has in its place, so that the other samples of its chunk can be drawn."""
        if self.form == "boxes":
            return np.zeros((1, 4))
        return np.eye(2, 3) if self.form == "matrix" else np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])

    @property
    def rule(self) -> str:
        """Return what a value in a record must be."""
        wanted = "two rows of three numbers" if self.form == "matrix" else "at least three points [x, y]"
        return f"must be {wanted}, each finite and at most {LARGEST:g}"

    def read(self, column: Column) -> Floats:
        """Read the numbers of N samples [N, ...]; NaN for a sample that has none of this form."""
        if isinstance(column, Ragged):
            return _padded(column) if self.form == "boxes" else _first_points(column)
        shape = self.stand_in.shape
        if (whole := _numbers(list(column), self.form)) is not None:
            return whole.reshape(len(column), *shape)
        rows = [_numbers([value], self.form) for value in column]
        return np.array([np.full(shape, np.nan) if row is None else row[0] for row in rows]).reshape(-1, *shape)

    def singular(self, values: Floats) -> Bools:
        """Return which of N samples' numbers are no invertible map, or lie on one line, [N]."""
        if self.form == "boxes":
            return np.zeros(len(values), bool)
        return ~independent(values[:, :, :2] if self.form == "matrix" else values[:, 1:] - values[:, :1])

    def fault(self, column: Column, i: int, values: Floats) -> str:
        """Return why the numbers [...] of sample i cannot be used."""
        if isinstance(column, Ragged):
            rows = column[i]
            if len(rows) != 1:
                return f"{self.field} must have one instance, whose keypoints are points of the warp, got {len(rows)}"
            if rows.shape[1] < 3:
                return f"{self.field} must have at least 3 keypoints, got {rows.shape[1]}"
            if not (rows[0, :3, 2] > 0).all():
                return f"{self.field} must have the first 3 keypoints labelled: visibility 1 or 2"
            found = show(rows[0, :3, :2].tolist())
        else:
            value = column[i]
            found = show(value.tolist() if isinstance(value, np.ndarray) else value)
        if not (np.abs(values) <= LARGEST).all():
            return f"{self.field} {self.rule}, got {found}"
        rule = "must be invertible" if self.form == "matrix" else "must be points that do not lie on one line"
        return f"{self.field} {rule}, got {found}"


def values_of(wanted: Sequence[RecordValue], records: Records) -> tuple[dict[RecordValue, Floats], list[str | None]]:
    """Read the wanted numbers of N samples. Return them, and for each sample None or why its record is bad."""
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
    """Yield a problem for each value whose field a source lacks, or has with another type.

    taken: by the keys that lead to the parameters. types: the source's fields and their types.
    """
    for at, value in taken.items():
        allowed = " or ".join(value.types)
        path = at if value.form == "boxes" else (*at, "field")
        if value.field not in types:
            action = suggest(value.field, types, else_all=False)
            action = action or f"declare it there: {value.field}: {{type: {value.types[0]}}}"
            rule = "must name a field of source.fields"
            yield Problem.of(path, rule, value.field, action, code="config.conflict")
        elif types[value.field] not in value.types:
            rule = f"must name a field of type {allowed}, got {value.field}, which is of type {types[value.field]}"
            yield Problem.of(path, rule, action="name another field", code="config.conflict")


def independent(vectors: Floats) -> Bools:
    """Return True if two vectors, the rows of [..., 2, 2], do not lie on one line."""
    (a, b), (c, d) = np.moveaxis(vectors, (-2, -1), (0, 1))
    size = np.abs(a * d) + np.abs(b * c)
    found: Bools = np.abs(a * d - b * c) > _FLAT * np.maximum(size, _FLAT)
    return found


def _padded(boxes: Ragged) -> Floats:
    """Return the boxes of N samples, [N, K, 4]. Those that are no numbers are bad records where they are mapped."""
    counts = np.diff(boxes.offsets)
    found = np.zeros((len(counts), counts.max(initial=1), 4))
    found[np.arange(found.shape[1]) < counts[:, None]] = np.clip(np.nan_to_num(boxes.values), -LARGEST, LARGEST)
    return found


def _first_points(keypoints: Ragged) -> Floats:
    """Return the first three keypoints [N, 3, 2] of samples with one instance, as numbers of pixels; NaN for other
    samples."""
    found = np.full((len(keypoints), 3, 2), np.nan)
    if keypoints.values.shape[1] >= 3:
        (alone,) = np.nonzero(np.diff(keypoints.offsets) == 1)
        points = keypoints.values[keypoints.offsets[alone], :3].astype(np.float64)
        labelled = (points[:, :, 2] > 0).all(axis=1)
        found[alone[labelled]] = points[labelled, :, :2] - 0.5
    return found


def _numbers(values: Sequence[Any], form: str) -> Floats | None:
    """Return the values of several samples as one array, [N, 2, 3] or [N, 3, 2]; None if one is of another form.

    Text is parsed as JSON.
    """
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
