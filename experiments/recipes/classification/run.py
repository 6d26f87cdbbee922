"""Trains some steps with timm's ImageNet recipe (configs/imagenet_timm.yaml) on sample photographs, and validates.

    python experiments/recipes/classification/run.py

Takes less than two minutes on two idle CPU cores; nothing is downloaded. The model is small and so are the images.
Writes results.csv in this file's folder, or where `--results` says.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gpuflow.config import read_config
from gpuflow.stages import STAGES
from gpuflow.tools.bench import row, write_results
from gpuflow.tools.samples import make_samples
from gpuflow.training.trainer import PassResult, Trainer, TrainerEvents

HERE = Path(__file__).parent
CONFIG = HERE.parents[2] / "configs" / "imagenet_timm.yaml"


class Passes(TrainerEvents):
    """The name, epoch and result of each pass, printed when it ends."""

    def __init__(self) -> None:
        self.results: list[tuple[str, int, PassResult]] = []

    def end_pass(self, name: str, epoch: int, result: PassResult) -> None:
        print(f"epoch {epoch} {name:5} loss {result.loss:.3f}  accuracy {result.measures['accuracy']:.3f}")
        self.results.append((name, epoch, result))


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


def train(folder: Path, *, size: int, batch: int, epochs: int, device: str) -> list[tuple[str, int, PassResult]]:
    """The name, epoch and result of each pass of training and validation, in order."""
    with tempfile.TemporaryDirectory() as out:
        given = overrides(folder, size=size, batch=batch, epochs=epochs, out=Path(out))
        passes = Passes()
        Trainer(read_config(CONFIG, STAGES, given), device=device).run(passes)
    return passes.results


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--photos", type=int, default=300)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=HERE / "results.csv")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        make_samples(folder, options.photos)
        size, batch, epochs = options.size, options.batch, options.epochs
        passes = train(Path(folder), size=size, batch=batch, epochs=epochs, device=options.device)
    seconds, processor_seconds = time.perf_counter() - start, time.process_time()
    assert all(math.isfinite(result.loss) for _, _, result in passes)
    workload = f"{options.device}, {options.photos} photographs at {size} in batches of {batch}"
    rows = []
    for name, epoch, result in passes:
        of_pass = f"{workload}, epoch {epoch}"
        rows.append(row("gpuflow", of_pass, f"{name}_loss", [result.loss], "nats"))
        rows.append(row("gpuflow", of_pass, f"{name}_accuracy", [result.measures["accuracy"]], "share"))
    of_run = f"{workload}, {epochs} epochs"
    rows.append(row("gpuflow", of_run, "seconds", [seconds], "s"))
    rows.append(row("gpuflow", of_run, "processor_seconds", [processor_seconds], "s"))
    write_results(options.results, rows)
    print(f"{seconds:.1f} s")


if __name__ == "__main__":
    main()
