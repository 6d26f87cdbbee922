"""Which fields of a sample's record the stages of a pipeline take, and whether the source has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from gpuflow.config.models import Config
from gpuflow.decode.preset import Preset
from gpuflow.errors import ConfigError, Key, Problem
from gpuflow.pipeline.record_values import RecordValue, field_problems_of
from gpuflow.pipeline.views import AnyProgram, ViewsProgram
from gpuflow.sources import Source, SourceSpec, fields_of

__all__ = ["declared_problems", "refuse_record_fields", "require_record_fields"]


def declared_problems(name: str, program: AnyProgram, source: SourceSpec) -> Iterator[Problem]:
    """A problem for each field that a pipeline takes and the source does not declare, or with another type.

    Without declared fields, those of COCO and of other packages' sources are known once the source is open.
    """
    specs = [entry.spec for entry in source.entries] or [source]
    if source.declared or not any(spec.kind == "coco" or spec.other for spec in specs):
        yield from field_problems_of(_taken(name, program), {name: spec.type for name, spec in source.declared})


def require_record_fields(config: Config, name: str, source: Source) -> None:
    """Raise ConfigError if a source lacks a field that a pipeline takes, or has it with another type."""
    types = {field.name: field.type for field in fields_of(source)}
    problems = list(field_problems_of(_taken(name, config.any_program(name)), types))
    if problems:
        raise ConfigError([replace(problem, place=f"{config.path}:") for problem in problems])


def refuse_record_fields(config: Config, name: str, rule: str, action: str) -> None:
    """Raise ConfigError if the stages of a pipeline, or of `serve`, take numbers from records.

    rule: why they must not, after "takes numbers from each sample's record, and".
    """
    rule = f"takes numbers from each sample's record, and {rule}"
    problems = [
        Problem(f"{config.path}:", rule, action=action, path=at, code="config.conflict")
        for at in _taken(name, config.programs[name])
    ]
    if problems:
        raise ConfigError(problems)


def _taken(name: str, program: AnyProgram) -> Mapping[tuple[Key, ...], RecordValue]:
    """What the stages of a pipeline take, by the keys that lead to the parameters in a file."""
    if isinstance(program, ViewsProgram):
        return {
            ("pipelines", name, "views", view.name, "stages", i - 1, stage, parameter): value
            for view in program.pipeline.views
            for (i, stage, parameter), value in view.pipeline.record_values.items()
        }
    heads = sum(isinstance(stage, Preset) for stage in program.pipeline.stages)
    return {
        ("pipelines", name, "stages", i - heads, stage, parameter): value
        for (i, stage, parameter), value in program.pipeline.record_values.items()
    }
