"""Finds the rank of this process in a training run and its GPU, and joins the process group.

An initialised `torch.distributed` knows this process's rank with any launcher. torchrun sets environment variables:
RANK of WORLD_SIZE among all, LOCAL_RANK of LOCAL_WORLD_SIZE among those of the host.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpuflow.errors import ConfigError, GpuflowError, LoaderError, Problem, reason_of

if TYPE_CHECKING:
    import torch
    from torch import nn


_LEAST = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
"""The smallest value of each variable."""

_GLOO_GROUPS: list[object] = []
"""Kept until the process ends. Otherwise the last reference to a group is a model's reducer, which then waits for
Gloo's threads while it holds the GIL that they need to free a tensor: a deadlock, seen with torch 2.11."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Names the place of one process among those that train together; by default it is the only one.

    Args:
        rank, world_size: this process among all.
        local_rank: this process among those of its host, or None if that is not known.
        local_world_size: how many run on its host.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Ranks:
        """Read torchrun's variables. One that is not set, or empty, has its default.

        Examples:
            >>> Ranks.from_environment({"RANK": "3", "WORLD_SIZE": "8"})
            Ranks(rank=3, world_size=8, local_rank=None, local_world_size=1)

        Raises:
            ConfigError: the variables are no numbers or do not fit each other.
        """
        given, problems = _numbers(environment, _LEAST)
        if not problems and ("RANK" in given) != ("WORLD_SIZE" in given):
            absent, present = ("RANK", "WORLD_SIZE") if "WORLD_SIZE" in given else ("WORLD_SIZE", "RANK")
            problems.append(_problem(absent, f"must be set, because {present} is ({given[present]})"))
        for name, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
            if name in given and size in given and given[name] >= given[size]:
                problems.append(_problem(name, f"must be below {size}, got {given[name]} of {given[size]}"))
        if problems:
            raise ConfigError(problems)
        return cls(**{name.lower(): number for name, number in given.items()})

    @classmethod
    def of_process(cls, environment: Mapping[str, str] = os.environ) -> Ranks:
        """Ask an initialised `torch.distributed`; without one, read torchrun's variables.

        Raises:
            ConfigError: the variables contradict the process group, are no numbers or do not fit each other.
        """
        group = group_ranks()
        if group is None:
            return cls.from_environment(environment)
        given, problems = _numbers(environment, {name: _LEAST[name] for name in ("RANK", "WORLD_SIZE")})
        for name, ours in zip(("RANK", "WORLD_SIZE"), group, strict=True):
            if given.get(name, ours) != ours:
                rule = f"must be {ours} as in the initialised process group, got {given[name]}"
                action = "unset it, or pass rank= and world_size="
                problems.append(Problem(f"environment variable {name}", rule, action=action))
        if problems:
            raise ConfigError(problems)
        return replace(cls.on_host(environment), rank=group[0], world_size=group[1])

    @classmethod
    def on_host(cls, environment: Mapping[str, str] = os.environ) -> Ranks:
        """Return the place among the processes of this host alone, from torchrun's LOCAL_RANK and LOCAL_WORLD_SIZE.

        Raises:
            ConfigError: as `from_environment`.
        """
        local = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return cls.from_environment({name: environment[name] for name in local if name in environment})

    def device(self, device: str | torch.device | None) -> torch.device:
        """Return where this process works. `cuda` without an index is the GPU of this local rank; None is the CPU.

        Raises:
            ConfigError: there is no such device.
            LoaderError: torch sees no GPU, not this one, or fewer than the host has ranks.
        """
        import torch

        target = device_named("cpu" if device is None else device)
        if target.type != "cuda":
            return target
        if not torch.cuda.is_available():
            raise LoaderError(f"device {str(target)!r} needs CUDA, and torch sees no GPU here; use device='cpu'")
        if (target.index or 0) >= (visible := torch.cuda.device_count()):
            raise LoaderError(f"device {str(target)!r} is not there: torch sees {visible} GPU(s), numbered from 0")
        if self.local_rank is None or str(target) != "cuda":
            return target
        return torch.device("cuda", self.gpu(visible))

    def gpu(self, visible: int) -> int:
        """Return the index of this process's GPU among those that torch sees: its local rank."""
        assert self.local_rank is not None
        wanted = max(self.local_rank + 1, self.local_world_size)
        if wanted > visible:
            raise LoaderError(
                f"device 'cuda' means a GPU for each of this host's {wanted} ranks, and torch sees {visible}; "
                f"start {visible} (torchrun --nproc-per-node {visible}) or use device='cpu'"
            )
        return self.local_rank


