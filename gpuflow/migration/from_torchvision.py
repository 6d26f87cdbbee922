"""Reads transforms of torchvision, v1 and v2, and those of timm among them: objects in Python, to entries."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gpuflow.config.stage_entries import make_stage
from gpuflow.errors import Problem
from gpuflow.migration.distance import apart
from gpuflow.migration.imported import (
    IMAGENET_MEAN,
    Entry,
    Imported,
    decode,
    each_channel,
    gap,
    normalize,
    number,
    size_of,
)
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import range_of

__all__ = ["read_transform"]

_TENSORS = "Matches torchvision: the stages are its v2 transforms of uint8 tensors, to the level."
_PILLOW = (
    "They get PIL images, which Pillow resizes: within 1 level of tensors for bilinear filters, 2 for bicubic ones."
)
_PILLOW_WARPS = (
    "They get PIL images, which Pillow warps: within 1 level of tensors, but for pixels at the image's border, which "
    "it does not blend with the fill."
)
_PILLOW_HUE = (
    "They get PIL images, whose hue Pillow shifts with 8 bits: a level from tensors on average, and up to 16 levels."
)
_PILLOW_TYPES = (
    "{} has no stage: it gets PIL images, which torchvision leaves as they are. Put ToImage before it to convert them."
)
_MASKS = (
    "These transforms give masks the level {0} where they pad or warp an image. Write fill: {0} at the mask in "
    "source.fields for the same."
)
_FLOATS_ROUND = (
    "torchvision keeps fractions of a level between transforms that get floats. Here each of them rounds to levels: a "
    "level apart for most pixels, and more where solarize, posterize or equalize maps close levels far apart."
)
_RANDOM = "Random transforms have the same distributions and other draws, which follow from seed, epoch and position."
_FILTERS = ("bilinear", "bicubic")
_LEVELS = s.ImageSpec(shape=(None, None, 3), color="rgb")
_FLOATS = _LEVELS.replace(dtype="float32", layout="nchw")


def read_transform(
    transform: Any, source: str, table: Mapping[str, type[s.Stage]], *, tensor: bool = False
) -> Imported:
    """The stages of a transform, which is run on a test picture where something in it has no equal stage.

    Args:
        transform: a Compose, or any transform of one image.
        source: as the user named it.
        table: the vocabulary.
        tensor: it gets uint8 tensors, not PIL images.
    """
    reader = _Reader(source, table)
    reader.tensor = tensor
    reader.add(transform, "")
    return reader.result()


class _Reader:
    """Goes through transforms in order.

    tensor, scaled: whether the image is a tensor there, and one of floats: of 0 to 1, but for conversions that run by
    their names. mean: that of Normalize.
    """

    def __init__(self, source: str, table: Mapping[str, type[s.Stage]]) -> None:
        self._source, self._table = source, table
        self.entries: list[Entry] = []
        self.gaps: list[Problem] = []
        self.tensor = self.scaled = False
        self.pillow_notes = set[str]()  # how PIL images differ from tensors in these transforms
        self.mean: tuple[float, ...] | None = None
        self._dtype, self._path = "float32", ""
        self._least_side = 1  # of the image that comes next, as far as it is known
        self._rounds = False  # an entry rounds what are floats in torchvision
        self.masks_filled: Any = 0  # the level that transforms give masks where they pad or warp
        self._unconverted: str | None = None  # a conversion of PIL images, which does nothing
        self._floats_from: int | None = None  # the first entry that makes floats, or works on them

    def result(self) -> Imported:
        if self.scaled and self._floats_from is None:
            self._scale()
        stages = [make_stage(entry.as_yaml, self._table) for entry in self.entries]
        random = any(stage.random for stage in stages)
        pillow = ((note, note in self.pillow_notes) for note in (_PILLOW, _PILLOW_WARPS, _PILLOW_HUE))
        unconverted = (_PILLOW_TYPES.format(self._unconverted), self._unconverted is not None)
        masks = (_MASKS.format(self.masks_filled), bool(self.masks_filled))
        notes = (*pillow, unconverted, masks, (_FLOATS_ROUND, self._rounds), (_RANDOM, random))
        return Imported(
            source=self._source,
            matches=(_TENSORS, *(note for note, holds in notes if holds)),
            pipelines={"train" if random else "val": (decode(), *self.entries)},
            gaps=tuple(self.gaps),
        )

    # --- transforms -------------------------------------------------------------------------------------------------

    def add(self, transform: Any, path: str) -> None:
        """Add the entries of a transform. path: where it stands in the outermost one, such as `[2]`."""
        self._path = path
        name, library = type(transform).__name__, type(transform).__module__.partition(".")[0]
        equal = {"torchvision": _EQUAL, "timm": _TIMM}.get(library, {}).get(name)
        if (library, name) in (("torchvision", "Compose"), ("torch", "Sequential")):
            for i, part in enumerate(getattr(transform, "transforms", transform)):
                self.add(part, f"{path}[{i}]")
        elif library == "torchvision" and name in _PRESETS:
            self._preset(transform)
        elif library == "torchvision" and name == "RandomApply":
            self._random_apply(transform)
        elif (library, name) == ("timm", "ToTensor"):
            self._unscaled(transform)
        elif library in ("torchvision", "timm") and name in _STEPS:
            _STEPS[name](self, transform)
        elif equal is not None:
            self._equal(transform, equal(self, transform))
        elif library == "torchvision" and name not in _REFUSED:
            self._least_side = 1
            self.by_name(transform)
        else:
            self.refuse(transform)

    def note_pillow(self, note: str) -> None:
        """Note how a transform changes PIL images otherwise than tensors, if it gets PIL images."""
        if not self.tensor:
            self.pillow_notes.add(note)

    def _preset(self, preset: Any) -> None:
        """The transforms that come with torchvision's weights, which take PIL images and tensors."""
        self.note_pillow(_PILLOW)
        size = preset.resize_size and _target(list(preset.resize_size))
        if size and isinstance(resize := _sampled(self, "resize", size, preset), Entry):
            self._emit(resize)
        elif size:
            self.refuse(preset, f"resizes by {_mode(preset)}, which the stage resize does not have")
        if crop := getattr(preset, "crop_size", None):
            self._emit(Entry("center_crop", {"size": size_of(crop)}))
        self.tensor = self.scaled = True
        self.normalize(preset)

    def _random_apply(self, transform: Any) -> None:
        """A transform that is applied with a probability: carried over if its stage has such a key."""
        parts, inner = list(transform.transforms), _Reader(self._source, self._table)
        inner.tensor, inner.scaled, path = self.tensor, self.scaled, self._path
        for i, part in enumerate(parts):
            inner.add(part, f"{path}[{i}]")
        whole = len(inner.entries) == 1 and not inner.gaps and inner.entries[0].parameters.get("probability", 1) == 1
        if whole and self._floats_from is None:
            (entry,) = inner.entries
            sometimes = Entry(entry.stage, {**entry.parameters, "probability": number(transform.p)})
            if self._faults(sometimes) is None:
                self.pillow_notes |= inner.pillow_notes
                self._emit(sometimes)
                return
        names = ", ".join(type(part).__name__ for part in parts)
        rule = f"RandomApply of {names} with p={transform.p:g} has no equal stage"
        change = "which changes all images" if transform.p < 1 else ""
        nearest = "its transforms without RandomApply"
        self.gaps.append(gap(f"{self._source}{path}:", rule, nearest=nearest, apart=change))
        for i, part in enumerate(parts):
            self.add(part, f"{path}[{i}]")

    def _equal(self, transform: Any, found: _Equal) -> None:
        """A transform for which there is a stage, at least for some of its parameters."""
        last = self._floats_from is None or self._floats_from == len(self.entries) - 1
        movable = type(transform).__name__ in _MOVABLE and last
        if type(transform).__name__ == "CenterCrop":  # which pads smaller images by 0, also of floats
            movable = movable and self._least_side >= max(_sides(transform.size))
        self._least_side = _least_side(transform, self._least_side)
        if type(transform).__name__ in _RESIZING:
            self.note_pillow(_PILLOW)
        unfit = isinstance(found, Entry) and self._faults(found) is not None  # a number that the stage does not take
        if found is None or unfit or (self._floats_from is not None and not movable):
            self.by_name(transform)
        elif isinstance(found, Entry):
            self._emit(found)
        else:
            self._emit(found.entry)
            stage = make_stage(found.entry.as_yaml, self._table)
            measured = apart(lambda image: transform(self._input(image)), lambda image: self._run(stage, image))
            nearest = repr(stage)
            self.gaps.append(gap(f"{self._source}{self._path}:", found.rule, nearest=nearest, apart=measured))

    def by_name(self, transform: Any, **changed: Any) -> None:
        """A transform that runs as it is: `torchvision: {name: ...}`."""
        parameters = _parameters(transform)
        if parameters is None:
            self.refuse(transform)
            return
        entry = Entry("torchvision", {**parameters, **changed}, "has no faster form")
        if (reason := self._faults(entry, _FLOATS if self.scaled else _LEVELS)) is not None:
            self.refuse(transform, reason)
            return
        if self.scaled and self._floats_from is None:
            self._scale()
        self.entries.append(entry)

    def refuse(self, transform: Any, reason: str = "is not a transform that gpuflow knows") -> None:
        """Something that no stage does: leaving it out is the nearest, unless there is a stage that is like it."""
        place, name = f"{self._source}{self._path}:", type(transform).__name__
        called = getattr(transform, "lambd", transform)
        if (code := getattr(called, "__code__", None)) is not None:
            place = f"{code.co_filename}:{code.co_firstlineno}: {place}"
            written = called.__name__ if called is transform else f"{name}({called.__name__})"
            rule = f"{written} is Python code, which a file cannot hold"
        else:
            rule = f"{name} {_REFUSED.get(name, reason)}"
        if (held := _composes(transform)) and name not in _REFUSED:
            self._holder(place, rule, held)
            return
        if (likely := _NEAREST.get(name)) is not None:
            self.gaps.append(gap(place, rule, nearest=likely, apart="not measured: it draws random numbers"))
            return
        measured = apart(lambda image: transform(self._input(image)), self._input)
        self.gaps.append(gap(place, rule, nearest="leave it out", apart=measured))

    def _holder(self, place: str, rule: str, held: Mapping[str, Any]) -> None:
        """An object whose code calls one Compose or several, which it holds by these names."""
        names, path = ", ".join(held), self._path
        if len(held) == 1:
            nearest, about = f"its attribute {names}, a Compose", "what else its code does is not known"
        else:
            nearest, about = f"its attributes {names}, each a Compose", "views of one image are written as views"
        self.gaps.append(gap(place, rule, nearest=nearest, apart=about))
        if len(held) == 1:
            self.add(held[names], f"{path}.{names}")

    # --- what changes the type of an image --------------------------------------------------------------------------

    def normalize(self, transform: Any) -> None:
        """torchvision's Normalize, or a preset with its numbers."""
        given = {key: _numbers_of(getattr(transform, key)) for key in ("mean", "std")}
        if self.scaled and self._floats_from is None:
            self.mean, std = (each_channel(numbers, self.entries) for numbers in given.values())
            self._scale(self.mean, std)
        else:
            self.by_name(transform, **given)

    def change_type(self, transform: Any) -> None:
        """A conversion to another type of numbers. Those of v2 convert tensors only; that of v1 refuses PIL images."""
        if self.tensor or not type(transform).__module__.startswith("torchvision.transforms.v2"):
            self.convert(transform)
        else:
            self._unconverted = type(transform).__name__

    def convert(self, transform: Any) -> None:
        """A conversion that takes place. On levels, nothing is needed but a note of the type."""
        dtype, scale = str(_of_images(transform.dtype)).removeprefix("torch."), getattr(transform, "scale", True)
        on_levels, count = self._floats_from is None, len(self.entries)
        if dtype == (self._dtype if self.scaled else "uint8"):
            self.tensor = True
        elif dtype == "None":  # images are not converted
            return
        elif on_levels and scale and dtype in ("uint8", *_FLOAT_TYPES):
            self.tensor, self.scaled = True, dtype != "uint8"
            self._dtype = dtype if self.scaled else self._dtype
        else:
            self.by_name(transform)
            if len(self.entries) > count:
                self.tensor, self.scaled = True, dtype != "uint8"
                self._dtype = dtype if self.scaled else self._dtype
                self._floats_from = len(self.entries) - 1 if self._floats_from is None else self._floats_from

    def _unscaled(self, transform: Any) -> None:
        """timm's ToTensor, which gives levels as floats."""
        from torchvision.transforms import v2

        self.convert(v2.ToDtype(transform.dtype, scale=False))

    def to_pil(self, transform: Any) -> None:
        if self.scaled:
            self.refuse(transform, "makes levels of floats again")
        elif transform.mode not in (None, "RGB"):
            self.refuse(transform, f"takes the channels for {transform.mode}")
        self.tensor = False

    def level(self, value: float) -> int | None:
        """The level of 0-255 that a number is in the units that the image has at this place.

        None if it is not one; of floats it is the nearest.
        """
        level = value * 255 if self.scaled else value
        whole = round(level)
        return whole if 0 <= whole <= 255 and (self.scaled or whole == level) else None

    def _scale(self, mean: Sequence[float] = (0,), std: Sequence[float] = (1,)) -> None:
        self._floats_from = len(self.entries)
        mean, std = (each_channel(numbers, self.entries) for numbers in (mean, std))
        self.entries.append(normalize(mean, std, dtype=self._dtype))

    def _emit(self, entry: Entry) -> None:
        """Add an entry that works on levels of 0-255: before normalize, if that stands there."""
        self._rounds = self._rounds or (self.scaled and entry.stage not in _EXACT)
        if self._floats_from is None:
            self.entries.append(entry)
        else:
            self.entries.insert(self._floats_from, entry)
            self._floats_from += 1

    # --- checks -----------------------------------------------------------------------------------------------------

    def _faults(self, entry: Entry, spec: s.ImageSpec | None = None) -> str | None:
        """Why there is no stage of an entry, or why it cannot take what `spec` says; None if it can."""
        try:
            stage = make_stage(entry.as_yaml, self._table)
            if spec is not None:
                stage.output(spec)
        except ValueError as error:
            return f"cannot run as a stage: {error}"
        return None

    def _input(self, image: Any) -> Any:
        """A PIL image as what a transform gets at this place."""
        from torchvision.transforms.v2 import functional

        if not self.tensor:
            return image
        tensor = functional.pil_to_tensor(image)
        return functional.to_dtype(tensor, scale=True) if self.scaled else tensor

    def _run(self, stage: s.Stage, image: Any) -> Any:
        """A stage on a PIL image, as torchvision's transform of uint8 tensors."""
        from torchvision.transforms.v2 import functional

        return stage.torchvision()(functional.pil_to_tensor(image))


