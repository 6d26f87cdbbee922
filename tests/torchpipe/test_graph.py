"""A configuration as a torchpipe graph: the dict, the TOML, stages as text, and what is refused."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

import gpuflow.serve
from gpuflow.config import ModelSpec
from gpuflow.errors import ConfigError
from gpuflow.pipeline.stage import Pipeline
from gpuflow.runtime.threads import available_threads
from gpuflow.stages import STAGES
from gpuflow.torchpipe.graph import Graph, chain, program_from_json, stages_to_json, to_toml
from tests.datasets import VAL, program, write_config
from tests.forking import Python
from tests.laws.test_stage_laws import EXAMPLES, pipeline_around

FILE = {"file": "m.onnx"}
STAGES_JSON = (
    '[["decode", {"color": "rgb", "backend": "auto", "cpu_share": 0.0, "orientation": null, '
    '"max_pixels": 179000000, "max_scans": 100, "background": null, "formats": []}], '
    '["resize", {"height": null, "width": null, "shorter": 32, "longer": null, "max_size": null, '
    '"interpolation": "bilinear", "antialias": true, "rounding": "down"}], '
    '["center_crop", {"size": 24, "rounding": "nearest", "border": "constant"}], '
    '["normalize", {"mean": "imagenet", "std": "imagenet", "dtype": "float32", "layout": "nchw"}]]'
)
PYTHON = {"torchvision": {"name": "Grayscale", "num_output_channels": 3}}
PRESET = {"preset": "torchpipe_cpu", "height": 20, "width": 30, "stages": [{"normalize": {}}]}


def lowered(tmp_path: Path, serve: dict[str, Any], *overrides: str, device: str = "cpu") -> Graph:
    config = write_config(tmp_path / "x.yaml", "photos", serve=serve)
    return gpuflow.serve.lower(config, overrides=["run.threads=3", *overrides], device=device)


def test_the_dict_is_preprocessing_then_the_model(tmp_path: Path) -> None:
    serve = {"stages": list(VAL), "model": {**FILE, "batch": 8, "instances": 2, "timeout_ms": 5}}
    graph = lowered(tmp_path, serve)
    assert graph.as_dict() == {
        "preprocess": {
            "backend": "GpuflowPreprocess",
            "batching_timeout": "1",
            "device": "cpu",
            "on_error": "pass",
            "batch": "8",
            "threads": "3",
            "processes": "0",
            "stages": STAGES_JSON,
            "instance_num": "3",
            "next": "model",
        },
        "model": {
            "backend": "GpuflowModel",
            "instance_num": "2",
            "batching_timeout": "5",
            "batch": "8",
            "device": "cpu",
            "stages": STAGES_JSON,
            "model": '{"file":"m.onnx","batch":8,"instances":2,"timeout_ms":5.0}',
        },
    }
    assert not graph.native
    assert len(graph.preprocessing) == 16


def test_on_a_gpu_one_node_does_both(tmp_path: Path) -> None:
    serve = {"stages": list(VAL), "model": {**FILE, "batch": 8, "instances": 2}}
    graph = lowered(tmp_path, serve, device="cuda")
    assert graph.as_dict() == {
        "serve": {
            "backend": "GpuflowPredict",
            "instance_num": "2",
            "batching_timeout": "2",
            "batch": "8",
            "device": "cuda",
            "stages": STAGES_JSON,
            "model": '{"file":"m.onnx","batch":8,"instances":2}',
            "on_error": "pass",
            "patience": "2",
        }
    }
    assert not graph.native


@pytest.mark.parametrize(("given", "patience", "timeout"), [(0, "0", "1"), (1.5, "2", "2")])
def test_on_a_gpu_the_timeout_is_the_time_for_callers_to_send_again(
    given: float, patience: str, timeout: str, tmp_path: Path
) -> None:
    node = lowered(tmp_path, {"stages": list(VAL), "model": {**FILE, "timeout_ms": given}}, device="cuda").as_dict()
    assert (node["serve"]["patience"], node["serve"]["batching_timeout"]) == (patience, timeout)


def test_with_backend_cpu_all_threads_decode_and_batches_go_to_the_gpu(tmp_path: Path) -> None:
    stages = [{"decode": {"backend": "cpu"}}, *VAL[1:]]
    nodes = lowered(tmp_path, {"stages": stages, "model": {**FILE, "batch": 8}}, device="cuda").as_dict()
    preprocess = nodes["preprocess"]
    assert (preprocess["device"], preprocess["threads"], preprocess["batch"]) == ("cpu", "3", "8")
    assert nodes["model"]["device"] == "cuda"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_processes_share_one_batch_after_the_other(device: str, tmp_path: Path) -> None:
    stages = [{"decode": {"backend": "cpu"}}, *VAL[1:]]
    serve = {"stages": stages, "model": {**FILE, "batch": 8, "instances": 1}}
    nodes = lowered(tmp_path, serve, "run.processes=2", device=device).as_dict()
    node = nodes["preprocess"]
    assert (node["device"], node["processes"], node["threads"], node["instance_num"]) == ("cpu", "2", "3", "1")
    assert nodes["model"]["device"] == device


@pytest.mark.parametrize(
    ("threads", "stage", "processes"), [(8, [], "0"), (8, [PYTHON], "8"), (2, [PYTHON], "2"), (1, [PYTHON], "0")]
)
def test_auto_chooses_processes_for_stages_that_run_python_code(
    threads: int, stage: list[Any], processes: str, tmp_path: Path
) -> None:
    serve = {"stages": [*VAL[:-1], *stage, VAL[-1]], "model": FILE}
    nodes = lowered(tmp_path, serve, f"run.threads={threads}").as_dict()
    assert nodes["preprocess"]["processes"] == processes


def test_without_processes_if_the_gpu_decodes(tmp_path: Path) -> None:
    serve = {"stages": list(VAL), "model": {**FILE, "batch": 8}}
    assert "processes" not in lowered(tmp_path, serve, "run.processes=2", device="cuda").as_dict()["serve"]


@pytest.mark.parametrize(("via", "images_on"), [("python", "cpu"), ("torchpipe", "cuda")])
def test_all_threads_decode_if_the_gpu_cannot(via: str, images_on: str) -> None:
    """As with `decode.backend: cpu`, but the fingerprint is that of the file's own stages."""
    stages = program(VAL)
    model = ModelSpec.model_validate({**FILE, "engine": "tensorrt", "via": via})
    graph = chain(stages, model, origin="x.yaml", threads=5, device="cuda", gpu_decodes=False)
    preprocess = graph.as_dict()["preprocess"]
    threads = preprocess.get("threads", preprocess["instance_num"])
    assert (preprocess["device"], threads, preprocess["next"]) == (images_on, "5", "model")
    assert graph.preprocessing == stages.pipeline.fingerprint


