"""Puts a loader together from a checked configuration: the one place where every part meets."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from gpuflow.config import BatchSpec, Config
from gpuflow.errors import ConfigError, LoaderError, MissingExtra, Problem, SourceError
from gpuflow.loader import Loader
from gpuflow.nvjpeg import NvjpegError
from gpuflow.order import Order, ShardedOrder, ShuffledOrder, key64
from gpuflow.sources import Source, SourceSpec, open_source, subset
from gpuflow.train import BadSamples

if TYPE_CHECKING:
    from gpuflow.config import PipelineSpec
    from gpuflow.gpu import GpuRunner

__all__ = ["available_threads", "build_loader", "open_split"]

_REMOTE_READERS, _GPU_READERS = 16, 2


def build_loader(config: Config, name: str, *, rank: int, world_size: int, device: str | torch.device | None) -> Loader:
    """The loader of one pipeline. See `gpuflow.load`."""
    program = config.program(name)
    pipeline = config.pipelines[name]
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be within [0, world_size), got rank {rank} of {world_size}")
    target = _device(device)
    gpu = _gpu_runner(config, name, target)
    batch_size = _batch_size(config, name, pipeline.batch, world_size)
    source = open_split(config, name)
    if pipeline.batch.drop_last and len(source) < batch_size * world_size:
        place = f"{config.path}: pipelines.{name}.batch"
        raise ConfigError(
            [
                Problem(
                    place,
                    f"leaves no step: {len(source)} samples do not fill one of {batch_size} x {world_size} rank(s); "
                    "take a smaller size or drop_last: false",
                )
            ]
        )
    run, seed = config.run, config.source.seed
    limit = run.max_bad if not isinstance(run.max_bad, float) else int(run.max_bad * len(source))
    policy = pipeline.on_error or ("skip" if name == "val" else run.on_error)
    threads = run.threads if run.threads != "auto" else available_threads()
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
        threads=threads,
        prefetch=run.prefetch,
        timeout_seconds=run.timeout_s,
        bad=_bad_samples(config, policy, limit),
        readers=_readers(config, gpu) if run.readers == "auto" else run.readers,
        identity=_identity(config, name, source),
        gpu=gpu,
    )


def open_split(config: Config, name: str) -> Source:
    """The source's split that a pipeline reads: the one of its name, else everything. Errors name the file."""
    try:
        return subset(open_source(config.source), config.source, name)
    except SourceError as error:
        raise SourceError(f"{config.path}: source: {error}") from error


def available_threads() -> int:
    """Threads for this process: the cores it may use, shared among the host's ranks."""
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, len(os.sched_getaffinity(0)) // (int(local_ranks) if local_ranks.isdigit() else 1))


def _order(source: Source, spec: SourceSpec, seed: int, pipeline: PipelineSpec) -> Order:
    if source.shard_sizes is not None and pipeline.shuffle:
        return ShardedOrder(shard_sizes=source.shard_sizes, seed=seed, window=spec.window)
    return ShuffledOrder(size=len(source), seed=seed, shuffle=pipeline.shuffle)


def _batch_size(config: Config, name: str, batch: BatchSpec, world_size: int) -> int:
    if batch.size is not None:
        return batch.size
    assert batch.global_size is not None
    if batch.global_size % world_size:
        place = f"{config.path}: pipelines.{name}.batch.global"
        raise ConfigError([Problem(place, f"must be divisible by the {world_size} ranks, got {batch.global_size}")])
    return batch.global_size // world_size


def _readers(config: Config, gpu: GpuRunner | None) -> int:
    """Threads that only read: many for a network, few beside the one thread that feeds the GPU, else none."""
    spec = config.source
    if "://" in str(spec.folder or spec.listing or spec.tar):
        return _REMOTE_READERS
    return 0 if gpu is None else _GPU_READERS


def _device(device: str | torch.device | None) -> torch.device:
    target = torch.device(device or "cpu")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise LoaderError(f"device {str(target)!r} needs CUDA, and torch sees no GPU here; use device='cpu'")
    return target


def _gpu_runner(config: Config, name: str, device: torch.device) -> GpuRunner | None:
    """The engines' runner where the pipeline may and can use them. `backend: gpu` makes every refusal an error."""
    program = config.programs[name]
    backend = program.decoder.backend
    refusal: str | None = "the loader's device is the CPU"
    if device.type == "cuda" and backend != "cpu":
        from gpuflow.gpu import GpuRunner, engine_refusal  # Triton, which CPU builds of torch lack

        refusal = engine_refusal(program)
        if refusal is None:
            try:
                return GpuRunner(program, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            except (MissingExtra, NvjpegError) as error:
                refusal = str(error)
    if backend == "gpu":
        place = f"{config.path}: pipelines.{name}.stages[0].decode.backend"
        raise ConfigError([Problem(place, f"is gpu, but {refusal}; use auto or cpu")])
    return None


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
