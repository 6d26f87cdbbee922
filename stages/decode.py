"""decode: encoded bytes to a uint8 image. Format by content, not by extension: JPEG, PNG, WebP, BMP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from gpuflow.pipeline.stage import Decoder, ImageSpec

__all__ = ["Decode"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Decode(Decoder):
    """Decode one image.

    color: order of the channels, or one channel of luma (`gray`). CMYK and gray files are converted.
    backend: `auto` takes the GPU's engines where there are some and the CPU elsewhere.
    cpu_share: part of each batch that the CPU decodes beside the GPU, 0 to 1. While the GPU waits for batches, it goes
        to where both need the same time; `run.deterministic` keeps it where it is.
    orientation: `apply` turns the image as its EXIF tag says, `ignore` leaves it as stored (as PIL and torchvision do).
    max_pixels: larger images are bad samples; checked in the header, before anything is decoded.
    max_scans: JPEGs of more scans are bad samples: each scan may take as long as a whole image.
    """

    stage_name: ClassVar[str] = "decode"
    tolerance: ClassVar[float] = 1.0
    where_fields: ClassVar[tuple[str, ...]] = ("backend", "cpu_share", "max_scans")

    color: Literal["rgb", "bgr", "gray"] = "rgb"
    backend: Literal["auto", "cpu", "gpu"] = "auto"
    cpu_share: float = 0.0
    orientation: Literal["ignore", "apply"] = "ignore"
    max_pixels: int = 179_000_000
    max_scans: int = 100

    def faults(self) -> Iterator[tuple[str, str]]:
        if not 0 <= self.cpu_share <= 1:
            yield "cpu_share", f"must be within [0, 1], got {self.cpu_share}"
        if self.max_pixels < 1:
            yield "max_pixels", f"must be >= 1, got {self.max_pixels}"
        if self.max_scans < 1:
            yield "max_scans", f"must be >= 1, got {self.max_scans}"

    def output(self, spec: ImageSpec) -> ImageSpec:
        if spec.layout != "encoded":
            raise ValueError(f"takes encoded bytes but gets {spec}")
        return ImageSpec(shape=(None, None, 1 if self.color == "gray" else 3), color=self.color, device=spec.device)

    def torchvision(self) -> None:
        return None
