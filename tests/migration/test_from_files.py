"""Configurations of timm, transformers, Albumentations and torchpipe in files: entries, gaps and located errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpuflow.config.stage_entries import make_stage
from gpuflow.errors import ConfigError
from gpuflow.migration import Imported, read_source, read_sources
from gpuflow.migration.imported import MissingLibrary
from gpuflow.stages import STAGES, Resize
from tests.migration.their_configs import VIT
from tests.texts import outline

HALF = {"normalize": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}}
IMAGENET = {"normalize": {"mean": "imagenet", "std": "imagenet"}}
ZERO_TO_ONE = {"normalize": {"mean": [0] * 3, "std": [1] * 3}}
CONVNEXT = {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 224}}
TOML = """
batching_timeout = 1
instance_num = 1

[jpg_decoder]
backend = "SyncTensor[ Sequential[DecodeTensor,ResizeTensor,cvtColorTensor] ]"
resize_h = 232
resize_w = 240
color = "rgb"
next = "cpu_decoder"
instance_num = 6

[cpu_decoder]
backend = "Sequential[DecodeMat,ResizeMat,cvtColorMat,Mat2Tensor,SyncTensor]"
filter = "or"
resize_h = 232
resize_w = 240
color = "rgb"
instance_num = 8
"""
MODEL = """
[resnet18]
backend = "SyncTensor[TensorrtTensor]"
max = "4x3x224x224"
model = "./resnet18.onnx"
mean = "123.675, 116.28, 103.53"
std = "58.395, 57.120, 57.375"
instance_num = 2
"""


def read(tmp_path: Path, source: str, value: Any, name: str = "x.json") -> Imported:
    text = value if isinstance(value, str) else json.dumps(value, indent=2)
    (tmp_path / name).write_text(text)
    return read_source(f"{source}:{tmp_path / name}", STAGES)


def test_a_switch_of_transformers_that_is_null_is_off(tmp_path: Path) -> None:
    clip = {"image_processor_type": "CLIPImageProcessor", "do_resize": None, "do_center_crop": None}
    names = [name for entry in val_of(read(tmp_path, "hf", clip)) for name in entry]
    assert names == ["normalize"]
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "hf", {**clip, "image_mean": None})
    assert str(caught.value) == (
        f"{tmp_path}/x.json:5: image_mean must not be null; write a value, or leave the key out"
    )


def test_json_that_is_indented_by_tabs(tmp_path: Path) -> None:
    vit = {"image_processor_type": "ViTImageProcessor", "do_resize": False}
    spaces = val_of(read(tmp_path, "hf", vit))
    assert val_of(read(tmp_path, "hf", json.dumps(vit, indent="\t"))) == spaces
    with pytest.raises(ConfigError, match="is not valid YAML"):
        read(tmp_path, "hf", "{\t" + json.dumps(vit))


def test_albumentations_gray_of_two_channels_or_for_some_images_is_noted(tmp_path: Path) -> None:
    for channels, p in ((2, 1), (1, 0.5)):
        gray = {"__class_fullname__": "ToGray", "p": p, "num_output_channels": channels}
        found = read(tmp_path, "albumentations", {"transform": gray})
        assert len(found.gaps) == 1 and f"is {channels}" in str(found.gaps[0])


def val_of(found: Imported) -> list[dict[str, Any]]:
    return [entry.as_yaml for entry in found.pipelines["val"] if entry.stage != "decode"]


def texts(found: Imported, tmp_path: Path) -> list[str]:
    return [str(problem).replace(f"{tmp_path}/", "") for problem in found.gaps]


# --- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [{"resize": {"height": 224, "width": 224}}, HALF]),
        ({"size": 384, "resample": 3}, [{"resize": {"height": 384, "width": 384, "interpolation": "bicubic"}}, HALF]),
        ({"do_resize": False}, [HALF]),
        ({"do_normalize": False, "do_resize": False}, [{"normalize": {"mean": [0, 0, 0], "std": [1, 1, 1]}}]),
        ({"do_resize": False, "rescale_factor": 1 / 127.5}, [{"normalize": {"mean": [0.25] * 3, "std": [0.25] * 3}}]),
        (
            {"image_processor_type": "CLIPImageProcessorFast", "size": 224, "crop_size": 200, "do_center_crop": True},
            [{"resize": {"shorter": 224}}, {"center_crop": {"size": 200, "rounding": "down"}}, HALF],
        ),
        (
            {"image_processor_type": None, "feature_extractor_type": "ConvNextFeatureExtractor", "size": 224},
            [{"resize": {"shorter": 256}}, {"center_crop": {"size": 224, "rounding": "down"}}, HALF],
        ),
        (
            {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 384}},
            [{"resize": {"height": 384, "width": 384}}, HALF],
        ),
    ],
)
def test_image_processors(tmp_path: Path, keys: dict[str, Any], expected: list[Any]) -> None:
    found = read(tmp_path, "hf", {**VIT, **keys})
    assert texts(found, tmp_path) == []
    assert val_of(found) == expected


def test_a_folder_and_which_processor_is_matched(tmp_path: Path) -> None:
    found = read(tmp_path, "hf", VIT, "preprocessor_config.json")
    assert val_of(read_source(f"hf:{tmp_path}", STAGES)) == val_of(found)
    (matches,) = found.matches
    assert matches.startswith("Matches the fast image processor")
    assert "The slow one (use_fast=False, backend='pil') resizes by Pillow" in matches


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"do_resizee": True},
            "x.json:22: do_resizee is not a key of an image processor that gpuflow knows, got true; "
            "did you mean 'do_resize'? it is left out with --partial",
        ),
        (
            {"do_sharpen": True},
            "x.json:22: do_sharpen is not a key of an image processor that gpuflow knows, got true; ",
        ),
        (
            {"do_pad": True},
            "x.json:22: do_pad pads at the bottom and right, to pad_size or the batch's largest image; ",
        ),
        (
            {"resample": 1},
            "x.json:16: resample is lanczos, which the stage resize does not have; the fast processor takes bicubic",
        ),
        (
            {"use_square_size": True},
            "x.json:22: use_square_size makes images square, of the side that the class has without 'size'; ",
        ),
        (
            {"image_processor_type": "LevitImageProcessor"},
            "x.json:10: image_processor_type is LevitImageProcessor, which may do more than resize, crop and normalize",
        ),
    ],
)
def test_what_an_image_processor_has_and_no_stage_equals(tmp_path: Path, keys: dict[str, Any], text: str) -> None:
    (found,) = texts(read(tmp_path, "hf", {**VIT, **keys}), tmp_path)
    assert found.startswith(text)


@pytest.mark.parametrize(
    ("most", "keys"),
    [
        (1333, {"shorter": 800, "max_size": 1333}),
        (800, {"longer": 800}),
        (600, {"longer": 600}),
    ],
)
def test_a_size_that_limits_both_sides(tmp_path: Path, most: int, keys: dict[str, Any]) -> None:
    size = {"shortest_edge": 800, "longest_edge": most}
    found = read(tmp_path, "hf", {**VIT, "size": size})
    assert val_of(found) == [{"resize": keys}, HALF]
    (text,) = texts(found, tmp_path)
    assert text == (
        "x.json:18: size limits both sides, and rounds the shorter one to the nearest number where the longer one is "
        f"too long; nearest: resize: {{{', '.join(f'{key}: {value}' for key, value in keys.items())}}} "
        "(of what is resized, sides are at most one pixel apart)"
    )
    height, width = np.random.default_rng(0).integers(20, 3000, (2, 20_000))
    theirs = sizes_of_transformers(height, width, 800, most)
    ours = np.stack(Resize(**keys)._size(height, width))
    resized = (theirs != np.stack([height, width])).any(axis=0)
    apart = np.abs(ours - theirs)[:, resized]
    assert apart.max() == 1 and resized.mean() > 0.99
    short = np.maximum(height, width) / np.minimum(height, width) * 800 <= most
    assert np.array_equal(ours[:, short], theirs[:, short])


def sizes_of_transformers(height: Any, width: Any, shorter: int, most: int) -> Any:
    """What transformers' get_size_with_aspect_ratio gives for images of these sizes: [2, N]."""
    low, high = np.minimum(height, width), np.maximum(height, width)
    limited = high / low * shorter > most
    exact = np.where(limited, most * low / high, shorter)
    side = np.rint(exact).astype(int)
    other = (exact * high / low).astype(int)
    sizes = np.where(height <= width, [side, other], [other, side])
    return np.where(low == side, [height, width], sizes)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("[1]", "x.json: config.type, got [1]"),
        (
            {**VIT, "size": {"shortest_edge": 800, "longest_edge": "x"}},
            "x.json:20: size.longest_edge import.source, got 'x'",
        ),
        ({key: value for key, value in VIT.items() if key != "image_processor_type"}, "x.json: import.source"),
        ({**VIT, "resample": 9}, "x.json:16: resample import.source, got 9"),
        ({**VIT, "resample": 0.0}, "x.json:16: resample import.source, got 0.0"),
        ({**VIT, "image_mean": [0.5]}, "x.json:5: image_mean import.source, got [0.5]"),
        ({**VIT, "size": {"width": 3}}, "x.json:18: size import.source, got {'width': 3}"),
        ({**VIT, "rescale_factor": 0}, "x.json:17: rescale_factor import.source, got 0"),
        ({**VIT, "rescale_factor": "x"}, "x.json:17: rescale_factor import.source, got 'x'"),
        ({**VIT, **CONVNEXT, "crop_pct": "x"}, "x.json:21: crop_pct import.source, got 'x'"),
        ({**VIT, **CONVNEXT, "crop_pct": 0}, "x.json:21: crop_pct import.source, got 0"),
        (
            {**VIT, **CONVNEXT, "size": {"shortest_edge": "224"}},
            "x.json:18: size import.source, got {'shortest_edge': '224'}",
        ),
    ],
)
def test_a_file_that_is_no_image_processor(tmp_path: Path, value: Any, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, "hf", value)
    assert outline(error.value).replace(f"{tmp_path}/", "") == text


