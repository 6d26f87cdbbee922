"""The table of all ways, and those of other libraries: the torchvision reference, OpenCV, torchpipe's operators.

val, val@cuda           training's loader on a device
serve, serve@cuda       the serving graph on a device
torchvision             the reference: Pillow decodes, torchvision's v2 transforms of uint8 tensors run the stages
pillow                  the same transforms of PIL images, as in most training scripts
torchcodec              torchcodec decodes, and applies EXIF rotation; then torchvision's transforms of tensors
opencv                  cv2.imdecode and cv2.resize, with the same moves as the stages
torchpipe_cpu, _gpu     torchpipe's own operators, straight to the final size
torchvision@cuda        torchvision's decode_jpeg on the GPU, then its transforms there
timm:..., hf:...        the transforms of another library, by the name of their source
"""

from __future__ import annotations

import importlib.metadata
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, assert_never

import cv2
import numpy as np
import torch

from gpuflow.arrays import Array, Bytes, Ints
from gpuflow.config import Config
from gpuflow.decode.codecs import CpuDecoder, imdecode, probe
from gpuflow.decode.header import OPENCV_FLAGS
from gpuflow.decode.optional_formats import LABELS
from gpuflow.decode.preset import Preset
from gpuflow.errors import BadSampleError, is_system_fault, reason_of
from gpuflow.execute.cpu.native_chunk import run_filters, run_pointwise
from gpuflow.execute.cpu.runner import call_opaque, header_of
from gpuflow.execute.warp import OPENCV_BORDERS
from gpuflow.migration.sources import LibraryTransform, library_transform
from gpuflow.parity.images import Encoded, hostile_images
from gpuflow.parity.ways import Prefix, Result, Results, Serving, Training, Way, missing_gpu, missing_torchpipe, served
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import (
    LocalStep,
    OpaqueStep,
    PointwiseStep,
    Program,
    ResamplingStep,
    WarpStep,
    fold,
    trace,
)
from gpuflow.pipeline.views import as_batch, slot_shape

if TYPE_CHECKING:
    from PIL.Image import Image


FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM")
"""Pillow's names of the formats that gpuflow decodes."""


@dataclass(frozen=True, slots=True)
class Reference(Way):
    """Runs each stage's torchvision form in order.

    on: the input of the transforms: uint8 tensors (`tensor`) or PIL images (`pil`), both decoded by Pillow; or tensors
    that torchvision's decode_jpeg gives on the GPU (`cuda`), or that torchcodec gives (`torchcodec`).
    """

    program: Program
    on: Literal["tensor", "pil", "cuda", "torchcodec"]

    def describe(self) -> str:
        import PIL
        import torchvision
        from PIL import features

        transforms = f"torchvision {torchvision.__version__.partition('+')[0]}"
        if self.on == "cuda":
            return f"{transforms}: decode_jpeg on the GPU (nvJPEG), transforms there"
        if self.on == "torchcodec":
            return f"torchcodec {importlib.metadata.version('torchcodec')}, {transforms} on uint8 tensors"
        pillow = f"Pillow {PIL.__version__} (libjpeg-turbo {features.version('libjpeg_turbo')})"
        return f"{pillow}, {transforms} on {'uint8 tensors' if self.on == 'tensor' else 'PIL images'}"

    def missing(self) -> str | None:
        if (reason := _missing_torchcodec() if self.on == "torchcodec" else missing_gpu(self.on)) is not None:
            return reason
        if self.program.decoder.library is not None:
            return f"{self.program.decoder!r} is not torchvision's"
        for stage in self.program.pipeline.stages[1:]:
            if stage.random:
                return f"{stage!r} is random, so torchvision draws something else"
            try:
                stage.torchvision()
            except NotImplementedError:
                return f"{stage!r} names no transform of torchvision"
        return None

    def run(self, prefix: Prefix, images: Sequence[Encoded]) -> Results:
        transforms = [stage.torchvision() for stage in prefix.program.pipeline.stages[1:]]
        for data in images:
            yield _attempt("torchvision", self._image, data, prefix.program.decoder, transforms)

    def _image(self, data: Encoded, decoder: s.Decoder, transforms: Sequence[Callable[[Any], Any]]) -> torch.Tensor:
        from PIL import Image
        from torchvision.transforms.v2 import functional

        by_tensors = self.on in ("cuda", "torchcodec")
        image = _to_tensor(data, decoder, self.on) if by_tensors else _by_pillow(data, decoder)
        image = functional.pil_to_tensor(image) if self.on == "tensor" else image
        for transform in transforms:
            image = transform(image)
        image = functional.pil_to_tensor(image) if isinstance(image, Image.Image) else image
        tensor: torch.Tensor = image.as_subclass(torch.Tensor)
        return tensor