def test_each_dict_is_a_new_one(tmp_path: Path) -> None:
    """torchpipe changes the dict that it is given."""
    graph = lowered(tmp_path, {"stages": list(VAL), "model": FILE})
    graph.as_dict()["model"]["batch"] = "1"
    assert graph.as_dict()["model"]["batch"] == "16"
    assert all(type(value) is str for node in graph.as_dict().values() for value in node.values())


def test_a_prefix_goes_before_every_name(tmp_path: Path) -> None:
    nodes = lowered(tmp_path, {"stages": list(VAL), "model": FILE}).as_dict("a.")
    assert list(nodes) == ["a.preprocess", "a.model"]
    assert nodes["a.preprocess"]["next"] == "a.model"


@pytest.mark.parametrize(("given", "passed"), [(0, "1"), (0.2, "1"), (2, "2"), (2.1, "3")])
def test_timeouts_are_whole_milliseconds_and_never_0(given: float, passed: str, tmp_path: Path) -> None:
    """0 would turn torchpipe's batching off."""
    graph = lowered(tmp_path, {"stages": list(VAL), "model": {**FILE, "timeout_ms": given}})
    assert graph.as_dict()["model"]["batching_timeout"] == passed


def test_threads_are_the_cores_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    graph = lowered(tmp_path, {"stages": list(VAL), "model": FILE}, "run.threads=auto", "run.processes=0")
    assert graph.as_dict()["preprocess"]["threads"] == str(available_threads())


def test_without_a_model_the_graph_ends_with_the_images(tmp_path: Path) -> None:
    assert "model" not in lowered(tmp_path, {"stages": list(VAL)}).as_dict()["model"]


