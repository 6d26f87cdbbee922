"""What the NVIDIA driver says through its management library (NVML): its version, and how busy the GPUs are.

The calls are those of the package nvidia-ml-py (module `pynvml`), which comes with the extra `gpu` and may be absent.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from gpuflow.tools.machine import Driver

__all__ = ["GpuUtilization", "load_nvml", "nvidia_driver"]


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
