"""What this machine is, as far as loading images goes: plain values, and how they are read from it.

`gather` reads all of them and has `gpuflow.rates` measure what must be measured. `gpuflow.doctor` judges them.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import platform
import resource
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuflow.errors import SourceError
from gpuflow.sources import SourceSpec
from gpuflow.sources.storage import is_remote

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
    "broken_modules",
    "cpu_quota",
    "gather",
    "nvidia_driver",
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
_NVML_NOT_LOADED = 9


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
    """The NVIDIA driver. cuda: the newest CUDA version that it runs. error: what it says where it does not answer."""

    version: str = ""
    cuda: str = ""
    gpus: int = 0
    error: str | None = None


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


def gather(
    *,
    source: SourceSpec | None = None,
    threads: int | None = None,
    readers: int | None = None,
    progress: Callable[[str], object] = lambda doing: None,
) -> Machine:
    """Look at this machine and measure it, in about ten seconds at most.

    Args:
        source: whose images are read; without one the decoders get images made on the spot.
        threads, readers: of a file; by default as many as gpuflow would start.
        progress: told what is being done.
    """
    progress("looking around")
    broken = broken_modules()
    gpus, gpu_error = ((), None) if broken else _gpus()
    machine = Machine(
        software=_software(broken),
        driver=nvidia_driver(),
        gpus=gpus,
        gpu_error=gpu_error,
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
        cores=_cores(threads, broken),
        limits=_limits(),
        shared_memory=_shared_memory(),
        source=None if source is None else source.where,
    )
    return machine if broken else _measured(machine, source, readers, progress)


def _measured(
    machine: Machine, source: SourceSpec | None, readers: int | None, progress: Callable[[str], object]
) -> Machine:
    """The machine with its rates."""
    from gpuflow import rates

    threads = machine.cores.threads
    readers = readers or (max(rates.GPU_READERS, threads // 4) if machine.gpus else threads)
    decoders = rates.cpu_decoders()
    disk, files, error = tuple[DiskRate, ...](), list[NDArray[np.uint8]](), None
    if source is not None and not is_remote(str(source.root or machine.source)):
        progress("reading images")
        try:
            disk, files = rates.disk_rates(source, readers=sorted({readers, max(readers, rates.MANY_READERS)}))
        except SourceError as fault:
            error = str(fault)
    progress("decoding on the cores")
    images = rates.probed(files or rates.photographs())
    core_rates, bad = rates.core_rates(images, threads=sorted({1, threads}))
    if machine.gpus:
        progress("decoding on the GPU")
    return replace(
        machine,
        decoders=decoders,
        engines=rates.jpeg_engines(images if machine.gpus else ()),
        data=rates.data(images, bad=bad, where=machine.source if files else None),
        data_error=error,
        disk=disk,
        core_rates=core_rates,
    )


def broken_modules() -> dict[str, str]:
    """Each module of `MODULES` that cannot be imported, and why. A mended installation needs a new process."""
    broken = {}
    for module in MODULES:
        try:
            importlib.import_module(module)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:  # what mismatched libraries raise
            broken[module] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return broken


def _software(broken: Mapping[str, str]) -> Software:
    versions = {}
    for distribution in MODULES.values():
        try:
            versions[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:  # OpenCV comes under several names
            continue
    cuda = None
    if "torch" not in broken:
        import torch

        versions["torch"], cuda = torch.__version__, torch.version.cuda
    return Software(python=platform.python_version(), versions=versions, broken=broken, cuda=cuda)


def nvidia_driver(load: Callable[[str], Any] = ctypes.CDLL) -> Driver | None:
    """What the driver's own library, NVML, says of it; None where there is none. Source of the calls: `nvml.h`."""
    try:
        nvml = load("libnvidia-ml.so.1")
    except OSError:
        return None
    if status := nvml.nvmlInit_v2():
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        return None if status == _NVML_NOT_LOADED else Driver(error=nvml.nvmlErrorString(status).decode())
    version, cuda, gpus = ctypes.create_string_buffer(96), ctypes.c_int(), ctypes.c_uint()
    nvml.nvmlSystemGetDriverVersion(version, len(version))
    nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda))
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(gpus))
    nvml.nvmlShutdown()
    return Driver(
        version=version.value.decode(), cuda=f"{cuda.value // 1000}.{cuda.value % 1000 // 10}", gpus=gpus.value
    )


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """The GPUs that torch can use; if there are none, what it says about that."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return (), str(caught[0].message).partition("\n")[0] if caught else None
    try:
        found = [torch.cuda.get_device_properties(i) for i in range(count)]
    except RuntimeError as error:
        return (), str(error).partition("\n")[0]
    return tuple(Gpu(name=gpu.name, memory_bytes=gpu.total_memory) for gpu in found), None


def _cores(named: int | None, broken: Mapping[str, str]) -> Cores:
    usable = len(os.sched_getaffinity(0))
    threads = named or usable
    if named is None and not broken:
        from gpuflow.build import available_threads

        threads = available_threads()
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return Cores(
        present=os.cpu_count() or usable,
        usable=usable,
        quota=cpu_quota(),
        threads=threads,
        ranks=int(ranks) if ranks.isdigit() else 1,
    )


def cpu_quota(root: Path = Path("/")) -> float | None:
    """How many cores' worth of time the control groups (v1 or v2) of this process grant it; None without a limit.

    The least of its own group and those around it counts. `root` is where `proc` and `sys` are.
    """
    quotas = []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in {root / "sys/fs/cgroup" / name for name in ((controllers, "cpu") if controllers else ("",))}:
            own = PurePosixPath(group.lstrip("/"))
            quotas += [_group_quota(mount / around) for around in (own, *own.parents)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _group_quota(folder: Path) -> float | None:
    """`cpu.max` holds `400000 100000` or `max 100000` microseconds; version 1 has a file for each and -1."""
    if (both := _text(folder / "cpu.max")) is not None:
        quota, period = both.split()
    else:
        quota = (_text(folder / "cpu.cfs_quota_us") or "-1").strip()
        period = (_text(folder / "cpu.cfs_period_us") or "100000").strip()
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _limits() -> Limits:
    def known(limit: int) -> int | None:
        return None if limit == resource.RLIM_INFINITY else limit

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Limits(
        open_files=known(soft),
        open_files_hard=known(hard),
        open_now=len(os.listdir("/proc/self/fd")),
        locked_bytes=known(locked),
    )


def _shared_memory(path: str = "/dev/shm") -> Memory | None:
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return Memory(size_bytes=status.f_blocks * status.f_frsize, free_bytes=status.f_bavail * status.f_frsize)
