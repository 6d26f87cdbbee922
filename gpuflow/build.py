"""Puts a loader together from a checked configuration: the one place where every part meets."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import torch

from gpuflow.bad import BadSamples
from gpuflow.config import BatchSpec, Config
from gpuflow.distributed import Ranks
from gpuflow.errors import ConfigError, Problem, SourceError
from gpuflow.loader import Loader
from gpuflow.machine import cpu_quota
from gpuflow.order import Order, ShardedOrder, ShuffledOrder, key64
from gpuflow.placement import place
from gpuflow.share import Share
from gpuflow.sources import Source, SourceSpec, open_source, subset
from gpuflow.sources.storage import is_remote

if TYPE_CHECKING:
    from gpuflow.config import PipelineSpec, RunSpec

__all__ = [
    "available_threads",
    "build_loader",
    "cpu_share_of",
    "open_split",
    "open_whole",
    "processes_beside",
    "processes_of",
    "serving_processes_of",
    "share_of_cores",
    "threads_of",
]

_REMOTE_READERS, _GPU_READERS = 16, 2
_FEW_THREADS = 4
"""So many do without processes; more wait for the interpreter longer than they work (experiments/loader_cpu)."""
_WORTH_PROCESSES = 10_000
"""Samples. A process takes seconds to start."""
_LAUNCHERS = 3
"""Threads that give chunks to the GPU: two may be in nvJPEG's calls, and one does the rest meanwhile."""
_CORES_FOR_ONE_THAT_SHARES = 4
"""More slow what launches, reads and trains by more than they add (measured in experiments/gpu_path/NOTES.md)."""


def build_loader(
    config: Config,
    name: str,
    *,
    rank: int,
    world_size: int,
    device: str | torch.device | None,
    whole: Source | None = None,
) -> Loader:
    """The loader of one pipeline. See `gpuflow.load`. `whole`: the indexed source, if others read it too."""
    program = config.program(name)
    pipeline = config.pipelines[name]
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be within [0, world_size), got rank {rank} of {world_size}")
    target = Ranks.from_environment().device(device)
    batch_size = _batch_size(config, name, pipeline.batch, world_size)
    placement = place(config, name, target, batch_size)
    source = open_split(config, name, whole)
    if pipeline.batch.drop_last and len(source) < batch_size * world_size:
        where = f"{config.path}: pipelines.{name}.batch"
        raise ConfigError(
            [
                Problem(
                    where,
                    f"leaves no step: {len(source)} samples do not fill one of {batch_size} x {world_size} rank(s); "
                    "take a smaller size or drop_last: false",
                )
            ]
        )
    run, seed = config.run, config.source.seed
    limit = run.max_bad if not isinstance(run.max_bad, float) else int(run.max_bad * len(source))
    policy = pipeline.on_error or ("skip" if name == "val" else run.on_error)
    readers = _readers(config, gpu=placement.gpu is not None)
    share = None
    if placement.gpu is not None:
        source.read_in_processes(readers, placement.gpu.look)
        share = cpu_share_of(config, name)
    return Loader(
        program=program,
        source=source,
        order=_order(source, config.source, seed, pipeline),
        seed=seed,
        batch_size=batch_size,
        drop_last=pipeline.batch.drop_last,
        rank=rank,
        world_size=world_size,
        device=target,
        threads=threads_of(run) if placement.gpu is None else _LAUNCHERS,
        prefetch=run.prefetch,
        timeout_seconds=run.timeout_s,
        bad=_bad_samples(config, policy, limit),
        readers=readers,
        processes=processes_beside(config, len(source), share) if placement.gpu is None or share else 0,
        share=share,
        identity=_identity(config, name, source),
        delivery=placement.delivery,
        gpu=placement.gpu,
    )


def open_split(config: Config, name: str, whole: Source | None = None) -> Source:
    """The source's split that a pipeline reads: the one of its name, else everything. Errors name the file."""
    whole = open_whole(config) if whole is None else whole
    try:
        return subset(whole, config.source, name)
    except SourceError as error:
        raise SourceError(f"{config.path}: source: {error}") from error


def open_whole(config: Config) -> Source:
    """The source, indexed. Errors name the file."""
    try:
        return open_source(config.source)
    except SourceError as error:
        raise SourceError(f"{config.path}: source: {error}") from error


