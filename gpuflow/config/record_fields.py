"""Checks the fields of records against the stages: those that stages take values from, and those they cannot map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gpuflow.config.models import Config
from gpuflow.errors import ConfigError, Key, Problem
from gpuflow.pipeline.records import RecordValue, field_problems_of
from gpuflow.pipeline.stage import Mixing
from gpuflow.pipeline.views import AnyProgram, ViewsProgram
from gpuflow.sources import Source, SourceSpec, fields_of


def declared_problems(name: str, program: AnyProgram, source: SourceSpec) -> Iterator[Problem]:
    """A problem for each field that a pipeline takes and the source does not declare, or with another type, and for
    each mixing stage where the declared fields cannot be mixed.

    Where fields need no declaration, they are known once the source is open.
    """
    declared = source.declared
    if declared or not any(spec.has_other_fields for spec in source.sources):
        yield from field_problems_of(_taken(name, program), {name: spec.type for name, spec in declared})
    if fields := source.fields_in_full:
        others = [name for name, spec in fields if spec.type not in ("image", "label")]
        classes = any(spec.type == "label" and spec.kind in (None, "class") for _, spec in fields)
        # without a declaration, the others need not be there
        yield from mixing_problems(name, program, others if declared else others[:1], one_class=classes)


def mixing_problems(name: str, program: AnyProgram, fields: Sequence[str], *, one_class: bool) -> Iterator[Problem]:
    """A problem for each mixing stage of a pipeline, if samples have these fields besides image and label, or not one
    class each."""
    if isinstance(program, ViewsProgram) or (one_class and not fields):
        return
    rule, action = "mixes labels, but the samples do not have one class each", "remove the stage or declare a class"
    if fields:
        rule = f"mixes images and labels, but samples also have {', '.join(fields)}"
        action = "remove the stage or these fields"
    for i, stage in enumerate(program.pipeline.stages):
        if isinstance(stage, Mixing):
            at = ("pipelines", name, "stages", i - program.pipeline.heads, stage.stage_name)
            yield Problem.of(at, rule, action=action, code="config.conflict")


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
    """Return what the stages of a pipeline take, by the keys that lead to the parameters in a file."""
    if isinstance(program, ViewsProgram):
        return {
            ("pipelines", name, "views", view.name, "stages", i - 1, stage, parameter): value
            for view in program.pipeline.views
            for (i, stage, parameter), value in view.pipeline.record_values.items()
        }
    return {
        ("pipelines", name, "stages", i - program.pipeline.heads, stage, parameter): value
        for (i, stage, parameter), value in program.pipeline.record_values.items()
    }
