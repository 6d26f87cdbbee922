"""Trains a small network of semantic segmentation on images and masks that follow configs/segmentation.yaml.

    python experiments/recipes/segmentation/run.py              # the CPU, about a minute of two cores
    python experiments/recipes/segmentation/run.py --steps 600 --size 256 --device cuda

The images are made here: photographs with coloured shapes on them, and a PNG of their classes. Nothing is downloaded.
Prints the mean IoU of the classes on images that training has not seen. Writes it to results.csv in this file's folder.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gpuflow
from gpuflow.tools.bench import row, write_results
from gpuflow.tools.samples import make_detection_samples

HERE = Path(__file__).parent
CONFIG = HERE.parents[2] / "configs" / "segmentation.yaml"
CLASSES = ("background", "rectangle", "triangle", "octagon")
IGNORED = 255
"""Level of padded pixels: `fill` of the mask in the configuration."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Holds the loss of each step, and the IoU of each class on the validation images."""

    losses: list[float]
    ious: list[float]

    @property
    def mean_iou(self) -> float:
        return sum(self.ious) / len(self.ious)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--size", type=int, default=96, help="of the batch's images, in pixels")
    parser.add_argument("--images", type=int, default=160)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the other cores are those of gpuflow's threads
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpuflow_") as folder:
        make_detection_samples(folder, options.images)
        result = train(Path(folder), options.steps, options.size, options.device)
    seconds, processor_seconds = time.perf_counter() - start, time.process_time()
    workload = f"{options.device}, {options.steps} steps of 8 at {options.size}"
    first, last = (sum(part) / len(part) for part in (result.losses[:5], result.losses[-5:]))
    rows = [
        row("gpuflow", workload, "loss_of_first_steps", [first], "nats"),
        row("gpuflow", workload, "loss_of_last_steps", [last], "nats"),
        *(row("gpuflow", workload, f"iou_{name}", [iou], "") for name, iou in zip(CLASSES, result.ious, strict=True)),
        row("gpuflow", workload, "mean_iou", [result.mean_iou], ""),
        row("gpuflow", workload, "seconds", [seconds], "s"),
        row("gpuflow", workload, "processor_seconds", [processor_seconds], "s"),
    ]
    write_results(HERE / "results.csv", rows)
    print(", ".join(f"{name} {iou:.3f}" for name, iou in zip(CLASSES, result.ious, strict=True)))
    print(f"{seconds:.1f} s; the loss fell from {first:.3f} to {last:.3f}; mIoU {result.mean_iou:.3f}")


def overrides(folder: Path, size: int, batch: int) -> list[str]:
    """Return the overrides that name the samples and make the images smaller."""
    return [
        f"source.listing={folder / 'listing.jsonl'}",
        f"pipelines.train.stages.scale_jitter.size={size}",
        f"pipelines.train.stages.random_crop.size={size}",
        f"pipelines.val.stages.letterbox.size={size}",
        f"pipelines.train.batch.size={batch}",
        f"pipelines.val.batch.size={batch}",
    ]


def train(folder: Path, steps: int, size: int, device: str, batch: int = 8) -> Result:
    torch.manual_seed(0)
    model = Network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    losses: list[float] = []
    changes = overrides(folder, size, batch)
    with gpuflow.load(CONFIG, "train", device=device, overrides=changes) as loader:
        while len(losses) < steps:
            for samples in loader:
                loss = nn.functional.cross_entropy(model(samples.images), samples["mask"].long(), ignore_index=IGNORED)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
                if len(losses) == steps:
                    break
    with gpuflow.load(CONFIG, "val", device=device, overrides=changes) as loader:
        return Result(losses=losses, ious=evaluate(model, loader))


@torch.inference_mode()
def evaluate(model: nn.Module, loader: Any) -> list[float]:
    """Return the IoU of each class over all pixels of the validation images, without padded ones."""
    model.eval()
    counts = torch.zeros(len(CLASSES), len(CLASSES), dtype=torch.int64)
    for samples in loader:
        found, wanted = model(samples.images).argmax(dim=1).cpu(), samples["mask"].long().cpu()
        counts += confusion(found[samples.valid.cpu()], wanted[samples.valid.cpu()])
    return ious_of(counts)


def confusion(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Count the pixels of each class, by row, that got each class, by column."""
    known = wanted != IGNORED
    pairs = wanted[known] * len(CLASSES) + found[known]
    return torch.bincount(pairs, minlength=len(CLASSES) ** 2).reshape(len(CLASSES), -1)


def ious_of(counts: torch.Tensor) -> list[float]:
    shared = counts.diagonal()
    ious: list[float] = (shared / (counts.sum(dim=0) + counts.sum(dim=1) - shared).clamp(min=1)).tolist()
    return ious


class Network(nn.Module):
    """Computes logits by an encoder of three levels and a decoder that adds the finer ones: a small U-Net."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.stem = _block(3, width, stride=2)
        self.down = nn.ModuleList([_block(a, b, stride=2) for a, b in pairwise(widths)])
        self.deep = _block(widths[-1], widths[-1], stride=1)
        self.up = nn.ModuleList([_block(b + a, a, stride=1) for a, b in pairwise(widths)])
        self.head = nn.Conv2d(width, len(CLASSES), 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        levels = [self.stem(images)]
        for block in self.down:
            levels.append(block(levels[-1]))
        x = self.deep(levels.pop())
        for block in reversed(self.up):
            finer = levels.pop()
            x = block(torch.cat([nn.functional.interpolate(x, size=finer.shape[2:]), finer], dim=1))
        result: torch.Tensor = nn.functional.interpolate(self.head(x), size=images.shape[2:], mode="bilinear")
        return result


def _block(inside: int, outside: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outside), nn.ReLU())


if __name__ == "__main__":
    main()