# --- equal stages -----------------------------------------------------------------------------------------------------


class _Nearest:
    """The nearest stage of a transform that has no equal one. rule: what the transform does."""

    def __init__(self, entry: Entry, rule: str) -> None:
        self.entry, self.rule = entry, rule


_Equal = Entry | _Nearest | None
"""What stands for a transform; None if it runs as it is, by its name."""


def _filters(interpolation: str, *, antialias: bool) -> dict[str, Any]:
    """The keys of a resize, without those that are defaults; of the filter most like it if it is not offered."""
    chosen = interpolation if interpolation in _FILTERS else "bicubic" if interpolation == "lanczos" else "bilinear"
    keys = {} if chosen == "bilinear" else {"interpolation": chosen}
    return keys if antialias else {**keys, "antialias": False}


def _mode(transform: Any) -> str:
    """The interpolation's name; `random` where timm draws it."""
    mode = transform.interpolation
    if isinstance(mode, (tuple, list)):
        return "random"
    return _PILLOW_NUMBERS.get(mode, str(mode)) if isinstance(mode, int) else str(getattr(mode, "value", mode))


_PILLOW_NUMBERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
"""What v2's transforms take for names of filters, too."""


def _target(size: Any) -> dict[str, Any]:
    """The keys for a size: an int, or a sequence of one or two."""
    sides = _sides(size)
    return {"shorter": sides[0]} if len(sides) == 1 else {"height": sides[0], "width": sides[1]}


