"""Reads Albumentations' serialised pipelines: JSON or YAML of `A.save` or `A.to_dict`. Albumentations is not needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cv2
import numpy as np

from gpuflow.errors import Key, Problem
from gpuflow.execute.warp import OPENCV_BORDERS
from gpuflow.migration.imported import (
    Document,
    Entry,
    Imported,
    Step,
    decode,
    each_channel,
    entry_of,
    filter_keys,
    normalize,
    number,
    numbers,
    read_document,
    size_of,
    span,
)

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
_ALL, _FIRST = "its transforms, for every image", "the first of its transforms"
_CONTAINERS = {
    "Compose": _ALL,
    "ReplayCompose": _ALL,
    "Sequential": _ALL,
    "SomeOf": _ALL,
    "RandomOrder": _ALL,
    "OneOf": _FIRST,
    "OneOrOther": _FIRST,
}
"""Transforms of transforms, and the nearest to them where they draw something."""
_CHAINS = ("Compose", "ReplayCompose", "Sequential")
"""Containers that draw nothing but whether they are applied."""


def read_albumentations(path: str) -> Imported:
    """Return the stages of a serialised pipeline.

    Raises:
        ConfigError: there is no such file, or it holds none.
    """
    document = read_document(path)
    transform = document.data.get("transform")
    if not isinstance(transform, dict) or "__class_fullname__" not in transform:
        rule = "must hold what Albumentations' A.to_dict gives: transform with __class_fullname__"
        raise document.error(rule, action=f"write it with A.save(transform, {path!r})")
    step = _read(transform, _State(document=document, at=("transform",)))
    entries = step.entries
    if step.state.scaled:
        gray = any(entry.parameters.get("name") == "Grayscale" for entry in entries)
        numbers = (each_channel(each, gray=gray) for each in (step.state.mean, step.state.std))
        entries = (*entries, normalize(*numbers), *step.floats)
    return Imported(
        source=f"albumentations:{path}",
        matches=(_MATCHES, *dict.fromkeys(step.notes)),
        pipelines={"train" if _RANDOM in step.notes else "val": (decode(), *entries)},
        gaps=step.gaps,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """Holds what is known at the place of a transform.

    at: the keys that lead to it. around: the transforms next to it in its list. scaled: whether it gets floats.
    mean, std: what all that scaled so far subtracts and divides by, in units of 255 levels.
    """

    document: Document
    at: tuple[Key, ...]
    around: tuple[Any, Any] = (None, None)
    scaled: bool = False
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1 / _TOP,)

    def gap(self, key: str, rule: str, nearest: str) -> Problem:
        """Return the gap of a transform whose key is not carried over as it is; of the whole without a key."""
        at = (*self.at, key) if key else self.at
        return self.document.gap(rule, *at, nearest=nearest)

    def scale(self, mean: Sequence[float], std: Sequence[float]) -> _State:
        """Subtract `mean` and divide by `std`, after all that was scaled before."""
        new = np.array(self.mean) + np.array(self.std) * np.array(mean), np.array(self.std) * np.array(std)
        return replace(self, scaled=True, mean=tuple(new[0].tolist()), std=tuple(new[1].tolist()))


_Step = Step[_State]
_Part = Entry | Problem | str | _State
"""What a transform yields: entries, gaps, notes, and the state after it."""


def _read(given: Any, state: _State) -> _Step:
    """Return what a transform becomes."""
    document, at = state.document, state.at
    if not _is_transform(given):
        rule = "must be a transform as A.save writes it, with __class_fullname__"
        raise document.error(rule, *at, value=given)
    name = _name(given)
    targets = any(given.get(key) for key in ("bbox_params", "keypoint_params", "fill_mask"))
    if name in _CONTAINERS:
        step = _container(name, given, state)
    elif name not in _KNOWN:
        step = _unlike(name, given, state)
    else:
        step = _known(name, given, state)
    return replace(step, notes=(*((_TARGETS,) if targets else ()), *step.notes))


def _unlike(name: str, given: _Given, state: _State) -> _Step:
    """Return the gap of a transform that no stage equals, and its nearest stage."""
    about, make = _LIKE.get(name, ("", None))
    entry = None if make is None else make({"p": 0.5, **given})
    nearest = "leave it out" if entry is None else f"{entry.stage}{about}"
    step = Step(state=state, gaps=(state.gap("", f"is {name}, which has no equal stage", nearest),))
    return step if entry is None else step.then(_as_step(entry, state)).then(Step(state=state, notes=(_RANDOM,)))


def _is_transform(given: Any) -> bool:
    return isinstance(given, dict) and isinstance(given.get("__class_fullname__"), str)


def _name(given: _Given) -> str:
    return str(given["__class_fullname__"]).rpartition(".")[2]


def _container(name: str, given: _Given, state: _State) -> _Step:
    """Return the notes and gaps of all transforms; the entries of the first alone where one of them is drawn."""
    parts = given.get("transforms")
    if not isinstance(parts, list):
        raise state.document.error("must be a list of transforms", *state.at, "transforms", value=parts)
    around, first = [None, *parts, None], _CONTAINERS[name] == _FIRST
    step = Step(state=state)
    for i, part in enumerate(parts):
        neighbours = (None, None) if first else (around[i], around[i + 2])
        one = _read(part, replace(step.state, at=(*state.at, "transforms", i), around=neighbours))
        step = step.then(one if i == 0 or not first else replace(one, entries=(), floats=(), state=step.state))
    p = given.get("p", 1)
    if name not in _CHAINS:
        problem = state.gap("", f"is {name}, which has no equal stage", _CONTAINERS[name])
    elif p != 1 and parts:
        problem = state.gap("p", f"is {p}, but a list of stages has no probability", _ALL)
    else:
        return step
    return step.behind(problem)


def _known(name: str, given: _Given, state: _State) -> _Step:
    """Return the step of a transform that has a stage."""
    if given.get("always_apply"):  # of versions below 2, which take no notice of p then
        given = {**given, "p": 1.0}
    keys, make = _KNOWN[name]
    step = Step(state=state, gaps=tuple(state.document.unknown(state.at, given, (*_COMMON, *keys), name)))
    try:
        for part in make(state, given):
            step = step.then(_as_step(part, step.state))
    except (KeyError, TypeError, ValueError) as error:
        without = f"is {name} without {error}"
        other = f"is {name} with other values than Albumentations writes: {error}"
        raise state.document.error(without if isinstance(error, KeyError) else other, *state.at) from error
    return step


def _as_step(part: _Part, state: _State) -> _Step:
    """Put an entry before `normalize` if its results are pixels of the image, which makes no difference."""
    match part:
        case Entry(stage="torchvision") if state.scaled:
            return Step(state=state, floats=(part,))
        case Entry():
            late = state.scaled and part.stage not in _MOVABLE
            rule, nearest = f"gets floats, and the stage {part.stage} levels of 0-255", f"{part.stage} before normalize"
            return Step(state=state, entries=(part,), gaps=(state.gap("", rule, nearest),) if late else ())
        case Problem():
            return Step(state=state, gaps=(part,))
        case str():
            return Step(state=state, notes=(part,))
    return Step(state=part)


def _draws(given: _Given, *ranges: Any) -> Iterator[str]:
    """Note that a transform is random: by its probability, or by ranges that are not one number."""
    if given.get("p", 1) not in (0, 1) or any(low != high for low, high in ranges):
        yield _RANDOM


def _always(state: _State, given: _Given, stage: str) -> Iterator[Problem]:
    """Yield the gap of a transform that is not applied to all images, where its stage is."""
    if given.get("p", 1) != 1:
        rule = f"is {given['p']:g}, but the stage {stage} has no probability"
        yield state.gap("p", rule, f"{stage}, for all images")


def _filters(given: _Given, state: _State, stage: str) -> tuple[dict[str, Any], list[Problem]]:
    """Return the keys of a resize, and the gap of a filter. OpenCV's filters do not widen with the scale."""
    mode = given.get("interpolation", _LINEAR)
    if given.get("area_for_downscale"):
        mode = _AREA
    if mode in _FILTERS:
        gaps = []
        if _FILTERS[mode] == "nearest":
            rule = "takes OpenCV's nearest pixels, of two that are equally near often the other one"
            gaps = [state.gap("interpolation", rule, f"{stage}: {{interpolation: nearest, antialias: false}}")]
        return {**({} if mode == _LINEAR else {"interpolation": _FILTERS[mode]}), "antialias": False}, gaps
    nearest = "bilinear" if mode == _AREA else "bicubic"
    rule = f"is OpenCV's number {mode}, a filter that the stage {stage} does not have"
    action = f"{stage}: {{interpolation: {nearest}, antialias: true}}"
    return filter_keys(nearest), [state.gap("interpolation", rule, action)]


