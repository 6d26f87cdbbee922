"""The GPU's JPEG engines alone, on all files of a folder that they decode, in calls of one chroma sampling.

This is the upper bound of a loader's rate on these files. Nothing else runs: the files are in pinned memory, their
headers are read beforehand, and the pixels are not used.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from gpuflow.decode.codecs import Header

__all__ = ["CALL", "Engines", "Files", "arguments", "calls_of", "distinct_files", "pixel_spaces", "read_files"]

CALL = 128
CALLERS = (1, 2)
"""Images in a call, and the numbers of concurrent callers that are tried."""
_ROUNDS = 8
_ALIGN = 256


class Files(NamedTuple):
    """Encoded files that the engines decode, one after the other in `data`.

    starts, lengths [N]: where each file is in `data`, in bytes. sizes [N, 2]: height and width. samplings [N]: factors
    of the first component, 0 for gray. refused: the number of files that the engines do not decode.
    """

    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    sizes: NDArray[np.int64]
    samplings: NDArray[np.int64]
    refused: int


def distinct_files(folder: Path) -> list[Path]:
    """The files of a folder in the order of their paths, each under one of its names."""
    found: dict[tuple[int, int], Path] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        status = path.stat()
        found.setdefault((status.st_dev, status.st_ino), path)
    return list(found.values())


def read_files(
    paths: Sequence[Path], sampling_of: Callable[[NDArray[np.uint8], Header], int | None] | None = None
) -> Files:
    """Read the files that the engines decode, or those of which `sampling_of` returns a number, their sampling."""
    from gpuflow.decode.chunk_files import engine_sampling
    from gpuflow.decode.codecs import probe
    from gpuflow.errors import BadSampleError

    contents, sizes, samplings = [], [], []
    for path in paths:
        data = np.fromfile(path, np.uint8)
        try:
            header = probe(data)
            sampling = engine_sampling(data) if sampling_of is None else sampling_of(data, header)
        except BadSampleError:
            continue
        if sampling is not None:
            contents.append(data)
            sizes.append(header.size)
            samplings.append(sampling)
    if not contents:
        raise SystemExit(f"none of {len(paths)} files is a JPEG that the engines decode")
    return placed(contents, np.array(sizes), np.array(samplings), len(paths) - len(contents))


def placed(
    contents: Sequence[NDArray[np.uint8]], sizes: NDArray[np.int64], samplings: NDArray[np.int64], refused: int
) -> Files:
    """Encoded files one after the other, each at a multiple of 16 bytes."""
    lengths = np.array([len(data) for data in contents])
    ends = np.cumsum(-(-lengths // 16) * 16)
    starts = ends - -(-lengths // 16) * 16
    together = np.zeros(int(ends[-1]), np.uint8)
    for start, data in zip(starts.tolist(), contents, strict=True):
        together[start : start + len(data)] = data
    return Files(together, starts, lengths, sizes, samplings, refused)


def pixel_spaces(files: Files, call: NDArray[np.int64]) -> NDArray[np.int64]:
    """The bytes that the pixels of each file of a call need in GPU memory."""
    spaces: NDArray[np.int64] = -(-3 * files.sizes[call].prod(axis=1) // _ALIGN) * _ALIGN
    return spaces


def arguments(
    files: Files, address: int, pixels: int, call: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """What `BatchedDecoder.decode` needs for a call: addresses, lengths, and where the images are written.

    address: of `files.data` in pinned memory. pixels: the address in GPU memory where the first image is written.
    """
    spaces = pixel_spaces(files, call)
    images = np.zeros((len(call), 8), np.uint64)
    images[:, 0] = pixels + np.cumsum(spaces) - spaces
    images[:, 4] = 3 * files.sizes[call, 1]
    return (address + files.starts[call]).astype(np.uint64), files.lengths[call].astype(np.uint64), images


def calls_of(files: Files, *, size: int, by_pixels: bool) -> list[NDArray[np.int64]]:
    """Which files each call decodes: `size` files of one sampling, of all samplings in proportion, in a mixed order.

    Each file is in several calls (or, at most once a sampling, in one call too many), so that no call is partly full.

    by_pixels: whether each call has its files in descending order of pixels; otherwise they are shuffled.
    """
    rng, calls = np.random.default_rng(0), []
    pixels = files.sizes.prod(axis=1)
    for sampling in np.unique(files.samplings).tolist():
        members = np.flatnonzero(files.samplings == sampling)
        count = max(round(len(members) * _ROUNDS / size), 1)
        order = np.concatenate([rng.permutation(members) for _ in range(-(-count * size // len(members)))])
        calls += np.split(order[: count * size], count)
    if by_pixels:
        calls = [call[np.argsort(-pixels[call], kind="stable")] for call in calls]
    return [calls[place] for place in rng.permutation(len(calls))]


class _Caller:
    """One caller: a decoder for each sampling, a stream, and memory for the pixels of one call."""

    def __init__(self, files: Files, address: int, calls: Sequence[NDArray[np.int64]]) -> None:
        import torch

        self._files, self._address = files, address
        largest = max(int(pixel_spaces(files, call).sum()) for call in calls)
        self._pixels = torch.empty(largest, dtype=torch.uint8, device="cuda")
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._decoders: dict[int, Any] = {}

    def decode(self, call: NDArray[np.int64]) -> None:
        """Decode the files of a call and wait for the pixels."""
        from gpuflow.decode.nvjpeg import BatchedDecoder, find_nvjpeg

        files = self._files
        sampling = int(files.samplings[call[0]])
        if sampling not in self._decoders:
            self._decoders[sampling] = BatchedDecoder(find_nvjpeg(), "rgb")
        prepared = arguments(files, self._address, self._pixels.data_ptr(), call)
        self._decoders[sampling].decode(*prepared, self._stream.cuda_stream)
        self._stream.synchronize()


class Engines:
    """The engines with the files of a folder. share: the part of the files that they decode."""

    def __init__(self, folder: Path, *, by_pixels: bool) -> None:
        import torch

        paths = distinct_files(folder)
        files = read_files(paths)
        self.share = 1 - files.refused / len(paths)
        self._pinned = torch.from_numpy(files.data).pin_memory()
        self._calls = calls_of(files, size=CALL, by_pixels=by_pixels)
        self._callers = [_Caller(files, self._pinned.data_ptr(), self._calls) for _ in range(max(CALLERS))]

    def rate(self, seconds: float, callers: int) -> float:
        """Images per second with this number of concurrent callers."""
        return call_rate([caller.decode for caller in self._callers[:callers]], self._calls, seconds)


def call_rate(
    callers: Sequence[Callable[[NDArray[np.int64]], None]], calls: Sequence[NDArray[np.int64]], seconds: float
) -> float:
    """Images per second of concurrent callers that take turns at a cycle of calls."""
    lock, cycle = threading.Lock(), itertools.cycle(calls)

    def taken() -> Iterator[NDArray[np.int64]]:
        while time.perf_counter() < end:
            with lock:
                call = next(cycle)
            yield call

    def work(decode: Callable[[NDArray[np.int64]], None]) -> int:
        count = 0
        for call in taken():
            decode(call)
            count += len(call)
        return count

    with ThreadPoolExecutor(len(callers)) as pool:
        start = time.perf_counter()
        end = start + seconds
        images = sum(pool.map(work, callers))
    return images / (time.perf_counter() - start)
