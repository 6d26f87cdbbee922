"""The findings of `gpuflow doctor` for given values of a machine, and the command itself on this machine."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from gpuflow.cli import app, main
from gpuflow.decode.libjpeg_turbo import OPENCV_COST, REMEDY
from gpuflow.sources.storage import local
from gpuflow.tools.doctor import FILES_A_THREAD, TESTED, Finding, judge, report
from gpuflow.tools.machine import Cores, Driver, Gpu, Machine, Memory, ResourceLimits, Software
from gpuflow.tools.rates import CpuDecoders, Data, DecodeRate, DiskRate, JpegEngines
from tests.datasets import deadline, make_photos, python, write_config

ROOT = Path(__file__).parents[2]

SOFTWARE = Software(
    python="3.12.3",
    versions={"torch": "2.11.0+cu130", "torchvision": "0.26.0", "spdl-core": "0.8.0"},
    broken={},
    cuda="13.0",
)
ENGINES = JpegEngines(path="/lib/libnvjpeg.so.13", version="13.0.1", rate=DecodeRate(images_per_s=34567.8, at_once=256))
DISK = DiskRate(
    filesystem="ext4", readers=2, images=2048, images_per_s=40404.0, bytes_per_s=2.4e9, cached=0, unreadable=0
)
DATA = Data(where="data/photos", images=256, mean_bytes=61_300, width=500, height=375, bad=0, for_engines=256)
H100 = Machine(
    software=SOFTWARE,
    driver=Driver(version="580.65.06", cuda="13.0", gpus=1),
    gpus=(Gpu(name="NVIDIA H100 80GB HBM3", memory_bytes=85_000_000_000),),
    gpu_error=None,
    environment={},
    cores=Cores(present=16, usable=16, quota=None, threads=16),
    limits=ResourceLimits(open_files=1_048_576, open_files_hard=1_048_576, open_now=10, locked_bytes=8 << 20),
    shared_memory=Memory(size_bytes=64 << 30, free_bytes=63 << 30),
    source="data/photos",
    decoders=CpuDecoders(libjpeg_turbo="3.1.0", opencv="4.12.0"),
    engines=ENGINES,
    c_code=True,
    data=DATA,
    disk=(DISK, replace(DISK, readers=16, images_per_s=41000.0)),
    core_rates=(
        DecodeRate(images_per_s=731.4, at_once=1, cores=1.0),
        DecodeRate(images_per_s=8700.0, at_once=16, cores=15.9),
    ),
)
NO_GPU = replace(
    H100,
    driver=None,
    gpus=(),
    engines=JpegEngines(path="/lib/libnvjpeg.so.13", version="13.0.1"),
    c_code=None,
    disk=(DISK,),
)


def of(topic: str, machine: Machine) -> list[Finding]:
    return [finding for finding in judge(machine) if finding.topic == topic]


def only(topic: str, machine: Machine) -> Finding:
    [finding] = of(topic, machine)
    return finding


# --- a sound machine --------------------------------------------------------------------------------------------------


def test_a_sound_machine_with_a_gpu() -> None:
    assert judge(H100) == [
        Finding("Python", "ok", "3.12.3"),
        Finding("torch", "ok", "torch 2.11.0+cu130, torchvision 0.26.0: the tested pair"),
        Finding("SPDL", "ok", "spdl-core 0.8.0"),
        Finding("driver", "ok", "NVIDIA 580.65.06, for CUDA up to 13.0"),
        Finding("GPU", "ok", "1 x NVIDIA H100 80GB HBM3, 79 GiB; torch is built for CUDA 13.0"),
        Finding("JPEG engines", "ok", "libnvjpeg 13.0.1, /lib/libnvjpeg.so.13"),
        Finding("C code", "ok", "queues the GPU's work without Python's interpreter"),
        Finding("CPU decoder", "ok", "libjpeg-turbo 3.1.0 (JPEG, only the region of a crop), OpenCV 4.12.0 (the rest)"),
        Finding("cores", "ok", "16 cores; gpuflow decodes with 16 threads"),
        Finding("open files", "ok", "limit 1,048,576; gpuflow needs at most 586"),
        Finding("shared memory", "ok", "/dev/shm: 63.0 GiB free of 64.0 GiB"),
        Finding("locked memory", "ok", "limit 8 MiB; CUDA's pinned memory does not count, NCCL's on InfiniBand does"),
        Finding("images", "ok", "256 of data/photos, 500x375 pixels (median), 61 kB (mean)"),
        Finding(
            "disk",
            "ok",
            "40,400 images/s, 2,400 MB/s: 2,048 read by 2 threads from ext4, cold (dropped from the page cache first)",
        ),
        Finding(
            "disk",
            "ok",
            "41,000 images/s, 2,400 MB/s: 2,048 read by 16 threads from ext4, cold (dropped from the page cache first)",
        ),
        Finding("cores' rate", "ok", "731 images/s decoded whole by 1 thread"),
        Finding("cores' rate", "ok", "8,700 images/s decoded whole by 16 threads"),
        Finding("GPU's rate", "ok", "34,600 images/s decoded whole on the GPU, 256 a call from pinned memory"),
        Finding(
            "limit",
            "ok",
            "decoding: the disk delivers 40,400 images/s, more than the 34,600 that the engines decode; "
            "gpuflow bench FILE measures it with crops and all",
        ),
    ]


def test_a_sound_machine_without_a_gpu() -> None:
    findings = judge(NO_GPU)
    assert {finding.status for finding in findings} == {"ok"}
    assert only("GPU", NO_GPU).text == "none here; gpuflow runs on the CPU"
    assert only("JPEG engines", NO_GPU).text == "libnvjpeg 13.0.1, unused without a GPU"
    assert {"driver", "locked memory", "GPU's rate"}.isdisjoint(finding.topic for finding in findings)
    assert only("limit", NO_GPU).text.startswith(
        "decoding: the disk delivers 40,400 images/s, more than the 8,700 that the cores decode; "
    )


def test_the_tested_pair_is_that_of_the_pins() -> None:
    pins = (ROOT / "requirements.txt").read_text().splitlines()
    assert {f"{name}=={version}" for name, version in TESTED.items()} <= set(pins)


# --- software and GPU -------------------------------------------------------------------------------------------------


def test_another_torch_is_noted() -> None:
    other = replace(SOFTWARE, versions={"torch": "2.12.0", "torchvision": "0.27.0"})
    assert only("torch", replace(H100, software=other)) == Finding(
        "torch",
        "note",
        "torch 2.12.0, torchvision 0.27.0; gpuflow is tested with torch 2.11.0 and torchvision 0.26.0",
        "if something fails: pip install torch==2.11.0 torchvision==0.26.0",
    )


@pytest.mark.parametrize(
    ("module", "topic", "advice"),
    [
        ("torch", "torch", "pip install --force-reinstall torch==2.11.0 torchvision==0.26.0"),
        (
            "torchvision",
            "torchvision",
            "pip install --force-reinstall torch==2.11.0 torchvision==0.26.0; the two must be built for each other",
        ),
        (
            "cv2",
            "opencv-python-headless",
            "pip uninstall opencv-python, then pip install --force-reinstall opencv-python-headless, which needs no "
            "libraries of the desktop",
        ),
        ("spdl.pipeline", "spdl-core", "pip install --force-reinstall spdl-core"),
    ],
)
def test_a_module_that_cannot_be_imported_is_a_problem(module: str, topic: str, advice: str) -> None:
    software = replace(SOFTWARE, broken={module: "ImportError: libGL.so.1"})
    machine = replace(
        H100,
        software=software,
        gpus=(),
        decoders=None,
        engines=None,
        c_code=None,
        data=None,
        disk=(),
        core_rates=(),
        source=None,
    )
    problems = [finding for finding in judge(machine) if finding.status == "problem"]
    assert problems == [Finding(topic, "problem", f"{module} cannot be imported: ImportError: libGL.so.1", advice)]
    assert not of("disk", machine)


def test_gpus_are_counted_by_kind() -> None:
    other = Gpu(name="NVIDIA L4", memory_bytes=24 << 30)
    text = only("GPU", replace(H100, gpus=(*H100.gpus, other, *H100.gpus))).text
    assert text.startswith("2 x NVIDIA H100 80GB HBM3, 79 GiB, 1 x NVIDIA L4, 24 GiB; ")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"software": replace(SOFTWARE, cuda=None)},
            Finding(
                "GPU",
                "problem",
                "this torch is built without CUDA, so 2 GPUs cannot be used",
                "pip install --force-reinstall torch==2.11.0 torchvision==0.26.0, not from an index of CPU builds",
            ),
        ),
        (
            {"environment": {"CUDA_VISIBLE_DEVICES": ""}},
            Finding(
                "GPU",
                "note",
                "CUDA_VISIBLE_DEVICES='' hides 2 GPUs; gpuflow runs on the CPU",
                "unset it to use the GPU",
            ),
        ),
        (
            {"driver": Driver(version="550.54", cuda="12.4", gpus=2), "gpu_error": "The driver is too old"},
            Finding(
                "GPU",
                "problem",
                "the driver runs CUDA up to 12.4, and torch is built for CUDA 13.0, so 2 GPUs cannot be used",
                "update the driver, or install a torch that is built for CUDA 12",
            ),
        ),
        (
            {"gpu_error": "CUDA unknown error"},
            Finding(
                "GPU",
                "problem",
                "torch cannot use 2 GPUs: CUDA unknown error",
                "see whether nvidia-smi works; start a container with --gpus all",
            ),
        ),
        (
            {"environment": {"CUDA_VISIBLE_DEVICES": "0"}},
            Finding(
                "GPU",
                "problem",
                "torch cannot use 2 GPUs: it does not say why",
                "see whether nvidia-smi works; start a container with --gpus all",
            ),
        ),
    ],
)
def test_why_torch_sees_no_gpu(changes: dict[str, Any], expected: Finding) -> None:
    machine = replace(NO_GPU, driver=Driver(version="580.65.06", cuda="13.0", gpus=2))
    assert only("GPU", replace(machine, **changes)) == expected


@pytest.mark.parametrize(
    ("gpu_error", "expected"),
    [
        (None, Finding("GPU", "ok", "none that torch can use; gpuflow runs on the CPU")),
        (
            "CUDA unknown error",
            Finding(
                "GPU",
                "problem",
                "torch can use none: CUDA unknown error",
                "see whether nvidia-smi works; start a container with --gpus all",
            ),
        ),
    ],
)
def test_a_driver_that_was_not_asked(gpu_error: str | None, expected: Finding) -> None:
    unasked = Finding(
        "driver",
        "note",
        "not asked, because nvidia-ml-py is not installed",
        "pip install 'gpuflow[gpu]' if this machine has an NVIDIA GPU",
    )
    machine = replace(NO_GPU, driver=Driver(asked=False), gpu_error=gpu_error)
    assert (only("driver", machine), only("GPU", machine)) == (unasked, expected)
    machine = replace(H100, driver=Driver(asked=False))
    assert (only("driver", machine), only("GPU", machine)) == (unasked, only("GPU", H100))


def test_a_driver_that_does_not_answer() -> None:
    machine = replace(NO_GPU, driver=Driver(error="Driver/library version mismatch"))
    assert only("driver", machine) == Finding(
        "driver",
        "problem",
        "the NVIDIA driver does not answer: Driver/library version mismatch",
        "restart the machine if the driver was just updated; in a container, update the image's libraries",
    )


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        (
            JpegEngines(),
            Finding(
                "JPEG engines",
                "problem",
                "no libnvjpeg, so the cores decode while the GPU's engines stay idle",
                "pip install 'gpuflow[gpu]'",
            ),
        ),
        (
            replace(ENGINES, rate=None, error="CUDA out of memory"),
            Finding(
                "JPEG engines",
                "note",
                "libnvjpeg 13.0.1, /lib/libnvjpeg.so.13: cannot be used: CUDA out of memory; the cores decode",
                "see which processes use the GPU (nvidia-smi)",
            ),
        ),
        (
            replace(ENGINES, rate=None),
            Finding(
                "JPEG engines",
                "ok",
                "libnvjpeg 13.0.1, /lib/libnvjpeg.so.13: not tried, because they take none of the images",
            ),
        ),
    ],
)
def test_engines_that_are_not_used(engines: JpegEngines, expected: Finding) -> None:
    machine = replace(H100, engines=engines)
    assert only("JPEG engines", machine) == expected
    assert of("GPU's rate", machine) == []
    assert "that the cores decode" in only("limit", machine).text


def test_on_a_gpu_without_engines_the_cores_decode() -> None:
    machine = replace(H100, engines=replace(ENGINES, backend="cuda", rate=DecodeRate(images_per_s=9500.0, at_once=256)))
    assert only("JPEG engines", machine) == Finding(
        "JPEG engines",
        "note",
        "none on this GPU: the cores decode, or its kernels (libnvjpeg 13.0.1, /lib/libnvjpeg.so.13) where "
        "decode.backend is gpu",
        "A100, H100 and H200 are GPUs with engines",
    )
    assert only("limit", machine).text.startswith(
        "decoding: the disk delivers 40,400 images/s, more than the 8,700 that the cores decode; "
    )


def test_no_library_and_no_gpu() -> None:
    assert only("JPEG engines", replace(NO_GPU, engines=JpegEngines())) == Finding(
        "JPEG engines", "ok", "none without a GPU"
    )


@pytest.mark.parametrize(
    ("c_code", "status", "advice"),
    [(True, "ok", None), (False, "note", "install a driver of CUDA 12.4")],
)
def test_c_code(c_code: bool, status: str, advice: str | None) -> None:
    finding = only("C code", replace(H100, c_code=c_code))
    assert finding.status == status and (finding.advice or "").startswith(advice or "")
    assert (finding.advice is None) == (advice is None)


def test_c_code_is_for_gpus_alone() -> None:
    assert [finding for finding in judge(NO_GPU) if finding.topic == "C code"] == []


def test_opencv_alone_is_noted() -> None:
    decoders = CpuDecoders(libjpeg_turbo=None, opencv="4.12.0", refusal="libjpeg.so.62: none")
    assert only("CPU decoder", replace(H100, decoders=decoders)) == Finding(
        "CPU decoder",
        "note",
        f"OpenCV 4.12.0, which decodes whole images: {OPENCV_COST} (libjpeg.so.62: none)",
        REMEDY,
    )


@pytest.mark.parametrize(
    ("variable", "value", "status", "text"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "problem", "CUDA_LAUNCH_BLOCKING=1 makes every kernel wait for the last one"),
        ("TRITON_INTERPRET", "1", "problem", "TRITON_INTERPRET=1 runs the kernels in Python instead of on the GPU"),
        (
            "PYTORCH_NO_CUDA_MEMORY_CACHING",
            "1",
            "problem",
            "PYTORCH_NO_CUDA_MEMORY_CACHING=1 makes every tensor wait for the GPU's allocator",
        ),
        (
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "1",
            "note",
            "CUDA_DEVICE_MAX_CONNECTIONS=1: decoding and training may share a hardware queue and wait for each other",
        ),
    ],
)
def test_variables_that_slow_the_gpu_down(variable: str, value: str, status: str, text: str) -> None:
    finding = only("environment", replace(H100, environment={variable: value}))
    assert (finding.status, finding.text) == (status, text)
    assert finding.advice is not None and finding.advice.startswith("unset it")
    assert not of("environment", replace(NO_GPU, environment={variable: value}))


def test_variables_at_harmless_values() -> None:
    harmless = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_LAUNCH_BLOCKING": "0", "TRITON_INTERPRET": "0"}
    assert not of("environment", replace(H100, environment=harmless))


# --- cores and limits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        (
            Cores(present=64, usable=64, quota=4.0, threads=64),
            Finding(
                "cores",
                "problem",
                "64 cores, but a control group grants the time of 4; gpuflow decodes with 64 threads, and Linux halts "
                "all of the process again and again",
                "set run.threads: 4, or raise the container's CPU limit",
            ),
        ),
        (
            Cores(present=16, usable=16, quota=7.5, threads=4, ranks=4),
            Finding(
                "cores",
                "problem",
                "16 cores, but a control group grants the time of 7.5; gpuflow decodes with 4 threads in each of 4 "
                "ranks, and Linux halts all of the process again and again",
                "set run.threads: 1, or raise the container's CPU limit",
            ),
        ),
        (
            Cores(present=4, usable=4, quota=4.0, threads=4),
            Finding(
                "cores",
                "ok",
                "4 cores, of which a control group grants the time of 4; gpuflow decodes with 4 threads",
            ),
        ),
        (Cores(present=1, usable=1, quota=0.5, threads=1), None),
        (
            Cores(present=64, usable=8, quota=None, threads=8),
            Finding(
                "cores",
                "note",
                "8 of 64 cores; gpuflow decodes with 8 threads",
                "if decoding is the limit, ask for more: Slurm's --cpus-per-task, a container's cpuset, taskset",
            ),
        ),
        (
            Cores(present=2, usable=2, quota=None, threads=8),
            Finding(
                "cores",
                "note",
                "2 cores; gpuflow decodes with 8 threads, more than there are cores",
                "set run.threads: auto",
            ),
        ),
    ],
)
def test_cores(cores: Cores, expected: Finding | None) -> None:
    """One thread is never too many, however little time is granted."""
    finding = only("cores", replace(H100, cores=cores))
    assert finding == expected if expected else finding.status == "ok"


@pytest.mark.parametrize(
    ("soft", "hard", "status", "text", "advice"),
    [
        (586, 586, "ok", "limit 586; gpuflow needs at most 586", None),
        (None, None, "ok", "no limit; gpuflow needs at most 586", None),
        (
            585,
            None,
            "note",
            "limit 585; 16 threads hold up to 586, and wait where there are fewer",
            "ulimit -n 586",
        ),
        (
            90,
            90,
            "note",
            "limit 90; 16 threads hold up to 586, and wait where there are fewer",
            "the hard limit is 90: raise nofile in /etc/security/limits.conf, or start the container with "
            "--ulimit nofile=586",
        ),
        (
            89,
            4096,
            "problem",
            "limit 89; 16 threads need at least 90, and a file that cannot be opened ends the epoch",
            "ulimit -n 586",
        ),
    ],
)
def test_open_files(soft: int | None, hard: int | None, status: str, text: str, advice: str | None) -> None:
    limits = replace(H100.limits, open_files=soft, open_files_hard=hard)
    assert only("open files", replace(H100, limits=limits)) == Finding("open files", status, text, advice)  # type: ignore[arg-type]


def test_files_a_thread_are_those_of_the_storage() -> None:
    assert local._OPENED_IN_ADVANCE == FILES_A_THREAD


def test_little_shared_memory_is_noted() -> None:
    assert only("shared memory", replace(H100, shared_memory=Memory(size_bytes=64 << 20, free_bytes=63 << 20))) == (
        Finding(
            "shared memory",
            "note",
            "/dev/shm: 63 MiB free of 64 MiB; gpuflow needs none, but DataLoader's workers and NCCL fail where there "
            "is too little",
            "start the container with --shm-size=8g, or delete what is left over in /dev/shm",
        )
    )
    assert not of("shared memory", replace(H100, shared_memory=None))


def test_unlimited_locked_memory() -> None:
    unlimited = replace(H100, limits=replace(H100.limits, locked_bytes=None))
    assert only("locked memory", unlimited).text.startswith("no limit; ")


# --- rates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "status", "text", "advice"),
    [
        (
            replace(DATA, where=None, images=32),
            "ok",
            "32 made for the measurement, 500x375 pixels (median), 61 kB (mean)",
            None,
        ),
        (
            replace(DATA, bad=3),
            "note",
            "256 of data/photos, 500x375 pixels (median), 61 kB (mean); 3 of them cannot be decoded",
            "gpuflow scan FILE lists what is bad",
        ),
        (
            replace(DATA, bad=256, for_engines=0),
            "problem",
            "256 of data/photos, 500x375 pixels (median), 61 kB (mean); 256 of them cannot be decoded",
            "gpuflow scan FILE lists what is bad",
        ),
        (
            replace(DATA, for_engines=200),
            "note",
            "256 of data/photos, 500x375 pixels (median), 61 kB (mean); 56 of them are not for the JPEG engines, and "
            "the cores decode or rewrite those",
            "save them as baseline JPEGs (not progressive, PNG or CMYK) if decoding is the limit",
        ),
    ],
)
def test_images(data: Data, status: str, text: str, advice: str | None) -> None:
    assert only("images", replace(H100, data=data)) == Finding("images", status, text, advice)  # type: ignore[arg-type]


def test_images_that_no_engine_takes_are_no_matter_without_a_gpu() -> None:
    assert only("images", replace(NO_GPU, data=replace(DATA, for_engines=0))).status == "ok"


def test_images_that_cannot_be_found() -> None:
    machine = replace(H100, data_error="gone: no such file or directory; check the path", disk=())
    assert of("images", machine)[0] == Finding("images", "problem", "gone: no such file or directory; check the path")
    assert of("disk", machine) == of("limit", machine) == []


def test_a_disk_that_was_not_measured() -> None:
    assert only("disk", replace(H100, source=None, disk=())) == Finding(
        "disk", "note", "not measured", "gpuflow doctor FILE, or --data DIR, measures it"
    )
    assert only("disk", replace(H100, source="saved", unmeasured="saved is no folder of images", disk=())) == Finding(
        "disk", "note", "not measured: saved is no folder of images", "gpuflow bench FILE measures all of it"
    )
    assert only("disk", replace(H100, source="s3://bucket/photos", disk=())) == Finding(
        "disk", "note", "not measured: s3://bucket/photos is remote", "gpuflow bench FILE measures all of it"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cached": 2048}, "from ext4, all of them still in the page cache"),
        ({"cached": 512}, "from ext4, 25% of them from the page cache"),
        ({"cached": None}, "from ext4, which does not tell whether they were cached"),
        ({"cached": None, "filesystem": "tmpfs"}, "from tmpfs, which is in memory"),
    ],
)
def test_where_the_bytes_came_from(changes: dict[str, Any], words: str) -> None:
    assert only("disk", replace(NO_GPU, disk=(replace(DISK, **changes),))) == Finding(
        "disk", "ok", f"40,400 images/s, 2,400 MB/s: 2,048 read by 2 threads {words}"
    )


def test_images_that_cannot_be_read() -> None:
    assert only("disk", replace(NO_GPU, disk=(replace(DISK, unreadable=1, cached=None),))) == Finding(
        "disk",
        "note",
        "40,400 images/s, 2,400 MB/s: 2,048 read by 2 threads from ext4, which does not tell whether they were cached; "
        "1 could not be read",
        "gpuflow scan FILE says why",
    )
    none = replace(DISK, images=0, images_per_s=0.0, bytes_per_s=0.0, unreadable=20)
    machine = replace(NO_GPU, disk=(none,))
    assert only("disk", machine) == Finding(
        "disk", "problem", "none of 20 images could be read", "check that the files exist and that you may read them"
    )
    assert of("limit", machine) == []


def test_threads_that_do_not_get_their_time() -> None:
    slow = DecodeRate(images_per_s=4000.0, at_once=16, cores=7.46)
    machine = replace(H100, core_rates=(H100.core_rates[0], slow))
    assert of("cores' rate", machine)[1] == Finding(
        "cores' rate",
        "note",
        "4,000 images/s decoded whole by 16 threads, which got the time of 7.5 cores instead of 16",
        "look what else runs here (top), or whether the machine limits this process; then measure again",
    )
    fewer = replace(H100.cores, usable=8)
    assert of("cores' rate", replace(machine, cores=fewer))[1].status == "ok", "8 cores give no more"


@pytest.mark.parametrize(
    ("filesystem", "rates", "advice"),
    [
        (
            "ext4",
            (9000.0, 9100.0),
            "keep the data on a faster disk, such as local NVMe; what fits into memory is cached after the first epoch",
        ),
        (
            "nfs4",
            (9000.0, 9100.0),
            "copy the data to local NVMe, or pack it into tar shards, which saves opening each file",
        ),
        ("nfs4", (9000.0, 20000.0), "set run.readers: 16; with 16 threads the disk delivers 20,000 images/s"),
        (
            "fuse.s3fs",
            (800.0, 820.0),
            "copy the data to local NVMe, or pack it into tar shards, which saves opening each file; "
            "without that decoding on the GPU gains nothing",
        ),
    ],
)
def test_the_disk_is_the_limit(filesystem: str, rates: tuple[float, float], advice: str) -> None:
    disk = tuple(
        replace(DISK, filesystem=filesystem, readers=readers, images_per_s=rate)
        for readers, rate in zip((2, 16), rates, strict=True)
    )
    assert only("limit", replace(H100, disk=disk)) == Finding(
        "limit",
        "note",
        f"the disk: it delivers {rates[0]:,.0f} images/s, fewer than the 34,600 that the engines decode",
        advice,
    )


def test_a_cached_disk_may_be_slower_than_it_seems() -> None:
    cached = replace(DISK, cached=2000)
    assert "; a disk that is not cached may deliver fewer; " in only("limit", replace(H100, disk=(cached,))).text
    assert "not cached" not in only("limit", replace(H100, disk=(replace(cached, filesystem="tmpfs"),))).text


def test_few_images_say_nothing_but_a_slow_disk_does() -> None:
    few = replace(DISK, images=100)
    assert only("limit", replace(H100, disk=(few,))) == Finding(
        "limit",
        "note",
        "100 images are too few to compare disk and decoder",
        "name a source with more; 400 are enough",
    )
    slow = replace(few, images_per_s=125.0)
    assert only("limit", replace(H100, disk=(slow,))).text.startswith("the disk: it delivers 125 images/s, fewer")


# --- the report -------------------------------------------------------------------------------------------------------


def printed(findings: list[Finding], width: int) -> list[str]:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    try:
        console.print(report(findings))
        return [line.rstrip() for line in console.export_text().splitlines()]
    finally:
        console.file.close()


def test_the_report() -> None:
    findings = [
        Finding("Python", "ok", "3.12.3"),
        Finding("spdl-core", "problem", "spdl.pipeline cannot be imported", "pip install --force-reinstall spdl-core"),
        Finding("cores", "ok", "16 cores; [bold]gpuflow[/] decodes with 16 threads"),
        Finding("disk", "ok", "40,400 images/s"),
        Finding("disk", "note", "41,000 images/s", "look"),
    ]
    assert printed(findings, 50) == [
        "Software and GPU",
        "ok       Python     3.12.3",
        "problem  spdl-core  spdl.pipeline cannot be",
        "                    imported",
        "                    -> pip install",
        "                       --force-reinstall spdl-core",
        "",
        "Cores and limits",
        "ok       cores      16 cores; [bold]gpuflow[/]",
        "                    decodes with 16 threads",
        "",
        "Measured here, about a second each",
        "ok       disk       40,400 images/s",
        "note                41,000 images/s",
        "                    -> look",
        "",
        "1 problem, 1 note",
    ]


def test_the_report_in_a_narrow_terminal() -> None:
    findings = [
        Finding("Python", "ok", "3.12.3"),
        Finding("shared memory", "problem", "/dev/shm has 64 MiB free", "give the container --shm-size=8g"),
        Finding("disk", "ok", "40,400 images/s"),
        Finding("disk", "note", "41,000 images/s"),
    ]
    assert printed(findings, 20) == [
        "Software and GPU",
        "ok Python",
        "  3.12.3",
        "",
        "Cores and limits",
        "problem shared",
        "memory",
        "  /dev/shm has 64",
        "  MiB free",
        "  -> give the",
        "     container",
        "     --shm-size=8g",
        "",
        "Measured here, about",
        "a second each",
        "ok disk",
        "  40,400 images/s",
        "note disk",
        "  41,000 images/s",
        "",
        "1 problem, 1 note",
    ]


@pytest.mark.parametrize("width", [10, 20, 40, 80, 100])
@pytest.mark.parametrize("machine", [H100, NO_GPU])
def test_no_line_is_longer_than_the_terminal(machine: Machine, width: int) -> None:
    lines = printed(judge(machine), width)
    assert max(map(len, lines)) <= width
    shown = "".join(lines).replace(" ", "")
    assert not set(shown) & set("…") and all(finding.text.replace(" ", "") in shown for finding in judge(machine))
    if width >= len("Software and GPU"):
        assert sum(line in ("Software and GPU", "Cores and limits") for line in lines) == 2


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def _in_time() -> Iterator[None]:
    with deadline(60):
        yield


def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """The command in this process: exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "argv", ["gpuflow", "doctor", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0), *capsys.readouterr()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    make_photos(tmp_path / "photos", classes=2, each=10)
    return write_config(tmp_path / "x.yaml", tmp_path / "photos")