def _sides(size: Any) -> list[int]:
    return [size] if isinstance(size, int) else [int(side) for side in size]


def _least_side(transform: Any, before: int) -> int:
    """How many pixels the shorter side has at least after a transform. before: what it had before."""
    name = type(transform).__name__
    if name in _CROPS or (
        name == "Resize" and transform.size is not None and getattr(transform, "max_size", None) is None
    ):
        return min(_sides(transform.size))
    return before if name in _SAME_SIZE else 1


def _resize(reader: _Reader, t: Any) -> _Equal:
    limit = getattr(t, "max_size", None)
    if t.size is None:
        keys = {"longer": limit}
    else:
        keys = _target(t.size) if limit is None else {**_target(t.size), "max_size": limit}
    return _sampled(reader, "resize", keys, t)


def _sampled(reader: _Reader, stage: str, keys: dict[str, Any], t: Any) -> _Equal:
    """A stage that resizes. `antialias` counts for tensors only. The stage clamps, as torchvision does for levels."""
    mode = _mode(t)
    unclamped = mode == "bicubic" and reader.scaled
    if unclamped and _parameters(t) is not None:
        return None
    if mode == "nearest" and reader.tensor:
        return Entry(stage, {**keys, "interpolation": "nearest"})
    if mode == "nearest-exact" and reader.tensor:
        return None
    if mode.startswith("nearest") and (parameters := _parameters(t)) is not None:
        rule = f"{type(t).__name__} takes Pillow's nearest pixels, of two that are equally near often the other one"
        return _Nearest(Entry("torchvision", {**parameters, "interpolation": "nearest-exact"}), rule)
    entry = Entry(stage, {**keys, **_filters(mode, antialias=not reader.tensor or bool(getattr(t, "antialias", True)))})
    if unclamped:
        return _Nearest(entry, f"{type(t).__name__} resizes floats by bicubic, and does not clamp them to 0-1")
    if mode in _FILTERS:
        return entry
    return _Nearest(entry, f"{type(t).__name__} resizes by {mode}, which the stage {stage} does not have")