# --- timm -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"interpolation": "bilinear", "crop_pct": 0.95},
            [{"resize": {"shorter": 235}}, {"center_crop": {"size": 224}}, IMAGENET],
        ),
        (
            {"input_size": [3, 288, 288], "crop_pct": 1.0, "mean": [0.5] * 3, "std": [0.5] * 3},
            [{"resize": {"shorter": 288, "interpolation": "bicubic"}}, {"center_crop": {"size": 288}}, HALF],
        ),
        (
            {"input_size": [3, 96, 128], "crop_mode": "squash", "crop_pct": 0.8, "interpolation": "bilinear"},
            [{"resize": {"height": 120, "width": 160}}, {"center_crop": {"size": [96, 128]}}, IMAGENET],
        ),
        (
            {"crop_mode": "border", "crop_pct": 1, "interpolation": "bilinear"},
            [{"letterbox": {"size": 224, "fill": [124, 116, 104]}}, IMAGENET],
        ),
    ],
)
def test_data_configurations_of_timm(tmp_path: Path, keys: dict[str, Any], expected: list[Any]) -> None:
    found = read(tmp_path, "timm", {"architecture": "x", "pretrained_cfg": {"url": "", **keys}})
    assert texts(found, tmp_path) == []
    assert val_of(found) == expected
    assert [entry.stage for entry in found.pipelines["train"]][1:4] == ["random_resized_crop", "flip", "color_jitter"]


