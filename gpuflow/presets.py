"""torchpipe's own operators as the head of a pipeline, for those who must match an old deployment.

They decode and resize to a fixed size. Their pixels are their own: no antialiasing, JPEGs turned by EXIF on the CPU but
not on the GPU, chroma upsampled another way on the GPU. A pipeline's own stages differ from them by up to 128 levels.

A served model has them from torchpipe. Training on the CPU has the same pixels from OpenCV, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeGuard

import cv2
import numpy as np
from numpy.typing import NDArray

from gpuflow import spec as s
from gpuflow.codecs import probe
from gpuflow.errors import BadSampleError

__all__ = ["Preset", "check_jpeg", "is_preset_on_gpu"]

_UNKNOWN = ((8, b"WEBP", "WebP"), (4, b"ftyp", "AVIF"))
"""What torchpipe's build of OpenCV does not decode: (offset, four bytes there, name)."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Preset(s.Decoder):
    """Encoded bytes to an image of height x width.

    name: `torchpipe_cpu` (DecodeMat, ResizeMat, CvtColorMat) gives uint8; `torchpipe_gpu` (DecodeTensor, ResizeTensor,
    CvtColorTensor; DecodeMat where DecodeTensor refuses) gives float32 levels of 0-255 that are not rounded.
    """

    stage_name: ClassVar[str] = "preset"
    backend: ClassVar[str] = "auto"  # type: ignore[misc]
    cpu_share: ClassVar[float] = 0.0  # type: ignore[misc]
    orientation: ClassVar[str] = "apply"  # type: ignore[misc]
    max_pixels: ClassVar[int] = 1 << 30  # type: ignore[misc]

    name: Literal["torchpipe_cpu", "torchpipe_gpu"]
    height: int
    width: int
    color: Literal["rgb", "bgr"] = "rgb"

    @property
    def device(self) -> str:
        """Where its operators run: `cpu` or `cuda`."""
        return "cpu" if self.name == "torchpipe_cpu" else "cuda"

    def output(self, spec: s.ImageSpec) -> s.ImageSpec:
        return spec.replace(shape=(self.height, self.width, 3), layout="hwc", color=self.color)

    @property
    def library(self) -> str:
        if self.name == "torchpipe_cpu":
            return f"OpenCV {cv2.__version__}, whole images, as torchpipe's DecodeMat and ResizeMat"
        return "torchpipe's DecodeTensor and ResizeTensor"

    def decode(self, data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """As `torchpipe_cpu`: DecodeMat is OpenCV's imdecode, which turns by EXIF; ResizeMat its bilinear resize."""
        assert self.name == "torchpipe_cpu", "the GPU's operators run in torchpipe alone"
        if len(data) == 0:
            raise BadSampleError(self.stage_name, "empty: the file has no bytes")
        for at, mark, form in _UNKNOWN:
            if data[at : at + len(mark)].tobytes() == mark:
                raise BadSampleError(self.stage_name, f"{form} is not supported: torchpipe does not decode it")
        try:
            image: Any = cv2.imdecode(data, cv2.IMREAD_COLOR)
        except cv2.error as error:
            raise BadSampleError(self.stage_name, f"OpenCV refuses it: {error.err}") from error
        if image is None:
            raise BadSampleError(self.stage_name, "OpenCV cannot decode it")
        resized: NDArray[np.uint8] = cv2.resize(image, (self.width, self.height))
        if self.color == "rgb":
            cv2.cvtColor(resized, cv2.COLOR_BGR2RGB, dst=resized)
        return resized

    def refuses(self, stage: s.Stage, *, serving: bool) -> str | None:
        """Why a stage cannot follow, in words; None where it can.

        What is served passes through torchpipe's graph in batches, where modules run. What is trained on a GPU comes
        out of that graph; then pixels may still be picked, which pointwise modules before do not mind.
        """
        if serving:
            known = stage.module() is not None
            return None if known else "cannot follow a preset, after which only stages such as normalize may come"
        picks = isinstance(stage, s.Geometry) and not stage.resizes and not stage.pads
        maps = isinstance(stage, s.Pointwise) and stage.module() is not None
        if self.device == "cpu" or picks or maps:
            return None
        return f"cannot follow {self.name}, after which only flips, crops that do not pad and normalize may come"

    def operators(self) -> str:
        """torchpipe's operators in their order. All of a node's operators share its parameters."""
        if self.name == "torchpipe_cpu":
            return "S[DecodeMat,ResizeMat,CvtColorMat,Mat2Tensor]"
        return "S[DecodeTensor,(or)S[DecodeMat,Mat2Tensor],ResizeTensor,CvtColorTensor,SyncTensor]"

    def parameters(self) -> dict[str, str]:
        """What the operators are told: torchpipe knows strings only."""
        size = {"resize_h": str(self.height), "resize_w": str(self.width)}
        return {"device": self.device, "color": self.color, **size}


def check_jpeg(data: bytes) -> None:
    """Before torchpipe's decoder on the GPU sees it, a JPEG's header, size and end; OpenCV looks at those of the rest.

    Raises BadSampleError for one that is damaged, cut short or has more than 2 ** 30 pixels, OpenCV's limit.
    """
    if data.startswith(b"\xff\xd8"):
        probe(np.frombuffer(data, np.uint8), max_pixels=Preset.max_pixels)


def is_preset_on_gpu(decoder: s.Decoder) -> TypeGuard[Preset]:
    """Whether it runs on a GPU or nowhere."""
    return isinstance(decoder, Preset) and decoder.device == "cuda"
