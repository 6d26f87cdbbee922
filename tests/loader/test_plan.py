"""Where a pipeline would be decoded, why, and what it may hold there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from gpuflow.config import Config, read_config
from gpuflow.decode.nvjpeg import NvjpegError
from gpuflow.errors import ConfigError
from gpuflow.execute.gpu.backend import DECODE_BYTES, Placement, gpu_decodes, gpu_passes_and_library
from gpuflow.execute.gpu.passes import passes_of
from gpuflow.loader.plan import cpu_share_of, explain_gpu, memory_for_decoding, place
from gpuflow.pipeline.program import OpaqueStep, PointwiseStep, ResamplingStep, WarpStep
from gpuflow.stages import STAGES
from tests.datasets import write_config

CROP = {"random_resized_crop": {"size": 8}}
CROP_CENTER = {"center_crop": {"size": 8}}
JITTER = {"color_jitter": {"contrast": 0.2}}
HALF = {"normalize": {"dtype": "float16", "layout": "nhwc"}}
BLUR = {"torchvision": {"name": "GaussianBlur", "kernel_size": 3}}
SECOND = {"resize": {"height": 6, "width": 5}}


FIX = "put a crop or a resize to a fixed size first"
NO_ENGINES = NvjpegError("nvjpegCreateEx", 7)


def config(tmp_path: Path, stages: list[Any], *overrides: str) -> Config:
    path = write_config(tmp_path / "x.yaml", tmp_path / "photos", train=[{"decode": {}}, *stages])
    return read_config(path, STAGES, overrides)


def kinds(tmp_path: Path, *stages: Any) -> list[tuple[Any, bool, str]]:
    passes = passes_of(config(tmp_path, list(stages)).programs["train"])
    assert not isinstance(passes, str), passes
    return [(type(one.step), one.table is not None, str(one.result)) for one in passes]


def test_a_table_joins_the_pass_before_it(tmp_path: Path) -> None:
    assert kinds(tmp_path, CROP, HALF) == [(ResamplingStep, True, "float16 8x8x3 nhwc")]
    assert kinds(tmp_path, CROP) == [(ResamplingStep, False, "uint8 8x8x3 hwc")]
    jittered = [(ResamplingStep, False, "uint8 8x8x3 hwc"), (PointwiseStep, True, "float16 8x8x3 nhwc")]
    assert kinds(tmp_path, CROP, JITTER, HALF) == jittered
    assert kinds(tmp_path, CROP, {"flip": {"horizontal": 0.5}}, JITTER, HALF) == jittered
    blurred = [(ResamplingStep, False), (OpaqueStep, False), (PointwiseStep, True)]
    assert [kind[:2] for kind in kinds(tmp_path, CROP, BLUR, HALF)] == blurred
    sizes = [(WarpStep, False, "uint8 ?x?x3 hwc"), (ResamplingStep, True, "float16 8x8x3 nhwc")]
    assert kinds(tmp_path, {"rotate": {"degrees": 9}}, {"letterbox": {"size": 8}}, HALF) == sizes
    assert [kind[:2] for kind in kinds(tmp_path, CROP, SECOND, HALF)] == [
        (ResamplingStep, False),
        (ResamplingStep, True),
    ]


@pytest.mark.parametrize(
    ("stages", "reason"),
    [
        ([JITTER, CROP], f"color_jitter(contrast=0.2) comes before the images have one size; {FIX}"),
        ([{"resize": {"shorter": 9}}, JITTER, CROP], "after resize(shorter=9) the images still differ in size"),
    ],
)  # fmt: skip
def test_what_runs_nowhere_but_on_the_cpu(tmp_path: Path, stages: list[Any], reason: str) -> None:
    read = config(tmp_path, stages)
    assert passes_of(read.programs["train"]) == gpu_passes_and_library(read.programs["train"]) == reason
    if not torch.cuda.is_available():
        assert explain_gpu(read, "train") == f"decoded on the CPU: {reason}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what this machine has where it has a GPU")
def test_explains_what_a_gpu_would_do(tmp_path: Path) -> None:
    text = "JPEG engines, then 2 batched pass(es); decoded on the CPU if it has none"
    assert explain_gpu(config(tmp_path, [CROP, JITTER, HALF]), "train") == text
    blurred = {"torchvision": {"name": "GaussianBlur", "kernel_size": 3}}
    call = "torchvision on the GPU by a call for each image"
    text = f"JPEG engines, then 2 batched pass(es), {call}; decoded on the CPU if it has none"
    assert explain_gpu(config(tmp_path, [CROP, blurred]), "train") == text
    asked_for = config(tmp_path, [CROP, HALF], "pipelines.train.stages.decode.backend=gpu")
    assert explain_gpu(asked_for, "train") == "JPEG engines, then 1 batched pass(es); CUDA kernels if it has none"
    refused = config(tmp_path, [CROP, HALF], "pipelines.train.stages.decode.backend=cpu")
    assert explain_gpu(refused, "train") == "decoded on the CPU: its decode.backend is cpu"
    assert gpu_passes_and_library(refused.programs["train"]) == "its decode.backend is cpu"


def with_views(tmp_path: Path, *overrides: str, **views: Any) -> Config:
    path = write_config(tmp_path / "x.yaml", tmp_path / "photos", train=[{"decode": {}}, CROP])
    document = yaml.safe_load(path.read_text())
    del document["pipelines"]["train"]["stages"]
    document["pipelines"]["train"]["views"] = views
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return read_config(path, STAGES, overrides)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what this machine has where it has a GPU")
def test_explains_what_a_gpu_would_do_with_views(tmp_path: Path) -> None:
    views = {"large": {"stages": [CROP, JITTER, HALF]}, "small": {"count": 6, "stages": [CROP]}}
    text = (
        "JPEG engines, then batched passes for each view: large 1 x 2, small 6 x 1; decoded on the CPU if it has none"
    )
    assert explain_gpu(with_views(tmp_path, **views), "train") == text
    refused = with_views(tmp_path, "pipelines.train.decode.backend=cpu", **views)
    assert explain_gpu(refused, "train") == "decoded on the CPU: its decode.backend is cpu"
    early = with_views(tmp_path, **views, early={"stages": [JITTER, CROP]})
    text = (
        f"decoded on the CPU: in view 'early', color_jitter(contrast=0.2) comes before the images have one size; {FIX}"
    )
    assert explain_gpu(early, "train") == text


def test_views_are_placed_by_the_rules_of_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else sends them to the CPU: a runner for all of them is asked for, with the CPU's share."""
    asked: list[Any] = []

    def stand_in(program: Any, stream: Any, *arguments: Any, **options: Any) -> Placement:
        asked.append((program, options))
        return Placement(stream, None, "asked")

    monkeypatch.setattr("gpuflow.loader.plan.DeviceStream", lambda device: None)
    monkeypatch.setattr("gpuflow.loader.plan.place_on_gpu", stand_in)
    read = with_views(tmp_path, "pipelines.train.decode.cpu_share=0.25", a={"stages": [CROP]})
    assert place(read, "train", torch.device("cuda"), 4).reason == "asked"
    share = cpu_share_of(read, "train")
    assert asked[0][0] is read.views["train"] and share is not None and share.part == 0.25
    backend = with_views(tmp_path, "pipelines.train.decode.backend=gpu", a={"stages": [CROP]})
    with pytest.raises(ConfigError, match=r"pipelines\.train\.decode\.backend is gpu, but asked; use auto or cpu"):
        place(backend, "train", torch.device("cuda"), 4)


