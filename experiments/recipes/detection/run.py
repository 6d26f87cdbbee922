"""Trains Mask R-CNN for a few steps on boxes and masks that follow their images through configs/detection.yaml.

    python experiments/recipes/detection/run.py              # ten steps on the CPU, under two minutes on two cores
    python experiments/recipes/detection/run.py --steps 40 --device cuda

The images are made here: rectangles, discs and triangles on noise, with annotations in COCO's format. The model is
torchvision's, with a ResNet-18, small heads and no downloaded weights. Writes the losses to results.csv in this file's
folder.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

import gpuflow
from gpuflow.tools.bench import row, write_results

HERE = Path(__file__).parent
CONFIG = HERE.parents[2] / "configs" / "detection.yaml"
SHAPES = ("rectangle", "disc", "triangle")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--size", type=int, default=96, help="of the batch's images, in pixels")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpuflow_") as folder:
        make_samples(Path(folder), count=48)
        losses = train(Path(folder), options.steps, options.size, options.batch, options.device)
    seconds, processor_seconds = time.perf_counter() - start, time.process_time()
    for step, loss in enumerate(losses):
        print(f"step {step:3}  loss {loss:.3f}")
    workload = f"{options.device}, {options.steps} steps of {options.batch} at {options.size}"
    rows = [
        row("gpuflow", workload, "loss_of_first_steps", [mean(losses[:3])], "nats"),
        row("gpuflow", workload, "loss_of_last_steps", [mean(losses[-3:])], "nats"),
        row("gpuflow", workload, "seconds", [seconds], "s"),
        row("gpuflow", workload, "processor_seconds", [processor_seconds], "s"),
    ]
    write_results(HERE / "results.csv", rows)
    print(f"{seconds:.1f} s; the loss fell from {mean(losses[:3]):.3f} to {mean(losses[-3:]):.3f}")


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def overrides(folder: Path, size: int, batch: int) -> list[str]:
    """What the recipe changes in the file: where the samples are, and smaller images."""
    return [
        f"source.coco={folder / 'instances.json'}",
        f"source.images={folder / 'images'}",
        f"pipelines.train.stages.letterbox.size={size}",
        f"pipelines.val.stages.letterbox.size={size}",
        f"pipelines.train.batch.size={batch}",
        f"pipelines.val.batch.size={batch}",
    ]


def train(folder: Path, steps: int, size: int, batch: int, device: str) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(0)
    losses: list[float] = []
    with gpuflow.load(CONFIG, "train", device=device, overrides=overrides(folder, size, batch)) as loader:
        model = detector(len(loader.classes), size).to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1e-4)
        while len(losses) < steps:
            for images, targets in loader:  # no label of a whole image, so the second item is `batch.targets()`
                loss = torch.stack([*model(list(images), targets).values()]).sum()
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(loss.item())
                if len(losses) == steps:
                    break
    return losses


def detector(classes: int, size: int) -> Any:
    """Mask R-CNN with small heads for images of this size; class 0 is the background."""
    from torchvision.models.detection import MaskRCNN
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

    norm = torch.nn.BatchNorm2d
    backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5, norm_layer=norm)
    channels, count = backbone.out_channels, classes + 1
    return MaskRCNN(
        backbone,
        min_size=size,
        max_size=size,
        rpn_pre_nms_top_n_train=200,
        rpn_post_nms_top_n_train=50,
        box_batch_size_per_image=16,
        box_head=TwoMLPHead(channels * 7 * 7, 128),
        box_predictor=FastRCNNPredictor(128, count),
        mask_head=MaskRCNNHeads(channels, (64, 64), 1),
        mask_predictor=MaskRCNNPredictor(64, 64, count),
    )


# --- samples ----------------------------------------------------------------------------------------------------------


def make_samples(folder: Path, count: int, seed: int = 0) -> None:
    """Images with one to three shapes each, and instances.json with their boxes and outlines."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        height, width = (int(side) for side in rng.integers(120, 200, 2))
        pixels = rng.integers(90, 140, (height, width, 3)).astype(np.uint8)
        for _ in range(int(rng.integers(1, 4))):
            label = int(rng.integers(len(SHAPES)))
            outline = _outline(label, rng, height, width)
            colour = [int(level) for level in rng.permutation([235, 25, 25 if label else 235])]
            cv2.fillPoly(pixels, [np.rint(outline).astype(np.int32)], colour)
            (left, top), (right, bottom) = outline.min(axis=0), outline.max(axis=0)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number + 1,
                    "category_id": label + 1,
                    "bbox": [round(float(value), 2) for value in (left, top, right - left, bottom - top)],
                    "segmentation": [[round(float(value), 2) for value in outline.ravel()]],
                    "area": round(float(cv2.contourArea(outline.astype(np.float32))), 2),
                    "iscrowd": 0,
                }
            )
        name = f"{number:06d}.jpg"
        cv2.imwrite(str(folder / "images" / name), pixels)
        images.append({"id": number + 1, "file_name": name, "height": height, "width": width})
    categories = [{"id": number, "name": name} for number, name in enumerate(SHAPES, start=1)]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "instances.json").write_text(json.dumps(document), encoding="utf-8")


def _outline(label: int, rng: np.random.Generator, height: int, width: int) -> Any:
    """A shape's outline, [P, 2] of x and y, inside the image."""
    corners = {0: 4, 1: 24, 2: 3}[label]
    radius = rng.uniform(18, 45)
    centre = np.array([rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)])
    angle = np.pi / 4 + 2 * np.pi * np.arange(corners) / corners
    return centre + radius * np.stack([np.cos(angle), np.sin(angle)], axis=1)


if __name__ == "__main__":
    main()
