"""The CPU's results are the reference's bits: for random programs, images, chunks, threads, faults and JPEGs.

`tests/reference` runs one image and one step after the other, by torch, OpenCV and numpy alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gpuflow.decode.codecs import CpuDecoder
from gpuflow.errors import BadSampleError, ConfigError
from gpuflow.execute.cpu.runner import CpuRunner, header_of
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.views import AnyProgram, View, ViewsPipeline, ViewsProgram, slot_of, slots_of
from gpuflow.sources import Payload
from gpuflow.stages import (
    Affine,
    Autocontrast,
    Brightness,
    CenterCrop,
    ColorJitter,
    Contrast,
    Decode,
    Equalize,
    Flip,
    GaussianBlur,
    Grayscale,
    Hue,
    Invert,
    Letterbox,
    Normalize,
    Pad,
    Perspective,
    Posterize,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    Resize,
    Rotate,
    Saturation,
    Sharpness,
    Solarize,
    TrivialAugment,
    WarpAffine,
)
from tests.images import Pixels, as_array, jpeg, photo, tiny_jpeg, with_restarts
from tests.laws.test_output_hashes import picture
from tests.laws.test_stage_laws import filters, geometry
from tests.packages.toning.toning import MaskBlue, Tone
from tests.reference.runner import reference_of
from tests.reference.warping import opencv_5
from tests.running import keys_of, program_of

Samples = list[list[NDArray[Any]] | str]

# --- random programs -------------------------------------------------------------------------------------------------

SIZES = ((1, 1), (1, 37), (41, 1), (2, 3), (4, 4), (13, 127), (37, 61), (64, 23), (97, 131), (300, 19))
COLORS: tuple[s.Stage, ...] = (
    Brightness(amount=(0.2, 1.9)),
    Contrast(amount=(0.2, 1.9)),
    Saturation(amount=(0.0, 2.5)),
    Hue(amount=0.5),
    ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, probability=0.8),
    Grayscale(probability=0.5),
    Autocontrast(),
    Equalize(),
    Posterize(bits=2),
    Solarize(threshold=90.5),
    Invert(probability=0.5),
    Tone(),
    MaskBlue(),
    RandomErasing(probability=0.9, value="random"),
    RandAugment(),
    TrivialAugment(interpolation="bilinear", fill=9),
    Sharpness(amount=(0.0, 3.0)),
    GaussianBlur(kernel_size=(3, 9), sigma=(0.4, 3.0)),
    GaussianBlur(kernel_size=23, sigma=5),
)
borders = st.sampled_from(["constant", "edge", "reflect", "symmetric"])
fills = st.sampled_from([{}, {}, {"fill": 114}])
lookups = st.builds(
    lambda interpolation, border, fill: {"interpolation": interpolation, "border": border, **fill},
    st.sampled_from(["nearest", "bilinear"]),
    borders,
    fills,
)
scales = st.sampled_from([(0.5, 2.0), (0.001, 0.01), (1.0, 1.0), (90.0, 900.0)])
warps: st.SearchStrategy[s.Stage] = st.one_of(
    st.builds(lambda degrees, how: Rotate(degrees=degrees, **how), st.sampled_from([30, 180, (90, 90)]), lookups),
    st.builds(lambda expand, how: Rotate(degrees=50, expand=expand, **how), st.booleans(), lookups),
    st.builds(lambda scale, how: Affine(degrees=20, translate=(0.2, 0.3), scale=scale, **how), scales, lookups),
    st.builds(lambda how: Affine(shear=(-20, 20), center=(3.0, 9.5), **how), lookups),
    st.builds(lambda far, how: Perspective(distortion_scale=far, probability=0.9, **how), st.floats(0, 1), lookups),
    st.builds(lambda how: WarpAffine(matrix=((0.3, 0.1, 9.5), (-0.2, 0.4, 3.0)), size=(31, 300), **how), lookups),
)
pads: st.SearchStrategy[s.Stage] = st.one_of(
    st.builds(lambda sides, border: Pad(padding=sides, border=border), st.sampled_from([1, (0, 9, 3, 40)]), borders),
    st.builds(lambda size, fill: Letterbox(size=size, **fill), st.sampled_from([1, 40, (9, 70)]), fills),
    st.builds(
        lambda size, border: RandomCrop(size=size, padding=3, pad_if_needed=True, border=border),
        st.sampled_from([1, 17, (30, 12)]),
        borders,
    ),
)
large: st.SearchStrategy[s.Stage] = st.builds(
    lambda size, f: RandomResizedCrop(size=size, scale=(0.01, 1.0), **f), st.sampled_from([1, 70, (150, 97)]), filters
)
stages = st.one_of(geometry, warps, pads, large, st.sampled_from(COLORS), st.sampled_from(COLORS))
dtypes = st.sampled_from(["float32", "float16", "bfloat16"])
layouts = st.sampled_from(["nchw", "nhwc"])


def _normalize(channels: int, dtype: Any, layout: Any) -> Normalize:
    return Normalize(mean=(0.5, 0.4, 0.6)[:channels], std=(0.2, 0.25, 0.3)[:channels], dtype=dtype, layout=layout)


def _program(draw: st.DrawFn, channels: int) -> Any:
    """Draw a program of 1 to 5 stages, and a crop to one size and a normalization where these fit."""
    chain: list[s.Stage] = draw(st.lists(stages, min_size=1, max_size=5))
    last = [_normalize(channels, draw(dtypes), draw(layouts))] if draw(st.booleans()) else []
    for sized in ([], [CenterCrop(size=(19, 23))], [Resize(height=16, width=17)]):
        try:
            return program_of(Decode(color="rgb" if channels == 3 else "gray"), *chain, *sized, *last)
        except ConfigError:
            continue
    return assume(False)


@st.composite
def programs(draw: st.DrawFn, channels: int) -> AnyProgram:
    """One program, or views that share the decoded image."""
    folded = [_program(draw, channels) for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3])))]
    return folded[0] if len(folded) == 1 else views_of(folded)


def views_of(folded: Sequence[Any]) -> ViewsProgram:
    views = tuple(View(f"view{i}", 1 + i % 2, one.pipeline) for i, one in enumerate(folded))
    return ViewsProgram(pipeline=ViewsPipeline("views", views), programs=tuple(folded))


# --- outputs ---------------------------------------------------------------------------------------------------------


def outputs_by(program: AnyProgram, count: int, run: Callable[[Any], list[BadSampleError | None]]) -> Samples:
    """Return each sample's results that `run` wrote to slots, or why it is bad."""
    shape, dtype = slot_of(program)
    slots = slots_of(program, np.zeros((count, *shape), dtype))
    faults = run(slots)
    views = [slots] if isinstance(slots, np.ndarray) else [one for view in slots.views for one in view]
    return [[view[i] for view in views] if fault is None else str(fault) for i, fault in enumerate(faults)]