_Given = Mapping[str, Any]
_Make = Callable[[_State, _Given], Iterator[_Part]]


def _resized(state: _State, given: _Given, stage: str, **keys: Any) -> Iterator[_Part]:
    """Yield a stage that resizes all images, and the gaps of its probability and its filter."""
    yield from _always(state, given, stage)
    filters, gaps = _filters(given, state, stage)
    yield from gaps
    yield Entry(stage, {**keys, **filters})


def _one_side(side: str) -> _Make:
    def make(state: _State, given: _Given) -> Iterator[_Part]:
        if side == "longer" and _fill_box(given, state.around[1]):
            yield from _filters(given, state, "letterbox")[1]  # PadIfNeeded makes the stage of both
            return
        length, box = given["max_size"], given.get("max_size_hw")
        if length is None and box is not None:
            length = max(each or 0 for each in box)
            yield state.gap("max_size_hw", "limits height and width separately", f"resize: {{{side}: {length}}}")
        elif isinstance(length, (list, tuple)):
            length = max(length)
            yield _RANDOM
            yield state.gap("max_size", "draws one of several sizes", f"resize: {{{side}: {length}}}")
        if not isinstance(length, int):
            raise ValueError(f"max_size must be one number, got {length!r}")
        yield from _resized(state, given, "resize", **{side: length, "rounding": "nearest"})

    return make


