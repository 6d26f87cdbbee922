"""Writes checkpoints, whole or not at all, with what serving must know of the model, and reads them to resume."""

from __future__ import annotations

import errno
import io
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from gpuflow.config import Activation
from gpuflow.engines.base import class_difference
from gpuflow.engines.model_library import is_model, known_models, shapes_of
from gpuflow.engines.pytorch import CHECKPOINT_VERSION, read_checkpoint
from gpuflow.errors import ConfigError, StateError, reason_of, suggest
from gpuflow.pipeline.stage import Pipeline
from gpuflow.pipeline.views import ViewsPipeline
from gpuflow.runtime.files import atomic_write


class TrainedOn(Protocol):
    """Describes what a checkpoint needs of a loader, as `gpuflow.load` or `gpuflow.wrap` makes it."""

    @property
    def classes(self) -> Sequence[str]:
        """Return the class names."""

    @property
    def pipeline(self) -> Pipeline | ViewsPipeline:
        """Return the stages."""

    @property
    def preprocessing(self) -> str:
        """Return the fingerprint of the stages."""

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands."""


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    arch: str,
    loader: TrainedOn,
    val: TrainedOn | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    outputs: int | None = None,
    activation: Activation | None = None,
    **more: Any,
) -> None:
    """Write a checkpoint of a training loop, which `gpuflow serve` and `gpuflow export` take as they take their own.

    It holds the weights (`model`), the loader's state (`loader`), the optimizer's (`optimizer`), the names of the
    classes, and the preprocessing that a served model must have. `torch.load(path, weights_only=True)` reads it.

    Args:
        path: the file, which ends in `.pt`. It is written whole or not at all.
        model: the model, also as wrapped by DistributedDataParallel or torch.compile.
        arch: its name in torchvision, such as `resnet50`, or `timm:` and its name in timm. Others are served as `.pt2`.
        loader: that it is trained on.
        val: that it is validated on, whose preprocessing is the one to serve with; by default that of `loader`.
        optimizer: whose state to save.
        outputs: how many numbers the model predicts, in place of classes; the file then names no classes.
        activation: of `serve.model`: `sigmoid` for a model of several classes an image; by default `softmax`, or `none`
            with `outputs`.
        more: further values, such as the step: numbers, strings, tensors, and lists and dictionaries of them. Under
            `ema`, other weights of the model, such as a moving average, which are then served.

    Raises:
        ValueError: `val` has other classes than `loader`; neither library has the model, or these weights are not its;
            `more` has one of the names above, or what `torch.load` refuses with `weights_only=True`, such as numbers of
            numpy. OSError: the file cannot be written.
    """
    if not is_model(arch):
        action = suggest(arch, known_models(arch), else_all=False) or "export other models as .pt2"
        raise ValueError(f"arch must be a classification model of torchvision, or timm:NAME, got {arch!r}; {action}")
    if val is not None and (difference := class_difference(val.classes, loader.classes)):
        raise ValueError(f"val must have the classes of loader, {difference}")
    module = inner_model(model)
    weights = module.state_dict()
    found = {name: tuple(value.shape) for name, value in weights.items()}
    expected = shapes_of(arch, count := outputs or len(loader.classes))
    if found != expected:
        name = min(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        shapes = f"{found.get(name, 'nothing')} in place of {expected.get(name, 'nothing')}"
        raise ValueError(
            f"model must have the weights of {arch} for {count} classes, but for {name} it has {shapes}; name its own "
            "arch, or save its weights and loader.state_dict() with torch.save, and serve it as .pt2"
        )
    pipeline = (val or loader).pipeline
    state: dict[str, Any] = {
        "version": CHECKPOINT_VERSION,
        "arch": arch,
        "classes": list(loader.classes) if outputs is None else [],
        "outputs": count,
        "activation": activation or ("none" if outputs else "softmax"),
        "model": weights,
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "loader": loader.state_dict(),
        "preprocessing": pipeline.fingerprint,
        "stages": list(pipeline.lines),
        "train_preprocessing": loader.preprocessing,
    }
    if taken := sorted(state.keys() & more.keys()):
        raise ValueError(f"further values must not have the names of gpuflow's own, got {', '.join(taken)}")
    write_checkpoint(Path(path), {**state, **more})


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write a file that `torch.load` reads with `weights_only=True`, whole or not at all.

    Raises OSError, or ValueError for what it refuses to read; then the file that was there stays.
    """
    with atomic_write(path) as file:
        try:
            # Given the file itself instead of its name, torch turns a KeyboardInterrupt into a RuntimeError.
            torch.save(dict(state), file.name)
        except RuntimeError as error:  # torch's writer does not say why it fails
            raise OSError(errno.EIO, reason_of(error), str(path)) from error
        try:
            torch.load(file.name, map_location="meta", weights_only=True)  # which reads no weights
        except pickle.UnpicklingError as error:
            refused = ", ".join(name for name, value in state.items() if name != "model" and not _is_read(value))
            raise ValueError(
                f"{refused or 'model'} must be numbers, strings, tensors, and lists and dictionaries of them: torch "
                "refuses to read other objects; convert them, as by float()"
            ) from error


def _is_read(value: object) -> bool:
    """Return whether `torch.load` reads a value with `weights_only=True`."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    try:
        torch.load(file, map_location="meta", weights_only=True)
    except pickle.UnpicklingError:
        return False
    return True


def read_resumable(path: Path, device: torch.device) -> dict[str, Any]:
    """Return the checkpoint of `gpuflow train` at `path` that a run continues, with its tensors on a device.

    Raises:
        StateError: there is none, or it is damaged, or another program or a newer gpuflow wrote it.
    """
    if not path.exists():
        raise StateError(f"{path}: no checkpoint to resume; train without --resume first")
    action = "restore an older copy, or train without --resume to start anew"
    try:
        return read_checkpoint(str(path), device, ("optimizer", "loader"), action)
    except ConfigError as error:
        raise StateError(str(error)) from error


def inner_model(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner
