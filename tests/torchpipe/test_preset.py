"""A preset (torchpipe's own operators as the first stage): in serving, in training, and every error of its keys."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

import gpuflow
from gpuflow.config import Config, read_config
from gpuflow.decode.preset import CANNOT_DECODE, Preset
from gpuflow.errors import BadSampleError, ConfigError
from gpuflow.execute.gpu.passes import passes_of
from gpuflow.loader.plan import explain_gpu
from gpuflow.pipeline.stage import ENCODED
from gpuflow.stages import STAGES
from gpuflow.tools.scan import scan
from tests.datasets import MemorySource, make_photos
from tests.hostile import BAD, HOSTILE
from tests.images import as_array, encode, photo
from tests.running import images, keys_of

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
def test_a_preset_is_the_first_stage_of_the_pipeline(name: str, device: str) -> None:
    program = read(f"preset: {name}\nheight: 20\nwidth: 30\nstages: [normalize: {{layout: nhwc}}]").programs["serve"]
    head = program.pipeline.stages[0]
    assert isinstance(head, Preset) and head.device == device
    assert head == program.decoder == Preset(name=name, height=20, width=30)  # type: ignore[arg-type]
    assert repr(program.pipeline) == f"serve: preset(name={name!r}, height=20, width=30) -> normalize(layout='nhwc')"
    assert str(program.result) == "float32 20x30x3 nhwc"


def test_its_parameters_change_the_fingerprint() -> None:
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


def test_parameters_of_its_operators() -> None:
    common = {"resize_h": "20", "resize_w": "30", "color": "bgr"}
    cpu = Preset(name="torchpipe_cpu", height=20, width=30, color="bgr")
    gpu = Preset(name="torchpipe_gpu", height=20, width=30, color="bgr")
    assert (cpu.operators, cpu.operator_parameters) == (
        "S[DecodeMat,ResizeMat,CvtColorMat,Mat2Tensor]",
        {**common, "device": "cpu"},
    )
    assert (gpu.operators, gpu.operator_parameters) == (
        "S[DecodeTensor,(or)S[DecodeMat,Mat2Tensor],ResizeTensor,CvtColorTensor,SyncTensor]",
        {**common, "device": "cuda"},
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
        ("preset: torchpipe_cpu\nheight: 8", "x.yaml:4: serve.preset needs the key 'width' next to it: an integer"),
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
            "x.yaml:7: serve.stages[0].normalize has 1 values of mean but gets 3 channel(s); give 3",
        ),
        (
            "preset: torchpipe_cpu\nheight: 8\nwidth: 8\ncolor: bgr\nstages: [normalize]",
            "x.yaml:8: serve.stages[0].normalize knows imagenet in the order rgb but gets bgr images; give the numbers",
        ),
    ],
)
def test_faults(serve: str, text: str) -> None:
    assert fault(serve) == text


# --- in a pipeline of the loader --------------------------------------------------------------------------------------


def read_train(preset: str, stages: str) -> Config:
    block = f"{{preset: {preset}, height: 20, width: 30, stages: {stages}}}"
    Path("x.yaml").write_text(f"source: {{folder: photos}}\npipelines: {{train: {block}}}\n")
    return read_config("x.yaml", STAGES)


def test_a_pipeline_of_the_loader_begins_with_a_preset() -> None:
    stages = "[random_crop: {size: 16}, color_jitter: {hue: 0.1}, flip: {vertical: 0.5}, normalize]"
    program = read_train("torchpipe_cpu", stages).programs["train"]
    assert program.decoder == Preset(name="torchpipe_cpu", height=20, width=30)
    assert str(program.result) == "float32 16x16x3 nchw"
    served = read("preset: torchpipe_cpu\nheight: 20\nwidth: 30\nstages: [normalize]").programs["serve"]
    assert read_train("torchpipe_cpu", "[normalize]").programs["train"].pipeline.lines == served.pipeline.lines


def test_after_the_gpus_operators_only_crops_flips_and_normalize_may_follow() -> None:
    stages = "[flip: {horizontal: 0.5}, random_crop: {size: 16}, normalize]"
    assert str(read_train("torchpipe_gpu", stages).programs["train"].result) == "float32 16x16x3 nchw"
    allowed = "flips, crops that do not pad, normalize and mixing stages"
    rule = f"cannot follow torchpipe_gpu, after which only {allowed} may come"
    refused = ("resize: {shorter: 9}", "center_crop: {size: 9}", "random_crop: {size: 9, padding: 1}", "color_jitter")
    for stage in refused:
        with pytest.raises(ConfigError) as caught:
            read_train("torchpipe_gpu", f"[flip, {stage}]")
        assert str(caught.value) == f"x.yaml:2: pipelines.train.stages[1] {rule}"


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (
            "{preset: torchpipe_cpu, height: 8, stages: []}",
            "x.yaml:2: pipelines.val.preset needs the key 'width' next to it: an integer",
        ),
        (
            "{height: 8, stages: [decode, center_crop: {size: 8}]}",
            "x.yaml:2: pipelines.val.height belongs to a preset, and there is none; remove it or add preset: "
            "torchpipe_cpu",
        ),
        ("{preset: torchpipe_cpu, height: 8, width: 8}", "x.yaml:2: pipelines.val needs the key 'stages': a list"),
        (
            "{preset: torchpipe_cpu, height: 8, width: 8, stages: [decode]}",
            "x.yaml:2: pipelines.val.stages[0].decode must be the first stage and stand once; remove this one",
        ),
    ],
)
def test_faults_in_a_pipeline(block: str, text: str) -> None:
    Path("x.yaml").write_text(f"source: {{folder: photos}}\npipelines: {{val: {block}}}\n")
    with pytest.raises(ConfigError) as caught:
        read_config("x.yaml", STAGES)
    assert str(caught.value) == text


# --- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("color", ["rgb", "bgr"])
def test_it_decodes_as_opencv_does(color: str) -> None:
    preset = Preset(name="torchpipe_cpu", height=20, width=30, color=color)  # type: ignore[arg-type]
    data = as_array(HOSTILE["jpeg EXIF 6"])
    decoded: Any = cv2.imdecode(data, cv2.IMREAD_COLOR)
    image: Any = cv2.resize(decoded, (30, 20))
    assert np.array_equal(preset.decode(data), image if color == "bgr" else image[..., ::-1])
    assert preset.library == f"OpenCV {cv2.__version__}, whole images, as torchpipe's DecodeMat and ResizeMat"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty: the file has no bytes"),
        (b"hello, world", CANNOT_DECODE),
        (HOSTILE["webp"], "WEBP is not supported: a preset decodes JPEG, PNG and BMP"),
        (encode(photo(9, 9), "AVIF"), "AVIF is not supported: a preset decodes JPEG, PNG and BMP"),
        (BAD["huge"][0], CANNOT_DECODE),
    ],
    ids=["empty", "text", "webp", "avif", "huge"],
)
def test_files_that_it_does_not_decode(data: bytes, reason: str) -> None:
    with pytest.raises(BadSampleError) as caught:
        Preset(name="torchpipe_cpu", height=20, width=30).decode(as_array(data))
    assert (caught.value.stage, caught.value.reason) == ("preset", reason)


def test_an_epoch_of_training(tmp_path: Path) -> None:
    """Random draws depend on the sample's position, and a bad file is replaced, as without a preset."""
    make_photos(tmp_path / "photos", classes=2, each=4)
    (tmp_path / "photos" / "class_0" / "001.jpg").write_bytes(b"no image")
    block = "{preset: torchpipe_cpu, height: 20, width: 30, stages: [flip: {horizontal: 0.5}, normalize], "
    block += "batch: {size: 4}, shuffle: true}"
    Path("x.yaml").write_text(f"source: {{folder: photos}}\npipelines: {{train: {block}}}\nrun: {{threads: 2}}\n")
    program = read_config("x.yaml", STAGES).programs["train"]
    files = sorted((tmp_path / "photos").rglob("*.jpg"))
    with gpuflow.load("x.yaml") as loader, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one of eight is bad
        batches = list(loader)
        assert loader.stats()["bad_distinct"] == 1
    for step, batch in enumerate(batches):
        keys = keys_of(4, first=4 * step)
        expected = images(program, [files[index].read_bytes() for index in batch.indices.tolist()], keys)
        assert torch.equal(batch.images, expected)


