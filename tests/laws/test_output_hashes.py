"""Hashes of the CPU's outputs, recorded before its code changed: each output keeps its bits.

A case is a pipeline and a set of images; its hash covers the results of all images with several random keys each. The
images are made by integer arithmetic, and the JPEGs are written by hand, so no encoder takes part.

The hashes hold for the versions of requirements.txt on x86-64 processors with AVX2 and FMA, AVX-512 or not, with any
number of torch's threads. On older processors torch and OpenCV round some levels otherwise, and
other versions of these libraries may do so: then the test is skipped.

A case that differs is a changed pixel, which users' models see. If that is wanted, record all cases anew:

    python -m tests.laws.test_output_hashes
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from gpuflow.decode.codecs import TEST_JPEG
from gpuflow.errors import BadSampleError, ConfigError
from gpuflow.execute.cpu.masks import mask_maps
from gpuflow.execute.cpu.runner import CpuRunner
from gpuflow.pipeline import stage as s
from gpuflow.pipeline.program import Program
from gpuflow.pipeline.views import AnyProgram, View, ViewsPipeline, ViewsProgram, slot_of, slots_of
from gpuflow.sources import Payload
from gpuflow.stages import STAGES, CenterCrop, Decode
from tests.images import Pixels, as_array, tiny_jpeg, turned
from tests.laws.test_stage_laws import EXAMPLES
from tests.packages.toning.toning import MaskBlue, Tone
from tests.running import keys_of, program_of

RECORD = Path(__file__).with_name("output_hashes.json")
PINS = Path(__file__).parents[2] / "requirements.txt"
Color = Literal["rgb", "bgr", "gray"]
LIBRARIES = ("torch", "torchvision", "numpy", "opencv-python-headless")


def _other_machine() -> str | None:
    """Return why levels may be rounded otherwise here than where the hashes were recorded; None if they are not."""
    pins = dict(line.split("==") for line in PINS.read_text().splitlines() if "==" in line)
    for name in LIBRARIES:
        version = importlib.metadata.version(name).partition("+")[0]
        if version != pins[name]:
            return f"the hashes are of {name} {pins[name]}, not {version}"
    capability = torch.backends.cpu.get_cpu_capability()
    return None if capability in ("AVX2", "AVX512") else f"torch computes by {capability}, not by AVX2 or AVX512"


# --- images ----------------------------------------------------------------------------------------------------------


def picture(height: int, width: int, channels: int) -> Pixels:
    """Return smooth waves, edges of rectangles, noise and flat black and white, by integer arithmetic alone."""
    y, x, c = np.ogrid[:height, :width, :channels]
    waves = np.abs((3 * x + 2 * y + (5 + c) * x * y // 64 + 80 * c) % 510 - 255)
    edges = ((x // 11 + y // 7 + c) % 3) * 60 - 60
    noise = (x * 374761393 + y * 668265263 + c * 2246822519 + height * width) & 0xFFFFFFFF
    noise = ((noise ^ (noise >> 13)) * 1274126177) & 0xFFFFFFFF
    noise = (noise ^ (noise >> 16)) & 0xFF
    levels = np.where((x // 29 + y // 31) % 4 == 1, noise, waves + edges * ((x // 23) % 2) + (noise >> 5))
    return np.clip(levels, 0, 255).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class Batch:
    """crop: the height and width of results that would have no fixed size."""

    decoder: s.Decoder
    images: list[Pixels]
    keys: s.Keys
    crop: tuple[int, int]

    @classmethod
    def of(cls, color: Color, crop: tuple[int, int], *sizes: tuple[int, int, int]) -> Batch:
        """Return images of (height, width), each `count` times with different keys."""
        channels = 1 if color == "gray" else 3
        images = [picture(height, width, channels) for height, width, count in sizes for _ in range(count)]
        return cls(Decode(color=color), images, keys_of(len(images), seed=7, epoch=1, first=10**9), crop)


BATCHES = {
    "photos": Batch.of("rgb", (200, 260), (97, 131, 6), (375, 500, 1), (64, 23, 2)),
    "thin": Batch.of("rgb", (50, 140), (1, 1, 2), (1, 37, 2), (41, 1, 2), (4, 4, 2), (2, 3, 2), (13, 127, 1)),
    "gray": Batch.of("gray", (120, 150), (61, 83, 3), (427, 640, 1), (1, 1, 1), (1, 19, 1), (17, 1, 1)),
}
JPEGS = (
    TEST_JPEG.tobytes(),  # 4:2:0 with waves and an edge
    turned(TEST_JPEG.tobytes(), 6),
    tiny_jpeg(97, 131, [(2, 2), (1, 1), (1, 1)]),
    tiny_jpeg(131, 61, [(2, 1), (1, 1), (1, 1)]),
    tiny_jpeg(64, 83, [(1, 2), (1, 1), (1, 1)]),
    tiny_jpeg(101, 57, [(4, 1), (1, 1), (1, 1)]),
    tiny_jpeg(53, 67, [(1, 1), (1, 1), (1, 1)]),
    tiny_jpeg(47, 59, [(1, 1)]),
)

# --- pipelines -------------------------------------------------------------------------------------------------------

FILTERS = tuple(
    {"interpolation": interpolation, "antialias": antialias}
    for interpolation in ("nearest", "bilinear", "bicubic")
    for antialias in (True, False)
)[1:]  # nearest knows no antialias
BORDERS = ("constant", "edge", "reflect", "symmetric")
COLORS: tuple[Sequence[str], ...] = (
    ["brightness(amount=(1.4, 1.4))"],
    ["contrast(amount=(0.3, 1.9))"],
    ["saturation(amount=(1.8, 1.8))"],
    ["hue(amount=0.5)"],
    ["grayscale()"],
    ["posterize(bits=2)"],
    ["solarize(threshold=100)"],
    ["equalize()"],
    ["autocontrast()"],
    ["invert(probability=0.5)"],
    ["random_erasing(probability=1.0, value='random')"],
    ["color_jitter(brightness=0.8, contrast=0.8, saturation=0.8, hue=0.4)"],
    ["tone()"],
    ["color_jitter(hue=0.2, contrast=0.5)", "invert()", "equalize()", "saturation(amount=0.0)"],
)
"""As YAML names them: `repr` of a stage, which evaluates."""
HALVES = "mean=(0.5, 0.4, 0.6), std=(0.2, 0.25, 0.3)"


def _pipelines() -> Iterator[tuple[s.Stage, ...]]:
    """Yield the examples of all stages, then a grid of parameters and orders that they leave out."""
    yield from ((stage,) for stage in EXAMPLES if not isinstance(stage, s.Decoder | s.Opaque))
    yield from map(_stages, _texts())


def _texts() -> Iterator[Sequence[str]]:
    for filters in FILTERS:
        how = ", ".join(f"{name}={value!r}" for name, value in filters.items())
        for size in ((1, 1), (1, 50), (31, 1), (33, 47), (97, 60), (150, 131), (211, 307)):
            yield [f"resize(height={size[0]}, width={size[1]}, {how})"]
        yield [f"resize(longer=29, {how})"]
        yield [f"resize(shorter=110, {how})", "center_crop(size=96)"]
        yield [f"random_resized_crop(size=32, {how})", "flip(horizontal=0.5)", "normalize()"]
        yield [f"random_resized_crop(size=(90, 77), scale=(0.01, 0.1), {how})", "flip(vertical=0.5)"]
        yield ["flip(horizontal=0.5, vertical=0.5)", f"random_resized_crop(size=(23, 40), {how})"]
        yield [f"letterbox(size=(60, 75), fill=(9, 200, 50), {how})"]
        yield ["center_crop(size=90)", f"resize(height=40, width=55, {how})", "random_crop(size=30)"]
        yield [f"resize(height=80, width=70, {how})", "random_crop(size=64, padding=9, fill=7)", "flip(horizontal=1.0)"]
        yield [f"resize(height=50, width=60, {how})", f"resize(height=71, width=40, {how})", "center_crop(size=80)"]
        yield ["flip(horizontal=1.0)", f"resize(height=20, width=90, {how})", "flip(horizontal=0.5, vertical=1.0)"]
    for border, interpolation in itertools.product(BORDERS, ("nearest", "bilinear")):
        how = f"interpolation={interpolation!r}, border={border!r}"
        fill = ", fill=(9, 200, 50)" if border == "constant" else ""
        yield [f"rotate(degrees=180, {how}{fill})", "center_crop(size=(140, 150))"]
        yield ["center_crop(size=120)", f"affine(degrees=40, scale=(0.2, 3), shear=20, translate=(0.3, 0.3), {how})"]
        yield ["resize(height=64, width=50)", f"perspective(distortion_scale=0.8, probability=1.0, {how}{fill})"]
        yield [f"warp_affine(matrix=((0.3, 0.1, 9.5), (-0.2, 0.4, 30.0)), size=(120, 110), {how})"]
        yield [f"affine(degrees=10, {how})", "random_crop(size=30, pad_if_needed=True)", "flip(horizontal=0.5)"]
        yield ["resize(height=270, width=290)", f"rotate(degrees=(33, 33), {how}{fill})", "normalize(dtype='float16')"]
    for border in BORDERS[:2]:
        yield ["center_crop(size=50)", f"pad(padding=(40, 3, 0, 17), border={border!r})"]
        yield [f"random_crop(size=60, padding=30, pad_if_needed=True, border={border!r})", "resize(height=9, width=70)"]
    for colors in COLORS:
        yield ["resize(height=61, width=83)", *colors]
        yield ["random_resized_crop(size=40)", *colors, "normalize()"]
        yield [*colors, "random_resized_crop(size=30)", "flip(horizontal=0.5)"]
    for dtype, layout in itertools.product(("float32", "float16", "bfloat16"), ("nchw", "nhwc")):
        to = f"dtype={dtype!r}, layout={layout!r}"
        yield ["resize(height=33, width=47)", f"normalize({HALVES}, {to})"]
        yield ["resize(height=33, width=47)", f"normalize(mean=(0.45,), std=(0.225,), {to})"]
        yield ["center_crop(size=51)", "color_jitter(contrast=0.5, hue=0.5)", f"normalize({HALVES}, {to})"]
        yield ["center_crop(size=51)", "brightness(amount=0.9)", f"normalize(mean=(0.45,), std=(0.225,), {to})"]
    for policy in ("trivial_augment", "rand_augment", "auto_augment"):
        yield ["random_resized_crop(size=56)", "flip(horizontal=0.5)", f"{policy}()", "normalize()"]
        yield ["resize(height=90, width=70)", f"{policy}(interpolation='bilinear')", "random_erasing()"]
    yield ["resize(height=70, width=60)", "gaussian_blur(kernel_size=23, sigma=4)", "sharpness(amount=(0.0, 3.0))"]
    yield [
        "sharpness(amount=(2.5, 2.5))",
        "random_resized_crop(size=40)",
        "gaussian_blur(kernel_size=5)",
        "normalize()",
    ]
    yield ["gaussian_blur(kernel_size=(1, 9), sigma=2)", "resize(height=33, width=47)"]
    yield ["rotate(degrees=20)", "resize(height=40, width=44)", "rotate(degrees=20, border='edge')", "invert()"]
    yield ["resize(height=90, width=99)", "rotate(degrees=30, expand=True)", "center_crop(size=70)", "normalize()"]


ON_JPEGS: tuple[Sequence[str], ...] = (
    ["resize(height=33, width=47)"],
    ["resize(shorter=40)", "center_crop(size=32)", "normalize()"],
    ["random_resized_crop(size=32)", "flip(horizontal=0.5)", "normalize()"],
    ["random_resized_crop(size=48, scale=(0.01, 0.1), interpolation='bicubic')"],
    ["random_crop(size=17)", "flip(horizontal=0.5)", "normalize(layout='nhwc')"],
    ["center_crop(size=1)"],
    ["center_crop(size=140)"],
    ["random_crop(size=40)", "resize(height=50, width=30, interpolation='nearest')"],
    ["rotate(degrees=30)", "resize(height=33, width=47)"],
    ["random_crop(size=30)", "affine(degrees=30)"],
    ["color_jitter(contrast=0.5)", "random_resized_crop(size=24)"],
    ["gaussian_blur(kernel_size=5)", "random_crop(size=24)"],
)
DECODERS = (Decode(), Decode(color="bgr"), Decode(color="gray"), Decode(orientation="apply"))
VIEWS: tuple[Sequence[Sequence[str]], ...] = (
    (
        ["random_resized_crop(size=24)", "flip(horizontal=0.5)", "normalize()"],
        ["color_jitter(brightness=0.4, hue=0.1)", "random_resized_crop(size=(13, 11), scale=(0.05, 0.4))"],
    ),
    (
        ["gaussian_blur(kernel_size=3)", "resize(height=7, width=9)", "normalize(dtype='bfloat16', layout='nhwc')"],
        ["rotate(degrees=30)", "center_crop(size=20)"],
        ["invert()", "center_crop(size=20)"],
    ),
)
MASKED: tuple[Sequence[str], ...] = (
    ["random_resized_crop(size=48)", "flip(horizontal=0.5)"],
    ["letterbox(size=70)", "affine(degrees=30, scale=(0.5, 2))"],
    ["perspective(probability=1.0)", "random_crop(size=30, padding=5, pad_if_needed=True)"],
    ["rotate(degrees=30, border='reflect', interpolation='nearest')", "resize(height=33, width=47)"],
    ["trivial_augment()", "center_crop(size=80)"],
)


def _stages(texts: Sequence[str]) -> tuple[s.Stage, ...]:
    return tuple(eval(text, {**STAGES, "tone": Tone, "mask_blue": MaskBlue}) for text in texts)


def _sized(decoder: s.Decoder, stages: tuple[s.Stage, ...], size: tuple[int, int]) -> Program | None:
    """Return a program of stages, with a crop where results have no fixed size; None if they take no such images."""
    crop = CenterCrop(size=size)
    for chain in (stages, (*stages, crop), (crop, *stages)):
        try:
            return program_of(decoder, *chain)
        except ConfigError:
            continue
    return None


def _views(decoder: s.Decoder, chains: Sequence[tuple[s.Stage, ...]]) -> ViewsProgram:
    programs = tuple(program_of(decoder, *stages) for stages in chains)
    views = tuple(View(f"view{i}", 1 + i, one.pipeline) for i, one in enumerate(programs))
    return ViewsProgram(pipeline=ViewsPipeline("views", views), programs=programs)


# --- hashes ----------------------------------------------------------------------------------------------------------


def _hash(parts: Sequence[NDArray[Any] | None]) -> str:
    """Return a short hash of arrays; None stands for a bad sample."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(b"bad" if part is None else repr((part.shape, part.dtype.name)).encode() + part.tobytes())
    return whole.hexdigest()[:16]


