"""The block `source` to the spec of its kind: `source: {folder: photos}` to a `Folder`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pydantic

from gpuflow.config.models import Document, SourceKeys, keys_of
from gpuflow.config.stage_entries import as_tuples
from gpuflow.config.words import meant_key, problems_of, type_in_words
from gpuflow.errors import ConfigError, Problem
from gpuflow.sources import SourceSpec, spec_class

__all__ = ["make_source"]


def make_source(block: Any, kinds: Mapping[str, type[SourceSpec]]) -> SourceSpec:
    """Return the spec of a block `source`, as YAML gives it. kinds: classes by name.

    Raises:
        ConfigError: every problem of the block, its path from `source` on.
    """
    if not isinstance(block, dict):
        rule, action = f"must be {type_in_words(SourceKeys)}", f"write {{folder: {block}}}"
        action = action if isinstance(block, str) else ""
        raise ConfigError([Problem.of("source", rule, block, action, code="config.type")])
    texts = {key: value for key, value in block.items() if isinstance(key, str)}
    spec, problems = spec_class(texts, kinds, partial(meant_key, document=Document))
    problems += (
        Problem.of(key, "is a key that is not text", action="put it in quotes", code="config.unknown_key")
        for key in block
        if key not in texts
    )
    values: dict[str, Any] = {}
    if spec is not None:
        fields = spec.key_fields()
        keys = {
            key: value if fields[key].type is Any else as_tuples(value)  # another package gets its value as YAML has it
            for key, value in texts.items()
            if key in fields and value is not None
        }
        try:
            values = keys_of(spec).model_validate(keys).model_dump(exclude_unset=True)
        except pydantic.ValidationError as error:
            problems += problems_of(error, keys_of(spec), keys, Document)
    if spec is None or problems:
        raise ConfigError([problem.below("source") for problem in problems])
    return spec.of(values, partial(make_source, kinds=kinds))