def test_a_gpus_preset_does_not_train_on_a_cpu(tmp_path: Path) -> None:
    make_photos(tmp_path / "photos", classes=1, each=1)
    read_train("torchpipe_gpu", "[normalize]")
    with pytest.raises(ConfigError) as caught:
        gpuflow.load("x.yaml")
    assert str(caught.value) == (
        "x.yaml: pipelines.train.preset is torchpipe_gpu, which needs a GPU, but the loader's device is the CPU; "
        "use device cuda, or torchpipe_cpu"
    )


def test_train_size_changes_the_stages_that_set_a_size() -> None:
    read_train("torchpipe_cpu", "[flip, random_crop: {size: 16}]")
    assert read_config("x.yaml", STAGES, ["train.size=12"]).programs["train"].result.shape == (12, 12, 3)


def test_explain_and_scan(tmp_path: Path) -> None:
    config = read_train("torchpipe_gpu", "[normalize]")
    assert explain_gpu(config, "train") == "torchpipe's DecodeTensor and ResizeTensor"
    config = read_train("torchpipe_cpu", "[normalize]")
    refusal = "preset(name='torchpipe_cpu', height=20, width=30) decodes by itself"
    assert passes_of(config.programs["train"]) == refusal
    source = MemorySource([HOSTILE["png"], HOSTILE["webp"], b"no image"])
    found = list(scan(source, config.programs["train"].decoder, threads=1))
    assert [(finding.index, finding.kind, finding.bad) for finding in found] == [
        (1, "unsupported", True),
        (2, "corrupt", True),
    ]


