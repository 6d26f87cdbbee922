"""decode: colours, and the errors of its parameters. The decoders themselves: tests/decode/test_codecs.py."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from gpuflow.errors import ConfigError
from gpuflow.pipeline.stage import ENCODED
from gpuflow.stages import CenterCrop, Decode, Normalize, Resize
from tests.images import encode, jpeg, photo, png, with_orientation
from tests.running import RGB, decoded, images, program_of, run
from tests.texts import outline


@pytest.mark.parametrize("color", ["rgb", "bgr", "gray"])
def test_color(color: Any) -> None:
    program, last = program_of(Decode(color=color), CenterCrop(size=(40, 50))), png(photo(40, 50))
    for data in (jpeg(photo(40, 50)), last):
        assert torch.equal(images(program, [data])[0], decoded(data, color))
        assert program.specs[1].color == color
    tail = Normalize(mean=(0.5,) * program.specs[1].shape[2], std=(0.5,) * program.specs[1].shape[2])
    (result,) = images(program_of(Decode(color=color), CenterCrop(size=30), tail), [last])
    assert torch.equal(result, tail.torchvision()(decoded(last, color)[:, 5:35, 10:40]))


def test_orientation_and_max_pixels_reach_the_decoder() -> None:
    data = with_orientation(photo(30, 40), "JPEG", 6)
    turned = program_of(Decode(orientation="apply"), CenterCrop(size=(40, 30)))
    stored = program_of(Decode(), CenterCrop(size=(30, 40)))
    assert torch.equal(images(turned, [data])[0], images(stored, [data])[0].rot90(-1, (1, 2)))
    _, faults = run(program_of(Decode(max_pixels=1199), CenterCrop(size=30)), [data])
    assert str(faults[0]) == "decode: 40x30 = 1,200 pixels are more than max_pixels = 1,199"


@pytest.mark.parametrize("size", [(1, 20), (20, 1), (1, 1)])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_with_a_side_of_one_pixel_are_turned(size: tuple[int, int], orientation: int) -> None:
    data = with_orientation(photo(*size), "PNG", orientation)
    with Image.open(io.BytesIO(data)) as image:
        upright = png(np.asarray(ImageOps.exif_transpose(image)))
    program = program_of(Decode(orientation="apply"), Resize(height=8, width=9))
    assert torch.equal(images(program, [data]), images(program, [upright]))


def test_specs() -> None:
    assert Decode().output(ENCODED) == RGB
    assert str(Decode(color="gray").output(ENCODED)) == "uint8 ?x?x1 hwc"
    with pytest.raises(ValueError, match="takes") as caught:
        Decode().output(RGB)
    assert str(caught.value) == "takes encoded bytes but gets uint8 ?x?x3 hwc"
    assert Decode().torchvision() is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"cpu_share": 1.5}, "decode.cpu_share config.range, got 1.5"),
        ({"max_pixels": 0}, "decode.max_pixels config.range, got 0"),
        (
            {"cpu_share": -1.0, "max_pixels": -1},
            "decode.cpu_share config.range, got -1.0\ndecode.max_pixels config.range, got -1",
        ),
    ],
)
def test_errors(parameters: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Decode(**parameters)
    assert outline(caught.value) == expected


def test_a_background_counts_and_its_absence_does_not() -> None:
    """Fingerprints of files from before there was a background stay as they were."""
    assert "background" not in Decode().params()
    assert Decode(background=(1, 2, 3)).params()["background"] == (1, 2, 3)
    for wrong in ((0, 0, 256), (-1, 0, 0)):
        with pytest.raises(ConfigError) as caught:
            Decode(background=wrong)
        assert caught.value.problems[0].path == ("decode", "background")


def test_a_pipeline_composites_alpha_over_the_background() -> None:
    pixels = photo(20, 30)
    data = encode(np.dstack([pixels, np.full((20, 30), 0, np.uint8)]), "PNG")
    (image,) = images(program_of(Decode(background=(255, 0, 9)), CenterCrop(size=10)), [data])
    assert image.flatten(1).T.unique(dim=0).tolist() == [[255, 0, 9]]
