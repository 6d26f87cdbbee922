"""Parameters that several stages share: their types, and how they are drawn for each sample."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from gpuflow.arrays import Bytes, Floats, Ints
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.bounds import Bounds
from gpuflow.pipeline.moves import MIRRORS
from gpuflow.pipeline.rng import StageKeys

LONGEST = 65_535
"""The largest side of an image that a stage makes, and the most padding, in pixels: as long as a JPEG's can be."""
Side = Annotated[int, Bounds(least=1, limit=LONGEST)]
"""A length in pixels."""
Size = Annotated[int | tuple[int, int], Bounds(least=1, limit=LONGEST)]
"""A side in pixels, or [height, width]."""
_Padded = Bounds(least=0, limit=LONGEST)
Padding = Annotated[int, _Padded] | Annotated[tuple[int, int], _Padded] | Annotated[tuple[int, int, int, int], _Padded]
"""Pixels on every side, [left and right, top and bottom], or [left, top, right, bottom]."""
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
"""What `imagenet` stands for, in units of 0 to 1."""
Ratio = Annotated[tuple[float, float], Bounds(least=0.001, limit=1000, ascending=True)]
"""The range of an aspect ratio."""

OTHER_KEYS: Mapping[str, str] = {
    "p": "probability",
    "prob": "probability",
    "angle": "degrees",
    "degree": "degrees",
    "rotation": "degrees",
    "resample": "interpolation",
    "padding_mode": "border",
    "border_mode": "border",
    "fillcolor": "fill",
    "fill_value": "fill",
    "factor": "amount",
}
"""What torchvision, timm and Albumentations call parameters that several stages have, and their names here."""

Probability = Annotated[float, Bounds(least=0, most=1, words="a probability within [0, 1]")]
Factor = (
    Annotated[float, Bounds(least=0, limit=1000, words=">= 0 or [low, high]")]
    | Annotated[tuple[float, float], Bounds(least=0, limit=1000, ascending=True)]
)
"""How far factors are from 1, or the range that they are drawn from."""
Shift = (
    Annotated[float, Bounds(least=0, most=0.5, words="within [0, 0.5] or [low, high]")]
    | Annotated[tuple[float, float], Bounds(least=-0.5, most=0.5, ascending=True)]
)
"""How far hues are shifted at most, in turns of the colour circle, or the range of the shift."""


def size_pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) from an int or [height, width].

    Examples:
        >>> size_pair(224), size_pair((192, 256))
        ((224, 224), (192, 256))
    """
    return (size, size) if isinstance(size, int) else size


def of_size(spec: s.ImageSpec, height: int | None, width: int | None) -> s.ImageSpec:
    """Return a spec with this height and width of the image; None for one that varies."""
    return spec.replace(shape=(height, width, spec.shape[2]))


def sides_of(padding: int | tuple[int, int] | tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Return left, top, right, bottom of a `Padding`.

    Examples:
        >>> sides_of((3, 0)), sides_of((0, 4, 9, 2))
        ((3, 0, 3, 0), (0, 4, 9, 2))
    """
    if isinstance(padding, int):
        return (padding,) * 4
    x, y, *rest = padding
    return (x, y, rest[0], rest[1]) if rest else (x, y, x, y)


def range_of(value: float | tuple[float, float], *, neutral: float = 1.0) -> tuple[float, float]:
    """Return the range that a `Factor`, or with `neutral` 0 a `Shift` or `Angle`, is drawn from, as in ColorJitter.

    Examples:
        >>> range_of(0.4), range_of(1.5), range_of(0.1, neutral=0.0)
        ((0.6, 1.4), (0.0, 2.5), (-0.1, 0.1))
    """
    if isinstance(value, tuple):
        return value
    return (max(neutral - value, 0.0) if neutral else -value), neutral + value


