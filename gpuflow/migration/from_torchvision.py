"""Reads transforms of torchvision, v1 and v2, and those of timm among them: objects in Python, to entries."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpuflow.config.stage_entries import make_stage
from gpuflow.migration.imported import (
    FILTERS,
    IMAGENET_MEAN,
    PILLOW_13,
    PILLOW_FILTERS,
    Entry,
    Imported,
    Step,
    apart,
    decode,
    each_channel,
    entry_of,
    filter_keys,
    gap,
    normalize,
    number,
    numbers,
    size_of,
    span,
)
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.parameters import range_of

_TENSORS = "Matches torchvision: the stages are its v2 transforms of uint8 tensors, to the level."
_PILLOW = (
    "They get PIL images, which Pillow resizes: within 1 level of tensors for bilinear filters, 2 for bicubic ones. "
    + PILLOW_13
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
_DRAWS = "not measured: it draws random numbers"
_LEVELS = s.ImageSpec(shape=(None, None, 3), color="rgb")
_FLOATS = _LEVELS.replace(dtype="float32", layout="nchw")


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """Holds what is known of the image at the place of a transform.

    place: the place, such as `train:val[2]`. table: the vocabulary.
    tensor, scaled: whether the image is a tensor, and one of floats: of 0 to 1, but for conversions that run by their
    names. dtype: that of the floats. gray: it has one channel. mean: that of Normalize. floats: the number of entries
    from the one on that makes floats.
    """

    place: str
    table: Mapping[str, type[s.Stage]]
    tensor: bool = False
    scaled: bool = False
    dtype: str = "float32"
    gray: bool = False
    mean: tuple[float, ...] | None = None
    floats: int = 0

    def level(self, value: float) -> int | None:
        """Return the level of 0-255 that a number is in the units of this place, of floats the nearest.

        None if it is not one.
        """
        level = value * 255 if self.scaled else value
        whole = round(level)
        return whole if 0 <= whole <= 255 and (self.scaled or whole == level) else None


_Step = Step[_State]


def read_transform(
    transform: Any, source: str, table: Mapping[str, type[s.Stage]], *, tensor: bool = False
) -> Imported:
    """Return the stages of a transform, which is run on a test picture where something in it has no equal stage.

    Args:
        transform: a Compose, or any transform of one image.
        source: as the user named it.
        table: the vocabulary.
        tensor: it gets uint8 tensors, not PIL images.

    Examples:
        >>> from gpuflow.stages import STAGES
        >>> from torchvision import transforms
        >>> transform = transforms.Compose([transforms.Resize(256), transforms.ToTensor()])
        >>> found = read_transform(transform, "train:val", STAGES)
        >>> [entry.stage for entry in found.pipelines["val"]]
        ['decode', 'resize', 'normalize']
    """
    step = _read(transform, _State(place=source, table=table, tensor=tensor))
    if step.state.scaled and not step.floats:
        step = replace(step, floats=(_normalized(step.state),))
    entries = (*step.entries, *step.floats)
    random = any(make_stage(entry.as_yaml, table).random for entry in entries)
    return Imported(
        source=source,
        matches=(_TENSORS, *dict.fromkeys(step.notes), *((_RANDOM,) if random else ())),
        pipelines={"train" if random else "val": (decode(), *entries)},
        gaps=step.gaps,
    )


def _read(transform: Any, state: _State) -> _Step:
    """Return what a transform becomes. Its notes are added here, in every case."""
    name, library = type(transform).__name__, type(transform).__module__.partition(".")[0]
    if (read := _STEPS.get((library, name))) is not None:
        step = read(state, transform)
    elif (equal := _EQUAL.get((library, name))) is not None:
        step = _carried_over(state, transform, equal(state, transform))
    elif library == "torchvision" and name not in _REFUSED:
        step = _by_name(state, transform)
    else:
        step = _refused(state, transform)
    return replace(step, notes=(*_notes(transform, state), *step.notes))


def _notes(transform: Any, state: _State) -> Iterator[str]:
    """Yield how a transform treats PIL images otherwise than tensors, if it gets PIL images, and masks than images."""
    name, fill = type(transform).__name__, getattr(transform, "fill", None)
    if not state.tensor:
        if name in (*_RESIZING, *_PRESETS):
            yield _PILLOW
        if name in _WARPING:
            yield _PILLOW_WARPS
        if getattr(transform, "hue", None) is not None:
            yield _PILLOW_HUE
    pads = getattr(transform, "padding_mode", "constant") == "constant"
    if isinstance(fill, dict) and pads and (level := _of_type(fill, "Mask")):
        yield _MASKS.format(level)


# --- containers, which return the steps of their transforms with all notes and gaps -----------------------------------


def _in_order(state: _State, transforms: Iterable[Any]) -> _Step:
    step = Step(state=state)
    for i, part in enumerate(transforms):
        step = step.then(_read(part, replace(step.state, place=f"{state.place}[{i}]")))
    return step


def _random_apply(state: _State, transform: Any) -> _Step:
    """Return the step of transforms that are applied with a probability, which one stage may have as a key."""
    step = _in_order(state, transform.transforms)
    stages = (*step.entries, *step.floats)
    if step.entries and len(stages) == 1 and not step.gaps and stages[0].parameters.get("probability", 1) == 1:
        sometimes = Entry(stages[0].stage, {**stages[0].parameters, "probability": number(transform.p)})
        if _fault(state, sometimes) is None:
            return replace(step, entries=(sometimes,))
    names = ", ".join(type(part).__name__ for part in transform.transforms)
    rule = f"RandomApply of {names} with p={transform.p:g} has no equal stage"
    change = "which changes all images" if transform.p < 1 else ""
    return _with_gap(step, f"{state.place}:", rule, "its transforms without RandomApply", change)


def _random_choice(state: _State, transform: Any) -> _Step:
    """Return the first of several transforms, with the notes and gaps of all."""
    parts = enumerate(transform.transforms)
    first, *others = [_read(part, replace(state, place=f"{state.place}[{i}]")) for i, part in parts]
    for other in others:
        first = first.then(replace(first, entries=(), floats=(), gaps=other.gaps, notes=other.notes))
    return _unlike(first, state, transform)


def _unlike(step: _Step, state: _State, container: Any) -> _Step:
    """Add the gap of a container to what stands for it."""
    name = type(container).__name__
    return _with_gap(step, f"{state.place}:", f"{name} {_REFUSED[name]}", _NEAREST[name], _DRAWS)


def _with_gap(step: _Step, place: str, rule: str, nearest: str, apart: str) -> _Step:
    return step.behind(gap(place, rule, nearest, apart))


# --- single transforms ------------------------------------------------------------------------------------------------


def _preset(state: _State, preset: Any) -> _Step:
    """Return the step of a preset that comes with torchvision's weights, which takes PIL images and tensors."""
    step = Step(state=state)
    size = preset.resize_size and _target(list(preset.resize_size))
    if size and isinstance(resize := _sampled(state, "resize", preset, **size), Entry):
        step = _on_levels(state, resize)
    elif size:
        step = _refused(state, preset, f"resizes by {_mode(preset)}, which the stage resize does not have")
    if crop := getattr(preset, "crop_size", None):
        step = step.then(_on_levels(step.state, entry_of("center_crop", size=size_of(crop))))
    return step.then(_normalize(replace(step.state, tensor=True, scaled=True), preset))


