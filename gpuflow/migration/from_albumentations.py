"""Reads Albumentations' serialised pipelines: JSON or YAML of `A.save` or `A.to_dict`. Albumentations is not needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cv2
import numpy as np

from gpuflow.errors import Key, Problem
from gpuflow.execute.warp import OPENCV_BORDERS
from gpuflow.migration.distance import apart, picture
from gpuflow.migration.files import Document, read_document
from gpuflow.migration.imported import Entry, Imported, decode, each_channel, gap, normalize, number, size_of

__all__ = ["read_albumentations"]

_MATCHES = (
    "Matches Albumentations on RGB images of uint8: OpenCV's resize does not antialias, and is within 1 level of this "
    "for bilinear filters; for bicubic ones it is further apart at hard edges: up to 11 levels were measured on "
    "photographs, and 41 on a dithered picture."
)
_HUE = (
    "Albumentations turns hues in steps of two degrees, in OpenCV's HSV of 8 bits: up to 11 levels apart for random "
    "colors, one on average."
)
_BORDER = (
    "Pixels at the border of a rotated image are blended with the fill as torchvision does it: up to 64 levels apart."
)
_RANDOM = "Random transforms have the same ranges and probabilities; their draws are others."
_TARGETS = (
    "What Albumentations does with boxes, masks and keypoints (bbox_params, keypoint_params, fill_mask) is not carried "
    "over: pipelines.NAME.targets says which boxes are kept, and the key fill of a mask in source.fields which level "
    "its padding has."
)
_COMMON = ("__class_fullname__", "p", "always_apply", "mask_interpolation", "fill_mask")
_LINEAR, _AREA = cv2.INTER_LINEAR, cv2.INTER_AREA
_FILTERS = {cv2.INTER_NEAREST: "nearest", _LINEAR: "bilinear", cv2.INTER_CUBIC: "bicubic"}
_TOP = 255
"""The highest level."""
_MOVABLE = ("center_crop", "flip", "random_crop")
"""Stages whose results are pixels of the image, so that they may stand before `normalize`."""
_CONTAINERS = ("Compose", "Sequential")
_LIKE = {
    "RandomBrightnessContrast": "color_jitter, which multiplies where this adds",
    "HueSaturationValue": "color_jitter, which multiplies where this adds",
    "ShiftScaleRotate": "affine, which has no probability",
    "Affine": "affine, which has no probability",
    "SafeRotate": "rotate, which keeps the size",
    "Perspective": "perspective",
    "CoarseDropout": "random_erasing, which fills one box",
    "Erasing": "random_erasing",
    "Blur": "gaussian_blur",
    "MotionBlur": "gaussian_blur",
    "MedianBlur": "gaussian_blur",
    "GaussianBlur": "gaussian_blur, which takes one kernel_size",
    "Sharpen": "sharpness",
    "PadIfNeeded": "letterbox, which resizes too",
    "OneOf": "the first of its transforms",
    "SomeOf": "its transforms, for every image",
    "CLAHE": "equalize",
}


def read_albumentations(path: str) -> Imported:
    """The stages of a serialised pipeline.

    Raises:
        ConfigError: there is no such file, or it holds none.
    """
    document = read_document(path)
    transform = document.data.get("transform")
    if not isinstance(transform, dict) or "__class_fullname__" not in transform:
        rule = "must hold what Albumentations' A.to_dict gives: transform with __class_fullname__"
        raise document.error(rule, action=f"write it with A.save(transform, {path!r})")
    reader = _Reader(document)
    reader.add(transform, ("transform",))
    notes = ((_BORDER, reader.blends), (_HUE, reader.turns_hues), (_TARGETS, reader.targets), (_RANDOM, reader.random))
    return Imported(
        source=f"albumentations:{path}",
        matches=(_MATCHES, *(note for note, holds in notes if holds)),
        pipelines={"train" if reader.random else "val": (decode(), *reader.entries)},
        gaps=tuple(reader.gaps),
    )


class _Reader:
    """Goes through the transforms in order.

    _floats_from: the index of the entry `normalize`, which makes floats; None before there is one. _mean, _std: of that
    entry, in units of 255 levels.
    """

    def __init__(self, document: Document) -> None:
        self._document = document
        self.entries: list[Entry] = []
        self.gaps: list[Problem] = []
        self.random = self.blends = self.turns_hues = self.targets = False
        self._floats_from: int | None = None
        self._mean, self._std = np.zeros(1), np.full(1, 1 / _TOP)

    def add(self, given: Any, at: tuple[Key, ...]) -> None:
        """Add the entries of a transform. at: where it stands in the file."""
        if not isinstance(given, dict) or not isinstance(given.get("__class_fullname__"), str):
            rule = "must be a transform as A.save writes it, with __class_fullname__"
            raise self._document.error(rule, *at, value=given)
        name = given["__class_fullname__"].rpartition(".")[2]
        self.targets = self.targets or any(given.get(key) for key in ("bbox_params", "keypoint_params", "fill_mask"))
        if name in _CONTAINERS and given.get("p", 1) == 1:
            parts = given.get("transforms")
            if not isinstance(parts, list):
                raise self._document.error("must be a list of transforms", *at, "transforms", value=parts)
            for i, part in enumerate(parts):
                self.add(part, (*at, "transforms", i))
            return
        if name not in _KNOWN:
            self._refuse(at, f"is {name}, which has no equal stage", _LIKE.get(name, "leave it out"))
            return
        self._at = at
        if given.get("always_apply"):  # of versions below 2, which take no notice of p then
            given = {**given, "p": 1.0}
        keys, make = _KNOWN[name]
        self.gaps += self._document.unknown(at, given, (*_COMMON, *keys), name)
        try:
            for entry in make(self, given):
                self._emit(entry)
        except (KeyError, TypeError, ValueError) as error:
            without = f"is {name} without {error}"
            other = f"is {name} with other values than Albumentations writes: {error}"
            raise self._document.error(without if isinstance(error, KeyError) else other, *at) from error

    def _emit(self, entry: Entry) -> None:
        """Add an entry: before `normalize` if its results are pixels of the image, which makes no difference."""
        if self._floats_from is not None and entry.stage in _MOVABLE:
            self.entries.insert(self._floats_from, entry)
            self._floats_from += 1
        else:
            self.entries.append(entry)

    @property
    def floats(self) -> bool:
        """Whether the next transform gets floats."""
        return self._floats_from is not None

    def scale(self, mean: Sequence[float], std: Sequence[float]) -> None:
        """Subtract `mean` and divide by `std`, all that was scaled before included: one entry `normalize`."""
        self._mean = self._mean + self._std * np.array(mean)
        self._std = self._std * np.array(std)
        if self._floats_from is None:
            self._floats_from = len(self.entries)
        before, after = self.entries[: self._floats_from], self.entries[self._floats_from + 1 :]
        entry = normalize(*(each_channel(numbers.tolist(), before) for numbers in (self._mean, self._std)))
        self.entries = [*before, entry, *after]

    def _refuse(self, at: tuple[Key, ...], rule: str, nearest: str, measured: str = "") -> None:
        self.gaps.append(gap(self._document.place(*at), rule, nearest=nearest, apart=measured, path=at))

    def differs(self, key: str, rule: str, nearest: str, measured: str = "") -> None:
        """Note that the transform at hand is not carried over as it is."""
        self._refuse((*self._at, key), rule, nearest, measured)

    def draws(self, given: Mapping[str, Any], *ranges: Any) -> None:
        """Note whether a transform is random: by its probability, or by ranges that are not one number."""
        self.random |= given.get("p", 1) not in (0, 1) or any(low != high for low, high in ranges)

    def always(self, given: Mapping[str, Any], stage: str) -> None:
        """Note a transform that is not applied to all images, where its stage is."""
        if given.get("p", 1) != 1:
            self.differs(
                "p", f"is {given['p']:g}, but the stage {stage} has no probability", f"{stage}, for all images"
            )

    def filters(self, given: Mapping[str, Any], stage: str) -> dict[str, Any]:
        """The keys of a resize. OpenCV's filters do not widen with the scale."""
        mode = given.get("interpolation", _LINEAR)
        if given.get("area_for_downscale"):
            mode = _AREA
        if mode in _FILTERS:
            if _FILTERS[mode] == "nearest":
                rule = "takes OpenCV's nearest pixels, of two that are equally near often the other one"
                self.differs("interpolation", rule, f"{stage}: {{interpolation: nearest, antialias: false}}")
            return {**({} if mode == _LINEAR else {"interpolation": _FILTERS[mode]}), "antialias": False}
        nearest = "bilinear" if mode == _AREA else "bicubic"
        measured = apart(
            lambda image: cv2.resize(picture(), (224, 168), interpolation=mode),
            lambda image: image.resize((224, 168), getattr(_pillow(), nearest.upper())),
        )
        rule = f"is OpenCV's number {mode}, a filter that the stage {stage} does not have"
        self.differs("interpolation", rule, f"{stage}: {{interpolation: {nearest}, antialias: true}}", measured)
        return {} if nearest == "bilinear" else {"interpolation": nearest}