def _random_resized_crop(reader: _Reader, t: Any) -> _Equal:
    scale, ratio = ([number(x) for x in value] for value in (t.scale, t.ratio))
    keys: dict[str, Any] = {"size": size_of(t.size)}
    keys |= {"scale": scale} if scale != [0.08, 1] else {}
    keys |= {"ratio": ratio} if ratio != [0.75, number(4 / 3)] else {}
    return _sampled(reader, "random_resized_crop", keys, t)


def _random_crop(reader: _Reader, t: Any) -> _Equal:
    keys: dict[str, Any] = {"size": size_of(t.size)}
    padding = _numbers(_padding_of(t) or 0)
    if t.pad_if_needed or padding != 0:
        if (around := _around(reader, t)) is None:
            return None
        keys |= {"padding": padding} if padding != 0 else {}
        keys |= {"pad_if_needed": True} if t.pad_if_needed else {}
        keys |= around
    return Entry("random_crop", keys)


def _padding_of(crop: Any) -> Any:
    """The padding of a RandomCrop as users give it; v2's holds it as left, right, top and bottom."""
    from torchvision.transforms import v2

    if not isinstance(crop, v2.RandomCrop) or crop.padding is None:
        return crop.padding
    left, right, top, bottom = crop.padding
    return [left, top, right, bottom]


