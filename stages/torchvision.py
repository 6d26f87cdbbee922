"""torchvision: runs any torchvision v2 transform by name, for operations that have no fast form in gpuflow.

A transform draws from torch's global generator, which other threads also use. Here each random function that it calls
gets a generator that belongs to the sample. So the same position in the epoch gets the same draw on any number of
threads, and the state of the user's generator does not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode

from gpuflow.errors import Problem, suggest
from gpuflow.pipeline import stage as s

__all__ = ["Torchvision"]

_PROBES = ((61, 83), (97, 53))
_PROBE_SEEDS = 16
"""A random transform is probed this many times, to detect that its result has a random size."""
_CONTAINERS = {"Transform", "Compose", "Lambda", "RandomApply", "RandomChoice", "RandomOrder"}
_IN_PLACE = frozenset(
    (
        *("ColorJitter", "RandomPhotometricDistort", "Grayscale", "RandomGrayscale", "RGB", "RandomChannelPermutation"),
        *("RandomAdjustSharpness", "RandomAutocontrast", "RandomEqualize", "RandomInvert", "RandomPosterize"),
        *("RandomSolarize", "RandomErasing", "GaussianBlur", "GaussianNoise", "JPEG", "Normalize", "ToDtype"),
        *("ConvertImageDtype", "Identity", "ToImage", "ToPureTensor"),
    )
)
"""The transforms that leave every pixel in its place; boxes and masks go through them unchanged."""
_DTYPES = {torch.uint8: "uint8", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, kw_only=True, repr=False)
class Torchvision(s.Opaque):
    """Run a transform of torchvision.transforms.v2 on each image; all other keys are its keyword arguments.

    Args:
        name: the transform's class, which takes one image, such as `GaussianBlur`.
        parameters: its keyword arguments; `interpolation` and `dtype` by name.
    """

    stage_name: ClassVar[str] = "torchvision"
    open_field: ClassVar[str | None] = "parameters"

    name: str
    parameters: tuple[tuple[str, Any], ...] = ()

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
        """Unpickle, and import torchvision: once for all workers of a pool, which are forked after that."""
        vars(self).update(state)
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
        for channels, dtype in ((3, torch.uint8), (3, torch.float32), (1, torch.uint8), (1, torch.float32)):
            try:
                return _probe(self.name, self.parameters, (channels, *_PROBES[0]), dtype)[2]
            except (TypeError, ValueError, RuntimeError):
                continue
        return False  # it accepts no image; `output` raises the error

    @property
    def moves_pixels(self) -> bool:
        return self.name not in _IN_PLACE

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        if spec.layout == "encoded":
            raise ValueError("takes an image but gets encoded bytes; put decode before torchvision")
        height, width, channels = spec.shape
        dtype = getattr(torch, spec.dtype)
        results = []
        for probe_height, probe_width in _PROBES:
            shape = (channels, height or probe_height, width or probe_width)
            try:
                results.append(_probe(self.name, self.parameters, shape, dtype))
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(f"{self.name} does not take {spec}: {error}") from error
        (a, out_dtype, _), (b, _, _) = results
        if a[0] is None:
            raise ValueError(f"{self.name} gives a number of channels that varies from sample to sample")
        if out_dtype not in _DTYPES:
            raise ValueError(f"{self.name} gives {out_dtype}; a batch holds {', '.join(_DTYPES.values())}")
        sides = [x if x == y else None for x, y in zip(a[1:], b[1:], strict=True)]
        layout = "hwc" if out_dtype == torch.uint8 else "nhwc" if spec.layout == "nhwc" else "nchw"
        return spec.replace(shape=(sides[0], sides[1], a[0]), dtype=_DTYPES[out_dtype], layout=layout)

    def torchvision(self) -> Any:
        return _build(self.name, self.parameters)

    def apply(self, image: torch.Tensor, seed: int) -> torch.Tensor:
        transform = _build(self.name, self.parameters)
        with _OwnGenerator(seed):
            return transform(image)  # type: ignore[no-any-return]

    def result_size(self, image: torch.Tensor, seed: int) -> tuple[int, int] | None:
        try:
            return tuple(self.apply(image.to("meta"), seed).shape[1:])  # type: ignore[return-value]
        except (
            NotImplementedError,
            RuntimeError,
            TypeError,
            ValueError,
        ):  # it reads pixels, of which there are none
            return None


class _OwnGenerator(TorchFunctionMode):
    """Passes each random function called inside the block a generator seeded here. Affects only this thread.

    Numbers for a GPU are drawn on the CPU and copied, so that both devices get the same numbers.

    It sees the functions that Python calls. A mode that sees the operators below them (TorchDispatchMode) is not safe
    with several threads: where two call an operator for the first time at once, torch 2.11 keeps the address of an
    object that is then freed, and the process crashes later.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.used = False
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.__name__
        if name not in _DRAWS and name not in _LIKE:
            return func(*args, **kwargs)
        self.used = True
        if name in _LIKE:
            return self._draw_like(name, *args, **kwargs)
        kwargs["generator"] = self._generator
        device = args[0].device if args and isinstance(args[0], torch.Tensor) else kwargs.get("device")
        if device is None or torch.device(device).type == "cpu":
            return func(*args, **kwargs)
        moved = [x.cpu() if isinstance(x, torch.Tensor) else x for x in args]
        result = func(*moved, **{**kwargs, **({"device": "cpu"} if "device" in kwargs else {})})
        return args[0].copy_(result) if result is moved[0] else result.to(device)

    def _draw_like(self, name: str, like: torch.Tensor, *bounds: int, **kwargs: Any) -> torch.Tensor:
        """These functions take no generator: their numbers come from the in-place function of the same distribution."""
        bounds += tuple(kwargs.pop(key) for key in ("low", "high") if key in kwargs)
        result = torch.empty_like(like, **{**kwargs, "device": "cpu"})
        draw = getattr(result, _LIKE[name])
        draw(*((0, *bounds) if len(bounds) == 1 else bounds), generator=self._generator)
        return result.to(kwargs.get("device") or like.device)


