"""Run by test_runner.py with TRITON_INTERPRET=1, in a process of its own: the GPU's runner on a CPU that stands in.

A delivery whose device is the CPU and a libnvjpeg that decodes with OpenCV take the places of CUDA's; all else is real.
Prints one line of JSON a case: what differs from the CPU's runner, and what was called.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image

from gpuflow.check import trace
from gpuflow.cpu import STORAGE, CpuRunner, as_batch, slot_shape
from gpuflow.errors import BadSampleError
from gpuflow.fold import fold
from gpuflow.gpu import GpuRunner, passes_of
from gpuflow.serve.on_gpu import GpuPreprocessor
from gpuflow.sources import Payload
from gpuflow.spec import Keys, Pipeline, Stage
from gpuflow.stages import (
    CenterCrop,
    ColorJitter,
    Decode,
    Flip,
    Normalize,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    Torchvision,
)
from tests import images

REFUSED = b"the engines refuse this"


class CpuDelivery:
    """Stands where `Delivery` does, and for its stream. What it queues is done at once."""

    device, cuda_stream = torch.device("cpu"), 7

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.stream = self

    def join(self, branch: CpuDelivery) -> None:
        assert branch is self, "one thread needs no second decoder"

    def queued(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def mark(self, *, wait: bool = False) -> CpuDelivery:
        return self

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def send(self, host: torch.Tensor) -> torch.Tensor:
        self.calls["copies"] += 1
        return host.clone()

    def send_all(self, arrays: Sequence[Any]) -> list[torch.Tensor]:
        self.calls["copies"] += 1
        return [torch.from_numpy(array).clone() for array in arrays]

    def synchronize(self) -> None:
        """As an event too: what it stands for has passed."""
        self.calls["synchronize"] += 1


class CpuLibrary:
    """Stands where `nvjpeg.Library` does, and fails as a whole where one file is not to its taste."""

    def __init__(self, channels: int) -> None:
        self._flag = cv2.IMREAD_GRAYSCALE if channels == 1 else cv2.IMREAD_COLOR_RGB
        self._size, self.calls = 0, Counter[str]()

    def create(self, backend: int, device: None, pinned: None, flags: int, handle: Any) -> int:
        handle._obj.value = 11
        return 0

    def create_state(self, handle: Any, state: Any) -> int:
        state._obj.value = 22
        return 0

    def initialize(self, handle: Any, state: Any, size: int, threads: int, output: int) -> int:
        self._size = size
        return 0

    def decode(self, handle: Any, state: Any, data: int, lengths: int, images: int, stream: int) -> int:
        self.calls["decode"] += 1
        starts, sizes = (np.ctypeslib.as_array((ctypes.c_uint64 * self._size).from_address(x)) for x in (data, lengths))
        targets = np.ctypeslib.as_array((ctypes.c_uint64 * (8 * self._size)).from_address(images)).reshape(-1, 8)
        files = [ctypes.string_at(int(a), int(n)) for a, n in zip(starts, sizes, strict=True)]
        if any(REFUSED in file for file in files):
            return 6
        for file, target in zip(files, targets, strict=True):
            pixels = cv2.imdecode(np.frombuffer(file, np.uint8), self._flag)
            assert pixels is not None and int(target[4]) == pixels[0].nbytes
            ctypes.memmove(int(target[0]), np.ascontiguousarray(pixels).ctypes.data, pixels.nbytes)
        return 0

    def destroy_state(self, state: Any) -> int:
        return 0

    def destroy(self, handle: Any) -> int:
        return 0


def files() -> list[bytes]:
    """What a chunk may hold: all that the engines take, what they do not, what nobody takes."""
    found = [
        images.jpeg(images.photo(30 + 3 * i, 44 - 2 * i, seed=i), kind)
        for i, kind in enumerate(["4:2:0", "4:2:2", "4:4:4", "4:4:0", "4:2:0"])
    ]
    pixels = images.photo(33, 29, seed=9)
    found += [images.png(pixels), images.jpeg(pixels, progressive=True), images.jpeg(pixels)[:300], b"no image"]
    found.append(images.encode(Image.fromarray(pixels), "JPEG", comment=REFUSED))
    found.append(images.jpeg(images.photo(31, 27, seed=10)))
    return found


def payload(contents: Sequence[bytes]) -> Payload:
    sizes = [len(data) for data in contents]
    errors = [None] * (len(contents) - 1) + ["permission denied"]
    return Payload(
        buffer=np.frombuffer(b"".join(contents), np.uint8),
        offsets=[0, *accumulate(sizes)][:-1],
        sizes=sizes,
        errors=errors,
    )


PIPELINES: dict[str, tuple[Stage, ...]] = {
    "crop": (Decode(), RandomResizedCrop(size=13), Flip(horizontal=0.5), Normalize(mean=(0,) * 3, std=(1 / 255,) * 3)),
    "levels": (Decode(), Resize(shorter=16), CenterCrop(size=16)),
    "gray": (Decode(color="gray"), Resize(height=9, width=11)),
    "two samplings": (Decode(), Resize(height=20, width=17), Resize(height=9, width=12), RandomCrop(size=8)),
    "colours": (
        Decode(),
        RandomResizedCrop(size=12),
        ColorJitter(brightness=0.4, contrast=0.4, saturation=0.3, hue=0.1),
        Normalize(mean=(0,) * 3, std=(1 / 255,) * 3, dtype="float16", layout="nhwc"),
    ),
    "torchvision": (
        Decode(),
        RandomResizedCrop(size=12),
        Torchvision(name="RandomErasing", parameters=(("p", 0.9), ("value", 3))),
        Torchvision(name="GaussianBlur", parameters=(("kernel_size", 3), ("sigma", 0.7))),
        Normalize(),
    ),
    "misfits": (Decode(), RandomCrop(size=30)),
}


def cases() -> Iterator[dict[str, Any]]:
    for name, stages in PIPELINES.items():
        for decode_bytes in (1 << 20, 6000):
            pipeline = Pipeline(name, stages)
            program = fold(pipeline, trace(pipeline))
            passes = passes_of(program)
            assert not isinstance(passes, str), passes
            delivery, library = CpuDelivery(), CpuLibrary(1 if name == "gray" else 3)
            chunk = payload([*files(), b"\0" * 40])
            keys = Keys(0, 1, np.arange(100, 100 + len(chunk)))
            substitutes: Any = (delivery, library)
            runner = GpuRunner(program, passes, *substitutes, backend="hardware", decode_bytes=decode_bytes)
            slots = runner.slots(len(chunk)).fill_(0)
            faults = runner.launch(runner.prepare(chunk, keys), slots)
            expected = np.zeros((len(chunk), *slot_shape(program.result)), STORAGE[program.result.dtype])
            rights = CpuRunner(program).run([chunk.sample(i) for i in range(len(chunk))], keys, expected)
            rights[-1] = BadSampleError("read", "permission denied")
            good = [i for i, fault in enumerate(rights) if fault is None]
            difference = (slots[good].double() - as_batch(expected, program.result)[good].double()).abs()
            yield {
                "case": f"{name}, {decode_bytes} bytes",
                "faults": [str(a) for a, b in zip(faults, rights, strict=True) if str(a) != str(b)],
                "good": len(good),
                "max": float(difference.max()),
                "mean": float(difference.mean()),
                "engines": runner.engine_images,
                "cpu": runner.cpu_images,
                "decodes": library.calls["decode"],
                **delivery.calls,
            }


def served() -> dict[str, Any]:
    """The same runner behind a service: several files at a time, then one."""
    pipeline = Pipeline("serve", PIPELINES["levels"])
    program = fold(pipeline, trace(pipeline))
    passes = passes_of(program)
    assert not isinstance(passes, str), passes
    delivery, lent = CpuDelivery(), list[Any]()
    substitutes: Any = (delivery, CpuLibrary(3))
    runner = GpuRunner(program, passes, *substitutes, backend="hardware", decode_bytes=1 << 20)
    serving = GpuPreprocessor(runner, substitutes[0], take=lambda n: np.empty(n + 9, np.uint8), give=lent.append)
    contents = [*files(), b""]
    found = [*serving.run(contents), *serving.run(contents[:1])]
    expected = np.zeros((len(contents), *slot_shape(program.result)), STORAGE[program.result.dtype])
    arrays = [np.frombuffer(data, np.uint8) for data in contents]
    rights = CpuRunner(program).run(arrays, Keys(0, 0, np.zeros(len(contents), np.int64)), expected)
    images = [*as_batch(expected, program.result), as_batch(expected, program.result)[0]]
    faults, worst = [], 0.0
    for mine, right, image in zip(found, [*rights, rights[0]], images, strict=True):
        if isinstance(mine, torch.Tensor):
            assert mine.shape == (1, 3, 16, 16)
            worst = max(worst, float((mine[0].double() - image.double()).abs().max()))
        if str(right) != (str(None) if isinstance(mine, torch.Tensor) else str(mine)):
            faults.append(str(mine))
    return {"case": "served", "faults": faults, "max": worst, "mean": 0.0, "given_back": len(lent), "good": len(found)}


if __name__ == "__main__":
    for case in [*cases(), served()]:
        print(json.dumps(case), flush=True)
