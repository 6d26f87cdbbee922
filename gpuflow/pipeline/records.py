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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, assert_never

import numpy as np

from gpuflow.arrays import Array, Floats, Ints

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


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different numbers per sample: those of sample i are values[offsets[i] : offsets[i + 1]].

    values [M, ...]; offsets int64 [N + 1], ascending from 0 to M.
    """

    values: Array
    offsets: Ints

    @classmethod
    def of(cls, parts: Sequence[Array], empty: Array) -> Ragged:
        """The rows of each sample, one after the other. empty: an array [0, ...] with the shape and dtype of rows."""
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        return cls(np.concatenate([empty, *parts]), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> Array:
        """The rows of sample i, a view."""
        rows: Array = self.values[self.offsets[i] : self.offsets[i + 1]]
        return rows

    def take(self, samples: Ints) -> Ragged:
        """The rows of these samples, in this order."""
        counts = np.diff(self.offsets)[samples]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        rows = np.repeat(self.offsets[samples] - offsets[:-1], counts) + np.arange(offsets[-1])
        return Ragged(self.values[rows], offsets)

    def without(self, rows: Ints) -> Ragged:
        """Return all rows but these."""
        if not len(rows):
            return self
        stays = np.ones(len(self.values), bool)
        stays[rows] = False
        ends = np.concatenate([[0], np.cumsum(stays)])
        return Ragged(self.values[stays], ends[self.offsets].astype(np.int64))


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
    """

    size: tuple[int, int]
    counts: Ints

    @property
    def total(self) -> int:
        """The sum of the run lengths, which may be more than an int64 holds."""
        return sum(self.counts.tolist())

    @property
    def fills(self) -> bool:
        """Whether the run lengths are at least 0 and add up to all pixels."""
        return bool((self.counts >= 0).all()) and self.total == self.size[0] * self.size[1]


Column = Array | Ragged | list[Any]


def taken(column: Column, samples: Ints) -> Column:
    """The values of these samples, in this order."""
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
        """The records of these samples, in this order."""
        columns = {name: taken(column, samples) for name, column in self.columns.items()}
        sizes = None if self.sizes is None else self.sizes[samples]
        return Records(columns, [self.errors[i] for i in samples.tolist()], sizes)
