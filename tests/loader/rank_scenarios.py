"""What two ranks see without a launcher that sets their rank: `python -m tests.loader.rank_scenarios RANK DIRECTORY`.

Each rank joins a Gloo group by a file, as a process of `torch.multiprocessing.spawn` does, runs all scenarios in order
and writes what came of each to DIRECTORY/<rank>.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

import gpuflow
from gpuflow.loader import agreement
from gpuflow.loader import loader as loader_module

RANKS = 2


def seen(loader: gpuflow.Loader) -> list[int]:
    """The samples of an epoch that are valid on this rank."""
    return [index for batch in loader for index in batch.indices[batch.valid].tolist()]


def loaded(config: Path, name: str = "train", **options: Any) -> dict[str, Any]:
    """What comes of a loader and its first epoch: its rank, its samples or the error, and warnings."""
    found: dict[str, Any] = {}
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with gpuflow.load(config, name, **options) as loader:
                found["rank"] = [loader._plan.rank, loader._plan.world_size]
                found["samples"] = seen(loader)
        except (gpuflow.GpuflowError, ValueError) as error:
            found |= {"error": type(error).__name__, "text": str(error)}
    return {**found, "warnings": [str(warning.message) for warning in caught], "seconds": time.monotonic() - start}


def restored(config: Path, rank: int, ranks: list[int]) -> dict[str, Any]:
    """A loop from the middle of epoch 1 on, on these ranks; the others begin at the start, after rank 0."""
    with gpuflow.load(config) as loader:
        if rank in ranks:
            loader.load_state_dict({**loader.state_dict(), "epoch": 1, "position": 4})
        if rank:
            dist.barrier()
        try:
            samples = iter(loader)
            if not rank:
                dist.barrier()
            return {"samples": [index for batch in samples for index in batch.indices.tolist()]}
        except gpuflow.LoaderError as error:
            return {"text": str(error)}


def with_environment(config: Path, **variables: str) -> dict[str, Any]:
    os.environ.update(variables)
    try:
        return loaded(config)
    finally:
        for variable in variables:
            del os.environ[variable]


def early(config: Path, join: Callable[[], None]) -> dict[str, Any]:
    """A loader that is made before the group is."""
    with gpuflow.load(config) as loader:
        join()
        try:
            return {"samples": seen(loader)}
        except gpuflow.LoaderError as error:
            return {"text": str(error)}


def what_is_checked(config: Path, rank: int) -> dict[str, Any]:
    """What the runner of a GPU gets to share, in two epochs, and what this rank finds there."""
    given: list[NDArray[np.uint8] | None] = []

    def share_checks(samples: int, memory_of: Callable[[int], NDArray[np.uint8] | None]) -> None:
        given.append(memory_of(samples))

    with gpuflow.load(config) as loader:
        gpu: Any = SimpleNamespace(share_checks=share_checks, set_gpu_wait=lambda share: None)
        loader._plan = replace(loader._plan, gpu=gpu)
        for _ in range(2):
            assert len(list(loader)) == len(loader)
        (memory,) = given
        assert memory is not None
        memory[rank] = 10 + rank
        dist.barrier()
        return {"found": memory.tolist()}


def main(rank: int, directory: Path) -> None:
    def join() -> None:
        dist.init_process_group("gloo", init_method=f"file://{directory / 'store'}", rank=rank, world_size=RANKS)

    same, own = directory / "same.yaml", directory / f"own_{rank}" / "x.yaml"
    report: dict[str, Any] = {"early": early(same, join)}
    report["spawned"] = loaded(same)
    report["validation"] = loaded(same, "val")
    report["subgroup"] = loaded(same, rank=0, world_size=1)
    report["one_argument"] = loaded(same, world_size=3)
    report["outside"] = loaded(same, rank=2)
    report["same_environment"] = with_environment(same, RANK=str(rank), WORLD_SIZE="2")
    report["part_of_an_environment"] = with_environment(same, WORLD_SIZE="2")
    report["other_environment"] = with_environment(same, RANK="0", WORLD_SIZE="1")
    report["other_environment_and_arguments"] = with_environment_and_arguments(same, rank)
    report["other_files"] = loaded(own)
    report["checks"] = what_is_checked(same, rank)
    report["other_names"] = loaded(directory / f"copy_{rank}" / "x.yaml")
    agreement.WAIT_SECONDS = 1.0
    report["other_files_and_names"] = loaded(directory / f"named_{rank}" / "x.yaml", "val")
    agreement.WAIT_SECONDS = 10.0
    report["other_files_of_a_subgroup"] = loaded(own, rank=0, world_size=1)
    for scenario, override in {
        "other_seed": "source.seed=1",
        "other_order": "pipelines.train.shuffle=false",
        "other_steps": "pipelines.train.batch.drop_last=true",
        "other_stages": "pipelines.train.stages.flip.horizontal=0.3",
        "other_split": "source.split={train: 0.5, val: 0.5}",
    }.items():
        dist.barrier()  # so that no rank has made its next loader when the other one looks at this one
        report[scenario] = loaded(same, overrides=[override] * rank)
    dist.barrier()
    with mock.patch.object(loader_module, "__version__", f"9.{rank}"):
        report["other_version"] = loaded(same)
    dist.barrier()
    report["same_state"] = restored(same, rank, [0, 1])
    report["other_state"] = restored(same, rank, [0])
    dist.barrier()
    agreement.WAIT_SECONDS = 0.3
    report["alone"] = loaded(directory / "alone.yaml") if rank == 0 else None
    report["again_alone"] = loaded(same) if rank == 0 else None
    dist.barrier()
    agreement.WAIT_SECONDS = 60.0
    names = ["train", "val"] if rank == 0 else ["val", "train"]
    with gpuflow.load(same, names[0]) as one, gpuflow.load(same, names[1]) as other:
        report["any_order"] = {name: seen(loader) for name, loader in zip(names, (one, other), strict=True)}
    # The rank that comes later finds what the other one wrote, and need not wait.
    agreement.WAIT_SECONDS = 0.0
    if rank == 0:
        report["first"] = loaded(own, "val", overrides=["source.seed=5"])
    dist.barrier()
    if rank == 1:
        report["second"] = loaded(own, "val", overrides=["source.seed=5"])
    dist.barrier()
    # As new processes that torchrun starts after others have ended, with its store: they begin elsewhere.
    agreement._announced.clear()
    restart = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"}
    with mock.patch.dict(os.environ, restart):
        report["restarted"] = restored(same, rank, [0, 1])
    dist.barrier()
    with gpuflow.load(same) as loader:
        seen(loader)
        dist.barrier()
        dist.destroy_process_group()
        report["without_the_group"] = {"samples": seen(loader)}
    (directory / f"{rank}.json").write_text(json.dumps(report))


def with_environment_and_arguments(config: Path, rank: int) -> dict[str, Any]:
    os.environ.update(RANK="0", WORLD_SIZE="1")
    try:
        return loaded(config, rank=rank, world_size=RANKS)
    finally:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
