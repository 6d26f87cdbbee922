"""The engine tensorrt against a fake TensorRT: its calls, their order and arguments, and what is cached.

The fake (fake_tensorrt) has the part of TensorRT 10's Python API that gpuflow calls, and runs on the CPU. The last test
uses the real TensorRT, if it is installed.
"""

from __future__ import annotations

import ast
import inspect
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from gpuflow.config import ModelSpec
from gpuflow.engines import open_engine
from gpuflow.engines import tensorrt as tensorrt_engine
from gpuflow.engines.tensorrt import PlanCache, Platform, Settings, TensorrtEngine, cache_key, open_on_streams
from gpuflow.errors import ConfigError, GpuflowError, MissingExtra
from gpuflow.pipeline.stage import ImageSpec
from gpuflow.stages import Normalize
from tests.engines import tensorrt_signatures as declared
from tests.serve.models import CPU, FLOAT, UINT8, Models, engine, noise

PLATFORM = Platform(tensorrt="10.16.1.11", cuda="13.0", gpu="NVIDIA H100 80GB HBM3", capability=(9, 0))
SEE_LOG = "its log on stderr says why"


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The fake TensorRT, with an empty log and no faults."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fake_tensorrt"))
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    import tensorrt

    yield tensorrt
    del sys.modules["tensorrt"]


@pytest.fixture
def spec(models: Models, tmp_path: Path) -> Callable[..., ModelSpec]:
    """A block serve.model with a cache of its own."""

    def make(**settings: Any) -> ModelSpec:
        keys = {"cache": str(tmp_path / "engines"), **settings.pop("tensorrt", {})}
        document = {"file": str(models.onnx), "engine": "tensorrt", "batch": 4, "tensorrt": keys, **settings}
        return ModelSpec.model_validate(document)

    return make


def open_fake(trt: Any, model: ModelSpec, image: ImageSpec = FLOAT, **changes: Any) -> list[TensorrtEngine]:
    """Engines on the fake's streams, whose handles are 1, 2, ..."""
    streams = [trt.Stream(number + 1) for number in range(model.instances)]
    return open_on_streams(model, image=image, device=CPU, platform=replace(PLATFORM, **changes), streams=streams)


def names(trt: Any) -> list[str]:
    return [call[0] for call in trt.log]


def fault(act: Callable[[], object], kind: type[Exception] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)


# --- running ----------------------------------------------------------------------------------------------------------


def test_logits_are_those_of_the_model(trt: Any, spec: Any, models: Models) -> None:
    (running,) = open_fake(trt, spec())
    running.warm_up()
    with torch.inference_mode():
        for count in (1, 3, 4):
            logits = running.run(noise(count))
            assert (logits.dtype, logits.shape) == (torch.float32, (count, 3))
            torch.testing.assert_close(logits, models.module()(noise(count)), rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="1 to 4 images"):
        running.run(noise(5))
    running.close()


def test_the_calls_in_their_order(trt: Any, spec: Any, models: Models) -> None:
    (running,) = open_fake(trt, spec(tensorrt={"min_batch": 2, "opt_batch": 3}))
    running.warm_up()
    running.run(noise(1))
    low, best, high = (count_shape for count_shape in ((2, 3, 32, 32), (3, 3, 32, 32), (4, 3, 32, 32)))
    assert [call for call in trt.log if call[0] != "execute_async_v3"] == [
        ("parse_from_file", str(models.onnx)),
        ("create_timing_cache", b""),
        ("set_shape", "images", low, best, high),
        ("build_serialized_network",),  # float32: TF32, which is on by default, is off
        ("deserialize_cuda_engine",),
        ("create_execution_context",),
    ]
    runs = [call for call in trt.log if call[0] == "execute_async_v3"]
    assert sorted(runs[:2]) == [("execute_async_v3", 1, low), ("execute_async_v3", 1, high)]
    assert runs[2] == ("execute_async_v3", 1, low)  # one image, padded to the smallest batch