def box_sides(
    pixels: Ints | Floats, areas: Floats, ratios: Floats, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Floats, Floats]:
    """Return the longer and the shorter side of boxes of random areas, for ratios above 1; rounded, [N, K].

    Args:
        pixels: of the images, [N, 1].
        areas, ratios: random numbers, [N, K].
        scale: the range of the area as a fraction of the image's.
        ratio: the range of the ratio of the sides, drawn uniformly in the logarithm.
    """
    area = pixels * (scale[0] + areas * (scale[1] - scale[0]))
    low, high = np.log(ratio)
    drawn = np.exp(low + ratios * (high - low))
    return np.rint(np.sqrt(area * drawn)), np.rint(np.sqrt(area / drawn))


def with_probability(transform: Any, probability: float) -> Any:
    """Return torchvision's transform, applied with this probability."""
    from torchvision.transforms import v2

    return transform if probability == 1 else v2.RandomApply([transform], p=probability)


def resampling_transform(name: str, interpolation: str, **parameters: Any) -> Any:
    """Return torchvision's v2 transform of this name, which resamples in this way."""
    from torchvision.transforms import InterpolationMode, v2

    return getattr(v2, name)(interpolation=InterpolationMode(interpolation), **parameters)


def moved_by_torchvision(stage: s.Geometry, image: Any) -> Any:
    """Run the moves of a stage that draws nothing on one image, by torchvision's functions."""
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional

    def whole(*lengths: Ints) -> list[int]:
        return [int(length[0]) for length in lengths]

    sizes = (np.array([side]) for side in functional.get_size(image))
    for move in stage.draw(StageKeys(0, 0, np.zeros(1, np.int64)), *sizes):
        match move:
            case s.Crop():
                image = functional.crop(image, *whole(move.y, move.x, move.height, move.width))
            case s.Resize():
                mode = InterpolationMode(move.interpolation)
                image = functional.resize(image, whole(move.height, move.width), mode, antialias=move.antialias)
            case s.Pad():
                sides = whole(move.left, move.top, move.right, move.bottom)
                image = functional.pad(image, sides, fill=list(move.fill))
            case _:
                raise TypeError(f"{stage!r} returns {type(move).__name__}, which is no crop, resize or padding")
    return image


Angle = (
    Annotated[float, Bounds(least=0, limit=3600, words=">= 0 or [low, high]")]
    | Annotated[tuple[float, float], Bounds(limit=3600, ascending=True)]
)
"""Degrees: v stands for [-v, v]."""
Center = Annotated[tuple[float, float], Bounds(limit=1_000_000)]
"""A point [x, y] in pixels from the left and the top edge of the image."""
Interpolation = Literal["nearest", "bilinear", "bicubic"]
WarpInterpolation = Literal["nearest", "bilinear"]
Border = Literal["constant", "edge", "reflect", "symmetric"]
Level = Annotated[int, Bounds(least=0, most=255)]
Fill = Level | Annotated[tuple[int, int, int], Bounds(least=0, most=255)]
"""The levels of pixels outside the image, one for all channels or one for each."""


def lookup_of(interpolation: str, border: str, fill: int | tuple[int, int, int]) -> s.Lookup:
    """Return the filter of a warp; its fill counts only where the border is constant."""
    levels = fill if isinstance(fill, tuple) else (fill,)
    return s.Lookup(interpolation, border, levels if border == "constant" else (0,))


class ResizingStage(s.Geometry):
    """A stage that resamples an image without warping it, by default to a size that varies."""

    tolerance = 1.0
    resizes = True

    interpolation: Interpolation
    antialias: bool

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        return of_size(super().output(spec), None, None)

    def resize(self, height: Ints, width: Ints) -> s.Resize:
        """Return the move that resamples to these sizes [N]."""
        return s.Resize(height, width, self.interpolation, self.antialias)


