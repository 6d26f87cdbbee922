"""Reads a timm model's data configuration, by its name or from a JSON file, and the arguments of timm's train.py."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gpuflow.errors import Problem, suggest
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
    filter_keys,
    filters_apart,
    gap,
    needs,
    normalize,
    numbers,
    read_document,
    size_of,
    source_error,
)
from gpuflow.pipeline.parameters import LONGEST

_DATA = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Holds what timm.data.resolve_data_config gives.

    Examples:
        >>> DataConfig(crop_pct=0.95).input_size
        (3, 224, 224)
    """

    input_size: tuple[int, int, int] = (3, 224, 224)
    interpolation: str = "bicubic"
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    crop_pct: float = 0.875
    crop_mode: str = "center"


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
        timm = needs("timm", f"timm:{name}")
        try:
            found = timm.get_pretrained_cfg(name)
        except RuntimeError:
            found = None
        if found is None:
            model, _, tag = name.partition(".")
            known = timm.list_models() if not timm.is_model(model) else timm.list_pretrained(f"{model}.*")
            action = (
                suggest(name if tag else model, known, else_all=False) or "gpuflow takes names of timm.list_models()"
            )
            raise source_error(f"timm:{name}:", "names no model of timm", action=action)
        return _resolved({key: getattr(found, key) for key in _DATA}), []
    document = read_document(name)
    at = ("pretrained_cfg",) if isinstance(document.data.get("pretrained_cfg"), dict) else ()
    keys = document.data[at[0]] if at else document.data
    if not set(keys) & set(_DATA):
        raise document.error(f"must hold timm's data_config or pretrained_cfg: none of {', '.join(_DATA)} is there")
    problems = list(document.unknown(at, keys, (*_DATA, *_OTHER), "timm's pretrained_cfg"))
    _check_data(document, at, keys)
    return _resolved(keys), problems


def _check_data(document: Document, at: tuple[str, ...], keys: Mapping[str, Any]) -> None:
    """Raise ConfigError if a key of a data configuration, which stands there in a file, has a value of another kind."""
    for key, (rule, fits) in _RULES.items():
        if keys.get(key) and not fits(keys[key]):
            raise document.error(f"must be {rule}", *at, key, value=keys[key])
    if max(size := keys.get("input_size") or [0]) > LONGEST:
        raise document.error(f"must have sides of at most {LONGEST:,} pixels", *at, "input_size", value=size)


def _is_list(value: Any, least: float, *lengths: int, types: tuple[type, ...] = (int, float)) -> bool:
    """Return True for a list of one of these lengths, of numbers of these types that are `least` or more."""
    known = isinstance(value, list) and len(value) in lengths
    return known and all(type(x) in types and x >= least for x in value)


_CHANNELS = ("one number for each channel", lambda value: _is_list(value, 0, 1, 3))
_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "input_size": (
        "three whole numbers: channels, height and width",
        lambda value: _is_list(value, 1, 3, types=(int,)),
    ),
    "interpolation": ("the name of a filter", lambda value: isinstance(value, str)),
    "mean": _CHANNELS,
    "std": _CHANNELS,
    "crop_pct": ("a number above 0", lambda value: isinstance(value, (int, float)) and value > 0),
    "crop_mode": ("center, squash or border", lambda value: value in ("center", "squash", "border")),
}
"""What a value must be, and the check of that."""


