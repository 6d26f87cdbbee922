"""The colour operations of pointwise stages as values: which each sample has, in order, with all that they need.

A stage describes its operations once. The CPU (`native/color.c`) and the GPU (`execute/kernels/color.py`) run
this description, so a stage of another package has both forms: `Operations.table` takes any table of levels for each
sample, and `Operations.matrix` any colour matrix. Filters of neighbourhoods are values here, too.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from gpuflow.arrays import Bools, Bytes, Floats, Ints

_CHANNELS = 3
_VALUES = 12
"""Numbers that an operation with values has: those of a colour matrix, which are the most."""


class Operation(enum.IntEnum):
    """An operation on one uint8 image. Each result is a uint8 image again; most are torchvision v2's functions.

    NONE: does not change the image.
    BRIGHTNESS: multiplies by the factor. CONTRAST, SATURATION: 0 gives the mean gray or each pixel's gray, and 1 the
        image itself. The mean is exact; torch's rounds above 65,793 pixels, which changed 3 of 12,000 results, by one
        level (images of up to 12,000,000 pixels). HUE: shifts by the factor in turns of the colour circle, -0.5 to 0.5.
    GRAYSCALE: each pixel's gray in all channels. AUTOCONTRAST: stretches each channel to 0-255. EQUALIZE: equalizes
        each channel's histogram.
    TABLE: looks each channel's level up in a table. MATRIX: a colour matrix. ERASE: fills a box with a colour.

    GRAYSCALE, SATURATION and HUE do not change gray images.
    """

    NONE = -1
    BRIGHTNESS = 0
    CONTRAST = 1
    SATURATION = 2
    HUE = 3
    GRAYSCALE = 4
    TABLE = 5
    MATRIX = 6
    ERASE = 7
    AUTOCONTRAST = 8
    EQUALIZE = 9

    @property
    def needs_statistic(self) -> bool:
        """Return True if the result for a pixel depends on all pixels of the image."""
        return self in (Operation.CONTRAST, Operation.AUTOCONTRAST, Operation.EQUALIZE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """The operations of N samples, M for each, in order. `kinds`, `statistics` and M do not depend on the draws.

    codes [N, M]: of `Operation`. factors [N, M]: the factor, for operations that have one; for TABLE the row of
        `tables`, and for MATRIX and ERASE the row of `values`.
    kinds: all operations that may occur, in this draw or another.
    statistics: the largest number of operations that need a statistic of the image that one sample may have.
    tables: uint8 [T, 3, 256]: the level for each level of each channel; gray images use the first channel's.
    values: float64 [V, 12]: the 3 rows of 4 numbers of a matrix; or y, x, height, width and colour of a box, and zeros.
    """

    codes: Ints
    factors: Floats
    kinds: frozenset[Operation]
    statistics: int
    tables: Bytes
    values: Floats

    @classmethod
    def of(
        cls,
        codes: Ints,
        factors: Floats,
        *,
        kinds: Iterable[Operation],
        statistics: int = 0,
        tables: Bytes | None = None,
        values: Floats | None = None,
    ) -> Operations:
        """Return operations of any kinds, with arrays as C code reads them; see the fields."""
        return cls(
            codes=np.ascontiguousarray(codes, np.int64),  # C code reads all of these
            factors=np.ascontiguousarray(factors, np.float64),
            kinds=frozenset(kinds) - {Operation.NONE},
            statistics=statistics,
            tables=np.empty((0, _CHANNELS, 256), np.uint8) if tables is None else tables,
            values=np.empty((0, _VALUES)) if values is None else values,
        )

    @classmethod
    def one(cls, operation: Operation, active: Bools, factors: ArrayLike = 0.0) -> Operations:
        """Return one operation for each of N samples.

        Args:
            operation: one without data: any but TABLE, MATRIX and ERASE.
            active: which samples [N] it changes.
            factors: the factors [N], or one for all.

        Examples:
            >>> Operations.one(Operation.BRIGHTNESS, np.array([True, False]), 1.5).codes.tolist()
            [[0], [-1]]
        """
        column = np.broadcast_to(np.asarray(factors, np.float64), active.shape)[:, None]
        codes = np.where(active, int(operation), int(Operation.NONE))[:, None]
        return cls.of(codes, column, kinds=[operation], statistics=int(operation.needs_statistic))

    @classmethod
    def table(cls, active: Bools, levels: Bytes) -> Operations:
        """Return a table of levels for each of N samples.

        Args:
            active: which samples [N] it changes.
            levels: uint8 [N or 1, C or 1, 256]: the result for each level, of each sample and each channel.

        Examples:
            >>> negative = np.arange(255, -1, -1, dtype=np.uint8)[None, None]
            >>> Operations.table(np.array([True, True]), negative).tables[0, :, :3].tolist()
            [[255, 254, 253], [255, 254, 253], [255, 254, 253]]
        """
        assert levels.dtype == np.uint8 and levels.ndim == 3, "levels are uint8 [N or 1, C or 1, 256]"
        tables = np.ascontiguousarray(np.broadcast_to(levels, (len(levels), _CHANNELS, 256)))
        return cls.of(*_rows(Operation.TABLE, active, len(tables)), kinds=[Operation.TABLE], tables=tables)

    @classmethod
    def matrix(cls, active: Bools, matrices: Floats) -> Operations:
        """Return a colour matrix for each of N samples: each channel is a sum of (red, green, blue, 1) with a row's
        weights.

        It is computed in float32, rounded to the nearest level (a half up) and clamped to 0-255. A gray image has equal
        red, green and blue, and gets the first row's result.

        Args:
            active: which samples [N] it changes.
            matrices: float64 [N or 1, 3, 4]; the last column is in levels.

        Examples:
            >>> red_alone = np.eye(3, 4) * [1, 0, 0, 0]
            >>> Operations.matrix(np.array([True]), red_alone[None]).values[0, :4].tolist()
            [1.0, 0.0, 0.0, 0.0]
        """
        values = np.asarray(matrices, np.float64).reshape(-1, _VALUES)
        return cls.of(*_rows(Operation.MATRIX, active, len(values)), kinds=[Operation.MATRIX], values=values)

    @classmethod
    def erase(cls, active: Bools, boxes: Ints, colors: Floats) -> Operations:
        """Return a box for each of N samples that is filled with a colour.

        Args:
            active: which samples [N] it changes.
            boxes: y, x, height, width in pixels, [N, 4].
            colors: whole levels [N or 1, C or 1].
        """
        values = np.zeros((len(active), _VALUES))
        values[:, :4] = boxes
        values[:, 4 : 4 + _CHANNELS] = colors
        return cls.of(*_rows(Operation.ERASE, active, len(values)), kinds=[Operation.ERASE], values=values)

    @classmethod
    def join(cls, count: int, parts: Iterable[Operations]) -> Operations:
        """Join the operations of several stages on `count` samples, one stage after the other.

        Examples:
            >>> every = np.array([True])
            >>> parts = [Operations.one(Operation.HUE, every, 0.1), Operations.one(Operation.GRAYSCALE, every)]
            >>> Operations.join(1, parts).codes.tolist()
            [[3, 4]]
        """
        joined = list(parts)
        if not joined:
            return cls.of(np.empty((count, 0), np.int64), np.empty((count, 0)), kinds=())
        if len(joined) == 1:
            return joined[0]
        factors = []
        tables = values = 0
        for part in joined:
            own = part.factors
            starts = {Operation.TABLE: tables, Operation.MATRIX: values, Operation.ERASE: values}
            for operation in part.kinds & starts.keys():
                own = own + np.where(part.codes == operation, starts[operation], 0)
            factors.append(own)
            tables += len(part.tables)
            values += len(part.values)
        return cls(
            codes=np.concatenate([part.codes for part in joined], axis=1),
            factors=np.concatenate(factors, axis=1),
            kinds=frozenset().union(*(part.kinds for part in joined)),
            statistics=sum(part.statistics for part in joined),
            tables=np.concatenate([part.tables for part in joined]),
            values=np.concatenate([part.values for part in joined]),
        )


def _rows(operation: Operation, active: Bools, count: int) -> tuple[Ints, Floats]:
    """Return codes and factors [N, 1] of an operation whose data has a row for each sample, or one for all."""
    assert count in (1, len(active)), "there is a row of data for each sample, or one for all"
    codes = np.where(active, int(operation), int(Operation.NONE))[:, None]
    rows = np.zeros(len(active)) if count == 1 else np.arange(len(active), dtype=np.float64)
    return codes, rows[:, None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """Separable filters of N uint8 images, and how the smoothed image is blended with the image.

    The smoothed level is the weighted sum in float32, rounded to the nearest level (a half to the even one). The result
    is level + (smoothed - level) * (1 - factor), clamped to 0-255 and truncated.

    rows [N, KY], columns [N, KX]: the weights of the rows above and below a pixel and of the columns next to it; KY and
        KX are odd. centre [N]: added to the pixel's own weight.
    factor [N]: 0 gives the smoothed image, 1 the image itself, and more a sharper one.
    active [N]: which samples are changed.
    border: what surrounds the image: `reflect`, the image mirrored without repeating its edge; `keep`: pixels whose
        neighbourhood leaves the image do not change.
    """

    rows: Floats
    columns: Floats
    centre: Floats
    factor: Floats
    active: Bools
    border: Literal["reflect", "keep"]