def _carried_over(state: _State, transform: Any, found: _Equal) -> _Step:
    """Return the step of a transform for which there is a stage, at least for some of its parameters."""
    movable = type(transform).__name__ in _MOVABLE and state.floats <= 1
    unfit = isinstance(found, Entry) and _fault(state, found) is not None  # a number that the stage does not take
    if found is None or unfit or (state.floats and not movable):
        return _by_name(state, transform)
    if isinstance(found, Entry):
        return _on_levels(state, found)
    stage = make_stage(found.entry.as_yaml, state.table)
    levels = replace(state, tensor=True, scaled=False)
    measured = apart(
        lambda image: transform(_input(state, image)), lambda image: stage.torchvision()(_input(levels, image))
    )
    step = _on_levels(state, found.entry)
    return _with_gap(step, f"{state.place}:", found.rule, repr(stage), measured)


def _on_levels(state: _State, entry: Entry) -> _Step:
    """Return the step of an entry that works on levels of 0-255: before normalize, if that stands there."""
    rounds = state.scaled and entry.stage not in _EXACT
    return Step(state=state, entries=(entry,), notes=(_FLOATS_ROUND,) if rounds else ())


def _on_floats(state: _State, *entries: Entry) -> _Step:
    return Step(state=replace(state, floats=state.floats + len(entries)), floats=entries)


