"""torchvision's transforms, v1 and v2, to stages: a table, the order around Normalize, and what no stage equals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

from gpuflow.migration.from_torchvision import read_transform
from gpuflow.migration.imported import Imported
from gpuflow.stages import STAGES
from tests.migration import their_transforms as theirs

ZERO_TO_ONE = {"normalize": {"mean": [0, 0, 0], "std": [1, 1, 1]}}
IMAGENET = {"normalize": {"mean": "imagenet", "std": "imagenet"}}


def read(*transforms: Any) -> Imported:
    return read_transform(v2.Compose(list(transforms)), "user:transform", STAGES)


def stages_of(found: Imported) -> list[dict[str, Any]]:
    (entries,) = found.pipelines.values()
    decode, *rest = [entry.as_yaml for entry in entries]
    assert decode == {"decode": {"color": "rgb"}}
    return rest


def texts(found: Imported) -> list[str]:
    return [str(problem) for problem in found.gaps]


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (v1.Resize(256), {"resize": {"shorter": 256}}),
        (v2.Resize([256]), {"resize": {"shorter": 256}}),
        (v1.Resize((30, 40)), {"resize": {"height": 30, "width": 40}}),
        (v2.Resize(None, max_size=300), {"resize": {"longer": 300}}),
        (v2.Resize(256, max_size=300), {"resize": {"shorter": 256, "max_size": 300}}),
        (v1.Resize([256], max_size=300), {"resize": {"shorter": 256, "max_size": 300}}),
        (v2.Resize(20, InterpolationMode.BICUBIC), {"resize": {"shorter": 20, "interpolation": "bicubic"}}),
        (v1.CenterCrop(224), {"center_crop": {"size": 224}}),
        (v2.CenterCrop((20, 30)), {"center_crop": {"size": [20, 30]}}),
        (v1.RandomCrop(32, padding=4), {"random_crop": {"size": 32, "padding": 4}}),
        (
            v2.RandomCrop(32, pad_if_needed=True),
            {"random_crop": {"size": 32, "pad_if_needed": True}},
        ),
        (v2.RandomCrop(32, padding=0, fill=7), {"random_crop": {"size": 32}}),
        (v2.RandomCrop(32, padding=(1, 2), fill=7), {"random_crop": {"size": 32, "padding": [1, 2, 1, 2], "fill": 7}}),
        (
            v1.RandomCrop(32, padding=(1, 2, 3, 4), padding_mode="reflect"),
            {"random_crop": {"size": 32, "padding": [1, 2, 3, 4], "border": "reflect"}},
        ),
        (v1.RandomCrop(32, padding=(1, 2)), {"random_crop": {"size": 32, "padding": [1, 2]}}),
        (
            v2.RandomCrop(32, padding=(1, 2, 3, 4), padding_mode="symmetric"),
            {"random_crop": {"size": 32, "padding": [1, 2, 3, 4], "border": "symmetric"}},
        ),
        (v1.RandomResizedCrop(224), {"random_resized_crop": {"size": 224}}),
        (v2.RandomResizedCrop(9, (0.3, 1)), {"random_resized_crop": {"size": 9, "scale": [0.3, 1]}}),
        (v1.RandomHorizontalFlip(), {"flip": {"horizontal": 0.5}}),
        (v2.RandomVerticalFlip(0.25), {"flip": {"vertical": 0.25}}),
        (v1.RandomRotation(10), {"rotate": {"degrees": 10, "interpolation": "nearest"}}),
        (v2.RandomRotation((5, 9), InterpolationMode.BILINEAR, fill=7), {"rotate": {"degrees": [5, 9], "fill": 7}}),
        (
            v2.RandomRotation(30, expand=True),
            {"rotate": {"degrees": 30, "expand": True, "interpolation": "nearest"}},
        ),
        (
            v1.RandomRotation(30, center=(0, 9.5)),
            {"rotate": {"degrees": 30, "center": [0, 9.5], "interpolation": "nearest"}},
        ),
        (
            v2.RandomAffine(3, center=(8, 9), interpolation=InterpolationMode.BILINEAR),
            {"affine": {"degrees": 3, "center": [8, 9]}},
        ),
        (
            v1.RandomAffine(8, translate=(0.1, 0.2), scale=(0.5, 2), shear=3),
            {
                "affine": {
                    "degrees": 8,
                    "translate": [0.1, 0.2],
                    "scale": [0.5, 2],
                    "shear": 3,
                    "interpolation": "nearest",
                }
            },
        ),
        (v1.RandomPerspective(0.3, 0.7), {"perspective": {"distortion_scale": 0.3, "probability": 0.7}}),
        (v1.Pad((1, 2)), {"pad": {"padding": [1, 2]}}),
        (v2.Pad(3, fill=9), {"pad": {"padding": 3, "fill": 9}}),
        (v2.Pad(3, padding_mode="symmetric"), {"pad": {"padding": 3, "border": "symmetric"}}),
        (
            v1.ColorJitter(0.4, 0, (0.5, 2), 0.1),
            {"color_jitter": {"brightness": 0.4, "saturation": [0.5, 2], "hue": 0.1}},
        ),
        (v1.Grayscale(3), {"grayscale": {}}),
        (v2.Grayscale(1), {"torchvision": {"name": "Grayscale"}}),
        (v1.RandomGrayscale(0.2), {"grayscale": {"probability": 0.2}}),
        (v1.GaussianBlur(5, (0.1, 2)), {"gaussian_blur": {"kernel_size": 5, "sigma": [0.1, 2]}}),
        (v2.GaussianBlur((3, 7)), {"gaussian_blur": {"kernel_size": [3, 7], "sigma": [0.1, 2]}}),
        (v2.RandomErasing(0.3), {"random_erasing": {"probability": 0.3}}),
        (
            v1.RandAugment(3, 7),
            {"rand_augment": {"operations": 3, "magnitude": 7, "bins": 31, "interpolation": "nearest"}},
        ),
        (v2.TrivialAugmentWide(), {"trivial_augment": {"bins": 31, "interpolation": "nearest"}}),
        (v1.AutoAugment(), {"auto_augment": {"interpolation": "nearest"}}),
        (
            v1.TrivialAugmentWide(interpolation=InterpolationMode.BILINEAR),
            {"trivial_augment": {"bins": 31, "interpolation": "bilinear"}},
        ),
        (v2.AutoAugment(interpolation=InterpolationMode.BILINEAR), {"auto_augment": {"interpolation": "bilinear"}}),
        (
            v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10),
            None,
        ),
        (v1.RandomPosterize(3, 0.4), {"posterize": {"bits": 3, "probability": 0.4}}),
        (v2.RandomSolarize(99, 0.4), {"solarize": {"threshold": 99, "probability": 0.4}}),
        (v1.RandomAdjustSharpness(2), {"sharpness": {"amount": [2, 2], "probability": 0.5}}),
        (v1.RandomAutocontrast(), {"autocontrast": {"probability": 0.5}}),
        (v1.RandomEqualize(), {"equalize": {"probability": 0.5}}),
        (v2.RandomInvert(), {"invert": {"probability": 0.5}}),
        (
            v2.RandomApply([v2.GaussianBlur(3)], p=0.5),
            {"gaussian_blur": {"kernel_size": 3, "sigma": [0.1, 2], "probability": 0.5}},
        ),
        (v2.ElasticTransform(40.0), {"torchvision": {"name": "ElasticTransform", "alpha": [40, 40], "sigma": [5, 5]}}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, dict) else "",
)
def test_each_transform(transform: Any, expected: dict[str, Any] | None) -> None:
    found = read(transform)
    assert len(texts(found)) == (expected is None)
    assert stages_of(found) == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (v2.Pad(2, fill=1.0), {"pad": {"padding": 2, "fill": 255}}),
        (v2.Pad(2, fill=0.5), {"pad": {"padding": 2, "fill": 128}}),
        (v2.Pad(2, fill=[0.485, 0.456, 0.406]), {"pad": {"padding": 2, "fill": [124, 116, 104]}}),
        (v2.RandomRotation(10, fill=1.0), {"rotate": {"degrees": 10, "interpolation": "nearest", "fill": 255}}),
        (v2.RandomAffine(10, fill=0.2), {"affine": {"degrees": 10, "interpolation": "nearest", "fill": 51}}),
        (
            v2.RandomPerspective(fill=1.0),
            {"perspective": {"distortion_scale": 0.5, "probability": 0.5, "fill": 255}},
        ),
        (
            v2.RandAugment(fill=0.5),
            {"rand_augment": {"operations": 2, "magnitude": 9, "bins": 31, "interpolation": "nearest", "fill": 128}},
        ),
        (v2.RandomSolarize(0.5), {"solarize": {"threshold": 127.5, "probability": 0.5}}),
        (v2.RandomSolarize(128 / 255), {"solarize": {"threshold": 128, "probability": 0.5}}),
        (v2.RandomPosterize(3), {"posterize": {"bits": 3, "probability": 0.5}}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, dict) else "",
)
def test_numbers_behind_a_conversion_to_floats_become_levels(transform: Any, expected: dict[str, Any]) -> None:
    found = read(*theirs.SCALED, transform)
    assert (texts(found), stages_of(found)) == ([], [expected, ZERO_TO_ONE])


@pytest.mark.parametrize(
    ("transform", "parameters"),
    [
        (v2.Pad(2, fill=2.0), {"padding": 2, "fill": 2}),
        (v2.Resize((8, 9), InterpolationMode.BICUBIC), {"size": [8, 9], "interpolation": "bicubic"}),
        (v2.RandomErasing(value=0.5), {"value": [0.5]}),
        (v2.RandomErasing(value="random"), {"value": "random"}),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, dict) else "",
)
def test_what_floats_can_be_and_levels_cannot_runs_by_name(transform: Any, parameters: dict[str, Any]) -> None:
    found = read(*theirs.SCALED, transform)
    assert texts(found) == []
    assert stages_of(found) == [ZERO_TO_ONE, {"torchvision": {"name": type(transform).__name__, **parameters}}]


def test_a_centre_of_a_rotation_that_expands_runs_by_name() -> None:
    """torchvision moves the image out of the frame then."""
    found = read(v2.RandomRotation(30, expand=True, center=(8, 9)))
    (stage,) = stages_of(found)
    assert (texts(found), stage["torchvision"]["name"]) == ([], "RandomRotation")
    assert (stage["torchvision"]["expand"], stage["torchvision"]["center"]) == (True, [8, 9])


def test_channels_of_another_mode_of_pillow() -> None:
    assert texts(read(v2.PILToTensor(), v2.ToPILImage(mode="RGB"))) == []
    (text,) = texts(read(v2.PILToTensor(), v2.ToPILImage(mode="YCbCr")))
    assert "ToPILImage takes the channels for YCbCr" in text


def test_a_fill_that_is_no_level_runs_by_name() -> None:
    assert stages_of(read(v2.PILToTensor(), v2.Pad(2, fill=0.5))) == [
        {"torchvision": {"name": "Pad", "padding": 2, "fill": 0.5}}
    ]


def test_to_tensor_of_v2_leaves_a_tensor_as_it_is() -> None:
    """That of torchvision.transforms refuses tensors."""
    with pytest.warns(UserWarning, match="deprecated"):
        to_tensor = v2.ToTensor()
    assert stages_of(read(v2.ToImage(), to_tensor, v2.Pad(2, fill=9))) == [{"pad": {"padding": 2, "fill": 9}}]
    assert stages_of(read(to_tensor)) == [ZERO_TO_ONE]


def test_floats_that_become_levels_again() -> None:
    """Numbers behind the second conversion are levels, and a type that is there already needs no conversion."""
    to_levels = v2.ToDtype(torch.uint8, scale=True)
    assert stages_of(read(*theirs.SCALED, to_levels, v2.Pad(2, fill=9))) == [{"pad": {"padding": 2, "fill": 9}}]
    found = read(*theirs.SCALED, v2.GaussianNoise(), to_levels, v2.JPEG((90, 90)), *theirs.SCALED)
    assert texts(found) == []
    assert [stage["torchvision"]["name"] for stage in stages_of(found)[1:]] == [
        "GaussianNoise",
        "ToDtype",
        "JPEG",
        "ToDtype",
    ]


@pytest.mark.parametrize("conversion", [v2.ToDtype, v2.ConvertImageDtype])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_a_conversion_of_pil_images_does_nothing(conversion: Any, dtype: torch.dtype) -> None:
    transform = conversion(dtype, scale=True) if conversion is v2.ToDtype else conversion(dtype)
    picture = Image.new("RGB", (5, 4), (9, 80, 200))
    assert transform(picture) is picture
    flip = v2.RandomHorizontalFlip(1.0)
    for transforms in ((transform, flip), (transform, v2.ToImage(), flip)):
        found = read(*transforms)
        assert texts(found) == []
        assert stages_of(found) == [{"flip": {"horizontal": 1}}]
        assert f"{conversion.__name__} has no stage: it gets PIL images" in " ".join(found.matches)
    found = read(v2.ToImage(), transform)
    assert stages_of(found) == ([ZERO_TO_ONE] if dtype == torch.float32 else [])
    assert "has no stage" not in " ".join(found.matches)


def test_normalize_of_pil_images_that_no_conversion_made_floats() -> None:
    """torchvision refuses it, too."""
    (text,) = texts(read(v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)))
    assert "Normalize cannot run as a stage" in text


def test_gray_images_that_get_three_channels_again() -> None:
    assert stages_of(read(v2.RGB(), v2.Grayscale(1), v2.RGB())) == [
        {"torchvision": {"name": "Grayscale"}},
        {"torchvision": {"name": "RGB"}},
    ]


def test_the_notes_say_where_results_are_not_to_the_level() -> None:
    floats, pillow, hue = (
        "keeps fractions of a level between transforms that get floats",
        "which Pillow warps: within 1 level",
        "whose hue Pillow shifts with 8 bits",
    )
    rotate = v2.RandomRotation((10, 10))
    for transforms, notes in (
        ((v2.PILToTensor(), rotate), set()),
        ((rotate,), {pillow}),
        ((v2.RandomRotation((10, 10), fill=0.5),), {pillow}),  # which runs by its name
        ((*theirs.SCALED, rotate), {floats}),
        ((v2.PILToTensor(), v2.ColorJitter(hue=0.1)), set()),
        ((v2.ColorJitter(saturation=0.1),), set()),
        ((v2.RandomApply([v2.ColorJitter(hue=0.1)], p=0.5), rotate), {hue, pillow}),
        ((*theirs.SCALED, v2.CenterCrop(9)), set()),
    ):
        text = " ".join(read(*transforms).matches)
        assert {note for note in (floats, pillow, hue) if note in text} == notes


def test_a_training_pipeline_of_v1() -> None:
    found = read_transform(theirs.train, "user:train", STAGES)
    assert list(found.pipelines) == ["train"]
    assert stages_of(found) == [
        {"random_resized_crop": {"size": 48}},
        {"flip": {"horizontal": 0.5}},
        {"color_jitter": {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1, "probability": 0.8}},
        {"random_erasing": {"probability": 0.25, "value": "imagenet"}},
        IMAGENET,
    ]


def test_pillows_nearest_is_like_no_stage() -> None:
    found = read_transform(v1.Resize(20, v1.InterpolationMode.NEAREST), "user:transform", STAGES)
    (text,) = texts(found)
    assert "takes Pillow's nearest pixels, of two that are equally near often the other one; nearest: " in text
    assert stages_of(found) == [{"torchvision": {"name": "Resize", "size": 20, "interpolation": "nearest-exact"}}]


def test_chains_within_chains() -> None:
    found = read_transform(theirs.nested, "user:nested", STAGES)
    assert list(found.pipelines) == ["val"]
    assert stages_of(found) == [{"resize": {"height": 40, "width": 48}}, {"grayscale": {}}]


@pytest.mark.parametrize(
    ("transforms", "expected"),
    [
        ((v1.ToTensor(), v1.RandomHorizontalFlip(1.0)), [{"flip": {"horizontal": 1}}, ZERO_TO_ONE]),
        (  # of an image that is smaller, the crop is padded by 0, which is no level of 0-255
            (v1.Resize(8), v1.ToTensor(), v1.Normalize(*theirs.IMAGENET), v1.CenterCrop(9)),
            [{"resize": {"shorter": 8}}, IMAGENET, {"torchvision": {"name": "CenterCrop", "size": [9, 9]}}],
        ),
        ((v1.ToTensor(), v1.Resize(9)), [{"resize": {"shorter": 9}}, ZERO_TO_ONE]),
        ((v1.ToTensor(), v1.Resize(9, antialias=False)), [{"resize": {"shorter": 9, "antialias": False}}, ZERO_TO_ONE]),
        (
            (v2.ToImage(), v2.ToDtype(torch.bfloat16, scale=True), v2.Normalize([0.5], [0.25])),
            [{"normalize": {"mean": [0.5] * 3, "std": [0.25] * 3, "dtype": "bfloat16"}}],
        ),
        (
            (v1.ToTensor(), v1.Normalize(0.5, 0.25)),
            [{"normalize": {"mean": [0.5] * 3, "std": [0.25] * 3}}],
        ),
        (
            (v1.ToTensor(), v1.Normalize(torch.tensor([0.1, 0.2, 0.3]), 0.25), v1.Normalize(0.5, 0.25)),
            [
                {"normalize": {"mean": [0.1, 0.2, 0.3], "std": [0.25] * 3}},
                {"torchvision": {"name": "Normalize", "mean": [0.5], "std": [0.25]}},
            ],
        ),
        (
            (v1.Grayscale(), v1.ToTensor(), v1.Normalize([0.5], [0.25])),
            [{"torchvision": {"name": "Grayscale"}}, {"normalize": {"mean": [0.5], "std": [0.25]}}],
        ),
        (
            (v1.Grayscale(), v1.ToTensor()),
            [{"torchvision": {"name": "Grayscale"}}, {"normalize": {"mean": [0], "std": [1]}}],
        ),
        ((v2.Resize(9, interpolation=3),), [{"resize": {"shorter": 9, "interpolation": "bicubic"}}]),
        (
            (*theirs.SCALED, v2.GaussianNoise(), v2.Normalize([0.5] * 3, [0.5] * 3)),
            [
                ZERO_TO_ONE,
                {"torchvision": {"name": "GaussianNoise"}},
                {"torchvision": {"name": "Normalize", "mean": [0.5] * 3, "std": [0.5] * 3}},
            ],
        ),
        (
            (*theirs.SCALED, v2.Normalize([0.5] * 3, [0.5] * 3), v2.RandomErasing(value=1)),
            [
                {"normalize": {"mean": [0.5] * 3, "std": [0.5] * 3}},
                {"torchvision": {"name": "RandomErasing", "value": [1]}},
            ],
        ),
    ],
)
def test_the_order_around_normalize(transforms: tuple[Any, ...], expected: list[dict[str, Any]]) -> None:
    found = read(*transforms)
    assert texts(found) == []
    assert stages_of(found) == expected


def test_a_lambda_is_named_with_its_line_and_what_leaving_it_out_costs() -> None:
    (text,) = texts(read_transform(theirs.with_lambda, "user:with_lambda", STAGES))
    rows = Path(theirs.__file__).read_text().splitlines()
    line = next(i for i, row in enumerate(rows, 1) if "rotate(180)" in row)
    assert text.startswith(
        f"{theirs.__file__}:{line}: user:with_lambda[1]: Lambda(<lambda>) is Python code, which a file"
    )
    assert "nearest: leave it out (up to " in text and "levels apart on a test picture" in text


def test_a_function_that_changes_nothing_is_measured() -> None:
    (text,) = texts(read_transform(theirs.with_function, "user:f", STAGES))
    assert "user:f[0]: untouched is Python code, which a file cannot hold" in text
    assert text.endswith("nearest: leave it out (0 levels apart on a test picture)")


def test_a_filter_that_the_stage_does_not_have_is_measured() -> None:
    found = read_transform(theirs.lanczos, "user:lanczos", STAGES)
    assert stages_of(found)[0] == {"resize": {"height": 40, "width": 48, "interpolation": "bicubic"}}
    (text,) = texts(found)
    assert "user:lanczos[0]: Resize resizes by lanczos, which the stage resize does not have; nearest: " in text
    assert "levels apart on a test picture" in text


@pytest.mark.parametrize(
    ("transform", "text"),
    [
        (v2.RandomChoice([v2.Grayscale()]), "RandomChoice draws one of several transforms; nearest: the first of its"),
        (v2.FiveCrop(9), "FiveCrop gives five images; nearest: leave it out (which gives another shape on"),
        (
            v2.RandomApply([v2.Resize(9)]),
            "RandomApply of Resize with p=0.5 has no equal stage; nearest: its transforms",
        ),
        (len, "builtin_function_or_method is not a transform that gpuflow knows"),
    ],
)
def test_what_no_stage_equals(transform: Any, text: str) -> None:
    assert text in "\n".join(texts(read(transform)))


class _Holder(torch.nn.Module):
    """As the presets of torchvision's reference trainings: code that calls a Compose."""

    def __init__(self, **transforms: Any) -> None:
        super().__init__()
        vars(self).update(transforms)

    def forward(self, image: Any) -> Any:
        return next(value for value in vars(self).values() if isinstance(value, v2.Compose))(image)