def _flip(side: str) -> Callable[[_Reader, Any], _Equal]:
    return lambda reader, t: Entry("flip", {side: number(t.p)})


def _of_images(value: Any) -> Any:
    """The value for images of a transform of v2, which may have one for each type of its inputs."""
    return _of_type(value, "Image", "Tensor") if isinstance(value, dict) else value


def _of_type(values: dict[Any, Any], *types: str) -> Any:
    """The value for the first of these types that has one, or else for all others; None without either."""
    names = {getattr(key, "__name__", key): one for key, one in values.items()}
    return next((names[name] for name in (*types, "others") if name in names), None)


def _fill(reader: _Reader, t: Any) -> dict[str, Any] | None:
    """The key `fill`, unless it is black; None if it is no level."""
    fill = _of_images(t.fill)
    levels = [reader.level(value) for value in (fill if isinstance(fill, (list, tuple)) else [fill or 0])]
    if None in levels:
        return None
    if isinstance(t.fill, dict) and (level := _of_type(t.fill, "Mask")):
        reader.masks_filled = level
    return {"fill": levels[0] if len(set(levels)) == 1 else levels} if any(levels) else {}


def _warped(reader: _Reader, t: Any, stage: str, keys: dict[str, Any]) -> _Equal:
    """A stage that warps. torchvision's default is nearest, and that of gpuflow bilinear."""
    reader.note_pillow(_PILLOW_WARPS)
    if _mode(t) not in ("nearest", "bilinear") or (fill := _fill(reader, t)) is None:
        return None
    center, expand = getattr(t, "center", None), getattr(t, "expand", False)
    if center is not None and expand:  # which moves the image out of the frame
        return None
    if expand:
        keys = {**keys, "expand": True}
    if center is not None:
        keys = {**keys, "center": [number(x) for x in center]}
    return Entry(stage, {**keys, **({"interpolation": "nearest"} if _mode(t) == "nearest" else {}), **fill})


