"""Inspects this machine: software, GPUs (by NVML), cores and limits, and what processes use of it.

For `gpuflow doctor`, `gather` collects the values and calls `rates` for the measurements; `doctor` judges them. The
commands that measure ask for the processor time and memory of processes, and how busy the GPUs are.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import psutil

from gpuflow.arrays import Bytes
from gpuflow.errors import SourceError, reason_of, redacted
from gpuflow.runtime.cuda import QUEUES_VARIABLE
from gpuflow.runtime.threads import available_threads, cpu_quota
from gpuflow.sources import NotMeasuredError, SourceSpec
from gpuflow.sources.storage import is_remote

if TYPE_CHECKING:
    from gpuflow.tools.rates import CpuDecoders, Data, DecodeRate, DiskRate, JpegEngines


def load_nvml() -> Any | None:
    """Return the module `pynvml`; None where nvidia-ml-py is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def nvidia_driver(nvml: Any | None) -> Driver | None:
    """Return the driver's version and GPUs. None where no driver is installed or loaded.

    Args:
        nvml: what `load_nvml` returns.
    """
    if nvml is None:
        return Driver(asked=False)
    try:
        nvml.nvmlInit()
        try:
            cuda = nvml.nvmlSystemGetCudaDriverVersion()
            return Driver(
                version=nvml.nvmlSystemGetDriverVersion(),
                cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
                gpus=nvml.nvmlDeviceGetCount(),
            )
        finally:
            nvml.nvmlShutdown()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return None
    except nvml.NVMLError as error:
        return Driver(error=nvml.nvmlErrorString(error.value))


MODULES = {
    "torch": "torch",
    "torchvision": "torchvision",
    "spdl.pipeline": "spdl-core",
    "cv2": "opencv-python-headless",
}
"""The modules that gpuflow cannot run without: module -> the distribution that contains it."""
VARIABLES = (
    QUEUES_VARIABLE,
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TRITON_INTERPRET",
)
"""Environment variables that change how fast gpuflow runs, or on which device."""


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
    """The NVIDIA driver. cuda: the newest CUDA version that it supports. error: why it does not answer.
    asked: False where nvidia-ml-py is not installed; then nothing is known about the driver."""

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
class Cores:
    """The processor's cores. usable: cores that this process may run on. quota: the CPU limit of the control group, in
    cores, None without a limit. threads: decode threads that gpuflow starts in each of `ranks` processes."""

    present: int
    usable: int
    quota: float | None
    threads: int
    ranks: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceLimits:
    """Resource limits of this process, None for no limit. open_now: file descriptors that are open already."""

    open_files: int | None
    open_files_hard: int | None
    open_now: int
    locked_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Size of an in-memory file system."""

    size_bytes: int
    free_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """All values that `doctor` judges.

    source: the folder, listing or shards to read from, None if none was named.
    driver: None where none is installed. gpus: GPUs that torch can use. gpu_error: why torch sees none, in its words.
    decoders, engines, data: None where a required module cannot be imported. data_error: why images cannot be read.
    unmeasured: why the source's disk was not measured, if it has no such error.
    c_code: whether C code can queue a GPU's work; None without a GPU.
    disk, core_rates: one measurement for each number of threads.
    """

    software: Software
    driver: Driver | None
    gpus: tuple[Gpu, ...]
    gpu_error: str | None
    environment: Mapping[str, str]
    cores: Cores
    limits: ResourceLimits
    shared_memory: Memory | None
    source: str | None = None
    decoders: CpuDecoders | None = None
    engines: JpegEngines | None = None
    c_code: bool | None = None
    data: Data | None = None
    data_error: str | None = None
    unmeasured: str | None = None
    disk: tuple[DiskRate, ...] = ()
    core_rates: tuple[DecodeRate, ...] = ()


def gather(
    *,
    source: SourceSpec | None = None,
    threads: int | None = None,
    readers: int | None = None,
    progress: Callable[[str], object] = lambda doing: None,
) -> Machine:
    """Inspect and measure this machine, in about ten seconds at most.

    Args:
        source: its images are read; without a source the decoders get synthetic images.
        threads, readers: numbers of threads that a YAML file sets; by default those that gpuflow would start.
        progress: called with a description of each step.
    """
    progress("looking around")
    broken = broken_modules()
    gpus, gpu_error = ((), None) if broken else _gpus()
    machine = Machine(
        software=_software(broken),
        driver=nvidia_driver(load_nvml()),
        gpus=gpus,
        gpu_error=gpu_error,
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
        cores=_cores(threads, broken),
        limits=_limits(),
        shared_memory=_shared_memory(),
        source=None if source is None else redacted(source.where),
    )
    return machine if broken else _measured(machine, source, readers, progress)


def _measured(
    machine: Machine, source: SourceSpec | None, readers: int | None, progress: Callable[[str], object]
) -> Machine:
    """Add the measured rates to the machine's values."""
    from gpuflow.config.resources import gpu_readers_of
    from gpuflow.execute.gpu.gpu_call import find_driver
    from gpuflow.tools import rates

    threads = machine.cores.threads
    readers = readers or (gpu_readers_of(threads) if machine.gpus else threads)
    decoders = rates.cpu_decoders()
    disk, files, error, unmeasured = tuple[rates.DiskRate, ...](), list[Bytes](), None, None
    if source is not None and not is_remote(source.folder_of_images):
        progress("reading images")
        try:
            disk, files = rates.disk_rates(source, readers=sorted({readers, max(readers, rates.MANY_READERS)}))
        except NotMeasuredError as reason:
            unmeasured = str(reason)
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
        c_code=find_driver() is not None if machine.gpus else None,
        data=rates.data(images, bad=bad, where=machine.source if files else None),
        data_error=error,
        unmeasured=unmeasured,
        disk=disk,
        core_rates=core_rates,
    )