def _pillow() -> Any:
    from PIL import Image

    return Image.Resampling


_Given = Mapping[str, Any]
_Make = Callable[[_Reader, _Given], list[Entry]]


def _resize(reader: _Reader, given: _Given) -> list[Entry]:
    reader.always(given, "resize")
    size = {"height": given["height"], "width": given["width"]}
    return [Entry("resize", {**size, **reader.filters(given, "resize")})]


def _one_side(side: str) -> _Make:
    def make(reader: _Reader, given: _Given) -> list[Entry]:
        reader.always(given, "resize")
        length = given["max_size"]
        if length is None and (box := given.get("max_size_hw")) is not None:
            length = max(each or 0 for each in box)
            reader.differs("max_size_hw", "limits height and width separately", f"resize: {{{side}: {length}}}")
        elif isinstance(length, (list, tuple)):
            length = max(length)
            reader.random = True
            reader.differs("max_size", "draws one of several sizes", f"resize: {{{side}: {length}}}")
        if not isinstance(length, int):
            raise ValueError(f"max_size must be one number, got {length!r}")
        return [Entry("resize", {side: length, **reader.filters(given, "resize"), "rounding": "nearest"})]

    return make


def _crop(stage: str, **keys: Any) -> _Make:
    def make(reader: _Reader, given: _Given) -> list[Entry]:
        reader.always(given, stage)
        reader.random |= "rounding" not in keys
        if given.get("pad_if_needed"):
            reader.differs("pad_if_needed", "pads smaller images", f"{stage}, for images that are large enough")
        return [Entry(stage, {"size": size_of([given["height"], given["width"]]), **keys})]

    return make


