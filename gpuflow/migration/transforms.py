"""The transforms of torchpipe's training integration, and of torchvision, as stages of gpuflow.

The stages have the pixels of torchvision's transforms on uint8 tensors. A transform that no stage equals runs as the
stage `torchvision` if it is one of v2, and is an error otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.errors import ConfigError, Key, Problem

__all__ = ["Cv2Resize", "Entry", "Found", "TensorToTensor", "cv2_resize", "stages_of"]

Entry = Mapping[str, Any]
"""A stage as it stands in YAML: its name, and its parameters."""

_Path = tuple[Key, ...]


class TensorToTensor:
    """Turns levels of 0-255 into numbers of 0-1: a tensor divided by 255, as torchpipe's training integration does.

    In `gpuflow.wrap` it stands where torchvision has ToTensor.
    """

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image.to(torch.float32) / 255

    def __repr__(self) -> str:
        return "TensorToTensor()"


@dataclass(frozen=True, slots=True)
class Cv2Resize:
    """Resizes an image [H, W, C] of numpy with OpenCV. See `cv2_resize`."""

    height: int
    width: int

    def __call__(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        import cv2

        return np.asarray(cv2.resize(image, (self.width, self.height)), np.uint8)


def cv2_resize(size: tuple[int, int]) -> Cv2Resize:
    """OpenCV's bilinear resize of an array [H, W, C] to `size`, (height, width).

    In `transforms_cpu` of `gpuflow.wrap` it names the size that the stages of the file resize to. Those stages say with
    which pixels: `preset: torchpipe_cpu` has OpenCV's.
    """
    height, width = size
    return Cv2Resize(height, width)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The stages that transforms stand for. paths: for each the keys that lead to its transform.

    resize: the `cv2_resize` that they begin with, if they do.
    """

    entries: tuple[Entry, ...]
    paths: tuple[_Path, ...]
    resize: Cv2Resize | None


def stages_of(transforms: Any, name: str, place: str) -> Found:
    """The stages that transforms stand for.

    Args:
        transforms: a Compose of torchvision, a list or one transform.
        name, place: the argument that it was given as, and where that is, for problems.

    Raises:
        ConfigError: every transform that has no stage, or that stands where it changes numbers of 0-1.
    """
    reader, problems = _Reader(), []
    for path, transform in _flat(transforms, (name,)):
        if (problem := reader.add(transform, path)) is not None:
            rule, action = problem
            problems.append(
                Problem(place, f"{_name(transform)} {rule}", action=action, path=path, code="config.conflict")
            )
    if problems:
        raise ConfigError(problems)
    return reader.found((name,))


