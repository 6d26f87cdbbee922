"""Run by test_runner.py with TRITON_INTERPRET=1, in its own process: the GPU runner with a CPU in place of the GPU.

A device stream on the CPU and a libnvjpeg that decodes with OpenCV replace those of CUDA; all else is real.
Prints one line of JSON per case: differences from the CPU runner, and the calls. With the argument `C` it runs some of
the cases, and C code queues the work (gpu_call.c).
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import json
import random
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import patch

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from gpuflow.arrays import Bytes
from gpuflow.decode.libjpeg_turbo import find_libjpeg_turbo
from gpuflow.errors import BadSampleError
from gpuflow.execute.cpu.runner import CpuRunner
from gpuflow.execute.gpu import device_passes
from gpuflow.execute.gpu import results as results_of_passes
from gpuflow.execute.gpu.device_passes import DevicePasses, interleaved
from gpuflow.execute.gpu.passes import Pass, passes_of, passes_of_each
from gpuflow.execute.gpu.runner import GpuRunner, Prepared
from gpuflow.pipeline.program import Program, fold, trace
from gpuflow.pipeline.stage import FromRecord, ImageSpec, Keys, Opaque, Pipeline, Stage
from gpuflow.pipeline.views import STORAGE, as_batch, slot_of, slot_shape, slots_of, split
from gpuflow.runtime.memory import BytePool
from gpuflow.sources import Payload, lay_out
from gpuflow.stages import (
    Affine,
    Autocontrast,
    Brightness,
    CenterCrop,
    ColorJitter,
    Decode,
    Flip,
    GaussianBlur,
    IouCrop,
    Letterbox,
    Normalize,
    RandomCrop,
    RandomErasing,
    RandomResizedCrop,
    Resize,
    Rotate,
    ScaleJitter,
    Torchvision,
    WarpAffine,
    ZoomOut,
)
from gpuflow.torchpipe.nodes import GpuPreprocessor
from tests import images
from tests.datasets import Entries, views_program
from tests.execute.gpu.fake_driver import FakeDriver, copy_images, use_c_code
from tests.execute.kernels.quick_interpreter import use_large_tiles
from tests.host_stream import HostStream
from tests.packages.toning.toning import MaskBlue, Tone

REFUSED = b"the engines refuse this"

_interpreter = threading.Lock()
launches: Counter[str] = Counter()


def one_at_a_time(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Triton's interpreter is not for several threads. Counts the launches, too."""

    @functools.wraps(kernel)
    def run(*arguments: Any, **named: Any) -> Any:
        with _interpreter:
            launches[kernel.__name__] += 1
            return kernel(*arguments, **named)

    return run


owner: Any
KERNELS = (
    (device_passes, "resample_all"),
    (device_passes, "warp_all"),
    (device_passes, "adjust"),
    (device_passes, "smooth"),
)
for owner, kernel in KERNELS:
    setattr(owner, kernel, one_at_a_time(getattr(owner, kernel)))


