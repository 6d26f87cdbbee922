"""Measures shuffled reading of the source hf: Arrow files, Parquet files, the same images as single files.

    python experiments/hf_source/run.py [--images 8000] [--repeats 3] [--folder DIR]

Writes the images to a temporary folder (or DIR), which needs 3.5 GB for 8,000 of them. Needs the package datasets. The
files are in the page cache. Writes results.csv in this file's folder.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import yaml

from gpuflow import stage_table
from gpuflow.config import Config, read_config
from gpuflow.loader.assemble import build_loader
from gpuflow.loader.sampler import Order
from gpuflow.sources import HfSource, Source
from gpuflow.tools.bench import row, write_results

HERE = Path(__file__).parent
BATCH = 256
STAGES = ["decode", {"random_resized_crop": {"size": 224}}, {"flip": {"horizontal": 0.5}}, "normalize"]


def photograph(seed: int) -> bytes:
    """A JPEG of 500x375 pixels of smooth waves and noise, of about 110 kB as those of ImageNet."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:375, 0:500]
    waves = [np.sin(x / rng.uniform(9, 40) + y / rng.uniform(9, 40) + rng.uniform(0, 6)) for _ in range(3)]
    pixels = np.stack(waves, axis=-1) * 90 + 128 + rng.normal(0, 22, (375, 500, 3))
    return bytes(cv2.imencode(".jpg", np.clip(pixels, 0, 255).astype(np.uint8), [cv2.IMWRITE_JPEG_QUALITY, 90])[1])


def make(folder: Path, count: int) -> None:
    """The same images in each form."""
    import datasets
    import pyarrow.parquet as pq

    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=[str(i) for i in range(10)]))
    distinct = [photograph(i) for i in range(min(count, 200))]
    images = [distinct[i % len(distinct)] for i in range(count)]
    for i, data in enumerate(images):
        (folder / "folder" / str(i % 10)).mkdir(parents=True, exist_ok=True)
        (folder / "folder" / str(i % 10) / f"{i:06d}.jpg").write_bytes(data)
    held = {"image": [{"bytes": data, "path": None} for data in images], "label": [i % 10 for i in range(count)]}
    saved = datasets.Dataset.from_dict(held, features=features)
    saved.save_to_disk(folder / "saved", num_shards=4)
    for compression in ("none", "snappy"):
        table = saved.with_format("arrow")[:]
        (folder / compression).mkdir()
        pq.write_table(table, folder / compression / "train.parquet", row_group_size=100, compression=compression)


def config(folder: Path, source: dict[str, Any], **run: Any) -> Config:
    train = {"stages": STAGES, "batch": {"size": BATCH}, "shuffle": True}
    path = folder / "x.yaml"
    path.write_text(yaml.safe_dump({"source": source, "pipelines": {"train": train}, "run": run}))
    return read_config(path, stage_table())


def read_epoch(source: Source, order: Order, epoch: int) -> int:
    """Read an epoch in the loader's order, on one thread, a batch at a time."""
    buffer = np.empty(BATCH * 400_000, np.uint8)
    for start in range(0, order.size, BATCH):
        payload = source.read(
            order.indices(epoch, np.arange(start, min(start + BATCH, order.size))).tolist(), lambda size: buffer
        )
        assert not any(payload.errors)
    return order.size


def rates(run: Callable[[int], int], repeats: int) -> list[float]:
    """Samples per second, after one run that does not count."""
    run(0)
    found = []
    for repeat in range(repeats):
        start = time.perf_counter()
        found.append(run(repeat + 1) / (time.perf_counter() - start))
    return found


def measure(folder: Path, source: dict[str, Any], repeats: int, **run: Any) -> dict[str, list[float]]:
    found = {}
    loaded = build_loader(config(folder, source, **run), "train", rank=0, world_size=1, device="cpu")
    with loaded as loader:
        plan = loader._plan
        if not run.get("processes"):
            found["read_images_per_s"] = rates(lambda epoch: read_epoch(plan.source, plan.order, epoch), repeats)
            if isinstance(plan.source, HfSource) and plan.source.window is not None:
                found["window"] = [float(plan.source.window)]
        found["images_per_s"] = rates(lambda epoch: sum(len(labels) for _, labels in loader), repeats)
    return found


def of_datasets(folder: Path, count: int, repeats: int) -> list[float]:
    """The bytes of images as `datasets` gives them, a shuffled batch at a time."""
    import datasets

    saved = datasets.load_from_disk(folder / "saved").cast_column("image", datasets.Image(decode=False))

    def run(epoch: int) -> int:
        order = np.random.default_rng(epoch).permutation(count)
        for start in range(0, count, BATCH):
            assert len(saved[order[start : start + BATCH].tolist()]["image"]) > 0
        return count

    return rates(run, repeats)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=8000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        make(folder, options.images)
        size = sum(file.stat().st_size for file in (folder / "folder").rglob("*.jpg"))
        workload = f"{options.images} JPEGs of {size / options.images / 1000:.0f} kB"
        arms: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "folder": ({"folder": str(folder / "folder")}, {}),
            "Arrow files": ({"hf": str(folder / "saved")}, {}),
            **{f"Parquet, {form}": ({"hf": str(folder / form / "train.parquet")}, {}) for form in ("none", "snappy")},
            "Parquet, snappy, window 400": ({"hf": str(folder / "snappy"), "window": 400}, {}),
            "folder, 2 processes": ({"folder": str(folder / "folder")}, {"processes": 2}),
            "Parquet, snappy, 2 processes": ({"hf": str(folder / "snappy")}, {"processes": 2}),
        }
        rows = [
            row(
                "datasets",
                workload,
                "read_images_per_s",
                of_datasets(folder, options.images, options.repeats),
                "images/s",
            )
        ]
        for arm, (source, run) in arms.items():
            for metric, values in measure(folder, source, options.repeats, threads=2, **run).items():
                rows.append(row(arm, workload, metric, values, "samples" if metric == "window" else "images/s"))
                print(arm, metric, [round(value) for value in values], flush=True)
    write_results(HERE / "results.csv", rows)


if __name__ == "__main__":
    main()
