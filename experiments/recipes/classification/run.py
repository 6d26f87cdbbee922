"""Trains some steps with timm's ImageNet recipe (configs/imagenet_timm.yaml) on sample photographs, and validates.

    python experiments/recipes/classification/run.py

Takes about a minute on two CPU cores; nothing is downloaded. The model is small and so are the images. Writes
results.csv in this file's folder, or where `--results` says.
"""

from __future__ import annotations

import argparse
import csv
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpuflow.config import read_config
from gpuflow.stages import STAGES
from gpuflow.tools.samples import make_samples
from gpuflow.training.trainer import PassResult, Trainer, TrainerEvents

HERE = Path(__file__).parent
CONFIG = HERE.parents[2] / "configs" / "imagenet_timm.yaml"


class Results(TrainerEvents):
    """The result of each pass, printed when it ends."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def end_pass(self, name: str, epoch: int, result: PassResult) -> None:
        row = {"pass": name, "epoch": epoch, "loss": round(result.loss, 4), "accuracy": round(result.accuracy, 4)}
        print(f"epoch {epoch} {name:5} loss {result.loss:.3f}  accuracy {result.accuracy:.3f}")
        self.rows.append(row)


def overrides(folder: Path, *, size: int, batch: int, epochs: int, out: Path) -> list[str]:
    """What differs from the recipe: the photographs, and sizes that a CPU can train in a minute."""
    return [
        f"source.folder={folder}",
        f"pipelines.train.stages.random_resized_crop.size={size}",
        f"pipelines.val.stages.resize.shorter={size * 8 // 7}",
        f"pipelines.val.stages.center_crop.size={size}",
        f"pipelines.train.batch.size={batch}",
        f"pipelines.val.batch.size={batch}",
        "train.model=resnet18",
        "train.lr=0.02",
        f"train.epochs={epochs}",
        f"train.out={out}",
    ]


def train(folder: Path, *, size: int, batch: int, epochs: int, device: str | None) -> list[dict[str, object]]:
    """The results of each pass of training and validation, in order."""
    with tempfile.TemporaryDirectory() as out:
        given = overrides(folder, size=size, batch=batch, epochs=epochs, out=Path(out))
        results = Results()
        Trainer(read_config(CONFIG, STAGES, given), device=device).run(results)
    return results.rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--photos", type=int, default=300)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    parser.add_argument("--results", type=Path, default=HERE / "results.csv")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        make_samples(folder, options.photos)
        size, batch, epochs = options.size, options.batch, options.epochs
        rows = train(Path(folder), size=size, batch=batch, epochs=epochs, device=options.device)
    assert all(isinstance(row["loss"], float) and math.isfinite(row["loss"]) for row in rows)
    with options.results.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