def _attempt(stage: str, make: Callable[..., torch.Tensor], *arguments: Any) -> Result:
    """Return an image that another library's code makes, which may raise anything, or the error as that of a stage."""
    with warnings.catch_warnings(action="ignore"):  # on large images, unusual palettes, filters that Pillow lacks
        try:
            return make(*arguments)
        except BadSampleError as error:
            return error
        except Exception as error:
            if is_system_fault(error):
                raise
            return BadSampleError(stage, reason_of(error))


def _by_pillow(data: Encoded, decoder: s.Decoder) -> Any:
    """Decode with Pillow to the decoder's color and orientation; only formats that gpuflow supports.

    Those that `decode.formats` names are decoded as gpuflow does: by the same libraries, and with its conventions.
    """
    from PIL import Image, ImageOps

    if (pixels := _of_named_format(data, decoder)) is not None:
        return Image.fromarray(pixels[..., 0] if decoder.color == "gray" else pixels)
    with Image.open(io.BytesIO(data.tobytes()), formats=FORMATS) as image:
        if decoder.color == "gray":
            image.draft("L", image.size)  # use a JPEG's luma channel
        if decoder.orientation == "apply":
            ImageOps.exif_transpose(image, in_place=True)
        shown: Any = image
        if decoder.background is not None and image.has_transparency_data:
            shown = Image.alpha_composite(
                Image.new("RGBA", image.size, (*decoder.background, 255)), image.convert("RGBA")
            )
        shown = shown.convert("L" if decoder.color == "gray" else "RGB")
    return Image.merge("RGB", shown.split()[::-1]) if decoder.color == "bgr" else shown


def _of_named_format(data: Encoded, decoder: s.Decoder) -> Bytes | None:
    """Return the pixels of a file of a format that `decode.formats` names; None for others, and for bad headers."""
    header = None
    if decoder.formats:
        with suppress(BadSampleError):
            header = header_of(data, decoder)
    if header is None or header.format not in LABELS:
        return None
    return CpuDecoder(decoder.color, background=decoder.background).decode(data, header)[0]


def _to_tensor(data: Encoded, decoder: s.Decoder, on: str) -> torch.Tensor:
    """Decode to uint8 [C, H, W] on the GPU, without EXIF rotation, or by torchcodec, which applies that.

    `probe` rejects images that are too large.
    """
    probe(data, max_pixels=decoder.max_pixels, max_scans=decoder.max_scans)
    encoded, mode = torch.from_numpy(data.copy()), "GRAY" if decoder.color == "gray" else "RGB"
    image: torch.Tensor
    if on == "cuda":
        from torchvision.io import decode_jpeg

        image = decode_jpeg(encoded, mode=mode, device="cuda")
    else:
        from torchcodec.decoders import decode_image

        image = decode_image(encoded, mode=mode)
    return image.flip(0) if decoder.color == "bgr" else image


def _missing_torchcodec() -> str | None:
    """Return why torchcodec's image decoders do not import; None if they do."""
    try:
        from torchcodec.decoders import decode_image  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: it does not find a library, such as CUDA's
        return f"it needs torchcodec 0.16 or newer: {reason_of(error)}; pip install 'torchcodec>=0.16'"
    return None


# --- OpenCV -----------------------------------------------------------------------------------------------------------

