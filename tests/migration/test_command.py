"""`gpuflow import`: the files that it writes are valid, and what it cannot carry over is named."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import cv2
import numpy as np
import onnx
import pytest

import gpuflow.serve
from gpuflow.config import read_config
from gpuflow.stages import STAGES
from tests.commands import Run, command_here
from tests.images import jpeg, photo
from tests.migration.test_from_files import GUIDE, MODEL, TOML, serialised
from tests.migration.their_configs import VIT

THEIRS = "tests.migration.their_transforms"


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return command_here(monkeypatch, capsys, "import")


@pytest.mark.parametrize(
    ("sources", "pipelines"),
    [
        ([f"{THEIRS}:val"], {"val", "serve"}),
        ([f"torchvision:{THEIRS}:train"], {"train"}),
        ([f"{THEIRS}:train", f"{THEIRS}:val"], {"train", "val", "serve"}),
        (["torchvision:ResNet50_Weights.IMAGENET1K_V2"], {"val", "serve"}),
        (["hf:preprocessor_config.json"], {"val", "serve"}),
        (["timm:timm.json"], {"train", "val", "serve"}),
        (["albumentations:a.json"], {"val", "serve"}),
        (["torchpipe:old.toml"], {"train", "val", "serve"}),
        (["torchpipe:model.toml"], {"train", "val", "serve"}),
    ],
)
def test_what_is_written_is_valid(
    imported: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: list[str], pipelines: set[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    resize = {"name": "Resize", "height": 30, "width": 40, "interpolation": 1}
    for name, value in (
        ("preprocessor_config.json", json.dumps(VIT)),
        ("timm.json", json.dumps({"crop_pct": 0.95})),
        ("a.json", json.dumps(serialised(resize))),
        ("old.toml", TOML),
        ("model.toml", TOML + MODEL),
    ):
        (tmp_path / name).write_text(value)
    done = imported(*sources)
    assert (done.code, done.err) == (0, "")
    Path("x.yaml").write_text(done.out)
    config = read_config("x.yaml", STAGES)
    assert set(config.programs) == pipelines
    if "val" in pipelines:
        assert config.programs["val"].pipeline.fingerprint == config.programs["serve"].pipeline.fingerprint


def test_a_graph_of_torchpipe_is_served_by_onnxruntime(
    imported: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The overrides that the written file names in place of TensorRT serve what OpenCV and onnxruntime compute."""
    monkeypatch.chdir(tmp_path)
    Path("guide.toml").write_text(GUIDE)
    done = imported("torchpipe:guide.toml", "--out", "x.yaml")
    assert done.code == 0, done.err
    images = onnx.helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, ["n", 3, 224, 192])
    logits = onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["n", 3])
    steps = [("GlobalAveragePool", "images", "means"), ("Flatten", "means", "logits")]
    nodes = [onnx.helper.make_node(operator, [before], [after]) for operator, before, after in steps]
    opset = onnx.helper.make_opsetid("", 17)
    graph = onnx.helper.make_graph(nodes, "means", [images], [logits])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8), "resnet50.onnx")
    Path("photo.jpg").write_bytes(jpeg(photo(301, 402)))
    (words,) = re.findall(r"gpuflow serve FILE ([^\n]+)", Path("x.yaml").read_text())
    with gpuflow.serve.load("x.yaml", overrides=words.split()) as predict:
        found = predict("photo.jpg").numpy()
    levels = cv2.resize(np.asarray(cv2.imread("photo.jpg")), (192, 224)) / 255  # BGR, as `color` says
    expected = ((levels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]).mean((0, 1))
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_the_file_of_torchvisions_weights(imported: Run, tmp_path: Path) -> None:
    out = tmp_path / "made" / "x.yaml"
    done = imported("torchvision:ResNet50_Weights.IMAGENET1K_V2", "--out", out)
    assert (done.code, done.out, done.err) == (0, "", f"wrote {out}\n")
    text = out.read_text()
    assert "gpuflow parity FILE --against torchvision:ResNet50_Weights.IMAGENET1K_V2" in text
    assert text.partition("\n\n")[2] == (
        "source: {folder: data/photos, seed: 0}\n"
        "preprocess: &eval                        # shared by val and serve: cannot diverge\n"
        "  - decode: {color: rgb}\n"
        "  - resize: {shorter: 232}\n"
        "  - center_crop: {size: 224}\n"
        "  - normalize: {mean: imagenet, std: imagenet}\n"
        "pipelines:\n"
        "  val:\n"
        "    stages: *eval\n"
        "    batch: {size: 64}\n"
        "serve:\n"
        "  stages: *eval\n"
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [(f"{THEIRS}:two_warps", True), (f"{THEIRS}:one_warp", False), ("albumentations:a.json", True)],
)
def test_the_file_says_that_warps_in_a_row_run_as_one(
    imported: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: bool
) -> None:
    resize, rotate = {"name": "Resize", "height": 30, "width": 40}, {"name": "Rotate", "limit": [-9, 9]}
    (tmp_path / "a.json").write_text(json.dumps(serialised(resize, rotate, rotate)))
    monkeypatch.chdir(tmp_path)
    done = imported(source)
    assert done.code == 0
    text = " ".join(done.out.replace("\n#", "").split())
    assert ("Warps in a row, such as two of rotate, affine and perspective, run as one warp" in text) == said