def test_a_preset_is_torchpipes_own_operators(tmp_path: Path) -> None:
    graph = lowered(tmp_path, {**PRESET, "model": FILE})
    assert graph.native
    assert graph.as_dict()["preprocess"] == {
        "backend": "S[DecodeMat,ResizeMat,CvtColorMat,Mat2Tensor]",
        "device": "cpu",
        "color": "rgb",
        "resize_h": "20",
        "resize_w": "30",
        "instance_num": "3",
        "next": "model",
    }
    (preset, parameters), *_ = json.loads(graph.as_dict()["model"]["stages"])
    assert (preset, parameters["name"]) == ("preset", "torchpipe_cpu")
    gpu = lowered(tmp_path, {**PRESET, "preset": "torchpipe_gpu"}, "run.threads=16").as_dict()["preprocess"]
    assert gpu["instance_num"] == "4", "each takes more than a second to start"
    assert gpu["backend"] == "S[DecodeTensor,(or)S[DecodeMat,Mat2Tensor],ResizeTensor,CvtColorTensor,SyncTensor]"


def test_tensorrt_may_be_torchpipes_own_node(tmp_path: Path, models: Any) -> None:
    graph = gpuflow.serve.lower(
        models.config,
        device="cuda",
        overrides=[f"serve.model={{file: {models.onnx}, engine: tensorrt, via: torchpipe}}"],
    )
    nodes = graph.as_dict()
    assert graph.native
    assert nodes["model"]["backend"] == "S[TensorrtTensor,SyncTensor]"
    assert (nodes["preprocess"]["device"], nodes["preprocess"]["on_error"]) == ("cuda", "raise")


def test_a_preset_takes_no_model_of_torchpipes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        lowered(tmp_path, {**PRESET, "model": {**FILE, "engine": "tensorrt", "via": "torchpipe"}})
    assert str(caught.value) == (
        f"{tmp_path}/x.yaml: serve.model.via is torchpipe, which has no node for the stages after a preset; use python"
    )


def test_a_file_without_the_block(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        gpuflow.serve.lower(write_config(tmp_path / "x.yaml", "photos"))
    assert str(caught.value) == f"{tmp_path}/x.yaml: has no block serve; add serve: {{stages: ..., model: ...}}"


# --- stages as text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [stage for stage in EXAMPLES if not stage.random], ids=repr)
def test_stages_survive_being_written_and_read(stage: Any) -> None:
    stages = pipeline_around(stage)
    text = stages_to_json(stages)
    pipeline = program_from_json(text, STAGES).pipeline
    assert pipeline.stages == stages
    assert pipeline.fingerprint == Pipeline("x", stages).fingerprint
    assert stages_to_json(pipeline.stages) == text


def test_a_stage_of_a_package_that_is_not_installed() -> None:
    with pytest.raises(ConfigError) as caught:
        program_from_json('[["decode", {}], ["fade", {"strength": 1.0}]]', STAGES)
    assert str(caught.value) == (
        "the graph has the stage 'fade', which is not known here; install the package that brings it"
    )


# --- TOML -------------------------------------------------------------------------------------------------------------


def test_toml_equals_the_dict(tmp_path: Path) -> None:
    graph = lowered(tmp_path, {"stages": list(VAL), "model": FILE})
    text = to_toml(graph, file="out.toml")
    assert tomllib.loads(text) == graph.as_dict()
    header = text.partition("\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in header)
    assert header[0] == (
        f"# A torchpipe graph of {tmp_path}/x.yaml, written by gpuflow {gpuflow.__version__}. "
        f"Preprocessing {graph.preprocessing}."
    )
    assert "#     graph = torchpipe.pipe('out.toml')" in header


@pytest.mark.parametrize(
    "value", ["", "a b", 'a "b"', "it's", 'it\'s "b"', "a\nb\\", "grüße 😀", "\x00\x1f\x7f", "[x]"]
)
def test_toml_carries_any_text(value: str) -> None:
    parameters = {"backend": "Identity", "model::cache": value}
    graph = Graph(nodes={"model": parameters}, origin="x.yaml", preprocessing="0" * 16)
    assert tomllib.loads(to_toml(graph, file="x.toml")) == {"model": parameters}


def test_lowering_needs_neither_torchpipe_nor_the_model(tmp_path: Path, python_with_torch: Python) -> None:
    config = write_config(tmp_path / "x.yaml", "photos", serve={"stages": list(VAL), "model": FILE})
    code = """
import sys
import gpuflow.serve
graph = gpuflow.serve.lower(sys.argv[1])
print(gpuflow.serve.to_toml(graph, file="x.toml"))
heavy = {"torchpipe", "omniback", "tvm_ffi", "onnx", "onnxruntime"} & set(sys.modules)
assert not heavy, heavy
"""
    done = python_with_torch(code, str(config), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert tomllib.loads(done.stdout)["model"]["backend"] == "GpuflowModel"