@pytest.mark.usefixtures("_in_time")
def test_the_command_measures_a_files_source(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = doctor(monkeypatch, capsys, config)
    assert err == ""
    lines = [line.rstrip() for line in out.splitlines()]
    assert {"Software and GPU", "Cores and limits", "Measured here, about a second each"} <= set(lines)
    text = " ".join(out.split())
    assert f"20of{config.parent}/photos," in "".join(out.split())  # a long path is broken where the line ends
    assert "; gpuflow decodes with 2 threads" in text
    assert re.search(r"images/s, [\d.,]+ MB/s: 10 read by 2 threads from ", text)
    assert "10 images are too few to compare disk and decoder" in text
    count = re.fullmatch(r"(\d+) problems?, \d+ notes?", lines[-1])
    assert count is not None and code == (int(count[1]) > 0)


@pytest.mark.usefixtures("_in_time")
def test_json_holds_values_and_findings(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = doctor(monkeypatch, capsys, "--json", "--data", config.parent / "photos")
    assert err == ""
    document = json.loads(out)
    assert code == any(finding["status"] == "problem" for finding in document["findings"])
    assert document["machine"]["data"]["images"] == 20
    assert [rate["images"] for rate in document["machine"]["disk"]] == [10, 10]
    assert document["machine"]["core_rates"][0]["images_per_s"] > 0
    assert document["findings"][0] == {
        "topic": "Python",
        "status": "ok",
        "text": document["machine"]["software"]["python"],
        "advice": None,
    }


@pytest.mark.usefixtures("_in_time")
def test_a_problem_exits_1(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (config.parent / "photos").rename(config.parent / "moved")
    code, out, _ = doctor(monkeypatch, capsys, "--json", config)
    assert code == 1
    text = f"{config.parent}/photos: no such file or directory; check the path"
    assert {"topic": "images", "status": "problem", "text": text, "advice": None} in json.loads(out)["findings"]


def test_arguments_that_are_wrong(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(monkeypatch, capsys, "--data", config) == (
        1,
        "",
        f"error: --data: must be a directory, got '{config}'\n",
    )
    assert doctor(monkeypatch, capsys, config.with_name("y.yaml"))[::2] == (
        1,
        f"error: {config.with_name('y.yaml')}: no such file; did you mean '{config}'?\n",
    )


@pytest.mark.parametrize(
    ("module", "topic", "error"),
    [
        ("torchvision", "torchvision", "RuntimeError: operator torchvision::nms does not exist"),
        ("cv2", "opencv-python-headless", "ImportError: libGL.so.1: cannot open shared object file"),
    ],
)
def test_a_broken_installation_is_reported(config: Path, tmp_path: Path, module: str, topic: str, error: str) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    kind, _, text = error.partition(": ")
    (broken / f"{module}.py").write_text(f"raise {kind}({text!r})")
    code = f"import sys; sys.argv[1:] = ['doctor', {str(config)!r}]; from gpuflow.cli import main; main()"
    done = python(code, PYTHONPATH=str(broken), COLUMNS="200")
    assert (done.returncode, done.stderr) == (1, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert f"problem {topic} {module} cannot be imported: {error}" in lines
    assert "Measured here, about a second each" not in lines


def test_the_help() -> None:
    result = CliRunner().invoke(app, ["doctor", "--help"])
    assert result.exit_code == 0
    words = " ".join(result.output.split())
    assert "Exits 1 if there is a problem" in words
    assert "--data" in words and "--json" in words
