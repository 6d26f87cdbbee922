"""Validates a pipeline before anything runs: follows the specs through the stages and names the first invalid stage."""

from __future__ import annotations

from gpuflow.errors import Code, ConfigError, Key, Problem
from gpuflow.pipeline.stage import ENCODED, Decoder, ImageSpec, Mixing, Pipeline


def trace(pipeline: Pipeline, *, at: tuple[Key, ...] | None = None, serving: bool = False) -> list[ImageSpec]:
    """Return the specs between the stages: the input of the first stage, then the output of each stage.

    Args:
        pipeline: the stages, beginning with encoded bytes.
        at: the keys that lead to the list of stages, for problems; by default the pipeline's name.
        serving: also refuse random stages, mixing stages and those that take numbers from records.

    Raises:
        ConfigError: a stage cannot take its input, follows a mixing stage, makes larger images than the decoder may
            give, or the result has no fixed size.
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
        if serving and isinstance(stage, Mixing):
            rule = "mixes the samples of a batch and cannot serve"
            raise fault(i, rule, "name the stages that pipelines.val uses", code="stage.random")
        if i > 0 and isinstance(mixing := pipeline.stages[i - 1], Mixing) and not isinstance(stage, Mixing):
            rule = f"works on one image but stands after {mixing.stage_name}, which mixes whole batches"
            raise fault(i, rule, f"put {stage.stage_name} before {mixing.stage_name}")
        if serving and stage.random:
            raise fault(i, "is random and cannot serve", "name the stages that pipelines.val uses", code="stage.random")
        if serving and stage.record_values:
            rule = f"takes {' and '.join(stage.record_values)} from a sample's record, which no request has"
            raise fault(i, rule, "give numbers in place of the field, or remove the stage", code="config.conflict")
        try:
            specs.append(stage.output(specs[-1]))
        except ValueError as error:
            raise fault(i, str(error)) from error
        (height, width, _), decoder = specs[-1].shape, pipeline.stages[0]
        if specs[-1].shape != specs[-2].shape and height is not None and width is not None and i > 0:
            assert isinstance(decoder, Decoder)
            if height * width > decoder.max_pixels:
                rule = f"makes {height}x{width} = {height * width:,} pixels of every image, more than max_pixels"
                action = f"raise {decoder.stage_name}.max_pixels, which is {decoder.max_pixels:,}, or resize to less"
                raise fault(i, rule, action, code="config.conflict")
    if not specs[-1].fixed:
        raise fault(
            len(pipeline.stages) - 1,
            f"leaves images of varying size ({specs[-1]}), which no batch can hold",
            "add center_crop, random_crop, random_resized_crop, letterbox or resize with height and width",
            code="stage.size",
        )
    return specs
