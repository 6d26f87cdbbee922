"""Measures how many images a second configs/detection.yaml loads at 640x640, and how many PyTorch's DataLoader does.

    python experiments/recipes/detection/loading.py              # ten minutes on two cores

Photographs of COCO's usual sizes are made here, with seven boxes each, and with an outline of 24 points for each box or
without outlines. Both loaders read the same files and annotations, apply the same transforms and yield the same things:
float32 images [N, 3, 640, 640] and a list of targets, with masks where there are outlines. gpuflow is
measured with threads and with worker processes, which are its default for 10,000 samples and more. Each measurement
runs in a new process; arms alternate. Writes loading.csv in this file's folder.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from gpuflow.tools.bench import Job, measure, row, write_results
from gpuflow.tools.samples import encoded, load_photos, noisy_crop

HERE = Path(__file__).parent
CONFIG = HERE.parents[2] / "configs" / "detection.yaml"
SIZES = ((640, 480), (640, 427), (480, 640), (500, 375))
"""Width and height in pixels."""
OBJECTS = 7
CLASSES = 80
WORKLOADS = ("boxes", "boxes and masks")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement, after its warm-up")
    parser.add_argument("--warm-up", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], help="of DataLoader; the best one counts")
    parser.add_argument("--out", type=Path, default=HERE / "loading.csv")
    options = parser.parse_args(arguments)
    cores, rows = len(os.sched_getaffinity(0)), []
    with tempfile.TemporaryDirectory(prefix="gpuflow_") as folder:
        make_photographs(Path(folder), options.images)
        for workload in WORKLOADS:
            overrides = (f"source.coco={folder}/{workload}.json", f"source.images={folder}/images")
            arms = [
                ("gpuflow", cores, "run.processes=0"),
                ("gpuflow", cores, f"run.processes={cores}"),
                *((f"{__file__}:dataloader", workers, "") for workers in options.workers),
            ]
            jobs = [
                Job(
                    arm=arm,
                    path=str(CONFIG),
                    overrides=(*overrides, setting) if setting else overrides,
                    pipeline="train",
                    workers=workers,
                    seconds=options.seconds,
                    warm_up=options.warm_up,
                )
                for arm, workers, setting in arms
            ]
            rates = measure(jobs, repeats=options.repeats, progress=lambda job, rate: print(said(job), f"{rate:.1f}"))
            for job, values in rates.items():
                where = f"{workload}, 640x640, batch 8; workers={job.workers}"
                rows.append(row(said(job).partition(",")[0], where, "images_per_s", values, "images/s"))
            threads, processes, *others = (float(one["value"]) for one in rows[-len(arms) :])
            best = max(others)
            ratios = f"{threads / best:.2f} on threads, {processes / best:.2f} in processes"
            print(f"{workload}: gpuflow/DataLoader {ratios}")
    write_results(options.out, rows)


def said(job: Job) -> str:
    way = ""
    if job.arm == "gpuflow":
        way = " (threads)" if "run.processes=0" in job.overrides else " (processes)"
    return f"{job.arm.rpartition(':')[2]}{way}, {job.workers} workers"


def make_photographs(folder: Path, count: int, seed: int = 0) -> None:
    """Photographs, and a file of annotations in COCO's format for each of WORKLOADS."""
    (folder / "images").mkdir()
    photos = list(load_photos().values())
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        pixels, quality = noisy_crop(photos[number % len(photos)], rng, SIZES)
        height, width = pixels.shape[:2]
        name = f"{number:06d}.jpg"
        (folder / "images" / name).write_bytes(encoded(pixels, quality))
        images.append({"id": number, "file_name": name, "height": height, "width": width})
        for _ in range(OBJECTS):
            radius = rng.uniform(15, 110, 2)
            angles = np.linspace(0, 2 * np.pi, 24, endpoint=False)
            outline = rng.uniform(radius, (width, height) - radius) + radius * np.stack(
                [np.cos(angles), np.sin(angles)], axis=1
            )
            (left, top), (right, bottom) = outline.min(axis=0), outline.max(axis=0)
            annotations.append(
                {
                    "id": len(annotations),
                    "image_id": number,
                    "category_id": int(rng.integers(CLASSES)),
                    "bbox": [round(float(value), 2) for value in (left, top, right - left, bottom - top)],
                    "segmentation": [[round(float(value), 2) for value in outline.ravel()]],
                    "area": round(float(cv2.contourArea(outline.astype(np.float32))), 2),
                    "iscrowd": 0,
                }
            )
    categories = [{"id": number, "name": f"class {number}"} for number in range(CLASSES)]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "boxes and masks.json").write_text(json.dumps(document), encoding="utf-8")
    document["annotations"] = [{key: one[key] for key in one if key != "segmentation"} for one in annotations]
    (folder / "boxes.json").write_text(json.dumps(document), encoding="utf-8")


