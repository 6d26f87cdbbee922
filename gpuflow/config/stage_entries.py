"""An entry of a YAML list of stages to a stage: `- resize: {shorter: 256}`."""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from gpuflow.config.words import fits, type_in_words
from gpuflow.decode.optional_formats import missing_library
from gpuflow.errors import ConfigError, Problem, suggest
from gpuflow.pipeline.bounds import field_types
from gpuflow.pipeline.parameters import OTHER_KEYS
from gpuflow.pipeline.stage import Decoder, FromRecord, Stage


def make_stage(entry: Any, stages: Mapping[str, type[Stage]]) -> Stage:
    """Make the stage that an entry names, with its parameters.

    Args:
        entry: the stage's name, or a mapping of the name to its parameters.
        stages: the vocabulary, name to class.

    Raises:
        ConfigError: every problem of the entry, its path from the entry on.

    Examples:
        >>> from gpuflow.stages import STAGES
        >>> make_stage({"resize": {"shorter": 256}}, STAGES)
        resize(shorter=256)
        >>> make_stage({"resize": {"shortest": 256}}, STAGES)
        Traceback (most recent call last):
        gpuflow.errors.ConfigError: ...
    """
    if isinstance(entry, str):
        entry = {entry: None}
    if not isinstance(entry, dict) or len(entry) != 1:
        rule = "must be one stage such as `resize: {shorter: 256}`"
        raise ConfigError([Problem.of((), rule, entry, code="config.type")])
    ((name, given),) = entry.items()
    if name not in stages:
        action = _suggest_stage(str(name), stages)
        raise ConfigError([Problem.of(name, "is not a stage", action=action, code="stage.unknown")])
    if given is not None and not isinstance(given, dict):
        raise ConfigError([Problem.of(name, "must be a mapping of parameters", given, code="config.type")])
    parameters = _with_fields(stages[name], name, as_tuples(given or {}))
    if problems := list(_misfits(stages[name], name, parameters)):
        raise ConfigError([problem.below(name) for problem in problems])
    stage = stages[name](**_with_open_field(stages[name], parameters))
    if isinstance(stage, Decoder) and (missing := missing_library(stage.formats)) is not None:
        raise ConfigError(
            [Problem.of((name, "formats"), f"names what cannot be decoded here: {missing}", code="config.rule")]
        )
    return stage


def _suggest_stage(name: str, stages: Mapping[str, type[Stage]]) -> str:
    """Suggest the stage that another library calls so, the entry that runs its transform, or the closest stage."""
    name = name[:100]  # no known name is as long
    plain = _plain(name)
    known = {_plain(other): one for one, stage in stages.items() for other in (one, *stage.other_names)}
    entry = known.get(plain) or next(filter(None, (stage.entry_for(plain) for stage in stages.values())), "")
    if entry or not name.startswith(_RANDOM):
        return suggest(name, stages, meant=entry)
    rests = {one.removeprefix(_RANDOM): one for one in stages}  # what many names begin with makes no name close
    close = difflib.get_close_matches(name.removeprefix(_RANDOM), rests, n=1)
    return suggest(name, stages, meant=rests[close[0]]) if close else f"known: {', '.join(sorted(stages))}"


_RANDOM = "random_"


def _plain(name: str) -> str:
    """Remove from a name what differs between libraries: `RandomCrop` and `random_crop` become equal."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _suggest_key(key: object, stage: type[Stage], fields: Collection[str]) -> str:
    """Suggest the parameter that other libraries call so, or the closest one."""
    meant = stage.other_keys.get(str(key)) or OTHER_KEYS.get(str(key), "")
    return suggest(key, fields, meant=meant if meant in fields else "")


def as_tuples(value: Any) -> Any:
    """Replace the lists in YAML data by tuples, so that values are hashable.

    Examples:
        >>> as_tuples({"size": [224, 224]})
        {'size': (224, 224)}
    """
    if isinstance(value, list):
        return tuple(map(as_tuples, value))
    if isinstance(value, dict):
        return {key: as_tuples(item) for key, item in value.items()}
    return value


def _with_fields(stage: type[Stage], name: str, parameters: dict[Any, Any]) -> dict[Any, Any]:
    """Return the parameters, with `{field: NAME}` as a value where the stage takes one. Raises ConfigError."""
    hints = field_types(stage)  # type: ignore[arg-type]
    found = dict(parameters)
    problems = list[Problem]()
    for key, value in parameters.items():
        if isinstance(value, dict) and FromRecord in typing.get_args(hints.get(key)):
            faults = list(_field_faults(value))
            problems += (problem.below(name, key) for problem in faults)
            if not faults:
                found[key] = FromRecord(value["field"])
    if problems:
        raise ConfigError(problems)
    return found


def _field_faults(given: Mapping[Any, Any]) -> Iterator[Problem]:
    for key in given:
        if key != "field":
            yield Problem.of(key, "is not a key here", action=suggest(str(key), ("field",)), code="config.unknown_key")
    if "field" not in given:
        yield Problem.of((), "needs the key 'field': the name of a field in source.fields", code="config.missing_key")
    elif not isinstance(given["field"], str):
        yield Problem.of("field", "must be text", given["field"], code="config.type")


def _misfits(stage: type[Stage], name: str, parameters: Mapping[Any, Any]) -> Iterator[Problem]:
    """Yield a problem for each parameter that the stage does not know, lacks, or cannot take."""
    fields = {field.name: field for field in dataclasses.fields(stage) if field.name != stage.open_field}
    for key in parameters:
        if key in fields:
            continue
        if stage.open_field is None:
            action = _suggest_key(key, stage, fields)
            yield Problem.of(key, f"is not a key of {name}", action=action, code="config.unknown_key")
        elif not isinstance(key, str):
            yield Problem.of((), "takes keys that are text", key, code="config.unknown_key")
    hints = field_types(stage)  # type: ignore[arg-type]
    for key, field in fields.items():
        if key not in parameters:
            if field.default is dataclasses.MISSING:
                yield Problem.of((), f"needs the key {key!r}: {type_in_words(hints[key])}", code="config.missing_key")
        elif not fits(parameters[key], hints[key]):
            yield Problem.of(key, f"must be {type_in_words(hints[key])}", parameters[key], code="config.type")


def _with_open_field(stage: type[Stage], parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters, with those that the stage has no field for gathered in its open field."""
    if stage.open_field is None:
        return parameters
    fields = {field.name for field in dataclasses.fields(stage)} - {stage.open_field}
    rest = {key: value for key, value in parameters.items() if key not in fields}
    return {key: parameters[key] for key in parameters if key in fields} | {stage.open_field: _hashable(rest)}


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _hashable(value[key])) for key in sorted(value, key=str))
    return tuple(map(_hashable, value)) if isinstance(value, tuple) else value
