"""The transforms that `gpuflow.wrap` is given: torchvision's, and those of torchpipe's training integration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

from gpuflow.arrays import Bytes
from gpuflow.errors import ConfigError, Problem
from gpuflow.migration.from_torchvision import read_transform
from gpuflow.pipeline.stage import Stage


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

    def __call__(self, image: Bytes) -> Bytes:
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
    """The stages that transforms stand for, as they stand in YAML. resize: the `cv2_resize` that they begin with."""

    entries: tuple[Mapping[str, Any], ...]
    resize: Cv2Resize | None


def stages_of(transforms: Any, name: str, place: str, table: Mapping[str, type[Stage]], *, tensor: bool) -> Found:
    """The stages that transforms stand for.

    Args:
        transforms: a Compose of torchvision, a list or one transform.
        tensor: whether they get tensors, not PIL images.
        name, place: the argument that it was given as, and where that is, for problems.
        table: the vocabulary.

    Raises:
        ConfigError: every transform that no stage equals.
    """
    parts = _parts(transforms)
    listed = [transforms] if parts is None else parts
    first = listed[0] if listed and isinstance(listed[0], Cv2Resize) else None
    rule, action = "must be the first transform, because the file decodes and resizes", "move it to the front"
    problems = [
        Problem(place, rule, action=action, path=(name, i), code="config.conflict")
        for i, transform in enumerate(listed)
        if i and isinstance(transform, Cv2Resize)
    ]
    known = [v1.ToPILImage() if isinstance(one, Cv2Resize) else _known(one) for one in listed]
    whole = v1.Compose(known)
    found = read_transform(whole, f"{place} {name}", table, tensor=tensor)
    if problems := [*problems, *found.gaps]:
        raise ConfigError(problems)
    [(_, *entries)] = found.pipelines.values()  # without decode
    return Found(entries=tuple(entry.as_yaml for entry in entries), resize=first)


def _parts(transform: Any) -> list[Any] | None:
    """The transforms that a Compose of v1 or v2, a list or a Sequential holds; None for a single one."""
    if isinstance(transform, (v1.Compose, v2.Compose)):
        return list(transform.transforms)
    return list(transform) if isinstance(transform, (list, tuple, torch.nn.Sequential)) else None


def _known(transform: Any) -> Any:
    """The same with the ToTensor of torchvision.transforms in place of TensorToTensor and of that of v2, which leaves
    tensors as they are: gpuflow.wrap's images were no tensors where these transforms come from."""
    if isinstance(transform, (TensorToTensor, v2.ToTensor)):
        return v1.ToTensor()
    parts = _parts(transform)
    return transform if parts is None else v1.Compose(list(map(_known, parts)))