def _by_name(state: _State, transform: Any, **changed: Any) -> _Step:
    """Return the step of a transform that runs as it is: `torchvision: {name: ...}`."""
    if (parameters := _parameters(transform)) is None:
        return _refused(state, transform)
    entry = Entry("torchvision", {**parameters, **changed}, "has no faster form")
    if (reason := _fault(state, entry, _FLOATS if state.scaled else _LEVELS)) is not None:
        return _refused(state, transform, reason)
    after = replace(state, gray={"Grayscale": True, "RGB": False}.get(parameters["name"], state.gray))
    if state.floats:
        return _on_floats(after, entry)
    if state.scaled:
        return _on_floats(after, _normalized(state), entry)
    return Step(state=after, entries=(entry,))


def _refused(state: _State, transform: Any, reason: str = "is not a transform that gpuflow knows") -> _Step:
    """Return the gap of what no stage does. The nearest is to leave it out, unless a stage is like it."""
    place, name = f"{state.place}:", type(transform).__name__
    called = getattr(transform, "lambd", transform)
    if (code := getattr(called, "__code__", None)) is not None:
        place = f"{code.co_filename}:{code.co_firstlineno}: {place}"
        written = called.__name__ if called is transform else f"{name}({called.__name__})"
        rule = f"{written} is Python code, which a file cannot hold"
    else:
        rule = f"{name} {_REFUSED.get(name, reason)}"
    if (held := _composes(transform)) and name not in _REFUSED:
        return _holder(state, place, rule, held)
    entries: tuple[Entry, ...] = ()
    nearest, measured = _NEAREST.get(name), _DRAWS
    if name in _LIKE_TIMM and type(transform).__module__.startswith("timm."):
        nearest, entries = _LIKE_TIMM[name]
    if nearest is None:
        nearest = "leave it out"
        measured = apart(lambda image: transform(_input(state, image)), lambda image: _input(state, image))
    return _with_gap(Step(state=state, entries=entries), place, rule, nearest, measured)


def _holder(state: _State, place: str, rule: str, held: Mapping[str, Any]) -> _Step:
    """Return the step of an object whose code calls one Compose or several, which it holds by these names."""
    names = ", ".join(held)
    if len(held) > 1:
        nearest, about = f"its attributes {names}, each a Compose", "views of one image are written as views"
        return _with_gap(Step(state=state), place, rule, nearest, about)
    step = _read(held[names], replace(state, place=f"{state.place}.{names}"))
    nearest, about = f"its attribute {names}, a Compose", "what else its code does is not known"
    return _with_gap(step, place, rule, nearest, about)


# --- what changes the type of an image --------------------------------------------------------------------------------


def _normalize(state: _State, transform: Any) -> _Step:
    """Return the step of torchvision's Normalize, or of a preset with its numbers."""
    given = {key: numbers(getattr(transform, key)) for key in ("mean", "std")}
    if not state.scaled or state.floats:
        return _by_name(state, transform, **given)
    mean = each_channel(given["mean"], gray=state.gray)
    return _on_floats(replace(state, mean=mean), _normalized(state, **given))


def _normalized(state: _State, mean: Sequence[float] = (0,), std: Sequence[float] = (1,)) -> Entry:
    numbers = (each_channel(given, gray=state.gray) for given in (mean, std))
    return normalize(*numbers, dtype=state.dtype)


