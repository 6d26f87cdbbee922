"""A training that kills a worker or a node at a step, once. `torchrun ... training.py JOB` runs it, or Ray Train.

JOB: an object with the fields of Job.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import arms
import torch
import torch.distributed as dist
from law import Log
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HERE = Path(__file__).parent

_KEPT: list[object] = []
"""The process group, until the process ends: else freeing a model waits for Gloo's threads, which wait for Python."""

EVERY = 5
"""Steps from one checkpoint to the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Holds the arguments of a training.

    data: the photographs in the format of the arm. folder: for logs and checkpoints. kill: who ends at the step
    `kill_at` of the first attempt, by SIGKILL: a worker, or the node that it runs on. safe: the node of Ray's head,
    which is not killed.
    """

    arm: str
    data: str
    folder: str
    epochs: int
    kill: Literal["worker", "node"]
    kill_at: int
    safe: str = ""


class Arm(Protocol):
    """A loader with a state."""

    def epoch(self, number: int) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Yield the indices and images of each batch of an epoch, or of what is left of it."""


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 2)))


def train(job: Job, arm: Arm, model: nn.Module, begin: dict[str, Any], save: Callable[[int, int], None]) -> None:
    """Train from where a checkpoint left off.

    begin: its step and epoch; empty without one. save: writes a checkpoint of a step and an epoch, on all ranks.
    """
    rank, ranks, step = dist.get_rank(), dist.get_world_size(), begin.get("step", 0)
    folder = Path(job.folder) / "logs"
    attempts = [len(list(folder.glob("*.0.jsonl")))]
    dist.broadcast_object_list(attempts)  # a rank that has begun its log would be counted
    log = Log(folder, attempt=attempts[0], rank=rank, ranks=ranks, start=step)
    for epoch in range(begin.get("epoch", 0), job.epochs):
        for indices, images in arm.epoch(epoch):
            model(images).mean().backward()
            step += 1
            log.step(epoch, step, indices, images)
            if step % EVERY == 0:
                save(step, epoch)
            if step == job.kill_at and attempts[0] == 0 and is_victim(job):
                time.sleep(2)  # until Ray has registered the last checkpoint
                if job.kill == "node":
                    os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)


def is_victim(job: Job) -> bool:
    """Return whether this process is to be killed: the last rank, or the one on the node that hosts no rendezvous."""
    if job.kill == "worker":
        return dist.get_rank() == dist.get_world_size() - 1
    if not job.safe:
        return os.environ["VICTIM"] == "1"
    import ray

    return str(ray.get_runtime_context().get_node_id()) != job.safe


def train_by_torchrun(job: Job) -> None:
    """Keep the checkpoint in a file: the state of each rank's loader."""
    dist.init_process_group("gloo")
    _KEPT.append(dist.group.WORLD)
    rank, path = dist.get_rank(), Path(job.folder) / "checkpoint.pt"
    model, arm = new_model(), arms.ARMS[job.arm](job.data, dist.get_world_size())
    begin: dict[str, Any] = {}
    if path.exists():
        begin = torch.load(path, weights_only=False)
        model.load_state_dict(begin["model"])
        arm.load_state_dict(begin["states"][rank])

    def save(step: int, epoch: int) -> None:
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, arm.state_dict())
        if rank == 0:
            value = {"step": step, "epoch": epoch, "model": model.state_dict(), "states": states}
            torch.save(value, path.with_suffix(".new"))
            path.with_suffix(".new").rename(path)

    train(job, arm, model, begin, save)
    dist.destroy_process_group()


def train_by_ray(job: dict[str, Any]) -> None:
    """Train in a worker of Ray's TorchTrainer."""
    from gpuflow.integrations.ray import load, report, restore

    loader = load(arms.HERE / "photos.yaml", overrides=[f"source.folder={job['data']}"])
    model = new_model()
    begin = restore(loader, model)

    def save(step: int, epoch: int) -> None:
        report(loader, {"step": step}, model, step=step, epoch=epoch)

    train(Job(**job), arms.Gpuflow(loader), model, begin, save)


if __name__ == "__main__":
    train_by_torchrun(Job(**json.loads(sys.argv[1])))
    sys.exit()