def of_images(program: AnyProgram, images: Sequence[Pixels], keys: s.Keys, chunk: int) -> Samples:
    """Return what one runner makes of images in chunks."""
    runner = CpuRunner(program)
    parts = [slice(first, first + chunk) for first in range(0, len(images), chunk)]
    return outputs_by(
        program,
        len(images),
        lambda slots: [
            fault for part in parts for fault in runner.run_images(images[part], keys.take(part), slots[part])
        ],
    )


def check(found: Samples, expected: Samples) -> None:
    """Require equal bits and equal faults."""
    assert len(found) == len(expected)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        if isinstance(one, str) or isinstance(other, str):
            assert one == other, f"sample {i}"
            continue
        for number, (result, reference) in enumerate(zip(one, other, strict=True)):
            assert (result.shape, result.dtype) == (reference.shape, reference.dtype), f"sample {i}, output {number}"
            apart = np.ascontiguousarray(result) != np.ascontiguousarray(reference)
            assert not apart.any(), f"sample {i}, output {number}: {apart.sum()} of {apart.size} values differ"


@opencv_5
@settings(max_examples=200)
@given(data=st.data(), channels=st.sampled_from([3, 3, 1]), seed=st.integers(0, 2**32))
def test_random_programs_give_the_bits_of_the_reference(data: st.DataObject, channels: int, seed: int) -> None:
    program = data.draw(programs(channels))
    sizes = data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=5))
    images = [picture(*size, channels) for size in sizes]
    keys = keys_of(len(images), seed=seed)
    chunk = data.draw(st.integers(1, len(images)))
    check(of_images(program, images, keys, chunk), reference_of(program, images, keys))


# --- chunks, threads and bad samples ---------------------------------------------------------------------------------

PROGRAMS: dict[str, AnyProgram] = {
    "resampled": program_of(Decode(), RandomCrop(size=9), Resize(height=20, width=31), Flip(horizontal=0.5)),
    "bad later": program_of(Decode(), Resize(longer=40), RandomCrop(size=2), Flip(vertical=0.5), Normalize()),
    "coloured": program_of(Decode(), ColorJitter(hue=0.5, contrast=0.9), RandomCrop(size=9), Equalize(), Normalize()),
    "warped": program_of(
        Decode(), GaussianBlur(kernel_size=3), Affine(degrees=30, scale=(0.3, 2)), RandomCrop(size=9), TrivialAugment()
    ),
    "views": views_of(
        [
            program_of(Decode(), RandomResizedCrop(size=24), RandAugment(), Normalize(dtype="bfloat16")),
            program_of(Decode(), RandomErasing(probability=1.0), RandomCrop(size=(9, 7)), Sharpness(amount=0.9)),
        ]
    ),
}
IMAGES = [picture(*size, 3) for size in ((97, 131), (64, 23), (9, 9), (13, 127), (37, 61), (41, 50), (300, 19))]
SMALL = picture(1, 30, 3)
"""Too small for the crops, also when it is resized."""
every_program = pytest.mark.parametrize(
    "program",
    [pytest.param(program, id=name, marks=opencv_5 if name == "warped" else ()) for name, program in PROGRAMS.items()],
)