def test_a_lambda_is_an_error_unless_the_rest_is_enough(imported: Run, tmp_path: Path) -> None:
    source, out = f"{THEIRS}:with_lambda", tmp_path / "x.yaml"
    done = imported(source, "--out", out)
    assert (done.code, out.exists()) == (1, False)
    assert "error: " in done.err and "Lambda(<lambda>) is Python code, which a file cannot hold" in done.err
    done = imported(source, "--out", out, "--partial")
    assert done.code == 0
    assert done.err.startswith("not carried over: ")
    text = out.read_text()
    assert "# Not carried over:\n# - " in text
    assert "Lambda(<lambda>) is Python code" in " ".join(text.replace("\n#", "").split())
    read_config(out, STAGES)


def test_what_check_refuses_is_an_error(imported: Run) -> None:
    done = imported(f"{THEIRS}:no_size")
    assert (done.code, done.out) == (1, "")
    place = f"error: torchvision:{THEIRS}:no_size, as YAML: pipelines.val.stages[1].normalize"
    assert f"{place} leaves images of varying size" in done.err


@pytest.mark.parametrize(
    ("sources", "text"),
    [
        (
            ["nothing_here:x"],
            "nothing_here:x: no module 'nothing_here' can be imported; run gpuflow in the directory of",
        ),
        ([f"{THEIRS}:vale"], f"{THEIRS}:vale: '{THEIRS}' has no attribute 'vale'; did you mean 'val'?"),
        (
            [f"{THEIRS}:number"],
            f"{THEIRS}:number: must be a transform that can be called with an image, got int; name an",
        ),
        (["train:"], "train:: must be module:attribute; name a transform at the top of a module"),
        (
            ["torchvision:ResNet50_Weights.IMAGENET1K_V3"],
            "ResNet50_Weights.IMAGENET1K_V3: names no weights of torchvision; did you mean 'ResNet50_Weights",
        ),
        (
            ["photos"],
            "photos: names no weights of torchvision; give module:attribute, or weights such as ResNet50",
        ),
        (
            [f"{THEIRS}:val", f"{THEIRS}:nested"],
            f"{THEIRS}:val {THEIRS}:nested: give the pipelines val, val; two sources must give train, which is rand",
        ),
    ],
)
def test_a_source_that_cannot_be_read(imported: Run, sources: list[str], text: str) -> None:
    done = imported(*sources)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"error: {text}")


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("failing_module", "1 / 0\n", "raises ZeroDivisionError: division by zero"),
        (
            "ending_module",
            "import sys\nsys.exit()\n",
            "ends the program; put what the program does under if __name__ == '__main__'\n",
        ),
    ],
)
def test_a_module_whose_code_fails(
    name: str, code: str, text: str, imported: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    done = imported(f"{name}:x")
    assert done.code == 1
    assert f"error: {name}:x: the code of module {name!r} {text}" in done.err


def test_a_file_whose_name_is_not_text(imported: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(os.fsdecode(b"caf\xe9.json")).write_text(json.dumps(VIT))
    done = imported(os.fsdecode(b"hf:caf\xe9.json"), "--out", "x.yaml")
    assert (done.code, done.err) == (0, "wrote x.yaml\n")
    assert "gpuflow import hf:caf\\udce9.json" in Path("x.yaml").read_text(encoding="utf-8")


def test_a_missing_file_is_named_with_one_of_a_similar_name(
    imported: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("timm_model.json", "other.yaml"):
        Path(name).write_text("{}")
    assert imported("timm:timm_modle.json").err == (
        "error: timm_modle.json: no such file; did you mean 'timm_model.json'?\n"
    )
    assert (
        imported("hf:preprocessor_config.json").err == "error: preprocessor_config.json: no such file; check the path\n"
    )
