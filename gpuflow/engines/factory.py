"""Opens the engine that runs a model file, by the file's kind, and checks that it gives logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from gpuflow.config import ModelSpec
from gpuflow.engines.base import (
    Engine,
    ModelInfo,
    check_answers,
    check_classes,
    class_names,
    model_error,
    refuse_other_preprocessing,
    run_in_thread,
)
from gpuflow.errors import ConfigError
from gpuflow.pipeline.stage import ImageSpec, Pipeline


def open_engine(model: ModelSpec, *, image: ImageSpec, device: torch.device) -> Engine:
    """Return one engine that may use all cores. See `open_engines`."""
    return open_engines(model.model_copy(update={"instances": 1}), image=image, device=device)[0]


def open_engines(model: ModelSpec, *, image: ImageSpec, device: torch.device) -> tuple[Engine, ...]:
    """`model.instances` engines, not warmed up yet, which share the cores and, if the library supports it, the weights.

    Args:
        model: the block `serve.model`.
        image: what the pipeline gives.
        device: where the model runs.

    Raises:
        ConfigError: the file is missing, is no model, does not take such images, or contradicts itself.
        MissingExtra: the engine's library is not installed.
    """
    if problems := [problem.below("serve", "model") for problem in model.problems()]:
        raise ConfigError(problems)
    _require_file(model.file)
    engines: Sequence[Engine]
    match model.runtime:
        case "torch":
            from gpuflow.engines import pytorch

            engines = run_in_thread(lambda: pytorch.open_all(model, image=image, device=device))
        case "onnxruntime":
            from gpuflow.engines import onnx

            engines = onnx.open_all(model, image=image, device=device)
        case "tensorrt":
            from gpuflow.engines import tensorrt

            engines = tensorrt.open_all(model, image=image, device=device)
        case other:
            raise AssertionError(f"no engine {other!r}")
    logits = check_classes(engines[0], model.file, image, device, class_names(model, engines[0].info))
    check_answers(engines[0], model.file, image, device, logits)
    return tuple(engines)


def read_info(path: str) -> ModelInfo:
    """Return the metadata of a model file, without opening an engine. Raises as `open_engines`."""
    _require_file(path)
    if path.endswith(".onnx"):
        from gpuflow.engines import onnx

        return onnx.info_of(path)
    from gpuflow.engines import pytorch

    return pytorch.info_of(path)


def read_checked_info(model: ModelSpec, pipeline: Pipeline) -> ModelInfo:
    """Return the metadata of the block's model file. Raises as `open_engines`, and as `refuse_other_preprocessing`."""
    info, trust = read_info(model.file), model.preprocessing == "trust"
    refuse_other_preprocessing(info, pipeline, model.file, force=model.force, trust=trust)
    return info


def _require_file(path: str) -> None:
    if not Path(path).is_file():
        raise model_error(path, "no such file; train or export the model, or name it in serve.model.file")