_FILTERS = {"nearest": cv2.INTER_NEAREST, "bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}


def _scalar(fill: tuple[float, ...]) -> tuple[float, ...]:
    """Return a fill as OpenCV takes it: with one level for each channel."""
    return fill * 4 if len(fill) == 1 else fill


@dataclass(frozen=True, slots=True)
class OpenCv(Way):
    """Decodes and resizes with OpenCV, with the moves that the stages draw. OpenCV applies EXIF rotation."""

    program: Program
    seed: int

    def describe(self) -> str:
        return f"OpenCV {cv2.__version__}: imdecode, resize, then the stages themselves"

    def missing(self) -> str | None:
        decoder = self.program.decoder
        return f"{decoder!r} decodes and resizes by itself" if decoder.library is not None else None

    def run(self, prefix: Prefix, images: Sequence[Encoded]) -> Results:
        for i, data in enumerate(images):
            yield _attempt("decode", self._image, prefix.program, data, s.Keys(self.seed, 0, np.array([i])))

    def _image(self, program: Program, data: Encoded, keys: s.Keys) -> torch.Tensor:
        image: Any = imdecode(data, OPENCV_FLAGS[program.decoder.color])
        if image is None:
            raise BadSampleError("decode", "OpenCV: no image")
        image = image.reshape(*image.shape[:2], -1)
        for step in program.steps:
            match step:
                case ResamplingStep() | WarpStep():
                    image = _resampled(image, step, keys)
                case PointwiseStep():
                    operations, planes = step.draw(keys, *_size(image)), step.after.layout == "nchw"
                    image = run_pointwise(image, operations, 0, step.table, planes=planes)
                case LocalStep():
                    image = run_filters(image, step.draw(keys), 0)
                case OpaqueStep():
                    image = call_opaque(step, np.ascontiguousarray(image), int(step.draw(keys)[0]))
                case _:
                    assert_never(step)
        slots = np.ascontiguousarray(image).reshape(1, *slot_shape(program.result))
        return as_batch(slots, program.result)[0]


def _size(image: Array) -> Ints:
    """Return height and width, an array of one number each."""
    return np.array(image.shape[:2])[:, None]


def _resampled(image: Array, step: ResamplingStep | WarpStep, keys: s.Keys) -> Array:
    """Apply what the stages of a step draw, stage by stage. Raises BadSampleError if it does not fit one."""
    faults = (misfit.fault(0) for misfit in step.draw(keys, *_size(image)).misfits)
    if (fault := next(filter(None, faults), None)) is not None:
        raise fault
    for stage, occurrence in zip(step.stages, step.occurrences, strict=True):
        for move in stage.draw(keys.stage(stage.key_name, occurrence), *_size(image)):
            moved = _moved(image, move)
            image = moved.reshape(*moved.shape[:2], -1)  # OpenCV drops a single channel
    return image


def _moved(image: Array, move: s.Move) -> Array:
    """Apply one move to one image [H, W, C] with OpenCV. The result of one channel may be [H, W]."""
    match move:
        case s.Resize():
            size = int(move.width[0]), int(move.height[0])
            return cv2.resize(image, size, interpolation=_FILTERS[move.interpolation])
        case s.Flip():
            return image[:: -1 if move.vertical[0] else 1, :: -1 if move.horizontal[0] else 1]
        case s.Crop():
            y, x, height, width = (int(side[0]) for side in (move.y, move.x, move.height, move.width))
            margin = move.margin
            padded = cv2.copyMakeBorder(image, margin, margin, margin, margin, cv2.BORDER_CONSTANT)
            return padded[y + margin : y + margin + height, x + margin : x + margin + width]
        case s.Pad():
            top, bottom, left, right = (int(side[0]) for side in (move.top, move.bottom, move.left, move.right))
            kind, fill = OPENCV_BORDERS[move.border], _scalar(move.fill)
            return cv2.copyMakeBorder(image, top, bottom, left, right, kind, value=fill)
        case s.Warp():
            if move.active is not None and not move.active[0]:
                return image
            half = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])  # OpenCV's coordinates are indices of pixels
            return cv2.warpPerspective(
                image,
                np.linalg.inv(half) @ move.matrix[0] @ half,
                (int(move.width[0]), int(move.height[0])),
                flags=_FILTERS[move.interpolation] | cv2.WARP_INVERSE_MAP,
                borderMode=OPENCV_BORDERS[move.border],
                borderValue=_scalar(move.fill),
            )
        case _:
            assert_never(move)


# --- torchpipe --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TorchpipeOperators(Way):
    """Runs torchpipe's own operators straight to the final size, then the last stages that a model can contain.

    The operators support neither crops nor sizes that keep the aspect ratio, so they stretch images.
    """

    config: Config
    program: Program
    preset: Literal["torchpipe_cpu", "torchpipe_gpu"]

    def _head(self) -> Preset:
        height, width, _ = self.program.result.shape
        if isinstance(self.program.decoder, Preset):
            return replace(self.program.decoder, name=self.preset)
        assert height is not None and width is not None
        color: Any = self.program.decoder.color
        return Preset(name=self.preset, height=height, width=width, color=color)

    def describe(self) -> str:
        head = self._head()
        version = importlib.metadata.version("torchpipe")
        return f"torchpipe {version}: {head.operators} straight to {head.height}x{head.width}, without crops"

    def missing(self) -> str | None:
        if self.program.decoder.color == "gray":
            return "torchpipe's operators give no gray images"
        if self.program.decoder == self._head():
            return "the pipeline itself begins with it"
        return missing_torchpipe(preset=True) or missing_gpu(self._head().device)

    def refuses(self, prefix: Prefix) -> str | None:
        return None if prefix.is_of(self.program) else "its operators have no such stages"

    def run(self, prefix: Prefix, images: Sequence[Encoded]) -> Results:
        head, stages = self._head(), self.program.pipeline.stages
        first = len(stages)
        while first > 1 and head.refuses(stages[first - 1], serving=True) is None:
            first -= 1
        pipeline = s.Pipeline(self.preset, (head, *stages[first:]))
        program = fold(pipeline, trace(pipeline))
        yield from served(self.config, program, head.device, images)


