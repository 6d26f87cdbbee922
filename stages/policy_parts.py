"""What rand_augment, trivial_augment and auto_augment share: the operations, and the stages that run them.

Each round of a policy applies one operation to each sample. It runs as a few stages in a row, one for each kind of
operation, and each leaves the samples unchanged that have an operation of another kind. So a batch takes the same
number of kernels for all draws. Operations are not folded: each samples and rounds for itself, as in torchvision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol, final

import numpy as np

from gpuflow.arrays import Bools, Bytes, Floats, Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import Fill, WarpInterpolation, check_fill, lookup_of, resampling_transform
from gpuflow.stages.gaussian_blur import GaussianBlur
from gpuflow.stages.posterize import Posterize
from gpuflow.stages.sharpness import Sharpness

LISTED = (
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness", "Color", "Contrast"),
    *("Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize"),
)
"""The operations of torchvision's RandAugment and TrivialAugmentWide, in their order."""
OPERATIONS = (*LISTED, "Invert", "SolarizeAdd", "Desaturate", "GaussianBlur")
"""torchvision's names of the operations, then timm's. An operation's number is its place in this tuple."""
_COLORS = {
    "Brightness": s.Operation.BRIGHTNESS,
    "Color": s.Operation.SATURATION,
    "Contrast": s.Operation.CONTRAST,
    "Posterize": s.Operation.TABLE,
    "Solarize": s.Operation.TABLE,
    "AutoContrast": s.Operation.AUTOCONTRAST,
    "Equalize": s.Operation.EQUALIZE,
    "Invert": s.Operation.TABLE,
    "SolarizeAdd": s.Operation.TABLE,
    "Desaturate": s.Operation.SATURATION,
}
_CODES = np.array([_COLORS.get(name, s.Operation.NONE) for name in OPERATIONS])
_SHIFT = np.array([{"TranslateX": 2, "TranslateY": 5}.get(name, 0) for name in OPERATIONS])
"""Which number of a matrix, row by row, an operation changes that shifts pixels, whole ones by torchvision; 0 for
others."""
_MOVES = ("ShearX", "ShearY", "Rotate", "TranslateX", "TranslateY")
_IS_MAPPED = np.isin(OPERATIONS, _MOVES[:3])
_SHARPEN = OPERATIONS.index("Sharpness")
_BLUR = OPERATIONS.index("GaussianBlur")
_SHARPNESS, _BLURRING = Sharpness(amount=0.0), GaussianBlur(kernel_size=13)
"""Their filters depend on a sample's coefficients alone. 13 pixels are three times the largest sigma, 2, both ways."""


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

    def bins(self, count: int, side: int = 1) -> Floats:
        """Return the magnitude of each bin, as torchvision computes it. side: in pixels, the one that `of` names."""
        if self.whole:
            import torch

            steps = torch.arange(count, dtype=torch.float32, device="cpu") / ((count - 1) / (self.low - self.high))
            return (self.low - steps).round().double().numpy()
        return _linspace(self.low, self.high * side, count)


def of_both_signs(high: float, *, of: Literal["", "height", "width"] = "") -> Range:
    """Return the magnitudes from 0 to `high`, each negated for half of the samples."""
    return Range(0.0, high, both_signs=True, of=of)


@lru_cache(maxsize=4096)
def _linspace(low: float, high: float, count: int) -> Floats:
    import torch

    return torch.linspace(low, high, count, dtype=torch.float32, device="cpu").double().numpy()


@dataclass(frozen=True, slots=True)
class Choice:
    """One round's operation of each sample, the bin of its magnitude among `bins`, and whether that is negated, each
    [N]. An operation that has no magnitude, or one of one sign, ignores these.

    place: whole numbers, or timm's levels, which may lie between bins.
    """

    operation: Ints
    place: Any
    negated: Bools
    bins: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """One round's operation and magnitude of each sample, both [N]."""

    operation: Ints
    magnitude: Floats