def _flat(transforms: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    """Each single transform, with the keys that lead to it."""
    if _is_torchvision(transforms, "Compose"):
        transforms = transforms.transforms
    elif isinstance(transforms, torch.nn.Sequential):
        transforms = list(transforms)
    if isinstance(transforms, (list, tuple)):
        for i, transform in enumerate(transforms):
            yield from _flat(transform, (*path, i))
    else:
        yield path, transforms


def _is_torchvision(transform: Any, *names: str) -> bool:
    kind = type(transform)
    return kind.__module__.startswith("torchvision.transforms") and kind.__name__ in names


def _name(transform: Any) -> str:
    return getattr(transform, "__qualname__", None) or type(transform).__name__


_WITHOUT_PIXELS = ("ToPILImage", "PILToTensor", "ToImage", "ToPureTensor", "Identity")
_Refusal = tuple[str, str]
"""What is wrong with a transform, and what to do."""
_IN_YAML = "write a stage for it in the file"
_IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


class _Reader:
    """Collects the stages of transforms in their order; the one that normalizes comes behind those of levels."""

    def __init__(self) -> None:
        self._levels: list[tuple[_Path, Entry]] = []
        self._normalize: tuple[_Path, Entry] | None = None
        self._behind: list[tuple[_Path, Entry]] = []
        self._scaled: _Path | None = None
        self._resize: Cv2Resize | None = None

    def add(self, transform: Any, path: _Path) -> _Refusal | None:
        """Add the next transform, or say why not."""
        if isinstance(transform, Cv2Resize):
            return self._add_resize(transform)
        if isinstance(transform, TensorToTensor) or _is_torchvision(transform, "ToTensor") or _scales(transform):
            if self._scaled is not None:
                return "divides by 255 a second time", "remove one of the two"
            self._scaled = path
            return None
        if _is_torchvision(transform, *_WITHOUT_PIXELS) and self._scaled is None:
            return None
        if _is_torchvision(transform, "Normalize"):
            return self._add_normalize(transform, path)
        return self._add_stage(transform, path)

    def _add_resize(self, transform: Cv2Resize) -> _Refusal | None:
        if self._levels or self._scaled is not None or self._resize is not None:
            return "must be the first transform, because the file decodes and resizes", "move it to the front"
        self._resize = transform
        return None

    def _add_normalize(self, transform: Any, path: _Path) -> _Refusal | None:
        if self._scaled is None:
            return "works on numbers of 0-1 and gets levels of 0-255", "put gpuflow.TensorToTensor() before it"
        if self._normalize is not None:
            return "normalizes a second time", "remove one of the two"
        values = {"mean": _numbers(transform.mean), "std": _numbers(transform.std)}
        named = {name: "imagenet" if values[name] == _IMAGENET[name] else values[name] for name in values}
        self._normalize = path, {"normalize": named}
        return None

    def _add_stage(self, transform: Any, path: _Path) -> _Refusal | None:
        entries = _known(transform)
        early = entries if self._scaled is None or (not self._behind and _commutes(transform)) else None
        if early is not None:
            self._levels += [(path, entry) for entry in early]
            return None
        entry = _by_torchvision(transform)
        if entry is not None and self._scaled is None:
            self._levels.append((path, entry))
        elif entry is not None and self._normalize is not None:
            self._behind.append((path, entry))
        elif entries is not None or entry is not None:
            return (
                "stands where torchvision changes numbers of 0-1",
                "put it before ToTensor, to change levels of 0-255",
            )
        else:
            known = "its parameters" if _is_torchvision(transform, *_STAGES) else "it"
            action = f"use a transform of torchvision.transforms.v2, or {_IN_YAML}"
            return f"has no equal stage: gpuflow does not know {known}", action
        return None

    def found(self, path: _Path) -> Found:
        """All stages."""
        both = self._levels
        if self._scaled is not None:
            unchanged: Entry = {"normalize": {"mean": [0.0] * 3, "std": [1.0] * 3}}
            both = [*both, self._normalize or (self._scaled, unchanged), *self._behind]
        return Found(
            entries=tuple(entry for _, entry in both), paths=tuple(one for one, _ in both), resize=self._resize
        )


def _scales(transform: Any) -> bool:
    """Whether a transform turns levels of 0-255 into numbers of 0-1."""
    if _is_torchvision(transform, "ConvertImageDtype"):
        return bool(transform.dtype == torch.float32)
    return _is_torchvision(transform, "ToDtype") and transform.dtype == torch.float32 and bool(transform.scale)


def _commutes(transform: Any) -> bool:
    """Whether a transform gives the same if the pixels are scaled and normalized first."""
    if _is_torchvision(transform, "RandomCrop"):
        return not any(_padding(transform))
    return _is_torchvision(transform, "RandomHorizontalFlip", "RandomVerticalFlip")


# --- torchvision's transforms by name: their stages, or None where no stage equals them -------------------------------


def _known(transform: Any) -> list[Entry] | None:
    return _STAGES[type(transform).__name__](transform) if _is_torchvision(transform, *_STAGES) else None


def _random_crop(transform: Any) -> list[Entry] | None:
    size: Entry = {"size": _size(transform.size)}
    left, top, right, bottom = sides = _padding(transform)
    if transform.pad_if_needed:
        return None
    if not any(sides):
        return [{"random_crop": size}]
    fill, border = _fill(transform.fill), transform.padding_mode
    if fill is None or border == "symmetric":
        return None
    if border == "constant" and fill == 0 and left == top == right == bottom:
        return [{"random_crop": {**size, "padding": left}}]
    return [{"pad": {"padding": list(sides), "border": border, "fill": fill}}, {"random_crop": size}]


def _padding(transform: Any) -> tuple[int, int, int, int]:
    """The left, top, right and bottom padding of a RandomCrop."""
    match transform.padding:
        case None:
            return 0, 0, 0, 0
        case int(every) | [int(every)]:
            return every, every, every, every
        case [x, y]:
            return x, y, x, y
        case [left, second, third, bottom]:  # v2 keeps left, right, top, bottom
            v2 = type(transform).__module__.startswith("torchvision.transforms.v2")
            return (left, third, second, bottom) if v2 else (left, second, third, bottom)
        case other:
            raise AssertionError(other)


def _random_rotation(transform: Any) -> list[Entry] | None:
    fill, interpolation = _fill(transform.fill), getattr(transform.interpolation, "value", None)
    if transform.expand or transform.center is not None or fill is None or interpolation not in ("nearest", "bilinear"):
        return None
    return [{"rotate": {"degrees": _around(0.0, transform.degrees), "interpolation": interpolation, "fill": fill}}]


def _color_jitter(transform: Any) -> list[Entry]:
    neutral = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}
    given = {name: getattr(transform, name) for name in neutral}
    ranges = {name: _around(neutral[name], values) for name, values in given.items() if values is not None}
    return [{"color_jitter": ranges}]