def test_what_timm_has_and_no_stage_equals(tmp_path: Path) -> None:
    keys = {"interpolation": "lanczos", "crop_pct": 0.9, "input_size": [3, 96, 128], "crop_cpt": 1}
    unknown, lanczos, box = texts(read(tmp_path, "timm", keys), tmp_path)
    assert unknown.startswith(
        "x.json:9: crop_cpt is not a key of timm's pretrained_cfg that gpuflow knows, got 1; did you"
    )
    assert "interpolation is 'lanczos', which the stage resize does not have; nearest: " in lanczos
    assert "crop_mode 'center' with an input of 96x128 fits the image around a box; nearest: resize" in box


def test_one_mean_is_that_of_each_channel(tmp_path: Path) -> None:
    assert val_of(read(tmp_path, "timm", {"mean": [0.5], "std": [0.5]}))[-1] == HALF


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ([3], "x.json:2: input_size must be three integers: channels, height, width, got [3]"),
        ([3, 0, 224], "x.json:4: input_size[1] must be >= 1, got 0"),
        ([3, 224.5, 224], "x.json:4: input_size[1] must be an integer, got 224.5"),
    ],
)
def test_a_size_that_timm_does_not_take(tmp_path: Path, size: list[float], expected: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(expected)):
        read(tmp_path, "timm", {"input_size": size})


def test_values_that_timm_does_not_take(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'x\.json:2: crop_pct must be a number, got "?\'?x'):
        read(tmp_path, "timm", {"crop_pct": "x"})
    with pytest.raises(
        ConfigError, match=r"x\.json: must hold timm's data_config or pretrained_cfg: none of input_size"
    ):
        read(tmp_path, "timm", {"a": 1})


ARGUMENTS = """
aa: {aa}
reprob: 0.25
remode: {remode}
recount: 2
train_interpolation: {interpolation}
train_crop_mode: rkrr
color_jitter: 0.3
color_jitter_prob: null
vflip: 0.1
mixup: 0.2
cutmix: 1.0
img_size: 160
mean: [0.5]
std: [0.5, 0.5, 0.5]
interpolation: bilinear
lr: 0.1
"""


def test_arguments_of_timms_train_script(tmp_path: Path) -> None:
    text = ARGUMENTS.format(aa="rand-m7-n3-mstd0.5-inc1-mmax12", remode="rand", interpolation="bilinear")
    found = read(tmp_path, "timm", text, "args.yaml")
    assert texts(found, tmp_path) == []
    assert [entry.as_yaml for entry in found.pipelines["train"]] == [
        {"decode": {"color": "rgb"}},
        {"cover_resize": {"size": 160}},
        {"random_crop": {"size": 160, "pad_if_needed": True, "border": "reflect"}},
        {"flip": {"horizontal": 0.5, "vertical": 0.1}},
        {
            "rand_augment": {
                "space": "timm_increasing",
                "operations": 3,
                "magnitude": 7,
                "probability": 0.5,
                "limit": 12,
                "noise": 0.5,
                "interpolation": "bilinear",
                "fill": [128, 128, 128],
            }
        },
        HALF,
        {"noise_erasing": {"probability": 0.25, **BOX, "noise": "box", "count": 2}},
        {
            "mixup": {
                "alpha": 0.2,
                "cutmix_alpha": 1.0,
                "switch_probability": 0.5,
                "probability": 1.0,
                "mode": "batch",
                "label_smoothing": 0.1,
            }
        },
    ]
    assert val_of(found) == [{"resize": {"shorter": 182}}, {"center_crop": {"size": 160}}, HALF]