class Filling(s.Geometry):
    """A stage whose results may show the outside of an image, in the levels `fill`."""

    fill: Fill

    @property
    def padding_fill(self) -> tuple[float, ...]:
        return levels_of(self.fill)

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        s.require_pixels(self, spec)
        check_fill(self.fill, spec)
        return spec


class WarpingStage(Filling):
    """A stage that warps, by default to images of the same size: what is seen outside them, and how it resamples."""

    tolerance = 1.0

    interpolation: WarpInterpolation
    border: Border

    @property
    def warps(self) -> s.Lookup:
        return lookup_of(self.interpolation, self.border, self.fill)

    def other_parameters(self) -> dict[str, Any]:
        """Return the parameters of the transform that `other_names` names first, without interpolation and fill."""
        raise NotImplementedError

    def torchvision(self) -> Any:
        parameters = self.other_parameters()
        if self.border != "constant":
            raise NotImplementedError
        return resampling_transform(self.other_names[0], self.interpolation, fill=self.fill, **parameters)


class Bordered(Filling):
    """A stage that may add pixels around an image: constant levels, or pixels of the image by a nearest warp."""

    border: Border

    @property
    def adds_pixels(self) -> bool:
        """Return False if its parameters add none."""
        return True

    @property
    def pads(self) -> bool:
        return self.adds_pixels and self.border == "constant"

    @property
    def warps(self) -> s.Lookup | None:
        return s.Lookup("nearest", self.border, (0,)) if self.adds_pixels and not self.pads else None

    @property
    def mirrors(self) -> bool:
        return self.adds_pixels and self.border in MIRRORS


class DrawnFactor(s.Stage):
    """A stage that changes the images that are drawn with a probability, each by a factor.

    neutral: the factor that changes nothing.
    """

    neutral = 1.0

    probability: Probability

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the range that the factor is drawn from; zeros for an operation without one."""
        return 0.0, 0.0

    @property
    def random(self) -> bool:
        """Return True if the stage changes only some images, or if its factor varies."""
        low, high = self.bounds
        return self.probability > 0 and (low != high or (self.probability < 1 and low != self.neutral))

    def draw(self, keys: StageKeys) -> Floats:
        """Draw for N samples whether each is changed, 1 or 0, and its factor, uniform within the bounds: [N, 2]."""
        numbers, (low, high) = keys.uniform(2), self.bounds
        return np.array([numbers[:, 0] < self.probability, low + numbers[:, 1] * (high - low)]).T


class Adjustment(DrawnFactor, s.Pointwise):
    """Runs one operation of torchvision.

    weighs_colors: whether it weighs red, green and blue, and so refuses the order blue, green, red.
    """

    operation: ClassVar[s.Operation]
    weighs_colors = False

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        if self.weighs_colors:
            s.require_rgb(self, spec)
        return super().output(spec)

    def torchvision(self) -> Any:
        """Return the transform that `other_names` names first, which takes the same parameters in the same order."""
        from torchvision.transforms import v2

        return getattr(v2, self.other_names[0])(*self.params().values())

    def operations(self, coefficients: Floats, height: Ints, width: Ints) -> s.Operations:
        return s.Operations.one(self.operation, coefficients[:, 0] > 0, coefficients[:, 1])


class TableAdjustment(Adjustment):
    """Looks each level up in one table for all channels."""

    operation = s.Operation.TABLE

    def levels(self) -> Bytes:
        """Return the result for each level, uint8 [256]."""
        raise NotImplementedError

    def operations(self, coefficients: Floats, height: Ints, width: Ints) -> s.Operations:
        return s.Operations.table(coefficients[:, 0] > 0, self.levels()[None, None])


class FactorAdjustment(Adjustment):
    """Runs an operation by a factor, as torchvision's function adjust_<stage_name> does."""

    amount: Factor | Shift

    @property
    def bounds(self) -> tuple[float, float]:
        return range_of(self.amount, neutral=self.neutral)

    def torchvision(self) -> Any:
        from torchvision.transforms import v2

        name, (low, high) = self.stage_name, self.bounds
        adjust = functools.partial(getattr(v2.functional, f"adjust_{name}"), **{f"{name}_factor": low})
        # ColorJitter rounds a factor to float32, which a fixed one is not here
        transform = v2.Lambda(adjust) if low == high else v2.ColorJitter(**{name: self.bounds})
        return with_probability(transform, self.probability)