RANGES = {
    **dict.fromkeys(("ShearX", "ShearY"), of_both_signs(0.3)),
    "TranslateX": of_both_signs(150.0 / 331.0, of="width"),
    "TranslateY": of_both_signs(150.0 / 331.0, of="height"),
    "Rotate": of_both_signs(30.0),
    **dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), of_both_signs(0.9)),
    "Posterize": Range(8.0, 4.0, whole=True),
    "Solarize": Range(1.0, 0.0),
}
"""The magnitudes of torchvision's RandAugment and AutoAugment."""


def uniform_places(numbers: Floats, count: int) -> Ints:
    """Return numbers in [0, 1) with 32 bits as places in range(count)."""
    return (numbers * count).astype(np.int64)


class MagnitudeTable(Protocol):
    """Gives the magnitudes of chosen operations: `Magnitudes`, or timm's `Levels`."""

    def of(self, choice: Choice, sizes: tuple[Ints, Ints] | None = None) -> Drawn:
        """Return the chosen operations and their magnitudes."""


@final
class Magnitudes:
    """Looks up the magnitudes of a policy's operations, of all samples at once.

    Args:
        ranges: of the operations that have a magnitude.
    """

    def __init__(self, ranges: Mapping[str, Range]) -> None:
        self._ranges = {OPERATIONS.index(name): one for name, one in ranges.items()}
        self._signed = np.isin(OPERATIONS, [name for name, one in ranges.items() if one.both_signs])
        self._tables: dict[int, Floats] = {}

    def of(self, choice: Choice, sizes: tuple[Ints, Ints] | None = None) -> Drawn:
        """Return the chosen operations and their magnitudes.

        sizes: heights and widths [N] of the images in pixels; without them, magnitudes of the image's size are 0.
        """
        magnitude = self._table(choice.bins)[choice.operation, choice.place]
        if sizes is not None:
            for number, one in self._ranges.items():
                if not one.of:
                    continue
                rows = np.flatnonzero(choice.operation == number)
                sides = sizes[one.of == "width"][rows]
                for side in set(sides.tolist()):
                    same = rows[sides == side]
                    magnitude[same] = one.bins(choice.bins, side)[choice.place[same]]
        negative = choice.negated & self._signed[choice.operation]
        return Drawn(choice.operation, np.where(negative, -magnitude, magnitude))

    def _table(self, bins: int) -> Floats:
        """Return each operation's magnitude in each bin; 0 for one that has none or one of the image's size."""
        if (table := self._tables.get(bins)) is None:
            table = self._tables[bins] = np.zeros((len(OPERATIONS), bins))
            for number, one in self._ranges.items():
                if not one.of:
                    table[number] = one.bins(bins)
        return table


MAGNITUDES = Magnitudes(RANGES)


