"""Trains a small network that finds keypoints on images that follow configs/keypoints.yaml.

    python experiments/recipes/keypoints/run.py              # the CPU, about a minute of two cores
    python experiments/recipes/keypoints/run.py --without-pairs      # the same, with flips that exchange no names
    python experiments/recipes/keypoints/run.py --samples data/keypoints     # only makes samples

The images are made here: figures with a head, two hands and two feet on noise, annotated in COCO's format. A figure
faces the viewer, so its left hand is at the image's right, also in a mirrored image. Nothing is downloaded.
Prints the PCK on images that training has not seen: the share of keypoints that are closer to their place than a tenth
of the longer side of the figure's box. Adds it to results.csv in this file's folder.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import nn

import gpuflow
from gpuflow.tools.bench import row, write_results

HERE = Path(__file__).parent
CONFIG = HERE.parents[2] / "configs" / "keypoints.yaml"
NAMES = ("head", "left_hand", "right_hand", "left_foot", "right_foot")
LIMIT = 0.1
"""Largest distance of a keypoint that counts as found, divided by the longer side of the box."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Holds the loss of each step, in pixels, and the PCK of each keypoint on the validation images."""

    losses: list[float]
    pcks: list[float]

    @property
    def pck(self) -> float:
        return sum(self.pcks) / len(self.pcks)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--size", type=int, default=64, help="of the batch's images, in pixels")
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--without-pairs", action="store_true")
    parser.add_argument("--samples", type=Path, help="makes samples in this folder, and ends")
    options = parser.parse_args()
    if options.samples is not None:
        make_samples(options.samples, options.images)
        return
    torch.set_num_threads(1)  # the other cores are those of gpuflow's threads
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpuflow_") as folder:
        make_samples(Path(folder), options.images)
        pairs = not options.without_pairs
        result = train(Path(folder), options.steps, options.size, options.device, pairs=pairs)
    seconds, processor_seconds = time.perf_counter() - start, time.process_time()
    first, last = (sum(part) / len(part) for part in (result.losses[:5], result.losses[-5:]))
    print(", ".join(f"{name} {pck:.3f}" for name, pck in zip(NAMES, result.pcks, strict=True)))
    print(f"{seconds:.1f} s; the distance fell from {first:.2f} to {last:.2f} pixels; PCK@{LIMIT:g} {result.pck:.3f}")
    workload = f"{options.device}, {options.steps} steps of 16 at {options.size}"
    rows = [
        row("gpuflow", workload, "loss_of_first_steps", [first], "pixels"),
        row("gpuflow", workload, "loss_of_last_steps", [last], "pixels"),
        *(row("gpuflow", workload, f"pck_{name}", [pck], "") for name, pck in zip(NAMES, result.pcks, strict=True)),
        row("gpuflow", workload, "pck", [result.pck], ""),
        row("gpuflow", workload, "seconds", [seconds], "s"),
        row("gpuflow", workload, "processor_seconds", [processor_seconds], "s"),
    ]
    write_results(HERE / ("results.csv" if pairs else "without_pairs.csv"), rows)


def overrides(folder: Path, size: int, batch: int, *, pairs: bool = True) -> list[str]:
    """Return the overrides that name the samples and make the images smaller."""
    return [
        f"source.coco={folder / 'instances.json'}",
        f"source.images={folder / 'images'}",
        *(() if pairs else ("source.fields.keypoints.flip_pairs=[]",)),
        *(f"pipelines.{name}.stages.letterbox.size={size}" for name in ("train", "val")),
        *(f"pipelines.{name}.batch.size={batch}" for name in ("train", "val")),
    ]


