"""What rand_augment, trivial_augment and auto_augment share: torchvision's operations, and the stages that run them.

Each round of a policy applies one operation to each sample. It runs as three stages in a row, one for each kind of
operation, and each leaves the samples unchanged that have an operation of another kind. So a batch takes the same
number of kernels, whatever was drawn. Operations are not folded: each samples and rounds for itself, as in torchvision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, final

import numpy as np
from numpy.typing import NDArray

from gpuflow.pipeline import stage as s
from gpuflow.pipeline.warp_parameters import Fill, WarpInterpolation, check_fill, lookup_of, rotation
from gpuflow.stages.sharpness import Sharpness

__all__ = ["OPERATIONS", "AugmentPolicy", "Drawn", "Magnitudes", "Range", "uniform_places"]

OPERATIONS = (
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast"),
    *("Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize", "Invert"),
)
"""torchvision's names of the operations. An operation's number is its place in this tuple."""
_FACTORS = {"Brightness": s.Operation.BRIGHTNESS, "Color": s.Operation.SATURATION, "Contrast": s.Operation.CONTRAST}
_STATISTICS = {"AutoContrast": s.Operation.AUTOCONTRAST, "Equalize": s.Operation.EQUALIZE}
_TABLES = ("Posterize", "Solarize", "Invert")
_SHARPNESS = Sharpness(amount=0.0)
"""Its filters depend on a sample's coefficients alone."""


@dataclass(frozen=True, slots=True)
class Range:
    """The magnitudes of an operation: evenly spaced bins from low to high.

    of: `height` or `width` if they are fractions of that; then whole pixels count. both_signs: each is negated for half
    of the samples. whole: rounded to whole numbers, as torchvision rounds the bits of Posterize.
    """

    low: float
    high: float
    both_signs: bool = False
    of: Literal["", "height", "width"] = ""
    whole: bool = False

    def bins(self, count: int, height: int, width: int) -> NDArray[np.float64]:
        """The magnitude of each bin, as torchvision computes it, for an image of this size."""
        if self.whole:
            import torch

            steps = torch.arange(count) / ((count - 1) / (self.low - self.high))
            return (self.low - steps).round().double().numpy()
        return _linspace(self.low, self.high * {"": 1, "height": height, "width": width}[self.of], count)


@lru_cache(maxsize=4096)
def _linspace(low: float, high: float, count: int) -> NDArray[np.float64]:
    import torch

    return torch.linspace(low, high, count).double().numpy()


@lru_cache
def _are(names: tuple[str, ...]) -> s.Bools:
    """For each of OPERATIONS, whether it is one of these."""
    return np.isin(OPERATIONS, names)


@dataclass(frozen=True, slots=True)
class Drawn:
    """One round's operation and magnitude of each sample, both [N]."""

    operation: s.Ints
    magnitude: NDArray[np.float64]

    def has(self, *names: str) -> s.Bools:
        """Which samples have one of these operations, [N]."""
        samples: s.Bools = _are(names)[self.operation]
        return samples


def uniform_places(numbers: NDArray[np.float64], count: int) -> s.Ints:
    """Numbers in [0, 1) as places in range(count)."""
    return np.minimum((numbers * count).astype(np.int64), count - 1)


@final
class Magnitudes:
    """Looks up the magnitudes of a policy's operations, of all samples at once.

    Args:
        ranges: of the operations that have a magnitude; None for those without one.
    """

    def __init__(self, ranges: Mapping[str, Range | None]) -> None:
        self._ranges = {name: one for name, one in ranges.items() if one is not None}
        self._signed = _are(tuple(name for name, one in self._ranges.items() if one.both_signs))
        self._sized = tuple(name for name, one in self._ranges.items() if one.of)
        self._tables: dict[int, NDArray[np.float64]] = {}

    def draw(
        self, operation: s.Ints, place: s.Ints, negated: s.Bools, bins: int, height: s.Ints, width: s.Ints
    ) -> Drawn:
        """The magnitudes of operations [N], at these places [N] among `bins` magnitudes, some of them negated."""
        magnitude = self._table(bins)[operation, place]
        for name in self._sized:
            rows = np.flatnonzero(operation == OPERATIONS.index(name))
            for size in {*zip(height[rows].tolist(), width[rows].tolist(), strict=True)}:
                same = rows[(height[rows] == size[0]) & (width[rows] == size[1])]
                magnitude[same] = self._ranges[name].bins(bins, *size)[place[same]]
        return Drawn(operation, np.where(negated & self._signed[operation], -magnitude, magnitude))

    def _table(self, bins: int) -> NDArray[np.float64]:
        """The magnitude of each of OPERATIONS in each bin; 0 for one that has none or one of the image's size."""
        if (table := self._tables.get(bins)) is None:
            table = self._tables[bins] = np.zeros((len(OPERATIONS), bins))
            for name, one in self._ranges.items():
                if not one.of:
                    table[OPERATIONS.index(name)] = one.bins(bins, 1, 1)
        return table