class CpuLibrary:
    """Replaces `nvjpeg.NvjpegLibrary`. A call fails as a whole if it refuses one file.

    Like NVIDIA's engines, it decodes a call's images in turn into `ENGINES` memories, leaves the lower half of a
    damaged one as it is there, and copies all of it into the result.
    """

    ENGINES = 3
    version_info = (13, 3, 2)

    def __init__(self, channels: int) -> None:
        self._flag = cv2.IMREAD_IGNORE_ORIENTATION | (cv2.IMREAD_GRAYSCALE if channels == 1 else cv2.IMREAD_COLOR_RGB)
        self._sizes, self.calls, self.given = dict[int, int](), Counter[str](), set[bytes]()
        self._memories = [np.zeros((400, 400, channels), np.uint8) for _ in range(self.ENGINES)]
        self._regions: list[tuple[int, int, int, int]] = []

    def create(self, backend: int, device: None, pinned: None, flags: int, handle: Any) -> int:
        handle._obj.value = 11
        return 0

    def create_state(self, handle: Any, state: Any) -> int:
        state._obj.value = 22 + len(self._sizes)
        self._sizes[state._obj.value] = 0
        return 0

    def initialize(self, handle: Any, state: Any, size: int, threads: int, output: int) -> int:
        self._sizes[state] = size
        return 0

    def create_parameters(self, handle: Any, parameters: Any) -> int:
        self._regions.append((0, 0, -1, -1))
        parameters._obj.value = len(self._regions)
        return 0

    def set_format(self, parameters: Any, output: int) -> int:
        return 0

    def set_region(self, parameters: Any, *region: int) -> int:
        x, y, width, height = region
        self._regions[getattr(parameters, "value", parameters) - 1] = x, y, width, height
        return 0

    def decode_regions(
        self, handle: Any, state: Any, data: int, lengths: int, images: int, parameters: int, stream: int
    ) -> int:
        numbers = (ctypes.c_uint64 * self._sizes[state]).from_address(parameters)[:]
        return self._decode(state, data, lengths, images, [self._regions[number - 1] for number in numbers])

    def destroy_parameters(self, parameters: Any) -> int:
        return 0

    def decode(self, handle: Any, state: Any, data: int, lengths: int, images: int, stream: int) -> int:
        return self._decode(state, data, lengths, images, [None] * self._sizes[state])

    def _decode(
        self, state: Any, data: int, lengths: int, images: int, regions: Sequence[tuple[int, int, int, int] | None]
    ) -> int:
        """regions: the x, y, width and height of the part of each image that is written; None for all of it."""
        self.calls["decode"] += 1
        size = self._sizes[state]
        starts, sizes = (np.ctypeslib.as_array((ctypes.c_uint64 * size).from_address(x)) for x in (data, lengths))
        targets = np.ctypeslib.as_array((ctypes.c_uint64 * (8 * size)).from_address(images)).reshape(-1, 8)
        files = [ctypes.string_at(int(a), int(n)) for a, n in zip(starts, sizes, strict=True)]
        self.given.update(files)
        if any(REFUSED in file for file in files):
            return 6
        self.calls["images"] += len(files)
        for place, (file, target, region) in enumerate(zip(files, targets, regions, strict=True)):
            pixels = cv2.imdecode(np.frombuffer(file, np.uint8), self._flag)
            assert pixels is not None
            height, width = pixels.shape[:2]
            memory = self._memories[place % self.ENGINES]
            written = height if complete(file, height, width) else height // 2
            memory[:written, :width] = pixels.reshape(height, width, -1)[:written]
            left, top, columns, rows = region or (0, 0, width, height)
            assert 0 <= left < left + columns <= width and 0 <= top < top + rows <= height
            shown = np.ascontiguousarray(memory[top : top + rows, left : left + columns])
            assert int(target[4]) == shown[0].nbytes
            ctypes.memmove(int(target[0]), shown.ctypes.data, shown.nbytes)
        return 0

    def destroy_state(self, state: Any) -> int:
        return 0

    def destroy(self, handle: Any) -> int:
        return 0


def complete(file: bytes, height: int, width: int) -> bool:
    """Whether a JPEG decodes without an error or a warning."""
    data, buffer = np.frombuffer(file.rstrip(b"\0"), np.uint8), np.empty(height * width * 3, np.uint8)
    library = find_libjpeg_turbo()
    assert library is not None
    return library.decode(data, "rgb", (height, width), None, buffer) is not None


def files() -> list[bytes]:
    """Chunks of files that the engines decode, files that only the CPU decodes, and files that nothing decodes. EXIF
    data turn some of them."""
    found = [
        images.turned(images.jpeg(images.photo(30 + 3 * i, 44 - 2 * i, seed=i), kind), turn)
        for i, (kind, turn) in enumerate([("4:2:0", 6), ("4:2:2", 1), ("4:4:4", 3), ("4:4:0", 5), ("4:2:0", 8)])
    ]
    pixels = images.photo(33, 29, seed=9)
    found += [
        images.png(pixels),
        images.turned(images.jpeg(pixels, progressive=True), 7),
        images.jpeg(pixels)[:300],
        b"no image",
    ]
    found.append(images.encode(Image.fromarray(pixels), "JPEG", comment=REFUSED))
    found.append(images.jpeg(images.photo(31, 27, seed=10)))
    return found


