"""torchvision: runs any torchvision v2 transform by name, for operations that have no fast form in gpuflow.

A transform draws from torch's global generator, which other threads also use. Here each random function that it calls
gets a generator that belongs to the sample. So the same position in the epoch gets the same draw on any number of
threads, and the state of the user's generator does not change.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gpuflow.errors import Problem, reason_of, suggest
from gpuflow.pipeline import stage as s

if TYPE_CHECKING:
    import torch


_PROBES = ((61, 83), (97, 53))
_PROBE_SEEDS = 16
"""A random transform is probed this many times, to detect that its result has a random size."""
_CONTAINERS = {"Transform", "Compose", "Lambda", "RandomApply", "RandomChoice", "RandomOrder"}
_NOT_OF_ONE_IMAGE = {
    *("FiveCrop", "TenCrop", "LinearTransformation", "UniformTemporalSubsample", "CutMix", "MixUp"),
    *("ToPILImage", "ToPureTensor", "RandomIoUCrop", "SetClampingMode", "ConvertBoundingBoxFormat"),
    *("ClampBoundingBoxes", "ClampKeyPoints", "SanitizeBoundingBoxes", "SanitizeKeyPoints"),
}
"""The transforms that this stage cannot run, or that do nothing to an image alone: no error suggests them."""
_IN_PLACE = frozenset(
    (
        *("ColorJitter", "RandomPhotometricDistort", "Grayscale", "RandomGrayscale", "RGB", "RandomChannelPermutation"),
        *("RandomAdjustSharpness", "RandomAutocontrast", "RandomEqualize", "RandomInvert", "RandomPosterize"),
        *("RandomSolarize", "RandomErasing", "GaussianBlur", "GaussianNoise", "JPEG", "Normalize", "ToDtype"),
        *("ConvertImageDtype", "Identity", "ToImage", "ToPureTensor"),
    )
)
"""The transforms that leave every pixel in its place; boxes and masks go through them unchanged."""
_REFUSALS = (TypeError, ValueError, RuntimeError, OverflowError, LookupError)
"""What transforms raise for images and parameters that they cannot take."""
_DTYPES = ("uint8", "float32", "float16", "bfloat16")


@s.stage_class
class Torchvision(s.Opaque):
    """Run a transform of torchvision.transforms.v2 on each image; all other keys are its keyword arguments.

    Args:
        name: the transform's class, which takes one image, such as `GaussianBlur`.
        parameters: its keyword arguments; `interpolation` and `dtype` by name.
    """

    stage_name = "torchvision"
    open_field = "parameters"

    name: str
    parameters: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def entry_for(cls, name: str) -> str:
        classes = {one.lower(): one for one in _transforms() - _NOT_OF_ONE_IMAGE}
        return f"torchvision: {{name: {classes[name]}}}" if name in classes else ""

    @classmethod
    def examples(cls) -> tuple[Torchvision, ...]:
        return (
            cls(name="GaussianBlur", parameters=(("kernel_size", 3),)),
            cls(name="Pad", parameters=(("padding", 2),)),
            cls(name="Pad", parameters=(("padding", 3),)),
            cls(name="Grayscale"),
            cls(name="RandomPosterize", parameters=(("bits", 2),)),
            cls(name="RandomResize", parameters=(("max_size", 40), ("min_size", 20))),
            cls(name="ToDtype", parameters=(("dtype", "float32"), ("scale", True))),
            cls(name="RandomHorizontalFlip", parameters=(("p", 0.5),)),
            cls(name="RandomVerticalFlip", parameters=(("p", 0.5),)),
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle, and import torchvision: once for all workers of a pool, which are forked after that.

        A process that has not imported torch reads and draws, but runs no transform.
        """
        vars(self).update(state)
        if "torch" in sys.modules:
            _build(self.name, self.parameters)

    def faults(self) -> Iterator[Problem]:
        known = _transforms()
        if self.name not in known:
            rule = "must be a transform of one image in torchvision.transforms.v2"
            yield Problem.of("name", rule, self.name, suggest(self.name, known), code="config.range")
            return
        try:
            _build(self.name, self.parameters)
        except (TypeError, ValueError, AttributeError) as error:
            rule = f"{self.name} does not take these parameters: {error}"
            yield Problem.of((), rule, code="config.rule")

    @property
    def random(self) -> bool:
        for channels, dtype in ((3, "uint8"), (3, "float32"), (1, "uint8"), (1, "float32")):
            try:
                return _probe(self.name, self.parameters, (channels, *_PROBES[0]), dtype)[2]
            except _REFUSALS:
                continue
        return False  # it accepts no image; `output` raises the error

    @property
    def takes_batches(self) -> bool:
        return True

    @property
    def moves_pixels(self) -> bool:
        return self.name not in _IN_PLACE

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        s.require_decoded(self, spec)
        height, width, channels = spec.shape
        results = []
        for probe_height, probe_width in _PROBES:
            shape = (channels, height or probe_height, width or probe_width)
            try:
                results.append(_probe(self.name, self.parameters, shape, spec.dtype))
            except _REFUSALS as error:
                raise ValueError(f"{self.name} does not take {spec}: {reason_of(error)}") from error
        (a, out_dtype, _), (b, _, _) = results
        if a[0] is None:
            rule = "gives a number of channels that varies from sample to sample"
            raise ValueError(f"{self.name} {rule}; use a transform that keeps it")
        if out_dtype not in _DTYPES:
            raise ValueError(f"{self.name} gives torch.{out_dtype}; a batch holds {', '.join(_DTYPES)}")
        sides = [x if x == y else None for x, y in zip(a[1:], b[1:], strict=True)]
        layout = "hwc" if out_dtype == "uint8" else "nhwc" if spec.layout == "nhwc" else "nchw"
        return spec.replace(shape=(sides[0], sides[1], a[0]), dtype=out_dtype, layout=layout)

    def torchvision(self) -> Any:
        return _build(self.name, self.parameters)

    def apply(self, image: torch.Tensor, seed: int) -> torch.Tensor:
        from gpuflow.stages.torch_parts import SampleGenerator

        transform = _build(self.name, self.parameters)
        with SampleGenerator(seed):
            return transform(image)  # type: ignore[no-any-return]

    def result_size(self, image: torch.Tensor, seed: int) -> tuple[int, int] | None:
        try:
            return tuple(self.apply(image.to("meta"), seed).shape[1:])  # type: ignore[return-value]
        except _REFUSALS:  # it reads pixels, of which there are none
            return None