def _change_type(state: _State, transform: Any) -> _Step:
    """Return a conversion of numbers. Those of v2 convert tensors only; that of v1 refuses PIL images."""
    if state.tensor or not type(transform).__module__.startswith("torchvision.transforms.v2"):
        return _converted(state, transform)
    return Step(state=state, notes=(_PILLOW_TYPES.format(type(transform).__name__),))


def _converted(state: _State, transform: Any) -> _Step:
    """Return the step of a conversion that takes place. On levels, nothing is needed but the type."""
    dtype, scale = str(_of_images(transform.dtype)).removeprefix("torch."), getattr(transform, "scale", True)
    if dtype == (state.dtype if state.scaled else "uint8"):
        return Step(state=replace(state, tensor=True))
    if dtype == "None":  # images are not converted
        return Step(state=state)
    changed: dict[str, Any] = {"tensor": True, "scaled": dtype != "uint8"}
    changed |= {"dtype": dtype} if changed["scaled"] else {}
    if not state.floats and scale and dtype in ("uint8", *_FLOAT_TYPES):
        return Step(state=replace(state, **changed))
    step = _by_name(state, transform)
    floats = (*step.entries, *step.floats)
    if not floats:
        return step
    return replace(_on_floats(replace(state, **changed), *floats), gaps=step.gaps, notes=step.notes)


def _unscaled(state: _State, transform: Any) -> _Step:
    """Return the step of timm's ToTensor, which gives levels as floats."""
    from torchvision.transforms import v2

    return _converted(state, v2.ToDtype(transform.dtype, scale=False))


def _to_pil(state: _State, transform: Any) -> _Step:
    step = Step(state=state)
    if state.scaled:
        step = _refused(state, transform, "makes levels of floats again")
    elif transform.mode not in (None, "RGB"):
        step = _refused(state, transform, f"takes the channels for {transform.mode}")
    return replace(step, state=replace(state, tensor=False))


# --- checks -----------------------------------------------------------------------------------------------------------


def _fault(state: _State, entry: Entry, spec: s.ImageSpec | None = None) -> str | None:
    """Return why there is no stage of an entry, or why it cannot take what `spec` says; None if it can."""
    try:
        stage = make_stage(entry.as_yaml, state.table)
        if spec is not None:
            stage.output(spec)
    except ValueError as error:
        return f"cannot run as a stage: {error}"
    return None


def _input(state: _State, image: Any) -> Any:
    """Return a PIL image as what a transform gets at this place."""
    from torchvision.transforms.v2 import functional

    if not state.tensor:
        return image
    tensor = functional.pil_to_tensor(image)
    return functional.to_dtype(tensor, scale=True) if state.scaled else tensor


# --- equal stages -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Nearest:
    """Stands for the nearest stage of a transform that has no equal one. rule: what the transform does."""

    entry: Entry
    rule: str


_Equal = Entry | _Nearest | None
"""What stands for a transform; None if it runs as it is, by its name."""


def _mode(transform: Any) -> str:
    """Return the interpolation's name; `random` where timm draws it."""
    mode = transform.interpolation
    if isinstance(mode, (tuple, list)):
        return "random"
    return _PILLOW_NUMBERS.get(mode, str(mode)) if isinstance(mode, int) else str(getattr(mode, "value", mode))


_PILLOW_NUMBERS = dict(enumerate(PILLOW_FILTERS))
"""What v2's transforms take for names of filters, too."""


def _target(size: Any) -> dict[str, Any]:
    """Return the keys for a size: an int, or a sequence of one or two."""
    sides = [size] if isinstance(size, int) else list(map(int, size))
    return {"shorter": sides[0]} if len(sides) == 1 else {"height": sides[0], "width": sides[1]}


def _resize(state: _State, t: Any) -> _Equal:
    limit = getattr(t, "max_size", None)
    sides = {"longer": limit} if t.size is None else {**_target(t.size), "max_size": limit}
    return _sampled(state, "resize", t, **sides)