def payload(contents: Sequence[bytes]) -> Payload:
    sizes = [len(data) for data in contents]
    errors = [None] * (len(contents) - 1) + ["permission denied"]
    offsets, end = lay_out(sizes)
    buffer = np.full(end, 0xAB, np.uint8)
    for offset, data in zip(offsets, contents, strict=True):
        buffer[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
    return Payload(buffer=buffer, offsets=offsets, sizes=sizes, errors=errors)


PIPELINES: dict[str, tuple[Stage, ...]] = {
    "crop": (
        Decode(orientation="apply"),
        RandomResizedCrop(size=13),
        Flip(horizontal=0.5),
        Normalize(mean=(0,) * 3, std=(1 / 255,) * 3),
    ),
    "levels": (Decode(), Resize(shorter=16), CenterCrop(size=16)),
    "objects": (
        Decode(),
        ZoomOut(fill=9, scale=(1.0, 2.0), probability=0.7),
        IouCrop(),
        Flip(horizontal=0.5),
        ScaleJitter(size=20, scale=(0.5, 1.5)),
        RandomCrop(size=16, pad_if_needed=True, fill=114),
    ),
    "gray": (Decode(color="gray"), Resize(height=9, width=11)),
    "two resamplings": (Decode(), Resize(height=20, width=17), Resize(height=9, width=12), RandomCrop(size=8)),
    "colours": (
        Decode(),
        RandomResizedCrop(size=12),
        ColorJitter(brightness=0.4, contrast=0.4, saturation=0.3, hue=0.1),
        Normalize(mean=(0,) * 3, std=(1 / 255,) * 3, dtype="float16", layout="nhwc"),
    ),
    "new colours": (
        Decode(),
        RandomResizedCrop(size=12),
        Brightness(amount=0.1),
        RandomErasing(probability=0.8, value="random"),
        GaussianBlur(kernel_size=3),
        Tone(power=(0.9, 1.1)),
        MaskBlue(),
        Autocontrast(probability=0.0),
        Normalize(mean=(0,) * 3, std=(1 / 255,) * 3),
    ),
    "torchvision": (
        Decode(),
        RandomResizedCrop(size=12),
        Torchvision(name="RandomErasing", parameters=(("p", 0.9), ("value", 3))),
        Torchvision(name="GaussianBlur", parameters=(("kernel_size", 3), ("sigma", 0.7))),
        Normalize(),
    ),
    "warps": (
        Decode(orientation="apply"),
        Affine(degrees=40, translate=(0.1, 0.1), scale=(0.7, 1.3), fill=114),
        CenterCrop(size=20),
        Letterbox(size=(20, 26), fill=(9, 200, 50)),
        Rotate(degrees=180, border="reflect"),
        WarpAffine(matrix=FromRecord("align"), border="reflect"),
        Flip(horizontal=0.5),
        Normalize(mean=(0,) * 3, std=(1 / 255,) * 3),
    ),
    "other sizes": (
        Decode(),
        Affine(degrees=40, scale=(0.7, 1.3), fill=114),
        Flip(horizontal=0.5),
        Letterbox(size=24),
        ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2),
        Normalize(mean=(0,) * 3, std=(1 / 255,) * 3),
    ),
    "misfits": (Decode(), RandomCrop(size=30)),
    "misfits, too large": (Decode(max_pixels=4100), Resize(shorter=55), CenterCrop(size=16)),
}


TWICE = ("crop", "misfits")
"""Cases that run twice; in the second run no file is checked."""


