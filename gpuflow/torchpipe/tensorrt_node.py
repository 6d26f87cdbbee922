"""The parameters of torchpipe's own TensorRT node, which builds and runs a model (`via: torchpipe`).

They follow torchpipe's tensorrt_helper.cpp, version 0.2.25.
"""

from __future__ import annotations

from gpuflow.config import ModelSpec
from gpuflow.engines.base import model_error
from gpuflow.engines.onnx import info_of
from gpuflow.engines.plans import PlanCache, Platform, Settings, cache_directory, cache_key
from gpuflow.pipeline.stage import ImageSpec

__all__ = ["tensorrt_node"]

_PRECISION = {"float32": "fp32", "float16": "fp16"}


def tensorrt_node(model: ModelSpec, *, image: ImageSpec, platform: Platform | None = None) -> dict[str, str]:
    """The parameters, as strings, of a node that builds and runs the model by `TensorrtTensor`.

    It takes CUDA tensors [1, C, H, W] in `data`, and tunes for the largest batch. torchpipe uses a cached engine if the
    file exists, so the file's name contains the hash; without a platform, each start builds the engine again.

    Raises:
        ConfigError: torchpipe's node cannot run such a model.
    """
    if image.dtype not in ("float32", "float16"):
        export = ", or export the model without --fold-normalize" if info_of(model.file).folded else ""
        rule = (
            f"takes {image.dtype} images, which torchpipe's TensorrtTensor does not; use serve.model.via=python{export}"
        )
        raise model_error(model.file, rule)
    node = {
        "backend": "S[TensorrtTensor,SyncTensor]",
        "model": model.file,
        "precision": _PRECISION[model.precision],
        "min": str(model.tensorrt.min_batch),
        "max": str(model.batch),
        "instance_num": str(model.instances),
    }
    if platform is not None:
        key = cache_key(model.file, Settings.of(model, image), platform)
        node["model::cache"] = str(PlanCache(cache_directory(model)).path(key, "torchpipe.trt"))
    return node