def _sampled(state: _State, stage: str, t: Any, **keys: Any) -> _Equal:
    """Return a stage that resizes. `antialias` counts for tensors. It clamps, as torchvision does for levels."""
    mode, name = _mode(t), type(t).__name__
    unclamped = mode == "bicubic" and state.scaled
    parameters = _parameters(t)
    if (unclamped and parameters is not None) or (mode == "nearest-exact" and state.tensor):
        return None
    if mode == "nearest" and state.tensor:
        return entry_of(stage, **keys, interpolation=mode)
    if mode.startswith("nearest") and parameters is not None:
        rule = f"{name} takes Pillow's nearest pixels, of two that are equally near often the other one"
        return _Nearest(Entry("torchvision", {**parameters, "interpolation": "nearest-exact"}), rule)
    antialias = not state.tensor or bool(getattr(t, "antialias", True))
    entry = entry_of(stage, **keys, **filter_keys(mode, antialias=antialias))
    if unclamped:
        return _Nearest(entry, f"{name} resizes floats by bicubic, and does not clamp them to 0-1")
    return (
        entry
        if mode in FILTERS
        else _Nearest(entry, f"{name} resizes by {mode}, which the stage {stage} does not have")
    )


def _unless(default: Any, value: Any) -> Any:
    """Return a value, or None if it is a stage's default."""
    return None if value == default else value


def _random_resized_crop(state: _State, t: Any) -> _Equal:
    scale, ratio = _unless([0.08, 1], numbers(t.scale)), _unless([0.75, number(4 / 3)], numbers(t.ratio))
    return _sampled(state, "random_resized_crop", t, size=size_of(t.size), scale=scale, ratio=ratio)


def _zoom_out(state: _State, t: Any) -> _Equal:
    fill = _fill(state, t)
    keys = {"scale": numbers(t.side_range), "probability": number(t.p)}
    return None if fill is None else Entry("zoom_out", {**keys, **fill})


def _scale_jitter(state: _State, t: Any) -> _Equal:
    """Return a scale_jitter; torchvision's size is width, height."""
    keys = {"size": size_of(t.target_size[::-1]), "scale": numbers(t.scale_range)}
    return _sampled(state, "scale_jitter", t, **keys)


def _iou_crop(state: _State, t: Any) -> _Equal:
    keys = {"scale": [t.min_scale, t.max_scale], "ratio": [t.min_aspect_ratio, t.max_aspect_ratio]}
    return Entry("iou_crop", {**keys, "overlaps": numbers(t.options), "trials": t.trials})


def _random_crop(state: _State, t: Any) -> _Equal:
    padding, pads = _one_if_equal(_padding_of(t) or 0) or None, t.pad_if_needed or None
    around = _around(state, t) if padding or pads else {}
    if around is None:
        return None
    return entry_of("random_crop", size=size_of(t.size), padding=padding, pad_if_needed=pads, **around)


def _padding_of(crop: Any) -> Any:
    """Return the padding of a RandomCrop as users give it; v2's holds it as left, right, top and bottom."""
    from torchvision.transforms import v2

    if not isinstance(crop, v2.RandomCrop) or crop.padding is None:
        return crop.padding
    left, right, top, bottom = crop.padding
    return [left, top, right, bottom]


def _stage(stage: str, **attributes: str) -> Callable[[_State, Any], _Equal]:
    """Return what makes a stage of numbers. attributes: its keys, and torchvision's names of them."""
    return lambda state, t: Entry(stage, {key: number(getattr(t, name)) for key, name in attributes.items()})


def _of_images(value: Any) -> Any:
    """Return the value for images of a transform of v2, which may have one for each type of its inputs."""
    return _of_type(value, "Image", "Tensor") if isinstance(value, dict) else value


def _of_type(values: dict[Any, Any], *types: str) -> Any:
    """Return the value for the first of these types that has one, or else for all others; None without either."""
    names = {getattr(key, "__name__", key): one for key, one in values.items()}
    return next((names[name] for name in (*types, "others") if name in names), None)