def cases(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """These of PIPELINES with decode buffers of two sizes in bytes."""
    for name in names:
        for decode_bytes in (1 << 20, 6000):
            pipeline = Pipeline(name, PIPELINES[name])
            program = fold(pipeline, trace(pipeline))
            passes = passes_of(program)
            assert not isinstance(passes, str), passes
            device_stream, library = HostStream(), CpuLibrary(1 if name == "gray" else 3)
            chunk = payload([*files(), b"\0" * 40])
            maps = np.eye(2, 3) + np.random.default_rng(0).uniform(-0.2, 0.2, (len(chunk), 2, 3))
            boxes = np.array([[2, 3, 14, 12], [5, 1, 9, 15]]) + np.zeros((len(chunk), 1, 1))
            values = {value: boxes if value.form == "boxes" else maps for value in program.record_values}
            keys = Keys(0, 1, np.arange(100, 100 + len(chunk)), values=values)
            substitutes: Any = (device_stream, library)
            runner = GpuRunner(program, [passes], *substitutes, backend="hardware", decode_bytes=decode_bytes)
            slots = runner.slots(len(chunk)).fill_(0)
            library.calls.clear()
            device_stream.calls.clear()
            indices = list(range(50, 50 + len(chunk)))
            faults = runner.launch(runner.prepare(chunk, keys, indices), slots)
            decodes, first = library.calls["decode"], (runner.engine_images, runner.cpu_images)
            calls, copies = [library.calls["images"]], [device_stream.calls["copies"]]
            again, new = slots, set[bytes]()
            if name in TWICE:
                given = library.given.copy()
                again = runner.slots(len(chunk)).fill_(0)
                runner.launch(runner.prepare(chunk, keys, indices), again)
                calls.append(library.calls["images"] - calls[0])
                copies.append(device_stream.calls["copies"] - copies[0])
                new = library.given - given
            expected = np.zeros((len(chunk), *slot_shape(program.result)), STORAGE[program.result.dtype])
            rights = CpuRunner(program).run(chunk, keys, expected)
            rights[-1] = BadSampleError("read", "permission denied")
            good = [i for i, fault in enumerate(rights) if fault is None]
            assert torch.equal(slots[good], again[good])
            difference = (slots[good].double() - as_batch(expected, program.result)[good].double()).abs()
            yield {
                "case": f"{name}, {decode_bytes} bytes",
                "faults": [str(a) for a, b in zip(faults, rights, strict=True) if str(a) != str(b)],
                "good": len(good),
                "max": float(difference.max()),
                "mean": float(difference.mean()),
                "engines": first[0],
                "cpu": first[1],
                "decodes": decodes,
                "images": calls,
                "new": len(new),
                "copies": copies,
            }


def views(name: str, last: Entries) -> dict[str, Any]:
    """Views of images that are decoded once: files of all kinds, chunks that share a call, one and two images.

    last: the stages that end a view whose images are turned, and may differ in size until then.
    """
    decode: Entries = ({"decode": {}},)
    levels = {"mean": (0, 0, 0), "std": (1 / 255,) * 3}
    program = views_program(
        {
            "global": (2, [*decode, {"random_resized_crop": {"size": 13}}, {"normalize": levels}]),
            "colours": (
                1,
                [
                    *decode,
                    {"random_resized_crop": {"size": 9}},
                    {"color_jitter": {"brightness": 0.4, "hue": 0.1}},
                    {"normalize": {**levels, "dtype": "float16", "layout": "nhwc"}},
                ],
            ),
            "turned": (1, [*decode, {"affine": {"degrees": 40}}, *last]),
            "large": (1, [*decode, {"random_crop": {"size": 28}}]),
        }
    )
    passes = passes_of_each(program)
    assert not isinstance(passes, str), passes
    device_stream, library, contents, worst = HostStream(), CpuLibrary(3), files(), 0.0
    substitutes: Any = (device_stream, library)
    options: dict[str, Any] = {"backend": "hardware", "decode_bytes": 1 << 20, "later_images": len(contents)}
    runner = GpuRunner(program, passes, *substitutes, **options)

    def prepare(chosen: Sequence[int]) -> tuple[Prepared, Any]:
        chunk = Payload.of([contents[i] for i in chosen], lambda size: np.full(size, 0xAB, np.uint8))
        return runner.prepare(chunk, Keys(3, 1, np.array(chosen)), list(chosen)), runner.slots(len(chosen))

    shape, dtype = slot_of(program)
    expected = np.zeros((len(contents), *shape), dtype)
    keys = Keys(3, 1, np.arange(len(contents)))
    rights = CpuRunner(program).run(Payload.of(contents), keys, slots_of(program, expected))
    right = split(slots_of(program, torch.from_numpy(expected)))
    faults: list[str] = []

    def launch(chosen: Sequence[int], prepared: Prepared, slots: Any, *ahead: Prepared) -> None:
        nonlocal worst
        found = list(map(str, runner.launch(prepared, slots, ahead)))
        faults.extend(mine for mine, i in zip(found, chosen, strict=True) if mine != str(rights[i]))
        good = [row for row, i in enumerate(chosen) if rights[i] is None]
        for mine, whole in zip(split(slots), right, strict=True):
            apart = mine[good].double() - whole[[chosen[row] for row in good]].double()
            worst = max(worst, float(apart.abs().max()))

    everything = range(len(contents))
    launch(everything, *prepare(everything))
    engines, cpu = runner.engine_images, runner.cpu_images
    (first, first_slots), (second, second_slots) = prepare([0, 1, 5]), prepare([4, 6])
    library.calls.clear()
    launch([0, 1, 5], first, first_slots, second)
    decoded = [library.calls["images"]]
    launch([4, 6], second, second_slots)
    decoded.append(library.calls["images"])
    counts = []
    for chosen in ([0], [0, 4]):
        prepared, slots = prepare(chosen)
        launches.clear()
        device_stream.calls.clear()
        launch(chosen, prepared, slots)
        counts.append({**launches, "copies": device_stream.calls["copies"]})
    return {
        "case": name,
        "faults": faults,
        "good": sum(fault is None for fault in rights),
        "max": worst,
        "mean": 0.0,
        "decoded": decoded,
        "engines": engines,
        "cpu": cpu,
        "counts": counts,
    }


def served() -> dict[str, Any]:
    """The same runner behind a service: several files at a time, then one."""
    pipeline = Pipeline("serve", PIPELINES["levels"])
    program = fold(pipeline, trace(pipeline))
    passes = passes_of(program)
    assert not isinstance(passes, str), passes
    device_stream, made = HostStream(), list[int]()

    def make(size: int) -> Bytes:
        made.append(size)
        return np.empty(size, np.uint8)

    substitutes: Any = (device_stream, CpuLibrary(3))
    runner = GpuRunner(program, [passes], *substitutes, backend="hardware", decode_bytes=1 << 20)
    serving = GpuPreprocessor(runner, substitutes[0], BytePool(make=make))
    contents = [*files(), b""]
    found = [*serving.run(contents), *serving.run(contents[:1])]
    expected = np.zeros((len(contents), *slot_shape(program.result)), STORAGE[program.result.dtype])
    arrays = [np.frombuffer(data, np.uint8) for data in contents]
    rights = CpuRunner(program).run(Payload.of(arrays), Keys(0, 0, np.zeros(len(contents), np.int64)), expected)
    images = [*as_batch(expected, program.result), as_batch(expected, program.result)[0]]
    faults, worst = [], 0.0
    for mine, right, image in zip(found, [*rights, rights[0]], images, strict=True):
        if isinstance(mine, torch.Tensor):
            assert mine.shape == (1, 3, 16, 16)
            worst = max(worst, float((mine[0].double() - image.double()).abs().max()))
        if str(right) != (str(None) if isinstance(mine, torch.Tensor) else str(mine)):
            faults.append(str(mine))
    return {"case": "served", "faults": faults, "max": worst, "mean": 0.0, "buffers": len(made), "good": len(found)}


def histories() -> dict[str, Any]:
    """Chunks of valid and damaged files in several orders: each file's result, and the result of a new runner."""
    pipeline = Pipeline("history", PIPELINES["levels"])
    program = fold(pipeline, trace(pipeline))
    passes = passes_of(program)
    assert not isinstance(passes, str), passes
    rng = random.Random(0)
    pool = []
    for number in range(10):
        size = rng.randint(17, 40), rng.randint(17, 40)
        data = images.jpeg(images.photo(*size, seed=number), rng.choice(["4:2:0", "4:2:0", "4:2:2", "4:4:4"]))
        scan = data.index(b"\xff\xda") + 14
        cut = data[: rng.randint(scan, len(data) - 3)] + b"\xff\xd9"
        pool.append(cut if number % 2 else data)
    middle = (pool[0].index(b"\xff\xda") + len(pool[0])) // 2
    pool.append(pool[0][:middle] + b"\xff\xd7" + pool[0][middle + 2 :])

    def new() -> GpuRunner:
        substitutes: Any = (HostStream(), CpuLibrary(3))
        return GpuRunner(program, [passes], *substitutes, backend="hardware", decode_bytes=1 << 20)

    def run(runner: GpuRunner, chosen: Sequence[int]) -> torch.Tensor:
        chunk = Payload.of([pool[i] for i in chosen], lambda size: np.full(size, 0xAB, np.uint8))
        keys = Keys(0, 0, np.zeros(len(chunk), np.int64))
        slots: torch.Tensor = runner.slots(len(chunk)).fill_(7)
        assert runner.launch(runner.prepare(chunk, keys, chosen), slots) == [None] * len(chunk)
        return slots

    fresh = {i: run(new(), [i])[0] for i in range(len(pool))}
    expected = np.zeros((len(pool), *slot_shape(program.result)), np.uint8)
    CpuRunner(program).run(Payload.of(pool), Keys(0, 0, np.zeros(len(pool), np.int64)), expected)
    apart = [
        (fresh[i].int() - as_batch(expected, program.result)[i].int()).abs().max().item() for i in range(len(pool))
    ]
    runner, wrong = new(), 0
    for _ in range(6):
        chosen = [rng.randrange(len(pool)) for _ in range(rng.randint(1, 9))]
        wrong += sum(not torch.equal(image, fresh[i]) for i, image in zip(chosen, run(runner, chosen), strict=True))
    found: dict[str, Any] = {"faults": [], "max": max(apart), "mean": 0.0, "wrong": wrong, "cpu": runner.cpu_images}
    marked = new()
    run(marked, [len(pool) - 1])
    return {"case": "histories", **found, "marked": [marked.engine_images, marked.cpu_images]}


@dataclass(frozen=True, kw_only=True, repr=False)
class Inverted(Opaque):
    """Inverts images, and refuses dark ones.

    least: the lowest mean of the levels of an image that is not refused. way: when it refuses a batch, if not at once.
    """

    stage_name: ClassVar[str] = "inverted"
    calls: ClassVar[list[int]] = []

    least: float = 0
    way: str = "at once"

    def output(self, spec: ImageSpec) -> ImageSpec:
        return spec

    def apply(self, image: torch.Tensor, seed: int) -> torch.Tensor:
        if (image.double().mean((-3, -2, -1)) < self.least).any():
            raise ValueError("the image is dark")
        return image.bitwise_not()

    def apply_batch(self, images: torch.Tensor, seeds: Any) -> torch.Tensor:
        self.calls.append(len(images))
        if self.way == "after writing":
            images.add_(1)
        elif self.way == "on the GPU":
            raise RuntimeError("it has no form for this device")
        elif self.way == "after an error of CUDA":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().apply_batch(images, seeds)


def refusals() -> dict[str, Any]:
    """An opaque stage that refuses some images of a chunk: what becomes of these, and of the others."""
    contents = [images.jpeg(images.photo(30 + i, 44 - i, seed=i) // (3 if i in (2, 5) else 1)) for i in range(7)]
    chunk = Payload.of([*contents, images.png(images.photo(30, 30) // 3)], lambda size: np.full(size, 0xAB, np.uint8))
    keys, count = Keys(3, 1, np.arange(len(chunk))), len(chunk)

    def programs(**parameters: Any) -> tuple[Program, tuple[Pass, ...]]:
        stages = (Decode(), Resize(height=9, width=12), Inverted(**parameters), CenterCrop(size=8), Normalize())
        program = fold(pipeline := Pipeline("refusals", stages), trace(pipeline))
        passes = passes_of(program)
        assert not isinstance(passes, str), passes
        return program, passes

    def launch(**parameters: Any) -> tuple[list[str], torch.Tensor, GpuRunner]:
        program, passes = programs(**parameters)
        substitutes: Any = (HostStream(), CpuLibrary(3))
        runner = GpuRunner(program, [passes], *substitutes, backend="hardware", decode_bytes=1 << 20)
        Inverted.calls.clear()
        slots = runner.slots(count).fill_(0)
        return list(map(str, runner.launch(runner.prepare(chunk, keys), slots))), slots, runner

    def raised(**parameters: Any) -> list[Any]:
        try:
            launch(**parameters)
        except (ValueError, RuntimeError) as error:
            return [type(error).__name__, str(error), *getattr(error, "__notes__", []), list(Inverted.calls)]
        return []

    _, every, _ = launch()
    found, slots, runner = launch(least=60)
    calls = list(Inverted.calls)
    program, passes = programs(least=60)
    expected = np.zeros((count, *slot_shape(program.result)), STORAGE[program.result.dtype])
    rights = list(map(str, CpuRunner(program).run(chunk, keys, expected)))
    good = [i for i, fault in enumerate(found) if fault == "None"]
    stream: Any = HostStream()
    held = [torch.from_numpy(images.photo(20, 30, seed=i) // (3 if i == 1 else 1)).permute(2, 0, 1) for i in range(3)]
    of_images = DevicePasses(passes, stream).run_images(
        interleaved(held, stream), keys.take(slice(3)), torch.zeros(3, *slots.shape[1:])
    )
    return {
        "case": "refusals",
        "faults": [mine for mine, right in zip(found, rights, strict=True) if mine != right],
        "max": float((slots[good] - every[good]).abs().max()),
        "mean": 0.0,
        "found": found,
        "calls": calls,
        "counts": [runner.engine_images, runner.cpu_images],
        "of_images": list(map(str, of_images)),
        "of_dark_images": launch(least=256)[0],
        "raised": {way: raised(least=60, way=way) for way in ("after writing", "on the GPU", "after an error of CUDA")},
    }


FILES = 26
"""Few, because each takes 0.04 s in the interpreter, and enough for calls of several chunks."""


def mixed_files() -> list[bytes]:
    """Many files of all kinds of calls, and a trickle of files that the CPU decodes or nothing does."""
    rng = random.Random(5)
    found = []
    for number in range(FILES):
        size = rng.randint(17, 30), rng.randint(17, 30)
        kind = rng.choice(["4:2:0"] * 6 + ["4:4:4"] * 2 + ["4:2:2"])
        file = images.jpeg(images.photo(*size, seed=number), kind, progressive=number % 11 == 3)
        found.append(images.turned(file, number % 8 + 1))
    found[11], found[20] = b"no image", images.png(images.photo(33, 29, seed=9))
    found[22] = images.encode(Image.fromarray(images.photo(30, 30, seed=8)), "JPEG", comment=REFUSED)
    return found


def windows(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Chunks launched with others ahead, from several threads, and partly never: each as if it were launched alone.

    names: of the PIPELINES.
    """
    pool = mixed_files()
    for name in names:
        pipeline = Pipeline(name, PIPELINES[name])
        program = fold(pipeline, trace(pipeline))
        passes = passes_of(program)
        assert not isinstance(passes, str), passes

        def new(
            library: CpuLibrary, *, ahead: bool, program: Program = program, passes: Sequence[Pass] = passes
        ) -> GpuRunner:
            device: Any = HostStream()
            nvjpeg: Any = library
            return GpuRunner(
                program,
                [passes],
                device,
                nvjpeg,
                backend="hardware",
                decode_bytes=30_000,
                later_images=FILES if ahead else 0,
            )

        def prepare(runner: GpuRunner, chosen: Sequence[int]) -> Prepared:
            chunk = Payload.of([pool[i] for i in chosen], lambda size: np.full(size, 0xAB, np.uint8))
            return runner.prepare(chunk, Keys(1, 2, np.array(chosen)), list(chosen))

        rng = random.Random(11)
        alone, runner = new(CpuLibrary(3), ahead=False), new(library := CpuLibrary(3), ahead=True)
        rights = alone.slots(len(pool)).fill_(0)
        right_faults = list(map(str, alone.launch(prepare(alone, range(len(pool))), rights)))
        wrong = faults = images_of_others = 0
        for turn in range(3):
            order = rng.sample(range(len(pool)), len(pool))
            ends = sorted(rng.sample(range(1, len(pool)), rng.randint(1, 7)))
            parts = [order[start:end] for start, end in zip([0, *ends], [*ends, len(pool)], strict=True)]
            chunks = [prepare(runner, part) for part in parts]
            launched = range(len(chunks) - (turn == 2))  # once the last one is never launched
            results = [runner.slots(len(part)).fill_(0) for part in parts]
            found: list[Any] = [None] * len(chunks)
            library.calls.clear()

            def launch(i: int, chunks: Any = chunks, results: Any = results, found: Any = found) -> None:
                window = chunks[i + 1 : i + 1 + 3]
                found[i] = runner.launch(chunks[i], results[i], window)  # noqa: B023

            if turn % 2:
                with ThreadPoolExecutor(3) as threads:
                    list(threads.map(launch, launched))
            else:
                for i in launched:
                    before = library.calls["images"]
                    launch(i)
                    images_of_others += max(0, library.calls["images"] - before - len(parts[i]))
            for i in launched:
                faults += [str(fault) for fault in found[i]] != [right_faults[number] for number in parts[i]]
                good = [place for place, fault in enumerate(found[i]) if fault is None]
                wrong += not torch.equal(results[i][good], rights[[parts[i][place] for place in good]])
        yield {
            "case": f"windows, {name}",
            "faults": [],
            "max": 0.0,
            "mean": 0.0,
            "wrong": wrong,
            "wrong_faults": faults,
            "images_of_others": images_of_others,
            "errors": errors(new, prepare),
            "no_memory": no_memory(new, prepare),
            "cycles": cycles(runner, prepare),
        }


def cycles(runner: GpuRunner, prepare: Callable[[GpuRunner, Sequence[int]], Prepared]) -> int:
    """Encoded bytes of launched chunks that only the garbage collector would free."""
    gc.collect()
    gc.disable()
    chunks = [prepare(runner, range(start, start + 6)) for start in (0, 6, 12)]
    held = [weakref.ref(chunk.payload.buffer) for chunk in chunks]
    while chunks:
        runner.launch(chunks.pop(0), runner.slots(6), chunks)
    buffers = runner._buffers
    for _ in range(buffers._free.qsize()):  # each has the bytes of its last call until the next one
        buffers._free.get().sources.clear()
    left = sum(reference() is not None for reference in held)
    gc.enable()
    return left


def errors(new: Callable[..., GpuRunner], prepare: Callable[[GpuRunner, Sequence[int]], Prepared]) -> list[str]:
    """What two chunks raise that share the call that fails, and then a chunk without them."""

    class Failing(CpuLibrary):
        left = 0

        def _decode(self, *arguments: Any) -> int:
            self.left -= 1
            if self.left == 0:
                raise MemoryError("no room for a call")
            return super()._decode(*arguments)

    runner = new(library := Failing(3), ahead=True)
    first, second = prepare(runner, range(9)), prepare(runner, range(12, 21))
    library.left = 1
    found = []
    for chunk, ahead in ((first, [second]), (second, []), (prepare(runner, range(20, 26)), [])):
        try:
            runner.launch(chunk, runner.slots(len(chunk.payload)), ahead)
            found.append("")
        except MemoryError as error:
            found.append(str(error))
    return found


def no_memory(
    new: Callable[..., GpuRunner], prepare: Callable[[GpuRunner, Sequence[int]], Prepared]
) -> tuple[str, bool]:
    """What a launch raises without memory for images of later chunks; whether the later chunk is whole then."""
    runner, alone = new(CpuLibrary(3), ahead=True), new(CpuLibrary(3), ahead=True)
    first, second = prepare(runner, range(11)), prepare(runner, range(12, 23))
    slots, text = runner.slots(11), ""

    def fail(stream: Any, count: int, spec: Any) -> torch.Tensor:
        raise MemoryError("no room for images")

    with patch.object(results_of_passes, "allocate_slots", fail):
        try:
            runner.launch(first, slots, [second])
        except MemoryError as error:
            text = str(error)
    found, right = runner.slots(11).fill_(0), alone.slots(11).fill_(0)
    faults = runner.launch(second, found), alone.launch(prepare(alone, range(12, 23)), right)
    good = [i for i, fault in enumerate(faults[1]) if fault is None]
    return text, torch.equal(found[good], right[good]) and len(good) >= 10


def main(mode: str) -> None:
    results_of_passes.TILE = 16  # so that images have several tiles
    use_large_tiles()
    names: Sequence[str] = tuple(PIPELINES)
    drivers: list[FakeDriver] = []
    if mode == "C":
        names = "crop", "two resamplings", "warps", "other sizes"

        def driver_of(library: Any) -> FakeDriver:
            drivers.append(FakeDriver(library=library))
            return drivers[-1]

        use_c_code(pytest.MonkeyPatch(), copy_images, driver_of)
    found: list[Iterable[dict[str, Any]]] = [cases(names), [views("views", ({"center_crop": {"size": 11}},))]]
    if mode == "C":
        found += [windows(("crop",))]
    else:
        found += [[views("views, other sizes", ({"letterbox": {"size": 11}},))], windows(("crop", "colours"))]
        found += [[served(), histories(), refusals()]]
    for case in itertools.chain.from_iterable(found):
        print(json.dumps(case), flush=True)
    for driver in drivers:
        driver.check()


if __name__ == "__main__":
    main("".join(sys.argv[1:]))
