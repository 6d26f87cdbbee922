"""What the NVIDIA driver says: a stand-in for the module `pynvml`, and the module itself on this machine."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import final

import pynvml
import pytest
import torch

from gpuflow.tools.machine import Driver, GpuUtilization, load_nvml, nvidia_driver


@final
class FakeNvml:
    """Driver 580.65.06, CUDA 13.0, three GPUs that are busy for 10%, 20% and 30%.

    start: the error of the first call, 0 for none. lost: a GPU that no longer answers.
    """

    NVMLError = pynvml.NVMLError
    NVMLError_LibraryNotFound = pynvml.NVMLError_LibraryNotFound
    NVMLError_DriverNotLoaded = pynvml.NVMLError_DriverNotLoaded

    def __init__(self, *, start: int = 0, lost: int | None = None, count_fails: bool = False) -> None:
        self._start, self._lost, self._count_fails = start, lost, count_fails
        self.in_use = 0

    def nvmlInit(self) -> None:
        if self._start:
            raise pynvml.NVMLError(self._start)
        self.in_use += 1

    def nvmlShutdown(self) -> None:
        assert self.in_use
        self.in_use -= 1

    def nvmlErrorString(self, result: int) -> str:
        return {15: "GPU is lost", 18: "Driver/library version mismatch"}[result]

    def nvmlSystemGetDriverVersion(self) -> str:
        assert self.in_use
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        assert self.in_use
        return 13000

    def nvmlDeviceGetCount(self) -> int:
        assert self.in_use
        if self._count_fails:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        assert self.in_use
        return 1000 + index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        assert self.in_use
        if handle - 1000 == self._lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return SimpleNamespace(gpu=10 * (handle - 999), memory=99)


def test_the_stand_in_has_the_functions_of_the_module() -> None:
    """A call that the stand-in takes is one that the module takes."""
    for name, function in inspect.getmembers(FakeNvml(), inspect.ismethod):
        if name.startswith("nvml"):
            ours, theirs = (list(inspect.signature(f).parameters) for f in (function, getattr(pynvml, name)))
            assert ours == theirs, name


# --- the driver -------------------------------------------------------------------------------------------------------


def test_the_driver_is_asked() -> None:
    nvml = FakeNvml()
    assert nvidia_driver(nvml) == Driver(version="580.65.06", cuda="13.0", gpus=3)
    assert not nvml.in_use


@pytest.mark.parametrize("error", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED])
def test_no_driver(error: int) -> None:
    assert nvidia_driver(FakeNvml(start=error)) is None


def test_a_driver_with_an_error() -> None:
    nvml = FakeNvml(start=pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    assert nvidia_driver(nvml) == Driver(error="Driver/library version mismatch")


def test_a_driver_that_fails_after_its_start() -> None:
    nvml = FakeNvml(count_fails=True)
    assert nvidia_driver(nvml) == Driver(error="GPU is lost")
    assert not nvml.in_use


def test_a_driver_that_cannot_be_asked() -> None:
    assert nvidia_driver(None) == Driver(asked=False)


def test_the_package_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_nvml() is pynvml
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    assert load_nvml() is None


def test_the_driver_of_this_machine() -> None:
    driver = nvidia_driver(load_nvml())
    assert driver is None or driver.error or (driver.version and driver.cuda)
    utilization = GpuUtilization(load_nvml())
    assert all(0 <= percent <= 100 for percent in utilization.percents())
    utilization.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no NVIDIA GPU")
def test_the_driver_of_a_machine_with_a_gpu() -> None:
    driver = nvidia_driver(load_nvml())
    assert driver is not None and driver.error is None and driver.asked
    assert driver.gpus >= torch.cuda.device_count()
    assert float(driver.cuda) >= 11
    utilization = GpuUtilization(load_nvml())
    assert len(utilization.percents()) == driver.gpus
    utilization.close()


# --- how busy GPUs are ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lost", "expected"), [(None, [10, 20, 30]), (1, [10, 30])])
def test_gpus(lost: int | None, expected: list[int]) -> None:
    nvml = FakeNvml(lost=lost)
    utilization = GpuUtilization(nvml)
    assert utilization.percents() == expected
    utilization.close()
    assert not nvml.in_use
    assert utilization.percents() == []
    utilization.close()


@pytest.mark.parametrize(
    "nvml", [None, FakeNvml(start=9), FakeNvml(count_fails=True)], ids=["no package", "no driver", "no count"]
)
def test_no_gpus(nvml: FakeNvml | None) -> None:
    utilization = GpuUtilization(nvml)
    assert utilization.percents() == []
    utilization.close()
    assert nvml is None or not nvml.in_use
