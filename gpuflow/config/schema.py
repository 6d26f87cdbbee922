"""The JSON Schema of a YAML file, for editors that complete and check keys: `gpuflow schema` prints it.

It comes from the same declarations as the checks: the blocks of `models.py`, and the fields of the source and of each
stage. Types, bounds, choices and defaults are there; rules between keys are `gpuflow check`'s alone.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from gpuflow.config.models import CacheKeys, Document, PipelineSpec, ServeSpec, ViewSpec, alternatives
from gpuflow.errors import json_value
from gpuflow.pipeline.bounds import UNIONS, Bounds
from gpuflow.pipeline.stage import Stage
from gpuflow.sources import KINDS, SourceSpec, WeightsSpec
from gpuflow.sources.field_spec import FieldSpec
from gpuflow.sources.split_spec import GroupSpec, SplitSpec
from gpuflow.sources.storage import CacheSpec

Schema = dict[str, Any]

_SHARED = FieldSpec, WeightsSpec, SplitSpec, GroupSpec
"""Blocks that several kinds of sources have."""


def json_schema(stages: Mapping[str, type[Stage]], sources: Mapping[str, type[SourceSpec]] = KINDS) -> Schema:
    """Build the JSON Schema, draft 2020-12, of a file whose lists name stages of this table.

    Args:
        stages: the vocabulary, name to class.
        sources: the kinds of sources, name to class.

    Examples:
        >>> from gpuflow.stages import STAGES
        >>> json_schema({"flip": STAGES["flip"]}, {})["$defs"]["stage.flip"]["properties"]["vertical"]["maximum"]
        1
    """
    schema = Document.model_json_schema(schema_generator=_Blocks)
    description = schema["properties"]["source"]["description"]
    schema["properties"]["source"] = {"$ref": "#/$defs/source", "description": description}
    schema["anyOf"] = [{"required": ["source", "pipelines"]}, {"required": ["serve"]}]
    blocks = schema.pop("$defs")
    for block in PipelineSpec, ServeSpec, ViewSpec:
        properties = blocks[block.__name__]["properties"]
        properties["stages"] = {"description": properties["stages"]["description"], "$ref": "#/$defs/stages"}
    pipeline = blocks[PipelineSpec.__name__]
    pipeline["properties"]["decode"]["anyOf"] = [{"$ref": "#/$defs/stage.decode"}, {"type": "null"}]
    pipeline["oneOf"] = [{"required": ["stages"]}, {"required": ["views"]}]
    kinds = {f"source.{kind}": _fields_schema(spec) for kind, spec in sources.items()}
    definitions = {
        "source": {"description": "Where the samples are.", "oneOf": [{"$ref": f"#/$defs/{name}"} for name in kinds]},
        **kinds,
        CacheKeys.__name__: CacheKeys.model_json_schema(schema_generator=_Blocks),
        **{shared.__name__: _fields_schema(shared) for shared in _SHARED},
        "stages": _list_schema(stages),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "gpuflow",
        **schema,
        "$defs": blocks | definitions | {f"stage.{name}": _stage_schema(stage) for name, stage in stages.items()},
    }


class _Blocks(GenerateJsonSchema):
    """Describes blocks and keys by the blocks' docstrings."""

    def model_schema(self, schema: Any) -> Schema:
        block: type[BaseModel] = schema["cls"]
        result: Schema = super().model_schema(schema)
        result.pop("title", None)
        summary, keys = docstring_of(block)
        result["description"] = summary
        for key, value in result["properties"].items():
            if key in keys:
                value["description"] = keys[key]
        return result

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def docstring_of(kind: type) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of a class's docstring, and what its `Args` say, those of its base classes
    included."""
    arguments: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        _, _, section = inspect.cleandoc(base.__doc__ or "").partition("Args:\n")
        entries = re.split(r"\n(?=    \w)", "\n" + section.partition("\n\n")[0])
        for name, _, text in (entry.strip().partition(": ") for entry in entries if entry.strip()):
            text = " ".join(text.split())
            arguments[name] = text[:1].upper() + text[1:]
    summary = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]
    return " ".join(summary.split()), arguments


# --- dataclasses: the source and the stages -------------------------------------------------------------------------


def _list_schema(stages: Mapping[str, type[Stage]]) -> Schema:
    """Return the schema of a list of stages. One whose parameters all have defaults may stand as its name alone."""
    names = [name for name, stage in stages.items() if not _required(stage)]
    entries = {
        name: {"$ref": f"#/$defs/stage.{name}"}
        if _required(stage)
        else {"anyOf": [{"$ref": f"#/$defs/stage.{name}"}, {"type": "null"}]}
        for name, stage in stages.items()
    }
    mapping = {
        "type": "object",
        "description": "One stage and its parameters.",
        "properties": entries,
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }
    return {"type": "array", "items": {"anyOf": [mapping, {"enum": names}]}}


def _stage_schema(stage: type[Stage]) -> Schema:
    schema = _fields_schema(stage)
    if stage.open_field is not None:
        del schema["properties"][stage.open_field]
        schema["additionalProperties"] = True
    return schema


def _required(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]


def _fields_schema(kind: type[Any]) -> Schema:
    """Return the fields of a dataclass as the keys of a mapping."""
    summary, texts = docstring_of(kind)
    hints = typing.get_type_hints(kind, include_extras=True)
    properties = {}
    for field in dataclasses.fields(kind):
        value = {"description": texts[field.name]} if field.name in texts else {}
        value |= _type_schema(hints[field.name])
        if _is_plain(field.default):
            value["default"] = json_value(field.default)
        properties[field.name] = value
    schema: Schema = {"type": "object", "description": summary, "properties": properties}
    if required := _required(kind):
        schema["required"] = required
    return schema | {"additionalProperties": False}


_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


def _type_schema(hint: Any, bounds: Bounds | None = None) -> Schema:
    """Return the schema of a parameter's type; bounds count for each number in it."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _type_schema(parts[0], next((part for part in parts[1:] if isinstance(part, Bounds)), bounds))
    if hint is SourceSpec:  # in a mix
        return {"$ref": "#/$defs/source"}
    if hint is CacheSpec:
        return {"$ref": f"#/$defs/{CacheKeys.__name__}"}
    if hint in _SHARED:
        return {"$ref": f"#/$defs/{hint.__name__}"}
    if origin is Literal:
        return {"enum": list(parts)}
    if origin in UNIONS:
        return {"anyOf": [_type_schema(part, bounds) for part in alternatives(parts)]}
    if origin is tuple and parts[-1] is Ellipsis:
        return {"type": "array", "items": _type_schema(parts[0], bounds)}
    if origin is tuple:
        items = [_type_schema(part, bounds) for part in parts]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _type_schema(parts[1], bounds)}
    if hint in (int, float) and bounds is not None:
        limits = {"minimum": bounds.lowest, "exclusiveMinimum": bounds.above, "maximum": bounds.highest}
        return {"type": _TYPES[hint]} | {name: limit for name, limit in limits.items() if limit is not None}
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return _fields_schema(hint)
    return {"type": _TYPES[hint]} if hint in _TYPES else {}


def _is_plain(value: Any) -> bool:
    """Return True if JSON knows such a value, a tuple as a list."""
    return all(map(_is_plain, value)) if isinstance(value, tuple) else value is None or type(value) in _TYPES