class AugmentPolicy(s.Policy):
    """A policy of operations of torchvision or timm, in rounds of one operation for each sample."""

    tolerance = 1.0
    random = True

    interpolation: WarpInterpolation
    fill: Fill

    @property
    def magnitudes(self) -> MagnitudeTable:
        """Return the magnitudes of its operations."""
        return MAGNITUDES

    @property
    def timm_names(self) -> tuple[str, ...]:
        """Return the operations that it draws from if they are timm's; empty if they are torchvision's."""
        return ()

    @property
    def rounds(self) -> int:
        """Return how many operations a sample gets, one after the other."""
        raise NotImplementedError

    def choose(self, keys: s.StageKeys, turn: int) -> Choice:
        """Return the operations of round `turn`."""
        raise NotImplementedError

    def chosen(self, keys: s.StageKeys, turn: int) -> Choice:
        """Return what `choose` returns, which the parts of a round share."""
        return keys.once(("choice", self, turn), lambda: self.choose(keys, turn))

    def drawn(self, keys: s.StageKeys, turn: int) -> Drawn:
        """Return the operations of round `turn` with the magnitudes that do not depend on an image's size."""
        return keys.once(("drawn", self, turn), lambda: self.magnitudes.of(self.chosen(keys, turn)))

    def drawn_for(self, keys: s.StageKeys, turn: int, height: Ints, width: Ints) -> Drawn:
        """Return the operations of round `turn` with all magnitudes, for images of these sizes [N] in pixels."""
        return self.magnitudes.of(self.chosen(keys, turn), (height, width))

    def transform(self, name: str, **parameters: Any) -> Any:
        """Return torchvision's policy of this name; a policy of timm's operations has none."""
        if self.timm_names:
            raise NotImplementedError("torchvision has none of timm's operations")
        return resampling_transform(name, self.interpolation, fill=self.fill, **parameters)

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        s.require_rgb(self, spec)
        check_fill(self.fill, spec)
        return spec

    def parts(self) -> tuple[s.Stage, ...]:
        kinds: tuple[type[_Part], ...] = (_Moving, _Colouring, _Sharpening)
        if names := self.timm_names:
            runs = {_Moving: _MOVES, _Colouring: _COLORS, _Sharpening: ("Sharpness",), _Blurring: ("GaussianBlur",)}
            kinds = tuple(kind for kind, own in runs.items() if not set(names).isdisjoint(own))
        return tuple(kind(policy=self, turn=turn) for turn in range(self.rounds) for kind in kinds)


@s.stage_class
class _Part(s.Stage):
    """A stage that runs the operations of one kind in round `turn`."""

    policy: AugmentPolicy
    turn: int

    @property
    def key_name(self) -> str:
        return self.policy.stage_name


@s.stage_class
class _Moving(_Part, s.Geometry):
    """The geometric operations of one round."""

    stage_name = "policy_moves"
    folds = False

    @property
    def warps(self) -> s.Lookup:
        found = lookup_of(self.policy.interpolation, "constant", self.policy.fill)
        return found._replace(as_torchvision=found.interpolation == "nearest")

    def draw(self, keys: s.StageKeys, height: Ints, width: Ints) -> tuple[s.Move, ...]:
        drawn = self.policy.drawn_for(keys, self.turn, height, width)
        numbers = np.zeros((len(height), 9))
        numbers[:, ::4] = 1
        operation, magnitude = drawn.operation, drawn.magnitude
        shifted, mapped = np.flatnonzero(_SHIFT[operation]), np.flatnonzero(_IS_MAPPED[operation])
        shifts = magnitude[shifted] if self.policy.timm_names else np.trunc(magnitude[shifted])
        numbers[shifted, _SHIFT[operation[shifted]]] = -shifts
        described = (values[mapped].tolist() for values in (operation, magnitude, height, width))
        maps: dict[tuple[int, float, int, int], int] = {}  # the different ones, and their places
        places = [maps.setdefault(one, len(maps)) for one in zip(*described, strict=True)]
        if maps:
            numbers[mapped, :6] = np.array([_map_of(*one) for one in maps])[places]
        active = np.zeros(len(height), bool)
        active[shifted] = active[mapped] = True
        return (s.Warp(numbers.reshape(-1, 3, 3), height, width, *self.warps, active),)


