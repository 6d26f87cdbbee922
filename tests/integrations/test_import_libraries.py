"""`gpuflow import` and `gpuflow parity --against` with timm, transformers and Albumentations themselves."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from gpuflow.config import read_config
from gpuflow.migration import read_sources
from gpuflow.migration.from_huggingface import PROCESSORS, Processor
from gpuflow.parity import Report, study
from gpuflow.parity.report import verdict
from gpuflow.stages import STAGES
from tests.datasets import make_photos
from tests.migration.their_configs import VIT

IMAGES = 8
PILLOW = 2.01
"""Levels by which Pillow's bicubic resize of photographs may be apart from torchvision's of tensors; floats round."""


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("imported") / "photos"
    make_photos(root, classes=2, each=4)
    return root


def compared(source: str, photos: Path, folder: Path, *, partial: bool = False) -> Report:
    """Import a source, check the file, and compare its pipeline val with the library."""
    written = read_sources([source], STAGES, partial=partial)
    file = folder / "x.yaml"
    file.write_text(written.text)
    config = read_config(file, STAGES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries
        return study(config, count=IMAGES, data=photos, against=("val", source))


def own_levels(report: Report) -> float:
    """The largest difference on photographs, after all stages."""
    own = report.pairs[0].rows[-1].own
    assert own is not None
    return own.max


# --- timm -------------------------------------------------------------------------------------------------------------


def timm_cfg(**keys: Any) -> dict[str, Any]:
    return {"input_size": [3, 64, 64], "interpolation": "bilinear", "crop_pct": 0.875, "crop_mode": "center", **keys}


@pytest.mark.parametrize(
    "name", ["resnet50.a1_in1k", "vit_base_patch16_224.augreg_in21k_ft_in1k", "convnext_tiny.fb_in1k"]
)
def test_models_of_timm_by_name(name: str, photos: Path, tmp_path: Path) -> None:
    pytest.importorskip("timm", reason="needs timm")
    report = compared(f"timm:{name}", photos, tmp_path)
    assert not report.breach, verdict(report)
    assert own_levels(report) <= PILLOW


@pytest.mark.parametrize(
    "keys",
    [
        {"interpolation": "bicubic", "crop_pct": 1.0},
        {"crop_mode": "squash", "crop_pct": 0.9, "input_size": [3, 48, 64]},
        {"crop_mode": "border", "crop_pct": 1.0},
        {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
    ],
)
def test_configurations_of_timm_in_files(keys: dict[str, Any], photos: Path, tmp_path: Path) -> None:
    pytest.importorskip("timm", reason="needs timm")
    (tmp_path / "x.json").write_text(json.dumps(timm_cfg(**keys)))
    report = compared(f"timm:{tmp_path / 'x.json'}", photos, tmp_path)
    assert not report.breach, verdict(report)
    assert own_levels(report) <= PILLOW


def test_training_transforms_of_timm_have_the_same_stages() -> None:
    """create_transform's own Compose, read as any Compose, gives the stages that its configuration gives."""
    timm_data = pytest.importorskip("timm.data", reason="needs timm")
    from gpuflow.migration.from_timm import read_timm
    from gpuflow.migration.from_torchvision import read_transform

    made = timm_data.create_transform(
        input_size=(3, 224, 224), is_training=True, interpolation="bicubic", color_jitter=0.4, re_prob=0.25
    )
    found = read_transform(made, "user:train", STAGES)
    assert found.gaps == ()
    entries = [entry.as_yaml for entry in found.pipelines["train"]]
    erasing = entries.pop(-2)
    assert erasing["random_erasing"]["probability"] == 0.25
    assert erasing["random_erasing"]["value"] == "imagenet"
    assert entries == [entry.as_yaml for entry in read_timm("resnet50.a1_in1k").pipelines["train"]]


