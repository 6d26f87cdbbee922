"""How images get from disk into a training loop and into a served model, with the same pixels in both.

import gpuflow

with gpuflow.load("configs/photos.yaml", "train") as loader:
    for images, labels in loader:
        ...
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpuflow.errors import (
    BadSampleError,
    ConfigError,
    GpuflowError,
    LoaderError,
    LoaderTimeout,
    MissingExtra,
    PredictorError,
    PredictorTimeout,
    SourceError,
    StateError,
    TooManyBadSamples,
)

if TYPE_CHECKING:
    import torch

    from gpuflow.loader import Batch, Loader
    from gpuflow.spec import Stage

__all__ = [
    "BadSampleError",
    "Batch",
    "ConfigError",
    "GpuflowError",
    "Loader",
    "LoaderError",
    "LoaderTimeout",
    "MissingExtra",
    "PredictorError",
    "PredictorTimeout",
    "SourceError",
    "StateError",
    "TooManyBadSamples",
    "load",
    "stage_table",
]

__version__ = importlib.metadata.version("gpuflow")


def __getattr__(name: str) -> object:
    if name in ("Batch", "Loader"):
        from gpuflow import loader

        return getattr(loader, name)
    raise AttributeError(f"module 'gpuflow' has no attribute {name!r}")


def stage_table() -> dict[str, type[Stage]]:
    """The vocabulary: gpuflow's own stages, then what other packages offer as entry points `gpuflow.stages`.

    Raises:
        GpuflowError: two packages offer a stage of the same name.
    """
    from gpuflow.stages import STAGES

    table = dict(STAGES)
    for entry in importlib.metadata.entry_points(group="gpuflow.stages"):
        if entry.name in table:
            raise GpuflowError(
                f"stage {entry.name!r} of {entry.value} is already known; rename it or uninstall its package"
            )
        table[entry.name] = entry.load()
    return table


def load(
    path: str | Path,
    name: str = "train",
    *,
    rank: int | None = None,
    world_size: int | None = None,
    device: str | torch.device | None = None,
    overrides: Sequence[str] = (),
) -> Loader:
    """A loader for one pipeline of a YAML file.

    Args:
        path: the file.
        name: the pipeline: `train`, `val`, or whatever stands under `pipelines`.
        rank, world_size: this process among those that share the epochs; by default from torchrun's environment
            (RANK, WORLD_SIZE), else 0 of 1.
        device: where batches are delivered; the CPU by default. `cuda` is the GPU of torchrun's LOCAL_RANK, else
            the current one.
        overrides: dotted assignments such as `run.threads=8`.

    Raises:
        ConfigError: the file, with every located problem, or torchrun's environment.
        SourceError: the source cannot be indexed.
    """
    from gpuflow.build import build_loader
    from gpuflow.config import read_config
    from gpuflow.distributed import Ranks

    ranks = Ranks.from_environment()
    return build_loader(
        read_config(path, stage_table(), overrides),
        name,
        rank=ranks.rank if rank is None else rank,
        world_size=ranks.world_size if world_size is None else world_size,
        device=device,
    )
