"""The spec of an image (shape, dtype, layout) at one place in a pipeline, and its memory layout in a batch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gpuflow.arrays import Array

if TYPE_CHECKING:
    import torch


Dtype = Literal["uint8", "float16", "bfloat16", "float32"]

Layout = Literal["encoded", "hwc", "nchw", "nhwc"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSpec:
    """The form of an image at one place in a pipeline.

    shape: (height, width, channels), in this order for every layout; None for a side that varies between samples.
    color: the meaning of the channels: `rgb`, `bgr` or `gray`.
    layout: `encoded` (bytes), `hwc` (rows of pixels), `nchw` (planes) or `nhwc` (planes in channels_last memory).
    shorter: length in pixels of the shorter side, if it is known although the shape is not.
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
        """Whether all samples have the same shape, so that a batch can hold them."""
        return self.layout != "encoded" and None not in self.shape

    def replace(self, **changes: Any) -> ImageSpec:
        """A copy with these fields changed. A changed shape resets `shorter` unless that is given too."""
        if "shape" in changes:
            changes.setdefault("shorter", None)
        return dataclasses.replace(self, **changes)


ENCODED = ImageSpec(shape=(None, None, 0), layout="encoded")
"""The spec of the encoded bytes that a source delivers and a pipeline starts from."""

STORAGE = {"uint8": np.uint8, "float32": np.float32, "float16": np.uint16, "bfloat16": np.uint16}
"""The numpy dtype that stores each dtype; 16-bit floats are stored as their bits."""


def slot_shape(spec: ImageSpec) -> tuple[int, int, int]:
    """The shape of one image in a batch's memory: [C, H, W] for `nchw`; [H, W, C] for `nhwc` and `hwc`."""
    height, width, channels = spec.shape
    assert height is not None and width is not None
    return (channels, height, width) if spec.layout == "nchw" else (height, width, channels)


def as_batch(slots: Array, spec: ImageSpec) -> torch.Tensor:
    """View slots [N, *slot_shape] as a tensor with axes N, C, H, W that shares memory; channels_last unless `nchw`."""
    import torch

    tensor = torch.from_numpy(slots)
    if tensor.dtype == torch.uint16:
        tensor = tensor.view(getattr(torch, spec.dtype))
    return tensor if spec.layout == "nchw" else tensor.permute(0, 3, 1, 2)
