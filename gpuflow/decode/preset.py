"""torchpipe's own operators as the head of a pipeline, for those who must match an old deployment.

They decode and resize to a fixed size. Their pixels are their own: no antialiasing, JPEGs turned by EXIF on the CPU but
not on the GPU, chroma upsampled another way on the GPU. A pipeline's own stages differ from them by up to 128 levels.

A served model has them from torchpipe. Training on the CPU has the same pixels from OpenCV, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeGuard

import cv2
import numpy as np
from numpy.typing import NDArray

from gpuflow.decode.codecs import MAX_SCANS, check_scans, imdecode, probe
from gpuflow.decode.libjpeg_turbo import find_libjpeg_turbo
from gpuflow.errors import BadSampleError
from gpuflow.pipeline import stage as s

__all__ = ["CANNOT_DECODE", "DAMAGED", "Preset", "is_preset_on_gpu"]

CANNOT_DECODE = "the data is damaged, or of a format or size that torchpipe does not decode"
"""The reason where torchpipe's operators, or OpenCV in their place, refuse the bytes."""
DAMAGED = "the data is damaged; what torchpipe's decoder on the GPU makes of it would depend on other images"

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
    max_scans: ClassVar[int] = MAX_SCANS  # type: ignore[misc]

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
        self.check(data)
        image = imdecode(data, cv2.IMREAD_COLOR)
        if image is None:
            raise BadSampleError(self.stage_name, CANNOT_DECODE)
        resized = np.asarray(cv2.resize(image, (self.width, self.height)), np.uint8)
        if self.color == "rgb":
            cv2.cvtColor(resized, cv2.COLOR_BGR2RGB, dst=resized)
        return resized

    def check(self, data: NDArray[np.uint8]) -> None:
        """What is checked before torchpipe's operators, or OpenCV in their place, get encoded bytes [n].

        Before its decoder on the GPU also a JPEG's header, size and end, which OpenCV looks at by itself, and whether
        libjpeg-turbo, where it is installed, decodes it without a complaint: what that decoder makes of a damaged JPEG
        depends on what it decoded before.

        Raises:
            BadSampleError: they do not decode these bytes, or would need too much time or memory for them.
        """
        if len(data) == 0:
            raise BadSampleError(self.stage_name, "empty: the file has no bytes")
        for at, mark, form in _UNKNOWN:
            if data[at : at + len(mark)].tobytes() == mark:
                raise BadSampleError(self.stage_name, f"{form} is not supported: torchpipe does not decode it")
        check_scans(data)
        if self.device == "cuda" and data[:2].tobytes() == b"\xff\xd8":
            header, library = probe(data, max_pixels=self.max_pixels), find_libjpeg_turbo()
            if library is not None and header.channels in (1, 3) and not library.accepts(data, header.size):
                raise BadSampleError(self.stage_name, DAMAGED)

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


def is_preset_on_gpu(decoder: s.Decoder) -> TypeGuard[Preset]:
    """Whether it runs on a GPU or nowhere."""
    return isinstance(decoder, Preset) and decoder.device == "cuda"
