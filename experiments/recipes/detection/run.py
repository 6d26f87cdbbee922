"""Trains Mask R-CNN on boxes and masks that follow their images through configs/detection.yaml.

    python experiments/recipes/detection/run.py              # the CPU, about a minute of two cores
    python experiments/recipes/detection/run.py --pipeline train_ssd --steps 400 --device cuda

The images are made here: rectangles, discs and triangles on noise, with annotations in COCO's format. The model is
torchvision's, with a small backbone, small heads and no downloaded weights. Prints COCO's average precision of boxes
and of masks on images that training has not seen, by pycocotools. Writes the figures to results.csv in this file's
folder.
"""

from __future__ import annotations

import argparse
import contextlib
import io
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
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--size", type=int, default=96, help="of the batch's images, in pixels")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pipeline", default="train", help="or train_ssd, train_lsj")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the other cores are those of gpuflow's threads
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gpuflow_") as name:
        folder, unseen = Path(name) / "train", Path(name) / "val"
        make_samples(folder, count=200)
        make_samples(unseen, count=60, seed=1)
        model, losses = trained(folder, options.steps, options.size, options.batch, options.device, options.pipeline)
        precisions = evaluate(model, unseen, options.size, options.batch, options.device)
    seconds, processor_seconds = time.perf_counter() - start, time.process_time()
    workload = f"{options.device}, {options.pipeline}, {options.steps} steps of {options.batch} at {options.size}"
    rows = [
        row("gpuflow", workload, "loss_of_first_steps", [mean(losses[:3])], "nats"),
        row("gpuflow", workload, "loss_of_last_steps", [mean(losses[-3:])], "nats"),
        *(row("gpuflow", workload, metric, [value], "") for metric, value in precisions.items()),
        row("gpuflow", workload, "seconds", [seconds], "s"),
        row("gpuflow", workload, "processor_seconds", [processor_seconds], "s"),
    ]
    write_results(HERE / "results.csv", rows)
    print(", ".join(f"{metric} {value:.3f}" for metric, value in precisions.items()))
    print(f"{seconds:.1f} s; the loss fell from {mean(losses[:3]):.3f} to {mean(losses[-3:]):.3f}")


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def overrides(folder: Path, size: int, batch: int) -> list[str]:
    """Return the overrides that name the samples and make the images smaller."""
    return [
        f"source.coco={folder / 'instances.json'}",
        f"source.images={folder / 'images'}",
        *(f"pipelines.{name}.stages.letterbox.size={size}" for name in ("train", "val")),
        *(f"pipelines.train_ssd.stages.resize.{side}={size}" for side in ("height", "width")),
        *(f"pipelines.train_lsj.stages.{stage}.size={size}" for stage in ("scale_jitter", "random_crop")),
        *(f"pipelines.{name}.batch.size={batch}" for name in ("train", "train_ssd", "train_lsj", "val")),
    ]


def train(folder: Path, steps: int, size: int, batch: int, device: str) -> list[float]:
    """Train as `trained`, and return the loss of each step."""
    return trained(folder, steps, size, batch, device)[1]


def trained(
    folder: Path, steps: int, size: int, batch: int, device: str, pipeline: str = "train"
) -> tuple[Any, list[float]]:
    """Return the trained model, and the loss of each step."""
    torch.manual_seed(0)
    losses: list[float] = []
    with gpuflow.load(CONFIG, pipeline, device=device, overrides=overrides(folder, size, batch)) as loader:
        model = detector(len(loader.classes), size).to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
        while len(losses) < steps:
            for images, targets in loader:  # no label of a whole image, so the second item is `batch.targets()`
                loss = torch.stack([*model(list(images), targets).values()]).sum()
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
                if len(losses) == steps:
                    break
    return model, losses