def check_fill(fill: int | tuple[int, int, int], spec: s.ImageSpec) -> None:
    """Raise ValueError if the fill has another number of levels than the image has channels."""
    if isinstance(fill, tuple) and len(fill) != spec.shape[2]:
        raise ValueError(f"fills with {len(fill)} levels but gets {spec}; give one level")


def levels_of(fill: int | tuple[int, int, int]) -> tuple[int, ...]:
    """Return the levels of a padding. Black is one level, so that it equals the fill of a crop beyond the image."""
    levels = fill if isinstance(fill, tuple) else (fill,)
    return levels if any(levels) else (0,)


def check_mirrors(border: str, padding: tuple[int, int, int, int], spec: s.ImageSpec) -> None:
    """Raise ValueError if an image of this spec has too few pixels to be mirrored for this padding on its sides."""
    left, top, right, bottom = padding
    for side, most in zip(spec.shape[:2], (max(top, bottom), max(left, right)), strict=True):
        if border not in MIRRORS or side is None:
            continue
        if most > (limit := side - MIRRORS[border]):
            raise ValueError(f"mirrors {most} of {side} pixels; pad at most {limit}, or with border: edge")


def about_center(linear: Floats, height: Ints, width: Ints, center: tuple[float, float] | None = None) -> s.Matrices:
    """Return maps of points [N, 3, 3] that map the vectors from a point by linear maps [N, 2, 2].

    center: that point, by default the centre of each image, whose sizes are given.
    """
    matrix = np.zeros((len(linear), 3, 3))
    matrix[:, :2, :2], matrix[:, 2, 2] = linear, 1
    fixed = np.stack([width, height], axis=1) / 2 if center is None else np.broadcast_to(center, (len(linear), 2))
    matrix[:, :2, 2] = fixed - (linear @ fixed[:, :, None])[:, :, 0]
    return matrix


def rotation(degrees: Floats, height: Ints, width: Ints, center: tuple[float, float] | None = None) -> s.Matrices:
    """Return maps [N, 3, 3] from the output to the input of images of these sizes, turned by these angles [N]."""
    angle = np.radians(degrees)
    cos, sin = np.cos(angle), np.sin(angle)
    return about_center(np.stack([cos, -sin, sin, cos], axis=1).reshape(-1, 2, 2), height, width, center)


def expanded_rotation(degrees: Floats, height: Ints, width: Ints) -> tuple[s.Matrices, Ints, Ints]:
    """Return what `rotation` does, for results that just hold the whole turned images, as torchvision computes them.

    Returns:
        the maps, and the heights and widths of the results [N].
    """
    matrix = rotation(degrees, height, width)
    half = np.stack([width, height], axis=1) / 2
    corners = half[:, None] * np.array([[-1, -1], [-1, 1], [1, 1], [1, -1]])
    ends = corners @ matrix[:, :2, :2].swapaxes(1, 2) + half[:, None]
    low, high = (np.trunc(end * _STEPS) / _STEPS for end in (ends.min(axis=1), ends.max(axis=1)))
    size = (np.ceil(high) - np.floor(low)).astype(np.int64)
    quarter = np.mod(degrees, 180) == 90
    size[quarter] = np.stack([height, width], axis=1)[quarter]
    matrix[:, :2, 2] = half - (matrix[:, :2, :2] @ (size[:, :, None] / 2))[:, :, 0]
    return matrix, size[:, 1], size[:, 0]


_STEPS = 10_000
"""Corners are cut to this part of a pixel, so that rounding errors add no pixel."""