def _resolved(keys: Mapping[str, Any]) -> DataConfig:
    """Return what timm.data.resolve_data_config does: what is missing or empty is the default."""
    given = {key: keys[key] for key in _DATA if keys.get(key)}
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    config = DataConfig(**values)
    channels = config.input_size[0]
    repeated = {key: one * channels for key in ("mean", "std") if len(one := getattr(config, key)) == 1}
    return dataclasses.replace(config, **repeated)


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
        config, arguments, document = _arguments(name)
    else:
        config, problems = data_config(name)
        arguments = {"interpolation": config.interpolation}
    entries, gaps = _evaluation(config, source)
    given = {**TRAINING, **arguments, "mean": config.mean}
    train = [decode(), *training_entries(given, config.input_size[1:], normalize(config.mean, config.std))]
    if given["mixup"] or given["cutmix"]:
        train.append(_mixing(given))
    if document is not None:
        at = {own: key for key, (own, _) in ARGUMENTS.items()}
        unmet = [] if given["no_aug"] else [*unequal(given)]
        unmet += [(own, "has no stage", "leave it out") for own in _OF_BATCHES if given[own]]
        for own, rule, nearest in unmet:
            gaps.append(document.gap(f"{rule}, got {given[own]!r}", at[own], nearest=nearest))
    return Imported(
        source=source,
        matches=_MATCHES,
        pipelines={"train": train, "val": entries},
        gaps=(*problems, *gaps),
    )


# --- training ---------------------------------------------------------------------------------------------------------

_YAML = (".yaml", ".yml")
ARGUMENTS: Mapping[str, tuple[str, Any]] = {
    "train_crop_mode": ("train_crop_mode", ""),
    "scale": ("scale", []),
    "ratio": ("ratio", []),
    "hflip": ("hflip", 0.5),
    "vflip": ("vflip", 0.0),
    "color_jitter": ("color_jitter", 0.4),
    "color_jitter_prob": ("color_jitter_prob", 1.0),
    "grayscale_prob": ("grayscale_prob", 0.0),
    "gaussian_blur_prob": ("gaussian_blur_prob", 0.0),
    "aa": ("auto_augment", ""),
    "reprob": ("re_prob", 0.0),
    "remode": ("re_mode", "pixel"),
    "recount": ("re_count", 1),
    "resplit": ("re_split", False),
    "aug_repeats": ("num_aug_repeats", 0.0),
    "aug_splits": ("num_aug_splits", 0),
    "train_interpolation": ("interpolation", "random"),
    "no_aug": ("no_aug", False),
    "mixup": ("mixup", 0.0),
    "cutmix": ("cutmix", 0.0),
    "cutmix_minmax": ("cutmix_minmax", []),
    "mixup_prob": ("mixup_prob", 1.0),
    "mixup_switch_prob": ("mixup_switch_prob", 0.5),
    "mixup_mode": ("mixup_mode", "batch"),
    "smoothing": ("smoothing", 0.1),
}
"""Arguments of train.py that say how images are augmented: their names in create_loader, and train.py's defaults."""
TRAINING: Mapping[str, Any] = dict(ARGUMENTS.values())
_OF_BATCHES = ("num_aug_repeats", "num_aug_splits", "cutmix_minmax")
_TYPES: Mapping[type, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("text", (str,)),
    list: ("a list of numbers", (list,)),
}


def _arguments(name: str) -> tuple[DataConfig, dict[str, Any], Document]:
    """Return the data configuration and the arguments of create_loader that a YAML file gives to train.py.

    Its other keys say nothing of the pixels.
    """
    document = read_document(name)
    keys = document.data
    if not set(keys) & {"model", *ARGUMENTS}:
        raise document.error("must hold arguments of timm's train.py, as its args.yaml does: none is there")
    _check_data(document, (), {key: keys[key] for key in _DATA if keys.get(key) is not None})
    given: dict[str, Any] = {}
    for key, (own, default) in ARGUMENTS.items():
        if (value := keys.get(key)) is None:
            continue
        rule, types = _TYPES[type(default)]
        is_list = isinstance(value, list) and all(type(one) in (int, float) for one in value)
        fits = is_list if isinstance(value, list) else type(value) in types
        if not fits or (is_list and key != "color_jitter" and type(default) is not list):
            raise document.error(f"must be {rule}", key, value=value)
        given[own] = value
    data = {key: keys[key] for key in _DATA if keys.get(key)}
    if "input_size" not in data and (side := keys.get("img_size")):
        if type(side) is not int or not 0 < side <= LONGEST:
            raise document.error(f"must be a whole number from 1 to {LONGEST:,}", "img_size", value=side)
        data["input_size"] = [keys.get("in_chans") or 3, side, side]
    model = keys.get("model")
    missing = model is not None and not set(_DATA[:-2]) <= data.keys()
    base = dataclasses.asdict(data_config(str(model))[0]) if missing else {}
    config = _resolved({**base, **data})
    if given.get("no_aug") or not keys.get("train_interpolation", "random"):
        given["interpolation"] = config.interpolation
    return config, given, document