def _fill_box(longest: Any, pad: Any) -> bool:
    """Return True if two transforms fit an image into a box and pad it to that, as the stage letterbox does."""
    for one, name in ((longest, "LongestMaxSize"), (pad, "PadIfNeeded")):
        if not _is_transform(one) or _name(one) != name or (one.get("p", 1) != 1 and not one.get("always_apply")):
            return False
    side = longest.get("max_size")
    box = [side, side] if isinstance(side, int) else longest.get("max_size_hw")
    return box is not None and list(box) == [pad.get("min_height"), pad.get("min_width")]


def _pad_if_needed(state: _State, given: _Given) -> Iterator[_Part]:
    keys = {"fill": _levels(given)}
    if fits := _fill_box(before := state.around[0], given):
        keys |= _filters(before, state, "letterbox")[0]
    yield from _always(state, given, "letterbox")
    if (height := given["min_height"]) is None or (width := given["min_width"]) is None:
        yield state.gap("", "is PadIfNeeded to multiples of a number, which has no equal stage", "leave it out")
        return
    if not fits:
        yield state.gap("", "is PadIfNeeded, which has no equal stage", "letterbox, which resizes too")
    if given.get("position", "center") != "center":
        yield state.gap("position", f"is {given['position']}", "letterbox, which centres the image")
    if given.get("border_mode", 0) != cv2.BORDER_CONSTANT:
        yield state.gap("border_mode", "is a border that the stage letterbox does not have", "letterbox: {fill: 0}")
    yield Entry("letterbox", {"size": size_of([height, width]), **keys})


def _crop(stage: str, **keys: Any) -> _Make:
    def make(state: _State, given: _Given) -> Iterator[_Part]:
        yield from _always(state, given, stage)
        if "rounding" not in keys:
            yield _RANDOM
        if given.get("pad_if_needed"):
            yield state.gap("pad_if_needed", "pads smaller images", f"{stage}, for images that are large enough")
        yield Entry(stage, {"size": size_of([given["height"], given["width"]]), **keys})

    return make


def _random_resized_crop(state: _State, given: _Given) -> Iterator[_Part]:
    yield _RANDOM
    keys = {key: numbers(given[key]) for key in ("scale", "ratio")}
    yield from _resized(state, given, "random_resized_crop", size=size_of(given["size"]), **keys)


def _by_chance(stage: str, key: str) -> _Make:
    """Return what makes a stage whose only parameter, `key`, is a probability."""

    def make(state: _State, given: _Given) -> Iterator[_Part]:
        yield from _draws(given)
        yield Entry(stage, {key: given["p"]})

    return make


