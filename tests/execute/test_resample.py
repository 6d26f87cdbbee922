"""resample_part: the same pixels as the whole result, in little memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpuflow.errors import BadSampleError
from gpuflow.execute import resample as module
from gpuflow.execute.cpu import CpuRunner
from gpuflow.execute.resample import resample, resample_part
from gpuflow.pipeline import stage as s
from gpuflow.sources import Payload
from gpuflow.stages import CenterCrop, Decode, RandomCrop, RandomResizedCrop, Resize, Torchvision
from tests.images import jpeg, photo, png, png_bytes
from tests.running import keys_of, levels_apart, program_of, run

sides = st.integers(1, 70)
kinds = st.sampled_from(["nearest", "bilinear", "bicubic"])


def scratch(name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return np.full(shape, 0xA5, np.uint8)


@settings(max_examples=400)
@given(
    sizes=st.tuples(sides, sides, sides, sides),
    channels=st.sampled_from([1, 3]),
    interpolation=kinds,
    antialias=st.booleans(),
    small=st.booleans(),
    data=st.data(),
)
def test_a_part_equals_that_part_of_the_whole(
    sizes: tuple[int, int, int, int],
    channels: int,
    interpolation: str,
    antialias: bool,
    small: bool,
    data: st.DataObject,
) -> None:
    """small: strips of a few lines, and a first pass in several parts."""
    height, width, *grid = sizes
    image = np.random.default_rng(sizes).integers(0, 256, (height, width, channels), dtype=np.uint8)
    y, x = (data.draw(st.integers(0, side - 1)) for side in grid)
    rows, columns = (data.draw(st.integers(1, side - start)) for side, start in zip(grid, (y, x), strict=True))
    expected = resample(image, grid, interpolation, antialias, np.empty((*grid, channels), np.uint8))
    around = np.full((rows + 2, columns + 2, channels), 7, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(module, "_STRIP_BYTES", 200)
            patch.setattr(module, "_LONG_STRIP_BYTES", 200)
            patch.setattr(module, "_COLUMNS_BYTES", 500)
        out = around[1:-1, 1:-1]
        resample_part(image, grid, (y, x, rows, columns), interpolation, antialias, out, scratch)
    assert np.array_equal(out, expected[y : y + rows, x : x + columns])
    assert (around[[0, -1]] == 7).all() and (around[:, [0, -1]] == 7).all()


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(2700, 1), (1, 2700)])
def test_long_lines_are_resampled_many_at_a_time(
    size: tuple[int, int], interpolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch computes the weights of each call anew. One line at a time, a PNG of 90 bytes took a thread 11 s."""
    calls = list[tuple[int, ...]]()

    def counted(image: NDArray[np.uint8], *others: Any) -> NDArray[np.uint8]:
        calls.append(image.shape)
        return resample(image, *others)

    monkeypatch.setattr(module, "resample", counted)
    image, out = np.ones((*size, 3), np.uint8), np.empty((224, 224, 3), np.uint8)
    grid = (256 * size[0] // min(size), 256 * size[1] // min(size))
    resample_part(image, grid, (16, 16, 224, 224), interpolation, interpolation != "nearest", out, scratch)
    assert (out == 1).all()
    assert len(calls) <= 2 + 224 / 16


# --- memory -----------------------------------------------------------------------------------------------------------


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
