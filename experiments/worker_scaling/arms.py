"""Measures the arms of worker_scaling. `python arms.py JOB` measures one in this process and prints the result.

JOB: an object with arm, recipe, folder, photographs, workers, epochs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

START = time.perf_counter()
"""A cold start is measured from here on: with all imports of libraries, which are in functions."""

Job = dict[str, Any]
Build = Callable[[], Iterable[int]]
"""Makes a loader: each `for` over it is an epoch and yields the number of photographs in each batch."""

HERE = Path(__file__).parent
CONFIG = HERE / "photos.yaml"
SIZE, BATCH, CHUNK, PROCESS_BATCH = 224, 128, 16, 32
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WAIT_SECONDS = 120.0


def files_of(folder: str) -> list[str]:
    return sorted(str(path) for path in Path(folder).glob("*/*") if path.is_file())


class Counted:
    """A loader of (images, labels) as one of numbers of photographs."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[int]:
        for _, labels in self.loader:
            yield len(labels)


# --- gpuflow ----------------------------------------------------------------------------------------------------------


def imported_gpuflow() -> Any:
    """Import what `gpuflow.load` would import, so that only `cold_start_s` includes the time for it."""
    import gpuflow
    import gpuflow.loader.assemble
    import gpuflow.stages

    return gpuflow


def gpuflow_arm(job: Job, *overrides: str) -> Build:
    """gpuflow with these overrides of photos.yaml."""
    gpuflow = imported_gpuflow()
    every = [f"source.folder={job['folder']}", *overrides]
    return lambda: Counted(gpuflow.load(CONFIG, job["recipe"], overrides=every))


def on_threads(job: Job) -> Build:
    return gpuflow_arm(job, f"run.threads={job['workers']}", "run.processes=0")


def on_processes(job: Job) -> Build:
    return gpuflow_arm(job, f"run.threads={job['workers']}", f"run.processes={job['workers']}")


# --- other loaders ----------------------------------------------------------------------------------------------------


class TwoViews:
    """Applies a transform twice."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, image: Any) -> tuple[Any, Any]:
        return self.transform(image), self.transform(image)


def transform_of(recipe: str) -> Any:
    """The recipe's transform of torchvision, for a PIL image or a uint8 tensor."""
    import torch
    from torchvision.transforms import InterpolationMode, v2

    def whole(*augmentations: Any) -> Any:
        return v2.Compose(
            [
                v2.RandomResizedCrop(SIZE),
                v2.RandomHorizontalFlip(),
                *augmentations,
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
            ]
        )

    if recipe == "base":
        return whole()
    if recipe == "color_jitter":
        return whole(v2.ColorJitter(0.2, 0.2, 0.2))
    if recipe == "rand_augment":
        return whole(v2.RandAugment(2, 9))
    if recipe == "rotate":
        return whole(v2.RandomRotation(10, InterpolationMode.BILINEAR))
    if recipe == "two_views":
        jitter = v2.RandomApply([v2.ColorJitter(0.8, 0.8, 0.8, 0.2)], 0.8)
        blur = v2.RandomApply([v2.GaussianBlur(23, (0.1, 2.0))], 0.5)
        return TwoViews(whole(jitter, v2.RandomGrayscale(0.2), blur))
    raise ValueError(f"recipe must be one of photos.yaml, got {recipe!r}")


def decoded_tensor(path: str) -> Any:
    from torchvision.io import decode_image, read_file

    return decode_image(read_file(path), mode="RGB")