def test_an_object_that_holds_a_compose_is_named_with_it() -> None:
    """Leaving it out is not the nearest."""
    compose = v2.Compose([v2.Resize((30, 40)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    found = read_transform(_Holder(transforms=compose), "user:val", STAGES)
    assert texts(found) == [
        "user:val: _Holder is not a transform that gpuflow knows; nearest: its attribute transforms, a Compose "
        "(what else its code does is not known)"
    ]
    assert stages_of(found) == [{"resize": {"height": 30, "width": 40}}, ZERO_TO_ONE]
    found = read_transform(_Holder(small=compose, large=compose), "user:views", STAGES)
    assert texts(found) == [
        "user:views: _Holder is not a transform that gpuflow knows; nearest: its attributes small, large, each a "
        "Compose (views of one image are written as views)"
    ]
    assert stages_of(found) == []


def test_transforms_of_detection_are_stages() -> None:
    found = read(
        v2.ToImage(),
        v2.ScaleJitter((320, 200), (0.5, 1.5)),
        v2.RandomZoomOut(side_range=(1.0, 2.0)),
        v2.RandomIoUCrop(0.4, 0.9, 0.75, 1.5, [0.1, 0.5, 1.0], 20),
        v2.RandomCrop(30, pad_if_needed=True),
        v2.ToDtype(torch.float32, scale=True),
    )
    assert texts(found) == []
    assert stages_of(found) == [
        {"scale_jitter": {"size": [200, 320], "scale": [0.5, 1.5]}},
        {"zoom_out": {"scale": [1, 2], "probability": 0.5}},
        {"iou_crop": {"scale": [0.4, 0.9], "ratio": [0.75, 1.5], "overlaps": [0.1, 0.5, 1], "trials": 20}},
        {"random_crop": {"size": 30, "pad_if_needed": True}},
        ZERO_TO_ONE,
    ]


def test_values_by_type_are_those_of_images() -> None:
    """As segmentation and detection have them; what masks are padded by is said."""
    fills = {tv_tensors.Mask: 255, "others": 114}
    types = {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}
    found = read(
        v2.ToImage(),
        v2.RandomZoomOut(fill=fills, p=0.3),
        v2.RandomCrop(20, pad_if_needed=True, fill=fills),
        v2.ToDtype(types, scale=True),
    )
    assert texts(found) == []
    assert stages_of(found) == [
        {"zoom_out": {"scale": [1, 4], "probability": 0.3, "fill": 114}},
        {"random_crop": {"size": 20, "pad_if_needed": True, "fill": 114}},
        ZERO_TO_ONE,
    ]
    note = (
        "These transforms give masks the level 255 where they pad or warp an image. Write fill: 255 at the mask in "
        "source.fields for the same."
    )
    assert note in found.matches
    found = read(
        v2.ToImage(), v2.Pad(3, fill={"others": 0}), v2.ToDtype({tv_tensors.Mask: torch.int64, "others": None})
    )
    assert (texts(found), stages_of(found)) == ([], [{"pad": {"padding": 3}}])
    assert note not in found.matches