def device_named(device: str | torch.device) -> torch.device:
    """Return the device of this name, whether or not this machine has it.

    Examples:
        >>> device_named("cuda:1")
        device(type='cuda', index=1)

    Raises:
        ConfigError: it is neither the CPU nor a GPU of CUDA.
    """
    import torch

    with suppress(RuntimeError):  # torch knows no such device
        if (found := torch.device(device)).type in ("cpu", "cuda"):
            return found
    rule = "must be cpu, cuda, or one GPU such as cuda:0"
    raise ConfigError([Problem.of("device", rule, str(device), code="config.range")])


def device_of_rank(device: str | None, ranks: Ranks) -> torch.device:
    """Return the device that `--device` names, by default a GPU if torch sees one; it becomes torch's current GPU.

    Raises ConfigError and LoaderError as `Ranks.device`, and LoaderError if it is the GPU of another rank.
    """
    import torch

    asked = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if ranks.world_size > 1 and asked.type == "cuda" and asked.index not in (None, ranks.local_rank):
        raise LoaderError(
            f"--device must leave the GPU to LOCAL_RANK where there are {ranks.world_size} ranks, got {str(asked)!r}; "
            "use --device cuda"
        )
    target = ranks.device(asked)
    if target.type == "cuda" and target.index is not None:
        torch.cuda.set_device(target)
    return target


def group_ranks() -> tuple[int, int] | None:
    """Return (rank, world size) of this process in an initialised `torch.distributed`; None if there is none."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(), dist.get_world_size()


def gather(values: list[Any]) -> list[Any]:
    """Return the values of all ranks of an initialised `torch.distributed`, by rank; without one these values.

    Every rank calls it. pickle must know the values.

    Examples:
        >>> gather(["the only rank"])
        ['the only rank']
    """
    group = group_ranks()
    if group is None:
        return values
    import torch.distributed as dist

    gathered: list[Any] = [None] * group[1]
    dist.all_gather_object(gathered, values)
    return [value for each in gathered for value in each]


def _numbers(environment: Mapping[str, str], least: Mapping[str, int]) -> tuple[dict[str, int], list[Problem]]:
    """Return the variables that are set, each at least as large as `least` says, and what is wrong with others."""
    given: dict[str, int] = {}
    problems: list[Problem] = []
    for name, smallest in least.items():
        text = environment.get(name, "")
        if text.isdecimal() and int(text) >= smallest:
            given[name] = int(text)
        elif text:
            problems.append(_problem(name, f"must be a whole number >= {smallest}, got {text!r}"))
    return given, problems


def _problem(variable: str, rule: str) -> Problem:
    return Problem(f"environment variable {variable}", f"{rule}; let torchrun set it, or unset it")


class Group:
    """Exchanges tensors between the processes of `process_group`. With a single process its methods do nothing.

    Args:
        ranks: this process.
        device: where its model and what it shares lives.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._device, self._distributed = device, None
        if ranks.world_size > 1:
            import torch.distributed

            self._distributed = torch.distributed

    def replicate(self, model: nn.Module) -> nn.Module:
        """Return `model`, starting from rank 0's weights and with gradients that are averaged over the ranks."""
        if self._distributed is None:
            return model
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, device_ids=[self._device] if self._device.type == "cuda" else None)

    def sum(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by its sum over the ranks."""
        if self._distributed is not None:
            self._distributed.all_reduce(tensor)

    def share(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace each tensor by rank 0's."""
        if self._distributed is not None:
            for tensor in tensors:
                self._distributed.broadcast(tensor, src=0)

    def wait(self) -> None:
        """Block until every rank has called this."""
        if self._distributed is not None:
            self._distributed.barrier()


@contextmanager
def process_group(ranks: Ranks, device: torch.device, *, timeout_seconds: float) -> Iterator[Group]:
    """Yield the ranks' group while the block runs: NCCL between GPUs, Gloo between CPUs; none for a single process.

    Args:
        timeout_seconds: how long a rank waits for the others, at the start and in each exchange.

    Raises:
        GpuflowError: another rank ended, or did not come in time.
    """
    if ranks.world_size == 1:
        yield Group(ranks, device)
        return
    import torch.distributed as dist

    on_gpu = device.type == "cuda"
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=datetime.timedelta(seconds=timeout_seconds),
            device_id=device if on_gpu else None,
        )
        if not on_gpu:
            _GLOO_GROUPS.append(dist.group.WORLD)
        yield Group(ranks, device)
        dist.destroy_process_group()
    except BaseException as error:
        if dist.is_initialized():  # to destroy it would be to wait for the others, who may wait for this rank
            dist.distributed_c10d._abort_process_group()
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error)):
            raise GpuflowError(
                f"rank {ranks.rank} of {ranks.world_size} is cut off from the others: {reason_of(error)}; "
                "see the error of the rank that ended first, or raise run.timeout_s if one was only slow"
            ) from error
        raise