ROUNDS = {"operations": 2, "magnitude": 10, "probability": 0.5}
BOX = {"scale": [0.02, 1 / 3], "ratio": [0.3, 1 / 0.3]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("aa: original-mstd0.5", {"policy": "original", "noise": 0.5}),
        ("aa: v0r", {"policy": "v0r"}),
        ("aa: rand", {"space": "timm", "operations": 2, "magnitude": 10, "probability": 0.5}),
        (
            "aa: rand-inc1-tweights-p0.3",
            {"space": "timm_weights", "operations": 2, "magnitude": 10, "probability": 0.3},
        ),
        ("aa: rand-m9-mstd101", {"space": "timm", **ROUNDS, "magnitude": 9, "noise": "uniform"}),
    ],
)
def test_policies_of_timm(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    found = read(tmp_path, "timm", f"{text}\ntrain_interpolation: bilinear\ncolor_jitter: 0.4", "args.yaml")
    assert texts(found, tmp_path) == []
    (policy, normalize) = found.pipelines["train"][3:]
    assert make_stage(policy.as_yaml, STAGES).random
    assert normalize.stage == "normalize"
    assert policy.parameters == {**expected, "interpolation": "bilinear", "fill": [124, 116, 104]}


def test_three_augment_keeps_the_colour_jitter_and_any_filter(tmp_path: Path) -> None:
    found = read(tmp_path, "timm", "aa: 3a\ntrain_interpolation: bicubic\nreprob: 0.1\nremode: const", "args.yaml")
    assert texts(found, tmp_path) == []
    names = [entry.stage for entry in found.pipelines["train"]]
    assert names[1:] == ["random_resized_crop", "flip", "auto_augment", "color_jitter", "random_erasing", "normalize"]


def test_training_without_augmentations(tmp_path: Path) -> None:
    found = read(tmp_path, "timm", "no_aug: true\naa: rand-m9\ninput_size: [3, 96, 128]", "args.yaml")
    assert [entry.as_yaml for entry in found.pipelines["train"]][1:] == [
        {"resize": {"height": 96, "width": 128, "interpolation": "bicubic"}},
        IMAGENET,
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("aa: augmix-m5-w4-d2", "args.yaml:1: aa blends several augmented copies of an image"),
        (
            "aa: rand-m9",
            "args.yaml:1: aa warps with interpolation 'bicubic', and warps here are bilinear, got 'rand-m9'",
        ),
        ("aa: ''\naug_repeats: 3.0", "args.yaml:2: aug_repeats has no stage, got 3.0; nearest: leave it out"),
        ("cutmix_minmax: [0.2, 0.8]", "args.yaml:1: cutmix_minmax has no stage, got [0.2, 0.8]"),
        ("reprob: 0.2\nresplit: true", "args.yaml:2: resplit must be false, got true"),
        (
            "aa: ''\nhflipp: 0.5",
            "args.yaml:2: hflipp is not a key of timm's train.py that gpuflow knows, got 0.5; did you mean 'hflip'?",
        ),
        ("aa: ''\nre_prob: 0.9", "args.yaml:2: re_prob is not a key of timm's train.py that gpuflow knows, got 0.9;"),
        ("lr: 0.1\nclip_mode: norm\nauto_augment: ''", "args.yaml:3: auto_augment is not a key of timm's train.py"),
    ],
)
def test_arguments_that_no_stage_equals(tmp_path: Path, text: str, expected: str) -> None:
    (found,) = texts(read(tmp_path, "timm", f"{text}\ntrain_interpolation: bicubic", "args.yaml"), tmp_path)
    assert found.startswith(expected)


def test_batch_size_and_seed_are_taken_over_and_the_rest_is_named(tmp_path: Path) -> None:
    path = tmp_path / "args.yaml"
    data = "input_size: [3, 96, 96]\ninterpolation: bilinear\nmean: [0.5]\nstd: [0.5]\ntrain_interpolation: bilinear\n"
    path.write_text(f"{data}model: resnet18\nbatch_size: 24\nseed: 7\nlr: 0.1\nopt: lamb\nresume: ''\nepochs: 3\n")
    text = read_sources([f"timm:{path}"], STAGES).text
    assert "# Not taken over: model, lr, opt, epochs.\n" in text
    assert "seed: 7}\n" in text
    assert "batch: {size: 24, drop_last: true}\n" in text
    assert "batch: {size: 24}\n" in text


def test_a_random_filter_is_named(tmp_path: Path) -> None:
    (found,) = texts(read(tmp_path, "timm", "hflip: 0.5", "args.yaml"), tmp_path)
    assert found.startswith("args.yaml: train_interpolation must be one of bilinear, bicubic, got 'random'; nearest: ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("aa: 9", "args.yaml:1: aa must be text, got 9"),
        ("aa: a\nreprob: high", "args.yaml:2: reprob must be a number, got 'high'"),
        ("recount: 1.5", "args.yaml:1: recount must be an integer, got 1.5"),
        ("scale: 0.5", "args.yaml:1: scale must be a list, each a number, got 0.5"),
        ("no_aug: 1", "args.yaml:1: no_aug must be true or false, got 1"),
        ("aa: a\nimg_size: 0.5", "args.yaml:2: img_size must be an integer, got 0.5"),
        ("aa: a\nmean: 0.5", "args.yaml:2: mean must be a list, each a number, got 0.5"),
        ("aa: a\nmean: [0.5, 1]", "args.yaml:2: mean must be one number for each channel, got [0.5, 1]"),
        ("lr: 0.1", "args.yaml: must hold arguments of timm's train.py, as its args.yaml does: none is there"),
    ],
)
def test_arguments_that_timm_does_not_take(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "timm", text, "args.yaml")
    assert str(caught.value).replace(f"{tmp_path}/", "") == expected


# --- Albumentations ---------------------------------------------------------------------------------------------------


