"""Reads a timm model's data configuration, by its name or from a JSON file, and the arguments of timm's train.py."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from gpuflow.errors import Problem, show, suggest
from gpuflow.migration.imported import (
    FILTERS,
    IMAGENET_MEAN,
    IMAGENET_STD,
    PILLOW_13,
    Document,
    Entry,
    Imported,
    Keys,
    decode,
    each_channel,
    entry_of,
    filter_keys,
    gap,
    needs,
    normalize,
    numbers,
    of_length,
    read_document,
    size_of,
    source_error,
)
from gpuflow.pipeline.parameters import LONGEST

_OTHER = (
    *("url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "architecture", "tag", "custom_load"),
    *("test_input_size", "min_input_size", "fixed_input_size", "test_crop_pct", "num_classes", "label_offset"),
    *("label_names", "label_descriptions", "pool_size", "test_pool_size", "first_conv", "classifier", "license"),
    *("description", "origin_url", "paper_name", "paper_ids", "notes", "num_features", "global_pool", "pretrained_cfg"),
    *("model_args",),
)
"""Keys of a pretrained_cfg, or of a model's config.json, that say nothing of the pixels."""
_MATCHES = (
    "Matches timm.data.create_transform(**timm.data.resolve_data_config(pretrained_cfg=...)) on PIL images: Pillow's "
    "resize is within 1 level of this one for bilinear filters, and 2 for bicubic ones. " + PILLOW_13,
    "train draws other random numbers than timm, with the same distributions. test_input_size and test_crop_pct count "
    "for timm's validate.py alone.",
    "timm numbers the classes of a folder in natural order without regard to case (2, 10, apple, Cat); source.folder "
    "sorts them as torchvision does (10, 2, Cat, apple). For a checkpoint of timm on such names, use a source.listing "
    "with classes: [...] in timm's order.",
)


_Side = Annotated[int, Field(ge=1, le=LONGEST)]
_Channels = Annotated[
    tuple[NonNegativeFloat, ...],
    of_length("one number for each channel", 1, 3),
    AfterValidator(partial(each_channel, gray=False)),
]


class DataConfig(Keys):
    """Holds what timm.data.resolve_data_config gives.

    Examples:
        >>> DataConfig(crop_pct=0.95).input_size
        (3, 224, 224)
    """

    input_size: Annotated[tuple[_Side, ...], of_length("three integers: channels, height, width", 3)] = (
        3,
        224,
        224,
    )
    interpolation: str = "bicubic"
    mean: _Channels = IMAGENET_MEAN
    std: _Channels = IMAGENET_STD
    crop_pct: PositiveFloat = 0.875
    crop_mode: Literal["center", "squash", "border"] = "center"


_DATA = tuple(DataConfig.model_fields)


def data_config(name: str) -> tuple[DataConfig, list[Problem]]:
    """Return the configuration that `timm:NAME` names, a model's or a file's, and a problem for each unknown key.

    A file in YAML holds arguments of timm's train.py.

    Raises:
        ConfigError: there is no such model or file, or a value is none that timm takes.
        MissingLibrary: timm is not installed, which only a model's name needs.
    """
    if name.endswith(_YAML):
        return _arguments(name)[0], []
    if not name.endswith(".json"):
        return _of_model(name), []
    document = read_document(name)
    at = ("pretrained_cfg",) if isinstance(document.data.get("pretrained_cfg"), dict) else ()
    keys = document.data[at[0]] if at else document.data
    if not set(keys) & set(_DATA):
        raise document.error(f"must hold timm's data_config or pretrained_cfg: none of {', '.join(_DATA)} is there")
    problems = list(document.unknown(at, keys, (*_DATA, *_OTHER), "timm's pretrained_cfg"))
    return document.parsed(DataConfig, _given(keys), *at), problems


