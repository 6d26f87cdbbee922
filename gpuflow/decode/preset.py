"""Presets: torchpipe's own decode and resize operators at the start of a pipeline, to match an existing deployment.

They decode and resize to a fixed size. Their pixels differ from those of gpuflow's stages by up to 128 levels: they do
not antialias, rotate JPEGs by EXIF on the CPU but not on the GPU, and upsample chroma differently on the GPU.

A served model runs them in torchpipe. Training on the CPU gets the same pixels from OpenCV, bit for bit.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Literal

import cv2
import numpy as np

from gpuflow.arrays import Bytes
from gpuflow.decode.codecs import MAX_SCANS, check_animation, check_scans, format_of, imdecode, probe
from gpuflow.decode.header import UNSUPPORTED, require_memory
from gpuflow.decode.libjpeg_turbo import find_libjpeg_turbo
from gpuflow.errors import BadSampleError
from gpuflow.pipeline import stage as s

CANNOT_DECODE = "the data is damaged, or of a format or size that torchpipe does not decode"
"""The reason of a bad sample that torchpipe's operators, or OpenCV in their place, cannot decode."""
DAMAGED = "the data is damaged; the pixels of torchpipe's GPU decoder would depend on images decoded before"

_FORMATS = ("jpeg", "png", "bmp")
"""The formats that torchpipe's operators get. Its build of OpenCV has decoders for others, which nothing checks."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Preset(s.Decoder):
    """Decode to an image of height x width with torchpipe's operators.

    name: `torchpipe_cpu` (DecodeMat, ResizeMat, CvtColorMat) gives uint8; `torchpipe_gpu` (DecodeTensor, ResizeTensor,
    CvtColorTensor; DecodeMat for files that DecodeTensor refuses) gives float32 levels of 0-255 that are not rounded.
    """

    stage_name: ClassVar[str] = "preset"
    backend: ClassVar[str] = "auto"  # type: ignore[misc]
    cpu_share: ClassVar[float] = 0.0  # type: ignore[misc]
    orientation: ClassVar[str] = "apply"  # type: ignore[misc]
    max_pixels: ClassVar[int] = 1 << 30  # type: ignore[misc]
    max_scans: ClassVar[int] = MAX_SCANS  # type: ignore[misc]
    background: ClassVar[None] = None  # type: ignore[misc]
    formats: ClassVar[tuple[str, ...]] = ("png16",)  # type: ignore[misc]
    at_head: ClassVar[bool] = True

    name: Literal["torchpipe_cpu", "torchpipe_gpu"]
    height: int
    width: int
    color: Literal["rgb", "bgr"] = "rgb"

    @property
    def device(self) -> str:
        """Return the device that its operators run on: `cpu` or `cuda`."""
        return "cpu" if self.name == "torchpipe_cpu" else "cuda"

    @property
    def needs_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def operators(self) -> str:
        """Return the names of torchpipe's operators in their order, as the backend of a node."""
        if self.needs_gpu:
            return "S[DecodeTensor,(or)S[DecodeMat,Mat2Tensor],ResizeTensor,CvtColorTensor,SyncTensor]"
        return "S[DecodeMat,ResizeMat,CvtColorMat,Mat2Tensor]"

    @property
    def operator_parameters(self) -> dict[str, str]:
        """Return the parameters that all operators of the node share."""
        return {
            "device": self.device,
            "color": self.color,
            "resize_h": str(self.height),
            "resize_w": str(self.width),
        }

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        return spec.replace(shape=(self.height, self.width, 3), layout="hwc", color=self.color)

    @property
    def library(self) -> str:
        if self.name == "torchpipe_cpu":
            return f"OpenCV {cv2.__version__}, whole images, as torchpipe's DecodeMat and ResizeMat"
        return "torchpipe's DecodeTensor and ResizeTensor"

    def decode(self, data: Bytes) -> Bytes:
        """Decode as `torchpipe_cpu` does: DecodeMat is OpenCV's imdecode, which applies EXIF rotation; ResizeMat is
        OpenCV's bilinear resize."""
        assert self.name == "torchpipe_cpu", "the GPU operators run only in torchpipe"
        self.check(data)
        image = imdecode(data, cv2.IMREAD_COLOR)
        if image is None:
            with suppress(BadSampleError):  # torchpipe's operators take files that gpuflow's decoders would not
                require_memory(probe(data, max_pixels=self.max_pixels))
            raise BadSampleError(self.stage_name, CANNOT_DECODE)
        resized = np.asarray(cv2.resize(image, (self.width, self.height)), np.uint8)
        if self.color == "rgb":
            cv2.cvtColor(resized, cv2.COLOR_BGR2RGB, dst=resized)
        return resized

    def check(self, data: Bytes) -> None:
        """Check encoded bytes [n] before torchpipe's operators, or OpenCV in their place, decode them.

        For the GPU decoder, this also checks a JPEG's header, size and end marker, which OpenCV checks itself, and that
        libjpeg-turbo, if there is one, decodes the JPEG without an error or a warning: the GPU decoder's pixels for a
        damaged JPEG depend on images that it decoded before.

        Raises:
            BadSampleError: the operators cannot decode these bytes, or would need too much time or memory.
        """
        if len(data) == 0:
            raise BadSampleError(self.stage_name, "empty: the file has no bytes")
        name, label = format_of(data.data)
        if name not in _FORMATS:
            reason = f"{label} is not supported: a preset decodes JPEG, PNG and BMP" if label else CANNOT_DECODE
            raise BadSampleError(self.stage_name, reason, UNSUPPORTED if label else "sample.bad")
        check_animation(data)
        if name != "jpeg":
            return
        check_scans(data.data)
        if self.needs_gpu:
            header, library = probe(data, max_pixels=self.max_pixels), find_libjpeg_turbo()
            if library is not None and header.channels in (1, 3) and not library.accepts(data, header.size):
                require_memory(header)
                raise BadSampleError(self.stage_name, DAMAGED)

    def refuses(self, stage: s.Stage, *, serving: bool) -> str | None:
        """Return a text that says why a stage cannot follow this preset; None if it can.

        In serving, images pass through torchpipe's graph in batches, where only modules run. In training on a GPU, the
        images come from that graph. Crops and flips may still follow there: they give the same pixels before and after
        pointwise modules.
        """
        if isinstance(stage, s.Decoder) and stage.background is not None:
            return "has a background, but torchpipe's operators in the preset before it ignore alpha; remove the preset"
        if isinstance(stage, s.Decoder) and stage.formats:
            return "names formats, but torchpipe's operators in the preset before it decode; remove the preset"
        if serving:
            has_module = stage.module() is not None
            return None if has_module else "cannot follow a preset, after which only stages such as normalize may come"
        selects_pixels = isinstance(stage, s.Geometry) and not stage.resizes and not stage.pads and stage.warps is None
        has_module = isinstance(stage, s.Pointwise) and stage.module() is not None
        if not self.needs_gpu or selects_pixels or has_module or isinstance(stage, s.Mixing):
            return None
        allowed = "flips, crops that do not pad, normalize and mixing stages"
        return f"cannot follow {self.name}, after which only {allowed} may come"