Call = Callable[[CpuRunner, Any], list[BadSampleError | None]]


def _hash_of_run(program: AnyProgram, count: int, run: Call) -> str:
    """Return the hash of a batch of `count` samples that `run` writes to slots."""
    shape, dtype = slot_of(program)
    memory = np.zeros((count, *shape), dtype)
    slots = slots_of(program, memory)
    faults = run(CpuRunner(program), slots)
    views = [slots] if isinstance(slots, np.ndarray) else [one for view in slots.views for one in view]
    return _hash([None if fault else view[i] for view in views for i, fault in enumerate(faults)])


def _name(batch: str, decoder: s.Decoder, stages: Sequence[Any]) -> str:
    chain = " -> ".join(map(repr, stages))
    return f"{batch}: {chain}" if decoder == Decode() else f"{batch}: {decoder!r} -> {chain}"


def _cases() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield each case: its name and a function that returns the hash."""
    for stages, (name, batch) in itertools.product(_pipelines(), BATCHES.items()):
        if (program := _sized(batch.decoder, stages, batch.crop)) is not None:
            yield _name(name, Decode(), stages), _on_images(program, batch)
    for texts in VIEWS:
        chains = [_stages(one) for one in texts]
        views = _views(Decode(), chains)
        yield _name("photos", Decode(), chains), _on_images(views, BATCHES["photos"])
        yield _name("jpegs", Decode(), chains), _on_jpegs(views)
    for decoder, texts in itertools.product(DECODERS, ON_JPEGS):
        stages = _stages(texts)
        if (program := _sized(decoder, stages, (140, 140))) is not None:
            yield _name("jpegs", decoder, stages), _on_jpegs(program)
    for texts in MASKED:
        stages = _stages(texts)
        yield _name("masks", Decode(), stages), _on_masks(program_of(Decode(), *stages))


def _on_images(program: AnyProgram, batch: Batch) -> Callable[[], str]:
    images, keys = batch.images, batch.keys
    return lambda: _hash_of_run(program, len(images), lambda runner, slots: runner.run_images(images, keys, slots))


def _on_jpegs(program: AnyProgram) -> Callable[[], str]:
    samples = [as_array(data) for data in (*JPEGS, *JPEGS)]
    keys = keys_of(len(samples), seed=5)
    payload = Payload.of(samples)
    return lambda: _hash_of_run(program, len(samples), lambda runner, slots: runner.run(payload, keys, slots))


def _on_masks(program: Program) -> Callable[[], str]:
    keys, masks = BATCHES["photos"].keys, [image[..., 1] for image in BATCHES["photos"].images]
    sizes = np.array([mask.shape for mask in masks])
    return lambda: _hash(
        [one.apply(mask, 255) for one, mask in zip(mask_maps(program, keys, sizes), masks, strict=True)]
    )


def _record() -> dict[str, str]:
    hashes: dict[str, str] = {}
    for name, run in _cases():
        assert name not in hashes, f"two cases have the name {name}"
        hashes[name] = run()
    return hashes


def test_outputs_have_the_recorded_hashes() -> None:
    if (reason := _other_machine()) is not None:
        pytest.skip(reason)
    recorded, found = json.loads(RECORD.read_text()), _record()
    differing = sorted(name for name in recorded.keys() | found.keys() if recorded.get(name) != found.get(name))
    assert not differing, f"{len(differing)} of {len(found)} cases: {differing}"


if __name__ == "__main__":
    RECORD.write_text(json.dumps(_record(), indent=0, sort_keys=True) + "\n")
