"""Measures how much decoding on the JPEG engines slows a concurrent training step, in several variants.

    gpuflow samples /dev/shm/photos -n 1024
    python experiments/gpu_path/probe.py /dev/shm/photos [--model resnet18] [--connections 32] [VARIANT ...]
    python experiments/gpu_path/probe.py /dev/shm/photos --engines

Another thread (or process) decodes one chunk per step, and the pixels are not used. Each line gives a variant, the
training's rate divided by its rate on a resident batch alone, the variant's rate alone, and the time of a call during
training.
CUDA reads the number of hardware queues once, so another number needs another run.

With --engines, measures the engines alone: the largest rate of one, two and three concurrent callers, each with its own
decoder and stream, on chunks of different files in turn.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from run import BATCH, rate

SECONDS, CHUNKS = 2.5, 8
HARDWARE, HARDWARE_DEVICE = 3, 5
NO_PIPELINE, INTERPOLATION = 1 << 0, 1 << 5
UNCHANGED, YUV, Y, RGB, RGBI, NV12 = 0, 1, 2, 3, 5, 8
DECODES = {
    "RGBI": (RGBI, INTERPOLATION, HARDWARE),
    "RGB": (RGB, INTERPOLATION, HARDWARE),
    "YUV": (YUV, INTERPOLATION, HARDWARE),
    "unchanged": (UNCHANGED, INTERPOLATION, HARDWARE),
    "Y only": (Y, INTERPOLATION, HARDWARE),
    "NV12": (NV12, INTERPOLATION, HARDWARE),
    "RGB, not pipelined": (RGB, INTERPOLATION | NO_PIPELINE, HARDWARE),
    "RGB, bitstreams on the device": (RGB, INTERPOLATION, HARDWARE_DEVICE),
}
Work = Callable[[Any], Callable[[], None]]
"""The work for one chunk, on a given stream."""


def libnvjpeg() -> str:
    """Find libnvjpeg in pip's nvidia folder, in CUDA's folder, or on the system's path."""
    found = [p for entry in sys.path for p in Path(entry).glob("nvidia/*/lib/libnvjpeg.so.*")]
    found += Path("/usr/local/cuda").glob("targets/*/lib/libnvjpeg.so.1?")
    return str(found[0]) if found else "libnvjpeg.so.13"