def serialised(*transforms: dict[str, Any]) -> dict[str, Any]:
    named = [{"__class_fullname__": one.pop("name"), "p": 1.0, **one} for one in map(dict, transforms)]
    return {"__version__": "2.0.8", "transform": {"__class_fullname__": "Compose", "p": 1.0, "transforms": named}}


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (
            {"name": "Resize", "height": 3, "width": 4, "interpolation": 1},
            {"resize": {"height": 3, "width": 4, "antialias": False}},
        ),
        (
            {"name": "SmallestMaxSize", "max_size": 9, "interpolation": 2},
            {"resize": {"shorter": 9, "interpolation": "bicubic", "antialias": False, "rounding": "nearest"}},
        ),
        ({"name": "CenterCrop", "height": 9, "width": 9}, {"center_crop": {"size": 9, "rounding": "down"}}),
        ({"name": "RandomCrop", "height": 9, "width": 8}, {"random_crop": {"size": [9, 8]}}),
        ({"name": "HorizontalFlip", "p": 0.5}, {"flip": {"horizontal": 0.5}}),
        ({"name": "HorizontalFlip", "p": 0.5, "always_apply": False}, {"flip": {"horizontal": 0.5}}),
        ({"name": "HorizontalFlip", "p": 0.5, "always_apply": True}, {"flip": {"horizontal": 1.0}}),
        ({"name": "albumentations.ToGray", "p": 0.1}, {"grayscale": {"probability": 0.1}}),
        ({"name": "ToGray", "p": 1, "num_output_channels": 1}, {"torchvision": {"name": "Grayscale"}}),
        ({"name": "Normalize", "mean": 0.5, "std": 0.5, "max_pixel_value": 255.0}, HALF),
        (
            {
                "name": "Normalize",
                "mean": [0.485, 0.456, 0.406],
                "std": [0.229, 0.224, 0.225],
                "max_pixel_value": 255.0,
            },
            IMAGENET,
        ),
        ({"name": "Rotate", "limit": [-9, 9], "border_mode": 4}, {"rotate": {"degrees": 9, "border": "reflect"}}),
        ({"name": "Rotate", "limit": [-9, 9], "border_mode": 2}, {"rotate": {"degrees": 9, "border": "symmetric"}}),
        (
            {
                "name": "ColorJitter",
                "p": 0.5,
                "brightness": [0.8, 1.2],
                "contrast": [1, 1],
                "saturation": [1, 1],
                "hue": [0, 0],
            },
            {
                "color_jitter": {
                    "brightness": [0.8, 1.2],
                    "contrast": [1, 1],
                    "saturation": [1, 1],
                    "hue": [0, 0],
                    "probability": 0.5,
                }
            },
        ),
    ],
)
def test_serialised_transforms_of_albumentations(tmp_path: Path, transform: dict[str, Any], expected: Any) -> None:
    found = read(tmp_path, "albumentations", serialised(transform))
    assert texts(found, tmp_path) == []
    ((_, entry),) = found.pipelines.values()
    assert entry.as_yaml == expected


@pytest.mark.parametrize(
    ("transform", "text"),
    [
        (
            {"name": "OneOf", "transforms": []},
            "x.json:7: transform.transforms[0] is OneOf, which has no equal stage; nearest: the first of its tr",
        ),
        (
            {"name": "HorizontalFlip", "strength": 3},
            "x.json:10: transform.transforms[0].strength is not a key of HorizontalFlip that gpuflow knows, got 3; "
            "it is left out with --partial",
        ),
        (
            {"name": "Resize", "p": 0.5, "height": 3, "width": 3},
            "x.json:9: transform.transforms[0].p is 0.5, but the stage resize has no probability; nearest: resize",
        ),
        (
            {"name": "Normalize", "p": 0.5, "mean": [0.5] * 3, "std": [0.5] * 3, "max_pixel_value": 255.0},
            "x.json:9: transform.transforms[0].p is 0.5, but the stage normalize has no probability; nearest: normal",
        ),
        (
            {"name": "ToFloat", "p": 0.5, "max_value": 255.0},
            "x.json:9: transform.transforms[0].p is 0.5, but the stage normalize has no probability; nearest: normal",
        ),
        (
            {"name": "Resize", "height": 3, "width": 3, "interpolation": 3},
            "x.json:12: transform.transforms[0].interpolation is OpenCV's number 3, a filter that the stage resize "
            "does not have; nearest: resize: {interpolation: bilinear, antialias: true}",
        ),
        (
            {"name": "Resize", "height": 3, "width": 3, "interpolation": 0},
            "x.json:12: transform.transforms[0].interpolation takes OpenCV's nearest pixels, of two that are equally "
            "near often the other one; nearest: resize: {interpolation: nearest, antialias: false}",
        ),
        (
            {"name": "LongestMaxSize", "max_size": None, "max_size_hw": [9, None]},
            "x.json:11: transform.transforms[0].max_size_hw limits height and width separately; nearest: "
            "resize: {longer: 9}",
        ),
        (
            {"name": "SmallestMaxSize", "max_size": [8, 9]},
            "x.json:10: transform.transforms[0].max_size draws one of several sizes; nearest: resize: {shorter: 9}",
        ),
    ],
)
def test_what_albumentations_has_and_no_stage_equals(tmp_path: Path, transform: dict[str, Any], text: str) -> None:
    (found,) = texts(read(tmp_path, "albumentations", serialised(transform)), tmp_path)
    assert found.startswith(text)


UNIT: dict[str, Any] = {
    "name": "Normalize",
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "max_pixel_value": 1.0,
}
FLIP = {"name": "HorizontalFlip", "p": 0.5}
FLIPPED = {"flip": {"horizontal": 0.5}}