def _span(value: Sequence[float]) -> Any:
    """[-v, v] as v."""
    low, high = (number(x) for x in value)
    return high if low == -high else [low, high]


def _affine(reader: _Reader, t: Any) -> _Equal:
    keys: dict[str, Any] = {"degrees": _span(t.degrees)}
    for key in ("translate", "scale"):
        if (value := getattr(t, key)) is not None:
            keys[key] = [number(x) for x in value]
    if t.shear is not None:
        keys["shear"] = _span(t.shear) if len(t.shear) == 2 else [number(x) for x in t.shear]
    return _warped(reader, t, "affine", keys)


def _perspective(reader: _Reader, t: Any) -> _Equal:
    return _warped(
        reader, t, "perspective", {"distortion_scale": number(t.distortion_scale), "probability": number(t.p)}
    )


def _pad(reader: _Reader, t: Any) -> _Equal:
    around = _around(reader, t)
    return None if around is None else Entry("pad", {"padding": _numbers(t.padding), **around})


def _numbers(value: int | Sequence[int]) -> int | list[int]:
    """A padding or a neighbourhood as YAML has it: one number if all are equal."""
    sides = [value] if isinstance(value, int) else [int(side) for side in value]
    return sides[0] if len(set(sides)) == 1 else sides


def _numbers_of(value: Any) -> list[float]:
    """The mean or the deviation of a Normalize: a sequence, or, in v1, one number for all channels."""
    return [number(x) for x in ([value] if np.ndim(value) == 0 else value)]


def _around(reader: _Reader, t: Any) -> dict[str, Any] | None:
    """The keys `border` and `fill` of what is padded, without defaults; None if no stage has them."""
    if t.padding_mode not in ("constant", "edge", "reflect", "symmetric"):
        return None
    return _fill(reader, t) if t.padding_mode == "constant" else {"border": t.padding_mode}


def _color_jitter(reader: _Reader, t: Any) -> _Equal:
    """A range [max(0, 1 - v), 1 + v], or [-v, v] of hues, is written as v."""
    keys: dict[str, Any] = {}
    for name, neutral in (("brightness", 1.0), ("contrast", 1.0), ("saturation", 1.0), ("hue", 0.0)):
        if (bounds := getattr(t, name)) is not None:
            low, high = bounds
            amount = round(high - neutral, 7)
            symmetric = abs(range_of(amount, neutral=neutral)[0] - low) < 1e-9
            keys[name] = number(amount) if symmetric else [number(low), number(high)]
    if t.hue is not None:
        reader.note_pillow(_PILLOW_HUE)
    return Entry("color_jitter", keys)


def _probability(stage: str) -> Callable[[_Reader, Any], _Equal]:
    return lambda reader, t: Entry(stage, {"probability": number(t.p)})


def _solarize(reader: _Reader, t: Any) -> _Equal:
    threshold = round(t.threshold * 255, 3) if reader.scaled else t.threshold
    return Entry("solarize", {"threshold": number(threshold), "probability": number(t.p)})


def _grayscale(reader: _Reader, t: Any) -> _Equal:
    return Entry("grayscale", {}) if t.num_output_channels == 3 else None


def _gaussian_blur(reader: _Reader, t: Any) -> _Equal:
    low, high = (number(x) for x in t.sigma)
    return Entry("gaussian_blur", {"kernel_size": _numbers(t.kernel_size), "sigma": [low, high]})


def _random_erasing(reader: _Reader, t: Any) -> _Equal:
    """On levels here. torchvision erases floats mostly, and zeros after its Normalize are the mean colour."""
    value = [float(x) for x in t.value] if isinstance(t.value, (list, tuple)) else t.value
    keys: dict[str, Any] = {"probability": number(t.p)}
    for key, default in (("scale", [0.02, 0.33]), ("ratio", [0.3, 3.3])):
        given = [number(x) for x in getattr(t, key)]
        keys |= {key: given} if given != default else {}
    return Entry("random_erasing", {**keys, **_mean_level(reader)}) if value in (0, [0.0]) else None