_DRAWS = frozenset(
    (
        *("bernoulli", "binomial", "multinomial", "normal", "poisson", "rand", "randint", "randn", "randperm"),
        *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"),
        *("_sample_dirichlet", "_standard_gamma"),
    )
)
"""Names of the functions and methods of torch that take a generator. A test compares them with torch's own list."""
_LIKE = {"rand_like": "uniform_", "randint_like": "random_", "randn_like": "normal_"}


@lru_cache(maxsize=1)
def _transforms() -> frozenset[str]:
    from torchvision.transforms import v2

    classes = {name: value for name, value in vars(v2).items() if isinstance(value, type)}
    return frozenset(name for name, value in classes.items() if issubclass(value, v2.Transform)) - _CONTAINERS


@lru_cache(maxsize=256)
def _build(name: str, parameters: tuple[tuple[str, Any], ...]) -> Any:
    from torchvision.transforms import InterpolationMode, v2

    arguments: dict[str, Any] = {key: list(value) if isinstance(value, tuple) else value for key, value in parameters}
    if "interpolation" in arguments:
        arguments["interpolation"] = InterpolationMode(arguments["interpolation"])
    if "dtype" in arguments:
        arguments["dtype"] = getattr(torch, arguments["dtype"])
    return getattr(v2, name)(**arguments)


@lru_cache(maxsize=256)
def _probe(
    name: str, parameters: tuple[tuple[str, Any], ...], shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[tuple[int | None, int | None, int | None], torch.dtype, bool]:
    """Run the transform on a black image: returns the result's (C, H, W), its dtype, and whether it is random.

    A length is None if it varies with the random numbers.
    """
    shapes: set[tuple[int, ...]] = set()
    out_dtype, drew = dtype, False
    for seed in range(_PROBE_SEEDS):
        with _OwnGenerator(seed) as mode:
            result = _build(name, parameters)(torch.zeros(shape, dtype=dtype))
        if not isinstance(result, torch.Tensor) or result.ndim != 3:
            raise ValueError("the result is not one CHW image")
        shapes.add(tuple(result.shape))
        out_dtype, drew = result.dtype, mode.used
        if not drew:
            break
    lengths = [set(side) for side in zip(*shapes, strict=True)]
    channels, height, width = (side.pop() if len(side) == 1 else None for side in lengths)
    return (channels, height, width), out_dtype, drew
