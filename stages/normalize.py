"""normalize: uint8 pixels to (x / 255 - mean) / std, in the dtype and memory layout that the model needs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from gpuflow.arrays import Array
from gpuflow.errors import Problem
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import IMAGENET

if TYPE_CHECKING:
    import torch


_LARGEST = 10.0
"""A larger mean or standard deviation is in units of 0 to 255."""


@s.stage_class
class Normalize(s.Pointwise):
    """Normalize each channel: (pixel / 255 - mean) / std.

    A uint8 pixel has 256 values, so each channel needs one table of 256 results: one pass gives the same bits as
    torchvision's ToDtype and Normalize. 16-bit floats are handled as their bits.

    Args:
        mean: one number for each channel, in units of 0 to 1, or `imagenet`.
        std: one number for each channel, in units of 0 to 1, or `imagenet`.
        dtype: the data type of the result; it is computed in float32 and then rounded.
        layout: `nchw`, or `nhwc` for channels_last memory; the tensor's axes are N, C, H, W in both.

    Examples:
        >>> Normalize(mean=(0.5,), std=(0.5,)).table()[:, [0, 255]].tolist()
        [[-1.0, 1.0]]
    """

    stage_name = "normalize"
    tolerance = 0.0
    other_names = (
        "ToTensor",
        "ToImage",
        "ToDtype",
        "ToFloat",
        "PILToTensor",
        "ConvertImageDtype",
    )

    mean: Literal["imagenet"] | Annotated[tuple[float, ...], s.Bounds(limit=1000)] = "imagenet"
    std: Literal["imagenet"] | Annotated[tuple[float, ...], s.Bounds(least=1e-6, limit=1000)] = "imagenet"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    layout: Literal["nchw", "nhwc"] = "nchw"

    @classmethod
    def examples(cls) -> tuple[Normalize, ...]:
        return (
            cls(),
            cls(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), dtype="bfloat16", layout="nhwc"),
            cls(dtype="float16"),
            cls(layout="nhwc"),
        )

    def _values(self, field: str) -> tuple[float, ...]:
        value = getattr(self, field)
        return IMAGENET[field] if value == "imagenet" else value

    def faults(self) -> Iterator[Problem | tuple[Any, ...]]:
        if (count := len(self._values("std"))) != len(self._values("mean")):
            yield Problem.of("std", "must have as many values as mean", count, code="config.conflict")
        elif not count:
            yield "std", "must have at least one value", self.std
        for field in ("mean", "std"):
            if any(abs(value) > _LARGEST for value in self._values(field)):
                yield field, "must be in units of 0 to 1", getattr(self, field), "divide it by 255"

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        if spec.dtype != "uint8":
            raise ValueError(f"takes uint8 pixels but gets {spec.dtype}; remove the stage that makes them")
        s.require_decoded(self, spec)
        channels = spec.shape[2]
        if len(self._values("mean")) != channels:
            raise ValueError(
                f"has {len(self._values('mean'))} values of mean but gets {channels} channel(s); give {channels}"
            )
        if spec.color == "bgr" and "imagenet" in (self.mean, self.std):
            raise ValueError("knows imagenet in the order rgb but gets bgr images; give the numbers")
        return spec.replace(dtype=self.dtype, layout=self.layout)

    def torchvision(self) -> Any:
        import torch
        from torchvision.transforms import v2

        normalize = v2.Normalize(list(self._values("mean")), list(self._values("std")))
        steps = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), normalize]
        return v2.Compose([*steps, v2.ToDtype(getattr(torch, self.dtype))] if self.dtype != "float32" else steps)

    def module(self) -> torch.nn.Module:
        """Return a part of a model: uint8 [N, C, H, W] on any device to the dtype, bit for bit equal on a CPU."""
        import torch

        from gpuflow.stages.torch_parts import NormalizeModule

        return NormalizeModule(self._values("mean"), self._values("std"), getattr(torch, self.dtype))

    def table(self) -> Array:
        """Return [C, 256] results, one row per channel: float32, or the bits of 16-bit floats as uint16."""
        return _table(self._values("mean"), self._values("std"), self.dtype)


@lru_cache(maxsize=64)
def _table(mean: tuple[float, ...], std: tuple[float, ...], dtype: str) -> Array:
    levels = np.arange(256, dtype=np.float32) * np.float32(1 / 255)
    means, deviations = (np.array(values, np.float32)[:, None] for values in (mean, std))
    table = (levels - means) / deviations
    if dtype == "float32":
        return table
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return table.astype(np.float16).view(np.uint16)
    bits = table.view(np.uint32)  # bfloat16 is the upper half of float32, rounded to the nearest, ties to even
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
