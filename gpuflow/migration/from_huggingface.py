"""Reads preprocessor_config.json of Hugging Face's image processors. transformers is not needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

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
    Keys,
    decode,
    entry_of,
    filter_keys,
    normalize,
    of_length,
    read_document,
    size_of,
)

_Size = int | dict[str, Any]
_Statistics = Annotated[
    float | tuple[float, ...],
    AfterValidator(lambda value: (value,) * 3 if isinstance(value, float | int) else value),
    of_length("three numbers", 3),
]
_HALF = 0.5, 0.5, 0.5
_CLIP = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "do_convert_rgb": True,
}
_IMAGENET = {"image_mean": IMAGENET_MEAN, "image_std": IMAGENET_STD}
_EIGHT_BITS = 1 / 255


def _square(side: int) -> dict[str, Any]:
    return {"height": side, "width": side}


class Processor(Keys):
    """Holds the keys of an image processor, by default those of BeitImageProcessor. resample: Pillow's number."""

    do_resize: bool = True
    size: _Size = _square(224)
    resample: Annotated[int, Field(ge=0, le=5)] | None = 3
    default_to_square: bool = True
    use_square_size: bool = False
    keep_aspect_ratio: bool = False
    ensure_multiple_of: PositiveInt = 1
    crop_pct: PositiveFloat | None = None
    do_center_crop: bool = False
    crop_size: _Size = 224
    do_pad: bool = False
    pad_size: _Size | None = None
    do_rescale: bool = True
    rescale_factor: PositiveFloat | None = _EIGHT_BITS
    do_normalize: bool = True
    image_mean: _Statistics | None = _HALF
    image_std: _Statistics | None = _HALF
    do_convert_rgb: bool = False


_BILINEAR = 2
_SHORTER = {"do_center_crop": True, "default_to_square": False}
_OF_CLIP = {"size": {"shortest_edge": 224}, **_SHORTER, **_CLIP}
_MOBILENET = {"size": {"shortest_edge": 256}, **_SHORTER, "resample": _BILINEAR}
PROCESSORS: Mapping[str, Mapping[str, Any]] = {
    "BeitImageProcessor": {},
    "BitImageProcessor": _OF_CLIP,
    "BlipImageProcessor": {"size": _square(384), **_CLIP},
    "ChineseCLIPImageProcessor": _OF_CLIP,
    "CLIPImageProcessor": _OF_CLIP,
    "ConvNextImageProcessor": {"size": {"shortest_edge": 384}, "default_to_square": False, "crop_pct": 224 / 256},
    "DeiTImageProcessor": {"size": _square(256), "do_center_crop": True},
    "DPTImageProcessor": {"size": _square(384)},
    "LayoutLMv3ImageProcessor": {"resample": _BILINEAR},
    "MobileNetV1ImageProcessor": _MOBILENET,
    "MobileNetV2ImageProcessor": _MOBILENET,
    "PvtImageProcessor": _IMAGENET,
    "RTDetrImageProcessor": {
        "size": _square(640),
        "resample": _BILINEAR,
        **_IMAGENET,
        "default_to_square": False,
        "do_normalize": False,
    },
    "SegformerImageProcessor": {"size": _square(512), "resample": _BILINEAR, **_IMAGENET},
    "SiglipImageProcessor": {"default_to_square": False, "do_convert_rgb": True},
    "ViTImageProcessor": {"resample": _BILINEAR},
}
"""The classes that only resize, crop at the centre, rescale and normalize, with the keys that a file may leave out."""
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
    problems = list(document.unknown((), document.data, (*Processor.model_fields, *_IGNORED), "an image processor"))
    defaults = _class_of(document)
    if isinstance(defaults, Problem):
        problems.append(defaults)
        defaults = PROCESSORS["ViTImageProcessor"]
    given = {**defaults}
    for key, value in document.data.items():
        if value is not None or key in _NEVER_NULL:
            given[key] = value
        elif key.startswith("do_"):  # a switch that is null is off, as in transformers
            given[key] = False
    file = _File(document, document.parsed(Processor, given), is_convnext="crop_pct" in defaults)
    converts = file.keys.do_convert_rgb
    parts = list(_parts(file))
    entries = [decode(background=[255, 255, 255] if converts else None)]
    entries += [part for part in parts if isinstance(part, Entry)]
    problems += [part for part in parts if isinstance(part, Problem)]
    matches = f"{_MATCHES}{_CONVERTS if converts else _TAKES_RGB}"
    return Imported(source=f"hf:{name}", matches=(matches,), pipelines={"val": entries}, gaps=tuple(problems))