def dataloader(job: Job, **how_to_read: Any) -> Build:
    """DataLoader on torchvision's ImageFolder."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    transform = transform_of(job["recipe"])

    def build() -> Iterable[int]:
        dataset = ImageFolder(job["folder"], transform, **how_to_read)
        workers = {"num_workers": job["workers"], "persistent_workers": True}
        return Counted(DataLoader(dataset, batch_size=BATCH, shuffle=True, **workers))

    return build


class Spdl:
    """SPDL's PipelineBuilder as its examples use it, with OpenCV; an item is a chunk of 16 files.

    OpenCV resizes without antialiasing, which is less work than the other arms do.
    """

    def __init__(self, job: Job) -> None:
        self.files, self.workers = files_of(job["folder"]), job["workers"]
        self.random = random.Random(0)

    def crop(self, height: int, width: int) -> tuple[int, int, int, int]:
        """Draw y, x, height and width as torchvision's RandomResizedCrop does."""
        for _ in range(10):
            area = height * width * self.random.uniform(0.08, 1)
            ratio = (3 / 4) * (16 / 9) ** self.random.random()
            crop_width, crop_height = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
            if 0 < crop_width <= width and 0 < crop_height <= height:
                y, x = self.random.randint(0, height - crop_height), self.random.randint(0, width - crop_width)
                return y, x, crop_height, crop_width
        side = min(height, width)
        return (height - side) // 2, (width - side) // 2, side, side

    def load(self, files: Sequence[str]) -> Any:
        import cv2
        import numpy as np

        scale = (1 / (255 * np.array(STD, np.float32))).astype(np.float32)[:, None, None]
        shift = (np.array(MEAN) / np.array(STD)).astype(np.float32)[:, None, None]
        images = np.empty((len(files), 3, SIZE, SIZE), np.float32)
        for image, file in zip(images, files, strict=True):
            pixels: Any = cv2.imdecode(np.fromfile(file, np.uint8), cv2.IMREAD_COLOR_RGB)
            y, x, height, width = self.crop(*pixels.shape[:2])
            pixels = cv2.resize(pixels[y : y + height, x : x + width], (SIZE, SIZE))
            if self.random.random() < 0.5:
                pixels = cv2.flip(pixels, 1)
            np.multiply(pixels.transpose(2, 0, 1), scale, out=image)
            image -= shift
        return images

    def __iter__(self) -> Iterator[int]:
        import numpy as np
        import torch
        from spdl.pipeline import PipelineBuilder

        self.random.shuffle(self.files)
        chunks = [self.files[start : start + CHUNK] for start in range(0, len(self.files), CHUNK)]
        builder: Any = PipelineBuilder()
        pipeline = (
            builder.add_source(chunks)
            .pipe(self.load, concurrency=self.workers)
            .aggregate(BATCH // CHUNK)
            .pipe(lambda parts: torch.from_numpy(np.concatenate(parts)))
            .add_sink(3)
            .build(num_threads=self.workers)
        )
        with pipeline.auto_stop():
            for images in pipeline:
                yield len(images)


def spdl_cv2(job: Job) -> Build:
    import cv2
    import numpy as np  # noqa: F401
    import spdl.pipeline  # noqa: F401
    import torch  # noqa: F401

    cv2.setNumThreads(1)
    return lambda: Spdl(job)


class Decoding:
    """Threads that only read and decode whole files by torchvision, which does not hold the interpreter for it."""

    def __init__(self, job: Job) -> None:
        self.files = files_of(job["folder"])
        self.pool = ThreadPoolExecutor(job["workers"])

    def decode(self, files: Sequence[str]) -> int:
        for file in files:
            decoded_tensor(file)
        return len(files)

    def __iter__(self) -> Iterator[int]:
        return self.pool.map(self.decode, [self.files[i : i + CHUNK] for i in range(0, len(self.files), CHUNK)])


def decode(job: Job) -> Build:
    import torchvision.io  # noqa: F401

    return lambda: Decoding(job)


# --- measuring --------------------------------------------------------------------------------------------------------


def process_tree() -> list[Any]:
    import psutil

    this = psutil.Process()
    return [this, *this.children(recursive=True)]


def cpu_seconds(processes: Iterable[Any]) -> float:
    """User and system time of these processes."""
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


def pss_mb(processes: Iterable[Any]) -> float:
    """Proportional memory of these processes, from proc(5)'s smaps_rollup."""
    kilobytes = 0
    for process in processes:
        with open(f"/proc/{process.pid}/smaps_rollup", encoding="ascii") as file:
            kilobytes += next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    return kilobytes / 1000


def rate(epoch: Iterable[int]) -> float:
    """Photographs per second of one epoch."""
    start = time.perf_counter()
    return sum(epoch) / (time.perf_counter() - start)


def epoch_metrics(rates: Sequence[float]) -> dict[str, float]:
    """`images_per_s` is the last epoch's."""
    earlier = {f"images_per_s_epoch_{number}": value for number, value in enumerate(rates[:-1], start=1)}
    return {**earlier, "images_per_s": rates[-1]}


def loader_metrics(build: Build, epochs: int) -> dict[str, float]:
    """Measure the first batch, the epochs, and then memory in the middle of one more epoch, and a second loader."""
    begin = time.perf_counter()
    loader = build()
    start = time.perf_counter()
    first_epoch = iter(loader)
    count = next(first_epoch)
    first = time.perf_counter()
    metrics = {"cold_start_s": first - START, "first_batch_s": first - begin}
    count += sum(first_epoch)
    rates = [count / (time.perf_counter() - start)]
    used = 0.0
    for _ in range(1, epochs):
        used = cpu_seconds(process_tree())
        rates.append(rate(loader))
    metrics |= epoch_metrics(rates)
    if epochs > 1:
        metrics["cpu_ms_per_image"] = 1000 * (cpu_seconds(process_tree()) - used) / count
    seen = 0
    for number in loader:
        if seen < count / 2 <= seen + number:
            metrics["pss_mb"] = pss_mb(process_tree())
        seen += number
    start = time.perf_counter()
    second = build()
    next(iter(second))
    metrics["second_first_batch_s"] = time.perf_counter() - start
    return metrics


class Spinner:
    """A thread that runs Python without a pause and counts."""

    def __init__(self) -> None:
        self.running, self.count, self.start = True, 0, time.perf_counter()
        self._thread = threading.Thread(target=self._spin)
        self._thread.start()

    def _spin(self) -> None:
        while self.running:
            self.count += 1

    def rate(self) -> float:
        """End it and return its steps per second."""
        seconds = time.perf_counter() - self.start
        self.running = False
        self._thread.join(WAIT_SECONDS)
        return self.count / seconds


def spinner_metrics(build: Build, epochs: int) -> dict[str, float]:
    """Measure epochs with and without a spinning thread in turn, after one that is not counted."""
    loader = build()
    rate(loader)
    alone, together, spun_alone, spun = [], [], [], []
    for _ in range(epochs):
        alone.append(rate(loader))
        spinner = Spinner()
        time.sleep(0.5)
        spun_alone.append(spinner.rate())
        spinner = Spinner()
        together.append(rate(loader))
        spun.append(spinner.rate())
    return {
        "images_per_s_next_to_spinner": sum(together) / epochs,
        "loader_share": sum(together) / sum(alone),
        "spinner_share": sum(spun) / sum(spun_alone),
    }


def process_metrics(job: Job) -> dict[str, float]:
    """Measure processes that each load their share of the epoch with one thread. An epoch's rate is the sum of theirs.

    They are forked before the clock starts and wait for each other at the start alone. Each draws its share from all
    photographs in another order, and continues until all have done their epochs, so that none gets a free core.
    """
    imported_gpuflow()
    context, workers = multiprocessing.get_context("fork"), job["workers"]
    barrier, ended = context.Barrier(workers + 1, timeout=WAIT_SECONDS), context.Event()
    counts, rates = context.Array("q", workers, lock=False), context.Queue()
    for number in range(workers):
        arguments = (job, number, barrier, ended, counts, rates)
        context.Process(target=load_share, args=arguments, daemon=True).start()
    processes = process_tree()
    barrier.wait()
    used = cpu_seconds(processes)
    found = [rates.get(timeout=WAIT_SECONDS) for _ in range(workers)]
    count, used = sum(counts), cpu_seconds(processes) - used
    metrics = epoch_metrics([sum(epoch) for epoch in zip(*found, strict=True)])
    return {**metrics, "cpu_ms_per_image": 1000 * used / count, "pss_mb": pss_mb(processes)}


def load_share(job: Job, number: int, barrier: Any, ended: Any, counts: Any, rates: Any) -> None:
    """Load in this process, and put the rates of the epochs into the queue `rates`."""
    size = f"pipelines.{job['recipe']}.batch.size={PROCESS_BATCH}"
    loader = gpuflow_arm(job, "run.threads=1", "run.processes=0", f"source.seed={number}", size)()
    share, epoch_count = -(-job["photographs"] // job["workers"]), 0
    own: list[float] = []
    barrier.wait()
    start = time.perf_counter()
    while not ended.is_set():
        for batch in loader:
            counts[number] += batch
            epoch_count += batch
            if len(own) < job["epochs"] and epoch_count >= share:
                now = time.perf_counter()
                own.append(epoch_count / (now - start))
                start, epoch_count = now, 0
                if len(own) == job["epochs"]:
                    rates.put(own)
            if ended.is_set():
                break


# --- the arms ---------------------------------------------------------------------------------------------------------

LOADERS: dict[str, Callable[[Job], Build]] = {
    "gpuflow": on_threads,
    "gpuflow default": gpuflow_arm,
    "gpuflow-processes": on_processes,
    "decode": decode,
    "dataloader-pil": dataloader,
    "dataloader-tensors": lambda job: dataloader(job, loader=decoded_tensor),
    "spdl-cv2": spdl_cv2,
}


def measure(job: Job) -> dict[str, float]:
    """Measure one arm, and return its metrics."""
    if job["arm"] == "processes":
        return process_metrics(job)
    if job["arm"] == "gpuflow+spinner":
        return spinner_metrics(on_threads(job), job["epochs"])
    return loader_metrics(LOADERS[job["arm"]](job), job["epochs"])


def main() -> None:
    metrics = measure(json.loads(sys.argv[1]))
    print(json.dumps(metrics), flush=True)
    for process in process_tree()[1:]:
        process.kill()
    os._exit(0)  # do not wait for loaders that have more to give


if __name__ == "__main__":
    main()