def training_entries(given: Mapping[str, Any], size: Sequence[int], normalizing: Entry) -> Iterator[Entry]:
    """Yield the stages of `timm.data.create_transform(is_training=True)` between decode and mixing.

    given: its arguments. Where no stage equals one, `unequal` says so.
    """
    filters = filter_keys(given["interpolation"])
    box: dict[str, Any] = {"size": size_of(size)}
    if given.get("no_aug"):
        yield Entry("resize", {"height": size[0], "width": size[1], **filters}, "no_aug")
        yield normalizing
        return
    ranges = {name: numbers(given[name]) for name in ("scale", "ratio") if given[name]}
    match given["train_crop_mode"]:
        case "rkrc" | "rkrr" as mode:
            yield Entry("cover_resize", {**box, **ranges, **filters}, mode)
            crop = "random_crop" if mode == "rkrr" else "center_crop"
            more = {"pad_if_needed": True} if mode == "rkrr" else {}
            yield Entry(crop, {**box, **more, "border": "reflect"})
        case _:
            yield Entry("random_resized_crop", {**box, **ranges, **filters})
    if given["hflip"] > 0 or given["vflip"] > 0:
        yield Entry("flip", {"horizontal": given["hflip"], **({"vertical": given["vflip"]} if given["vflip"] else {})})
    policy = given["auto_augment"] or ""
    if policy and isinstance(entry := policy_entry(policy, given["mean"]), Entry):
        yield entry
    if (jitter := given["color_jitter"]) is not None and (not policy or "3a" in policy):
        factors = (jitter,) * 3 if isinstance(jitter, (int, float)) else tuple(jitter)
        probability = given["color_jitter_prob"]
        more = {} if probability in (None, 1) else {"probability": probability}
        names = ("brightness", "contrast", "saturation", "hue")
        yield Entry("color_jitter", {**dict(zip(names, factors, strict=False)), **more})
    if given["grayscale_prob"]:
        yield Entry("grayscale", {"probability": given["grayscale_prob"]})
    if given["gaussian_blur_prob"]:
        yield Entry("gaussian_blur", {"kernel_size": 23, "probability": given["gaussian_blur_prob"]})
    boxes = {"probability": given["re_prob"], "scale": [0.02, 1 / 3], "ratio": [0.3, 1 / 0.3]}
    counts = {"count": given["re_count"]} if given["re_count"] != 1 else {}
    erases, mode = given["re_prob"] > 0, given["re_mode"]
    if erases and mode not in ("pixel", "rand"):  # timm erases after normalize, where the mean colour is 0
        yield Entry("random_erasing", {**boxes, "value": _levels(given["mean"]), **counts})
    yield normalizing
    if erases and mode in ("pixel", "rand"):
        noise = {"noise": "box"} if mode == "rand" else {}
        yield Entry("noise_erasing", {**boxes, **noise, **counts})


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


def policy_entry(text: str, mean: Sequence[float]) -> Entry | str:
    """Return the stage that timm's string of an AutoAugment or RandAugment names, or why there is none.

    Examples:
        >>> policy_entry("rand-m9-mstd0.5-inc1", (0.5, 0.5, 0.5)).parameters["space"]
        'timm_increasing'
    """
    name, *sections = text.split("-")
    keys: dict[str, Any] = {}
    if name == "augmix":
        return "blends several augmented copies of an image, and a pipeline has one image between stages"
    if name not in ("rand", *_POLICIES):
        return f"must begin with rand, {', '.join(_POLICIES)}"
    known: Mapping[str, type] = {"mstd": float}
    if name == "rand":
        known = {**known, "m": int, "n": int, "p": float, "inc": int, "mmax": int}
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
    noise = {"noise": keys["mstd"]} if keys.get("mstd") else {}
    shared = {**noise, "interpolation": "bilinear", "fill": _levels(mean)}
    if name != "rand":
        return Entry("auto_augment", {"policy": name, **shared}, text)
    if noise and keys["mstd"] > 100:
        shared["noise"] = "uniform"
    space = f"timm_{keys['t']}" if keys.get("t") in _LISTS else "timm_increasing" if keys.get("inc") else "timm"
    limit = {"limit": keys["mmax"]} if keys.get("mmax") else {}
    counts = {"operations": keys.get("n", 2), "magnitude": keys.get("m", 10), "probability": keys.get("p", 0.5)}
    return Entry("rand_augment", {"space": space, **counts, **limit, **shared}, text)


