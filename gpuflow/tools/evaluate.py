"""`gpuflow evaluate`: how often a model is right on the samples of a pipeline, by class, from the rows of predict."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gpuflow.arrays import Floats, Ints
from gpuflow.engines.base import class_difference
from gpuflow.errors import ConfigError, Problem
from gpuflow.runtime.ranks import Group, gather
from gpuflow.sources import has_one_class
from gpuflow.tools.predict import Row, RowPredictor, write_table

_WORST = 5


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evaluation:
    """The predictions of a model for labelled samples.

    classes: names, of labels and outputs. confusion [K, K]: samples by label (row) and most likely output (column).
    top: samples whose label is among the `top_k` most likely outputs. bad: the samples without a prediction.
    """

    classes: tuple[str, ...]
    confusion: Ints
    top: int
    top_k: int
    bad: list[Row]

    @property
    def shares(self) -> tuple[Floats, Floats]:
        """Recall and precision by class: which share of the samples of the class, and of those that are predicted as
        it, is right; NaN where there are none."""
        with np.errstate(invalid="ignore"):
            recall, precision = (self.confusion.diagonal() / self.confusion.sum(axis=axis) for axis in (1, 0))
        return recall, precision

    def __str__(self) -> str:
        """The shares of right predictions, and the classes of the lowest recall."""
        samples, (recall, precision) = int(self.confusion.sum()), self.shares
        lines = [
            f"{samples:,} samples of {len(self.classes)} classes, without {len(self.bad):,} bad ones",
            f"top-1  {self.confusion.trace() / max(1, samples):.4f}",
            f"top-{self.top_k}  {self.top / max(1, samples):.4f}",
        ]
        for i in np.argsort(recall, kind="stable")[:_WORST]:
            lines.append(f"  recall {recall[i]:.4f}  precision {precision[i]:.4f}  {self.classes[i]}")
        return "\n".join(lines)

    def write(self, out: Path) -> list[Path]:
        """Write confusion.csv, classes.csv and bad.csv. Returns their paths."""
        out.mkdir(parents=True, exist_ok=True)
        names = [f"{number} {name}" for number, name in enumerate(self.classes)]  # two classes may have one name
        counts, shares = self.confusion.sum(axis=1), dict(zip(("recall", "precision"), self.shares, strict=True))
        tables = {
            "confusion": {"label": names, **dict(zip(names, self.confusion.T, strict=True))},
            "classes": {"class": self.classes, "samples": counts, **shares},
            "bad": {key: [getattr(row, key) for row in self.bad] for key in ("index", "path", "stage", "reason")},
        }
        for name, table in tables.items():
            write_table(out / f"{name}.csv", table)
        return [out / f"{name}.csv" for name in tables]


def evaluate(predictor: RowPredictor, group: Group) -> Evaluation:
    """Compare the predictions for all samples with their labels.

    The ranks take the batches in turn, so that each batch, and the sums, are the same on any number of ranks.

    group: the ranks that share the samples.

    Raises ConfigError unless each sample has one of the model's classes.
    """
    _require_classes(predictor)
    count, indices, ranks = len(predictor.classes), np.arange(len(predictor.source)), predictor.ranks
    sums, bad = np.zeros(count * count + 1, np.int64), list[Row]()
    for rows in predictor.predict(indices[indices // predictor.batch % ranks.world_size == ranks.rank]):
        for row in rows:
            if row.top:
                assert row.label is not None
                sums[row.label * count + row.top[0][0]] += 1
                sums[-1] += row.label in dict(row.top)
            else:
                bad.append(row)
    shared = torch.from_numpy(sums).to(predictor.device)
    group.sum(shared)
    *confusion, top = shared.tolist()
    return Evaluation(
        classes=predictor.classes,
        confusion=np.reshape(confusion, (count, count)),
        top=top,
        top_k=predictor.top_k,
        bad=sorted(gather(bad), key=lambda row: row.index),
    )


def _require_classes(predictor: RowPredictor) -> None:
    """Raise ConfigError unless each sample has one of the model's classes."""
    source, count = predictor.source, len(predictor.classes)
    rule = ""
    if not has_one_class(source):
        rule = "must have one class for each sample, to compare predictions with"
    elif difference := class_difference(source.classes, predictor.classes if predictor.has_names else ()):
        rule = f"must have the model's classes, {difference}"
    elif source.labels.max() >= count:
        rule = f"must have labels below {count}, the number of the model's outputs, got {source.labels.max()}"
    if rule:
        raise ConfigError([Problem(f"{predictor.config.path}: source", rule)])