def _fill(state: _State, t: Any) -> dict[str, Any] | None:
    """Return the key `fill`, unless it is black; None if it is no level."""
    fill = _of_images(t.fill)
    levels = [state.level(value) for value in np.ravel(fill or 0).tolist()]
    if None in levels:
        return None
    return {"fill": _one_if_equal(levels)} if any(levels) else {}


def _warped(state: _State, t: Any, stage: str, default: str = "bilinear", **keys: Any) -> _Equal:
    """Return a stage that warps. default: its interpolation; that of torchvision is nearest."""
    mode, fill = _mode(t), _fill(state, t)
    center, expand = getattr(t, "center", None), getattr(t, "expand", False)
    if mode not in ("nearest", "bilinear") or fill is None or (center and expand):  # which moves it out of the frame
        return None
    keys |= {"expand": expand or None, "center": center and numbers(center), "interpolation": _unless(default, mode)}
    return entry_of(stage, **keys, **fill)


def _affine(state: _State, t: Any) -> _Equal:
    translate, scale = (value and numbers(value) for value in (t.translate, t.scale))
    shear = t.shear and (span(t.shear) if len(t.shear) == 2 else numbers(t.shear))
    return _warped(state, t, "affine", degrees=span(t.degrees), translate=translate, scale=scale, shear=shear)


def _pad(state: _State, t: Any) -> _Equal:
    around = _around(state, t)
    return None if around is None else entry_of("pad", padding=_one_if_equal(t.padding), **around)


def _one_if_equal(values: Any) -> Any:
    """Return a padding or a neighbourhood as YAML has it: one number if all are equal."""
    sides = numbers(values)
    return sides[0] if len(set(sides)) == 1 else sides


def _around(state: _State, t: Any) -> dict[str, Any] | None:
    """Return the keys `border` and `fill` of what is padded, without defaults; None if no stage has them."""
    if t.padding_mode not in ("constant", "edge", "reflect", "symmetric"):
        return None
    return _fill(state, t) if t.padding_mode == "constant" else {"border": t.padding_mode}


def _jitter(bounds: Any, neutral: float) -> Any:
    """Return a range [max(0, 1 - v), 1 + v], or [-v, v] of hues, as v."""
    if bounds is None:
        return None
    low, high = bounds
    amount = round(high - neutral, 7)
    return number(amount) if abs(range_of(amount, neutral=neutral)[0] - low) < 1e-9 else numbers(bounds)


def _color_jitter(state: _State, t: Any) -> _Equal:
    factors = {name: _jitter(getattr(t, name), 1.0) for name in ("brightness", "contrast", "saturation")}
    return entry_of("color_jitter", **factors, hue=_jitter(t.hue, 0.0))


def _solarize(state: _State, t: Any) -> _Equal:
    threshold = round(t.threshold * 255, 3) if state.scaled else t.threshold
    return entry_of("solarize", threshold=number(threshold), probability=number(t.p))


def _random_erasing(state: _State, t: Any) -> _Equal:
    """Return a stage on levels. torchvision erases floats mostly, where zeros are Normalize's mean colour."""
    if np.ravel(t.value).tolist() != [0]:
        return None
    scale, ratio = _unless([0.02, 0.33], numbers(t.scale)), _unless([0.3, 3.3], numbers(t.ratio))
    return entry_of("random_erasing", probability=number(t.p), scale=scale, ratio=ratio, value=_mean_level(state))


def _erasing_of_timm(state: _State, t: Any) -> _Equal:
    scale, ratio = numbers([t.min_area, t.max_area]), numbers(np.exp(t.log_aspect_ratio))
    chance, value = number(t.probability), _mean_level(state)
    entry = entry_of("random_erasing", probability=chance, scale=scale, ratio=ratio, value=value)
    if t.rand_color or t.per_pixel or t.max_count != 1:
        return _Nearest(entry, "timm's RandomErasing fills with noise, or several boxes")
    return entry


def _mean_level(state: _State) -> Any:
    """Return the key `value` for zeros at this place; None if that is black."""
    if state.mean is None:
        return None
    return "imagenet" if state.mean == IMAGENET_MEAN else [round(255 * level) for level in state.mean]


