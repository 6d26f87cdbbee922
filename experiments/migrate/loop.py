"""What moving in does not change: the model, a pass of training, a pass of validation, and what a script reports."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision import models

__all__ = ["ARCH", "BATCH", "DEVICE", "EPOCHS", "MEAN", "STD", "Result", "evaluate", "new_model", "report", "train"]

ARCH, BATCH, EPOCHS = "resnet18", 32, 3
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, slots=True)
class Result:
    """Of a pass: the mean loss, the share of correct predictions, the images and the seconds."""

    loss: float
    accuracy: float
    images: int
    seconds: float


def new_model(classes: Sequence[str], weights: str | Path | None = None) -> nn.Module:
    """The model; weights: a checkpoint of `gpuflow.save_checkpoint`."""
    torch.manual_seed(0)
    model: nn.Module = models.get_model(ARCH, num_classes=len(classes))
    if weights is not None:
        model.load_state_dict(torch.load(weights, weights_only=True)["model"])
    return model.to(DEVICE)


def train(model: nn.Module, loader: Iterable[Any], optimizer: torch.optim.Optimizer) -> Result:
    """A pass of training."""
    model.train()
    return _pass(model, loader, optimizer)


@torch.inference_mode()
def evaluate(model: nn.Module, loader: Iterable[Any]) -> Result:
    """A pass of validation."""
    model.eval()
    return _pass(model, loader, None)


def _pass(model: nn.Module, loader: Iterable[Any], optimizer: torch.optim.Optimizer | None) -> Result:
    start, count, correct, total = time.perf_counter(), 0, 0, 0.0
    for images, labels in loader:
        images, labels = images.to(DEVICE), labels.to(DEVICE)
        logits = model(images)
        loss = nn.functional.cross_entropy(logits, labels)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        count += len(labels)
        correct += int((logits.argmax(dim=1) == labels).sum())
        total += loss.item() * len(labels)
    return Result(total / count, correct / count, count, time.perf_counter() - start)


def report(result: Result) -> None:
    """Print what run.py reads."""
    print(json.dumps(asdict(result)), flush=True)
