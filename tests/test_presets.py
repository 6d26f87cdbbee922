"""A preset in `serve`: torchpipe's own operators as the head of the pipeline, and every fault of its keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuflow.config import Config, read_config
from gpuflow.errors import ConfigError
from gpuflow.presets import Preset
from gpuflow.spec import ENCODED
from gpuflow.stages import STAGES

HEAD = "source: {folder: photos}\npipelines: {val: {stages: [decode, center_crop: {size: 8}]}}\nserve:\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(serve: str, *overrides: str) -> Config:
    Path("x.yaml").write_text(HEAD + "".join(f"  {line}\n" for line in serve.splitlines()))
    return read_config("x.yaml", STAGES, overrides)


def fault(serve: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(serve, *overrides)
    return str(caught.value)


@pytest.mark.parametrize(("name", "device"), [("torchpipe_cpu", "cpu"), ("torchpipe_gpu", "cuda")])
def test_a_preset_is_the_head_of_the_pipeline(name: str, device: str) -> None:
    program = read(f"preset: {name}\nheight: 20\nwidth: 30\nstages: [normalize: {{layout: nhwc}}]").programs["serve"]
    head = program.pipeline.stages[0]
    assert head == program.decoder == Preset(name=name, height=20, width=30)  # type: ignore[arg-type]
    assert isinstance(head, Preset) and head.device == device
    assert repr(program.pipeline) == f"serve: preset(name={name!r}, height=20, width=30) -> normalize(layout='nhwc')"
    assert str(program.result) == "float32 20x30x3 nhwc"


def test_its_parameters_count_in_the_fingerprint() -> None:
    serve = "preset: torchpipe_cpu\nheight: 20\nwidth: 30"
    other = ["serve.preset=torchpipe_gpu", "serve.height=21", "serve.width=31", "serve.color=bgr"]
    prints = {
        read(serve, *([change] if change else [])).programs["serve"].pipeline.fingerprint for change in ["", *other]
    }
    assert len(prints) == 5


def test_stages_and_model_may_be_left_out() -> None:
    config = read("preset: torchpipe_cpu\nheight: 20\nwidth: 30\ncolor: bgr")
    assert config.serve is not None and config.serve.model is None
    result = config.programs["serve"].result
    assert (str(result), result.color) == ("uint8 20x30x3 hwc", "bgr")


def test_what_its_operators_are_told() -> None:
    told = {"resize_h": "20", "resize_w": "30", "color": "bgr"}
    cpu = Preset(name="torchpipe_cpu", height=20, width=30, color="bgr")
    gpu = Preset(name="torchpipe_gpu", height=20, width=30, color="bgr")
    assert (cpu.operators(), cpu.parameters()) == (
        "S[DecodeMat,ResizeMat,CvtColorMat,Mat2Tensor]",
        {**told, "device": "cpu"},
    )
    assert (gpu.operators(), gpu.parameters()) == (
        "S[DecodeTensor,(or)S[DecodeMat,Mat2Tensor],ResizeTensor,CvtColorTensor,SyncTensor]",
        {**told, "device": "cuda"},
    )
    assert cpu.output(ENCODED).fixed and not cpu.random


@pytest.mark.parametrize(
    ("serve", "text"),
    [
        (
            "preset: torchpipe_gpo\nheight: 8\nwidth: 8",
            "x.yaml:4: serve.preset must be one of torchpipe_cpu, torchpipe_gpu, got 'torchpipe_gpo'; "
            "did you mean 'torchpipe_gpu'?",
        ),
        ("preset: torchpipe_cpu\nheight: 8", "x.yaml:4: serve.preset needs the key 'width' beside it: an integer"),
        ("preset: torchpipe_cpu\nheight: 0\nwidth: 8", "x.yaml:5: serve.height must be >= 1, got 0"),
        (
            "stages: [decode, center_crop: {size: 8}]\ncolor: bgr",
            "x.yaml:5: serve.color belongs to a preset, and there is none; remove it or add preset: torchpipe_cpu",
        ),
        (
            "preset: torchpipe_cpu\nheight: 8\nwidth: 8\nstages: [flip: {horizontal: 0.5}]",
            "x.yaml:7: serve.stages[0] cannot follow a preset, after which only stages such as normalize may come",
        ),
        (
            "preset: torchpipe_cpu\nheight: 8\nwidth: 8\nstages: [normalize: {mean: [0.5], std: [1.0]}]",
            "x.yaml:7: serve.stages[0].normalize has 1 values of mean but gets 3 channel(s)",
        ),
        (
            "preset: torchpipe_cpu\nheight: 8\nwidth: 8\ncolor: bgr\nstages: [normalize]",
            "x.yaml:8: serve.stages[0].normalize knows imagenet in the order rgb but gets bgr images; give the numbers",
        ),
    ],
)
def test_faults(serve: str, text: str) -> None:
    assert fault(serve) == text


def test_a_pipeline_of_the_loader_takes_no_preset() -> None:
    preset = "{preset: torchpipe_cpu, height: 8, width: 8, stages: []}"
    Path("x.yaml").write_text(f"source: {{folder: photos}}\npipelines: {{val: {preset}}}\n")
    with pytest.raises(ConfigError) as caught:
        read_config("x.yaml", STAGES)
    assert str(caught.value) == "\n".join(
        f"x.yaml:2: pipelines.val.{key} is not a key here; known: batch, on_error, shuffle, stages"
        for key in ("preset", "height", "width")
    )
