"""Reads the data configuration of a timm model: by the model's name, or from a JSON file with such a configuration."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from gpuflow.errors import Problem, suggest
from gpuflow.migration.imported import (
    FILTERS,
    IMAGENET_MEAN,
    IMAGENET_STD,
    PILLOW_13,
    PILLOW_FILTERS,
    Entry,
    Imported,
    decode,
    filter_keys,
    filters_apart,
    gap,
    needs,
    normalize,
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
    "train is create_transform's default with is_training=True; its random draws are others, with the same "
    "distributions. test_input_size and test_crop_pct count for timm's validate.py alone.",
    "timm numbers the classes of a folder in natural order without regard to case (2, 10, apple, Cat); source.folder "
    "sorts them as torchvision does (10, 2, Cat, apple). For a checkpoint of timm on such names, use a source.listing "
    "with classes: [...] in timm's order.",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Holds what timm.data.resolve_data_config gives.

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

    Raises:
        ConfigError: there is no such model or file, or a value is none that timm takes.
        MissingLibrary: timm is not installed, which only a model's name needs.
    """
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
    for key, (rule, fits) in _RULES.items():
        if keys.get(key) and not fits(keys[key]):
            raise document.error(f"must be {rule}", *at, key, value=keys[key])
    if max(size := keys.get("input_size") or [0]) > LONGEST:
        raise document.error(f"must have sides of at most {LONGEST:,} pixels", *at, "input_size", value=size)
    return _resolved(keys), problems


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
    """Return the evaluation and the training of a timm model, as entries.

    >>> from pathlib import Path
    >>> Path("model.json").write_text('{"input_size": [3, 288, 288]}')
    29
    >>> read_timm("model.json").pipelines["val"][1]
    Entry(stage='resize', parameters={'shorter': 329, 'interpolation': 'bicubic'}, comment='288 / crop_pct 0.875')
    """
    config, problems = data_config(name)
    source = f"timm:{name}"
    entries, gaps = _evaluation(config, source)
    keys = {"size": size_of(config.input_size[1:]), **filter_keys(config.interpolation)}
    train = [
        decode(),
        Entry("random_resized_crop", keys, "scale and ratio: timm's defaults"),
        Entry("flip", {"horizontal": 0.5}),
        Entry("color_jitter", {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4}, "color_jitter=0.4"),
        normalize(config.mean, config.std),
    ]
    return Imported(
        source=source,
        matches=_MATCHES,
        pipelines={"train": train, "val": entries},
        gaps=(*problems, *gaps),
    )


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