def _class_of(document: Document) -> Mapping[str, Any] | Problem:
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


@dataclass(frozen=True, slots=True)
class _File:
    """Holds a file, its keys with the defaults of its class, and whether that is ConvNextImageProcessor."""

    document: Document
    keys: Processor
    is_convnext: bool

    def used(self, key: str) -> Any:
        """Return the value of a key that must not be null where it is used."""
        if (value := getattr(self.keys, key)) is None:
            raise self.document.error("must not be null", key, action="write a value, or leave the key out")
        return value

    def crop(self, key: str) -> Entry:
        """Return the crop of the size that a key has."""
        match value := getattr(self.keys, key):
            case int(side):
                return _crop(side, side)
            case {"height": int(height), "width": int(width)}:
                return _crop(height, width)
        raise self.document.error("must be a number, or height and width", key, value=value)

    def gap(self, key: str, rule: str, nearest: str, measured: str = "") -> Problem:
        """Return the gap of a key that is not carried over as it is."""
        return self.document.gap(rule, key, nearest=nearest, apart=measured)


_Parts = Iterator[Entry | Problem]
"""The stages of an image processor after decode, in their order, and the gaps that they leave."""


def _parts(file: _File) -> _Parts:
    keys = file.keys
    if keys.do_resize:
        yield from _resize(file)
    if keys.do_center_crop:
        yield file.crop("crop_size")
    if keys.do_pad:
        rule = "pads at the bottom and right, to pad_size or the batch's largest image"
        if keys.pad_size is None:
            yield file.gap("do_pad", rule, "leave it out: images of one size need no padding")
        else:
            crop = file.crop("pad_size")
            nearest = f"center_crop: {{size: {crop.parameters['size']}}}, which centres them on black"
            yield file.gap("do_pad", rule, nearest)
            yield crop
    # (pixel * factor - mean) / std, in units of 0 to 1
    factor = file.used("rescale_factor") if keys.do_rescale else 1.0
    unit = _EIGHT_BITS / factor
    if keys.do_normalize:
        mean, std = (np.multiply(file.used(key), unit).tolist() for key in ("image_mean", "image_std"))
        yield normalize(mean, std)
    elif factor != 1:
        yield normalize(std=[unit] * 3)


def _resize(file: _File) -> _Parts:
    keys = file.keys
    filters, problems = _filters(file)
    yield from problems
    size, multiple = keys.size, keys.ensure_multiple_of
    if keys.keep_aspect_ratio:
        yield file.gap("keep_aspect_ratio", "resizes by one scale to about this size", "resize, to exactly this size")
    edges = [size] if isinstance(size, int) else size.values()
    if any(isinstance(side, int) and side % multiple for side in edges):
        yield file.gap("ensure_multiple_of", f"rounds sides to multiples of {multiple}", "resize, without rounding")
    if keys.use_square_size:
        rule = "makes images square, of the side that the class has without 'size'"
        yield file.gap("use_square_size", rule, "resize")
    if isinstance(size, int):
        size = _square(size) if keys.default_to_square else {"shortest_edge": size}
    sides = {key: value for key, value in size.items() if value is not None}
    match sides:
        case {"shortest_edge": int(side), **rest} if file.is_convnext and not rest:
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
            raise file.document.error(rule, "size", value=size)


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
    share = file.used("crop_pct")
    yield entry_of("resize", f"{side} / crop_pct {share:g}", shorter=int(side / share), **filters)
    yield _crop(side, side)


def _filters(file: _File) -> tuple[dict[str, Any], list[Problem]]:
    """Return the key `interpolation`, unless it is the default, and the gap of a filter that `resize` does not have."""
    name = PILLOW_FILTERS[file.used("resample")]
    keys = filter_keys(name)
    if name in FILTERS:
        return keys, []
    rule = f"is {name}, which the stage resize does not have"
    if name == "lanczos":
        rule += "; the fast processor takes bicubic itself with torchvision below 0.27"
    return keys, [file.gap("resample", rule, f"interpolation: {keys.get('interpolation', 'bilinear')}")]


def _crop(height: int, width: int) -> Entry:
    return entry_of("center_crop", size=size_of([height, width]), rounding="down")
