"""The cache of built engines: all that an engine depends on changes its key; damaged or renamed files are not used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.config import ModelSpec, TensorrtSpec
from gpuflow.engines.tensorrt import PlanCache, Platform, Settings, cache_directory, cache_key, timing_key
from gpuflow.errors import ConfigError
from tests.serve.models import FLOAT

SETTINGS = Settings(precision="float16", shape=(3, 32, 32), low=1, best=8, high=16)
PLATFORM = Platform(tensorrt="10.16.1", cuda="13.0", gpu="NVIDIA H100 80GB HBM3", capability=(9, 0))
KEY = "0" * 64


def save_model(path: Path, value: float = 1.0, *, external: str | None = None, nested: bool = False) -> Path:
    """y = x + value; the value is in a separate file if `external` names one, and in a branch if `nested`."""
    weight = onnx.numpy_helper.from_array(np.full(64, value, np.float32), "w")
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [64]) for name in ("x", "y")]
    node = onnx.helper.make_node("Add", ["x", "w"], ["y"])
    if nested:
        inner = onnx.helper.make_graph([node], "inner", [], ends[1:], [weight])
        always = onnx.numpy_helper.from_array(np.array(True), "always")
        node = onnx.helper.make_node("If", ["always"], ["y"], then_branch=inner, else_branch=inner)
        graph = onnx.helper.make_graph([node], "g", ends[:1], ends[1:], [always])
    else:
        graph = onnx.helper.make_graph([node], "g", ends[:1], ends[1:], [weight])
    model = onnx.helper.make_model(graph)
    onnx.save_model(model, path, save_as_external_data=external is not None, location=external, size_threshold=0)
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model(tmp_path / "m.onnx")


def test_a_key_is_a_pure_function(model: Path, tmp_path: Path) -> None:
    key = cache_key(str(model), SETTINGS, PLATFORM)
    assert len(key) == 64 and set(key) <= set("0123456789abcdef")
    renamed = tmp_path / "other.onnx"
    renamed.write_bytes(model.read_bytes())
    assert cache_key(str(renamed), SETTINGS, PLATFORM) == key


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "float32"},
        {"shape": (3, 32, 33)},
        {"low": 2},
        {"best": 16},
        {"high": 32},
        {"maker": "torchpipe"},
        {"instances": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_setting_changes_the_key(change: dict[str, object], model: Path) -> None:
    other = replace(SETTINGS, **change)  # type: ignore[arg-type]
    assert cache_key(str(model), other, PLATFORM) != cache_key(str(model), SETTINGS, PLATFORM)


@pytest.mark.parametrize(
    "change",
    [{"tensorrt": "10.16.2"}, {"cuda": "13.1"}, {"gpu": "NVIDIA H200"}, {"capability": (9, 1)}],
    ids=lambda change: next(iter(change)),
)
def test_the_platform_changes_both_keys(change: dict[str, object], model: Path) -> None:
    other = replace(PLATFORM, **change)  # type: ignore[arg-type]
    assert cache_key(str(model), SETTINGS, other) != cache_key(str(model), SETTINGS, PLATFORM)
    assert timing_key(other) != timing_key(PLATFORM)


def test_the_cases_above_cover_every_field() -> None:
    assert set(Settings.__slots__) == {"precision", "shape", "low", "best", "high", "maker", "instances"}
    assert set(Platform.__slots__) == {"tensorrt", "cuda", "gpu", "capability"}


def test_the_models_bytes_change_the_key(model: Path) -> None:
    before = cache_key(str(model), SETTINGS, PLATFORM)
    save_model(model, 2.0)
    assert cache_key(str(model), SETTINGS, PLATFORM) != before


@pytest.mark.parametrize("nested", [False, True])
def test_weights_in_separate_files_change_the_key(nested: bool, tmp_path: Path) -> None:
    path = save_model(tmp_path / "m.onnx", external="weights.bin", nested=nested)
    before, graph = cache_key(str(path), SETTINGS, PLATFORM), path.read_bytes()
    weights = bytearray((tmp_path / "weights.bin").read_bytes())
    weights[0] ^= 1
    (tmp_path / "weights.bin").write_bytes(weights)
    assert path.read_bytes() == graph
    assert cache_key(str(path), SETTINGS, PLATFORM) != before


def test_settings_of_a_block() -> None:
    model = ModelSpec(file="m.onnx", engine="tensorrt", batch=16, instances=3, precision="float16")
    assert Settings.of(model, FLOAT) == replace(SETTINGS, best=16)
    model = model.model_copy(update={"via": "torchpipe", "tensorrt": TensorrtSpec(min_batch=2, opt_batch=4)})
    assert Settings.of(model, FLOAT) == replace(SETTINGS, low=2, best=4, maker="torchpipe", instances=3)


def test_the_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = ModelSpec(file="m.onnx", engine="tensorrt")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory(model) == tmp_path / "gpuflow" / "tensorrt"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory(model) == tmp_path / "home" / ".cache" / "gpuflow" / "tensorrt"
    named = model.model_copy(update={"tensorrt": TensorrtSpec(cache="engines")})
    assert cache_directory(named) == Path("engines")


# --- files ------------------------------------------------------------------------------------------------------------


@given(content=st.binary(max_size=200))
def test_stored_content_is_loaded(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    cache = PlanCache(tmp_path_factory.mktemp("cache") / "made")
    assert cache.load(KEY) is None
    cache.store(KEY, content)
    assert cache.load(KEY) == content
    assert [path.name for path in cache.directory.iterdir()] == [f"{KEY}.engine"]
    assert cache.load(KEY, "timing") is None


@pytest.mark.parametrize("length", [0, 1, 31, 32, 40, 131])
def test_a_truncated_file_is_not_used(length: int, tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    cache.store(KEY, bytes(100))
    cache.path(KEY).write_bytes(cache.path(KEY).read_bytes()[:length])
    assert cache.load(KEY) is None
    cache.store(KEY, b"new")
    assert cache.load(KEY) == b"new"


@pytest.mark.parametrize("change", [lambda data: data + b"x", lambda data: data[:-1] + b"x"], ids=["longer", "other"])
def test_a_changed_file_is_not_used(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    cache.store(KEY, bytes(100))
    cache.path(KEY).write_bytes(change(cache.path(KEY).read_bytes()))
    assert cache.load(KEY) is None


def test_a_file_under_another_ones_name_is_not_used(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    cache.store(KEY, b"an engine")
    cache.path(KEY).rename(cache.path("1" * 64))
    assert cache.load("1" * 64) is None


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    cache.path(KEY).mkdir()  # so that the file cannot take its place
    with pytest.raises(ConfigError) as caught:
        cache.store(KEY, b"content")
    assert str(caught.value) == (
        f"serve.model.tensorrt.cache cannot be written: Is a directory: '{tmp_path}'; name a directory of yours"
    )
    assert list(tmp_path.iterdir()) == [cache.path(KEY)]


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError) as caught:
        PlanCache(tmp_path / "file").store(KEY, b"content")
    assert str(caught.value) == (
        f"serve.model.tensorrt.cache cannot be written: File exists: '{tmp_path}/file'; name a directory of yours"
    )