def broken_modules() -> dict[str, str]:
    """Return the modules of `MODULES` that cannot be imported, and why. After a repair, call it in a new process."""
    broken = {}
    for module in MODULES:
        try:
            importlib.import_module(module)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:  # mismatched libraries raise any of these
            broken[module] = reason_of(error, with_type=True)
    return broken


def _software(broken: Mapping[str, str]) -> Software:
    versions = {}
    for distribution in MODULES.values():
        with suppress(importlib.metadata.PackageNotFoundError):  # OpenCV comes under several names
            versions[distribution] = importlib.metadata.version(distribution)
    cuda = None
    if "torch" not in broken:
        import torch

        versions["torch"], cuda = torch.__version__, torch.version.cuda
    return Software(python=platform.python_version(), versions=versions, broken=broken, cuda=cuda)


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """Return the GPUs that torch can use; if there are none, torch's explanation."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return (), str(caught[0].message).partition("\n")[0] if caught else None
    try:
        found = [torch.cuda.get_device_properties(i) for i in range(count)]
    except RuntimeError as error:
        return (), reason_of(error)
    return tuple(Gpu(name=gpu.name, memory_bytes=gpu.total_memory) for gpu in found), None


def _cores(named: int | None, broken: Mapping[str, str]) -> Cores:
    usable = len(os.sched_getaffinity(0))
    threads = named or (usable if broken else available_threads())
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return Cores(
        present=os.cpu_count() or usable,
        usable=usable,
        quota=cpu_quota(),
        threads=threads,
        ranks=int(ranks) if ranks.isdigit() else 1,
    )


def _limits() -> ResourceLimits:
    def known(limit: int) -> int | None:
        return None if limit == resource.RLIM_INFINITY else limit

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return ResourceLimits(
        open_files=known(soft),
        open_files_hard=known(hard),
        open_now=psutil.Process().num_fds(),
        locked_bytes=known(locked),
    )


def _shared_memory(path: str = "/dev/shm") -> Memory | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return Memory(size_bytes=usage.total, free_bytes=usage.free)


# --- what is in use ---------------------------------------------------------------------------------------------------


class GpuUtilization:
    """Measures how busy each NVIDIA GPU is. Without nvidia-ml-py, a driver or a GPU there are no figures.

    Args:
        nvml: what `load_nvml` returns.
    """

    def __init__(self, nvml: Any | None) -> None:
        self._nvml: Any = nvml
        self._handles: list[Any] = []
        if nvml is None:
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            self._nvml = None
            return
        with suppress(nvml.NVMLError):
            for index in range(nvml.nvmlDeviceGetCount()):
                with suppress(nvml.NVMLError):  # a GPU that other users hold, or that is lost
                    self._handles.append(nvml.nvmlDeviceGetHandleByIndex(index))

    def percents(self) -> list[int]:
        """Return for each GPU that answers the share of the last 1/6 to 1 s in which a kernel ran."""
        found = []
        for handle in self._handles:
            with suppress(self._nvml.NVMLError):
                found.append(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return found

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
        self._nvml, self._handles = None, []


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Of several processes together. cpu_s: processor seconds since they began.

    rss_bytes: resident memory now, in which pages that processes share count for each of them. pss_bytes: the same with
    each page divided among all processes that share it; None if it was not asked for, or is not known of one of them.
    """

    cpu_s: float
    rss_bytes: int
    pss_bytes: int | None = None


def usage_of(pids: Iterable[int], *, pss: bool = False) -> Usage | None:
    """Return the processor time and memory of these processes and their children; None if one of them has ended.

    pss: also read `pss_bytes`, for which the system looks at every page.
    """
    try:
        named = {psutil.Process(pid) for pid in pids}
        started = {child for process in named for child in process.children(recursive=True)} - named
        used = [_usage(process, pss=pss) for process in named]
    except psutil.NoSuchProcess:
        return None
    for process in started:
        with suppress(psutil.NoSuchProcess):
            used.append(_usage(process, pss=pss))
    shares = [one.pss_bytes for one in used if one.pss_bytes is not None]
    return Usage(
        cpu_s=sum(one.cpu_s for one in used),
        rss_bytes=sum(one.rss_bytes for one in used),
        pss_bytes=sum(shares) if pss and len(shares) == len(used) else None,
    )


def _usage(process: psutil.Process, *, pss: bool) -> Usage:
    times = process.cpu_times()
    return Usage(
        cpu_s=times.user + times.system,
        rss_bytes=process.memory_info().rss,
        pss_bytes=_pss(process) if pss else None,
    )


def _pss(process: psutil.Process) -> int | None:
    """Return the proportional memory; None for a process of another user, and where the kernel does not count it."""
    try:
        return getattr(process.memory_full_info(), "pss", None)
    except psutil.AccessDenied:
        return None


def listeners(host: str, port: int) -> tuple[int, ...]:
    """Return the processes of this user that listen on a TCP port; none if the host is not this machine."""
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        return ()
    if not any(ip_address(address).is_loopback for address in addresses):
        return ()
    return tuple(sorted(process.pid for process in psutil.process_iter() if _listens(process, port)))


def _listens(process: psutil.Process, port: int) -> bool:
    """Return True if a process has a listening socket on a port. False for processes of other users, which do not say.

    Each process is asked by itself, because several may share one socket, and a list of the machine's sockets names
    only one process for each.
    """
    try:
        sockets = process.net_connections(kind="tcp")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    return any(found.status == psutil.CONN_LISTEN and found.laddr.port == port for found in sockets)
