"""What this machine is, as far as loading images goes: plain values, and how they are read from it.

`gather` reads all of them and has `rates` measure what must be measured. `doctor` judges them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "MODULES",
    "VARIABLES",
    "Cores",
    "CpuDecoders",
    "Data",
    "DecodeRate",
    "DiskRate",
    "Driver",
    "Gpu",
    "JpegEngines",
    "Limits",
    "Machine",
    "Memory",
    "Software",
]

MODULES = {
    "torch": "torch",
    "torchvision": "torchvision",
    "spdl.pipeline": "spdl-core",
    "cv2": "opencv-python-headless",
}
"""What gpuflow cannot run without: module -> the distribution that brings it."""
VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TRITON_INTERPRET",
)
"""Environment variables that change how fast gpuflow runs, or on what."""


# --- values -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """versions: by distribution, of `MODULES`. broken: why a module cannot be imported, by module.
    cuda: the CUDA version that torch is built for, None if it is built without."""

    python: str
    versions: Mapping[str, str]
    broken: Mapping[str, str]
    cuda: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Driver:
    """The NVIDIA driver. cuda: the newest CUDA version that it runs. error: what it says where it does not answer.
    asked: False where nvidia-ml-py, which asks it, is not installed; then nothing is known about it."""

    version: str = ""
    cuda: str = ""
    gpus: int = 0
    error: str | None = None
    asked: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU that torch can use."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuDecoders:
    """Versions. libjpeg_turbo: of a library that decodes regions, None if there is none."""

    libjpeg_turbo: str | None
    opencv: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cores:
    """Of the processor. usable: those that this process may run on. quota: how many cores' worth of time a control
    group grants, None if it sets no limit. threads: how many decode threads gpuflow starts in each of `ranks`
    processes."""

    present: int
    usable: int
    quota: float | None
    threads: int
    ranks: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Resource limits of this process, None for no limit. open_now: descriptors that are open already."""

    open_files: int | None
    open_files_hard: int | None
    open_now: int
    locked_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """A file system in memory."""

    size_bytes: int
    free_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The images that the decoders were measured with.

    where: what they were read from, None if they were made on the spot. mean_bytes: of an encoded image.
    width, height: of the median image by area, in pixels. bad: how many of `images` cannot be decoded.
    for_engines: how many of them the JPEG engines take.
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

    cached: how many were there all the same, None if the file system does not tell. unreadable: how many failed.
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
    """Whole images decoded over and over. at_once: by so many threads, or in one call. cores: how many cores' worth of
    time the threads got, None on a GPU."""

    images_per_s: float
    at_once: int
    cores: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class JpegEngines:
    """NVIDIA's JPEG engines. path, version: of libnvjpeg, empty if there is none. backend: what it decodes with,
    `hardware` or, on GPUs without engines, `cuda`. error: why it cannot. rate: None if it was not measured."""

    path: str = ""
    version: str = ""
    backend: str = "hardware"
    error: str | None = None
    rate: DecodeRate | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Everything that is judged.

    source: where the images are that were to be read, if any were.
    driver: None where there is none. gpus: those that torch can use. gpu_error: torch's words on why it sees none.
    decoders, engines, data: None where nothing could be imported. data_error: why the images cannot be read.
    disk, core_rates: one measurement for each number of threads.
    """

    software: Software
    driver: Driver | None
    gpus: tuple[Gpu, ...]
    gpu_error: str | None
    environment: Mapping[str, str]
    cores: Cores
    limits: Limits
    shared_memory: Memory | None
    source: str | None = None
    decoders: CpuDecoders | None = None
    engines: JpegEngines | None = None
    data: Data | None = None
    data_error: str | None = None
    disk: tuple[DiskRate, ...] = ()
    core_rates: tuple[DecodeRate, ...] = ()


# --- reading them -----------------------------------------------------------------------------------------------------