def _of_model(name: str) -> DataConfig:
    timm = needs("timm", f"timm:{name}")
    try:
        found = timm.get_pretrained_cfg(name)
    except RuntimeError:
        found = None
    if found is None:
        model, _, tag = name.partition(".")
        known = timm.list_models() if not timm.is_model(model) else timm.list_pretrained(f"{model}.*")
        action = suggest(name if tag else model, known, else_all=False) or "gpuflow takes names of timm.list_models()"
        raise source_error(f"timm:{name}:", "names no model of timm", action=action)
    return DataConfig(**_given(vars(found)))


def _given(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a data configuration that count: what is empty is the default, as in resolve_data_config."""
    return {key: keys[key] for key in _DATA if keys.get(key)}


def read_timm(name: str) -> Imported:
    """Return the evaluation and the training of a timm model, or of arguments of train.py in a YAML file, as entries.

    Examples:
        >>> from pathlib import Path
        >>> Path("model.json").write_text('{"input_size": [3, 288, 288]}')
        29
        >>> read_timm("model.json").pipelines["val"][1]
        Entry(stage='resize', parameters={'shorter': 329, 'interpolation': 'bicubic'}, comment='288 / crop_pct 0.875')
    """
    source = f"timm:{name}"
    problems: list[Problem] = []
    document: Document | None = None
    if name.endswith(_YAML):
        config, given, document = _arguments(name)
    else:
        config, problems = data_config(name)
        given = {**Arguments().model_dump(), "interpolation": config.interpolation, "mean": config.mean}
    entries, gaps = evaluation(config, source)
    train = [decode(), *training_entries(given, config.input_size[1:], normalize(config.mean, config.std))]
    if given["mixup"] or given["cutmix"]:
        train.append(mixing(given))
    if document is not None:
        problems = [*document.unknown((), _misspelt(document.data), _READ, "timm's train.py")]
        unmet = [] if given["no_aug"] else [*unequal(given)]
        unmet += [(own, "has no stage", "leave it out") for own in _OF_BATCHES if given[own]]
        for own, rule, nearest in unmet:
            gaps.append(document.gap(f"{rule}, got {show(given[own])}", _NAMES.get(own, own), nearest=nearest))
    left = [str(key) for key, value in document.data.items() if value and key not in _TAKEN] if document else []
    return Imported(
        source=source,
        matches=(*_MATCHES, f"Not taken over: {', '.join(left)}.") if left else _MATCHES,
        pipelines={"train": train, "val": entries},
        gaps=(*problems, *gaps),
        batch_size=given.get("batch_size", 64),
        seed=given.get("seed", 0),
    )


# --- training ---------------------------------------------------------------------------------------------------------

_YAML = (".yaml", ".yml")
_NAMES = {
    "auto_augment": "aa",
    "re_prob": "reprob",
    "re_mode": "remode",
    "re_count": "recount",
    "re_split": "resplit",
    "num_aug_repeats": "aug_repeats",
    "num_aug_splits": "aug_splits",
    "interpolation": "train_interpolation",
}
"""The names in train.py of arguments of create_loader, where they differ."""
_OF_BATCHES = ("num_aug_repeats", "num_aug_splits", "cutmix_minmax")


class Arguments(Keys):
    """Holds the arguments of train.py that say how images are augmented, by their names in create_loader.

    The defaults are those of train.py.
    """

    model_config = ConfigDict(alias_generator=lambda name: _NAMES.get(name, name))

    train_crop_mode: str = ""
    scale: tuple[float, ...] = ()
    ratio: tuple[float, ...] = ()
    hflip: float = 0.5
    vflip: float = 0.0
    color_jitter: float | tuple[float, ...] = 0.4
    color_jitter_prob: float = 1.0
    grayscale_prob: float = 0.0
    gaussian_blur_prob: float = 0.0
    auto_augment: str = ""
    re_prob: float = 0.0
    re_mode: str = "pixel"
    re_count: int = 1
    re_split: bool = False
    num_aug_repeats: float = 0.0
    num_aug_splits: int = 0
    interpolation: str = "random"
    no_aug: bool = False
    mixup: float = 0.0
    cutmix: float = 0.0
    cutmix_minmax: tuple[float, ...] = ()
    mixup_prob: float = 1.0
    mixup_switch_prob: float = 0.5
    mixup_mode: str = "batch"
    smoothing: float = 0.1


class _Inputs(Keys):
    """Holds the arguments of train.py that say for which model it is, and of what size images and batches are."""

    model: str | None = None
    img_size: _Side | None = None
    in_chans: PositiveInt = 3
    batch_size: PositiveInt = 128
    seed: NonNegativeInt = 42


def _arguments(name: str) -> tuple[DataConfig, dict[str, Any], Document]:
    """Return the data configuration and the arguments of create_loader that a YAML file gives to train.py.

    Its other keys say nothing of the pixels.
    """
    document = read_document(name)
    keys = {key: value for key, value in document.data.items() if value is not None}
    if keys.keys().isdisjoint({"model", *_NAMES.values(), *Arguments.model_fields}):
        raise document.error("must hold arguments of timm's train.py, as its args.yaml does: none is there")
    given, inputs = document.parsed(Arguments, keys).model_dump(), document.parsed(_Inputs, keys)
    data = _given(keys)
    if inputs.img_size is not None:
        data.setdefault("input_size", [inputs.in_chans, inputs.img_size, inputs.img_size])
    if inputs.model is not None and not set(_DATA[:-2]) <= data.keys():
        data = {**data_config(inputs.model)[0].model_dump(), **data}
    config = document.parsed(DataConfig, data)
    if given["no_aug"] or not document.data.get("train_interpolation", "random"):
        given["interpolation"] = config.interpolation
    return config, {**given, **inputs.model_dump(), "mean": config.mean}, document


_READ = {*_DATA, *_Inputs.model_fields, *(_NAMES.get(name, name) for name in Arguments.model_fields)}
_TAKEN = _READ - {"model"}


def _misspelt(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that are no arguments that say how images are read, and are close to one, or its other name.

    Other arguments of train.py have no such name: the closest is clip_mode, which is 0.78 like crop_mode.
    """
    return {
        key: value
        for key, value in keys.items()
        if key not in _READ and (key in _NAMES or difflib.get_close_matches(str(key)[:4096], _READ, cutoff=0.8))
    }


def training_entries(given: Mapping[str, Any], size: int | Sequence[int], normalizing: Entry) -> Iterator[Entry]:
    """Yield the stages of `timm.data.create_transform(is_training=True)` between decode and mixing.

    given: its arguments. Where no stage equals one, `unequal` says so. size: (height, width), or the side of a square.
    """
    filters, box = filter_keys(given["interpolation"]), size_of(size)
    if given["no_aug"]:
        if isinstance(size, int):
            yield entry_of("resize", "no_aug", shorter=size, **filters)
            yield entry_of("center_crop", size=size)
        else:
            yield entry_of("resize", "no_aug", height=size[0], width=size[1], **filters)
        yield normalizing
        return
    scales = {name: numbers(given[name]) for name in ("scale", "ratio") if given[name]}
    match given["train_crop_mode"]:
        case "rkrr" as mode:
            yield entry_of("cover_resize", mode, size=box, **scales, **filters)
            yield entry_of("random_crop", size=box, pad_if_needed=True, border="reflect")
        case "rkrc" as mode:
            yield entry_of("cover_resize", mode, size=box, **scales, **filters)
            yield entry_of("center_crop", size=box, border="reflect")
        case _:
            yield entry_of("random_resized_crop", size=box, **scales, **filters)
    if given["hflip"] > 0 or given["vflip"] > 0:
        yield entry_of("flip", horizontal=given["hflip"], vertical=given["vflip"] or None)
    policy = given["auto_augment"] or ""
    if policy and isinstance(entry := policy_entry(policy, given["mean"]), Entry):
        yield entry
    if (jitter := given["color_jitter"]) is not None and (not policy or "3a" in policy):
        factors = (jitter,) * 3 if isinstance(jitter, (int, float)) else jitter
        named = dict(zip(("brightness", "contrast", "saturation", "hue"), factors, strict=False))
        chance = given["color_jitter_prob"]
        yield entry_of("color_jitter", **named, probability=None if chance == 1 else chance)
    if given["grayscale_prob"]:
        yield entry_of("grayscale", probability=given["grayscale_prob"])
    if given["gaussian_blur_prob"]:
        yield entry_of("gaussian_blur", kernel_size=23, probability=given["gaussian_blur_prob"])
    erases, mode, count = given["re_prob"] > 0, given["re_mode"], given["re_count"]
    boxes = {"probability": given["re_prob"], "scale": [0.02, 1 / 3], "ratio": [0.3, 1 / 0.3]}
    boxes["count"] = None if count == 1 else count
    if erases and mode not in ("pixel", "rand"):  # timm erases after normalize, where the mean colour is 0
        yield entry_of("random_erasing", **boxes, value=_levels(given["mean"]))
    yield normalizing
    if erases and mode in ("pixel", "rand"):
        yield entry_of("noise_erasing", **boxes, noise="box" if mode == "rand" else None)


def unequal(given: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield for each argument of `training_entries` that no stage equals its name, the rule and the nearest value."""
    if (interpolation := given["interpolation"]) not in FILTERS:
        yield "interpolation", "must be one of bilinear, bicubic", "bilinear, as --train-interpolation bilinear"
    if given["train_crop_mode"] not in (None, "", "rrc", "rkrc", "rkrr"):
        yield "train_crop_mode", "must be one of rrc, rkrc, rkrr", "rrc"
    if policy := given["auto_augment"]:
        entry = policy_entry(policy, given["mean"])
        if isinstance(entry, str):
            yield "auto_augment", entry, "rand_augment: {space: timm_increasing, probability: 0.5}"
        elif interpolation != "bilinear" and {entry.parameters.get("policy"), entry.parameters.get("space")}.isdisjoint(
            ("3a", "timm_3a")
        ):
            rule = f"warps with interpolation {interpolation!r}, and warps here are bilinear"
            yield "auto_augment", rule, "interpolation bilinear"
    if given["re_prob"] > 0 and given["re_mode"] not in ("", "const", "rand", "pixel"):
        yield "re_mode", "must be one of const, rand, pixel", "const"
    if given["re_prob"] > 0 and given["re_split"]:
        yield "re_split", "must be false", "erasing in all samples of a batch"


_POLICIES = ("original", "originalr", "v0", "v0r", "3a")
_LISTS = ("weights", "3a", "3aw")
_SECTION = re.compile(r"([^\d]*)(\d.*)")
_SECTIONS: Mapping[str, type] = {"mstd": float, "m": int, "n": int, "p": float, "inc": int, "mmax": int}
"""Sections of a RandAugment, and the types of their numbers. Those of an AutoAugment are the first alone."""


def policy_entry(text: str, mean: Sequence[float]) -> Entry | str:
    """Return the stage that timm's string of an AutoAugment or RandAugment names, or why there is none.

    Examples:
        >>> policy_entry("rand-m9-mstd0.5-inc1", (0.5, 0.5, 0.5)).parameters["space"]
        'timm_increasing'
    """
    name, *sections = text.split("-")
    if name == "augmix":
        return "blends several augmented copies of an image, and a pipeline has one image between stages"
    if name not in ("rand", *_POLICIES):
        return f"must begin with rand, {', '.join(_POLICIES)}"
    known = _SECTIONS if name == "rand" else {"mstd": float}
    keys: dict[str, Any] = {}
    for section in sections:
        if name == "rand" and section.startswith("t"):
            keys.setdefault("t", section[1:])
        elif found := _SECTION.fullmatch(section):
            key, value = found.groups()
            if key not in known:
                return f"has an unknown section {section!r}; timm knows {', '.join(known)}"
            try:
                keys[key] = known[key](value)
            except ValueError:
                return f"has a section {section!r} without a number of type {known[key].__name__}"
    shared = {"noise": keys.get("mstd") or None, "interpolation": "bilinear", "fill": _levels(mean)}
    if name != "rand":
        return entry_of("auto_augment", text, policy=name, **shared)
    if keys.get("mstd", 0) > 100:
        shared["noise"] = "uniform"
    return entry_of(
        "rand_augment",
        text,
        space=f"timm_{keys['t']}" if keys.get("t") in _LISTS else "timm_increasing" if keys.get("inc") else "timm",
        operations=keys.get("n", 2),
        magnitude=keys.get("m", 10),
        probability=keys.get("p", 0.5),
        limit=keys.get("mmax") or None,
        **shared,
    )


def _levels(mean: Sequence[float]) -> int | list[int]:
    """Return a mean colour in levels of 0-255."""
    levels = [min(255, round(255 * level)) for level in mean]
    return levels if len(levels) > 1 else levels[0]


def mixing(given: Mapping[str, Any], **more: Any) -> Entry:
    """Return the stage that timm's Mixup becomes. given: its arguments. more: further keys of the stage."""
    shared = {
        "probability": given["mixup_prob"],
        "mode": given["mixup_mode"],
        "label_smoothing": given["smoothing"],
        **more,
    }
    if not given["mixup"]:
        return entry_of("cutmix", alpha=given["cutmix"], **shared)
    switch = given["mixup_switch_prob"]
    return entry_of("mixup", alpha=given["mixup"], cutmix_alpha=given["cutmix"], switch_probability=switch, **shared)


# --- evaluation -------------------------------------------------------------------------------------------------------


def evaluation(config: DataConfig, source: str) -> tuple[list[Entry], list[Problem]]:
    """Return create_transform's evaluation, and what no stage equals."""
    gaps: list[Problem] = []
    (channels, height, width), mode = config.input_size, config.crop_mode

    def note_gap(rule: str, nearest: str, apart: str = "") -> None:
        gaps.append(gap(f"{source}:", rule, nearest, apart))

    if channels != 3:
        rule = f"input_size has {channels} channels, and gpuflow decodes three"
        note_gap(rule, "decode: {color: gray} and one mean and std")
    filters = filter_keys(config.interpolation)
    if config.interpolation not in FILTERS:
        rule = f"interpolation is {config.interpolation!r}, which the stage resize does not have"
        note_gap(rule, f"resize: {filters or '{interpolation: bilinear}'}")
    box = [math.floor(side / config.crop_pct) for side in (height, width)]
    about = f"{height} / crop_pct {config.crop_pct:g}"
    ending = [entry_of("center_crop", size=size_of((height, width))), normalize(config.mean, config.std)]
    if mode == "squash":
        resize = entry_of("resize", f"squash: {about}", height=box[0], width=box[1], **filters)
    elif mode == "border":
        resize = entry_of("letterbox", f"border: {about}", size=size_of(box), fill=_levels(config.mean), **filters)
        if box == [height, width]:
            ending = ending[1:]
        else:
            rule = "crop_mode 'border' pads and crops in one step, which rounds once"
            note_gap(rule, "letterbox, center_crop", "up to one pixel apart")
    else:
        resize = entry_of("resize", about, shorter=max(box), **filters)
        if box[0] != box[1]:
            rule = f"crop_mode {mode!r} with an input of {height}x{width} fits the image around a box"
            note_gap(rule, f"resize: {{shorter: {max(box)}}}", "another scale")
    return [decode(), resize, *ending], gaps
