"""Measurements for `gpuflow doctor`: how fast this machine reads images, and how fast cores and GPU decode them.

Each takes about a second and uses the decoders that the loader uses.
"""

from __future__ import annotations

import errno
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import NamedTuple, TypeVar

import cv2
import numpy as np
import psutil

from gpuflow.arrays import Bytes
from gpuflow.decode.chunk_files import engine_sampling
from gpuflow.decode.codecs import CpuDecoder, Header, probe
from gpuflow.decode.libjpeg_turbo import find_libjpeg_turbo, libjpeg_turbo_refusal
from gpuflow.errors import BadSampleError, MissingExtra, SourceError, SystemFault, reason_of, redacted
from gpuflow.runtime.threads import DaemonPool
from gpuflow.sources import Extent, SourceSpec

MANY_READERS = 16
"""Enough reading threads for storage with a high latency."""

_MOST_IMAGES, _KEPT_IMAGES, _KEPT_BYTES = 4096, 256, 64 << 20
_SEARCH_SECONDS, _DROP_SECONDS, _READ_SECONDS, _DECODE_SECONDS = 1.0, 0.8, 0.8, 0.6
_PATIENCE_SECONDS = 10.0
"""After this time a measurement ends with an error: the storage does not answer."""
_READ_ONLY = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a named pipe must not wait for its writer
_ENGINE_BATCH, _DECODED_BYTES = 256, 1 << 30

T = TypeVar("T")