def test_a_padded_batch_gives_its_own_logits(trt: Any, spec: Any, models: Models) -> None:
    (running,) = open_fake(trt, spec(tensorrt={"min_batch": 3}))
    with torch.inference_mode():
        torch.testing.assert_close(running.run(noise(2)), models.module()(noise(2)), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("precision", "flags"), [("float32", ()), ("float16", ("FP16", "TF32")), ("bfloat16", ("BF16", "TF32"))]
)
def test_precision_is_a_flag(precision: str, flags: tuple[str, ...], trt: Any, spec: Any) -> None:
    (running,) = open_fake(trt, spec(precision=precision))
    assert ("build_serialized_network", *flags) in trt.log
    assert running.describe()["precision"] == precision


def test_a_folded_model_takes_pixels_in_any_memory_layout(trt: Any, spec: Any, models: Models) -> None:
    (running,) = open_fake(trt, spec(file=str(models.folded_onnx)), UINT8)
    images = noise(2, UINT8)
    assert not images.is_contiguous()
    with torch.inference_mode():
        expected = models.module()(Normalize().module()(images))
    torch.testing.assert_close(running.run(images), expected, rtol=0, atol=1e-4)


def test_instances_are_contexts_of_one_engine(trt: Any, spec: Any) -> None:
    engines = open_fake(trt, spec(instances=3))
    assert names(trt).count("deserialize_cuda_engine") == 1
    assert names(trt).count("create_execution_context") == 3
    trt.log.clear()
    for running in engines:
        running.run(noise(1))
    assert [call[1] for call in trt.log] == [1, 2, 3]  # each on its own stream


def test_describe(trt: Any, spec: Any, models: Models) -> None:
    (running,) = open_fake(trt, spec(precision="float16"))
    about = running.describe()
    assert about.pop("ready_seconds") >= 0
    assert about == {
        "engine": "tensorrt",
        "tensorrt": "10.16.1.11",
        "batch": 4,
        "file": str(models.onnx),
        "device": "NVIDIA H100 80GB HBM3",
        "cuda": "13.0",
        "precision": "float16",
        "batches": [1, 4, 4],
        "cached": False,
    }
    assert running.info == engine(models.onnx).info


# --- the cache --------------------------------------------------------------------------------------------------------


def test_an_engine_is_built_once(trt: Any, spec: Any) -> None:
    open_fake(trt, spec())
    (again,) = open_fake(trt, spec())
    assert names(trt).count("build_serialized_network") == 1
    assert again.describe()["cached"]
    assert len(again.run(noise(2))) == 2


@pytest.mark.parametrize(
    ("settings", "platform"),
    [
        ({"precision": "float16"}, {}),
        ({"batch": 8}, {}),
        ({"tensorrt": {"min_batch": 2}}, {}),
        ({"tensorrt": {"opt_batch": 2}}, {}),
        ({}, {"tensorrt": "10.16.2"}),
        ({}, {"cuda": "13.1"}),
        ({}, {"gpu": "NVIDIA H200"}),
        ({}, {"capability": (10, 0)}),
    ],
)
def test_an_engine_for_other_settings_is_built_again(settings: Any, platform: Any, trt: Any, spec: Any) -> None:
    open_fake(trt, spec())
    (other,) = open_fake(trt, spec(**settings), **platform)
    assert names(trt).count("build_serialized_network") == 2
    assert not other.describe()["cached"]


def test_another_model_under_the_same_name_is_built_anew(trt: Any, spec: Any, models: Models, tmp_path: Path) -> None:
    path = tmp_path / "served.onnx"
    shutil.copy(models.onnx, path)
    open_fake(trt, spec(file=str(path)))
    model = onnx.load(path)
    (bias,) = [weight for weight in model.graph.initializer if weight.name == "classifier.1.bias"]
    values = onnx.numpy_helper.to_array(bias) + 1
    bias.CopyFrom(onnx.numpy_helper.from_array(values, bias.name))
    onnx.save(model, path)
    (running,) = open_fake(trt, spec(file=str(path)))
    torch.testing.assert_close(running.run(noise(2)), engine(path).run(noise(2)), rtol=0, atol=1e-5)
    assert names(trt).count("build_serialized_network") == 2


