"""Writes the results of a training for people and their tools: metrics.csv, classes.csv, and events for TensorBoard."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuflow.errors import MissingExtra
from gpuflow.runtime.files import atomic_write


class Results:
    """Writes the results of one run to its folder, also for TensorBoard if asked for. Only rank 0 does.

    Raises MissingExtra if TensorBoard is asked for and is not installed.
    """

    METRICS, CLASSES = "metrics.csv", "classes.csv"

    def __init__(self, folder: Path, *, tensorboard: bool) -> None:
        if tensorboard and importlib.util.find_spec("tensorboard") is None:
            raise MissingExtra("train.tensorboard", "tensorboard", "tensorboard")
        self._folder, self._tensorboard = folder, tensorboard
        self._writer: Any = None

    def write_epochs(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Write a row for each epoch, in place of the rows that are there.

        A resumed run has the rows of its checkpoint, so that no epoch is written twice.
        """
        names = list(dict.fromkeys(name for row in rows for name in row))
        with atomic_write(self._folder / self.METRICS, text=True) as file:
            table = csv.DictWriter(file, names, lineterminator="\n")
            table.writeheader()
            table.writerows(rows)

    def add_epoch(
        self, row: Mapping[str, float], classes: Sequence[str], counts: Sequence[Sequence[int]] | None
    ) -> None:
        """Write recall and precision of each class, as `gpuflow evaluate` does, and the events of an epoch.

        counts: for each class the samples that have it, those predicted to have it, and those of which both is true;
            None if there is nothing to write.
        """
        if counts is not None:
            with atomic_write(self._folder / self.CLASSES, text=True) as file:
                table = csv.writer(file, lineterminator="\n")
                table.writerow(["class", "samples", "recall", "precision"])
                for name, actual, predicted, right in zip(classes, *counts, strict=True):
                    shares = [f"{right / total:.6g}" if total else "nan" for total in (actual, predicted)]
                    table.writerow([name, actual, *shares])
        if not self._tensorboard:
            return
        epoch = int(row["epoch"])
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder / "tensorboard"), purge_step=epoch)
        for name, value in row.items():
            if name != "epoch":
                self._writer.add_scalar(name.replace("_", "/", 1), value, epoch)
        self._writer.flush()

    def close(self) -> None:
        """Close TensorBoard's file."""
        if self._writer is not None:
            self._writer.close()