def available_threads() -> int:
    """Threads for this process: the cores that it may use and is granted, shared among the host's ranks."""
    return share_of_cores(len(os.sched_getaffinity(0)), cpu_quota(), Ranks.from_environment().local_world_size)


def threads_of(run: RunSpec) -> int:
    """`run.threads`; where that is auto, all that this process may use."""
    return available_threads() if run.threads == "auto" else run.threads


def processes_of(run: RunSpec, samples: int) -> int:
    """`run.processes`; where that is auto, none for few threads or samples, else one for each thread."""
    threads = threads_of(run)
    if run.processes != "auto":
        return min(run.processes, threads)
    return 0 if threads <= _FEW_THREADS or samples < _WORTH_PROCESSES else threads


def serving_processes_of(run: RunSpec) -> int:
    """Processes that preprocess where the CPU decodes what is served: those of `run.processes`, by default none."""
    return 0 if run.processes == "auto" else processes_of(run, 0)


def processes_beside(config: Config, samples: int, share: Share | None = None) -> int:
    """Processes that decode for a loader on the CPU: none where threads of their own read, see `processes_of`.

    Of the CPU's share one for each thread, however few: what launches work on the GPU needs the interpreter, too.
    """
    if share is None:
        return 0 if _readers(config, gpu=False) else processes_of(config.run, samples)
    if is_remote(config.source.where):
        return 0
    if config.run.processes != "auto":
        return min(config.run.processes, share.threads)
    return share.threads if samples >= _WORTH_PROCESSES else 0


def cpu_share_of(config: Config, name: str) -> Share | None:
    """What the CPU decodes of each batch beside a GPU's engines, `decode.cpu_share`; None for nothing."""
    part, run = config.programs[name].decoder.cpu_share, config.run
    threads = max(1, available_threads() // _CORES_FOR_ONE_THAT_SHARES) if run.threads == "auto" else run.threads
    return Share(part, threads=threads, adapts=not run.deterministic) if part else None


def share_of_cores(cores: int, quota: float | None, ranks: int) -> int:
    """Threads of one of so many ranks. quota: cores' worth of time that control groups grant."""
    granted = cores if quota is None else min(cores, math.ceil(quota))
    return max(1, granted // ranks)


def _order(source: Source, spec: SourceSpec, seed: int, pipeline: PipelineSpec) -> Order:
    if source.shard_sizes is not None and pipeline.shuffle:
        return ShardedOrder(shard_sizes=source.shard_sizes, seed=seed, window=spec.window)
    return ShuffledOrder(size=len(source), seed=seed, shuffle=pipeline.shuffle)


def _batch_size(config: Config, name: str, batch: BatchSpec, world_size: int) -> int:
    if batch.size is not None:
        return batch.size
    assert batch.global_size is not None
    if batch.global_size % world_size:
        where = f"{config.path}: pipelines.{name}.batch.global"
        raise ConfigError([Problem(where, f"must be divisible by the {world_size} ranks, got {batch.global_size}")])
    return batch.global_size // world_size


def _readers(config: Config, *, gpu: bool) -> int:
    """`run.readers`; where that is auto, many for a network; on a GPU two, which prepare chunks too; else none."""
    if config.run.readers != "auto":
        return config.run.readers
    if is_remote(config.source.where):
        return _REMOTE_READERS
    return _GPU_READERS if gpu else 0


def _bad_samples(config: Config, policy: str, limit: int | None) -> BadSamples:
    try:
        return BadSamples(policy=policy, limit=limit, path=config.run.bad_file)
    except OSError as error:
        problem = f"cannot be written: {error.strerror}: {error.filename!r}; name a file in a directory that exists"
        raise ConfigError([Problem(f"{config.path}: run.bad_file", problem)]) from error


def _identity(config: Config, name: str, source: Source) -> str:
    """A name for all that decides which samples come when and as what: stages, source, split and shuffle."""
    spec = config.source
    kind = (spec.folder, spec.listing, spec.tar, spec.split, spec.window if source.shard_sizes else None)
    shuffle = config.pipelines[name].shuffle
    return f"{key64(name, kind, len(source), shuffle, config.programs[name].pipeline.fingerprint):016x}"