@pytest.mark.parametrize("damage", ["cut", "empty", "stale"])
def test_an_engine_whose_file_is_damaged_is_built_again(damage: str, trt: Any, spec: Any, models: Models) -> None:
    open_fake(trt, spec())
    settings = Settings.of(spec(), FLOAT)
    cache = PlanCache(Path(spec().tensorrt.cache))
    file = cache.path(cache_key(str(models.onnx), settings, PLATFORM))
    whole = file.read_bytes()
    if damage == "stale":  # the engine of other settings under this one's name
        open_fake(trt, spec(precision="float16"))
        other = cache.path(cache_key(str(models.onnx), replace(settings, precision="float16"), PLATFORM))
        shutil.copy(other, file)
    else:
        file.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"")
    before = names(trt).count("build_serialized_network")
    (running,) = open_fake(trt, spec())
    assert names(trt).count("build_serialized_network") == before + 1
    assert not running.describe()["cached"]
    assert file.read_bytes() == whole


def test_a_build_that_fails_leaves_no_file(trt: Any, spec: Any) -> None:
    trt.faults.add("build_serialized_network")
    with pytest.raises(ConfigError):
        open_fake(trt, spec())
    assert not Path(spec().tensorrt.cache).exists()


def test_kernel_times_are_reused_for_the_next_model(trt: Any, spec: Any) -> None:
    """For each platform, because kernel times of one GPU are not valid on another."""
    open_fake(trt, spec())
    open_fake(trt, spec(batch=8))
    open_fake(trt, spec(batch=8), gpu="NVIDIA H200")
    assert [call[1] for call in trt.log if call[0] == "create_timing_cache"] == [b"", b"measured;", b""]


# --- what fails -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            "parse_from_file",
            "{file}: cannot be parsed by TensorRT 10.16.1.11: node 0: no importer; node 1: no importer",
        ),
        ("build_serialized_network", "{file}: cannot be built by TensorRT 10.16.1.11; " + SEE_LOG),
        ("create_execution_context", "{file}: leaves TensorRT no memory for an instance; lower serve.model.batch"),
    ],
)
def test_errors_of_tensorrt(call: str, text: str, trt: Any, spec: Any, models: Models) -> None:
    trt.faults.add(call)
    assert fault(lambda: open_fake(trt, spec())) == text.format(file=models.onnx)


def test_an_engine_that_cannot_be_loaded_names_its_file(trt: Any, spec: Any, models: Models) -> None:
    trt.faults.add("deserialize_cuda_engine")
    file = PlanCache(Path(spec().tensorrt.cache)).path(
        cache_key(str(models.onnx), Settings.of(spec(), FLOAT), PLATFORM)
    )
    expected = f"{models.onnx}: cannot be loaded by TensorRT from {file}; delete that file"
    assert fault(lambda: open_fake(trt, spec())) == expected


@pytest.mark.parametrize("call", ["set_input_shape", "execute_async_v3"])
def test_a_run_that_fails(call: str, trt: Any, spec: Any) -> None:
    (running,) = open_fake(trt, spec())
    trt.faults.add(call)
    assert fault(lambda: running.run(noise(1)), GpuflowError) == f"TensorRT: {call} failed; {SEE_LOG}"


def test_a_model_for_other_images(trt: Any, spec: Any, models: Models) -> None:
    assert fault(lambda: open_fake(trt, spec(), replace(FLOAT, shape=(32, 48, 3)))) == (
        f"{models.onnx}: takes images of float32 3x32x32 (channels x height x width), serve.stages give "
        "float32 3x32x48; change the stages or export the model for them"
    )