def _to_gray(state: _State, given: _Given) -> Iterator[_Part]:
    yield from _draws(given)
    if given.get("method", "weighted_average") != "weighted_average":
        yield state.gap("method", "is another conversion to gray", "grayscale")
    if (channels := given.get("num_output_channels", 3)) == 1 and given["p"] == 1:
        yield Entry("torchvision", {"name": "Grayscale"}, "leaves one channel")
        return
    if channels != 3:
        yield state.gap("num_output_channels", f"is {channels}", "grayscale, which leaves three channels")
    yield Entry("grayscale", {"probability": given["p"]})


def _color_jitter(state: _State, given: _Given) -> Iterator[_Part]:
    """Yield a color_jitter. Albumentations draws the order of the adjustments, too."""
    neutral = {"brightness": 1, "contrast": 1, "saturation": 1, "hue": 0}
    yield from _draws(given, *(given[name] for name in neutral))
    active = [name for name, value in neutral.items() if list(given[name]) != [value, value]]
    if len(active) > 1 and given["p"] > 0:
        yield _RANDOM
    if any(given["hue"]):
        yield _HUE
    keys = {name: numbers(given[name]) for name in neutral}
    yield Entry("color_jitter", {**keys, "probability": given["p"]})


def _posterize(state: _State, given: _Given) -> Iterator[_Part]:
    low, high = given["num_bits"]
    yield from _draws(given, (low, high))
    if low != high:
        yield state.gap("num_bits", "draws the number of bits", f"posterize: {{bits: {low}}}")
    yield Entry("posterize", {"bits": low, "probability": given["p"]})


def _rotate(state: _State, given: _Given) -> Iterator[_Part]:
    yield from _always(state, given, "rotate")
    yield from _draws(given, given["limit"])
    borders = {number: name for name, number in OPENCV_BORDERS.items()}
    if (border := borders.get(given.get("border_mode", 0))) is None:
        yield state.gap("border_mode", "is a border that the stage rotate does not have", "border: reflect")
        border = "reflect"
    if given.get("crop_border"):
        yield state.gap("crop_border", "cuts off the border", "rotate, which keeps the size")
    mode = _FILTERS.get(given.get("interpolation", _LINEAR), "bicubic")
    if border == "constant" and mode != "nearest":
        yield _BORDER
    if mode == "bicubic":
        yield state.gap("interpolation", "is a filter that the stage rotate does not have", "bilinear")
    yield entry_of(
        "rotate",
        degrees=span(given["limit"]),
        interpolation="nearest" if mode == "nearest" else None,
        border=None if border == "constant" else border,
        fill=_levels(given) or None,
    )


def _levels(given: _Given) -> Any:
    """Return the key `fill`: a level, or one for each channel."""
    fill = given.get("fill", 0)
    return [round(x) for x in fill] if isinstance(fill, (list, tuple)) else round(fill)


def _normalize(state: _State, given: _Given) -> Iterator[_Part]:
    yield from _always(state, given, "normalize")
    if given.get("normalization", "standard") != "standard":
        rule, nearest = "takes mean and std of each image", "normalize with the data set's mean and std"
        yield state.gap("normalization", rule, nearest)
    unit = given["max_pixel_value"]
    yield state.scale(*([unit * x for x in np.ravel(given[key]).tolist()] for key in ("mean", "std")))


def _to_float(state: _State, given: _Given) -> Iterator[_Part]:
    """Yield the scale. Without max_value, Albumentations takes the type's largest one: 255, or 1 for floats."""
    yield from _always(state, given, "normalize")
    yield state.scale([0.0], [float(given.get("max_value") or (1 if state.scaled else _TOP))])


def _nothing(state: _State, given: _Given) -> Iterator[_Part]:
    yield from ()


def _sides(value: Any, neutral: float = 0.0, unit: float = 1.0, default: float = 0.2) -> list[float | int]:
    """Return a range around a neutral number, in other units; -default to default where none is written."""
    numbers = value if isinstance(value, (list, tuple)) and len(value) == 2 else (-default * unit, default * unit)
    return [number(max(-1.0 if neutral == 0 else 0.0, neutral + x / unit)) for x in numbers]


