"""`gpuflow train`: a torchvision classification model on a loader's batches, with checkpoints that can be resumed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpuflow.build import build_loader
from gpuflow.config import Config
from gpuflow.errors import ConfigError, Problem, StateError, did_you_mean
from gpuflow.loader import Loader

__all__ = ["Accuracy", "Trainer", "TrainerEvents"]

_CHECKPOINT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of one pass over a pipeline: mean loss, share of correct predictions, images a second."""

    loss: float
    accuracy: float
    images_per_s: float


class TrainerEvents:
    """What a trainer tells while it runs; this one keeps quiet. The command line shows a progress bar."""

    def begin_pass(self, name: str, epoch: int, steps: int) -> None: ...

    def step(self, loss: float, images_per_s: float) -> None: ...

    def end_pass(self, name: str, epoch: int, result: Accuracy) -> None: ...


class Trainer:
    """Trains what `train:` names on the pipeline `train`, validates on `val` where there is one.

    SGD with momentum 0.9, learning rate warmed up over the first 5% of the steps and then on a cosine. On the CPU a run
    that is interrupted at any step and resumed ends with the same weights as one that is not.

    Args:
        config: a checked configuration. device: where to train; by default a GPU if torch sees one.
        resume: go on from `<train.out>/last.pt`.
    """

    def __init__(self, config: Config, *, device: str | None = None, resume: bool = False) -> None:
        self._spec = config.train
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.checkpoint = Path(self._spec.out) / "last.pt"
        self.train_loader = self._loader(config, "train")
        self.val_loader = self._loader(config, "val") if "val" in config.pipelines else None
        classes = self.train_loader.classes
        torch.manual_seed(config.source.seed)
        self.model: nn.Module = _model(config, len(classes)).to(self.device)
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._optimizer = torch.optim.SGD(
            self.model.parameters(), lr=self._spec.lr, momentum=0.9, weight_decay=self._spec.weight_decay, nesterov=True
        )
        self._loss = nn.CrossEntropyLoss()
        self._steps_in_all = self._spec.epochs * len(self.train_loader)
        self.step, self.epoch = 0, 0
        self.preprocessing = (self.val_loader or self.train_loader).preprocessing
        if resume:
            self._resume()

    def _loader(self, config: Config, name: str) -> Loader:
        return build_loader(config, name, rank=0, world_size=1, device=self.device)

    def run(self, events: TrainerEvents, *, max_steps: int | None = None) -> Accuracy | None:
        """Train to the end, or for `max_steps` steps; checkpoint after each epoch and at the end.

        Returns:
            The last validation's result, or None where there was none.
        """
        last_step = min(self._steps_in_all, self.step + max_steps if max_steps is not None else self._steps_in_all)
        result = None
        with self._closing():
            while self.step < last_step:
                whole = self._train_epoch(events, last_step)
                self.save()
                if whole and self.val_loader is not None:
                    result = self._validate(events)
        return result

    @contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        finally:
            for loader in (self.train_loader, self.val_loader):
                if loader is not None:
                    loader.close()

    def _train_epoch(self, events: TrainerEvents, last_step: int) -> bool:
        """Train until the epoch ends or `last_step` is reached; returns whether the epoch ended."""
        loader = self.train_loader
        self.epoch = loader.state_dict()["epoch"]
        self.model.train()
        tally = _Tally()
        events.begin_pass("train", self.epoch, min(len(loader), last_step - self.step))
        for images, labels in loader:
            for group in self._optimizer.param_groups:
                group["lr"] = self._learning_rate()
            logits = self.model(images)
            loss = self._loss(logits, labels)
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self._optimizer.step()
            self.step += 1
            tally.add(logits.detach(), labels, loss.detach())
            events.step(tally.loss, tally.images_per_s)
            if self.step >= last_step:
                break
        events.end_pass("train", self.epoch, tally.result())
        return bool(loader.state_dict()["epoch"] != self.epoch)

    @torch.no_grad()
    def _validate(self, events: TrainerEvents) -> Accuracy:
        assert self.val_loader is not None
        self.model.eval()
        tally = _Tally()
        events.begin_pass("val", self.epoch, len(self.val_loader))
        for images, labels in self.val_loader:
            logits = self.model(images)
            tally.add(logits, labels, self._loss(logits, labels))
            events.step(tally.loss, tally.images_per_s)
        result = tally.result()
        events.end_pass("val", self.epoch, result)
        return result

    def _learning_rate(self) -> float:
        warm = max(1, round(0.05 * self._steps_in_all))
        if self.step < warm:
            return self._spec.lr * (self.step + 1) / warm
        done = (self.step - warm) / max(1, self._steps_in_all - warm)
        return self._spec.lr * 0.5 * (1 + math.cos(math.pi * done))

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write `last.pt`, whole or not at all: weights, optimizer, the loader's state, the preprocessing's hash."""
        state = {
            "version": _CHECKPOINT_VERSION,
            "arch": self._spec.model,
            "classes": list(self.train_loader.classes),
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "loader": self.train_loader.state_dict(),
            "step": self.step,
            "rng": torch.get_rng_state(),
            "preprocessing": self.preprocessing,
            "train_preprocessing": self.train_loader.preprocessing,
        }
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        partial = self.checkpoint.with_suffix(".pt.partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint)
        return self.checkpoint

    def _resume(self) -> None:
        try:
            state: dict[str, Any] = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        except FileNotFoundError:
            raise StateError(f"{self.checkpoint}: no checkpoint to resume; train without --resume first") from None
        for key, ours in (("arch", self._spec.model), ("classes", list(self.train_loader.classes))):
            if state[key] != ours:
                raise StateError(
                    f"{self.checkpoint}: was trained with {key} {state[key]}, the configuration says {ours}; "
                    "restore the configuration or set another train.out"
                )
        if state["preprocessing"] != self.preprocessing:
            raise StateError(
                f"{self.checkpoint}: was trained with preprocessing {state['preprocessing']}, the configuration's is "
                f"{self.preprocessing}; restore the stages or set another train.out"
            )
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.train_loader.load_state_dict(state["loader"])
        torch.set_rng_state(state["rng"].cpu())
        self.step = state["step"]


class _Tally:
    """Sums over the batches of a pass."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._images, self._correct, self._loss = 0, 0, 0.0

    def add(self, logits: torch.Tensor, labels: torch.Tensor, loss: torch.Tensor) -> None:
        self._images += len(labels)
        self._correct += int((logits.argmax(dim=1) == labels).sum())
        self._loss += float(loss) * len(labels)

    @property
    def loss(self) -> float:
        return self._loss / max(1, self._images)

    @property
    def images_per_s(self) -> float:
        return self._images / (time.perf_counter() - self._start)

    def result(self) -> Accuracy:
        return Accuracy(self.loss, self._correct / max(1, self._images), self.images_per_s)


def _model(config: Config, classes: int) -> nn.Module:
    from torchvision import models

    known = models.list_models(module=models)
    name = config.train.model
    if name not in known:
        problem = Problem(f"{config.path}: train.model", f"is not a torchvision classification model, got {name!r}")
        raise ConfigError([Problem(problem.place, problem.message + did_you_mean(name, known))])
    build: Callable[..., nn.Module] = models.get_model_builder(name)
    return build(weights=None, num_classes=classes)