def _erasing_of_timm(reader: _Reader, t: Any) -> _Equal:
    keys: dict[str, Any] = {"probability": number(t.probability), "scale": [number(t.min_area), number(t.max_area)]}
    keys["ratio"] = [number(math.exp(x)) for x in t.log_aspect_ratio]
    entry = Entry("random_erasing", {**keys, **_mean_level(reader)})
    if t.rand_color or t.per_pixel or t.max_count != 1:
        return _Nearest(entry, "timm's RandomErasing fills with noise, or several boxes")
    return entry


def _mean_level(reader: _Reader) -> dict[str, Any]:
    """The key `value` for zeros at this place, unless that is black."""
    if reader.mean is None:
        return {}
    same = reader.mean == IMAGENET_MEAN
    return {"value": "imagenet" if same else [round(255 * level) for level in reader.mean]}


def _policy(stage: str, **names: str) -> Callable[[_Reader, Any], _Equal]:
    """A policy of augmentations. names: torchvision's attributes, and gpuflow's keys for them."""

    def equal(reader: _Reader, t: Any) -> _Equal:
        if getattr(getattr(t, "policy", None), "value", "imagenet") != "imagenet":
            return None
        keys = {key: getattr(t, name) for name, key in names.items()}
        return _warped(reader, t, stage, {**keys, "interpolation": _mode(t)})  # whose default is nearest

    return equal


_EQUAL: dict[str, Callable[[_Reader, Any], _Equal]] = {
    "Resize": _resize,
    "CenterCrop": lambda reader, t: Entry("center_crop", {"size": size_of(t.size)}),
    "RandomCrop": _random_crop,
    "RandomResizedCrop": _random_resized_crop,
    "RandomHorizontalFlip": _flip("horizontal"),
    "RandomVerticalFlip": _flip("vertical"),
    "RandomRotation": lambda reader, t: _warped(reader, t, "rotate", {"degrees": _span(t.degrees)}),
    "RandomAffine": _affine,
    "RandomPerspective": _perspective,
    "Pad": _pad,
    "ColorJitter": _color_jitter,
    "Grayscale": _grayscale,
    "RandomGrayscale": _probability("grayscale"),
    "RandomAutocontrast": _probability("autocontrast"),
    "RandomEqualize": _probability("equalize"),
    "RandomInvert": _probability("invert"),
    "RandomPosterize": lambda reader, t: Entry("posterize", {"bits": t.bits, "probability": number(t.p)}),
    "RandomSolarize": _solarize,
    "RandomAdjustSharpness": lambda reader, t: Entry(
        "sharpness", {"amount": [number(t.sharpness_factor)] * 2, "probability": number(t.p)}
    ),
    "GaussianBlur": _gaussian_blur,
    "RandomErasing": _random_erasing,
    "RandAugment": _policy("rand_augment", num_ops="operations", magnitude="magnitude", num_magnitude_bins="bins"),
    "TrivialAugmentWide": _policy("trivial_augment", num_magnitude_bins="bins"),
    "AutoAugment": _policy("auto_augment"),
}
"""What stands for each transform of torchvision."""
_TIMM: dict[str, Callable[[_Reader, Any], _Equal]] = {
    "RandomResizedCropAndInterpolation": _random_resized_crop,
    "RandomErasing": _erasing_of_timm,
}
"""What stands for each transform of timm."""

_PRESETS = ("ImageClassification", "SemanticSegmentation")
_MOVABLE = ("RandomHorizontalFlip", "RandomVerticalFlip", "CenterCrop", "RandomErasing")
"""Transforms that may follow Normalize, and whose stage then stands before normalize."""
_EXACT = ("center_crop", "flip", "pad", "random_crop", "random_erasing")
"""Stages whose results are levels of the image, so that they do not round."""
_FLOAT_TYPES = ("float32", "float16", "bfloat16")
_CROPS = ("CenterCrop", "RandomCrop", "RandomResizedCrop", "RandomResizedCropAndInterpolation")
_SAME_SIZE = (
    *("RandomHorizontalFlip", "RandomVerticalFlip", "RandomErasing", "ColorJitter", "Grayscale", "RandomGrayscale"),
    *("GaussianBlur", "RandAugment", "TrivialAugmentWide", "AutoAugment"),
)
_RESIZING = ("Resize", "RandomResizedCrop", "RandomResizedCropAndInterpolation")
_REFUSED = {
    "Lambda": "runs Python code, which a file cannot hold",
    "RandomChoice": "draws one of several transforms",
    "RandomOrder": "draws the order of transforms",
    "FiveCrop": "gives five images",
    "TenCrop": "gives ten images",
    "LinearTransformation": "holds a matrix of the whole image",
    "CutMix": "mixes a batch",
    "MixUp": "mixes a batch",
    "VideoClassification": "takes videos",
    "OpticalFlow": "takes pairs of images",
}
_NEAREST = {
    "RandomChoice": "the first of its transforms",
    "RandomOrder": "its transforms in the order in which they stand",
    "MixUp": "mixup, at the end of pipelines.train",
    "CutMix": "cutmix, at the end of pipelines.train",
    "RandAugment": "rand_augment, whose magnitudes are torchvision's",
    "AutoAugment": "auto_augment",
    "AugMixAugment": "torchvision: {name: AugMix}",
}


