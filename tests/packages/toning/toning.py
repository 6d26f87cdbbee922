"""A package that adds stages and a source, as pip would install it next to gpuflow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuflow.spec import (
    Allocate,
    Bounds,
    ImageSpec,
    Opaque,
    Operations,
    Payload,
    Pointwise,
    SourceError,
    SourceSpec,
    StageKeys,
    lay_out,
    require_pixels,
)

__all__ = ["MaskBlue", "NpzImages", "Tone", "open_npz"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Tone(Pointwise):
    """Raise levels to a power that is drawn for each sample, another one for each channel, then mix channels.

    Args:
        power: the range of the power.
    """

    stage_name = "tone"

    power: Annotated[tuple[float, float], Bounds(above=0, ascending=True)] = (0.5, 2.0)

    @property
    def random(self) -> bool:
        return True

    def output(self, spec: ImageSpec) -> ImageSpec:
        require_pixels(self, spec)
        return spec

    def draw(self, keys: StageKeys) -> NDArray[np.float64]:
        low, high = self.power
        return low + keys.uniform(4) * (high - low)

    def operations(self, coefficients: NDArray[np.float64], height: Any, width: Any) -> Operations:
        count = len(coefficients)
        curves = (np.arange(256) / 255) ** coefficients[:, :3, None] * 255
        matrices = np.zeros((count, 3, 4))
        matrices[:, range(3), range(3)] = 0.9
        matrices[:, range(3), (1, 2, 0)] = 0.1 * coefficients[:, 3:]
        every = np.ones(count, bool)
        parts = Operations.table(every, np.rint(curves).astype(np.uint8)), Operations.matrix(every, matrices)
        return Operations.join(count, parts)


@dataclass(frozen=True, kw_only=True, repr=False)
class MaskBlue(Opaque):
    """Set the last channel to 0, on the CPU alone."""

    stage_name = "mask_blue"
    on_gpu = moves_pixels = False

    def apply(self, image: torch.Tensor, seed: int) -> torch.Tensor:
        masked = image.clone()
        masked[-1] = 0
        return masked


class NpzImages:
    """Encoded images in memory, from one .npz file. One without bytes cannot be read."""

    shard_sizes, storage = None, None

    def __init__(self, file: str, images: Sequence[bytes], labels: NDArray[np.int64], classes: tuple[str, ...]) -> None:
        self.labels, self.classes = labels, classes
        self._file, self._images = file, images

    def __len__(self) -> int:
        return len(self._images)

    def path(self, index: int) -> str:
        return f"{self._file}/{index}"

    def read(self, indices: Sequence[int], allocate: Allocate) -> Payload:
        images = [self._images[index] for index in indices]
        sizes = [len(image) for image in images]
        offsets, size = lay_out(sizes)
        buffer = allocate(size)
        for offset, image in zip(offsets, images, strict=True):
            buffer[offset : offset + len(image)] = np.frombuffer(image, np.uint8)
        errors = [None if image else "has no bytes" for image in images]
        return Payload(buffer=buffer, offsets=offsets, sizes=sizes, errors=errors)

    def close(self) -> None:
        pass


def open_npz(value: Any, spec: SourceSpec) -> NpzImages:
    """`npz_images: FILE`: the images `0`, `1`, ... as bytes, and their labels as `labels`."""
    if not isinstance(value, str):
        raise SourceError(f"npz_images must be the path of an .npz file, got {value!r}")
    with np.load(Path(value).expanduser()) as file:
        labels = file["labels"].astype(np.int64)
        images = [file[str(i)].tobytes() for i in range(len(labels))]
    if not isinstance(spec.classes, tuple):
        raise SourceError("npz_images needs the key classes: the names of its labels")
    return NpzImages(value, images, labels, spec.classes)
