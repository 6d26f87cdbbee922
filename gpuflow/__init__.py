"""Brings images from disk into a training loop and into a served model, with the same pixels in both.

import gpuflow

with gpuflow.load("configs/photos.yaml", "train") as loader:
    for images, labels in loader:
        ...
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpuflow.errors import (
    BadSampleError,
    ConfigError,
    DecoderError,
    GpuflowError,
    LoaderError,
    LoaderTimeout,
    MissingExtra,
    PredictorError,
    PredictorTimeout,
    ServerFault,
    SourceError,
    StateError,
    SystemFault,
    TooManyBadSamples,
)
from gpuflow.runtime.cuda import request_queues as _request_queues
from gpuflow.version import __version__ as __version__
from gpuflow.vocabulary import stage_table

if TYPE_CHECKING:
    import torch

    from gpuflow.loader.batch import Batch
    from gpuflow.loader.loader import Loader
    from gpuflow.loader.metrics_server import serve_metrics
    from gpuflow.loader.transform import Transform
    from gpuflow.migration.dataloader import bytes_loader
    from gpuflow.migration.wrap import TensorToTensor, WrappedLoader, cv2_resize, wrap
    from gpuflow.runtime.preemption import Preemption
    from gpuflow.training.checkpoint import save_checkpoint

__all__ = [
    "BadSampleError",
    "Batch",
    "ConfigError",
    "DecoderError",
    "GpuflowError",
    "Loader",
    "LoaderError",
    "LoaderTimeout",
    "MissingExtra",
    "PredictorError",
    "PredictorTimeout",
    "Preemption",
    "ServerFault",
    "SourceError",
    "StateError",
    "SystemFault",
    "TensorToTensor",
    "TooManyBadSamples",
    "Transform",
    "WrappedLoader",
    "bytes_loader",
    "cv2_resize",
    "load",
    "save_checkpoint",
    "serve_metrics",
    "stage_table",
    "transform",
    "wrap",
]

_request_queues()

_MODULES = {
    "Batch": "gpuflow.loader.batch",
    "Loader": "gpuflow.loader.loader",
    "Preemption": "gpuflow.runtime.preemption",
    "TensorToTensor": "gpuflow.migration.wrap",
    "Transform": "gpuflow.loader.transform",
    "WrappedLoader": "gpuflow.migration.wrap",
    "bytes_loader": "gpuflow.migration.dataloader",
    "cv2_resize": "gpuflow.migration.wrap",
    "save_checkpoint": "gpuflow.training.checkpoint",
    "serve_metrics": "gpuflow.loader.metrics_server",
    "wrap": "gpuflow.migration.wrap",
}
"""Names that are imported at their first use, because most of their modules need torch."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'gpuflow' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def load(
    path: str | Path,
    name: str = "train",
    *,
    rank: int | None = None,
    world_size: int | None = None,
    device: str | torch.device | None = None,
    overrides: Sequence[str] = (),
) -> Loader:
    """Return a loader for one pipeline of a YAML file.

    Examples:
        >>> from PIL import Image
        >>> Path("photos/cat").mkdir(parents=True)
        >>> Image.new("RGB", (64, 48)).save("photos/cat/1.jpg")
        >>> pipelines = "{val: {stages: [decode: {}, resize: {height: 24, width: 32}], batch: {size: 4}}}"
        >>> _ = Path("x.yaml").write_text(f"source: {{folder: photos}}\\npipelines: {pipelines}")
        >>> with load("x.yaml", "val") as loader:
        ...     [(tuple(images.shape), labels.tolist()) for images, labels in loader]
        [((1, 3, 24, 32), [0])]

    Args:
        path: the file.
        name: the pipeline: `train`, `val`, or another name under `pipelines`.
        rank, world_size: this process among those that share the epochs, such as the data-parallel ranks of a larger
            run; by default its place in an initialised `torch.distributed`, else in torchrun's environment (RANK,
            WORLD_SIZE), else 0 of 1.
        device: where batches are delivered; the CPU by default. `cuda` is the GPU of torchrun's LOCAL_RANK, else the
            current one.
        overrides: dotted assignments such as `run.threads=8`.

    Returns:
        A `Loader`: each `for` over it is an epoch of batches (images, labels): images [N, C, H, W] in the pipeline's
        dtype, labels int64 [N]. See `Batch` for targets and views.

    Raises:
        ConfigError: the file, with every located problem, or an environment that contradicts the process group.
        SourceError: the source cannot be indexed.
        LoaderError: torch sees no GPU, or not the one of this process.
        MissingExtra: the source or a decoder needs a package that is not installed.
        ValueError: `rank` is not within [0, world_size), or nothing says which of several ranks this process is.
    """
    from gpuflow.config import read_config
    from gpuflow.loader.assemble import build_loader
    from gpuflow.runtime.ranks import Ranks

    ranks = Ranks.of_process() if rank is None or world_size is None else Ranks()
    if rank is None and world_size is not None and world_size > 1 and ranks.world_size == 1:
        raise ValueError(f"rank must be given with world_size={world_size}: nothing says which rank this process is")
    return build_loader(
        read_config(path, stage_table(), overrides),
        name,
        rank=ranks.rank if rank is None else rank,
        world_size=ranks.world_size if world_size is None else world_size,
        rank_given=rank is not None or world_size is not None,
        device=device,
    )


def transform(
    path: str | Path,
    name: str = "train",
    *,
    device: str | torch.device | None = None,
    overrides: Sequence[str] = (),
) -> Transform:
    """Return the stages of one pipeline of a YAML file, without a loader: a callable on batches of decoded images.

    `gpuflow.transform("x.yaml")(images, epoch=0, positions=range(len(images)))` gives what a loader gives for the same
    decoded pixels, seed, epoch and positions. It reads no source.

    Examples:
        >>> import torch
        >>> pipelines = "{train: {stages: [decode: {}, solarize: {}, resize: {height: 1, width: 3}], batch: {size: 2}}}"
        >>> _ = Path("x.yaml").write_text(f"source: {{folder: photos}}\\npipelines: {pipelines}")
        >>> images = torch.tensor([0, 127, 255], dtype=torch.uint8).expand(1, 3, 1, 3)
        >>> transform("x.yaml")(images, epoch=0, positions=[0])[0, 0].tolist()
        [[0, 127, 0]]

    Args:
        path: the file.
        name: the pipeline: `train`, `val`, or another name under `pipelines`.
        device: where the images are and the result is; the CPU by default. `cuda` is the GPU of torchrun's LOCAL_RANK,
            else the current one.
        overrides: dotted assignments such as `run.threads=8`.

    Raises:
        ConfigError: the file, with every located problem, or a pipeline whose stages cannot run so.
        LoaderError: torch does not see the GPU.
    """
    from gpuflow.config import read_config
    from gpuflow.loader.transform import build_transform

    return build_transform(read_config(path, stage_table(), overrides), name, device)