# --- PyTorch's DataLoader with torchvision's transforms ---------------------------------------------------------------


def dataloader(job: Job) -> Iterable[int]:
    """Yields the numbers of images of the batches. See `gpuflow.tools.bench.Job`."""
    given = dict(entry.split("=", 1) for entry in job.overrides)
    loader: Any = DataLoader(
        Photographs(Path(given["source.coco"]), Path(given["source.images"])),
        batch_size=8,
        shuffle=True,
        drop_last=True,
        num_workers=job.workers,
        persistent_workers=True,
        collate_fn=collate,
    )
    while True:
        for images, _ in loader:
            yield len(images)


def collate(samples: Sequence[tuple[torch.Tensor, dict[str, Any]]]) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    images, targets = zip(*samples, strict=True)
    return torch.stack(images), list(targets)


def per_box(sample: tuple[Any, dict[str, Any]]) -> tuple[Any, ...]:
    """What goes with a box: the labels and the masks."""
    _, target = sample
    return tuple(target[name] for name in ("labels", "masks") if name in target)


def letterbox(fill: Any) -> Any:
    """torchvision has no transform that pads to a square."""
    from torchvision.transforms import v2

    class Letterbox(v2.Transform):  # type: ignore[misc]
        def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
            height, width = v2.functional.get_size(flat_inputs[0])
            left, top = (640 - width) // 2, (640 - height) // 2
            return {"padding": [left, top, 640 - width - left, 640 - height - top]}

        def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
            return self._call_kernel(v2.functional.pad, inpt, fill=fills(inpt), **params)

    def fills(inpt: Any) -> int:
        return int(fill.get(type(inpt), fill["others"]))

    return Letterbox()


class Photographs(Dataset[Any]):
    """A dataset as torchvision's tutorial on detection writes it: TVTensors through transforms of version 2."""

    def __init__(self, annotations: Path, folder: Path) -> None:
        from torchvision import tv_tensors
        from torchvision.transforms import v2

        bilinear, fill = v2.InterpolationMode.BILINEAR, {tv_tensors.Image: 114, "others": 0}
        document = json.loads(annotations.read_text(encoding="utf-8"))
        self._images, self._folder = document["images"], folder
        self._annotations: list[list[dict[str, Any]]] = [[] for _ in self._images]
        for one in document["annotations"]:
            self._annotations[one["image_id"]].append(one)
        self._masks = "segmentation" in document["annotations"][0]
        self._transform = v2.Compose(
            [
                v2.RandomAffine(10, (0.1, 0.1), (0.7, 1.4), interpolation=bilinear, fill=fill),
                v2.RandomHorizontalFlip(),
                v2.Resize(None, max_size=640),
                letterbox(fill),
                v2.ColorJitter(0.2, 0.2, 0.2),
                v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
                v2.SanitizeBoundingBoxes(min_area=16, labels_getter=per_box),
            ]
        )

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, Any]]:
        from PIL import Image, ImageDraw
        from torchvision import tv_tensors
        from torchvision.transforms.v2 import functional

        image, annotations = self._images[index], self._annotations[index]
        with Image.open(self._folder / image["file_name"], formats=["JPEG"]) as file:
            pixels = functional.pil_to_tensor(file.convert("RGB"))
        size = (image["height"], image["width"])
        boxes = tv_tensors.BoundingBoxes([one["bbox"] for one in annotations], format="XYWH", canvas_size=size)
        target: dict[str, Any] = {
            "boxes": functional.convert_bounding_box_format(boxes, new_format="XYXY"),
            "labels": torch.tensor([one["category_id"] for one in annotations]),
        }
        if self._masks:
            masks = []
            for one in annotations:
                mask = Image.new("L", size[::-1])
                ImageDraw.Draw(mask).polygon(one["segmentation"][0], fill=1)
                masks.append(np.array(mask))
            target["masks"] = tv_tensors.Mask(torch.from_numpy(np.stack(masks)))
        result: tuple[torch.Tensor, dict[str, Any]] = self._transform(tv_tensors.Image(pixels), target)
        return result


if __name__ == "__main__":
    main()
