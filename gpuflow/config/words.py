"""Describes types in words, and turns pydantic's errors into problems in this project's words."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict

from gpuflow.errors import Key, Problem, dotted, suggest
from gpuflow.pipeline.bounds import UNIONS
from gpuflow.pipeline.records import FromRecord


def problems_of(
    error: pydantic.ValidationError, model: type[BaseModel], data: Any, document: type[BaseModel] | None = None
) -> Iterator[Problem]:
    """Yield what pydantic found wrong with data for a model: one problem for each place.

    document: of which the model is a part, and where unknown keys may belong; by default the model itself.
    """
    for fault in _group(error, data):
        yield _describe(fault, model, document or model)


_BOUNDS = {"greater_than_equal": ("ge", ">="), "greater_than": ("gt", ">"), "less_than_equal": ("le", "<=")}
_MOST_PLACES = 3
_MAIN_KEYS = "folder", "stages", "file", "model", "size"
"""Of source, pipelines and views, serve.model, train and batch."""
_WORDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    dict: "a mapping",
}


def type_in_words(hint: Any) -> str:
    """Describe a type in words: `an integer or [an integer, an integer]`.

    Examples:
        >>> type_in_words(int | tuple[int, int])
        'an integer or [an integer, an integer]'
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return type_in_words(arguments[0])
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments)) if len(arguments) > 1 else str(arguments[0])
    if origin in UNIONS:
        return " or ".join(type_in_words(part) for part in arguments if part is not type(None))
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            if arguments[0] is Any:
                return "a list"
            return f"a list, each {type_in_words(arguments[0])}"
        return f"[{', '.join(map(type_in_words, arguments))}]"
    if origin is dict:
        return f"a mapping, each value {type_in_words(arguments[1])}"
    if hint is FromRecord:
        return "{field: NAME}"
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return f"a mapping with {', '.join(field.alias or name for name, field in hint.model_fields.items())}"
    return _WORDS.get(hint, "a mapping or list")


def meant_key(key: Key, known: Iterable[str], document: type[BaseModel]) -> str:
    """Suggest what to do about a key where only `known` ones may stand: its place in the document, a close one, or
    all."""
    places = [dotted(place) for place in _places_of(key, document)]
    return f"write it as {' or '.join(places)}" if 1 <= len(places) <= _MOST_PLACES else suggest(key, known)


