"""Loaders in the workers of Ray Train: each worker loads its own share, and checkpoints hold the loader's state."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gpuflow
from gpuflow.engines.base import reading_fault
from gpuflow.errors import LoaderError, MissingExtra, StateError
from gpuflow.loader.loader import Loader
from gpuflow.runtime.ranks import gather
from gpuflow.training.checkpoint import inner_model, write_checkpoint

try:
    import ray.train.torch
except ImportError as error:
    raise MissingExtra("gpuflow.integrations.ray", "Ray Train", "ray") from error


_FILE = "gpuflow.pt"


def load(path: str | Path, name: str = "train", *, overrides: Sequence[str] = ()) -> Loader:
    """Return the loader of this worker's rank, as `gpuflow.load` does, on the device that Ray Train gave the worker.

    Every worker calls it, in the same order for several loaders. If one of them fails, all of them raise its error, so
    none waits for the others.

    Args:
        path: the YAML file, at the same path on every node.
        name: the pipeline.
        overrides: dotted assignments such as `run.threads=8`.

    Raises:
        LoaderError: on at least one node the file is missing or faulty, or its source cannot be read. It names the
            ranks and nodes, and what each of them raised.
    """
    device = ray.train.torch.get_device()
    loader: Loader | None = None
    cause: Exception | None = None
    failure = ""
    try:
        loader = gpuflow.load(path, name, device=device if device.type == "cuda" else None, overrides=overrides)
    except Exception as error:  # of any kind: the other workers must hear of it
        cause = error
        failure = f"node {ray.util.get_node_ip_address()}: {type(error).__name__}: {error}"
    failures = gather([failure])
    if loader is not None and not any(failures):
        return loader
    if loader is not None:
        loader.close()
    found = "; ".join(f"rank {rank} on {text}" for rank, text in enumerate(failures) if text)
    raise LoaderError(f"{found}; every node needs the file and its images at the same path, or at a URL") from cause


def report(
    loader: Loader,
    metrics: Mapping[str, Any],
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    **more: Any,
) -> None:
    """Report metrics and a checkpoint with the states of loader, model and optimizer to Ray Train.

    Every worker calls it after the same step; rank 0 writes the checkpoint. The model is not sharded (no FSDP).

    Args:
        metrics: for `ray.train.report`.
        model: also as wrapped by DistributedDataParallel or torch.compile.
        more: further values that `restore` returns, such as the step: numbers, strings, tensors, lists of them.

    Raises:
        ValueError: `more` has what `torch.load` refuses with `weights_only=True`, such as numbers of numpy.
    """
    state = {
        "loader": loader.state_dict(),
        "model": inner_model(model).state_dict(),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
    }
    checkpoint = None
    with tempfile.TemporaryDirectory() as folder:
        if loader.rank == 0:
            write_checkpoint(Path(folder) / _FILE, {**more, **state})
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(dict(metrics), checkpoint=checkpoint)


def restore(loader: Loader, model: nn.Module, *, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Set loader, model and optimizer to the last checkpoint that the run reported, on any number of workers.

    Every worker calls it before its first step. The next `for` goes on with the samples that are left.

    Returns:
        The further values that `report` was given; empty at the start of a run, which changes nothing.

    Raises:
        StateError: the checkpoint is not one of `report`, or of other files, stages or seed than the loader's.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return {}
    with checkpoint.as_directory() as folder:
        try:
            state = torch.load(Path(folder) / _FILE, map_location="cpu", weights_only=True)
        except Exception as error:  # of torch's readers, which have no common base
            raise StateError(
                f"{checkpoint.path}: cannot be read as a checkpoint of gpuflow.integrations.ray.report: "
                f"{reading_fault(error)}; give RunConfig another name to start anew"
            ) from error
    loader.load_state_dict(state.pop("loader"))
    inner_model(model).load_state_dict(state.pop("model"))
    optimizer_state = state.pop("optimizer")
    if optimizer is not None and optimizer_state is not None:
        optimizer.load_state_dict(optimizer_state)
    return dict(state)
