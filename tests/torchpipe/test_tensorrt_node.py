"""The parameters of torchpipe's TensorRT node: its settings, its cache file, and the models that it cannot run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuflow.config import ModelSpec
from gpuflow.engines.tensorrt import Platform, Settings, cache_key
from gpuflow.errors import ConfigError
from gpuflow.torchpipe.graph import tensorrt_node
from tests.serve.models import FLOAT, UINT8, Models

PLATFORM = Platform(tensorrt="10.16.1.11", cuda="13.0", gpu="NVIDIA H100 80GB HBM3", capability=(9, 0))


@pytest.fixture
def spec(models: Models, tmp_path: Path) -> Callable[..., ModelSpec]:
    """A block serve.model that leaves the model to torchpipe, with a cache of its own."""

    def make(**settings: Any) -> ModelSpec:
        keys = {"cache": str(tmp_path / "engines"), **settings.pop("tensorrt", {})}
        document = {"file": str(models.onnx), "engine": "tensorrt", "batch": 4, "tensorrt": keys, **settings}
        return ModelSpec.model_validate(document)

    return make


def test_the_parameters_of_a_node(spec: Any, models: Models) -> None:
    model = spec(via="torchpipe", precision="float16", instances=2, tensorrt={"min_batch": 2})
    node = {
        "backend": "S[TensorrtTensor,SyncTensor]",
        "model": str(models.onnx),
        "precision": "fp16",
        "min": "2",
        "max": "4",
        "instance_num": "2",
    }
    assert tensorrt_node(model, image=FLOAT) == node
    key = cache_key(str(models.onnx), Settings.of(model, FLOAT), PLATFORM)
    cached = tensorrt_node(model, image=FLOAT, platform=PLATFORM)
    assert cached == {**node, "model::cache": f"{model.tensorrt.cache}/{key}.torchpipe.trt"}
    assert tensorrt_node(spec(via="torchpipe"), image=FLOAT)["precision"] == "fp32"


@pytest.mark.parametrize("change", [{"gpu": "NVIDIA H200"}, {"tensorrt": "10.14.1"}])
def test_a_torchpipe_nodes_cache_is_of_this_platform(change: Any, spec: Any) -> None:
    model = spec(via="torchpipe")
    here, there = (tensorrt_node(model, image=FLOAT, platform=p) for p in (PLATFORM, replace(PLATFORM, **change)))
    assert here["model::cache"] != there["model::cache"]
    other = tensorrt_node(spec(via="torchpipe", instances=2), image=FLOAT, platform=PLATFORM)
    assert other["model::cache"] != here["model::cache"]  # torchpipe makes a profile an instance


def test_a_folded_model_does_not_go_through_torchpipe(spec: Any, models: Models) -> None:
    model = spec(via="torchpipe", file=str(models.folded_onnx))
    with pytest.raises(ConfigError) as caught:
        tensorrt_node(model, image=UINT8)
    assert str(caught.value) == (
        f"{models.folded_onnx}: takes uint8 images, which torchpipe's TensorrtTensor does not; "
        "use serve.model.via=python, or export the model without --fold-normalize"
    )
