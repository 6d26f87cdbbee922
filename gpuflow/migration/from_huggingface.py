"""Reads preprocessor_config.json of Hugging Face's image processors. transformers is not needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuflow.errors import Problem
from gpuflow.migration.imported import (
    FILTERS,
    IMAGENET_MEAN,
    IMAGENET_STD,
    PILLOW_13,
    PILLOW_FILTERS,
    Document,
    Entry,
    Imported,
    decode,
    entry_of,
    filter_keys,
    normalize,
    read_document,
    size_of,
)

_Statistics = tuple[tuple[float, ...], tuple[float, ...]]
_HALF: _Statistics = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_IMAGENET: _Statistics = IMAGENET_MEAN, IMAGENET_STD
_BILINEAR, _BICUBIC = 2, 3
"""Pillow's numbers of these filters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Processor:
    """Holds the defaults of a class of image processors, for keys that a file leaves out.

    statistics: the mean and the standard deviation. square: a size that is one number is that of a square. convert: it
    converts images to RGB.
    """

    size: Mapping[str, int] = field(default_factory=lambda: _square(224))
    resample: int = _BICUBIC
    statistics: _Statistics = _HALF
    crop: Mapping[str, int] | None = None
    square: bool = True
    crop_pct: float | None = None
    convert: bool = False
    normalizes: bool = True


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


_224 = _square(224)
_MOBILENET = Processor(size={"shortest_edge": 256}, resample=_BILINEAR, crop=_224, square=False)
_OF_CLIP = Processor(size={"shortest_edge": 224}, statistics=_CLIP, crop=_224, square=False, convert=True)
PROCESSORS = {
    "BeitImageProcessor": Processor(),
    "BitImageProcessor": _OF_CLIP,
    "BlipImageProcessor": Processor(size=_square(384), statistics=_CLIP, convert=True),
    "ChineseCLIPImageProcessor": _OF_CLIP,
    "CLIPImageProcessor": _OF_CLIP,
    "ConvNextImageProcessor": Processor(size={"shortest_edge": 384}, square=False, crop_pct=224 / 256),
    "DeiTImageProcessor": Processor(size=_square(256), crop=_224),
    "DPTImageProcessor": Processor(size=_square(384)),
    "LayoutLMv3ImageProcessor": Processor(resample=_BILINEAR),
    "MobileNetV1ImageProcessor": _MOBILENET,
    "MobileNetV2ImageProcessor": _MOBILENET,
    "PvtImageProcessor": Processor(statistics=_IMAGENET),
    "RTDetrImageProcessor": Processor(
        size=_square(640),
        resample=_BILINEAR,
        statistics=_IMAGENET,
        square=False,
        normalizes=False,
    ),
    "SegformerImageProcessor": Processor(size=_square(512), resample=_BILINEAR, statistics=_IMAGENET),
    "SiglipImageProcessor": Processor(square=False, convert=True),
    "ViTImageProcessor": Processor(resample=_BILINEAR),
}
"""The classes that only resize, crop at the centre, rescale and normalize."""
_KEYS = (
    *("do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor", "do_normalize"),
    *("image_mean", "image_std", "do_pad", "pad_size", "crop_pct", "default_to_square"),
    *("use_square_size", "do_convert_rgb", "keep_aspect_ratio", "ensure_multiple_of"),
)
_IGNORED = (
    *("image_processor_type", "feature_extractor_type", "processor_class", "data_format", "device"),
    *("do_reduce_labels", "reduce_labels", "format", "do_convert_annotations", "size_divisor"),
    *("apply_ocr", "ocr_lang", "tesseract_config"),
    *("input_data_format", "return_tensors", "disable_grouping", "_valid_processor_keys", "auto_map", "backend"),
    *("image_seq_length", "_commit_hash", "transformers_version"),
)
"""Keys that change no pixel of an RGB image."""
_MATCHES = (
    "Matches the fast image processor (transformers' torchvision backend, its default), which resizes uint8 tensors: "
    "the levels are equal. The slow one (use_fast=False, backend='pil') resizes by Pillow, within 1 level for bilinear "
    f"filters and 2 for bicubic ones. {PILLOW_13} "
)
_CONVERTS = (
    "It gets what Image.open(path) gives. do_convert_rgb is set: transformers from 5.21 on puts transparent pixels on "
    "white, as decode.background does here. Remove that key if you convert images by Image.convert('RGB') before, or "
    "for older versions: both keep the colors of transparent pixels."
)
_TAKES_RGB = (
    "do_convert_rgb is not set: it refuses images that are not RGB, so give it Image.open(path).convert('RGB'), which "
    "keeps the colors of transparent pixels, as here. gpuflow converts gray, CMYK and palettes itself."
)
_NEVER_NULL = ("resample", "rescale_factor", "image_mean", "image_std")
"""Keys that transformers refuses to work with where they are null and used."""
_EIGHT_BITS = 1 / 255