def _policy(stage: str, **names: str) -> Callable[[_State, Any], _Equal]:
    """Return a policy of augmentations. names: torchvision's attributes, and gpuflow's keys for them."""

    def equal(state: _State, t: Any) -> _Equal:
        if getattr(getattr(t, "policy", None), "value", "imagenet") != "imagenet":
            return None
        return _warped(state, t, stage, "", **{key: getattr(t, name) for name, key in names.items()})

    return equal


_OF_TORCHVISION: dict[str, Callable[[_State, Any], _Equal]] = {
    "Resize": _resize,
    "CenterCrop": lambda state, t: entry_of("center_crop", size=size_of(t.size)),
    "RandomCrop": _random_crop,
    "RandomResizedCrop": _random_resized_crop,
    "RandomHorizontalFlip": _stage("flip", horizontal="p"),
    "RandomVerticalFlip": _stage("flip", vertical="p"),
    "RandomRotation": lambda state, t: _warped(state, t, "rotate", degrees=span(t.degrees)),
    "RandomAffine": _affine,
    "RandomPerspective": lambda state, t: _warped(
        state, t, "perspective", distortion_scale=number(t.distortion_scale), probability=number(t.p)
    ),
    "Pad": _pad,
    "RandomZoomOut": _zoom_out,
    "RandomIoUCrop": _iou_crop,
    "ScaleJitter": _scale_jitter,
    "ColorJitter": _color_jitter,
    "Grayscale": lambda state, t: entry_of("grayscale") if t.num_output_channels == 3 else None,
    "RandomGrayscale": _stage("grayscale", probability="p"),
    "RandomAutocontrast": _stage("autocontrast", probability="p"),
    "RandomEqualize": _stage("equalize", probability="p"),
    "RandomInvert": _stage("invert", probability="p"),
    "RandomPosterize": _stage("posterize", bits="bits", probability="p"),
    "RandomSolarize": _solarize,
    "RandomAdjustSharpness": lambda state, t: entry_of(
        "sharpness", amount=[number(t.sharpness_factor)] * 2, probability=number(t.p)
    ),
    "GaussianBlur": lambda state, t: entry_of(
        "gaussian_blur", kernel_size=_one_if_equal(t.kernel_size), sigma=numbers(t.sigma)
    ),
    "RandomErasing": _random_erasing,
    "RandAugment": _policy("rand_augment", num_ops="operations", magnitude="magnitude", num_magnitude_bins="bins"),
    "TrivialAugmentWide": _policy("trivial_augment", num_magnitude_bins="bins"),
    "AutoAugment": _policy("auto_augment"),
}
_EQUAL = {
    **{("torchvision", name): equal for name, equal in _OF_TORCHVISION.items()},
    ("timm", "RandomResizedCropAndInterpolation"): _random_resized_crop,
    ("timm", "RandomErasing"): _erasing_of_timm,
}
"""What stands for each transform, by library and name."""

_PRESETS = ("ImageClassification", "SemanticSegmentation")
_MOVABLE = ("RandomHorizontalFlip", "RandomVerticalFlip", "RandomErasing")
"""Transforms that may follow Normalize, and whose stage then stands before normalize."""
_EXACT = ("center_crop", "flip", "iou_crop", "pad", "random_crop", "random_erasing", "zoom_out")
"""Stages whose results are levels of the image, so that they do not round."""
_FLOAT_TYPES = ("float32", "float16", "bfloat16")
_RESIZING = ("Resize", "RandomResizedCrop", "RandomResizedCropAndInterpolation", "ScaleJitter")
_WARPING = ("RandomRotation", "RandomAffine", "RandomPerspective", "RandAugment", "TrivialAugmentWide", "AutoAugment")
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
}
_LIKE_TIMM = {
    "RandAugment": ("rand_augment, whose magnitudes are torchvision's", (Entry("rand_augment", {}),)),
    "AutoAugment": ("auto_augment", (Entry("auto_augment", {}),)),
    "AugMixAugment": ("torchvision: {name: AugMix}", (Entry("torchvision", {"name": "AugMix"}),)),
}
"""The stages that are most like transforms of timm."""