def _random_resized_crop(reader: _Reader, given: _Given) -> list[Entry]:
    reader.always(given, "random_resized_crop")
    reader.random = True
    keys = {key: [number(x) for x in given[key]] for key in ("scale", "ratio")}
    return [
        Entry(
            "random_resized_crop",
            {"size": size_of(given["size"]), **keys, **reader.filters(given, "random_resized_crop")},
        )
    ]


def _flip(side: str) -> _Make:
    def make(reader: _Reader, given: _Given) -> list[Entry]:
        reader.draws(given)
        return [Entry("flip", {side: given["p"]})]

    return make


def _with_probability(stage: str) -> _Make:
    def make(reader: _Reader, given: _Given) -> list[Entry]:
        reader.draws(given)
        if given.get("method", "weighted_average") != "weighted_average":
            reader.differs("method", "is another conversion to gray", stage)
        return [Entry(stage, {"probability": given["p"]})]

    return make


def _to_gray(reader: _Reader, given: _Given) -> list[Entry]:
    entries = _with_probability("grayscale")(reader, given)
    if (channels := given.get("num_output_channels", 3)) == 1 and given["p"] == 1:
        return [Entry("torchvision", {"name": "Grayscale"}, "leaves one channel")]
    if channels != 3:
        reader.differs("num_output_channels", f"is {channels}", "grayscale, which leaves three channels")
    return entries


def _color_jitter(reader: _Reader, given: _Given) -> list[Entry]:
    """Albumentations draws the order of the adjustments, too."""
    neutral = {"brightness": 1, "contrast": 1, "saturation": 1, "hue": 0}
    reader.draws(given, *(given[name] for name in neutral))
    active = [name for name, value in neutral.items() if list(given[name]) != [value, value]]
    reader.random |= len(active) > 1 and given["p"] > 0
    *_, hue = (given[name] for name in neutral)
    reader.turns_hues |= any(hue)
    keys = {name: [number(x) for x in given[name]] for name in neutral}
    return [Entry("color_jitter", {**keys, "probability": given["p"]})]


