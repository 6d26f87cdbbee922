"""The transforms of another library as a way: each image is opened by Pillow and goes through them as a whole."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gpuflow.errors import BadSampleError, is_system_fault, reason_of
from gpuflow.migration.library_transforms import LibraryTransform, library_transform
from gpuflow.parity.base import Result, Results
from gpuflow.parity.images import Encoded, hostile_images
from gpuflow.parity.others import FORMATS, Reference
from gpuflow.parity.prefixes import Prefix
from gpuflow.pipeline.program import Program

__all__ = ["Library", "is_library", "libraries_of"]


def is_library(way: str) -> bool:
    """Whether a way's name is a source of another library, such as `timm:resnet50.a1_in1k`."""
    return ":" in way


def libraries_of(names: Sequence[str], program: Program) -> Mapping[str, Library]:
    """The ways among these names that are another library's, and other implementations of the same transforms.

    Raises:
        ConfigError: there is no such source. MissingLibrary: its library is not installed.
    """
    found = {}
    for name in filter(is_library, names):
        transform = library_transform(name)
        found[name] = Library(program, transform)
        if transform.other is not None:
            found[f"{name}, {transform.other[0]}"] = Library(program, transform.other[1])
    return found


@dataclass(frozen=True, slots=True)
class Library:
    """Decodes by Pillow, and runs another library's transforms. It shows the decoded images, and the final results."""

    program: Program
    transform: LibraryTransform

    def describe(self) -> str:
        return f"{Reference(self.program, 'pil').describe().partition(',')[0]}, {self.transform.about}"

    def missing(self) -> str | None:
        pictures = [image.data for image in hostile_images() if image.kind == "hostile"]
        results = (self._result(picture) for picture in pictures)
        first = next(results)
        if isinstance(first, BadSampleError) and all(isinstance(result, BadSampleError) for result in results):
            return f"it fails on every image of gpuflow's own: {first.reason}"
        second = self._result(pictures[0])
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and not _same(first, second):
            return "it draws random numbers; name the transforms of validation"
        random = next((stage for stage in self.program.pipeline.stages if stage.random), None)
        return f"{random!r} is random, so the library draws something else" if random is not None else None

    def refuses(self, prefix: Prefix) -> str | None:
        whole = prefix.program.pipeline.stages == self.program.pipeline.stages
        return None if whole or prefix.count == 1 else "the library's transforms run as a whole"

    def run(self, prefix: Prefix, images: Sequence[Encoded]) -> Results:
        if prefix.program.pipeline.stages != self.program.pipeline.stages:
            yield from Reference(self.program, "tensor").run(prefix, images)
            return
        for data in images:
            yield self._result(data)

    def _result(self, data: Encoded) -> Result:
        from PIL import Image

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with Image.open(io.BytesIO(data.tobytes()), formats=FORMATS) as image:
                    rgb = image.convert("RGB")
                rgb.info.pop("transparency", None)  # by which transformers would put these pixels on white
                return self.transform.run(rgb)
            except Exception as error:  # Pillow's parsers and the library's code raise anything
                if is_system_fault(error):
                    raise
                return BadSampleError("library", reason_of(error))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all())
