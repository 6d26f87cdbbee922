"""The models: one layer of learned filters with logistic regression on top, for a CPU, and ResNet-18 for a GPU."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional

__all__ = ["MODELS", "logits_of"]

_FILTERS, _SIDE, _PATCHES, _THRESHOLD = 32, 6, 4000, 0.3
_STEPS, _BATCH = 800, 64
_CHUNK = 100


class Filters(nn.Module):
    """Filters as of Coates and Ng (2012), with both signs; their mean, largest and quadratic mean; a linear layer."""

    def __init__(self, weights: torch.Tensor, classes: int) -> None:
        super().__init__()
        self.weights = nn.Buffer(weights)
        self.mean, self.scale = nn.Buffer(torch.zeros(6 * len(weights))), nn.Buffer(torch.ones(6 * len(weights)))
        self.linear = nn.Linear(6 * len(weights), classes)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        found = functional.conv2d(images, self.weights, stride=2).flatten(2)
        pooled = []
        for signed in (found, -found):
            above = functional.relu(signed - _THRESHOLD)
            quadratic = above.norm(dim=2) / above.shape[2] ** 0.5
            pooled += [above.mean(2), above.amax(2), quadratic]
        return torch.cat(pooled, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear((self.features(images) - self.mean) * self.scale)
        return logits


def fit_filters(images: torch.Tensor, labels: torch.Tensor, classes: int, seed: int, device: str) -> nn.Module:
    """Return the model that these images give."""
    from sklearn.linear_model import LogisticRegression

    model = Filters(_learned_filters(images, seed), classes)
    with torch.no_grad():
        features = torch.cat([model.features(part) for part in torch.split(images, _CHUNK)])
        model.mean.copy_(features.mean(0))
        model.scale.copy_(1 / features.std(0).clamp(min=1e-3))
        scaled = (features - model.mean) * model.scale
        strength = 0.02 if len(labels) > 20 * classes else 0.01
        fitted = LogisticRegression(C=strength, max_iter=400).fit(scaled.numpy(), labels.numpy())
        weights, bias = (torch.from_numpy(found).float() for found in (fitted.coef_, fitted.intercept_))
        if classes == 2:  # scikit-learn gives the difference of the two logits
            weights, bias = torch.cat([-weights / 2, weights / 2]), torch.cat([-bias / 2, bias / 2])
        model.linear.weight.copy_(weights)
        model.linear.bias.copy_(bias)
    return model.eval().to(device)


def _learned_filters(images: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the centres [32, 3, 6, 6] of whitened patches, as filters of the images."""
    from sklearn.cluster import MiniBatchKMeans

    rng = np.random.default_rng(seed)
    height, width = images.shape[2:]
    places = zip(
        rng.integers(0, len(images), _PATCHES),
        rng.integers(0, height - _SIDE + 1, _PATCHES),
        rng.integers(0, width - _SIDE + 1, _PATCHES),
        strict=True,
    )
    patches = np.stack([images[i, :, y : y + _SIDE, x : x + _SIDE].numpy().ravel() for i, y, x in places])
    patches = patches - patches.mean(1, keepdims=True)
    patches /= np.sqrt(patches.var(1, keepdims=True) + 0.05)
    centred = patches - patches.mean(0)
    values, vectors = np.linalg.eigh(np.cov(centred.T))
    whitening = vectors @ np.diag(1 / np.sqrt(values + 0.1)) @ vectors.T
    means = MiniBatchKMeans(_FILTERS, random_state=seed, n_init=1, max_iter=30).fit(centred @ whitening)
    centres = means.cluster_centers_
    centres = centres / (np.linalg.norm(centres, axis=1, keepdims=True) + 1e-6)
    filters = centres @ whitening
    filters -= filters.mean(1, keepdims=True)
    return torch.from_numpy(filters.reshape(_FILTERS, 3, _SIDE, _SIDE)).float()


def fit_resnet18(images: torch.Tensor, labels: torch.Tensor, classes: int, seed: int, device: str) -> nn.Module:
    """Return a ResNet-18, trained from random weights for a fixed number of steps, with flips."""
    from torchvision.models import resnet18

    torch.manual_seed(seed)
    model: nn.Module = resnet18(num_classes=classes).to(device, memory_format=torch.channels_last)
    images, labels = images.to(device), labels.to(device)
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=_STEPS)
    for _ in range(_STEPS):
        chosen = torch.from_numpy(rng.integers(0, len(labels), _BATCH)).to(device)
        batch = images[chosen]
        dims = [dim for dim in (2, 3) if rng.random() < 0.5]
        batch = batch.flip(dims).contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(batch), labels[chosen]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return model.eval()


Fit = Callable[[torch.Tensor, torch.Tensor, int, int, str], nn.Module]
MODELS: dict[str, Fit] = {"filters": fit_filters, "resnet18": fit_resnet18}


def logits_of(model: nn.Module, images: torch.Tensor, engine: str, device: str) -> torch.Tensor:
    """Return float32 logits [N, K]. engine: `torch`; `fp32`, ONNX Runtime on the CPU; `fp16`, torch in 16 bits."""
    parts = torch.split(images, _CHUNK)
    match engine:
        case "torch":
            return _run(model, parts, device)
        case "fp16":
            half = copy.deepcopy(model).half().to(device)
            return _run(half, [part.half() for part in parts], device)
        case "fp32":
            return _run_onnx(model, parts)
        case _:
            raise ValueError(f"engine must be torch, fp32 or fp16, got {engine!r}")


def _run(model: nn.Module, parts: Sequence[torch.Tensor], device: str) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(part.to(device)).float().cpu() for part in parts])


def _run_onnx(model: nn.Module, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    import onnxruntime

    with tempfile.NamedTemporaryFile(suffix=".onnx") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the older exporter needs no onnxscript
        torch.onnx.export(
            copy.deepcopy(model).cpu(),
            (parts[0],),
            file.name,
            dynamo=False,
            input_names=["images"],
            output_names=["logits"],
            dynamic_axes={"images": {0: "n"}},
        )
        session = onnxruntime.InferenceSession(file.name, providers=["CPUExecutionProvider"])
    return torch.cat([torch.from_numpy(session.run(None, {"images": part.numpy()})[0]) for part in parts])