@pytest.mark.parametrize("name", ["torchpipe_cpu", "torchpipe_gpu"])
def test_an_animated_png_is_refused(name: Any) -> None:
    data = encode(photo(9, 8), "PNG", save_all=True, append_images=[Image.fromarray(photo(9, 8, seed=1))])
    with pytest.raises(BadSampleError) as caught:
        Preset(name=name, height=8, width=8).check(as_array(data))
    assert caught.value.reason == "an animation; gpuflow decodes still images"
    Preset(name=name, height=8, width=8).check(as_array(encode(photo(9, 8), "PNG")))


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ("background: [1, 2, 3]", "has a background, but torchpipe's operators in the preset before it ignore alpha"),
        ("formats: [png16]", "names formats, but torchpipe's operators in the preset before it decode"),
    ],
    ids=["background", "formats"],
)
@pytest.mark.parametrize("block", ["serve", "pipelines.val"])
def test_what_a_preset_cannot_do_is_a_located_error(block: str, given: str, rule: str, tmp_path: Path) -> None:
    keys = f"preset: torchpipe_cpu, height: 8, width: 8, stages: [decode: {{{given}}}]"
    text = "source: {folder: photos}\npipelines: {val: {" + (
        keys if block != "serve" else "stages: [decode, center_crop: {size: 8}]"
    )
    text += "}}\n" + (f"serve: {{{keys}}}\n" if block == "serve" else "")
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path / "x.yaml", STAGES, ())
    (problem,) = caught.value.problems
    assert ".".join(map(str, problem.path)).startswith(f"{block}.stages.0")
    assert problem.rule == f"{rule}; remove the preset"
