"""Law: what `gpuflow import --partial` writes, `gpuflow check` accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torchvision.transforms import v2

import tests.migration.test_notes as notes
from gpuflow.config import read_config
from gpuflow.errors import ConfigError
from gpuflow.migration import read_sources
from gpuflow.migration.from_albumentations import _LIKE
from gpuflow.stages import STAGES
from tests.migration.test_from_files import GUIDE, LONGEST, MODEL, PAD, TOML, serialised

FLOATS: dict[str, Any] = {"name": "Normalize", "mean": 0.5, "std": 0.5, "max_pixel_value": 255.0}
RESIZE: dict[str, Any] = {"name": "Resize", "height": 40, "width": 40, "interpolation": 3}
COLORS = {"brightness": [0.8, 1.2], "contrast": [1, 1], "saturation": [1, 1], "hue": [0, 0]}
HUGGINGFACE: dict[str, dict[str, Any]] = {
    "detr": {
        "image_processor_type": "DetrImageProcessor",
        "format": "coco_detection",
        "do_pad": True,
        "size": {"shortest_edge": 800, "longest_edge": 1333},
    },
    "yolos": {"feature_extractor_type": "YolosFeatureExtractor", "size": 512, "max_size": 864, "do_pad": True},
    "shortest": {"image_processor_type": "ViltImageProcessor", "size": {"shortest_edge": 384}, "size_divisor": 32},
    "longest": {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 1536}, "do_pad": True},
    "box": {"image_processor_type": "FlavaImageProcessor", "size": {"max_height": 300, "max_width": 400}},
    "pad size": {"image_processor_type": "RTDetrImageProcessor", "do_pad": True, "pad_size": {"height": 9, "width": 9}},
    "levit": {"image_processor_type": "LevitImageProcessor", "size": {"shortest_edge": 224}, "do_center_crop": True},
    "depth": {"image_processor_type": "DPTImageProcessor", "size": 518, "keep_aspect_ratio": True, "do_pad": True},
    "lanczos": {"image_processor_type": "SiglipImageProcessor", "resample": 1, "some_key": 3},
}
ALBUMENTATIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "letterbox": (LONGEST, PAD, FLOATS),
    "longest": (LONGEST, FLOATS),
    "shortest": ({"name": "SmallestMaxSize", "max_size": [50, 60]}, FLOATS),
    "pads more": (LONGEST, PAD | {"min_width": 80}, FLOATS),
    "pads to multiples": (RESIZE, PAD | {"min_height": None, "min_width": None, "pad_height_divisor": 32}),
    "floats first": (FLOATS, RESIZE, {"name": "ColorJitter", "p": 0.5, **COLORS}),
    "unknown": (RESIZE, {"name": "GridDistortion"}, {"name": "CLAHE", "p": 0.5}, FLOATS),
    "drawn": (RESIZE, {"name": "OneOf", "p": 0.5, "transforms": []}, FLOATS),
}
TORCHPIPE = {"older": TOML, "model": TOML + MODEL, "guide": GUIDE, "engine": GUIDE.replace("50.onnx", "50.trt")}


def check(source: str, folder: Path) -> None:
    """Import a source with --partial, and read what was written."""
    written = read_sources([source], STAGES, partial=True)
    (folder / "x.yaml").write_text(written.text)
    read_config(folder / "x.yaml", STAGES)
    assert all(str(problem) for problem in written.problems)


@pytest.mark.parametrize("name", HUGGINGFACE)
def test_image_processors(name: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(HUGGINGFACE[name]))
    check(f"hf:{tmp_path / 'x.json'}", tmp_path)


@pytest.mark.parametrize("name", ALBUMENTATIONS)
def test_pipelines_of_albumentations(name: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(serialised(*ALBUMENTATIONS[name])))
    check(f"albumentations:{tmp_path / 'x.json'}", tmp_path)


@pytest.mark.parametrize("name", _LIKE)
@pytest.mark.parametrize("keys", [{}, {"p": 1.0, "blur_limit": [3, 8], "limit": [-9, 9], "rotate": [-9, 9]}])
def test_the_nearest_stage_that_a_gap_names_is_written(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(serialised(RESIZE, {"name": name, **keys}, FLOATS)))
    source = f"albumentations:{tmp_path / 'x.json'}"
    check(source, tmp_path)
    written = read_sources([source], STAGES, partial=True)
    (problem,) = [each for each in written.problems if f"is {name}, which" in each.rule]
    stage = problem.action.removeprefix("nearest: ").partition(",")[0]
    assert f"- {stage}: {{" in written.text


@pytest.mark.parametrize("name", TORCHPIPE)
def test_graphs_of_torchpipe(name: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(TORCHPIPE[name])
    check(f"torchpipe:{tmp_path / 'x.toml'}", tmp_path)


held: Any = v2.Identity()
"""What the test of torchvision's transforms imports."""


@pytest.mark.parametrize("name", notes.NOTING)
@pytest.mark.parametrize("container", notes.CONTAINERS)
def test_transforms_of_torchvision(container: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = notes.CONTAINERS[container](notes.NOTING[name])
    transforms = v2.Compose([v2.Resize((64, 64)), inner, v2.CenterCrop(40), v2.ToImage()])
    monkeypatch.setattr(f"{__name__}.held", transforms)
    check(f"{__name__}:held", tmp_path)


def test_a_file_without_a_size_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"image_processor_type": "ViTImageProcessor", "do_resize": False}))
    with pytest.raises(ConfigError, match="leaves images of varying size"):
        read_sources([f"hf:{tmp_path / 'x.json'}"], STAGES, partial=True)


def test_a_size_for_batches_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(HUGGINGFACE["detr"]))
    written = read_sources([f"hf:{tmp_path / 'x.json'}"], STAGES, partial=True)
    assert "- resize: {shorter: 800, max_size: 1333}\n  - center_crop: {size: 1333}\n" in written.text
    assert any("center_crop: {size: 1333}, which centres smaller" in str(problem) for problem in written.problems)