def _posterize(reader: _Reader, given: _Given) -> list[Entry]:
    low, high = given["num_bits"]
    reader.draws(given, (low, high))
    if low != high:
        reader.differs("num_bits", "draws the number of bits", f"posterize: {{bits: {low}}}")
    return [Entry("posterize", {"bits": low, "probability": given["p"]})]


def _rotate(reader: _Reader, given: _Given) -> list[Entry]:
    reader.always(given, "rotate")
    low, high = (number(x) for x in given["limit"])
    reader.draws(given, (low, high))
    borders = {number: name for name, number in OPENCV_BORDERS.items()}
    if (border := borders.get(given.get("border_mode", 0))) is None:
        reader.differs("border_mode", "is a border that the stage rotate does not have", "border: reflect")
        border = "reflect"
    if given.get("crop_border"):
        reader.differs("crop_border", "cuts off the border", "rotate, which keeps the size")
    mode = _FILTERS.get(given.get("interpolation", _LINEAR), "bicubic")
    reader.blends |= border == "constant" and mode != "nearest"
    if mode == "bicubic":
        reader.differs("interpolation", "is a filter that the stage rotate does not have", "bilinear")
    keys: dict[str, Any] = {"degrees": high if low == -high else [low, high]}
    keys |= {"interpolation": "nearest"} if mode == "nearest" else {}
    keys |= {"border": border} if border != "constant" else {}
    fill = given.get("fill", 0)
    levels = [round(x) for x in fill] if isinstance(fill, list) else round(fill)
    return [Entry("rotate", {**keys, **({"fill": levels} if levels else {})})]


def _normalize(reader: _Reader, given: _Given) -> list[Entry]:
    reader.always(given, "normalize")
    if given.get("normalization", "standard") != "standard":
        reader.differs(
            "normalization", "takes mean and std of each image", "normalize with the data set's mean and std"
        )
    unit = given["max_pixel_value"]
    mean, std = ([unit * x for x in _numbers(given[key])] for key in ("mean", "std"))
    reader.scale(mean, std)
    return []


def _numbers(value: Any) -> list[float]:
    """What Albumentations takes as one number or as a list."""
    return [float(x) for x in (value if isinstance(value, (list, tuple)) else [value])]


def _to_float(reader: _Reader, given: _Given) -> list[Entry]:
    """Without max_value, Albumentations takes the largest one of the type: 255, or 1 for floats."""
    reader.always(given, "normalize")
    reader.scale([0.0], [float(given.get("max_value") or (1 if reader.floats else _TOP))])
    return []


_RESIZE = ("interpolation", "area_for_downscale")
_CROP = ("height", "width", "pad_if_needed", "pad_position", "border_mode", "fill")
_KNOWN: dict[str, tuple[tuple[str, ...], _Make]] = {
    "Resize": ((*_RESIZE, "height", "width"), _resize),
    "SmallestMaxSize": ((*_RESIZE, "max_size", "max_size_hw"), _one_side("shorter")),
    "LongestMaxSize": ((*_RESIZE, "max_size", "max_size_hw"), _one_side("longer")),
    "CenterCrop": (_CROP, _crop("center_crop", rounding="down")),
    "RandomCrop": (_CROP, _crop("random_crop")),
    "RandomResizedCrop": ((*_RESIZE, "size", "scale", "ratio"), _random_resized_crop),
    "HorizontalFlip": ((), _flip("horizontal")),
    "VerticalFlip": ((), _flip("vertical")),
    "ColorJitter": (("brightness", "contrast", "saturation", "hue"), _color_jitter),
    "ToGray": (("method", "num_output_channels"), _to_gray),
    "InvertImg": ((), _with_probability("invert")),
    "Posterize": (("num_bits",), _posterize),
    "Rotate": (("limit", "interpolation", "border_mode", "fill", "crop_border", "rotate_method"), _rotate),
    "Normalize": (("mean", "std", "max_pixel_value", "normalization"), _normalize),
    "ToFloat": (("max_value",), _to_float),
    "ToTensorV2": (("transpose_mask",), lambda reader, given: []),
    "NoOp": ((), lambda reader, given: []),
}
"""The keys of each transform that has an equal stage, and what makes its entries."""
