"""The values that describe a machine for `gpuflow doctor`: software, GPUs (by NVML), cores, limits and measured rates.

`gather` collects them and calls `rates` for the measurements. `doctor` judges them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gpuflow.runtime import hardware_queues


def load_nvml() -> Any | None:
    """The module `pynvml`; None where nvidia-ml-py is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def nvidia_driver(nvml: Any | None) -> Driver | None:
    """The driver's version and GPUs. None where no driver is installed or loaded.

    Args:
        nvml: what `load_nvml` returns.
    """
    if nvml is None:
        return Driver(asked=False)
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return None
    except nvml.NVMLError as error:
        return Driver(error=nvml.nvmlErrorString(error.value))
    try:
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        return Driver(
            version=nvml.nvmlSystemGetDriverVersion(),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
            gpus=nvml.nvmlDeviceGetCount(),
        )
    except nvml.NVMLError as error:
        return Driver(error=nvml.nvmlErrorString(error.value))
    finally:
        nvml.nvmlShutdown()


class GpuUtilization:
    """How busy each NVIDIA GPU of this machine is. Without nvidia-ml-py, a driver or a GPU there are no figures.

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
        """For each GPU that answers, the share of the last 1/6 to 1 s in which a kernel ran."""
        found = []
        for handle in self._handles:
            with suppress(self._nvml.NVMLError):
                found.append(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return found

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
        self._nvml, self._handles = None, []


MODULES = {
    "torch": "torch",
    "torchvision": "torchvision",
    "spdl.pipeline": "spdl-core",
    "cv2": "opencv-python-headless",
}
"""The modules that gpuflow cannot run without: module -> the distribution that contains it."""
VARIABLES = (
    hardware_queues.VARIABLE,
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
class CpuDecoders:
    """Versions of what decodes on the cores. libjpeg_turbo: None where none can be used, for the reason `refusal`."""

    libjpeg_turbo: str | None
    opencv: str
    refusal: str = ""


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