class AugmentPolicy(s.Policy):
    """A policy of torchvision's operations, in rounds of one operation for each sample."""

    tolerance: ClassVar[float] = 1.0

    interpolation: WarpInterpolation
    fill: Fill

    @property
    def rounds(self) -> int:
        """How many operations a sample gets, one after the other."""
        raise NotImplementedError

    def choose(self, keys: s.StageKeys, turn: int, height: s.Ints, width: s.Ints) -> Drawn:
        """The operations of round `turn`, for images of these sizes [N] in pixels."""
        raise NotImplementedError

    @property
    def random(self) -> bool:
        return True

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        s.require_rgb(self, spec)
        check_fill(self.fill, spec)
        return spec

    def parts(self) -> tuple[s.Stage, ...]:
        kinds = (_Moving, _Colouring, _Sharpening)
        return tuple(kind(policy=self, turn=turn) for turn in range(self.rounds) for kind in kinds)


@dataclass(frozen=True, kw_only=True, repr=False)
class _Moving(s.Geometry):
    """The geometric operations of one round."""

    stage_name: ClassVar[str] = "policy_moves"
    folds: ClassVar[bool] = False

    policy: AugmentPolicy
    turn: int

    @property
    def key_name(self) -> str:
        return self.policy.stage_name

    @property
    def warps(self) -> s.Lookup:
        return lookup_of(self.policy.interpolation, "constant", self.policy.fill)

    def draw(self, keys: s.StageKeys, height: s.Ints, width: s.Ints) -> tuple[s.Move, ...]:
        drawn = self.policy.choose(keys, self.turn, height, width)
        m, matrix = drawn.magnitude, np.tile(np.eye(3), (len(height), 1, 1))
        matrix[:, 0, 1] = np.where(drawn.has("ShearX"), m, 0)
        matrix[:, 1, 0] = np.where(drawn.has("ShearY"), m, 0)
        matrix[:, 0, 2] = np.where(drawn.has("TranslateX"), -np.trunc(m), 0)
        matrix[:, 1, 2] = np.where(drawn.has("TranslateY"), -np.trunc(m), 0)
        turned = drawn.has("Rotate")
        matrix[turned] = rotation(m[turned], height[turned], width[turned])
        active = turned | drawn.has("ShearX", "ShearY", "TranslateX", "TranslateY")
        return (s.Warp(matrix, height, width, *self.warps, active),)


@dataclass(frozen=True, kw_only=True, repr=False)
class _Colouring(s.Pointwise):
    """The pointwise operations of one round. Coefficients of a sample [2]: its operation and magnitude."""

    stage_name: ClassVar[str] = "policy_colours"

    policy: AugmentPolicy
    turn: int

    @property
    def key_name(self) -> str:
        return self.policy.stage_name

    def draw(self, keys: s.StageKeys) -> NDArray[np.float64]:
        anything = np.ones(len(keys.positions), np.int64)  # the magnitude of a colour does not depend on the size
        drawn = self.policy.choose(keys, self.turn, anything, anything)
        return np.stack([drawn.operation, drawn.magnitude], axis=1)

    def operations(self, coefficients: NDArray[np.float64], height: s.Ints, width: s.Ints) -> s.Operations:
        drawn = Drawn(coefficients[:, 0].astype(np.int64), coefficients[:, 1])
        codes = np.full((len(coefficients), 1), int(s.Operation.NONE))
        factors = 1.0 + drawn.magnitude[:, None]
        for name, operation in (*_FACTORS.items(), *_STATISTICS.items()):
            codes[drawn.has(name)] = operation
        rows = np.flatnonzero(drawn.has(*_TABLES))
        codes[rows] = s.Operation.TABLE
        # Samples with one operation and magnitude, here as one complex number, share a table.
        pairs = drawn.operation[rows] + 1j * drawn.magnitude[rows]
        _, first, factors[rows, 0] = np.unique(pairs, return_index=True, return_inverse=True)
        return s.Operations.of(
            codes,
            factors,
            kinds=[*_FACTORS.values(), *_STATISTICS.values(), s.Operation.TABLE],
            statistics=1,
            tables=_tables(Drawn(drawn.operation[rows[first]], drawn.magnitude[rows[first]])),
        )


def _tables(drawn: Drawn) -> NDArray[np.uint8]:
    """The level for each level, uint8 [N, 3, 256], of samples that all have one of `_TABLES`."""
    levels, m = np.arange(256)[None], drawn.magnitude[:, None]
    dropped = 8 - np.clip(m, 0, 8).astype(np.int64)
    table = np.where(drawn.has("Posterize")[:, None], levels >> dropped << dropped, 255 - levels)
    threshold = (255.0 * m).astype(np.float32)  # in which torch compares
    table = np.where(drawn.has("Solarize")[:, None] & (levels < threshold), levels, table)
    return np.repeat(table[:, None].astype(np.uint8), 3, axis=1)


@dataclass(frozen=True, kw_only=True, repr=False)
class _Sharpening(s.Local):
    """The sharpening of one round. Coefficients of a sample [2]: whether it is sharpened, and its factor."""

    stage_name: ClassVar[str] = "policy_sharpness"

    policy: AugmentPolicy
    turn: int

    @property
    def key_name(self) -> str:
        return self.policy.stage_name

    def draw(self, keys: s.StageKeys) -> NDArray[np.float64]:
        anything = np.ones(len(keys.positions), np.int64)
        drawn = self.policy.choose(keys, self.turn, anything, anything)
        return np.stack([drawn.has("Sharpness"), 1.0 + drawn.magnitude], axis=1)

    def filters(self, coefficients: NDArray[np.float64]) -> s.Filters:
        return _SHARPNESS.filters(coefficients)