def _like_blur(given: _Given) -> Entry:
    widest = max(numbers(given.get("blur_limit") or 3))
    return Entry("gaussian_blur", {"kernel_size": max(3, int(widest) // 2 * 2 + 1), "probability": given["p"]})


def _like_jitter(given: _Given) -> Entry:
    keys = {key: _sides(given.get(f"{key}_limit"), 1) for key in ("brightness", "contrast")}
    return Entry("color_jitter", {**keys, "probability": given["p"]})


def _like_hue(given: _Given) -> Entry:
    hue, saturation = _sides(given.get("hue_shift_limit"), 0, 180), _sides(given.get("sat_shift_limit"), 1, _TOP)
    hue = [max(-0.5, min(0.5, side)) for side in hue]
    return Entry("color_jitter", {"hue": hue, "saturation": saturation, "probability": given["p"]})


def _like_affine(given: _Given) -> Entry:
    degrees = given.get("rotate_limit") or given.get("rotate") or [0, 0]
    return Entry("affine", {"degrees": numbers(degrees)})


def _with_probability(stage: str, **keys: Any) -> Callable[[_Given], Entry]:
    return lambda given: Entry(stage, {**keys, "probability": given["p"]})


_LIKE: dict[str, tuple[str, Callable[[_Given], Entry]]] = {
    "RandomBrightnessContrast": (", which multiplies where this adds", _like_jitter),
    "HueSaturationValue": (", which multiplies where this adds", _like_hue),
    "ShiftScaleRotate": (", which has no probability; by its angles alone", _like_affine),
    "Affine": (", which has no probability; by its angles alone", _like_affine),
    "SafeRotate": (
        ", which keeps the size",
        lambda given: Entry("rotate", {"degrees": numbers(given.get("limit", (-90, 90)))}),
    ),
    "Perspective": ("", _with_probability("perspective")),
    "CoarseDropout": (", which fills one box", _with_probability("random_erasing")),
    "Erasing": ("", _with_probability("random_erasing")),
    "Blur": ("", _like_blur),
    "MotionBlur": ("", _like_blur),
    "MedianBlur": ("", _like_blur),
    "GaussianBlur": (", which takes one kernel_size", _like_blur),
    "Sharpen": ("", _with_probability("sharpness", amount=[1, 2])),
    "CLAHE": ("", _with_probability("equalize")),
}
"""What the stage that is most like a transform does otherwise, and its entry."""
_RESIZE = ("interpolation", "area_for_downscale")
_CROP = ("height", "width", "pad_if_needed", "pad_position", "border_mode", "fill")
_PAD = (
    *("min_height", "min_width", "pad_height_divisor", "pad_width_divisor", "padding", "position", "border_mode"),
    *("fill", "value"),
)
_KNOWN: dict[str, tuple[tuple[str, ...], _Make]] = {
    "Resize": (
        (*_RESIZE, "height", "width"),
        lambda state, given: _resized(state, given, "resize", height=given["height"], width=given["width"]),
    ),
    "SmallestMaxSize": ((*_RESIZE, "max_size", "max_size_hw"), _one_side("shorter")),
    "LongestMaxSize": ((*_RESIZE, "max_size", "max_size_hw"), _one_side("longer")),
    "PadIfNeeded": (_PAD, _pad_if_needed),
    "CenterCrop": (_CROP, _crop("center_crop", rounding="down")),
    "RandomCrop": (_CROP, _crop("random_crop")),
    "RandomResizedCrop": ((*_RESIZE, "size", "scale", "ratio"), _random_resized_crop),
    "HorizontalFlip": ((), _by_chance("flip", "horizontal")),
    "VerticalFlip": ((), _by_chance("flip", "vertical")),
    "ColorJitter": (("brightness", "contrast", "saturation", "hue"), _color_jitter),
    "ToGray": (("method", "num_output_channels"), _to_gray),
    "InvertImg": ((), _by_chance("invert", "probability")),
    "Posterize": (("num_bits",), _posterize),
    "Rotate": (("limit", "interpolation", "border_mode", "fill", "crop_border", "rotate_method"), _rotate),
    "Normalize": (("mean", "std", "max_pixel_value", "normalization"), _normalize),
    "ToFloat": (("max_value",), _to_float),
    "ToTensorV2": (("transpose_mask",), _nothing),
    "NoOp": ((), _nothing),
}
"""The keys of each transform that has an equal stage, and what makes its entries."""