def _nothing(state: _State, t: Any) -> _Step:
    """Return an empty step, for what gpuflow does anyway."""
    return Step(state=state)


def _to_image(state: _State, t: Any) -> _Step:
    return Step(state=replace(state, tensor=True))


def _to_scaled(state: _State, t: Any) -> _Step:
    """Return the change to floats. Only torchvision.transforms' ToTensor refuses tensors; others leave them."""
    leaves_tensors = type(t).__name__ == "MaybeToTensor" or type(t).__module__.startswith("torchvision.transforms.v2")
    scales = not state.scaled and not (state.tensor and leaves_tensors)
    return Step(state=replace(state, tensor=True, scaled=True) if scales else state)


_CONVERSIONS: dict[str, Callable[[_State, Any], _Step]] = {
    "ToTensor": _to_scaled,
    "MaybeToTensor": _to_scaled,
    "PILToTensor": _to_image,
    "MaybePILToTensor": _to_image,
    "ToImage": _to_image,
    "ToPILImage": _to_pil,
    "ToDtype": _change_type,
    "ConvertImageDtype": _change_type,
    "Normalize": _normalize,
    "ToPureTensor": _nothing,
    "Identity": _nothing,
    "RGB": lambda state, t: _by_name(state, t) if state.gray else Step(state=state),
}
"""What changes the type of an image, but not its pixels. timm has some of these, too."""
_STEPS: dict[tuple[str, str], Callable[[_State, Any], _Step]] = {
    **{(library, name): read for library in ("torchvision", "timm") for name, read in _CONVERSIONS.items()},
    **{("torchvision", name): _preset for name in _PRESETS},
    ("timm", "ToTensor"): _unscaled,
    ("torchvision", "Compose"): lambda state, t: _in_order(state, t.transforms),
    ("torch", "Sequential"): _in_order,
    ("torchvision", "RandomApply"): _random_apply,
    ("torchvision", "RandomChoice"): _random_choice,
    ("torchvision", "RandomOrder"): lambda state, t: _unlike(_in_order(state, t.transforms), state, t),
}
"""What reads a transform that is more than one stage, by library and name."""


# --- transforms that run by their names -------------------------------------------------------------------------------


def _parameters(transform: Any) -> dict[str, Any] | None:
    """Return a transform's name in v2 and its keyword arguments as YAML has them; None if they are not known."""
    from torchvision.transforms import v2

    cls = getattr(v2, type(transform).__name__, None)
    if cls is None:
        return None
    found: dict[str, Any] = {"name": cls.__name__}
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        try:
            value = _padding_of(transform) if (cls, name) == (v2.RandomCrop, "padding") else getattr(transform, name)
            value = _plain(_of_images(value))
        except (AttributeError, TypeError):
            return None
        if name == "interpolation":
            value = _PILLOW_NUMBERS.get(value, value)
        if cls is v2.RandomErasing and name == "value" and value is None:  # as v2 keeps it
            value = "random"
        if parameter.default is parameter.empty or value != _plain(parameter.default):
            found[name] = value
    return found


def _composes(holder: Any) -> dict[str, Any]:
    """Return the attributes that are a Compose, such as that of presets of torchvision's reference trainings."""
    held = dict(getattr(holder, "__dict__", {}))
    held |= held.get("_modules", {})
    return {
        name: one
        for name, one in held.items()
        if type(one).__name__ == "Compose" and type(one).__module__.startswith("torchvision.")
    }


def _plain(value: Any) -> Any:
    """Return a value as YAML has it. Raises TypeError if YAML has no such value."""
    import torch
    from torchvision.transforms import InterpolationMode

    match value:
        case list() | tuple():
            return [_plain(item) for item in value]
        case InterpolationMode():
            return value.value
        case torch.dtype():
            return str(value).removeprefix("torch.")
        case torch.Tensor():
            return numbers(value)
        case float():
            return number(value)
        case None | int() | str():
            return value
    raise TypeError(f"{value!r} cannot be written as YAML")