def _places_of(key: Key, model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Yield the places of a key in a model and in those that it holds: pipelines, NAME, batch."""
    for name, field in model.model_fields.items():
        name = field.alias or name
        if name == key:
            yield (name,)
        for way, inner in _models_in(field.annotation):
            for place in _places_of(key, inner):
                yield (name, *way, *place)


def _models_in(hint: Any) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    """Yield the models that a value of this type is or holds as values of a mapping, each with the keys that lead to
    it."""
    if _is_model(hint):
        yield (), hint
    elif typing.get_origin(hint) is dict:
        yield from ((("NAME", *way), model) for way, model in _models_in(typing.get_args(hint)[1]))
    elif typing.get_origin(hint) in UNIONS:
        for part in typing.get_args(hint):
            yield from _models_in(part)


def fits(value: Any, hint: Any) -> bool:
    """Return True if pydantic, strictly, takes the value for the type."""
    try:
        pydantic.TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
    except pydantic.ValidationError:
        return False
    return True


def _group(error: pydantic.ValidationError, data: Any) -> list[Any]:
    """Return one of pydantic's faults for each place: the branches of a union fail one by one but are one fault.

    A location names branches and keys; the keys are the ones that lead into the data, or that are missing there.
    """
    by_place: dict[tuple[Key, ...], Any] = {}
    faults = sorted(error.errors(), key=lambda fault: (len(fault["loc"]), fault["type"] not in _BOUNDS))
    for fault in faults:
        if fault["type"] == "literal_error" and isinstance(fault["input"], dict):  # meant is the branch of mappings
            union = fault["loc"][:-1]
            if any(one is not fault and one["loc"][: len(union)] == union for one in faults):
                continue
        at: list[Key] = []
        value = data
        for key in fault["loc"]:
            inside = key in value if isinstance(value, dict) else isinstance(key, int) and isinstance(value, tuple)
            if inside:
                value = value[key]
            if inside or (fault["type"] == "missing" and key == fault["loc"][-1]):
                at.append(key)
        if fault["type"] == "missing" or not any(tuple(at[:end]) in by_place for end in range(len(at) + 1)):
            by_place[tuple(at)] = {**fault, "loc": tuple(at), "input": value, "is_key": fault["loc"][-1:] == ("[key]",)}
    return list(by_place.values())


def _describe(fault: Any, model: type[BaseModel], document: type[BaseModel]) -> Problem:
    """Describe one of pydantic's faults in this project's words."""
    at = fault["loc"]
    kind = fault["type"]
    value = fault["input"]
    parent, hint = _hint_at(model, at, is_unknown=kind == "extra_forbidden")
    if kind == "invalid_key" or fault["is_key"]:
        return Problem.of(at, "is a key that is not text", action="put it in quotes", code="config.unknown_key")
    if kind == "extra_forbidden":
        assert parent is not None
        known = [field.alias or name for name, field in parent.model_fields.items()]
        return Problem.of(at, "is not a key here", action=meant_key(at[-1], known, document), code="config.unknown_key")
    if kind == "missing":
        return Problem.of(at[:-1], f"needs the key {at[-1]!r}: {type_in_words(hint)}", code="config.missing_key")
    if kind in _BOUNDS:
        name, sign = _BOUNDS[kind]
        return Problem.of(at, f"must be {sign} {_in_digits(fault['ctx'][name])}", value, code="config.range")
    if kind == "literal_error" and isinstance(value, str) and hint is not None:
        action = suggest(value, _choices(hint), else_all=False)
        return Problem.of(at, f"must be {type_in_words(hint)}", value, action, code="config.range")
    rule = f"must be {fault['ctx']['error'] if kind == 'value_error' else type_in_words(hint)}"
    return Problem.of(at, rule, value, _key_for(value, hint), code="config.type")


def _key_for(value: Any, hint: Any) -> str:
    """Suggest the mapping with its main key, where that was left out; return an empty text otherwise."""
    models = [part for part in (hint, *typing.get_args(hint)) if _is_model(part)]
    fields = {} if isinstance(value, dict) or not models else models[0].model_fields
    for key in _MAIN_KEYS:
        if key in fields and not _is_model(fields[key].annotation) and fits(value, fields[key].rebuild_annotation()):
            return f"write {{{key}: {'[...]' if isinstance(value, tuple) else value}}}"
    return ""


def _in_digits(number: float) -> str:
    """Write a number without an exponent: 1,000,000 or 0.5."""
    return f"{int(number):,}" if number == int(number) else f"{number:g}"


def _choices(hint: Any) -> list[str]:
    """Return the words that a type names one by one."""
    if typing.get_origin(hint) is Literal:
        return [word for word in typing.get_args(hint) if isinstance(word, str)]
    return [word for part in typing.get_args(hint) for word in _choices(part)]


def _hint_at(model: type[BaseModel], at: Sequence[Key], *, is_unknown: bool) -> tuple[type[BaseModel] | None, Any]:
    """Return the model that holds the key at a place, and the key's type, as far as they are known.

    is_unknown: whether the last key is none that the model has.
    """
    parent: type[BaseModel] | None = None
    hint: Any = model
    for key in at:
        if typing.get_origin(hint) in UNIONS:
            parts = [
                part.__origin__ if typing.get_origin(part) is Annotated else part for part in typing.get_args(hint)
            ]
            models = (part for part in parts if _is_model(part) and (is_unknown or key in part.model_fields))
            others = (part for part in parts if _is_model(part) or typing.get_origin(part) is dict)
            hint = next(models, next(others, hint))
        if _is_model(hint):
            parent = hint
            hint = next((f.annotation for n, f in hint.model_fields.items() if key in (n, f.alias)), None)
        elif typing.get_origin(hint) is dict:
            hint = typing.get_args(hint)[1]
        elif typing.get_origin(hint) is tuple and isinstance(key, int):
            hint = typing.get_args(hint)[0]  # of a list, as all tuples in blocks are
        else:
            return parent, hint
    return parent, hint


def _is_model(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)