# --- values ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuDecoders:
    """Versions of what decodes on the cores. libjpeg_turbo: None where none can be used, for the reason `refusal`."""

    libjpeg_turbo: str | None
    opencv: str
    refusal: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The images that the decoders were measured with.

    where: the source that they were read from, None for synthetic images. mean_bytes: mean size of an encoded image.
    width, height: of the image with the median area, in pixels. bad: how many of `images` cannot be decoded.
    for_engines: how many of `images` the JPEG engines can decode.
    """

    where: str | None
    images: int
    mean_bytes: float
    width: int
    height: int
    bad: int
    for_engines: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskRate:
    """Images read by `readers` threads after their contents were dropped from the page cache.

    cached: images that came from the page cache all the same, None if the file system does not say.
    unreadable: images that could not be read.
    """

    filesystem: str
    readers: int
    images: int
    images_per_s: float
    bytes_per_s: float
    cached: int | None
    unreadable: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeRate:
    """The rate of decoding whole images. at_once: number of threads, or of images in one call on a GPU.
    cores: processor time that the threads got per second, None on a GPU."""

    images_per_s: float
    at_once: int
    cores: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JpegEngines:
    """JPEG decoding on the GPU. path, version: of libnvjpeg, empty if there is none. backend: `hardware`, or `cuda` on
    GPUs without JPEG engines. error: why decoding failed. rate: None if it was not measured."""

    path: str = ""
    version: str = ""
    backend: str = "hardware"
    error: str | None = None
    rate: DecodeRate | None = None


# --- the disk ---------------------------------------------------------------------------------------------------------


def disk_rates(spec: SourceSpec, *, readers: Sequence[int]) -> tuple[tuple[DiskRate, ...], list[Bytes]]:
    """Read images of a local source in random order, once for each number of threads in `readers`.

    Each measurement reads other images. Their pages are dropped from the page cache first, as far as Linux does that.

    Returns:
        One rate for each entry of `readers`, and the bytes of some of the images, uint8 [n].

    Raises:
        SourceError: there is nothing to read, or the storage does not answer.
    """
    [extents] = at_once([partial(find_images, spec, limit=_MOST_IMAGES)], spec.where)
    rates, files = [], []
    for number, count in enumerate(readers):
        portion = extents[number :: len(readers)]
        shares = [share for i in range(count) if (share := portion[i::count])]
        if not shares:
            break
        deadline = time.perf_counter() + _DROP_SECONDS
        shares = at_once([partial(_dropped, share, deadline) for share in shares], spec.where)
        start = time.perf_counter()
        deadline = start + _READ_SECONDS
        keep = _KEPT_IMAGES // len(shares) + 1, _KEPT_BYTES // len(shares)
        done = at_once([partial(_read, share, deadline, keep) for share in shares], spec.where)
        seconds = time.perf_counter() - start
        files += [file for kept, _ in done for file in kept]
        counts = sum((counts for _, counts in done), Counter[str]())
        rates.append(
            DiskRate(
                filesystem=filesystem_of(extents[0].path),
                readers=count,
                images=counts["images"],
                images_per_s=counts["images"] / seconds,
                bytes_per_s=counts["bytes"] / seconds,
                cached=None if counts["unknown"] else counts["cached"],
                unreadable=counts["unreadable"],
            )
        )
    return tuple(rates), files[:_KEPT_IMAGES]


def find_images(spec: SourceSpec, *, limit: int, seconds: float = _SEARCH_SECONDS) -> list[Extent]:
    """Return images of a local source in random order, the same in each call. Lists part of a large source only.

    The search ends after `seconds`.

    Raises:
        NotMeasuredError: the source is of a kind whose files are not measured.
        SourceError: there are none, or they cannot be listed.
    """
    deadline, chance = time.monotonic() + seconds, random.Random(0)
    where = redacted(spec.where)
    try:
        found = spec.find_images(limit, deadline, chance)
    except SystemFault:
        raise
    except OSError as fault:
        raise SourceError(f"{fault.filename}: {str(fault.strerror).lower()}; check the path") from fault
    if not found:
        raise SourceError(f"{where}: holds no images; name a folder that does")
    chance.shuffle(found)
    return found


def _dropped(extents: Sequence[Extent], deadline: float) -> list[Extent]:
    """Ask Linux to drop these files from the page cache. Returns the extents that were reached before the deadline.

    Linux keeps pages that a process has mapped, pages that are not yet written, and files of in-memory file systems.
    """
    asked: set[str] = set()
    for number, extent in enumerate(extents):
        if time.perf_counter() > deadline:
            return list(extents[:number])
        if extent.path in asked:
            continue
        asked.add(extent.path)
        try:
            descriptor = os.open(extent.path, _READ_ONLY)
        except OSError:
            continue  # counted when it is read
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return list(extents)


def _read(extents: Sequence[Extent], deadline: float, keep: tuple[int, int]) -> tuple[list[Bytes], Counter[str]]:
    """Read until the deadline. Returns the first images, and the numbers of `images`, their `bytes`, those that were
    `cached`, those of which that is `unknown`, and the `unreadable` ones. keep: the most images and bytes to return."""
    files: list[Bytes] = []
    counts, room = Counter[str](), keep[1]
    buffer = memoryview(bytearray(1 << 20))
    for path, start, size in extents:
        if time.perf_counter() > deadline:
            break
        try:
            descriptor = os.open(path, _READ_ONLY)
            try:
                size = os.fstat(descriptor).st_size if size is None else size
                if size > len(buffer):
                    buffer = memoryview(bytearray(2 * size))
                ready = _read_cached(descriptor, buffer[:size], start)
                got = ready or 0
                while got < size and (more := os.preadv(descriptor, [buffer[got:size]], start + got)):
                    got += more
            finally:
                os.close(descriptor)
        except OSError:
            counts["unreadable"] += 1
            continue
        counts.update(images=1, bytes=got, cached=ready == size, unknown=ready is None)
        if len(files) < keep[0] and got <= room:
            room -= got
            files.append(np.frombuffer(bytes(buffer[:got]), np.uint8))
    return files, counts


def _read_cached(descriptor: int, buffer: memoryview, start: int) -> int | None:
    """Read only from the page cache. Returns the number of bytes; None if the file system does not support that."""
    try:
        return os.preadv(descriptor, [buffer], start, os.RWF_NOWAIT)
    except BlockingIOError:
        return 0
    except OSError as fault:
        if fault.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        return None


def filesystem_of(path: str, mounts: Sequence[tuple[str, str]] | None = None) -> str:
    """Return the kind of file system that a path is on; `unknown` where no mount holds it.

    Examples:
        >>> filesystem_of("/data/photos/1.jpg", [("/", "ext4"), ("/data", "nfs4")])
        'nfs4'

    Args:
        mounts: directory and kind of each mounted file system, in the order of mounting; by default this machine's.
    """
    if mounts is None:
        mounts = [(mount.mountpoint, mount.fstype) for mount in psutil.disk_partitions(all=True)]
    path, best, kind = os.path.realpath(path), "", "unknown"
    for directory, mounted in mounts:
        if len(directory) >= len(best) and os.path.join(path, "").startswith(os.path.join(directory, "")):
            best, kind = directory, mounted
    return kind


# --- the decoders -----------------------------------------------------------------------------------------------------


class ProbedImage(NamedTuple):
    """An encoded image, uint8 [n], and its header; None where the header is bad."""

    data: Bytes
    header: Header | None

    @property
    def for_engines(self) -> bool:
        return self.header is not None and engine_sampling(self.data) is not None


def probed(files: Sequence[Bytes]) -> list[ProbedImage]:
    """Read the header of each file."""

    def header(data: Bytes) -> Header | None:
        try:
            return probe(data, orientation=True)
        except BadSampleError:
            return None

    return [ProbedImage(data, header(data)) for data in files]


def photographs(count: int = 32) -> list[Bytes]:
    """Return synthetic JPEGs of 500x375 pixels, 4:2:0, as detailed as photographs: about 60 kB each."""
    files = []
    for seed in range(count):
        noise = np.random.default_rng(seed)
        image = 128 + noise.normal(0, 6, (375, 500, 3))
        for octave in range(1, 9):
            coarse = noise.normal(0, 60 / 1.5**octave, (3 * 2**octave // 4, 2**octave, 3))
            image += cv2.resize(coarse, (500, 375), interpolation=cv2.INTER_CUBIC)
        levels = np.clip(image, 0, 255).astype(np.uint8)
        files.append(cv2.imencode(".jpg", levels, [cv2.IMWRITE_JPEG_QUALITY, 90])[1])
    return files


def cpu_decoders() -> CpuDecoders:
    """Return the libraries that decode on the cores."""
    library = find_libjpeg_turbo()
    turbo = library.version if library else None
    return CpuDecoders(libjpeg_turbo=turbo, opencv=cv2.__version__, refusal=libjpeg_turbo_refusal())


def core_rates(images: Sequence[ProbedImage], *, threads: Sequence[int]) -> tuple[tuple[DecodeRate, ...], int]:
    """Decode the images repeatedly on the CPU, once for each number of threads in `threads`.

    Returns:
        One rate for each entry of `threads`, and the number of bad images.
    """
    good = [(image.data, image.header) for image in images if image.header is not None]
    bad: set[int] = set()

    def decode(first: int, deadline: float) -> int:
        decoder, decoded = CpuDecoder("rgb"), 0
        for i in islice(cycle(range(len(good))), first, None):
            if time.perf_counter() > deadline or len(bad) == len(good):
                break
            try:
                decoder.decode(*good[i])
                decoded += 1
            except BadSampleError:
                bad.add(i)
        return decoded

    rates = []
    for count in threads if good else ():
        start, cpu_start = time.perf_counter(), time.process_time()
        tasks = [partial(decode, i * len(good) // count, start + _DECODE_SECONDS) for i in range(count)]
        decoded = sum(at_once(tasks, "decoding"))
        seconds = time.perf_counter() - start
        cores = (time.process_time() - cpu_start) / seconds
        rates.append(DecodeRate(images_per_s=decoded / seconds, at_once=count, cores=cores))
    return tuple(rates), len(images) - len(good) + len(bad)


def jpeg_engines(images: Sequence[ProbedImage]) -> JpegEngines:
    """Find libnvjpeg and, given images, measure it on the current GPU: on its JPEG engines if it has any."""
    from gpuflow.decode.nvjpeg import BACKENDS, find_nvjpeg

    try:
        library = find_nvjpeg()
    except MissingExtra as error:
        return JpegEngines(error=str(error))
    found = JpegEngines(path=os.path.normpath(library.path), version=library.version)
    batch = _engine_batch(images)
    for backend in BACKENDS if batch else ():
        try:
            return replace(found, backend=backend, error=None, rate=_gpu_rate(batch, backend))
        except RuntimeError as fault:  # nvJPEG or CUDA failed, or the GPU is out of memory
            found = replace(found, error=reason_of(fault))
    return found


def _engine_batch(images: Sequence[ProbedImage]) -> list[tuple[Bytes, int, int]]:
    """Return a batch for the engines: images with height and width, repeated if there are too few."""
    suited = [(image.data, image.header) for image in images if image.header is not None and image.for_engines]
    batch, room = [], _DECODED_BYTES
    for data, header in islice(cycle(suited), _ENGINE_BATCH):
        room -= 3 * header.height * header.width
        if room < 0:
            break
        batch.append((data, header.height, header.width))
    return batch


def _gpu_rate(batch: Sequence[tuple[Bytes, int, int]], backend: str) -> DecodeRate:
    """Decode one batch repeatedly, one call after the other."""
    import torch

    from gpuflow.decode.nvjpeg import BatchedDecoder, find_nvjpeg

    files = [torch.tensor(data, device="cpu").pin_memory() for data, _, _ in batch]
    pixels = [torch.empty((height, 3 * width), dtype=torch.uint8, device="cuda") for _, height, width in batch]
    lengths, addresses = np.array([(len(file), file.data_ptr()) for file in files], np.uint64).T.copy()
    images = np.zeros((len(batch), 8), np.uint64)
    images[:, [0, 4]] = [(image.data_ptr(), image.shape[1]) for image in pixels]
    engines, stream = BatchedDecoder(find_nvjpeg(), "rgb", backend), torch.cuda.current_stream()

    def decode() -> int:
        engines.decode(addresses, lengths, images, stream.cuda_stream)
        torch.cuda.synchronize()
        return len(batch)

    for _ in range(3):
        decode()
    decoded, start = 0, time.perf_counter()
    while (seconds := time.perf_counter() - start) < _DECODE_SECONDS:
        decoded += decode()
    return DecodeRate(images_per_s=decoded / seconds, at_once=len(batch))


def data(images: Sequence[ProbedImage], *, bad: int, where: str | None) -> Data:
    """Return the number, sizes and usable share of the images."""
    headers = [image.header for image in images if image.header is not None]
    by_area = sorted((header.width * header.height, header.width, header.height) for header in headers)
    _, width, height = by_area[len(by_area) // 2] if by_area else (0, 0, 0)
    return Data(
        where=where,
        images=len(images),
        mean_bytes=sum(image.data.size for image in images) / len(images),
        width=width,
        height=height,
        bad=bad,
        for_engines=sum(image.for_engines for image in images),
    )


def at_once(tasks: Sequence[Callable[[], T]], where: str, *, patience: float = _PATIENCE_SECONDS) -> list[T]:
    """Run each task in its own thread. Returns their results in order.

    Raises:
        SourceError: a task takes longer than `patience` seconds, for example on a dead network mount.
    """
    pool = DaemonPool(len(tasks), "doctor")
    deadline = time.monotonic() + patience
    try:
        futures = [pool.submit(task) for task in tasks]
        return [future.result(max(0.0, deadline - time.monotonic())) for future in futures]
    except TimeoutError as fault:
        raise SourceError(f"{where}: no answer within {patience:g} s; check that the storage is there") from fault
    finally:
        pool.end(timeout=1.0)
