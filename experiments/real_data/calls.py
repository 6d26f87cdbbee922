"""Measures the JPEG engines with different nvJPEG calls: `python experiments/real_data/calls.py FOLDER [PARTS...]`.

Nothing but nvJPEG runs: the files are in pinned memory, the arguments of all calls are computed beforehand, one thread
queues a cycle of calls and then waits for the pixels, which are not used. Each line is one measurement of a second,
printed when it ends. FOLDER holds photographs that photos.py made.

    size       calls of one sampling with 1 to 256 images
    fillers    calls of 128 images, some of which are tiny blank images
    states     calls of alternating sizes, with one nvJPEG state or one for each size
    samplings  calls of one sampling, alternating samplings, and calls formed from windows of 1, 2 and 4 chunks
    windows    calls formed from windows of 1 to 16 chunks, in order and ordered by size
    cuda       nvJPEG's CUDA backend on progressive and baseline files, and which pixels depend on a call's size
    cores      the CPU on progressive and baseline files; needs no GPU
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from engines import CALL, Files, arguments, distinct_files, pixel_spaces, placed, read_files
from numpy.typing import NDArray

from gpuflow.errors import suggest

if TYPE_CHECKING:
    from multiprocessing.synchronize import Barrier

    from gpuflow.decode.codecs import Header

CHUNK = 256
CALL_SIZES = (8, 16, 32, 64, 128)
"""Images in a chunk, and the numbers of images that calls are filled up to."""
FILLS = ("filled to 128", "filled to 8-128", "not filled")
"""How calls of a window become of equal size: one state for each sampling, one for each sampling and size, or one state
for all calls, which is initialised anew for each other number of images."""
ORDERS = ("in order", "descending", "by size")
"""Which images of a window and sampling a call has: consecutive ones, the same ones in descending order of pixels, or
those of similar size, because all were sorted beforehand."""
PROGRESSIVE = -1
"""In the place of a sampling: a progressive file."""
_NAMES = {0x22: "4:2:0", 0x21: "4:2:2", 0x11: "4:4:4", 0: "gray"}
_FILLER_SIDE = 16
_SECONDS, _START_SECONDS = 1.0, 60.0
_CUDA_SIZES = (8, 32, 49, 50, 64, 128)


class Call(NamedTuple):
    """One nvJPEG call. state: names the nvJPEG state. files: what is decoded: `images` photographs, then fillers."""

    state: Hashable
    files: NDArray[np.int64]
    images: int


def _blank(sampling: int) -> NDArray[np.uint8]:
    """A gray JPEG of _FILLER_SIDE pixels with these factors of its first component; 0 for one component."""
    import cv2

    shape = (_FILLER_SIDE, _FILLER_SIDE, 3) if sampling else (_FILLER_SIDE, _FILLER_SIDE)
    options = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, sampling << 16 | 0x1111] if sampling else []
    return cv2.imencode(".jpg", np.full(shape, 96, np.uint8), options)[1].reshape(-1)


class Photographs:
    """The files of a folder that the engines decode, in a random order, and a blank image of each chroma sampling.

    files: the photographs, then the blank images. count: the number of photographs.
    """

    def __init__(self, files: Files, seed: int = 0) -> None:
        self.count = len(files.starts)
        order = np.random.default_rng(seed).permutation(self.count)
        contents = [files.data[files.starts[n] : files.starts[n] + files.lengths[n]] for n in order]
        found, counts = np.unique(files.samplings, return_counts=True)
        self.samplings: list[int] = found[np.argsort(-counts, kind="stable")].tolist()
        """The samplings that occur, the most frequent one first."""
        contents += [_blank(sampling) for sampling in self.samplings]
        sizes = np.concatenate([files.sizes[order], np.full((len(self.samplings), 2), _FILLER_SIDE)])
        samplings = np.concatenate([files.samplings[order], self.samplings])
        self.files = placed(contents, sizes, samplings, files.refused)
        self.all = np.arange(self.count)
        self._pixels = sizes.prod(axis=1)

    def of(self, sampling: int) -> NDArray[np.int64]:
        """The photographs of one sampling."""
        return np.flatnonzero(self.files.samplings[: self.count] == sampling)

    def first(self, sampling: int, count: int) -> NDArray[np.int64]:
        """This number of photographs of one sampling, repeated if there are fewer."""
        return np.resize(self.of(sampling), count)

    def filled(self, sampling: int, files: NDArray[np.int64], size: int, state: Hashable) -> Call:
        """A call of photographs of one sampling and as many blank images as it needs to have `size` images."""
        blank = self.count + self.samplings.index(sampling)
        return Call(state, np.concatenate([files, np.full(size - len(files), blank)]), len(files))

    def descending(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same photographs, the largest first."""
        return files[np.argsort(-self._pixels[files], kind="stable")]


