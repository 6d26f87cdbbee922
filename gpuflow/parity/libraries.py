"""The transforms of another library as a way: Pillow opens each image, and they run on it as a whole.

Where the results differ, the image is given to them with one known cause of a difference taken away, until they agree.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from gpuflow.decode.codecs import CpuDecoder
from gpuflow.errors import BadSampleError, is_system_fault, reason_of
from gpuflow.execute.cpu import header_of
from gpuflow.migration.library_transforms import LibraryTransform, library_transform
from gpuflow.parity.base import Result, Results
from gpuflow.parity.images import Encoded, hostile_images
from gpuflow.parity.others import FORMATS, Reference
from gpuflow.parity.prefixes import Prefix
from gpuflow.pipeline.program import Program

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Library", "is_library", "libraries_of"]

_ROWS_FIRST = (
    "Pillow 13 resizes the columns of a tall image before its rows, and rounds and clamps between; torchvision and "
    "gpuflow begin with the rows; give the library tensors, install pillow<13, or allow this by --tolerance"
)
_TRANSPARENT = (
    "transparent pixels: Image.convert('RGB') keeps their colors, as decode does; transformers from 5.21 on puts them "
    "on white where do_convert_rgb is set, which is decode: {background: [255, 255, 255]}; write what the library does"
)
_CMYK = (
    "CMYK, which Pillow converts to RGB by another formula than decode; convert such files to RGB, or allow this by "
    "--tolerance"
)
_OTHER_MODE = "the library gets an image of mode {}, not of RGB; give it Image.open(path).convert('RGB')"
_DECODED = "Pillow decodes the file to other pixels than decode; the versions below say which decoders these are"
_UNKNOWN = (
    "neither decoding nor the order of Pillow's passes: the stages differ from the library's transforms; compare their "
    "parameters, or import them again"
)


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

    def causes(self, prefix: Prefix, data: Encoded) -> Iterator[tuple[str, Result | None]]:
        """Yield what may make the results for an image differ, and the library's result without that.

        None stands for a cause that no result needs to prove, and for the last one, an unknown cause.
        """
        from PIL import Image

        opened = _opened(data)
        cause = _cause_of(opened, converts=self.transform.converts)
        if prefix.count < len(self.program.pipeline.stages):
            yield cause, None
            return
        given, decoder = self._given(opened), self.program.decoder
        yield _ROWS_FIRST, self._run(_rows_first(given))
        pixels, _ = CpuDecoder(decoder.color, background=decoder.background).decode(data, header_of(data, decoder))
        decoded = Image.fromarray(pixels.squeeze())
        yield cause, self._run(decoded)
        yield f"{cause}; and {_ROWS_FIRST}", self._run(_rows_first(decoded))
        yield _UNKNOWN, None

    def _given(self, image: Image) -> Image:
        """Return what the library is given of an opened image."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return image if self.transform.converts else image.convert("RGB")

    def _result(self, data: Encoded) -> Result:
        try:
            image = self._given(_opened(data))
        except Exception as error:  # Pillow's parsers raise anything
            return _bad(error)
        return self._run(image)

    def _run(self, image: Image) -> Result:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return self.transform.run(image)
            except Exception as error:  # the library's code raises anything
                return _bad(error)


def _opened(data: Encoded) -> Image:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data.tobytes()), formats=FORMATS) as image:
            image.load()
            return image


def _bad(error: Exception) -> BadSampleError:
    if is_system_fault(error):
        raise error
    return BadSampleError("library", reason_of(error))


def _cause_of(image: Image, *, converts: bool) -> str:
    """Return what is special about a file's pixels where they are converted to RGB."""
    if image.has_transparency_data:
        return _TRANSPARENT
    if image.mode == "CMYK":
        return _CMYK
    return _OTHER_MODE.format(image.mode) if converts and image.mode != "RGB" else _DECODED


def _rows_first(image: Image) -> Image:
    """Return the image with a `resize` that resizes rows before columns, in any version of Pillow."""
    from PIL import Image

    class RowsFirst(Image.Image):
        def _new(self, core: Any) -> Any:
            made = super()._new(core)
            made.__class__ = RowsFirst
            return made

        def resize(self, size: Any, resample: Any = None, box: Any = None, reducing_gap: Any = None) -> Any:
            if box is not None or reducing_gap is not None:
                return super().resize(size, resample, box, reducing_gap)
            rows = super().resize((size[0], self.height), resample)
            return Image.Image.resize(rows, size, resample)

    copy = image.copy()
    copy.__class__ = RowsFirst
    return copy


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a == b).all())
