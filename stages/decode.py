"""decode: decodes bytes to a uint8 image. Detects the format by content, not extension: JPEG, PNG, WebP, BMP, PNM.

Others, which it decodes if `formats` names them, are those of `gpuflow/decode/optional_formats.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from gpuflow.pipeline.stage import Bounds, Decoder, ImageSpec, stage_class


@stage_class
class Decode(Decoder):
    """Decode a JPEG, PNG, WebP, BMP or PNM to an image of 8 bits a channel. The first stage of each pipeline.

    Args:
        color: the order of the channels, or `gray` for one channel of luma. CMYK and gray files are converted.
        backend: `auto` decodes on the GPU if it can, and on the CPU otherwise.
        cpu_share: the fraction of each batch that the CPU decodes while the GPU decodes the rest. While the GPU waits
            for batches, it adapts until both need the same time; `run.deterministic` keeps it fixed.
        orientation: `apply` rotates the image as its EXIF tag says; `ignore` does not, like PIL and torchvision. By
            default it is ignored, too, and images with boxes, masks or keypoints that EXIF data turn are counted.
        max_pixels: images with more pixels are bad samples; the header is checked before anything is decoded.
        max_scans: JPEGs with more scans are bad samples, because each scan may take as long as a whole image.
        background: the color [red, green, blue] under transparent pixels; without it alpha is ignored.
        formats: which other formats to decode, too; `pip install 'gpuflow[formats]'`. They are off by default because
            each is one more library that reads what strangers send. Of GIF, TIFF and animated WebP, the first image.
    """

    stage_name = "decode"
    tolerance = 1.0
    where_fields = ("backend", "cpu_share", "max_scans")
    late_fields = ("background", "formats")
    other_names = ("DecodeImage", "LoadImage")

    color: Literal["rgb", "bgr", "gray"] = "rgb"
    backend: Literal["auto", "cpu", "gpu"] = "auto"
    cpu_share: Annotated[float, Bounds(least=0, most=1)] = 0.0
    orientation: Literal["ignore", "apply"] | None = None
    max_pixels: Annotated[int, Bounds(least=1, limit=10**12)] = 179_000_000
    max_scans: Annotated[int, Bounds(least=1, limit=100_000)] = 100
    background: Annotated[tuple[int, int, int], Bounds(least=0, most=255)] | None = None
    formats: tuple[Literal["tiff", "gif", "avif", "heic", "jxl", "jp2", "png16", "webp_animated"], ...] = ()

    @classmethod
    def examples(cls) -> tuple[Decode, ...]:
        return (
            cls(),
            cls(color="bgr"),
            cls(color="gray", backend="cpu"),
            cls(orientation="apply", cpu_share=0.5, max_pixels=10**6, max_scans=50),
            cls(background=(255, 0, 9)),
            cls(formats=("png16",)),
        )

    def faults(self) -> Iterator[tuple[str, str]]:
        if twice := {name for name in self.formats if self.formats.count(name) > 1}:
            yield "formats", f"must name each format once, and names {sorted(twice)[0]!r} twice"

    def params(self) -> dict[str, Any]:
        return super().params() | {"orientation": self.orientation or "ignore"}

    def output(self, spec: ImageSpec) -> ImageSpec:
        if spec.layout != "encoded":
            raise ValueError(f"takes encoded bytes but gets {spec}")
        return ImageSpec(shape=(None, None, 1 if self.color == "gray" else 3), color=self.color, device=spec.device)

    def torchvision(self) -> None:
        return None
