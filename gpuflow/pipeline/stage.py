"""The kinds of stages, the spec of the images between them, and a pipeline of stages: values only.

A stage declares, before anything runs, its output spec for an input `ImageSpec`. It is of one kind, so that the engine
never asks which stage it is:

    Decoder     the first stage: decodes bytes to a uint8 image, or to the region of it that the next stages need
    Geometry    returns moves (`pipeline/moves.py`) for each sample; the engine folds them into few resamplings
    Pointwise   returns coefficients for each sample, and `Operations` that map pixels to pixels
    Local       returns coefficients for each sample, and `Filters` of each pixel's neighbourhood
    Policy      other stages that run in its place, each on some of the samples
    Opaque      any callable on one image
    Mixing      mixes the finished images and the labels of a batch with one another; these stages are the last ones

Arrays have one row per sample: [N]. Images are numpy arrays in HWC unless a name says otherwise.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar, dataclass_transform

import numpy as np

from gpuflow.arrays import Array, Bools, Bytes, Floats, Ints
from gpuflow.errors import ConfigError, Problem
from gpuflow.pipeline.bounds import Bounds, out_of_bounds
from gpuflow.pipeline.moves import Crop, Flip, Matrices, Move, Pad, Resize, Warp
from gpuflow.pipeline.pointwise import Filters, Operation, Operations
from gpuflow.pipeline.records import FromRecord, RecordValue
from gpuflow.pipeline.rng import Keys, StageKeys

if TYPE_CHECKING:
    import torch

__all__ = [
    "ENCODED",
    "Bounds",
    "Crop",
    "Decoder",
    "Filters",
    "Flip",
    "FromRecord",
    "Geometry",
    "ImageSpec",
    "Keys",
    "Local",
    "Lookup",
    "Matrices",
    "Mixing",
    "Mixture",
    "Move",
    "Opaque",
    "Operation",
    "Operations",
    "Pad",
    "Pipeline",
    "Pointwise",
    "Policy",
    "RecordValue",
    "Resize",
    "Stage",
    "StageKeys",
    "Warp",
    "require_decoded",
    "require_one_size",
    "require_pixels",
    "require_rgb",
    "stage_class",
]


Dtype = Literal["uint8", "float16", "bfloat16", "float32"]

Layout = Literal["encoded", "hwc", "nchw", "nhwc"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSpec:
    """The form of an image at one place in a pipeline.

    shape: (height, width, channels), in this order for every layout; None for a side that varies between samples.
    color: the meaning of the channels: `rgb`, `bgr` or `gray`.
    layout: `encoded` (bytes), `hwc` (rows of pixels), `nchw` (planes) or `nhwc` (planes in channels_last memory).
    shorter: length in pixels of the shorter side, if it is known although the shape is not.

    Examples:
        >>> photos = ImageSpec(shape=(None, None, 3))
        >>> str(photos), photos.fixed
        ('uint8 ?x?x3 hwc', False)
    """

    shape: tuple[int | None, int | None, int]
    dtype: Dtype = "uint8"
    layout: Layout = "hwc"
    device: str = "cpu"
    color: str = "rgb"
    shorter: int | None = None

    def __str__(self) -> str:
        if self.layout == "encoded":
            return "encoded bytes"
        height, width, channels = ("?" if side is None else side for side in self.shape)
        where = "" if self.device == "cpu" else f" on {self.device}"
        return f"{self.dtype} {height}x{width}x{channels} {self.layout}{where}"

    @property
    def fixed(self) -> bool:
        """Return True if all samples have the same shape, so that a batch can hold them."""
        return self.layout != "encoded" and None not in self.shape

    def replace(self, **changes: Any) -> ImageSpec:
        """Return a copy with these fields changed. A changed shape resets `shorter` unless that is given too.

        Examples:
            >>> resized = ImageSpec(shape=(None, None, 3), shorter=256)
            >>> resized.replace(color="gray").shorter, resized.replace(shape=(224, 224, 3)).shorter
            (256, None)
        """
        if "shape" in changes:
            changes.setdefault("shorter", None)
        return dataclasses.replace(self, **changes)


ENCODED = ImageSpec(shape=(None, None, 0), layout="encoded")
"""The spec of the encoded bytes that a source delivers and a pipeline starts from."""


T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def stage_class(cls: type[T]) -> type[T]:
    """Make a class of stages a frozen, keyword-only dataclass: its annotated fields are the stage's parameters.

    It keeps the short `repr` of `Stage`, which leaves defaults out.
    """
    return dataclass(frozen=True, kw_only=True, repr=False)(cls)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One named step of a pipeline: a frozen value that validates itself when it is constructed.

    A stage is a final subclass of one of the kinds below.

    stage_name: its key in YAML.
    tolerance: the largest difference between its CPU, GPU and serving forms, in levels of 0-255.
    open_field: the name of the field that receives all other keys, as sorted (key, value) pairs; None if there is none.
    where_fields: the fields that select where it runs or limit its work, and do not change the pixels.
    late_fields: the fields that did not always exist. At their defaults they do not count, so that fingerprints stay.
    other_names: what torchvision, timm and Albumentations call it, for hints in errors.
    other_keys: their names of its parameters, and what these are called here; `parameters.OTHER_KEYS` has those that
        several stages share.
    """

    stage_name: ClassVar[str]
    tolerance: ClassVar[float] = 0.0
    open_field: ClassVar[str | None] = None
    where_fields: ClassVar[tuple[str, ...]] = ()
    late_fields: ClassVar[tuple[str, ...]] = ()
    other_names: ClassVar[tuple[str, ...]] = ()
    other_keys: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        problems = list(out_of_bounds(self)) or [
            fault if isinstance(fault, Problem) else Problem.of(fault[0] or (), *fault[1:], code="config.range")
            for fault in self.faults()
        ]
        if problems:
            raise ConfigError([problem.below(self.stage_name) for problem in problems])

    @classmethod
    def examples(cls) -> tuple[Stage, ...]:
        """Return instances that the tests run every law on. Images have 45 to 131 pixels a side.

        Each parameter has two values among them that can be exchanged for one another.
        """
        raise NotImplementedError

    @classmethod
    def entry_for(cls, name: str) -> str:
        """Return the entry by which this stage runs another library's transform of this name; empty if it does not.

        For hints, where no stage has the name. name: in lower case, letters and digits alone.
        """
        return ""

    def faults(self) -> Iterator[Problem | tuple[Any, ...]]:
        """Yield a problem for each broken rule that `Bounds` cannot declare, with its path from the parameters on.

        It is called where all numbers are within their bounds. A tuple (field, broken rule) is a problem too, and may
        go on with the value and what to do about it; the field is empty if several parameters break the rule.
        """
        yield from ()

    @property
    def random(self) -> bool:
        """Return True if the result depends on the sample's random keys."""
        return False

    @property
    def record_values(self) -> Mapping[str, RecordValue]:
        """Return what the stage takes from each sample's record, by parameter. `draw` finds the values in its keys."""
        return {}

    @property
    def key_name(self) -> str:
        """Return the name that its random numbers are drawn by. The parts of a policy use the policy's name."""
        return self.stage_name

    def output(self, spec: ImageSpec) -> ImageSpec:
        """Return the output spec for an input spec. By default, a stage takes uint8 pixels and keeps their spec.

        Raises ValueError with the reason if the stage cannot take the input.
        """
        require_pixels(self, spec)
        return spec

    def torchvision(self) -> Any:
        """Return the torchvision v2 transform of a PIL image or uint8 tensor that equals this stage.

        A decoder returns None.
        """
        raise NotImplementedError

    def module(self) -> Any:
        """Return the stage as a torch module of uint8 [N, C, H, W] that a model can contain; None if there is none."""
        return None

    def params(self) -> dict[str, Any]:
        """Return the parameters that affect the pixels, defaults included."""
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default or field.name not in self.late_fields
            if field.name not in self.where_fields
        }

    def __repr__(self) -> str:
        given = [
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"{self.stage_name}({', '.join(given)})"


class Decoder(Stage):
    """Decodes encoded bytes to a uint8 HWC image.

    The engine decodes according to these fields, unless the decoder names a `library`: then the engine calls `decode`.
    """

    color: str
    backend: str
    cpu_share: float
    orientation: str | None
    max_pixels: int
    max_scans: int
    background: tuple[int, int, int] | None
    formats: tuple[str, ...]
    at_head: ClassVar[bool] = False
    """Whether its keys stand in the block of a pipeline, before the list of stages."""

    @property
    def needs_gpu(self) -> bool:
        """Return True if it decodes only on a GPU, and there by torchpipe's operators."""
        return False

    def refuses(self, stage: Stage, *, serving: bool) -> str | None:
        """Return a text that says why a stage cannot follow it; None if it can."""
        return None

    @property
    def library(self) -> str | None:
        """Return a text that names the library behind this class's own `decode`; None if the engine decodes."""
        return None

    def decode(self, data: Bytes) -> Bytes:
        """Decode unchecked bytes [n] to an image of the fixed size that `output` declares.

        Any thread may call it.

        Raises:
            BadSampleError: it cannot decode these bytes.
        """
        raise NotImplementedError


class Lookup(NamedTuple):
    """How a warp looks pixels up; see `Warp`. Two warps in a row with equal lookups can be one.

    as_torchvision: whether nearest pixels are those that torchvision takes, which rounds places to float32; see
        `find_as_torchvision` in native/warp.c. Only of affine maps to results of the image's size.
    """

    interpolation: str
    border: str
    fill: tuple[float, ...]
    as_torchvision: bool = False


class Geometry(Stage):
    """Moves pixels. `resizes`, `pads`, `padding_fill`, `warps` and `mirrors` declare, before anything runs, which moves
    `draw` may return.

    A stage that warps returns no `Resize`, and no `Pad` of border `constant`.
    """

    resizes: ClassVar[bool] = False
    folds: ClassVar[bool] = True
    """Whether it may share a step with its neighbours; otherwise it samples and rounds by itself."""

    @property
    def pads(self) -> bool:
        """Return True if it may return a `Pad` of border `constant`, or a crop that extends outside the image."""
        return False

    def pads_image(self, spec: ImageSpec) -> bool:
        """Return `pads` for images of this spec."""
        return self.pads

    @property
    def padding_fill(self) -> tuple[float, ...]:
        """Return the levels outside the image, where the stage pads: black unless it returns a `Pad`."""
        return (0,)

    @property
    def warps(self) -> Lookup | None:
        """Return how the stage's warps look pixels up; None if it returns none.

        A `Pad` whose border is not constant is a warp that looks up the nearest pixel.
        """
        return None

    @property
    def mirrors(self) -> bool:
        """Return True if the stage returns a `Pad` that mirrors the image.

        Such a stage shares no step with warps before it: they would change the image that is mirrored.
        """
        return False

    def draw(self, keys: StageKeys, height: Ints, width: Ints) -> tuple[Move, ...]:
        """Draw the moves of samples whose images have these sizes [N] in pixels."""
        raise NotImplementedError


class Pointwise(Stage):
    """Maps pixels to pixels of an image of the same size, with coefficients for each sample from `draw`.

    A stage has one description, which gives its forms for the CPU, the GPU and a service: `operations`, or `table` if
    it changes the dtype.
    """

    def draw(self, keys: StageKeys) -> Floats:
        """Draw the coefficients of N samples, [N, K]; K may be 0."""
        return np.empty((len(keys.positions), 0))

    def operations(self, coefficients: Floats, height: Ints, width: Ints) -> Operations | None:
        """Return what to do to uint8 images of these sizes [N] in pixels, for coefficients [N, K]; N may be 0."""
        return None

    def table(self) -> Array | None:
        """Return the result for each level: [C, 256] in the result's dtype, 16-bit floats as their bits in uint16."""
        return None


class Local(Stage):
    """Maps the neighbourhood of each pixel to a pixel, with coefficients for each sample from `draw`."""

    def draw(self, keys: StageKeys) -> Floats:
        """Draw the coefficients of N samples, [N, K]."""
        raise NotImplementedError

    def filters(self, coefficients: Floats) -> Filters:
        """Return the filters for coefficients [N, K]; N may be 0."""
        raise NotImplementedError


class Policy(Stage):
    """Runs other stages in its place, each on the samples for which the policy chose it.

    The image keeps its spec. The parts draw from the policy's random numbers, by its `stage_name`.
    """

    def parts(self) -> tuple[Stage, ...]:
        """Return the stages, geometry, pointwise or local ones, in the order in which they run."""
        raise NotImplementedError


class Opaque(Stage):
    """Any callable on one image. Its random numbers come from a seed that each sample has."""

    @property
    def on_gpu(self) -> bool:
        """Return False if it takes images in the CPU's memory alone: there `apply_batch` gets copies of a GPU's."""
        return True

    def prepare(self) -> None:
        """Build or load what the stage calls, such as a compiled operator.

        It is called where a loader or a predictor is made, before worker processes start, and more than once.
        """

    @property
    def moves_pixels(self) -> bool:
        """Return True if what stands at a pixel may come from another place, so that boxes and masks cannot follow."""
        return True

    def apply(self, image: torch.Tensor, seed: int) -> torch.Tensor:
        """Run the stage on one image, a CHW tensor in any memory format. `seed` has 62 bits."""
        raise NotImplementedError

    def result_size(self, image: torch.Tensor, seed: int) -> tuple[int, int] | None:
        """Return the height and width of `apply`'s result, found without making it; None if only `apply` can tell."""
        return None

    @property
    def takes_batches(self) -> bool:
        """Return True if `apply` also takes images [N, C, H, W], and makes of each what it makes of that image alone.

        A stage that draws gets one image at a time all the same, as each has a seed of its own.
        """
        return False

    def apply_batch(self, images: torch.Tensor, seeds: Ints) -> torch.Tensor:
        """Run `apply` on each of images [N, C, H, W] on any device with seeds [N]; in one call if it can."""
        if self.takes_batches and not self.random:
            return self.apply(images, 0)
        import torch

        return torch.stack([self.apply(image, seed) for image, seed in zip(images, seeds.tolist(), strict=True)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """What each of the N samples of a batch takes from its partner.

    Pixels become weight * own + (1 - weight) * the partner's; then the box is copied from the partner's image. Labels,
    as probabilities of the classes, become share * own + (1 - share) * the partner's. "The partner's" are those from
    before mixing.

    partners [N]: the row of each sample's partner; its own row if it stays as it is.
    weights [N]: of its own pixels, in [0, 1] and exact in float32. 1 for a sample that stays as it is.
    boxes [N, 4]: y, x, height, width in pixels; zeros for none.
    shares [N]: of its own label, in [0, 1].
    """

    partners: Ints
    weights: Floats
    boxes: Ints
    shares: Floats

    @property
    def changed(self) -> Bools:
        """Return which samples have other pixels than before, [N]."""
        takes: Bools = (self.weights != 1) | self.boxes[:, 2:].all(axis=1)
        other: Bools = self.partners != np.arange(len(takes))
        return np.logical_and(takes, other)

    def among(self, kept: Bools) -> Mixture:
        """Return the mixture in which a sample stays as it is if it, or its partner, is not among `kept` [N]."""
        own = np.arange(len(kept))
        stays = ~(kept & kept[self.partners]) | (self.partners == own)
        return dataclasses.replace(
            self,
            partners=np.where(stays, own, self.partners),
            weights=np.where(stays, 1.0, self.weights),
            boxes=np.where(stays[:, None], 0, self.boxes),
            shares=np.where(stays, 1.0, self.shares),
        )


class Mixing(Stage):
    """Mixes the samples of one rank's batch with one another, once all of them are finished.

    Labels become probabilities of the classes, float32 [N, classes]. Before mixing, each label is 1 - label_smoothing
    for its class plus label_smoothing / classes for every class. Images keep their spec.

    Equal batches give equal results: the draw depends on the seed, the epoch and the positions of the batch's samples,
    so not on threads, but on the batch size and the number of ranks.
    """

    label_smoothing: float

    def output(self, spec: ImageSpec) -> ImageSpec:
        """Return the spec of the input, which must be of known size."""
        require_one_size(self, spec)
        return spec

    def draw(self, keys: StageKeys, height: int, width: int, valid: Bools) -> Mixture:
        """Draw what each of N samples of a batch takes from its partner. A sample that is not valid is no partner."""
        raise NotImplementedError


def require_rgb(stage: Stage, spec: ImageSpec) -> None:
    """Raise ValueError unless `spec` is a decoded uint8 image, gray or with channels in the order red, green, blue."""
    require_pixels(stage, spec)
    if spec.color == "bgr":
        raise ValueError("weighs red, green and blue but gets bgr images; decode with color: rgb")


def require_one_size(stage: Stage, spec: ImageSpec) -> None:
    """Raise ValueError unless `spec` is a decoded image of known size, which is what mixing stages take."""
    require_decoded(stage, spec)
    if not spec.fixed:
        rule = f"takes images of one size but gets {spec}"
        raise ValueError(f"{rule}; put a crop or a resize to a fixed size before {stage.stage_name}")


def require_pixels(stage: Stage, spec: ImageSpec) -> None:
    """Raise ValueError unless `spec` is a decoded uint8 image, which is what geometry and colour stages take."""
    require_decoded(stage, spec)
    if spec.dtype != "uint8":
        raise ValueError(f"takes uint8 pixels but gets {spec.dtype}; put {stage.stage_name} before normalize")


def require_decoded(stage: Stage, spec: ImageSpec) -> None:
    """Raise ValueError if `spec` is that of encoded bytes."""
    if spec.layout == "encoded":
        raise ValueError(f"takes an image but gets encoded bytes; put decode before {stage.stage_name}")


def _canonical(value: Any) -> Any:
    """Return a value whose text is the same for values that compare equal: 1 for 1.0 and for True."""
    if isinstance(value, tuple):
        return tuple(map(_canonical, value))
    return int(value) if isinstance(value, (bool, float)) and value == value // 1 else value


@dataclass(frozen=True, slots=True)
class Pipeline:
    """An ordered tuple of stages under a name: a value that can be compared, printed and hashed.

    Examples:
        >>> from gpuflow.stages import CenterCrop, Decode
        >>> Pipeline("val", (Decode(), CenterCrop(size=224)))
        val: decode() -> center_crop(size=224)
    """

    name: str
    stages: tuple[Stage, ...]

    def __repr__(self) -> str:
        return f"{self.name}: " + " -> ".join(map(repr, self.stages))

    @property
    def fingerprint(self) -> str:
        """Return a hash of everything that affects the pixels (SHA-256, 16 hex digits), but not of the name."""
        digest = hashlib.sha256()
        for stage in self.stages:
            values = [(name, _canonical(value)) for name, value in stage.params().items()]
            digest.update(repr((stage.stage_name, values)).encode())
        return digest.hexdigest()[:16]

    @property
    def lines(self) -> tuple[str, ...]:
        """Return the parameters that the fingerprint covers, as text: one line per stage, defaults included.

        Examples:
            >>> from gpuflow.stages import CenterCrop
            >>> Pipeline("val", (CenterCrop(size=224),)).lines
            ('center_crop(size=224)',)
        """
        lines = []
        for stage in self.stages:
            values = stage.params().items()
            shown = {key: value if isinstance(value, bool) else _canonical(value) for key, value in values}
            lines.append(f"{stage.stage_name}({', '.join(f'{key}={value!r}' for key, value in shown.items())})")
        return tuple(lines)

    @property
    def heads(self) -> int:
        """Return how many of the stages stand before the list of stages in a file."""
        return sum(isinstance(stage, Decoder) and stage.at_head for stage in self.stages)

    @property
    def record_values(self) -> dict[tuple[int, str, str], RecordValue]:
        """Return what stages take from each sample's record, by the stage's number, its name and the parameter."""
        return {
            (i, self.stages[i].stage_name, parameter): value
            for i, part, _ in self.parts()
            for parameter, value in part.record_values.items()
        }

    def parts(self) -> list[tuple[int, Stage, int]]:
        """Return the stages that run, policies as their parts: each with its number in `stages` and its occurrence."""
        return [
            (i, part, occurrence)
            for i, (stage, occurrence) in enumerate(zip(self.stages, self.occurrences(), strict=True))
            for part in (stage.parts() if isinstance(stage, Policy) else (stage,))
        ]

    def occurrences(self) -> list[int]:
        """Return, for each stage, how many stages of the same name precede it."""
        names = [stage.stage_name for stage in self.stages]
        return [names[:i].count(name) for i, name in enumerate(names)]
