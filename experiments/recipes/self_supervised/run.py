"""Trains an encoder without labels for some steps on the eight views of configs/dino.yaml.

    python experiments/recipes/self_supervised/run.py

Takes less than two minutes on two idle CPU cores; nothing is downloaded. Two large and six small views are made of each
sample photograph. The loss pulls the views of one photograph together and pushes those of others away: SimCLR's
(Chen et al., 2020, arXiv:2002.05709) with more than one positive, which is L_out of Khosla et al. (2020,
arXiv:2004.11362) with a photograph as its own class. It is not DINO's, which needs a teacher and many epochs. Writes
results.csv in this file's folder, or where `--results` says.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import gpuflow
from gpuflow.tools.bench import row, write_results
from gpuflow.tools.samples import make_samples

HERE = Path(__file__).parent
CONFIG = HERE.parents[2] / "configs" / "dino.yaml"
VIEWS = 8


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--photos", type=int, default=24)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--size", type=int, default=48, help="of the large views, in pixels; the small ones have half")
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results", type=Path, default=HERE / "results.csv")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpuflow_") as folder:
        make_samples(folder, options.photos)
        losses = train(Path(folder), options.steps, options.size, options.batch, options.device)
    seconds, processor_seconds = time.perf_counter() - start, time.process_time()
    for number, loss in enumerate(losses):
        print(f"step {number:3}  loss {loss:.3f}")
    workload = f"{options.device}, {options.steps} steps of {options.batch} photographs at {options.size}"
    values = {
        "loss_of_first_steps": (mean(losses[:5]), "nats"),
        "loss_of_last_steps": (mean(losses[-5:]), "nats"),
        "loss_of_equal_embeddings": (math.log(VIEWS * options.batch - 1), "nats"),
        "lowest_loss": (math.log(VIEWS - 1), "nats"),
        "seconds": (seconds, "s"),
        "processor_seconds": (processor_seconds, "s"),
    }
    write_results(
        options.results, [row("gpuflow", workload, name, [value], unit) for name, (value, unit) in values.items()]
    )
    print(f"{seconds:.1f} s; the loss fell from {mean(losses[:5]):.3f} to {mean(losses[-5:]):.3f}")


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def overrides(folder: Path, size: int, batch: int) -> list[str]:
    """What differs from the configuration: the photographs, and sizes that a CPU can train in a minute."""
    changed = [f"source.folder={folder}", f"pipelines.train.batch.size={batch}"]
    for name, side in (("global_1", size), ("global_2", size), ("local", size // 2)):
        stages = f"pipelines.train.views.{name}.stages"
        blur = max(side // 10 | 1, 3)  # a tenth of the side, as 23 is of 224
        changed += [f"{stages}.random_resized_crop.size={side}", f"{stages}.gaussian_blur.kernel_size={blur}"]
    return changed


def train(folder: Path, steps: int, size: int, batch: int, device: str) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(0)
    losses: list[float] = []
    model = encoder().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1e-4)
    with gpuflow.load(CONFIG, "train", device=device, overrides=overrides(folder, size, batch)) as loader:
        while len(losses) < steps:
            for loaded in loader:
                loss = contrastive_loss(embed(model, loaded.views))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(loss.item())
                if len(losses) == steps:
                    break
    return losses


def encoder() -> Any:
    """ResNet-18 without downloaded weights, with SimCLR's projection of two layers."""
    from torchvision.models import resnet18

    model = resnet18(weights=None)
    model.fc = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))
    return model


def embed(model: Any, views: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Embeddings [V, N, D] of all V views of N photographs, of length 1. Images of one size are one batch."""
    large = torch.cat([views["global_1"], views["global_2"]])
    groups = [model(group.flatten(0, 1)).unflatten(0, group.shape[:2]) for group in (large, views["local"])]
    return torch.nn.functional.normalize(torch.cat(groups), dim=-1)


def contrastive_loss(embeddings_VND: torch.Tensor, temperature: float = 0.2) -> torch.Tensor:
    """Cross entropy of choosing, for each view, another view of the same photograph among all other views.

    With views that are all equal it is log(V * N - 1), and at best log(V - 1).
    """
    views, photographs = embeddings_VND.shape[:2]
    flat = embeddings_VND.flatten(0, 1)
    itself = torch.eye(len(flat), dtype=torch.bool, device=flat.device)
    log_probabilities = (flat @ flat.T / temperature).masked_fill(itself, -math.inf).log_softmax(dim=1)
    number = torch.arange(photographs, device=flat.device).repeat(views)
    positive = (number[:, None] == number) & ~itself
    return -log_probabilities[positive].mean()


if __name__ == "__main__":
    main()