def _nothing(reader: _Reader, t: Any) -> None:
    """What gpuflow does anyway."""


def _to_image(reader: _Reader, t: Any) -> None:
    reader.tensor = True


def _to_scaled(reader: _Reader, t: Any) -> None:
    """Only the ToTensor of torchvision.transforms refuses tensors; the others leave them as they are."""
    leaves_tensors = type(t).__name__ == "MaybeToTensor" or type(t).__module__.startswith("torchvision.transforms.v2")
    if not reader.scaled and not (reader.tensor and leaves_tensors):
        reader.tensor = reader.scaled = True


def _to_rgb(reader: _Reader, t: Any) -> None:
    """Images have three channels, unless Grayscale has left one."""
    if any(entry.parameters.get("name") == "Grayscale" for entry in reader.entries):
        reader.by_name(t)


_STEPS: dict[str, Callable[[_Reader, Any], None]] = {
    "ToTensor": _to_scaled,
    "MaybeToTensor": _to_scaled,
    "PILToTensor": _to_image,
    "MaybePILToTensor": _to_image,
    "ToImage": _to_image,
    "ToPILImage": _Reader.to_pil,
    "ToDtype": _Reader.change_type,
    "ConvertImageDtype": _Reader.change_type,
    "Normalize": _Reader.normalize,
    "ToPureTensor": _nothing,
    "Identity": _nothing,
    "RGB": _to_rgb,
}
"""What changes the type of an image, but not its pixels."""


# --- transforms that run by their names -------------------------------------------------------------------------------


def _parameters(transform: Any) -> dict[str, Any] | None:
    """A transform's name in v2 and its keyword arguments as YAML has them; None if they are not known."""
    from torchvision.transforms import v2

    cls = getattr(v2, type(transform).__name__, None)
    if cls is None:
        return None
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        if name == "self" or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if not hasattr(transform, name):
            return None
        value = _padding_of(transform) if (cls, name) == (v2.RandomCrop, "padding") else getattr(transform, name)
        value = _plain(_of_images(value))
        if name == "interpolation" and isinstance(value, int):
            value = _PILLOW_NUMBERS.get(value, value)
        if cls is v2.RandomErasing and name == "value" and value is None:  # as v2 keeps it
            value = "random"
        if value is _UNKNOWN:
            return None
        if value != _plain(parameter.default):
            found[name] = value
    return {"name": cls.__name__, **found}


def _composes(holder: Any) -> dict[str, Any]:
    """The attributes of an object that are a Compose, as presets of torchvision's reference trainings have one."""
    held = dict(getattr(holder, "__dict__", {}))
    held |= held.get("_modules", {})
    kinds = {name: type(value) for name, value in held.items()}
    return {
        name: held[name]
        for name, kind in kinds.items()
        if kind.__name__ == "Compose" and kind.__module__.startswith("torchvision.")
    }


_UNKNOWN = object()


def _plain(value: Any) -> Any:
    """A value as YAML has it."""
    if isinstance(value, (list, tuple)):
        items = [_plain(item) for item in value]
        return _UNKNOWN if any(item is _UNKNOWN for item in items) else items
    kind = type(value).__name__
    if kind == "InterpolationMode":
        return value.value
    if kind == "dtype":
        return str(value).removeprefix("torch.")
    if kind == "Tensor":
        return [number(x) for x in value.flatten().tolist()]
    return number(value) if isinstance(value, float) else value if value is None or kind in _PLAIN else _UNKNOWN


_PLAIN = ("bool", "int", "str")
