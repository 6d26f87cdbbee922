"""Values only: what an image is at a place in a pipeline, what a stage promises, and a pipeline of stages.

A stage says, before anything runs, what it makes of an `ImageSpec`, and is of one kind, so that the engine never asks
which stage it is:

    Decoder     the first stage: encoded bytes to a uint8 image, or to the region of it that the next stages need
    Geometry    gives moves (`Crop`, `Flip`, `Resize`) for each sample; the engine folds them into few samplings
    Pointwise   gives coefficients for each sample; maps pixels to pixels in place
    Opaque      any callable on one image

Arrays have one row a sample: [N]. Images are numpy arrays in HWC unless a name says otherwise.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gpuflow.errors import ConfigError, Problem
from gpuflow.pipeline.image_spec import ENCODED, ImageSpec
from gpuflow.pipeline.rng import Keys, StageKeys

if TYPE_CHECKING:
    import torch

__all__ = [
    "ENCODED",
    "Crop",
    "Decoder",
    "Flip",
    "Geometry",
    "ImageSpec",
    "Keys",
    "Move",
    "Opaque",
    "Operation",
    "Pipeline",
    "Pointwise",
    "Resize",
    "Stage",
    "StageKeys",
    "require_pixels",
]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


# --- randomness ----------------------------------------------------------------------------------------------------


# --- moves ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Crop:
    """Keep the box (y, x, height, width), all [N], in pixels. It may reach `margin` pixels outside, which are black."""

    y: Ints
    x: Ints
    height: Ints
    width: Ints
    margin: int = 0


@dataclass(frozen=True, slots=True)
class Flip:
    """Mirror left-right where `horizontal` [N] is set, top-bottom where `vertical` [N] is."""

    horizontal: Bools
    vertical: Bools


@dataclass(frozen=True, slots=True)
class Resize:
    """Resample to (height, width), both [N], in pixels; the result is rounded to uint8 as torchvision does."""

    height: Ints
    width: Ints
    interpolation: str
    antialias: bool


Move = Crop | Flip | Resize


# --- stages --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One named step of a pipeline: a frozen value that validates itself when it is made.

    A stage is a final subclass of one of the four kinds below. `stage_name` is its key in YAML; `tolerance` is how far,
    in levels of 0-255, its CPU, GPU and serving forms may be apart. `open_field` names the field that takes whatever
    keys the others do not, as sorted (key, value) pairs. `where_fields` are those that say where it runs, or what it
    refuses to spend time on, and not what comes out.
    """

    stage_name: ClassVar[str]
    tolerance: ClassVar[float] = 0.0
    open_field: ClassVar[str | None] = None
    where_fields: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        name = self.stage_name
        problems = [Problem(f"{name}.{field}" if field else name, text) for field, text in self.faults()]
        if problems:
            raise ConfigError(problems)

    def faults(self) -> Iterator[tuple[str, str]]:
        """(field, broken rule) for each parameter out of range."""
        yield from ()

    @property
    def random(self) -> bool:
        """Whether two samples with different keys may come out differently."""
        return False

    def output(self, spec: ImageSpec) -> ImageSpec:
        """What this stage makes of such an image. Raises ValueError, in words, if it cannot take it."""
        raise NotImplementedError

    def torchvision(self) -> Any:
        """The torchvision v2 transform of a PIL image or uint8 tensor that this stage equals, or None for a decoder."""
        raise NotImplementedError

    def module(self) -> Any:
        """The same inside a model: a torch module from uint8 [N, C, H, W], or None for a stage that cannot be there."""
        return None

    def params(self) -> dict[str, Any]:
        """The parameters that decide what comes out, defaults included."""
        names = (field.name for field in dataclasses.fields(self) if field.name not in self.where_fields)
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        given = [
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"{self.stage_name}({', '.join(given)})"


class Decoder(Stage):
    """Encoded bytes to a uint8 HWC image.

    The engine decodes, as these fields say, unless the decoder names a `library`: then its own `decode` does.
    """

    color: str
    backend: str
    cpu_share: float
    orientation: str
    max_pixels: int
    max_scans: int

    @property
    def library(self) -> str | None:
        """What its own `decode` decodes with, for people; None where the engine decodes."""
        return None

    def decode(self, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Encoded bytes [n], of which nothing is known, to an image of the one size that `output` gives.

        Any thread may call it.

        Raises:
            BadSampleError: these bytes it cannot decode.
        """
        raise NotImplementedError


class Geometry(Stage):
    """Moves pixels about. `resizes` and `pads` say, before anything runs, which moves `draw` may return."""

    resizes: ClassVar[bool] = False

    @property
    def pads(self) -> bool:
        """Whether a crop of this stage may reach outside the image."""
        return False

    def draw(self, keys: StageKeys, height: Ints, width: Ints) -> tuple[Move, ...]:
        """The moves of each sample, whose images have these sizes [N] in pixels."""
        raise NotImplementedError


class Operation(enum.IntEnum):
    """A colour adjustment of uint8 images by a factor, as torchvision v2's function adjust_<name> defines it.

    BRIGHTNESS: times the factor. CONTRAST, SATURATION: at 0 the mean gray, or each pixel's gray; at 1 the image itself.
    HUE: a shift by so many turns, -0.5 to 0.5. Gray images know no saturation and no hue. NONE leaves the image alone.
    """

    NONE = -1
    BRIGHTNESS = 0
    CONTRAST = 1
    SATURATION = 2
    HUE = 3


class Pointwise(Stage):
    """Maps pixels to pixels, by coefficients of each sample that come from `draw`.

    Of the batched GPU forms a stage has at most one: `table`, where a result depends on its channel's level and on
    nothing else, or `device_operations`. A stage with neither runs on the CPU.
    """

    def draw(self, keys: StageKeys) -> NDArray[np.float64]:
        """The coefficients of each sample, [N, K]; K may be 0."""
        return np.empty((len(keys.positions), 0))

    def apply(self, image: NDArray[Any], coefficients: NDArray[np.float64], out: NDArray[Any] | None) -> NDArray[Any]:
        """The reference on one image with its coefficients [K]. Writes to `out`, where given, and returns it."""
        raise NotImplementedError

    def table(self) -> NDArray[Any] | None:
        """What each level becomes: [C, 256] in the result's dtype, 16-bit floats as their bits in uint16."""
        return None

    def device_operations(
        self, coefficients: NDArray[np.float64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
        """Each sample's operations in their order, given the coefficients [N, K]; N may be 0.

        Returns:
            codes [N, M] of `Operation`, at most one CONTRAST a sample, and their factors [N, M]. M is the same whatever
            the coefficients; 0 where the stage changes nothing.
        """
        return None


class Opaque(Stage):
    """Any callable on one image. What it draws comes from a seed of its own."""

    def apply(self, image: torch.Tensor, seed: int) -> torch.Tensor:
        """The reference on one image, a CHW tensor in any memory format; `seed` is of 63 bits."""
        raise NotImplementedError

    def apply_batch(self, images: torch.Tensor, seeds: Ints) -> torch.Tensor:
        """The same on images [N, C, H, W] on any device, in one call if nothing is drawn; each has its seed [N]."""
        if not self.random:
            return self.apply(images, 0)
        import torch

        return torch.stack([self.apply(image, seed) for image, seed in zip(images, seeds.tolist(), strict=True)])


def require_pixels(stage: Stage, spec: ImageSpec) -> None:
    """Raise ValueError unless `spec` is a decoded uint8 image, which is what geometry and colour stages take."""
    if spec.layout == "encoded":
        raise ValueError(f"takes an image but gets encoded bytes; put decode before {stage.stage_name}")
    if spec.dtype != "uint8":
        raise ValueError(f"takes uint8 pixels but gets {spec.dtype}; put {stage.stage_name} before normalize")


def _canonical(value: Any) -> Any:
    """The same text for values that compare equal: 1 for 1.0 and for True."""
    if isinstance(value, tuple):
        return tuple(map(_canonical, value))
    return int(value) if isinstance(value, (bool, float)) and value == value // 1 else value


@dataclass(frozen=True, slots=True)
class Pipeline:
    """An ordered tuple of stages under a name: a value that can be compared, printed and hashed."""

    name: str
    stages: tuple[Stage, ...]

    def __repr__(self) -> str:
        return f"{self.name}: " + " -> ".join(map(repr, self.stages))

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all that decides what comes out, so neither the name nor where a stage runs. 16 hex digits."""
        digest = hashlib.sha256()
        for stage in self.stages:
            values = [(name, _canonical(value)) for name, value in stage.params().items()]
            digest.update(repr((stage.stage_name, values)).encode())
        return digest.hexdigest()[:16]

    @property
    def lines(self) -> tuple[str, ...]:
        """What the fingerprint covers, to be read: one line a stage with its parameters, defaults included."""
        lines = []
        for stage in self.stages:
            values = stage.params().items()
            shown = {key: value if isinstance(value, bool) else _canonical(value) for key, value in values}
            lines.append(f"{stage.stage_name}({', '.join(f'{key}={value!r}' for key, value in shown.items())})")
        return tuple(lines)

    def occurrences(self) -> list[int]:
        """For each stage, how many of the same name stand before it."""
        seen: dict[str, int] = {}
        counts = []
        for stage in self.stages:
            counts.append(seen.get(stage.stage_name, 0))
            seen[stage.stage_name] = counts[-1] + 1
        return counts
