"""Collects the values that describe this machine, and calls `gpuflow.tools.rates` for the measurements."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import resource
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

import psutil

from gpuflow.arrays import Bytes
from gpuflow.errors import SourceError, reason_of, redacted
from gpuflow.runtime.cpu_budget import available_threads, cpu_quota
from gpuflow.sources import NotMeasuredError, SourceSpec
from gpuflow.sources.storage import is_remote
from gpuflow.tools.machine import (
    MODULES,
    VARIABLES,
    Cores,
    DiskRate,
    Gpu,
    Machine,
    Memory,
    ResourceLimits,
    Software,
    load_nvml,
    nvidia_driver,
)


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
    """Adds the measured rates to the machine's values."""
    from gpuflow.config.resources import gpu_readers_of
    from gpuflow.execute.gpu.gpu_call import can_be_used
    from gpuflow.tools import rates

    threads = machine.cores.threads
    readers = readers or (gpu_readers_of(threads) if machine.gpus else threads)
    decoders = rates.cpu_decoders()
    disk, files, error, unmeasured = tuple[DiskRate, ...](), list[Bytes](), None, None
    local = source is not None and not is_remote(source.folder_of_images)
    if local:
        assert source is not None
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
        c_code=can_be_used() if machine.gpus else None,
        data=rates.data(images, bad=bad, where=machine.source if files else None),
        data_error=error,
        unmeasured=unmeasured,
        disk=disk,
        core_rates=core_rates,
    )


def broken_modules() -> dict[str, str]:
    """The modules of `MODULES` that cannot be imported, and why. After a repair, call it in a new process."""
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
        try:
            versions[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:  # OpenCV comes under several names
            continue
    cuda = None
    if "torch" not in broken:
        import torch

        versions["torch"], cuda = torch.__version__, torch.version.cuda
    return Software(python=platform.python_version(), versions=versions, broken=broken, cuda=cuda)


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """The GPUs that torch can use; if there are none, torch's explanation."""
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
    threads = named or usable
    if named is None and not broken:
        threads = available_threads()
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
        status = os.statvfs(path)
    except OSError:
        return None
    return Memory(size_bytes=status.f_blocks * status.f_frsize, free_bytes=status.f_bavail * status.f_frsize)