@pytest.mark.parametrize(
    ("transforms", "expected"),
    [
        (({"name": "ToFloat", "max_value": 255.0}, UNIT), [IMAGENET]),
        (({"name": "ToFloat", "max_value": None}, UNIT, {"name": "ToTensorV2"}), [IMAGENET]),
        (({"name": "ToFloat", "max_value": 255.0}, FLIP, UNIT), [FLIPPED, IMAGENET]),
        (({**UNIT, "max_pixel_value": 255.0}, FLIP), [FLIPPED, IMAGENET]),
        (({"name": "ToFloat", "max_value": None}, {"name": "ToFloat", "max_value": None}), [ZERO_TO_ONE]),
        (({"name": "ToFloat", "max_value": 51.0},), [{"normalize": {"mean": [0] * 3, "std": [0.2] * 3}}]),
        (
            ({"name": "Normalize", "mean": 0.5, "std": 0.25, "max_pixel_value": 255.0}, {**UNIT, "mean": 2, "std": 3}),
            [{"normalize": {"mean": [1] * 3, "std": [0.75] * 3}}],
        ),
        (
            ({"name": "ToGray", "num_output_channels": 1}, {"name": "ToFloat", "max_value": 255.0}),
            [{"torchvision": {"name": "Grayscale"}}, {"normalize": {"mean": [0], "std": [1]}}],
        ),
        (
            (
                {"name": "ToFloat", "max_value": 255.0},
                {"name": "ToGray", "num_output_channels": 1},
                {**UNIT, "mean": 0.5, "std": 0.5},
            ),
            [HALF, {"torchvision": {"name": "Grayscale"}}],
        ),
    ],
)
def test_all_that_scales_is_one_normalize(tmp_path: Path, transforms: tuple[Any, ...], expected: Any) -> None:
    found = read(tmp_path, "albumentations", serialised(*transforms))
    assert texts(found, tmp_path) == []
    ((_, *entries),) = found.pipelines.values()
    assert [entry.as_yaml for entry in entries] == expected


def test_one_normalize_gives_the_floats_of_two(tmp_path: Path) -> None:
    levels = np.arange(256, dtype=np.float32)
    found = read(tmp_path, "albumentations", serialised({"name": "ToFloat", "max_value": 200.0}, UNIT))
    ((_, entry),) = found.pipelines.values()
    image = torch.arange(256, dtype=torch.uint8).expand(3, 1, 256)
    ours = make_stage(entry.as_yaml, STAGES).torchvision()(image)
    for channel, mean, std in zip(ours, UNIT["mean"], UNIT["std"], strict=True):
        np.testing.assert_allclose(channel[0], (levels / 200 - mean) / std, atol=1e-6)


@pytest.mark.parametrize(
    ("fixed", "pipeline"),
    [
        ({"brightness": [1.2, 1.2]}, "val"),
        ({"hue": [0.1, 0.1]}, "val"),
        ({"brightness": [1.2, 1.2], "hue": [0.1, 0.1]}, "train"),
        ({"brightness": [1.2, 1.2], "hue": [0.1, 0.1], "p": 0.0}, "val"),
    ],
)
def test_adjustments_by_fixed_factors_in_random_order_are_random(
    tmp_path: Path, fixed: dict[str, Any], pipeline: str
) -> None:
    keys = {"brightness": [1, 1], "contrast": [1, 1], "saturation": [1, 1], "hue": [0, 0]}
    found = read(tmp_path, "albumentations", serialised({"name": "ColorJitter", **keys, **fixed}))
    ((name, (_, entry)),) = found.pipelines.items()
    assert name == pipeline
    assert make_stage(entry.as_yaml, STAGES).random == (pipeline == "train")


@pytest.mark.parametrize(("border", "said"), [(0, True), (1, False)])
def test_the_notes_say_how_a_rotated_border_is_blended(tmp_path: Path, border: int, said: bool) -> None:
    found = read(tmp_path, "albumentations", serialised({"name": "Rotate", "limit": [-9, 9], "border_mode": border}))
    assert any("blended with the fill as torchvision does it" in note for note in found.matches) == said


@pytest.mark.parametrize(("hue", "said"), [(0.1, True), (0, False)])
def test_the_notes_say_how_far_hues_are_apart(tmp_path: Path, hue: float, said: bool) -> None:
    keys = {"brightness": [1, 1], "contrast": [1, 1], "saturation": [1, 1], "hue": [-hue, hue]}
    found = read(tmp_path, "albumentations", serialised({"name": "ColorJitter", **keys}))
    assert any("turns hues in steps of two degrees" in note for note in found.matches) == said


@pytest.mark.parametrize(
    ("compose", "flip", "said"),
    [
        ({"bbox_params": {"format": "coco", "min_visibility": 0.3}, "keypoint_params": None}, {}, True),
        ({"bbox_params": None, "keypoint_params": {"format": "xy"}}, {}, True),
        ({"bbox_params": None, "keypoint_params": None}, {"fill_mask": 255}, True),
        ({"bbox_params": None, "keypoint_params": None}, {"fill_mask": 0}, False),
    ],
)
def test_targets_of_albumentations_are_not_carried_over(
    tmp_path: Path, compose: dict[str, Any], flip: dict[str, Any], said: bool
) -> None:
    value = serialised({"name": "HorizontalFlip", "p": 0.5, **flip})
    value["transform"] |= compose
    found = read(tmp_path, "albumentations", value)
    assert texts(found, tmp_path) == []
    assert any("(bbox_params, keypoint_params, fill_mask) is not carried over" in x for x in found.matches) == said