def _levels(mean: Sequence[float]) -> int | list[int]:
    """Return a mean colour in levels of 0-255."""
    levels = [min(255, round(255 * level)) for level in mean]
    return levels if len(levels) > 1 else levels[0]


def _mixing(given: Mapping[str, Any]) -> Entry:
    """Return the stage that timm's Mixup becomes."""
    shared = {
        "probability": given["mixup_prob"],
        "mode": given["mixup_mode"],
        "label_smoothing": given["smoothing"],
    }
    if not given["mixup"]:
        return Entry("cutmix", {"alpha": given["cutmix"], **shared})
    alphas = {"alpha": given["mixup"], "cutmix_alpha": given["cutmix"]}
    return Entry("mixup", {**alphas, "switch_probability": given["mixup_switch_prob"], **shared})


# --- evaluation -------------------------------------------------------------------------------------------------------


def _evaluation(config: DataConfig, source: str) -> tuple[list[Entry], list[Problem]]:
    """Return create_transform's evaluation, and what no stage equals."""
    gaps, filters = [], filter_keys(config.interpolation)
    if config.input_size[0] != 3:
        rule = f"input_size has {config.input_size[0]} channels, and gpuflow decodes three"
        gaps.append(gap(f"{source}:", rule, nearest="decode: {color: gray} and one mean and std"))
    if config.interpolation not in FILTERS:
        rule = f"interpolation is {config.interpolation!r}, which the stage resize does not have"
        measured = "for evaluation, timm draws none"
        if config.interpolation != "random":
            known = config.interpolation in PILLOW_FILTERS
            size = (config.input_size[2], config.input_size[1])
            measured = filters_apart(config.interpolation, size) if known else "not measured: timm does not have it"
        nearest = f"resize: {filters or '{interpolation: bilinear}'}"
        gaps.append(gap(f"{source}:", rule, nearest=nearest, apart=measured))
    height, width = config.input_size[1:]
    box = [math.floor(side / config.crop_pct) for side in (height, width)]
    note = f"{height} / crop_pct {config.crop_pct:g}"
    crop = Entry("center_crop", {"size": size_of((height, width))})
    ending = [crop, normalize(config.mean, config.std)]
    match config.crop_mode:
        case "squash":
            resize = Entry("resize", {"height": box[0], "width": box[1], **filters}, f"squash: {note}")
        case "border":
            fill = [round(255 * level) for level in config.mean]
            resize = Entry("letterbox", {"size": size_of(box), "fill": fill, **filters}, f"border: {note}")
            if box == [height, width]:
                ending = ending[1:]
            else:
                rule = "crop_mode 'border' pads and crops in one step, which rounds once"
                gaps.append(gap(f"{source}:", rule, nearest="letterbox, center_crop", apart="up to one pixel apart"))
        case "center" if box[0] == box[1]:
            resize = Entry("resize", {"shorter": box[0], **filters}, note)
        case _:
            resize = Entry("resize", {"shorter": max(box), **filters}, note)
            rule = f"crop_mode {config.crop_mode!r} with an input of {height}x{width} fits the image around a box"
            gaps.append(gap(f"{source}:", rule, nearest=f"resize: {{shorter: {max(box)}}}", apart="another scale"))
    return [decode(), resize, *ending], gaps
