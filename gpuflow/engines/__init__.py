"""Model engines: turn a batch of images into logits. One small interface, three libraries.

pytorch    a gpuflow checkpoint (`.pt`) or an exported program (`.pt2`), optionally compiled or as CUDA graphs
onnx       `.onnx` by onnxruntime, on its CPU or CUDA provider
tensorrt   `.onnx` built into a TensorRT engine

`open_engine` chooses the library by the file's kind, and checks that the model gives logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from gpuflow.config import ModelSpec
from gpuflow.engines.base import (
    Engine,
    ModelInfo,
    activation_of,
    check_answers,
    check_classes,
    class_names,
    model_error,
    refuse_other_preprocessing,
    run_in_thread,
    warm_up_all,
)
from gpuflow.errors import ConfigError
from gpuflow.pipeline.stage import ImageSpec, Pipeline

__all__ = [
    "Engine",
    "ModelInfo",
    "class_names",
    "open_engine",
    "open_engines",
    "read_checked_info",
    "read_info",
    "refuse_other_preprocessing",
    "warm_up_all",
]


_MODULES = {"torch": "pytorch", "onnxruntime": "onnx", "tensorrt": "tensorrt"}
"""The modules of the engines, which import their libraries."""


def open_engine(model: ModelSpec, *, image: ImageSpec, device: torch.device) -> Engine:
    """Return one engine that may use all cores. See `open_engines`."""
    return open_engines(model.model_copy(update={"instances": 1}), image=image, device=device)[0]


def open_engines(model: ModelSpec, *, image: ImageSpec, device: torch.device) -> tuple[Engine, ...]:
    """Return `model.instances` engines that are not warmed up yet.

    They share the cores and, if the library supports it, the weights.

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
    library = import_module(f"gpuflow.engines.{_MODULES[model.runtime]}")
    open_all = partial(library.open_all, model, image=image, device=device)
    engines: Sequence[Engine] = run_in_thread(open_all) if model.runtime == "torch" else open_all()
    info = engines[0].info
    logits = check_classes(engines[0], model.file, image, device, class_names(model, info), activation_of(model, info))
    check_answers(engines[0], model.file, image, device, logits)
    return tuple(engines)


def read_info(path: str) -> ModelInfo:
    """Return the metadata of a model file, without opening an engine. Raises as `open_engines`."""
    _require_file(path)
    library = import_module(f"gpuflow.engines.{'onnx' if path.endswith('.onnx') else 'pytorch'}")
    info: ModelInfo = library.info_of(path)
    return info


def read_checked_info(model: ModelSpec, pipeline: Pipeline) -> ModelInfo:
    """Return the metadata of the block's model file. Raises as `open_engines`, and as `refuse_other_preprocessing`."""
    info, trust = read_info(model.file), model.preprocessing == "trust"
    refuse_other_preprocessing(info, pipeline, model.file, force=model.force, trust=trust)
    return info


def _require_file(path: str) -> None:
    if not Path(path).is_file():
        raise model_error(path, "no such file; train or export the model, or name it in serve.model.file")