class ChunkDecoder:
    """One nvJPEG decoder with a chunk of files that can be decoded repeatedly."""

    def __init__(self, files: list[Path], output: int, flags: int, backend: int) -> None:
        import torch

        self._calls = ctypes.CDLL(libnvjpeg())
        self._handle, self._state = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._calls.nvjpegCreateEx(backend, None, None, flags, ctypes.byref(self._handle)))
        self._check(self._calls.nvjpegJpegStateCreate(self._handle, ctypes.byref(self._state)))
        self._check(self._calls.nvjpegDecodeBatchedInitialize(self._handle, self._state, len(files), 1, output))
        contents = [path.read_bytes() for path in files]
        ends = np.cumsum([-(-len(data) // 16) * 16 for data in contents])
        self.pinned = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=True)
        starts = ends - [-(-len(data) // 16) * 16 for data in contents]
        for start, data in zip(starts.tolist(), contents, strict=True):
            self.pinned.numpy()[start : start + len(data)] = np.frombuffer(data, np.uint8)
        self._sizes = np.array([self._size(data) for data in contents])
        self._lengths = np.array([len(data) for data in contents], np.uint64)
        self.device = torch.empty_like(self.pinned, device="cuda") if backend == HARDWARE_DEVICE else None
        base = self.pinned if self.device is None else self.device
        self._data = (base.data_ptr() + starts).astype(np.uint64)
        self._images = self._targets(output)

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"nvJPEG returned status {status}")

    def _size(self, data: bytes) -> tuple[int, int]:
        components, sampling = ctypes.c_int(), ctypes.c_int()
        widths, heights = (ctypes.c_int * 4)(), (ctypes.c_int * 4)()
        info = self._calls.nvjpegGetImageInfo
        length = ctypes.c_size_t(len(data))
        self._check(info(self._handle, data, length, ctypes.byref(components), ctypes.byref(sampling), widths, heights))
        return heights[0], widths[0]

    def _targets(self, output: int) -> Any:
        """Allocate memory for all images: addresses and pitches of each image's channels, [N, 8]."""
        import torch

        height, width = self._sizes.T
        plane = -(-height * width // 256) * 256
        self._out = torch.empty(int(3 * plane.sum()), dtype=torch.uint8, device="cuda")
        start = self._out.data_ptr() + 3 * (np.cumsum(plane) - plane)
        images = np.zeros((len(plane), 8), np.uint64)
        chroma = (width + 1) // 2
        pitches = {
            RGBI: [3 * width],
            RGB: [width] * 3,
            Y: [width],
            NV12: [width, 2 * chroma],
        }.get(output, [width, chroma, chroma])
        for channel, pitch in enumerate(pitches):
            images[:, channel], images[:, 4 + channel] = start + channel * plane, pitch
        return images

    def queue(self, stream: Any, chunk: ChunkDecoder | None = None) -> None:
        """Decode the files of this decoder, or of another one."""
        import torch

        if self.device is not None:
            with torch.cuda.stream(stream):
                self.device.copy_(self.pinned, non_blocking=True)
        of = chunk or self
        pointers = (ctypes.c_void_p(array.ctypes.data) for array in (of._data, of._lengths, of._images))
        self._check(
            self._calls.nvjpegDecodeBatched(self._handle, self._state, *pointers, ctypes.c_void_p(stream.cuda_stream))
        )


def decoding(files: list[Path], name: str) -> Work:
    def work(stream: Any) -> Callable[[], None]:
        decoder = ChunkDecoder(files, *DECODES[name])
        return lambda: decoder.queue(stream)

    return work


def substitutes() -> dict[str, Work]:
    """Work like that of nvJPEG for each image, without nvJPEG."""
    import torch

    host = torch.empty((BATCH, 63_000), dtype=torch.uint8, pin_memory=True)
    there, here = (torch.empty((BATCH, 187_500), dtype=torch.uint8, device="cuda") for _ in range(2))

    def repeat(operation: Callable[[int], Any]) -> Work:
        def work(stream: Any) -> Callable[[], None]:
            def chunk() -> None:
                with torch.cuda.stream(stream):
                    for i in range(BATCH):
                        operation(i)

            return chunk

        return work

    return {
        "256 copies from the host": repeat(lambda i: there[i, :63_000].copy_(host[i], non_blocking=True)),
        "256 copies on the device": repeat(lambda i: here[i].copy_(there[i])),
        "256 small kernels": repeat(lambda i: here[i].add_(1)),
        "256 events waited for": repeat(lambda i: torch.cuda.current_stream().record_event().synchronize()),
    }


def training(model: str) -> Callable[[], None]:
    """One step of a torchvision model on a batch that stays on the GPU: bf16 autocast, channels_last, SGD."""
    import torch
    import torchvision

    torch.backends.cudnn.benchmark = True
    network = getattr(torchvision.models, model)().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    images = torch.randn(BATCH, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (BATCH,), device="cuda")
    stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]

    def step() -> None:
        with torch.cuda.stream(stream):
            with torch.autocast("cuda", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(network(images), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return step


@contextmanager
def other_work(work: Work, note: dict[str, float]) -> Iterator[Callable[[], None]]:
    """A thread that does one chunk of work per call of the yielded function, which first waits for the last chunk."""
    import torch

    begin, done, stop = threading.Semaphore(2), threading.Semaphore(0), threading.Event()
    failure: list[BaseException] = []

    def run() -> None:
        try:
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            chunk = work(stream)
            chunk()
            stream.synchronize()
            start = time.perf_counter()
            for _ in range(10):
                chunk()
            stream.synchronize()
            note["alone"] = 10 * BATCH / (time.perf_counter() - start)
            spent, count = 0.0, 0
            while begin.acquire() and not stop.is_set():
                start = time.perf_counter()
                chunk()
                spent, count = spent + time.perf_counter() - start, count + 1
                note["call_ms"] = 1000 * spent / count
                stream.synchronize()
                done.release()
        except BaseException as error:
            failure.append(error)
            done.release(1 << 20)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def turn() -> None:
        if not done.acquire(timeout=60) or failure:
            raise RuntimeError(str(failure[0]) if failure else "the chunk did not finish in 60 s")
        begin.release()

    try:
        yield turn
    finally:
        stop.set()
        begin.release()
        thread.join(10)


def other_process(files: list[Path], name: str, pipe: Any) -> None:
    """Body of a separate process: decodes a chunk for each message."""
    import torch

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    chunk = decoding(files, name)(stream)
    while pipe.recv() is not None:
        chunk()
        stream.synchronize()
        pipe.send(1)


def engines_alone(files: list[Path]) -> None:
    """Print the rates of one to three concurrent callers, pipelined by nvJPEG or not, in calls of two sizes."""
    import torch

    def caller(size: int, flags: int, first: int) -> Callable[[float], int]:
        starts = [(first + i) * size % (len(files) - size + 1) for i in range(CHUNKS)]
        chunks = [ChunkDecoder(files[start : start + size], RGBI, flags, HARDWARE) for start in starts]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

        def work(end: float) -> int:
            count = 0
            while time.perf_counter() < end:
                chunks[0].queue(stream, chunks[count % CHUNKS])
                stream.synchronize()
                count += 1
            return count * size

        work(time.perf_counter() + 0.3)
        return work

    def measure(size: int, flags: int, callers: int) -> None:
        works = [caller(size, flags, i * CHUNKS) for i in range(callers)]
        with ThreadPoolExecutor(callers) as pool:
            start = time.perf_counter()
            images = sum(pool.map(lambda work: work(start + SECONDS), works))
            spent = time.perf_counter() - start
        how = "not pipelined" if flags & NO_PIPELINE else "pipelined"
        print(f"{callers} callers, calls of {size}, {how:13}  {images / spent:8,.0f} images/s", flush=True)

    for size in (256, 128):
        for flags in (NO_PIPELINE | INTERPOLATION, INTERPOLATION):
            for callers in (1, 2, 3):
                measure(size, flags, callers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", type=Path)
    parser.add_argument("variants", nargs="*", help="by default all")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--engines", action="store_true")
    options = parser.parse_intermixed_args()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(options.connections)
    files = sorted(options.photos.glob("*/*.jpg"))
    if options.engines:
        random.Random(0).shuffle(files)  # the first files of a folder are similar
        engines_alone(files)
        os._exit(0)
    files = files[:BATCH]
    step = training(options.model)
    resident, _ = rate(step)
    print(f"{options.model}, {options.connections} connections, resident batch: {resident:,.0f} images/s", flush=True)
    works = {name: decoding(files, name) for name in DECODES} | substitutes()
    for name in options.variants or [*works, "RGB in another process"]:
        note: dict[str, float] = {}
        try:
            if name in works:
                with other_work(works[name], note) as turn:
                    trained, _ = rate(lambda: (turn(), step())[1])
            else:
                trained = _beside_process(files, step)
        except RuntimeError as error:
            print(f"{name:32} {error}", flush=True)
            continue
        alone = f"{note['alone']:10,.0f} images/s alone, {note['call_ms']:5.1f} ms a call" if note else ""
        print(f"{name:32} ratio {trained / resident:.3f}  {alone}", flush=True)
    os._exit(0)


def _beside_process(files: list[Path], step: Callable[[], None]) -> float:
    context = multiprocessing.get_context("spawn")
    ours, child_end = context.Pipe()
    process = context.Process(target=other_process, args=(files, "RGB", child_end), daemon=True)
    process.start()
    ours.send(1)
    ours.send(1)

    def both() -> None:
        ours.recv()
        ours.send(1)
        step()

    trained, _ = rate(both)
    process.kill()
    return float(trained)


if __name__ == "__main__":
    main()