def _resize(transform: Any) -> list[Entry] | None:
    resampling = _resampling(transform)
    size = [transform.size] if isinstance(transform.size, int) else transform.size
    if transform.max_size is not None or size is None or resampling is None:
        return None
    sides = {"shorter": size[0]} if len(size) == 1 else {"height": size[0], "width": size[1]}
    return [{"resize": {**sides, **resampling}}]


def _random_resized_crop(transform: Any) -> list[Entry] | None:
    resampling = _resampling(transform)
    if resampling is None:
        return None
    box = {"size": _size(transform.size), "scale": _numbers(transform.scale), "ratio": _numbers(transform.ratio)}
    return [{"random_resized_crop": {**box, **resampling}}]


def _resampling(transform: Any) -> dict[str, Any] | None:
    interpolation = getattr(transform.interpolation, "value", None)
    if interpolation not in ("nearest", "bilinear", "bicubic"):
        return None
    return {"interpolation": interpolation, "antialias": bool(transform.antialias)}


_STAGES: dict[str, Callable[[Any], list[Entry] | None]] = {
    "RandomCrop": _random_crop,
    "RandomHorizontalFlip": lambda transform: [{"flip": {"horizontal": float(transform.p)}}],
    "RandomVerticalFlip": lambda transform: [{"flip": {"vertical": float(transform.p)}}],
    "RandomGrayscale": lambda transform: [{"grayscale": {"probability": float(transform.p)}}],
    "Grayscale": lambda transform: [{"grayscale": {}}] if transform.num_output_channels == 3 else None,
    "RandomRotation": _random_rotation,
    "ColorJitter": _color_jitter,
    "Resize": _resize,
    "CenterCrop": lambda transform: [{"center_crop": {"size": _size(transform.size)}}],
    "RandomResizedCrop": _random_resized_crop,
}


def _numbers(values: Sequence[float]) -> list[float]:
    return [float(value) for value in values]


def _around(center: float, values: Sequence[float]) -> float | list[float]:
    """A range as the one number that torchvision makes it of, if there is one: fingerprints know how it is written."""
    low, high = _numbers(values)
    width = round(high - center, 9)
    lowest = -width if center == 0 else max(0.0, center - width)
    return width if (low, high) == (lowest, center + width) else [low, high]


def _size(size: int | Sequence[int]) -> int | list[int]:
    """A size, one number for a square."""
    sides = [size] if isinstance(size, int) else [int(side) for side in size]
    return sides[0] if len(set(sides)) == 1 else sides


def _fill(fill: Any) -> int | list[int] | None:
    """The level or levels of a fill; None if they are no whole numbers, or differ by type."""
    levels = list(fill) if isinstance(fill, (list, tuple)) else [0 if fill is None else fill]
    if not all(isinstance(level, (int, float)) and level == int(level) for level in levels):
        return None
    whole = [int(level) for level in levels]
    return whole[0] if len(set(whole)) == 1 else whole


def _by_torchvision(transform: Any) -> Entry | None:
    """The stage that runs a v2 transform as it is; None if it cannot be rebuilt of plain parameters."""
    from torchvision.transforms import v2

    kind = type(transform)
    if not kind.__module__.startswith("torchvision.transforms.v2") or getattr(v2, kind.__name__, None) is not kind:
        return None
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        value = getattr(transform, name, parameter.default)
        if value is not parameter.default:
            given[name] = value
    try:
        same = _attributes(kind(**given)) == _attributes(transform)
    except (TypeError, ValueError, RuntimeError):  # parameters that it keeps under other names
        return None
    parameters = {name: _plain(value) for name, value in given.items()}
    return (
        {"torchvision": {"name": kind.__name__, **parameters}} if same and _UNPLAIN not in parameters.values() else None
    )


def _attributes(transform: Any) -> dict[str, str]:
    return {name: repr(value) for name, value in vars(transform).items()}


_UNPLAIN = object()


def _plain(value: Any) -> Any:
    """A parameter as YAML has it: enumerations and data types by name."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if type(value).__name__ == "InterpolationMode":
        return value.value
    if isinstance(value, (list, tuple)):
        values = [_plain(item) for item in value]
        return _UNPLAIN if _UNPLAIN in values else values
    return value if isinstance(value, (int, float, str)) or value is None else _UNPLAIN