def train(folder: Path, steps: int, size: int, device: str, batch: int = 16, *, pairs: bool = True) -> Result:
    torch.manual_seed(0)
    model = Network(len(NAMES)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    losses: list[float] = []
    changes = overrides(folder, size, batch, pairs=pairs)
    with gpuflow.load(CONFIG, "train", device=device, overrides=changes) as loader:
        while len(losses) < steps:
            for samples in loader:
                images, points, _ = single(samples)
                distance = (model(images) - points[..., :2]).norm(dim=2)
                loss = distance[points[..., 2] > 0].mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
                if len(losses) == steps:
                    break
    with gpuflow.load(CONFIG, "val", device=device, overrides=changes) as loader:
        return Result(losses=losses, pcks=evaluate(model, loader))


def single(samples: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the images whose only figure is still there, its keypoints [N, K, 3] and its boxes [N, 4]."""
    counts = samples["keypoints"].offsets.diff().to(samples.images.device)
    return samples.images[counts == 1], samples["keypoints"].values, samples["boxes"].values


@torch.inference_mode()
def evaluate(model: nn.Module, loader: Any) -> list[float]:
    """Return the PCK of each keypoint over the validation images."""
    model.eval()
    near, known = torch.zeros(len(NAMES)), torch.zeros(len(NAMES))
    for samples in loader:
        images, points, boxes = single(samples)
        seen, close = correct(model(images), points, boxes)
        near += close.sum(dim=0).cpu()
        known += seen.sum(dim=0).cpu()
    pcks: list[float] = (near / known.clamp(min=1)).tolist()
    return pcks


def correct(found: torch.Tensor, points: torch.Tensor, boxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which keypoints [N, K] are labelled, and which of these are near their place."""
    longer = (boxes[:, 2:] - boxes[:, :2]).amax(dim=1, keepdim=True)
    seen = points[..., 2] > 0
    return seen, seen & ((found - points[..., :2]).norm(dim=2) < LIMIT * longer)


class Network(nn.Module):
    """Computes a heat map for each keypoint, a quarter as large as the image; a place is the mean over its map."""

    def __init__(self, keypoints: int, width: int = 16) -> None:
        super().__init__()
        blocks = [(3, width, 2), (width, 2 * width, 2), (2 * width, 4 * width, 2), (4 * width, 4 * width, 1)]
        self.down = nn.Sequential(*(_block(*block) for block in blocks))
        self.head = nn.Sequential(_block(4 * width, 2 * width, 1), nn.Conv2d(2 * width, keypoints, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = nn.functional.interpolate(self.head(self.down(images)), scale_factor=2.0, mode="bilinear")
        height, width = maps.shape[2:]
        weights = maps.flatten(2).softmax(dim=2).reshape(maps.shape)
        scale = images.shape[3] / width
        x = (weights.sum(dim=2) * (torch.arange(width, device=maps.device) + 0.5)).sum(dim=2) * scale
        y = (weights.sum(dim=3) * (torch.arange(height, device=maps.device) + 0.5)).sum(dim=2) * scale
        return torch.stack([x, y], dim=2)


def _block(inside: int, outside: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(inside, outside, 5 if stride == 1 else 3, stride, "same" if stride == 1 else 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outside), nn.ReLU())


# --- samples ----------------------------------------------------------------------------------------------------------


def make_samples(folder: Path, count: int, seed: int = 0) -> None:
    """Make images with a figure each, and instances.json with its box and keypoints."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        height, width = (int(side) for side in rng.integers(120, 200, 2))
        pixels = rng.integers(90, 140, (height, width, 3)).astype(np.uint8)
        points = _figure(rng, height, width)
        _draw(pixels, points, [int(level) for level in rng.integers(170, 255, 3)])
        (left, top), (right, bottom) = points.min(axis=0) - 9, points.max(axis=0) + 9
        name = f"{number:06d}.jpg"
        cv2.imwrite(str(folder / "images" / name), pixels)
        images.append({"id": number + 1, "file_name": name, "height": height, "width": width})
        annotations.append(
            {
                "id": number + 1,
                "image_id": number + 1,
                "category_id": 1,
                "bbox": [round(float(value), 2) for value in (left, top, right - left, bottom - top)],
                "keypoints": [number for x, y in points for number in (round(float(x), 2), round(float(y), 2), 2)],
                "num_keypoints": len(points),
                "area": round(float((right - left) * (bottom - top)), 2),
                "iscrowd": 0,
            }
        )
    categories = [{"id": 1, "name": "figure", "keypoints": list(NAMES)}]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "instances.json").write_text(json.dumps(document), encoding="utf-8")


def _figure(rng: np.random.Generator, height: int, width: int) -> Any:
    """Return the keypoints of a figure in COCO's coordinates, [5, 2] of x and y."""
    size = rng.uniform(0.3, 0.42) * min(height, width)
    middle = np.array([rng.uniform(1.1 * size, width - 1.1 * size), rng.uniform(1.15 * size, height - 1.15 * size)])
    arms, legs = np.radians(rng.uniform([-50, -50, 20, 20], [60, 60, 60, 60])).reshape(2, 2)
    head = [0.0, -0.85]
    hands = [[side * 0.75 * np.cos(arm), -0.25 - 0.75 * np.sin(arm)] for side, arm in zip((1, -1), arms, strict=True)]
    feet = [[side * 0.85 * np.sin(leg), 0.25 + 0.7 * np.cos(leg)] for side, leg in zip((1, -1), legs, strict=True)]
    return middle + size * np.array([head, *hands, *feet])


def _draw(pixels: Any, points: Any, colour: list[int]) -> None:
    head, *limbs = np.rint(points).astype(int)
    size = max(int(np.linalg.norm(points.max(axis=0) - points.min(axis=0)) / 40), 2)
    joint = points[3:].mean(axis=0) * 0.45 + points[0] * 0.55
    for end in limbs:
        cv2.line(pixels, tuple(map(int, joint)), tuple(map(int, end)), colour, size)
        cv2.circle(pixels, tuple(map(int, end)), size + 1, [40, 40, 40], -1)
    cv2.line(pixels, tuple(map(int, joint)), tuple(map(int, head)), colour, size)
    cv2.circle(pixels, tuple(map(int, head)), 3 * size, colour, -1)


if __name__ == "__main__":
    main()