@lru_cache(maxsize=1)
def _transforms() -> frozenset[str]:
    from torchvision.transforms import v2

    classes = {name: value for name, value in vars(v2).items() if isinstance(value, type)}
    return frozenset(name for name, value in classes.items() if issubclass(value, v2.Transform)) - _CONTAINERS


@lru_cache(maxsize=256)
def _build(name: str, parameters: tuple[tuple[str, Any], ...]) -> Any:
    import torch
    from torchvision.transforms import InterpolationMode, v2

    from gpuflow.stages.torch_parts import on_cpu

    arguments: dict[str, Any] = {key: list(value) if isinstance(value, tuple) else value for key, value in parameters}
    if "interpolation" in arguments:
        arguments["interpolation"] = InterpolationMode(arguments["interpolation"])
    if "dtype" in arguments:
        arguments["dtype"] = getattr(torch, arguments["dtype"])
    with on_cpu():
        return getattr(v2, name)(**arguments)


@lru_cache(maxsize=256)
def _probe(
    name: str, parameters: tuple[tuple[str, Any], ...], shape: tuple[int, int, int], dtype: str
) -> tuple[tuple[int | None, int | None, int | None], str, bool]:
    """Run the transform on a black image: returns the result's (C, H, W), its dtype, and whether it is random.

    A length is None if it varies with the random numbers.
    """
    import torch

    from gpuflow.stages.torch_parts import SampleGenerator

    shapes: set[tuple[int, ...]] = set()
    out_dtype, drew = dtype, False
    for seed in range(_PROBE_SEEDS):
        with SampleGenerator(seed) as mode:
            result = _build(name, parameters)(torch.zeros(shape, dtype=getattr(torch, dtype), device="cpu"))
        if not isinstance(result, torch.Tensor) or result.ndim != 3:
            raise ValueError("the result is not one CHW image")
        shapes.add(tuple(result.shape))
        out_dtype, drew = str(result.dtype).removeprefix("torch."), mode.used
        if not drew:
            break
    lengths = [set(side) for side in zip(*shapes, strict=True)]
    channels, height, width = (side.pop() if len(side) == 1 else None for side in lengths)
    return (channels, height, width), out_dtype, drew