@pytest.mark.parametrize(
    ("backend", "batch", "tried", "reason"),
    [
        (
            "auto",
            64,
            ["hardware"],
            f"JPEG engines: {NO_ENGINES}; its CUDA kernels decode only if decode.backend is gpu",
        ),
        ("gpu", 64, ["hardware", "cuda"], "CUDA kernels of a GPU (libnvjpeg 13.0.0), then 1 batched pass(es)"),
        ("gpu", 49, ["hardware", "cuda_few"], "CUDA kernels of a GPU (libnvjpeg 13.0.0), then 1 batched pass(es)"),
    ],
)
def test_a_gpu_without_engines(
    backend: str, batch: int, tried: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels decode where that is asked for, small batches in another way."""
    found: list[str] = []

    def runner(*arguments: Any, backend: str, **options: Any) -> object:
        found.append(backend)
        if backend == "hardware":
            raise NO_ENGINES
        return object()

    monkeypatch.setattr("gpuflow.execute.gpu.runner.GpuRunner", runner)
    monkeypatch.setattr("gpuflow.execute.gpu.backend.find_nvjpeg", lambda: SimpleNamespace(version="13.0.0"))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a GPU")
    monkeypatch.setattr("gpuflow.loader.plan.DeviceStream", lambda device: SimpleNamespace(device=device))
    read = config(tmp_path, [CROP], f"pipelines.train.stages.decode.backend={backend}")
    placement = place(read, "train", torch.device("cuda"), batch)
    assert (placement.gpu is None) == (backend == "auto") and found == tried
    assert placement.reason.startswith(reason)


@pytest.mark.parametrize(("backend", "status", "expected"), [("auto", 0, True), ("auto", 7, False), ("gpu", 7, True)])
def test_a_service_decodes_where_a_loader_does(
    backend: str, status: int, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decoder(library: Any, color: str, wanted: str) -> None:
        assert (color, wanted) == ("rgb", "hardware")
        if status:
            raise NvjpegError("nvjpegCreateEx", status)

    monkeypatch.setattr("gpuflow.execute.gpu.backend.find_nvjpeg", lambda: None)
    monkeypatch.setattr("gpuflow.execute.gpu.backend.BatchedDecoder", decoder)
    read = config(tmp_path, [CROP], f"pipelines.train.stages.decode.backend={backend}")
    assert gpu_decodes(read.programs["train"]) == expected


def test_what_serves_is_explained_on_a_gpu_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` is a program, and no pipeline that can be loaded."""

    def stand_in(program: Any, stream: Any, *arguments: Any, **options: Any) -> Placement:
        return Placement(stream, None, f"asked for {len(program.pipeline.stages)} stages")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("gpuflow.loader.plan.DeviceStream", lambda device: None)
    monkeypatch.setattr("gpuflow.loader.plan.place_on_gpu", stand_in)
    serve = {"stages": [{"decode": {}}, CROP_CENTER, HALF]}
    path = write_config(tmp_path / "x.yaml", tmp_path / "photos", train=[{"decode": {}}, CROP], serve=serve)
    assert explain_gpu(read_config(path, STAGES), "serve") == "decoded on the CPU: asked for 3 stages"


def test_the_memory_limit_is_shared_by_batches_and_decoding(tmp_path: Path) -> None:
    """5 batches (3 ahead, one at work, one with the consumer) of 10 x 384 bytes; three buffers have the rest, but for
    results of 30 later images if there is room for all of it."""
    read = config(tmp_path, [CROP, HALF], "run.memory_limit=100KB")
    assert memory_for_decoding(read, "train", 10) == ((100_000 - 5 * 3840) // 3, 0)
    assert memory_for_decoding(config(tmp_path, [CROP, HALF]), "train", 10) == (DECODE_BYTES, 30)
    enough = 5 * 3840 + 3 * DECODE_BYTES + 30 * 384
    for limit, later in ((enough, 30), (enough - 1, 0)):
        read = config(tmp_path, [CROP, HALF], f"run.memory_limit={limit}")
        assert memory_for_decoding(read, "train", 10) == (DECODE_BYTES, later)
    assert memory_for_decoding(config(tmp_path, [CROP, HALF]), "train", 1000) == (DECODE_BYTES, 384)
    views = {"large": {"stages": [CROP, HALF]}, "small": {"count": 6, "stages": [CROP]}}
    several = with_views(tmp_path, "run.memory_limit=100KB", **views)
    assert memory_for_decoding(several, "train", 10) == ((100_000 - 5 * 10 * (384 + 6 * 192)) // 3, 0)
    text = (
        r"x\.yaml: run\.memory_limit must be more than 19,200 bytes, got 19,200: 5 batches of 3,840 bytes exist "
        r"at a time in 'train'; raise it, or lower run\.prefetch or batch\.size"
    )
    with pytest.raises(ConfigError, match=text):
        memory_for_decoding(config(tmp_path, [CROP, HALF], "run.memory_limit=19200"), "train", 10)