def test_a_file_that_is_not_serialised_albumentations(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x\.json: must hold what Albumentations' A\.to_dict gives"):
        read(tmp_path, "albumentations", {"transform": []})
    with pytest.raises(ConfigError, match=r"x\.json:7: transform\.transforms\[0\] is Resize without 'height'"):
        read(tmp_path, "albumentations", serialised({"name": "Resize"}))


@pytest.mark.parametrize(
    ("transforms", "text"),
    [
        ([5], "x.json:7: transform.transforms[0] import.source, got 5"),
        ([None], "x.json:7: transform.transforms[0] import.source, got null"),
        ([{}], "x.json:7: transform.transforms[0] import.source, got {}"),
        (None, "x.json:6: transform.transforms import.source, got null"),
        ({"a": 1}, "x.json:6: transform.transforms import.source, got {'a': 1}"),
    ],
)
def test_a_list_that_holds_no_transforms(tmp_path: Path, transforms: Any, text: str) -> None:
    document = serialised()
    document["transform"]["transforms"] = transforms
    with pytest.raises(ConfigError) as error:
        read(tmp_path, "albumentations", document)
    assert outline(error.value).replace(f"{tmp_path}/", "") == text


# --- torchpipe --------------------------------------------------------------------------------------------------------


def test_the_toml_of_the_older_integration(tmp_path: Path) -> None:
    found = read(tmp_path, "torchpipe", TOML, "gpu_decode_train.toml")
    assert texts(found, tmp_path) == []
    preset = found.preset
    assert preset is not None
    assert (preset.preset, preset.height, preset.width, preset.color) == ("torchpipe_gpu", 232, 240, "rgb")
    assert found.pipelines == {"train": [], "val": []}
    assert "decoded by DecodeMat, as in the file's fallback" in found.matches[1]
    assert "names no mean and std: add normalize" in found.matches[2]


def test_a_toml_with_a_model(tmp_path: Path) -> None:
    found = read(tmp_path, "torchpipe", TOML + MODEL, "x.toml")
    assert val_of(found) == [IMAGENET]
    assert found.model == {
        "file": "./resnet18.onnx",
        "batch": 4,
        "instances": 2,
        "timeout_ms": 1.0,
        "preprocessing": "trust",
    }


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (
            "resize_h = 232\nresize_w = 240\ncolor",
            "resize_h = 9\nresize_w = 240\ncolor",
            "x.toml: [cpu_decoder] resizes to an",
        ),
        (
            "ResizeTensor",
            "PPLResizeTensor",
            "x.toml: [jpg_decoder] PPLResizeTensor is an operator that gpuflow has not; n",
        ),
        (
            "instance_num = 6",
            "instances = 6",
            "x.toml: [jpg_decoder] instances is not a key of torchpipe that gpuflow know",
        ),
    ],
)
def test_what_a_toml_has_and_no_preset_equals(tmp_path: Path, before: str, after: str, text: str) -> None:
    (found,) = texts(read(tmp_path, "torchpipe", TOML.replace(before, after, 1), "x.toml"), tmp_path)
    assert found.startswith(text)


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        ("[a]\nbackend = 'TensorrtTensor'", "x.toml: import.source"),
        ("[a]\nbackend = 'DecodeMat'\nnext = 'b'\n[b]\nresize_h = 8", "x.toml: [a] import.source"),
        (
            "[a]\nbackend = 'DecodeMat'\nnext = 'b'\n[b]\nresize_h = 'all'",
            "x.toml: [b] resize_h import.source, got 'all'",
        ),
        (
            TOML + MODEL.replace('"123.675, 116.28, 103.53"', "[123, 116, 103]"),
            "x.toml: [resnet18] mean import.source, got [123, 116, 103]",
        ),
        (
            TOML + MODEL.replace("instance_num = 2", 'instance_num = "two"'),
            "x.toml: [resnet18] instance_num import.source, got 'two'",
        ),
    ],
)
def test_a_toml_that_cannot_be_read(tmp_path: Path, toml: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, "torchpipe", toml, "x.toml")
    assert outline(error.value).replace(f"{tmp_path}/", "") == text


def test_a_text_that_is_no_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x\.toml: .*TOML"):
        read(tmp_path, "torchpipe", "a = [", "x.toml")


@pytest.mark.parametrize(
    ("source", "suffix"), [("hf", "json"), ("timm", "json"), ("albumentations", "json"), ("torchpipe", "toml")]
)
def test_a_file_that_does_not_exist(tmp_path: Path, source: str, suffix: str) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_source(f"{source}:{tmp_path}/none.{suffix}", STAGES)


def test_a_library_that_is_not_installed_is_named() -> None:
    try:
        import timm  # noqa: F401
    except ImportError:
        with pytest.raises(
            MissingLibrary, match=r"timm:resnet50: needs timm, which cannot be imported .*pip install timm"
        ):
            read_source("timm:resnet50", STAGES)


GUIDE = """
batching_timeout = 5
precision = "fp16"

[decoder]
backend = "DecodeMat"
next = "resizer"

[resizer]
backend = "SyncTensor[Sequential[ResizeMat,cvtColorMat,Mat2Tensor]]"
resize_h = 224
resize_w = 192
color = "bgr"
next = "net"

[net]
backend = "Torch[TensorrtTensor]"
min = 2
max = 4
instance_num = 3
model = "resnet50.onnx"
mean = "123.675, 116.28, 103.53"
std = "58.395, 57.120, 57.375"
"model::cache" = "engines/resnet50.trt"
"""