# --- the transforms of another library --------------------------------------------------------------------------------

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
    """Return True if a way's name is a source of another library.

    Examples:
        >>> is_library("timm:resnet50.a1_in1k"), is_library("val@cuda")
        (True, False)
    """
    return ":" in way


def libraries_of(names: Sequence[str], program: Program) -> Mapping[str, Library]:
    """Return the ways among these names that are another library's, and other implementations of the same transforms.

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
class Library(Way):
    """Decodes by Pillow, and runs another library's transforms on the whole image.

    It shows the decoded images, and the final results. Where these differ, the library is given the image without one
    known cause of a difference after the other, until they agree.
    """

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
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and not torch.equal(first, second):
            return "it draws random numbers; name the transforms of validation"
        random = next((stage for stage in self.program.pipeline.stages if stage.random), None)
        return f"{random!r} is random, so the library draws something else" if random is not None else None

    def refuses(self, prefix: Prefix) -> str | None:
        possible = prefix.is_of(self.program) or prefix.count == 1
        return None if possible else "the library's transforms run as a whole"

    def run(self, prefix: Prefix, images: Sequence[Encoded]) -> Results:
        if not prefix.is_of(self.program):
            yield from Reference(self.program, "tensor").run(prefix, images)
            return
        for data in images:
            yield self._result(data)

    def causes(self, prefix: Prefix, data: Encoded) -> Iterator[tuple[str, Result | None]]:
        from PIL import Image

        opened = _opened(data)
        cause = _cause_of(opened, converts=self.transform.converts)
        if prefix.count < len(self.program.pipeline.stages):
            yield cause, None
            return
        run, given, decoder = self.transform.run, self._given(opened), self.program.decoder
        yield _ROWS_FIRST, _attempt("library", run, _rows_first(given))
        pixels, _ = CpuDecoder(decoder.color, background=decoder.background).decode(data, header_of(data, decoder))
        decoded = Image.fromarray(pixels.squeeze())
        yield cause, _attempt("library", run, decoded)
        yield f"{cause}; and {_ROWS_FIRST}", _attempt("library", run, _rows_first(decoded))
        yield _UNKNOWN, None

    def _given(self, image: Image) -> Image:
        """Return what the library is given of an opened image."""
        with warnings.catch_warnings(action="ignore"):
            return image if self.transform.converts else image.convert("RGB")

    def _result(self, data: Encoded) -> Result:
        return _attempt("library", lambda: self.transform.run(self._given(_opened(data))))


def _opened(data: Encoded) -> Image:
    from PIL import Image

    with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data.tobytes()), formats=FORMATS) as image:
        image.load()
        return image


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


# --- all ways ---------------------------------------------------------------------------------------------------------

NAIVE = ("pillow", "torchcodec", "opencv", "torchpipe_cpu", "torchpipe_gpu", "torchvision@cuda")
"""Ways that are often mixed between training and serving without a check that they agree."""


def ways_of(config: Config, name: str) -> Mapping[str, Way]:
    """Return all ways to run a pipeline of a configuration, by name."""
    program = config.programs[name]
    return {
        "val": Training(config, name, "cpu"),
        "serve": Serving(config, name, "cpu"),
        "val@cuda": Training(config, name, "cuda"),
        "serve@cuda": Serving(config, name, "cuda"),
        "torchvision": Reference(program, "tensor"),
        "pillow": Reference(program, "pil"),
        "torchcodec": Reference(program, "torchcodec"),
        "opencv": OpenCv(program, config.source.seed),
        "torchpipe_cpu": TorchpipeOperators(config, program, "torchpipe_cpu"),
        "torchpipe_gpu": TorchpipeOperators(config, program, "torchpipe_gpu"),
        "torchvision@cuda": Reference(program, "cuda"),
    }