def processor_document(name: str) -> Document:
    """Read preprocessor_config.json. name: its folder, or the file.

    Raises:
        ConfigError: there is no such file.
    """
    path = Path(name)
    return read_document(str(path / "preprocessor_config.json" if path.is_dir() else path))


def read_huggingface(name: str) -> Imported:
    """Return the stages of an image processor.

    Args:
        name: the folder of preprocessor_config.json, or the file.

    Raises:
        ConfigError: there is no such file, or a value is none that these processors take.

    Examples:
        >>> Path("x.json").write_text('{"image_processor_type": "ViTImageProcessor"}')
        45
        >>> [entry.as_yaml for entry in read_huggingface("x.json").pipelines["val"]][:2]
        [{'decode': {'color': 'rgb'}}, {'resize': {'height': 224, 'width': 224}}]
    """
    document = processor_document(name)
    problems = list(document.unknown((), document.data, (*_KEYS, *_IGNORED), "an image processor"))
    processor = _class_of(document)
    if isinstance(processor, Problem):
        problems.append(processor)
        processor = PROCESSORS["ViTImageProcessor"]
    file = _File(document=document, processor=processor)
    converts = bool(file.get("do_convert_rgb", processor.convert))
    parts = list(_parts(file))
    entries = [decode(background=[255, 255, 255] if converts else None)]
    entries += [part for part in parts if isinstance(part, Entry)]
    problems += [part for part in parts if isinstance(part, Problem)]
    matches = f"{_MATCHES}{_CONVERTS if converts else _TAKES_RGB}"
    return Imported(source=f"hf:{name}", matches=(matches,), pipelines={"val": entries}, gaps=tuple(problems))


def _class_of(document: Document) -> Processor | Problem:
    """Return the defaults of the file's class; the gap of a class that is not known."""
    key = "image_processor_type" if document.data.get("image_processor_type") else "feature_extractor_type"
    name = document.data.get(key)
    if not isinstance(name, str):
        action = "write down the class that you load it with, such as image_processor_type: ViTImageProcessor"
        raise document.error("needs the key 'image_processor_type'", action=action)
    cut = name.removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    if cut in PROCESSORS:
        return PROCESSORS[cut]
    rule = f"is {name}, which may do more than resize, crop and normalize; known: {', '.join(PROCESSORS)}"
    return document.gap(rule, key, nearest="the stages of ViTImageProcessor with these keys")


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """Reads the values of a file, and the defaults of its class for keys that it leaves out."""

    document: Document
    processor: Processor

    def get(self, key: str, default: Any) -> Any:
        """Return the value of a key, or the class's default. A switch that is null is off, as in transformers."""
        keys = self.document.data
        value = keys.get(key)
        if value is not None:
            return value
        if key in keys and key in _NEVER_NULL:
            raise self.document.error("must not be null", key, action="write a value, or leave the key out")
        return False if key in keys and key.startswith("do_") else default

    def positive(self, key: str, default: float | None) -> float:
        """Return the value of a key, which must be a number above 0."""
        value = self.get(key, default)
        if not isinstance(value, (int, float)) or not value > 0:
            raise self.document.error("must be a number above 0", key, value=value)
        return float(value)

    def numbers(self, key: str, default: tuple[float, ...]) -> list[float]:
        """Return the value of a key, one number for each channel. A single number counts for all three."""
        value = self.get(key, default)
        value = [value] * 3 if isinstance(value, (int, float)) else list(value)
        if len(value) != 3 or not all(isinstance(x, (int, float)) for x in value):
            raise self.document.error("must be three numbers", key, value=value)
        return value

    def crop(self, key: str, value: Any) -> Entry:
        """Return the crop of the size that a key has."""
        match value:
            case int(side):
                return _crop(side, side)
            case {"height": int(height), "width": int(width)}:
                return _crop(height, width)
            case _:
                raise self.document.error("must be a number, or height and width", key, value=value)

    def gap(self, key: str, rule: str, nearest: str, measured: str = "") -> Problem:
        """Return the gap of a key that is not carried over as it is."""
        return self.document.gap(rule, key, nearest=nearest, apart=measured)


_Parts = Iterator[Entry | Problem]
"""The stages of an image processor after decode, in their order, and the gaps that they leave."""


def _parts(file: _File) -> _Parts:
    if file.get("do_resize", True):
        yield from _resize(file)
    if file.get("do_center_crop", file.processor.crop is not None):
        yield file.crop("crop_size", file.get("crop_size", file.processor.crop or _224))
    if file.get("do_pad", False):
        yield from _pad(file)
    yield from _scale(file)


def _pad(file: _File) -> _Parts:
    """Yield the crop of a size that is padded to, which centres smaller images on black."""
    rule = "pads at the bottom and right, to pad_size or the batch's largest image"
    if (size := file.get("pad_size", None)) is None:
        yield file.gap("do_pad", rule, "leave it out: images of one size need no padding")
        return
    crop = file.crop("pad_size", size)
    yield file.gap("do_pad", rule, f"center_crop: {{size: {crop.parameters['size']}}}, which centres them on black")
    yield crop


