"""Collecting the values of a machine: from control groups, torch, the operating system, the environment."""

from __future__ import annotations

import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpuflow.config.resources import gpu_readers_of
from gpuflow.runtime.threads import available_threads, cpu_quota
from gpuflow.sources import source_spec
from gpuflow.tools.machine import Gpu, broken_modules, gather
from gpuflow.tools.rates import MANY_READERS
from tests.datasets import deadline, make_photos, nothing_left_behind


def files(root: Path, **contents: str) -> Path:
    """Files below `root`, by path: `sys__cpu_DOT_max` is sys/cpu.max."""
    for name, text in contents.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# --- control groups ---------------------------------------------------------------------------------------------------


def test_no_control_group_sets_a_limit(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    files(tmp_path, proc__self__cgroup="0::/\n", sys__fs__cgroup__cpu_DOT_max="max 100000\n")
    assert cpu_quota(tmp_path) is None


def test_a_containers_limit_version_2(tmp_path: Path) -> None:
    files(tmp_path, proc__self__cgroup="0::/\n", sys__fs__cgroup__cpu_DOT_max="150000 100000\n")
    assert cpu_quota(tmp_path) == 1.5


def test_the_least_of_the_groups_around_counts(tmp_path: Path) -> None:
    files(
        tmp_path,
        proc__self__cgroup="0::/slurm/job/step\n",
        sys__fs__cgroup__slurm__job__step__cpu_DOT_max="max 100000\n",
        sys__fs__cgroup__slurm__job__cpu_DOT_max="400000 100000\n",
        sys__fs__cgroup__slurm__cpu_DOT_max="1600000 100000\n",
    )
    assert cpu_quota(tmp_path) == 4.0


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize("group", ["", "docker/abc/"])
def test_version_1(tmp_path: Path, mount: str, group: str) -> None:
    """Inside a container the path is often the host's while the mount shows the container's group as the root."""
    folder = f"sys__fs__cgroup__{mount}__{group.replace('/', '__')}"
    files(
        tmp_path,
        proc__self__cgroup="4:memory:/x\n3:cpu,cpuacct:/docker/abc\n0::/\n",
        **{f"{folder}cpu_DOT_cfs_quota_us": "250000\n"},
    )
    assert cpu_quota(tmp_path) == 2.5
    files(tmp_path, **{f"{folder}cpu_DOT_cfs_period_us": "50000\n"})
    assert cpu_quota(tmp_path) == 5.0
    files(tmp_path, **{f"{folder}cpu_DOT_cfs_quota_us": "-1\n"})
    assert cpu_quota(tmp_path) is None


# --- this machine -----------------------------------------------------------------------------------------------------


def test_nothing_is_broken_here() -> None:
    assert broken_modules() == {}


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_photos(tmp_path, classes=2, each=20)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "4")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    done: list[str] = []
    with deadline(60), nothing_left_behind():
        machine = gather(source=source_spec(folder=str(tmp_path)), progress=done.append)
    on_gpu = ["decoding on the GPU"] if machine.gpus else []
    assert done == ["looking around", "reading images", "decoding on the cores", *on_gpu]
    assert machine.software.versions["torch"] == torch.__version__
    assert machine.software.cuda == torch.version.cuda
    assert machine.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "4"}
    assert len(machine.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert machine.cores == replace(
        machine.cores,
        present=os.cpu_count() or 0,
        usable=len(os.sched_getaffinity(0)),
        threads=available_threads(),
        ranks=1,
    )
    assert machine.limits.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert 3 <= machine.limits.open_now < 10_000
    assert machine.shared_memory is not None and machine.shared_memory.free_bytes <= machine.shared_memory.size_bytes
    assert machine.source == str(tmp_path)
    assert machine.data is not None and (machine.data.where, machine.data.images) == (str(tmp_path), 40)
    assert machine.disk[-1].readers == MANY_READERS
    assert sum(rate.images for rate in machine.disk) == 40
    assert [rate.at_once for rate in machine.core_rates] == sorted({1, available_threads()})
    assert machine.data_error is None


def test_next_to_a_gpu_the_disk_is_read_as_by_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_photos(tmp_path, classes=1, each=8)
    monkeypatch.setattr("gpuflow.tools.machine._gpus", lambda: ((Gpu(name="a GPU", memory_bytes=1 << 36),), None))
    with deadline(60):
        machine = gather(threads=16, source=source_spec(folder=str(tmp_path)))
    assert [rate.readers for rate in machine.disk] == [gpu_readers_of(16), MANY_READERS]


def test_what_a_file_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with deadline(60):
        machine = gather(threads=3, source=source_spec(folder="s3://bucket/photos"))
    assert (machine.cores.threads, machine.cores.ranks) == (3, 2)
    assert [rate.at_once for rate in machine.core_rates] == [1, 3]
    assert (machine.source, machine.disk, machine.data_error) == ("s3://bucket/photos", (), None)
    assert machine.data is not None and machine.data.where is None


def test_a_source_that_is_no_folder_is_no_error(tmp_path: Path) -> None:
    """A source is not at fault because its disk is not measured."""
    with deadline(60):
        machine = gather(source=source_spec(mix=({"source": {"folder": str(tmp_path)}},)))
    assert (machine.data_error, machine.unmeasured) == (None, f"{tmp_path} is no folder of images")
    assert machine.disk == () and machine.core_rates


def test_images_that_are_not_there_are_an_error_in_the_values(tmp_path: Path) -> None:
    with deadline(60):
        machine = gather(source=source_spec(folder=str(tmp_path / "absent")))
    assert machine.data_error == f"{tmp_path}/absent: no such file or directory; check the path"
    assert machine.disk == ()
    assert machine.core_rates