def test_nodes_that_next_joins_are_one_chain(tmp_path: Path) -> None:
    found = read(tmp_path, "torchpipe", GUIDE, "x.toml")
    assert texts(found, tmp_path) == []
    assert found.preset is not None
    assert (found.preset.height, found.preset.width, found.preset.color) == (224, 192, "bgr")
    assert val_of(found) == [{"normalize": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}}]
    assert found.model == {
        "file": "resnet50.onnx",
        "batch": 4,
        "instances": 3,
        "timeout_ms": 5.0,
        "engine": "tensorrt",
        "precision": "float16",
        "tensorrt": {"min_batch": 2, "cache": "engines"},
        "preprocessing": "trust",
    }
    assert any("model::cache = engines/resnet50.trt is the file of one engine" in note for note in found.matches)


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ('"resizer"', '"resiser"', "x.toml: [decoder] next import.source"),
        ('"resizer"', '"cpu_posprocess"', "x.toml: [decoder] next import.source"),
        ('"net"', '"decoder"', "x.toml: [resizer] next import.source"),
        ('"net"', '"net,nett"', "x.toml: [resizer] next import.source"),
    ],
)
def test_a_next_that_leads_nowhere(tmp_path: Path, before: str, after: str, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(tmp_path, "torchpipe", GUIDE.replace(before, after), "x.toml")
    assert outline(error.value).replace(f"{tmp_path}/", "") == text


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (
            '"fp16"',
            '"int8"',
            "x.toml: [net] precision is int8, which gpuflow builds no engine of; nearest: precision: ",
        ),
        ("min = 2", "min = 8", "x.toml: [net] min is 8, but max is 4; nearest: batches from 1 on"),
        ("resnet50.onnx", "resnet50.trt", "x.toml: [net] model resnet50.trt is no ONNX file, of which gpuflow builds"),
        (
            '"net"',
            '"net, decoder2"\n[decoder2]\nbackend = "ResizeMat"',
            "x.toml: [resizer] next leads to several nodes",
        ),
    ],
)
def test_what_a_chain_has_and_no_key_equals(tmp_path: Path, before: str, after: str, text: str) -> None:
    (found,) = texts(read(tmp_path, "torchpipe", GUIDE.replace(before, after), "x.toml"), tmp_path)
    assert found.startswith(text)


@pytest.mark.parametrize("name", ["timm", "hf", "albumentations", "torchpipe"])
def test_a_file_that_is_far_too_large_is_refused_before_it_is_read(tmp_path: Path, name: str) -> None:
    file = tmp_path / ("x.toml" if name == "torchpipe" else "x.json")
    with file.open("wb") as sparse:
        sparse.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"must be a file of at most 1,048,576 bytes, got 1099511627776"):
        read_source(f"{name}:{file}", STAGES)


@pytest.mark.parametrize("side", [10**9, 10**30])
def test_a_size_of_timm_that_no_image_has(tmp_path: Path, side: int) -> None:
    with pytest.raises(ConfigError, match=rf"x\.json:4: input_size\[1\] must be <= 65,535, got {side}"):
        read(tmp_path, "timm", {"input_size": [3, side, side], "interpolation": "lanczos"})


LONGEST = {"name": "LongestMaxSize", "max_size": 64, "interpolation": 1}
PAD = {"name": "PadIfNeeded", "min_height": 64, "min_width": 64, "border_mode": 0, "fill": [114.0, 114.0, 114.0]}


@pytest.mark.parametrize(
    ("longest", "pad", "expected", "gaps"),
    [
        ({}, {}, {"letterbox": {"size": 64, "fill": [114] * 3, "antialias": False}}, []),
        (
            {},
            {"position": "top_left"},
            {"letterbox": {"size": 64, "fill": [114] * 3, "antialias": False}},
            ["position"],
        ),
        ({}, {"border_mode": 4}, {"letterbox": {"size": 64, "fill": [114] * 3, "antialias": False}}, ["border_mode"]),
        (
            {"max_size": None, "max_size_hw": [48, 64], "interpolation": 2},
            {"min_height": 48, "fill": 0},
            {"letterbox": {"size": [48, 64], "fill": 0, "interpolation": "bicubic", "antialias": False}},
            [],
        ),
    ],
)
def test_the_longer_side_and_a_padding_are_letterbox(
    tmp_path: Path, longest: dict[str, Any], pad: dict[str, Any], expected: dict[str, Any], gaps: list[str]
) -> None:
    found = read(tmp_path, "albumentations", serialised(LONGEST | longest, PAD | pad))
    assert val_of(found) == [expected]
    assert [problem.path[-1] for problem in found.gaps] == gaps


def test_a_padding_to_another_box_is_no_letterbox(tmp_path: Path) -> None:
    found = read(tmp_path, "albumentations", serialised(LONGEST, PAD | {"min_width": 80}))
    assert [name for entry in val_of(found) for name in entry] == ["resize", "letterbox"]
    (text,) = texts(found, tmp_path)
    assert "is PadIfNeeded, which has no equal stage; nearest: letterbox, which resizes too" in text
