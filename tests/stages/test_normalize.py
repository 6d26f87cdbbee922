"""normalize: equals torchvision bit for bit, in every dtype and memory layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpuflow.errors import ConfigError
from gpuflow.stages import CenterCrop, ColorJitter, Decode, Flip, Normalize
from tests.images import photo, png
from tests.running import RGB, decoded, images, program_of
from tests.texts import outline

LEVELS = np.arange(256, dtype=np.uint8).reshape(16, 16)
EVERY_LEVEL = np.stack([LEVELS, LEVELS[::-1], LEVELS.T], axis=-1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("size", [(16, 16), (1, 1), (1, 9), (7, 3)])
def test_every_level_is_torchvisions(dtype: Any, layout: Any, size: tuple[int, int]) -> None:
    data = png(np.ascontiguousarray(EVERY_LEVEL[: size[0], : size[1]]))
    stage = Normalize(dtype=dtype, layout=layout)
    batch = images(program_of(Decode(), CenterCrop(size=size), stage), [data] * 3)
    assert batch.dtype == getattr(torch, dtype)
    assert batch.is_contiguous(memory_format=torch.channels_last if layout == "nhwc" else torch.contiguous_format)
    for result in batch:
        assert torch.equal(result, stage.torchvision()(decoded(data)))


@given(
    mean=st.lists(st.floats(-2, 2), min_size=3, max_size=3).map(tuple),
    std=st.lists(st.floats(1e-3, 10), min_size=3, max_size=3).map(tuple),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)
def test_any_numbers(mean: tuple[float, ...], std: tuple[float, ...], dtype: Any) -> None:
    stage = Normalize(mean=mean, std=std, dtype=dtype)
    (result,) = images(program_of(Decode(), CenterCrop(size=16), stage), [png(EVERY_LEVEL)])
    assert torch.equal(result, stage.torchvision()(decoded(png(EVERY_LEVEL))))


@given(
    mean=st.lists(st.floats(-2, 2), min_size=3, max_size=3).map(tuple),
    std=st.lists(st.floats(1e-3, 10), min_size=3, max_size=3).map(tuple),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)
def test_inside_a_model_it_is_the_same(mean: tuple[float, ...], std: tuple[float, ...], dtype: Any) -> None:
    """Equal bit for bit at every level, in the memory format of the input."""
    stage = Normalize(mean=mean, std=std, dtype=dtype, layout="nhwc")
    stages = (Decode(), CenterCrop(size=16))
    inside = stage.module()(images(program_of(*stages), [png(EVERY_LEVEL)] * 2))
    outside = images(program_of(*stages, stage), [png(EVERY_LEVEL)] * 2)
    assert torch.equal(inside, outside)
    assert (inside.dtype, inside.stride()) == (outside.dtype, outside.stride())


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_gray_and_bgr(layout: Any) -> None:
    data = png(photo(20, 24))
    gray = Normalize(mean=(0.4,), std=(0.3,), layout=layout)
    (result,) = images(program_of(Decode(color="gray"), CenterCrop(size=20), gray), [data])
    assert torch.equal(result, gray.torchvision()(decoded(data, "gray")[..., 2:22]))
    bgr = Normalize(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), layout=layout)
    (result,) = images(program_of(Decode(color="bgr"), CenterCrop(size=20), bgr), [data])
    assert torch.equal(result, bgr.torchvision()(decoded(data, "bgr")[..., 2:22]))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_behind_other_stages(layout: Any) -> None:
    data = png(photo(20, 24))
    stages = (CenterCrop(size=20), Flip(horizontal=1.0), ColorJitter(brightness=(1.2, 1.2)))
    (pixels,) = images(program_of(Decode(), *stages), [data])
    (result,) = images(program_of(Decode(), *stages, Normalize(layout=layout)), [data])
    assert torch.equal(result, Normalize().torchvision()(pixels))


def test_imagenet_is_what_models_were_trained_with() -> None:
    assert Normalize().table()[:, 0].tolist() == pytest.approx([-2.117904, -2.035714, -1.804444], abs=1e-6)
    assert (Normalize() == Normalize(mean="imagenet", std="imagenet")) and Normalize().table().shape == (3, 256)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"mean": (0.5,)}, "normalize.std config.conflict, got 3"),
        ({"std": (0.5,)}, "normalize.std config.conflict, got 1"),
        ({"std": (0.5, 0.0, 0.5)}, "normalize.std config.range, got [0.5, 0.0, 0.5]"),
        ({"mean": (), "std": ()}, "normalize.std config.range, got []"),
        ({"std": (0.5, float("nan"), 0.5)}, "normalize.std config.range, got [0.5, nan, 0.5]"),
        ({"mean": (0.5, float("inf"), 0.5)}, "normalize.mean config.range, got [0.5, inf, 0.5]"),
        (
            {"mean": (123.7, 116.3, 103.5), "std": (1.0, 1.0, 1.0)},
            "normalize.mean config.range, got [123.7, 116.3, 103.5]",
        ),
    ],
)
def test_errors(parameters: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Normalize(**parameters)
    assert outline(caught.value) == expected


@pytest.mark.parametrize(
    ("stage", "spec", "text"),
    [
        (Normalize(), RGB.replace(shape=(8, 8, 1)), "has 3 values of mean but gets 1 channel(s); give 1"),
        (
            Normalize(),
            RGB.replace(color="bgr"),
            "knows imagenet in the order rgb but gets bgr images; give the numbers",
        ),
        (
            Normalize(),
            RGB.replace(dtype="float32"),
            "takes uint8 pixels but gets float32; remove the stage that makes them",
        ),
    ],
)
def test_specs_it_cannot_take(stage: Normalize, spec: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        stage.output(spec)
    assert str(caught.value) == text
