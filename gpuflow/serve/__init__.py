"""Serving: the block `serve` of a configuration as a torchpipe graph, and a predictor that runs it.

import gpuflow.serve

with gpuflow.serve.load("configs/photos.yaml") as predict:
    print(predict("photo.jpg", top_k=3))
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from gpuflow.serve.predictor import Prediction, Predictor
    from gpuflow.torchpipe.graph import Graph, to_toml
    from gpuflow.torchpipe.running_graph import register

__all__ = ["Graph", "Prediction", "Predictor", "load", "lower", "register", "to_toml"]


_MODULES = {
    "Graph": "gpuflow.torchpipe.graph",
    "Prediction": "gpuflow.serve.predictor",
    "Predictor": "gpuflow.serve.predictor",
    "register": "gpuflow.torchpipe.running_graph",
    "to_toml": "gpuflow.torchpipe.graph",
}
"""Names that are imported at their first use, because their modules need torch."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'gpuflow.serve' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def lower(path: str | Path, *, device: str = "cpu", overrides: Sequence[str] = ()) -> Graph:
    """Return the torchpipe graph of a file's block `serve`: `as_dict()` for `torchpipe.pipe`, `to_toml` for a file.

    Needs neither torchpipe nor the model file.

    Examples:
        >>> _ = Path("x.yaml").write_text("serve: {stages: [decode: {}, resize: {height: 24, width: 32}]}")
        >>> [(name, node["batch"]) for name, node in lower("x.yaml", overrides=["run.threads=2"]).nodes.items()]
        [('preprocess', '16'), ('model', '16')]

    Args:
        path: the YAML file.
        device: where the model runs, `cpu` or `cuda`.
        overrides: such as `serve.model.batch=8`.

    Raises:
        ConfigError: the file, with every located problem.
    """
    from gpuflow.config import read_config
    from gpuflow.torchpipe import graph
    from gpuflow.vocabulary import stage_table

    return graph.lower(read_config(path, stage_table(), overrides), device=device)


def load(
    path: str | Path,
    *,
    device: str | torch.device | None = None,
    overrides: Sequence[str] = (),
    model: Callable[[torch.Tensor], torch.Tensor] | None = None,
    preprocess_only: bool = False,
) -> Predictor:
    """Return a predictor of encoded images, as a file's block `serve` describes it.

    Examples:
        >>> from PIL import Image
        >>> Image.new("RGB", (64, 48)).save("black.png")
        >>> _ = Path("x.yaml").write_text("serve: {stages: [decode: {}, resize: {height: 24, width: 32}]}")
        >>> with load("x.yaml", model=lambda images: images.float().mean(dim=(2, 3))) as predict:
        ...     predict("black.png").tolist()
        [0.0, 0.0, 0.0]

    Args:
        path: the YAML file.
        device: where the model runs; the CPU by default.
        overrides: dotted assignments such as `serve.model.instances=2`.
        model: replaces `serve.model.file`: any callable that takes images [N, C, H, W] on the device and returns logits
            [N, K]. A torch.nn.Module is moved to the device and set to eval(). One thread calls it.
        preprocess_only: open no model; only `preprocess` works then.

    Raises:
        ConfigError: the file, with every located problem; a model file that is missing, does not take such images, or
            was trained with other preprocessing.
        MissingExtra: torchpipe, or the model's library, is not installed.
        PredictorError: this process was forked from one that had loaded a predictor.
    """
    from gpuflow.config import read_config
    from gpuflow.serve.predictor import open_predictor
    from gpuflow.vocabulary import stage_table

    return open_predictor(
        read_config(path, stage_table(), overrides), device=device, model=model, preprocess_only=preprocess_only
    )