# --- which calls are measured -----------------------------------------------------------------------------------------

Measured = tuple[str, list[Call]]
"""A line's name and the cycle of calls that it measures."""


def pieces(files: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """Consecutive parts of at most `size` files."""
    return [files[start : start + size] for start in range(0, len(files), size)]


def plain(files: Iterable[NDArray[np.int64]], state: Hashable = 0) -> list[Call]:
    """Calls without fillers, all with one state."""
    return [Call(state, call, len(call)) for call in files]


def whole_calls(files: NDArray[np.int64]) -> NDArray[np.int64]:
    """The files, some of them twice if that is needed for calls that are all full."""
    return np.resize(files, max(CALL, len(files) // CALL * CALL))


def calls_of_windows(
    photographs: Photographs, files: NDArray[np.int64], *, chunks: int, order: str, fill: str
) -> list[Call]:
    """Calls of one sampling, formed within windows of `chunks` chunks. order: of ORDERS. fill: of FILLS."""
    calls = []
    for window in pieces(files, chunks * CHUNK):
        samplings = photographs.files.samplings[window]
        for sampling in np.unique(samplings).tolist():
            members = window[samplings == sampling]
            if order == "by size":
                members = photographs.descending(members)
            for call in pieces(members, CALL):
                if order == "descending":
                    call = photographs.descending(call)
                if fill == "not filled":
                    calls.append(Call(0, call, len(call)))
                    continue
                size = CALL if fill == "filled to 128" else min(size for size in CALL_SIZES if size >= len(call))
                calls.append(photographs.filled(sampling, call, size, (sampling, size)))
    return calls


def size_part(photographs: Photographs) -> Iterator[Measured]:
    sampling = photographs.samplings[0]
    for size in (128, 256):
        yield f"calls of {size}", plain(pieces(photographs.first(sampling, 1024), size))
    for size in (1, 7, 8, 14, 16, 28, 32, 64, 128):
        yield f"one call of {size}", plain([photographs.first(sampling, size)])


def fillers_part(photographs: Photographs) -> Iterator[Measured]:
    sampling = photographs.samplings[0]
    for count in (0, 7, 19, 64, 100):
        call = photographs.filled(sampling, photographs.first(sampling, count), CALL, 0)
        yield f"{count} photographs and {CALL - count} fillers", [call]


def states_part(photographs: Photographs) -> Iterator[Measured]:
    files = [photographs.first(photographs.samplings[0], size) for size in (102, 19, 7)]
    yield "calls of 102, 19 and 7, one state", plain(files)
    yield "calls of 102, 19 and 7, a state each", [Call(len(call), call, len(call)) for call in files]


def samplings_part(photographs: Photographs) -> Iterator[Measured]:
    by_sampling = {sampling: whole_calls(photographs.of(sampling)) for sampling in photographs.samplings}
    for sampling, files in by_sampling.items():
        yield f"only {_NAMES.get(sampling, hex(sampling))}, calls of {CALL}", plain(pieces(files, CALL))
    if len(by_sampling) == 1:
        return
    first, second = photographs.samplings[:2]
    names = _NAMES.get(first, hex(first)), _NAMES.get(second, hex(second))
    many = pieces(photographs.first(first, 4 * CALL), CALL)
    one = by_sampling[second][:CALL]
    yield f"4 calls {names[0]}, one {names[1]}, one state", plain([*many, one])
    yield f"4 calls {names[0]}, one {names[1]}, a state each", plain(many, first) + plain([one], second)
    yield f"{names[0]} and {names[1]} alternating, one state", plain([many[0], one])
    yield f"{names[0]} and {names[1]} alternating, a state each", plain([many[0]], first) + plain([one], second)
    some = photographs.all[: 8 * CHUNK]
    yield "samplings mixed within calls", plain(pieces(whole_calls(some), CALL))
    for chunks in (1, 2, 4):
        for fill in FILLS:
            calls = calls_of_windows(photographs, some, chunks=chunks, order="in order", fill=fill)
            yield f"windows of {chunks}x{CHUNK}, {fill}, {len(calls)} calls", calls


def windows_part(photographs: Photographs) -> Iterator[Measured]:
    yield "as they come, one state", plain(pieces(photographs.all, CALL))
    for chunks in (1, 2, 4, 8, 16):
        for order in ORDERS:
            calls = calls_of_windows(photographs, photographs.all, chunks=chunks, order=order, fill="filled to 8-128")
            yield f"windows of {chunks}x{CHUNK}, {order}, {len(calls)} calls", calls


ENGINE_PARTS: dict[str, Callable[[Photographs], Iterator[Measured]]] = {
    "size": size_part,
    "fillers": fillers_part,
    "states": states_part,
    "samplings": samplings_part,
    "windows": windows_part,
}


# --- measuring --------------------------------------------------------------------------------------------------------


class Decoders:
    """nvJPEG states on one stream that decode files of `files`. backend: as `nvjpeg.BatchedDecoder` takes it."""

    def __init__(self, files: Files, backend: str = "hardware") -> None:
        import torch

        self._files, self._backend = files, backend
        self._pinned = torch.from_numpy(files.data).pin_memory()
        self._pixels = torch.empty(0, dtype=torch.uint8, device="cuda")
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._states: dict[Hashable, Any] = {}

    def cycle(self, calls: Sequence[Call]) -> Callable[[], None]:
        """A function that decodes these calls one after the other and waits for the pixels of all."""
        import torch

        from gpuflow.decode.nvjpeg import BatchedDecoder, find_nvjpeg

        largest = max(int(pixel_spaces(self._files, call.files).sum()) for call in calls)
        if self._pixels.numel() < largest:
            self._pixels = torch.empty(largest, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
        for state in {call.state for call in calls} - self._states.keys():
            self._states[state] = BatchedDecoder(find_nvjpeg(), "rgb", self._backend)
        address, pixels = self._pinned.data_ptr(), self._pixels.data_ptr()
        prepared = [(self._states[call.state], arguments(self._files, address, pixels, call.files)) for call in calls]

        def decode() -> None:
            try:
                for state, images in prepared:
                    if state.batch_size not in (0, len(images[0])) or self._backend != "hardware":
                        # No call may run while its state is initialised anew, or while CUDA kernels read its memory.
                        self._stream.synchronize()
                    state.decode(*images, self._stream.cuda_stream)
            finally:
                self._stream.synchronize()

        return decode

    def images(self, call: Call) -> Iterator[NDArray[np.uint8]]:
        """Decode one call and return its images, RGB, [H, W, 3]."""
        self.cycle([call])()
        ends = np.cumsum(pixel_spaces(self._files, call.files))
        starts = ends - pixel_spaces(self._files, call.files)
        for start, (height, width) in zip(starts.tolist(), self._files.sizes[call.files].tolist(), strict=True):
            yield self._pixels[start : start + 3 * height * width].cpu().numpy().reshape(height, width, 3)


def seconds_of(cycle: Callable[[], None], seconds: float) -> float:
    """How long a cycle takes: the mean over at least `seconds`, after one that is not measured."""
    cycle()
    start, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds or not count:
        cycle()
        count += 1
    return passed / count


def measure(
    lines: Iterable[Measured], cycle_of: Callable[[Sequence[Call]], Callable[[], None]], files: Files, seconds: float
) -> None:
    """Print images and megapixels per second of each line, without fillers, and the milliseconds of its cycle."""
    from gpuflow.decode.nvjpeg import NvjpegError

    for name, calls in lines:
        try:
            passed = seconds_of(cycle_of(calls), seconds)
        except NvjpegError as error:
            print(f"  {name:48} {error}", flush=True)
            continue
        photographs = np.concatenate([call.files[: call.images] for call in calls])
        rate, pixels = len(photographs) / passed, files.sizes[photographs].prod(axis=1).sum() / passed / 1e6
        print(f"  {name:48} {rate:8,.0f} images/s {passed * 1e3:9.2f} ms {pixels:8,.0f} Mpx/s", flush=True)


# --- files that the engines do not decode -----------------------------------------------------------------------------


def sampling_or_progressive(data: NDArray[np.uint8], header: Header) -> int | None:
    """As `engine_sampling`, and PROGRESSIVE for a progressive file in gray or YCbCr."""
    from gpuflow.decode.chunk_files import engine_sampling

    if header.format == "jpeg" and header.progressive and header.channels in (1, 3):
        return PROGRESSIVE
    return engine_sampling(data)


def by_format(files: Files) -> dict[str, NDArray[np.int64]]:
    """The progressive and the baseline files, each kind if there are any."""
    is_progressive = files.samplings == PROGRESSIVE
    found = {"progressive": np.flatnonzero(is_progressive), "baseline": np.flatnonzero(~is_progressive)}
    return {name: members for name, members in found.items() if len(members)}


def cuda_lines(files: Files, backend: str) -> Iterator[Measured]:
    for name, members in by_format(files).items():
        for size in _CUDA_SIZES:
            calls = plain(pieces(np.resize(members, max(2 * size, CALL)), size), size)
            yield f"{backend}, {name}, calls of {size}", calls


def contents_of(files: Files, members: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
    return [files.data[files.starts[n] : files.starts[n] + files.lengths[n]] for n in members]


def on_the_cpu(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The pixels of a file as libjpeg-turbo decodes them, RGB."""
    import cv2

    image = cv2.imdecode(data, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    assert image is not None
    return np.asarray(image, np.uint8)[:, :, ::-1]


def largest_difference(images: Iterable[NDArray[np.uint8]], contents: Iterable[NDArray[np.uint8]]) -> int:
    """The largest difference between decoded images and what the CPU makes of the same files, in levels."""
    pairs = zip(images, contents, strict=True)
    return max(int(np.abs(image.astype(np.int16) - on_the_cpu(data)).max()) for image, data in pairs)


def measure_cuda(files: Files, seconds: float) -> None:
    for backend in ("cuda", "cuda_few"):
        decoders = Decoders(files, backend)
        measure(cuda_lines(files, backend), decoders.cycle, files, seconds)
        for name, members in by_format(files).items():
            compare_calls(decoders, f"{backend}, {name}", files, members[:CALL])


def compare_calls(decoders: Decoders, name: str, files: Files, members: NDArray[np.int64]) -> None:
    """Print how far these images are from the CPU's, and how many differ in calls of fewer images."""
    expected = list(decoders.images(Call(0, members, len(members))))
    levels = largest_difference(expected, contents_of(files, members))
    print(f"  {name}: up to {levels} levels from the CPU's", flush=True)
    for size in _CUDA_SIZES:
        calls = plain(pieces(members, size), size)
        images = itertools.chain.from_iterable(decoders.images(call) for call in calls)
        apart = [np.abs(a.astype(np.int16) - b) for a, b in zip(images, expected, strict=True)]
        apart = [one for one in apart if one.any()]
        values, levels = sum(np.count_nonzero(one) for one in apart), max((int(one.max()) for one in apart), default=0)
        print(
            f"  {name}, calls of {size} instead of {len(members)}: {len(apart)} images differ, in {values} values, "
            f"by up to {levels} levels",
            flush=True,
        )


def decode_for(seconds: float) -> float:
    """In a process of `cpu_rate`: images per second, once all processes have started."""
    ready, contents = _in_process
    import cv2

    cv2.setNumThreads(1)
    ready.wait(_START_SECONDS)
    start, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds or not count:
        cv2.imdecode(contents[count % len(contents)], cv2.IMREAD_COLOR)
        count += 1
    return count / passed


_in_process: tuple[Barrier, list[NDArray[np.uint8]]]


def _start_process(ready: Barrier, contents: list[NDArray[np.uint8]]) -> None:
    global _in_process
    _in_process = ready, contents


def cpu_rate(contents: list[NDArray[np.uint8]], processes: int, seconds: float) -> float:
    """Images per second of this number of processes that decode these files at the same time."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(processes), contents
    with ProcessPoolExecutor(processes, context, _start_process, start) as pool:
        return sum(pool.map(decode_for, [seconds] * processes))


def measure_cores(files: Files, seconds: float) -> None:
    cores = len(os.sched_getaffinity(0))
    for processes in sorted({1, *(count for count in (8, 12) if count < cores), cores}):
        for name, members in by_format(files).items():
            rate = cpu_rate(contents_of(files, members[:256]), processes, seconds)
            print(f"  {processes} processes, {name}: {rate:,.0f} images/s", flush=True)


OTHER_PARTS = {"cuda": measure_cuda, "cores": measure_cores}
PARTS = (*ENGINE_PARTS, *OTHER_PARTS)


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*", metavar="PARTS", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="of each line (default: %(default)s)")
    options = parser.parse_args(words)
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"PARTS must be of {', '.join(PARTS)}, got {part}; {suggest(part, PARTS)}")
    options.parts = options.parts or list(PARTS)
    return options


def main(words: Sequence[str] | None = None) -> None:
    options = parsed(words)
    paths = distinct_files(options.folder)
    print(f"{options.folder}: {len(paths)} files, {len(os.sched_getaffinity(0))} cores", flush=True)
    if set(options.parts) - {"cores"}:
        import torch

        from gpuflow.decode.nvjpeg import find_nvjpeg

        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, nvJPEG {find_nvjpeg().version}", flush=True)
    if chosen := [part for part in ENGINE_PARTS if part in options.parts]:
        photographs = Photographs(read_files(paths))
        found = {_NAMES.get(s, hex(s)): len(photographs.of(s)) for s in photographs.samplings}
        print(f"the engines decode {photographs.count} of them: {found}", flush=True)
        decoders = Decoders(photographs.files)
        for part in chosen:
            print(part, flush=True)
            measure(ENGINE_PARTS[part](photographs), decoders.cycle, photographs.files, options.seconds)
        del decoders
    if chosen := [part for part in OTHER_PARTS if part in options.parts]:
        files = read_files(paths, sampling_or_progressive)
        print({name: len(members) for name, members in by_format(files).items()}, flush=True)
        for part in chosen:
            print(part, flush=True)
            OTHER_PARTS[part](files, options.seconds)


if __name__ == "__main__":
    main()