class Twice(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.sum(dim=(2, 3)).to(torch.int32)


@pytest.mark.filterwarnings("ignore")  # of torch's exporter
def test_an_output_that_is_no_logits(trt: Any, spec: Any, tmp_path: Path) -> None:
    path = tmp_path / "integers.onnx"
    batch = {0: torch.export.Dim("batch")}
    program: Any = torch.onnx.export(Twice(), (noise(2),), dynamo=True, dynamic_shapes=(batch,), verbose=False)
    program.save(path)
    assert fault(lambda: open_fake(trt, spec(file=str(path)))) == (
        f"{path}: has an input or output of INT32; known: FLOAT, HALF, BF16, UINT8"
    )


def test_another_major_version(trt: Any, spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt, "__version__", "11.1.0")
    assert fault(lambda: open_fake(trt, spec()), GpuflowError) == (
        "gpuflow runs TensorRT 10, found 11.1.0; pip install 'gpuflow[tensorrt]'"
    )


def test_a_cpu(spec: Any) -> None:
    assert fault(lambda: open_engine(spec(), image=FLOAT, device=CPU)) == (
        "serve.model.engine is tensorrt, which needs an NVIDIA GPU, but the device is cpu; use onnxruntime or torch"
    )


def test_tensorrt_is_an_extra(spec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert fault(
        lambda: open_on_streams(spec(), image=FLOAT, device=CPU, platform=PLATFORM, streams=[]), MissingExtra
    ) == ("the engine tensorrt needs tensorrt, which is not installed; pip install 'gpuflow[tensorrt]'")


# --- the real one -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_real_tensorrt(models: Models, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt", reason="TensorRT is not installed: pip install 'gpuflow[tensorrt]'")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no NVIDIA GPU")
    device = torch.device("cuda", 0)
    for precision, tolerance in (("float32", 1e-3), ("float16", 0.05)):
        settings = {"engine": "tensorrt", "precision": precision, "batch": 4, "tensorrt": {"cache": str(tmp_path)}}
        model = ModelSpec.model_validate({"file": str(models.onnx), **settings})
        for cached in (False, True):
            running = open_engine(model, image=FLOAT, device=device)
            running.warm_up()
            with torch.inference_mode():
                expected = models.module()(noise(3))
            torch.testing.assert_close(running.run(noise(3).to(device)), expected, rtol=0, atol=tolerance)
            assert running.describe()["cached"] is cached
            running.close()


# --- the fake against TensorRT's own declarations ---------------------------------------------------------------------

FAKES = {
    "INetworkDefinition": "Network",
    "IBuilderConfig": "BuilderConfig",
    "ITimingCache": "TimingCache",
    "IOptimizationProfile": "OptimizationProfile",
    "ICudaEngine": "CudaEngine",
    "IExecutionContext": "ExecutionContext",
}
"""Names of the fake's classes, which nobody constructs by name, where they are not TensorRT's."""


@pytest.mark.parametrize("name", declared.METHODS)
def test_the_fake_has_the_signatures_of_tensorrt(name: str, trt: Any) -> None:
    fake = getattr(trt, FAKES.get(name, name))
    for method, parameters in declared.METHODS[name].items():
        _, *own = inspect.signature(getattr(fake, method)).parameters.values()
        found = [x.name if x.default is x.empty else f"{x.name}={x.default!r}" for x in own]
        assert found == list(parameters), f"{name}.{method}"
    for attribute in declared.PROPERTIES.get(name, ()):
        assert isinstance(vars(fake)[attribute], property)


def test_the_fake_has_the_constants_of_tensorrt(trt: Any) -> None:
    for name, members in declared.ENUMS.items():
        assert {member.name: member.value for member in getattr(trt, name)} == members
    assert declared.WARNING == trt.Logger.WARNING
    assert trt.__version__ == declared.VERSION


def test_the_engine_calls_nothing_that_is_not_declared() -> None:
    """Every attribute that the source takes from TensorRT's objects is in the table."""
    known = {name for methods in declared.METHODS.values() for name in methods}
    known |= {name for names in declared.PROPERTIES.values() for name in names}
    tree = ast.parse(inspect.getsource(tensorrt_engine))
    objects = {"builder", "network", "parser", "config", "profile", "built", "context"}
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in objects
    }
    assert used and used <= known, used - known