@every_program
def test_chunks_of_any_size_and_threads_give_the_same_bits(program: AnyProgram) -> None:
    images = [*IMAGES, *IMAGES, SMALL, *IMAGES[1:]]
    keys, runners = keys_of(len(images), seed=3), CpuRunner(program)
    expected = reference_of(program, images, keys)
    for chunk in (1, 2, 7, len(images)):
        check(of_images(program, images, keys, chunk), expected)

    def on_threads(slots: Any) -> list[BadSampleError | None]:
        """Run chunks of 1, 2 and 3 samples on eight threads at once."""
        starts = [0, 1, 3, 6, 7, 9, 12, 13, 15, 18, 19, len(images)]
        parts = [slice(first, last) for first, last in itertools.pairwise(starts)]
        with ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(runners.run_images, images[part], keys.take(part), slots[part]) for part in parts]
            return [fault for call in calls for fault in call.result(timeout=60)]

    for _ in range(5):
        check(outputs_by(program, len(images), on_threads), expected)


@every_program
def test_a_bad_sample_at_any_place_changes_no_other(program: AnyProgram) -> None:
    keys = keys_of(len(IMAGES), seed=6)
    whole = of_images(program, IMAGES, keys, len(IMAGES))
    for place in range(len(IMAGES)):
        found = of_images(program, [*IMAGES[:place], SMALL, *IMAGES[place + 1 :]], keys, len(IMAGES))
        assert isinstance(found[place], str), f"sample {place} is not bad"
        check([*found[:place], *found[place + 1 :]], [*whole[:place], *whole[place + 1 :]])


# --- JPEGs -----------------------------------------------------------------------------------------------------------

SAMPLINGS = ("4:2:0", "4:2:2", "4:4:4", "4:4:0", "4:1:1")
JPEGS = (
    *(jpeg(photo(97, 131), sampling) for sampling in SAMPLINGS),
    *(jpeg(photo(height, 61), sampling) for height, sampling in zip((1, 17, 33, 2, 9), SAMPLINGS, strict=True)),
    *(with_restarts(photo(83, 67), interval, sampling) for interval, sampling in ((1, "4:2:0"), (7, "4:1:1"))),
    jpeg(photo(101, 1), "4:2:0"),
    jpeg(photo(1, 1), "4:4:0"),
    jpeg(photo(89, 97)[..., 0]),
    jpeg(photo(70, 53), progressive=True),
    tiny_jpeg(97, 131, [(4, 1), (1, 1), (1, 1)]),
    tiny_jpeg(53, 71, [(1, 2), (1, 1), (1, 1)]),
    tiny_jpeg(47, 59, [(1, 1)]),
    b"not an image",
)
ON_JPEGS: dict[str, tuple[s.Stage, ...]] = {
    "pixel": (RandomCrop(size=1), Normalize(dtype="float16")),
    "center": (CenterCrop(size=(1, 40)),),
    "crop": (RandomCrop(size=13), Flip(horizontal=0.5)),
    "inception": (RandomResizedCrop(size=24, scale=(0.01, 0.6)), Flip(horizontal=0.5), Normalize(layout="nhwc")),
    "bicubic": (Resize(shorter=40, interpolation="bicubic"), RandomCrop(size=31)),
    "nearest": (RandomCrop(size=20), Flip(vertical=0.5), Resize(height=31, width=9, interpolation="nearest")),
    "warp": (RandomCrop(size=20), Rotate(degrees=40), TrivialAugment()),
    "color": (ColorJitter(contrast=0.5, saturation=0.5), CenterCrop(size=30)),
}


@pytest.mark.parametrize("color", ["rgb", "bgr", "gray"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=opencv_5 if name in {"warp", "views"} else ()) for name in [*ON_JPEGS, "views"]]
)
def test_jpegs_give_the_bits_of_the_whole_image(name: str, color: Any) -> None:
    """Decoding only the region that a program needs changes no bit."""
    decoder = Decode(color=color)
    try:
        chains = ("pixel", "warp", "color") if name == "views" else (name,)
        folded = [program_of(decoder, *_for_color(ON_JPEGS[one], color)) for one in chains]
    except ConfigError:
        assert color == "bgr", "this program takes images of this colour"
        return
    program: AnyProgram = views_of(folded) if name == "views" else folded[0]
    samples = [as_array(data) for data in JPEGS * 2]
    keys, reader = keys_of(len(samples), seed=8), CpuDecoder(color, background=None)
    expected: Samples = []
    for i, data in enumerate(samples):
        try:
            image = reader.decode(data, header_of(data, decoder))[0].copy()
        except BadSampleError as fault:
            expected.append(str(fault))
        else:
            expected += reference_of(program, [image], keys[i])
    assert sum(isinstance(one, str) for one in expected) < len(samples) - 5
    check(
        outputs_by(program, len(samples), lambda slots: CpuRunner(program).run(Payload.of(samples), keys, slots)),
        expected,
    )


def _for_color(chain: tuple[s.Stage, ...], color: str) -> tuple[s.Stage, ...]:
    """Return stages whose normalization has the numbers of this colour."""
    channels = 1 if color == "gray" else 3
    return tuple(_normalize(channels, one.dtype, one.layout) if isinstance(one, Normalize) else one for one in chain)
