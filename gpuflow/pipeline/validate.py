"""Follows the specs through a pipeline before anything runs, and names the first stage that disagrees."""

from __future__ import annotations

from gpuflow.errors import Code, ConfigError, Key, Problem
from gpuflow.pipeline.stage import ENCODED, Decoder, ImageSpec, Pipeline

__all__ = ["trace"]


def trace(pipeline: Pipeline, *, at: tuple[Key, ...] | None = None, serving: bool = False) -> list[ImageSpec]:
    """The specs between the stages: what enters the first, then what leaves each one.

    Args:
        pipeline: the stages to follow, from encoded bytes on.
        at: the keys that lead to the list of stages, for problems; by default the pipeline's name.
        serving: refuse random stages too.

    Raises:
        ConfigError: the first stage that cannot take what it gets, or a result that no batch can hold.
    """
    at = (pipeline.name,) if at is None else at

    def fault(i: int, rule: str, action: str = "", *, code: Code = "stage.order") -> ConfigError:
        return ConfigError([Problem.of((*at, i, pipeline.stages[i].stage_name), rule, action=action, code=code)])

    if not pipeline.stages:
        rule = "must name at least one stage, got an empty list"
        raise ConfigError([Problem.of(at, rule, action="start with decode: {}", code="stage.order")])
    specs = [ENCODED]
    for i, stage in enumerate(pipeline.stages):
        if i == 0 and not isinstance(stage, Decoder):
            raise fault(i, "takes an image but gets encoded bytes", "start the list with decode: {color: rgb}")
        if i > 0 and isinstance(stage, Decoder):
            raise fault(i, "must be the first stage and stand once", "remove this one")
        if serving and stage.random:
            raise fault(i, "is random and cannot serve", "name the stages that pipelines.val uses", code="stage.random")
        try:
            specs.append(stage.output(specs[-1]))
        except ValueError as error:
            raise fault(i, str(error)) from error
    if not specs[-1].fixed:
        raise fault(
            len(pipeline.stages) - 1,
            f"leaves images of varying size ({specs[-1]}), which no batch can hold",
            "add center_crop, random_crop, random_resized_crop or resize with height and width",
            code="stage.size",
        )
    return specs