@lru_cache(maxsize=4096)
def _map_of(operation: int, magnitude: float, height: int, width: int) -> tuple[float, ...]:
    """Return the first two rows of the map from a sheared or turned image's points to where they come from.

    To the bit as torchvision v2 computes it, whose numbers, of the map about the image's center, are float32. So the
    matrix is not rounded: float64 holds all of its sums.
    """
    angle = shear_x = shear_y = left = top = 0.0
    match OPERATIONS[operation]:
        case "Rotate":
            angle = math.radians(-(magnitude % 360))
        case "ShearX" | "ShearY" as name:  # about the upper left corner
            shear = math.radians(math.degrees(math.atan(magnitude)))
            shear_x, shear_y = (shear, 0.0) if name == "ShearX" else (0.0, shear)
            left, top = -width * 0.5, -height * 0.5
        case other:
            raise ValueError(f"{other} neither shears nor turns")
    a = math.cos(angle - shear_y) / math.cos(shear_y)
    c = math.sin(angle - shear_y) / math.cos(shear_y)
    b, d = -(a * math.tan(shear_x) + math.sin(angle)), math.cos(angle) - c * math.tan(shear_x)
    numbers: list[float] = []
    for across, down, fixed, side in ((d, -b, left, width), (-c, a, top, height)):
        shift = fixed - across * left - down * top
        across, down, shift = np.array([across, down, shift], np.float32).tolist()
        numbers += (across, down, shift + side / 2 - (across * width + down * height) / 2)
    return tuple(numbers)


@s.stage_class
class _Colouring(_Part, s.Pointwise):
    """The pointwise operations of one round. Coefficients of a sample [2]: its operation and magnitude."""

    stage_name = "policy_colours"

    def draw(self, keys: s.StageKeys) -> Floats:
        drawn = self.policy.drawn(keys, self.turn)
        return np.array([drawn.operation, drawn.magnitude]).T

    def operations(self, coefficients: Floats, height: Ints, width: Ints) -> s.Operations:
        operation, magnitude = coefficients[:, 0].astype(np.int64), coefficients[:, 1]
        codes, factors = _CODES[operation], 1.0 + magnitude
        rows = np.flatnonzero(codes == s.Operation.TABLE)
        # Samples with one operation and magnitude, here as one complex number, share a table.
        pairs, factors[rows] = np.unique(operation[rows] + 1j * magnitude[rows], return_inverse=True)
        tables = [_table(int(pair.real), pair.imag) for pair in pairs.tolist()]
        return s.Operations.of(
            codes[:, None],
            factors[:, None],
            kinds=_COLORS.values(),
            statistics=1,
            tables=np.stack(tables) if tables else None,
        )


@lru_cache(maxsize=4096)
def _table(operation: int, magnitude: float) -> Bytes:
    """Return the level for each level, uint8 [3, 256], of an operation that looks levels up."""
    levels: Ints | Bytes = np.arange(256)
    match OPERATIONS[operation]:
        case "Posterize":
            levels = Posterize(bits=min(max(int(magnitude), 0), 8)).levels()
        case "Solarize":  # torch compares in float32
            levels = np.where(levels >= np.float32(255.0 * magnitude), 255 - levels, levels)
        case "SolarizeAdd":  # the lower half becomes brighter
            levels = np.where(levels < 128, np.minimum(levels + int(magnitude), 255), levels)
        case "Invert":
            levels = 255 - levels
        case other:
            raise ValueError(f"{other} has no table")
    table = np.tile(levels.astype(np.uint8), (3, 1))
    table.flags.writeable = False
    return table


@s.stage_class
class _Sharpening(_Part, s.Local):
    """The sharpening of one round. Coefficients of a sample [2]: whether it is sharpened, and its factor."""

    stage_name = "policy_sharpness"

    def draw(self, keys: s.StageKeys) -> Floats:
        drawn = self.policy.drawn(keys, self.turn)
        return np.array([drawn.operation == _SHARPEN, 1.0 + drawn.magnitude]).T

    def filters(self, coefficients: Floats) -> s.Filters:
        return _SHARPNESS.filters(coefficients)


@s.stage_class
class _Blurring(_Part, s.Local):
    """The blurring of one round. Coefficients of a sample [2]: whether it is blurred, and its sigma."""

    stage_name = "policy_blur"

    def draw(self, keys: s.StageKeys) -> Floats:
        drawn = self.policy.drawn(keys, self.turn)
        active = drawn.operation == _BLUR
        return np.array([active, np.where(active, drawn.magnitude, 1.0)]).T

    def filters(self, coefficients: Floats) -> s.Filters:
        return _BLURRING.filters(coefficients)
