"""Says what a model learns from the labels: the number of its outputs, the loss and the measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch.nn import functional as F

from gpuflow.arrays import Array
from gpuflow.config import Activation, Config
from gpuflow.errors import UNSET, ConfigError, Problem
from gpuflow.sources import Source, has_labels, has_one_class

_LOSSES = {"class": ("cross_entropy", "bce"), "classes": ("bce",), "numbers": ("mse", "l1", "smooth_l1")}  # auto first
_OF_NUMBERS = {"mse": F.mse_loss, "l1": F.l1_loss, "smooth_l1": F.smooth_l1_loss}
_TOP = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """Computes losses and measures of logits [N, outputs] and labels.

    Args:
        labels: what a sample has: one class, any number of classes, or numbers.
        loss: its name, one of those in `_LOSSES` for these labels.
        outputs: the number of the model's outputs.
        smoothing: the share of each label that is spread over the classes, in training.
    """

    labels: Literal["class", "classes", "numbers"]
    loss: str
    outputs: int
    smoothing: float = 0.0

    @property
    def measures(self) -> tuple[str, ...]:
        """Return the names of the measures. The first one decides which epoch is the best.

        Examples:
            >>> Objective(labels="class", loss="bce", outputs=10).measures
            ('accuracy', 'top5')
        """
        if self.labels == "class":
            return ("accuracy", "top5") if self.outputs > _TOP else ("accuracy",)
        return ("f1",) if self.labels == "classes" else ("mae",)

    @property
    def activation(self) -> Activation:
        """Return what becomes of the outputs of a model that is served."""
        return {"class": "softmax", "classes": "sigmoid", "numbers": "none"}[self.labels]  # type: ignore[return-value]

    @property
    def sums_per_batch(self) -> int:
        """Return the length of `sums`."""
        return 3 if self.labels == "classes" else len(self.measures)

    def is_better(self, measures: Mapping[str, float], best: Mapping[str, float] | None) -> bool:
        """Return True if a validation is better than the best one so far, or the first one. NaN is never better."""
        value, other = measures[self.measures[0]], (best or {}).get(self.measures[0])
        if other is None:
            return value == value
        return value < other if self.labels == "numbers" else value > other

    def losses(self, logits: torch.Tensor, labels: torch.Tensor, *, smoothed: bool = False) -> torch.Tensor:
        """Return the loss of each sample, float32 [N]: the mean over its outputs, if each output has one.

        smoothed: with the labels of training.
        """
        logits, smoothing = logits.float(), self.smoothing if smoothed else 0.0
        if self.loss == "cross_entropy":
            return F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        targets = self._targets(labels)
        if self.loss != "bce":
            return _OF_NUMBERS[self.loss](logits, targets, reduction="none").mean(dim=1)
        choices = self.outputs if self.labels == "class" else 2  # several classes: each is there or not
        targets = targets * (1 - smoothing) + smoothing / choices
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(dim=1)

    def sums(self, logits: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Return what `results` needs of a batch, float64 [S]. Batches are added up. valid: bool [N], which samples
        count. With mixed labels, the class of a sample is the one with the highest probability.
        """
        if self.labels == "class":
            classes = labels if labels.ndim == 1 else labels.argmax(dim=1)
            right = [logits.argmax(dim=1) == classes]
            if self.outputs > _TOP:
                right.append((logits.topk(_TOP).indices == classes[:, None]).any(dim=1))
            found = [each & valid for each in right]
        elif self.labels == "classes":
            return self.counts(logits, labels, valid).sum(dim=1).double()
        else:
            found = [(logits.float() - self._targets(labels)).abs().mean(dim=1).where(valid, 0)]
        return torch.stack([each.sum(dtype=torch.float64) for each in found])

    def results(self, sums: Sequence[float], samples: float) -> dict[str, float]:
        """Return the measures of this many samples, by name."""
        if self.labels == "classes":
            actual, predicted, right = sums
            return {"f1": 2 * right / max(1, actual + predicted)}
        return {name: value / max(1, samples) for name, value in zip(self.measures, sums, strict=True)}

    def counts(self, logits: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Return how many samples have each class, are predicted to have it, and both, int64 [3, outputs].

        With several classes, those are predicted whose probability is above a half.
        """
        actual = self._targets(labels) > 0.5
        predicted = logits > 0 if self.labels == "classes" else self._targets(logits.argmax(dim=1)) > 0.5
        return (torch.stack([actual, predicted, actual & predicted]) & valid[:, None]).sum(dim=1)

    def _targets(self, labels: torch.Tensor) -> torch.Tensor:
        """Return labels as a float32 value for each output, [N, outputs]."""
        if self.labels == "class" and labels.ndim == 1:
            return F.one_hot(labels, self.outputs).float()
        return labels.reshape(len(labels), -1).float()


def conflict(config: Config, path: tuple[str, ...], rule: str, action: str, value: object = UNSET) -> Problem:
    """Return the problem of a key of the file that cannot be trained with."""
    return Problem(f"{config.path}:", rule, value, action, path, "config.conflict")


def mean_average_precision(scores: Array, labels: Array) -> float:
    """Return the mean of the average precisions of the classes that samples have; NaN if there are none.

    The average precision of a class is a mean over the samples that have it: of all samples with at least this sample's
    score, the share that has the class. scores, such as logits, and labels, 0 or 1: [N, classes].

    Examples:
        >>> round(mean_average_precision(np.array([[0.9], [0.8], [0.1]]), np.array([[1], [0], [1]])), 3)
        0.833
    """
    precisions = []
    for score, label in zip(scores.T, labels.T, strict=True):
        every, right = np.sort(score), np.sort(score[label > 0])
        if len(right):
            at_least = len(every) - np.searchsorted(every, right)  # samples with the score of a right one or more
            precisions.append(((len(right) - np.searchsorted(right, right)) / at_least).mean())
    return float(np.mean(precisions)) if precisions else np.nan


def objective_of(config: Config, source: Source) -> Objective:
    """Return the objective for the labels of a source.

    Raises ConfigError if it has no labels, or `train.loss` is none for them.
    """
    labels: Literal["class", "classes", "numbers"] = "class"
    outputs, spec = len(source.classes), config.train
    if not has_labels(source):
        action = "declare a label in source.fields, or iterate gpuflow.load in a training loop of your own"
        rule = "must give gpuflow train a label for each sample, gives no label"
        raise ConfigError([conflict(config, ("source",), rule, action)])
    if not has_one_class(source):
        labels = "classes" if source.labels.dtype == np.uint8 else "numbers"
    if labels == "numbers":
        outputs = int(np.prod(source.labels.shape[1:]))
    known, kinds = _LOSSES[labels], {"class": "one class", "classes": "several classes", "numbers": "numbers"}
    rule = f"does not suit the source, whose samples have {kinds[labels]} each"
    loss: str = known[0] if spec.loss == "auto" else spec.loss
    if loss not in known:
        raise ConfigError([conflict(config, ("train", "loss"), rule, f"use auto or {' or '.join(known)}", loss)])
    if spec.label_smoothing and labels == "numbers":
        raise ConfigError([conflict(config, ("train", "label_smoothing"), rule, "remove it", spec.label_smoothing)])
    return Objective(labels=labels, loss=loss, outputs=outputs, smoothing=spec.label_smoothing)