def detector(classes: int, size: int) -> Any:
    """Return a Mask R-CNN with a small backbone and small heads for images of this size. Class 0 is the background."""
    from torchvision.models.detection import MaskRCNN
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
    from torchvision.models.detection.rpn import AnchorGenerator
    from torchvision.ops import MultiScaleRoIAlign

    channels, count = 64, classes + 1
    widths = ((3, 16, 2), (16, 32, 2), (32, 64, 1), (64, 64, 2), (64, channels, 1))
    backbone: Any = torch.nn.Sequential(*(_block(*width) for width in widths))
    backbone.out_channels = channels
    return MaskRCNN(
        backbone,
        min_size=size,
        max_size=size,
        rpn_anchor_generator=AnchorGenerator(((size // 6, size // 3, size * 2 // 3),), ((0.7, 1.0, 1.4),)),
        rpn_pre_nms_top_n_train=200,
        rpn_post_nms_top_n_train=50,
        rpn_pre_nms_top_n_test=100,
        rpn_post_nms_top_n_test=50,
        box_roi_pool=MultiScaleRoIAlign(["0"], 7, 2),
        mask_roi_pool=MultiScaleRoIAlign(["0"], 14, 2),
        box_batch_size_per_image=16,
        box_head=TwoMLPHead(channels * 7 * 7, 128),
        box_predictor=FastRCNNPredictor(128, count),
        mask_head=MaskRCNNHeads(channels, (32, 32), 1),
        mask_predictor=MaskRCNNPredictor(32, 32, count),
    )


def _block(inside: int, outside: int, stride: int) -> torch.nn.Sequential:
    convolution = torch.nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
    return torch.nn.Sequential(convolution, torch.nn.BatchNorm2d(outside), torch.nn.ReLU())


# --- average precision ------------------------------------------------------------------------------------------------


@torch.inference_mode()
def evaluate(model: Any, folder: Path, size: int, batch: int, device: str) -> dict[str, float]:
    """Return COCO's average precision on the samples of a folder, in the images that the model gets."""
    model.eval()
    wanted: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    with gpuflow.load(CONFIG, "val", device=device, overrides=overrides(folder, size, batch)) as loader:
        for images, targets in loader:
            for prediction, target in zip(model(list(images)), targets, strict=True):
                number = int(target["image_id"])
                wanted += objects_of(number, target["boxes"], target["labels"], target["masks"])
                found += objects_of(number, *(prediction[name] for name in ("boxes", "labels", "masks", "scores")))
    return average_precision(wanted, found, size)


def objects_of(number: int, boxes: Any, labels: Any, masks: Any, scores: Any = None) -> list[dict[str, Any]]:
    """Return the objects of an image in COCO's form. masks: [M, H, W] or [M, 1, H, W] of 0 to 1."""
    from pycocotools import mask as coco_masks

    made = []
    for i, (x1, y1, x2, y2) in enumerate(boxes.tolist()):
        pixels = masks[i].reshape(masks.shape[-2:]).cpu().numpy() > 0.5
        one = {
            "image_id": number,
            "category_id": int(labels[i]),
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "area": float(pixels.sum()),
            "iscrowd": 0,
            "segmentation": coco_masks.encode(np.asfortranarray(pixels.astype(np.uint8))),
        }
        made.append(one if scores is None else {**one, "score": float(scores[i])})
    return made


def average_precision(wanted: list[dict[str, Any]], found: list[dict[str, Any]], size: int) -> dict[str, float]:
    """Return the AP at IoU 0.5 to 0.95, and at 0.5, of boxes and of masks in square images of this size."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    if not found:
        return {f"{metric}_of_{kind}": 0.0 for kind in ("boxes", "masks") for metric in ("ap", "ap50")}
    images = [{"id": number, "height": size, "width": size} for number in sorted({one["image_id"] for one in wanted})]
    categories = [{"id": number} for number in range(1, len(SHAPES) + 1)]
    numbered = [{**one, "id": number} for number, one in enumerate(wanted, start=1)]
    figures: dict[str, float] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = {"images": images, "categories": categories, "annotations": numbered}
        truth.createIndex()
        for kind, name in (("bbox", "boxes"), ("segm", "masks")):
            # loadRes derives other fields from the first one that it finds
            given = [{key: value for key, value in one.items() if key != "bbox" or kind == "bbox"} for one in found]
            evaluation = COCOeval(truth, truth.loadRes(given), kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            figures |= {f"ap_of_{name}": float(evaluation.stats[0]), f"ap50_of_{name}": float(evaluation.stats[1])}
    return figures


# --- samples ----------------------------------------------------------------------------------------------------------


def make_samples(folder: Path, count: int, seed: int = 0) -> None:
    """Make images with one to three shapes each, and instances.json with their boxes and outlines."""
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
    """Return a shape's outline, [P, 2] of x and y, inside the image."""
    corners = {0: 4, 1: 24, 2: 3}[label]
    radius = rng.uniform(18, 45)
    centre = np.array([rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)])
    angle = np.pi / 4 + 2 * np.pi * np.arange(corners) / corners
    return centre + radius * np.stack([np.cos(angle), np.sin(angle)], axis=1)


if __name__ == "__main__":
    main()