def _resize(file: _File) -> _Parts:
    processor = file.processor
    filters, problems = _filters(file)
    yield from problems
    size = file.get("size", processor.size)
    if file.get("keep_aspect_ratio", False):
        yield file.gap("keep_aspect_ratio", "resizes by one scale to about this size", "resize, to exactly this size")
    multiple = file.positive("ensure_multiple_of", 1)
    edges = size.values() if isinstance(size, Mapping) else [size]
    if any(isinstance(side, int) and side % multiple for side in edges):
        yield file.gap("ensure_multiple_of", f"rounds sides to multiples of {multiple:g}", "resize, without rounding")
    if file.get("use_square_size", False):
        yield file.gap(
            "use_square_size", "makes images square, of the side that the class has without 'size'", "resize"
        )
    if isinstance(size, int):
        size = _square(size) if file.get("default_to_square", processor.square) else {"shortest_edge": size}
    if not isinstance(size, Mapping):
        raise file.document.error("must be a number or a mapping", "size", value=size)
    sides = {key: value for key, value in size.items() if value is not None}
    match sides:
        case {"shortest_edge": int(side), **rest} if processor.crop_pct is not None and not rest:
            yield from _convnext(file, side, filters)
        case {"height": int(height), "width": int(width), **rest} if not rest:
            yield entry_of("resize", height=height, width=width, **filters)
        case {"shortest_edge": int(side), **rest} if set(rest) <= {"longest_edge"}:
            yield from _limited(file, side, rest.get("longest_edge"), filters)
        case {"longest_edge": int(side), **rest} if not rest:
            yield file.gap("size", "limits the longer side, by rules of the class", f"resize: {{longer: {side}}}")
            yield entry_of("resize", longer=side, **filters)
        case {"max_height": int(height), "max_width": int(width), **rest} if not rest:
            longer = max(height, width)
            yield file.gap("size", "fits images into a box", f"resize: {{longer: {longer}}}", "up to one pixel apart")
            yield entry_of("resize", longer=longer, **filters)
        case _:
            rule = "must give whole numbers: height and width, or shortest_edge, or max_height and max_width"
            raise file.document.error(rule, "size", value=dict(size))


def _limited(file: _File, side: int, most: Any, filters: Mapping[str, Any]) -> _Parts:
    """Yield the resize of a shorter side to `side`, or to less where the longer one would be more than `most`.

    There the processors round the shorter side to the nearest number, and `resize` rounds it down. They also leave
    an image as it is if its shorter side has that length already.
    """
    keys = {"shorter": side}
    if most is not None:
        if not isinstance(most, int):
            raise file.document.error("must be a whole number", "size", "longest_edge", value=most)
        keys = {"shorter": side, "max_size": most} if most > side else {"longer": most}
        shown = ", ".join(f"{key}: {value}" for key, value in keys.items())
        rule = "limits both sides, and rounds the shorter one to the nearest number where the longer one is too long"
        yield file.gap("size", rule, f"resize: {{{shown}}}", "of what is resized, sides are at most one pixel apart")
    yield Entry("resize", {**keys, **filters})


def _convnext(file: _File, side: int, filters: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield a resize and a crop below 384 pixels, and a resize to a square from there on."""
    if side >= 384:
        yield Entry("resize", {**_square(side), **filters})
        return
    share = file.positive("crop_pct", file.processor.crop_pct)
    yield entry_of("resize", f"{side} / crop_pct {share:g}", shorter=int(side / share), **filters)
    yield _crop(side, side)


def _filters(file: _File) -> tuple[dict[str, Any], list[Problem]]:
    """Return the key `interpolation`, unless it is the default, and the gap of a filter that `resize` does not have."""
    resample = file.get("resample", file.processor.resample)
    if type(resample) is not int or resample not in range(len(PILLOW_FILTERS)):
        raise file.document.error("must be a filter of Pillow, 0 to 5", "resample", value=resample)
    name = PILLOW_FILTERS[resample]
    keys = filter_keys(name)
    if name in FILTERS:
        return keys, []
    rule = f"is {name}, which the stage resize does not have"
    if name == "lanczos":
        rule += "; the fast processor takes bicubic itself with torchvision below 0.27"
    return keys, [file.gap("resample", rule, f"interpolation: {keys.get('interpolation', 'bilinear')}")]


def _scale(file: _File) -> Iterator[Entry]:
    """Yield the rescaling and normalization (pixel * factor - mean) / std, in units of 0 to 1."""
    factor = file.positive("rescale_factor", _EIGHT_BITS) if file.get("do_rescale", True) else 1.0
    unit = _EIGHT_BITS / factor
    if file.get("do_normalize", file.processor.normalizes):
        given = zip(("image_mean", "image_std"), file.processor.statistics, strict=True)
        mean, std = (file.numbers(key, default) for key, default in given)
        yield normalize([x * unit for x in mean], [x * unit for x in std])
    elif factor != 1:
        yield normalize(std=[unit] * 3)


def _crop(height: int, width: int) -> Entry:
    return entry_of("center_crop", size=size_of([height, width]), rounding="down")
