"""pad: torchvision's Pad, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchvision.transforms import v2

from gpuflow.errors import ConfigError
from gpuflow.stages import CenterCrop, Decode, Flip, Pad, RandomCrop, Resize, Rotate
from tests.images import photo, png
from tests.running import RGB, decoded, images, program_of, run
from tests.texts import outline


@pytest.mark.parametrize("border", ["constant", "edge", "reflect", "symmetric"])
@pytest.mark.parametrize("padding", [0, 7, (3, 0), (1, 2, 3, 4)])
@pytest.mark.parametrize("fill", [0, 114, (9, 200, 50)])
def test_pixels_are_those_of_torchvision(padding: Any, fill: Any, border: Any) -> None:
    if border != "constant" and fill:
        fill = 0
    sides = list(padding) if isinstance(padding, tuple) else padding
    for size in ((40, 57), (9, 9), (8, 30)):
        data = png(photo(*size))
        expected = v2.Pad(sides, fill, border)(decoded(data))
        stages = (Pad(padding=padding, border=border, fill=fill), CenterCrop(size=tuple(expected.shape[1:])))
        assert torch.equal(images(program_of(Decode(), *stages), [data])[0], expected)


@pytest.mark.parametrize("border", ["constant", "edge", "reflect", "symmetric"])
def test_between_other_stages(border: Any) -> None:
    pad = Pad(padding=(5, 6, 7, 8), border=border, fill=114 if border == "constant" else 0)
    stages = (Resize(height=20, width=30), Flip(horizontal=1.0), pad, Flip(vertical=1.0), CenterCrop(size=(30, 36)))
    data = png(photo(40, 57))
    expected = decoded(data)
    for stage in stages:
        expected = stage.torchvision()(expected)
    assert torch.equal(images(program_of(Decode(), *stages), [data])[0], expected)


def test_two_paddings() -> None:
    stages = (Pad(padding=5, fill=9), Pad(padding=4, fill=200), Pad(padding=3), CenterCrop(size=80))
    data, program = png(photo(40, 50)), program_of(Decode(), *stages)
    expected = decoded(data)
    for stage in stages:
        expected = stage.torchvision()(expected)
    assert torch.equal(images(program, [data])[0], expected)
    assert [type(step).__name__ for step in program.steps] == ["ResamplingStep"] * 3


@pytest.mark.parametrize("border", ["reflect", "symmetric"])
@pytest.mark.parametrize(
    "second",
    [
        lambda border: Pad(padding=9, border=border),
        lambda border: RandomCrop(size=(50, 60), padding=(9, 9, 0, 0), border=border),
        lambda border: Rotate(degrees=(90, 90), interpolation="nearest", border=border),
    ],
    ids=["pad", "random_crop", "rotate"],
)
def test_an_image_that_is_mirrored_is_mirrored_as_it_is_there(border: Any, second: Any) -> None:
    """As one warp, the pixels outside would be those of the image before the first of both."""
    data, both = png(photo(30, 41)), (Pad(padding=8, border=border), second(border))
    program = program_of(Decode(), *both, CenterCrop(size=(40, 50)))
    first = images(program_of(Decode(), both[0], CenterCrop(size=(46, 57))), [data])[0]
    alone = program_of(Decode(), both[1], CenterCrop(size=(40, 50)))
    assert torch.equal(images(program, [data])[0], images(alone, [png(first.permute(1, 2, 0).numpy())])[0])
    assert [type(step).__name__ for step in program.steps] == ["WarpStep"] * 2
    one = program_of(Decode(), Flip(horizontal=1.0), both[0], Flip(vertical=1.0), CenterCrop(size=9))
    assert len(one.steps) == 1, "crops and flips stay in its step"


def test_an_image_that_is_too_small_to_reflect_is_a_bad_sample() -> None:
    program = program_of(Decode(), Pad(padding=9, border="reflect"), RandomCrop(size=20))
    _, faults = run(program, [png(photo(9, 40)), png(photo(10, 10))])
    assert str(faults[0]) == "pad: the padding is larger than the image, which has 9x40 pixels here"
    assert faults[1] is None


def test_a_mirrored_image_with_the_pixel_at_the_edge_is_as_large_as_the_image() -> None:
    data = png(photo(9, 40))
    program = program_of(Decode(), Pad(padding=9, border="symmetric"), CenterCrop(size=(27, 58)))
    results, faults = run(program, [data, png(photo(8, 40))])
    assert torch.equal(results[0], v2.Pad(9, padding_mode="symmetric")(decoded(data))) and faults[0] is None
    assert str(faults[1]) == "pad: the padding is larger than the image, which has 8x40 pixels here"


def test_specs() -> None:
    assert Pad(padding=(1, 2, 3, 4)).output(RGB.replace(shape=(10, None, 3))).shape == (16, None, 3)
    assert Pad(padding=3).output(RGB.replace(shape=(None, None, 3), shorter=20)).shorter == 26
    assert Pad(padding=(3, 2)).output(RGB.replace(shape=(None, None, 3), shorter=20)).shorter is None
    assert Pad(padding=10, border="symmetric").output(RGB.replace(shape=(10, 20, 3))).shape == (30, 40, 3)
    with pytest.raises(ValueError, match="fills with 3 levels"):
        Pad(padding=1, fill=(1, 2, 3)).output(RGB.replace(shape=(9, 9, 1), color="gray"))
    for padding, border, most in ((10, "reflect", 9), (11, "symmetric", 10)):
        with pytest.raises(ValueError, match="mirrors") as caught:
            Pad(padding=padding, border=border).output(RGB.replace(shape=(10, 20, 3)))  # type: ignore[arg-type]
        text = f"mirrors {padding} of 10 pixels; pad at most {most}, or with border: edge"
        assert str(caught.value) == text


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"padding": -1}, "pad.padding config.range, got -1"),
        ({"padding": (1, -1)}, "pad.padding config.range, got [1, -1]"),
        ({"padding": 1, "fill": 300}, "pad.fill config.range, got 300"),
    ],
    ids=str,
)
def test_errors(parameters: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Pad(**parameters)
    assert outline(caught.value) == expected