# --- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        VIT,
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": 64,
            "crop_size": 64,
            "resample": 3,
            "do_center_crop": True,
        },
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 65}, "crop_size": 60, "resample": 2},
        {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 64}, "crop_pct": 0.875},
        {"image_processor_type": "DeiTImageProcessor"},
        {"image_processor_type": "BeitImageProcessor", "do_reduce_labels": False},
        {"image_processor_type": "BeitImageProcessorFast", "size": 64, "crop_size": 60, "do_center_crop": True},
        {"image_processor_type": "MobileNetV2ImageProcessor"},
        {"image_processor_type": "SegformerImageProcessorFast", "size": {"height": 64, "width": 96}},
        {"image_processor_type": "RTDetrImageProcessor", "format": "coco_detection", "do_pad": False},
        {"image_processor_type": "RTDetrImageProcessor", "do_normalize": True, "size": {"height": 64, "width": 64}},
        {"image_processor_type": "DPTImageProcessor", "ensure_multiple_of": 32, "keep_aspect_ratio": False},
        {"image_processor_type": "LayoutLMv3ImageProcessor", "apply_ocr": False},
        {"image_processor_type": "CLIPImageProcessor", "do_convert_rgb": True},
        {"image_processor_type": "ViTImageProcessor", "size": {"height": 40, "width": 60}, "rescale_factor": 1 / 127.5},
    ],
)
def test_image_processors_of_transformers(keys: dict[str, Any], photos: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(keys))
    report = compared(f"hf:{tmp_path}", photos, tmp_path)
    assert not report.breach, verdict(report)
    assert own_levels(report) < 0.01, "the fast processor resizes the same tensors"
    fast, slow = report.pairs
    assert (fast.asked != "", slow.asked, slow.b) == (True, "", f"hf:{tmp_path}, slow")


def test_the_defaults_of_image_processors_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    for name, keys in PROCESSORS.items():
        theirs, ours = getattr(transformers, name), Processor(**keys)
        assert isinstance(ours.size, dict) and dict(theirs.size) == ours.size, name
        assert int(theirs.resample) == ours.resample, name
        assert (tuple(theirs.image_mean), tuple(theirs.image_std)) == (ours.image_mean, ours.image_std), name
        for key in ("do_center_crop", "default_to_square", "do_convert_rgb", "do_normalize"):
            assert bool(getattr(theirs, key, False)) == getattr(ours, key), name


# --- Albumentations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["shorter", "resize", "longer", "cubic"])
def test_pipelines_of_albumentations(case: str, photos: Path, tmp_path: Path) -> None:
    A = pytest.importorskip("albumentations", reason="needs albumentations")
    crop = A.CenterCrop(40, 40, pad_if_needed=False)
    made = {
        "shorter": [A.SmallestMaxSize(61), A.CenterCrop(50, 54)],
        "resize": [A.Resize(60, 80), crop],
        "longer": [A.LongestMaxSize(90), crop],
        "cubic": [A.Resize(60, 80, interpolation=2)],
    }[case]
    file = tmp_path / "x.json"
    A.save(A.Compose([*made, A.Normalize(), A.ToTensorV2()]), file)
    report = compared(f"albumentations:{file}", photos, tmp_path)
    assert own_levels(report) <= 1.01, verdict(report)


def test_albumentations_gray_arrays(photos: Path, tmp_path: Path) -> None:
    """Without ToTensorV2 its results are arrays, which have two axes if they are gray."""
    A = pytest.importorskip("albumentations", reason="needs albumentations")
    file = tmp_path / "x.json"
    A.save(A.Compose([A.Resize(60, 80), A.ToGray(1, p=1), A.Normalize(mean=0.5, std=0.5)]), file)
    report = compared(f"albumentations:{file}", photos, tmp_path)
    assert own_levels(report) <= 2.01, verdict(report)


def test_an_albumentations_pipeline_in_yaml(tmp_path: Path) -> None:
    A = pytest.importorskip("albumentations", reason="needs albumentations")
    made = [A.RandomResizedCrop((64, 64)), A.HorizontalFlip(p=0.5), A.ColorJitter(p=0.8), A.Normalize(), A.ToTensorV2()]
    A.save(A.Compose(made), tmp_path / "x.yaml", data_format="yaml")
    written = read_sources([f"albumentations:{tmp_path / 'x.yaml'}"], STAGES)
    assert written.problems == ()
    assert "random_resized_crop: {size: 64, scale: [0.08, 1], " in written.text


# --- torchvision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weights",
    ["ResNet50_Weights.IMAGENET1K_V2", "ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1", "Swin_T_Weights.IMAGENET1K_V1"],
)
def test_weights_of_torchvision(weights: str, photos: Path, tmp_path: Path) -> None:
    report = compared(f"torchvision:{weights}", photos, tmp_path)
    assert not report.breach, verdict(report)
    assert own_levels(report) <= PILLOW
