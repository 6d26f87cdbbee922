"""Resampling takes little memory and time, also for images and results of odd sizes."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gpuflow.errors import BadSampleError
from gpuflow.execute.cpu.runner import CpuRunner
from gpuflow.pipeline import stage as s
from gpuflow.sources import Payload
from gpuflow.stages import CenterCrop, Decode, RandomCrop, RandomResizedCrop, Resize, Torchvision
from tests.images import jpeg, photo, png, png_bytes
from tests.running import keys_of, levels_apart, program_of, run


def line_png(width: int, height: int) -> bytes:
    """A black PNG, compressed to a few hundred bytes."""
    data = png_bytes(width, height, b"\0" * (height * (1 + 3 * width)))
    assert len(data) < 2000
    return data


@contextmanager
def at_most_more(megabytes: int) -> Iterator[None]:
    """Lets this process map only this much more memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (megabytes << 20), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


LARGE = [
    (line_png(2600, 1), (Resize(shorter=256), CenterCrop(size=224))),
    (line_png(1, 900), (Resize(shorter=256), RandomCrop(size=224))),
    (line_png(1, 200_000), (Resize(height=256, width=256), CenterCrop(size=224))),
    (line_png(1, 200_000), (Resize(height=256, width=256),)),
    (line_png(200_000, 1), (Resize(height=256, width=256, interpolation="bicubic", antialias=False),)),
    (line_png(150, 150), (Resize(longer=9000), CenterCrop(size=64), RandomResizedCrop(size=32))),
]


@pytest.mark.parametrize(("data", "stages"), LARGE, ids=lambda value: str(value)[:60])
def test_no_more_than_the_window_of_a_huge_grid_is_in_memory(data: bytes, stages: tuple[s.Geometry, ...]) -> None:
    """Each grid, or the first pass on the way to it, would take 150 to 500 MB."""
    program = program_of(Decode(), *stages)
    runner = CpuRunner(program)
    height, width, channels = program.result.shape
    slots = np.ones((1, height or 0, width or 0, channels), np.uint8)
    assert runner.run(Payload.of([png(photo(9, 9))]), keys_of(1), slots) == [None]
    with at_most_more(100):
        assert runner.run(Payload.of([data]), keys_of(1), slots) == [None]
    assert (slots == 0).all()


@pytest.mark.parametrize("name", ["Resize", "RandomShortestSize"])
def test_a_torchvision_transform_is_bounded_too(name: str) -> None:
    size = {"Resize": ("size", 256), "RandomShortestSize": ("min_size", 256)}[name]
    resize = Torchvision(name=name, parameters=(size,))
    _, faults = run(program_of(Decode(), resize, CenterCrop(size=9)), [line_png(1, 65_500), jpeg(photo(30, 40))])
    assert str(faults[0]) == (
        "torchvision: the resized image would have 256x16768000 = 4,292,608,000 pixels, "
        "more than max_pixels = 179,000,000"
    )
    assert faults[1] is None


def test_a_line_of_pixels_that_would_become_a_huge_image() -> None:
    """271 bytes, whose longer side would become 16.8 million pixels long."""
    data = line_png(1, 65_500)
    _, faults = run(program_of(Decode(), Resize(shorter=256), CenterCrop(size=224)), [data, jpeg(photo(300, 400))])
    assert isinstance(faults[0], BadSampleError)
    assert (faults[0].stage, faults[0].code) == ("resize", "sample.too_large")
    assert faults[0].reason == (
        "the resized image would have 256x16768000 = 4,292,608,000 pixels, more than max_pixels = 179,000,000"
    )
    assert faults[1] is None


@pytest.mark.parametrize(
    ("stages", "size"),
    [
        ((Resize(shorter=40), CenterCrop(size=20)), "240x40 = 9,600"),
        ((Resize(longer=70), Resize(shorter=40), RandomCrop(size=20)), "254x40 = 10,160"),
    ],
    ids=str,
)
def test_max_pixels_bounds_every_resized_image(stages: tuple[s.Geometry, ...], size: str) -> None:
    samples = [png(photo(40, 48)), png(photo(10, 60)), png(photo(60, 10))]
    most = 40 * 240 - 1
    whole, none = run(program_of(Decode(), *stages), samples)
    bounded, faults = run(program_of(Decode(max_pixels=most), *stages), samples)
    assert none == [None] * 3
    assert str(faults[1]) == f"resize: the resized image would have {size} pixels, more than max_pixels = 9,599"
    for i, fault in enumerate(faults):
        if fault is None:
            assert levels_apart(bounded[i], whole[i]) == 0
