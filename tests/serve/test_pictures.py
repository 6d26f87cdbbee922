"""Pictures of a model's input: the pixels before the last stages, for every dtype, layout and colour order."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
import pytest
import torch

from gpuflow.pipeline.stage import Stage
from gpuflow.serve.model_input import Pictures
from gpuflow.stages import CenterCrop, Decode, Normalize, Resize, Torchvision
from tests.images import jpeg, photo
from tests.running import images, program_of

DATA = jpeg(photo(50, 60))
GRAY = Normalize(mean=(0.3,), std=(0.2,))
BGR = Normalize(mean=(0.406, 0.456, 0.485), std=(0.225, 0.224, 0.229))


def head(color: str = "rgb") -> tuple[Stage, ...]:
    return Decode(color=color), Resize(height=20, width=24), CenterCrop(size=16)  # type: ignore[arg-type]


def picture(stages: Sequence[Stage]) -> np.ndarray:
    program = program_of(*stages)
    return Pictures(program.result, program.pipeline).pixels(images(program, [DATA])[0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_normalize_is_undone(dtype: str, layout: str) -> None:
    """Exactly, except for levels that are equal in bfloat16."""
    pixels = picture(head())
    found = picture([*head(), Normalize(dtype=dtype, layout=layout)])  # type: ignore[arg-type]
    assert (found.shape, found.dtype) == ((16, 16, 3), np.dtype(np.uint8))
    assert np.abs(found.astype(int) - pixels).max() <= (1 if dtype == "bfloat16" else 0)


def test_pixels_are_shown_as_they_are() -> None:
    program = program_of(*head())
    expected = images(program, [DATA])[0].permute(1, 2, 0).numpy()
    assert np.array_equal(picture(head()), expected)


def test_colors() -> None:
    """Channels in another order, or a single channel, give the same picture as RGB."""
    assert np.array_equal(picture([*head("bgr"), BGR]), picture(head()))
    gray = picture([*head("gray"), GRAY])
    assert np.array_equal(gray, picture(head("gray")))
    assert np.array_equal(gray[..., 0], gray[..., 2])


def test_values_of_stages_that_cannot_be_undone_are_scaled() -> None:
    stages = [*head(), Torchvision(name="ToDtype", parameters=(("dtype", "float32"), ("scale", True)))]
    pixels, found = picture(head()).astype(float), picture(stages)
    low, high = pixels.min(), pixels.max()
    assert np.abs((pixels - low) / (high - low) * 255 - found).max() <= 0.51
    program = program_of(*head(), Normalize())
    unknown = Pictures(program.result, None).pixels(images(program, [DATA])[0])
    assert (unknown.min(), unknown.max()) == (0, 255)
    assert np.array_equal(Pictures(program.result, None).pixels(torch.ones(3, 16, 16)), np.zeros((16, 16, 3)))


def test_a_png() -> None:
    program = program_of(*head(), Normalize())
    shown = Pictures(program.result, program.pipeline)
    image = images(program, [DATA])[0]
    decoded = cv2.imdecode(np.frombuffer(shown.png(image), np.uint8), cv2.IMREAD_COLOR_RGB)
    assert decoded is not None and np.array_equal(decoded, shown.pixels(image))
