"""Measures the arms of worker_scaling. `python arms.py JOB` measures one in this process and prints the result.

JOB: an object with arm, workloads, folder, photographs, workers, epochs, seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START = time.perf_counter()
"""A cold start is measured from here on: with all imports of libraries, which are in functions."""

Job = dict[str, Any]
Build = Callable[[], Iterable[tuple[Any, Any]]]
"""Makes a loader: each `for` over it is an epoch of (images, labels), or endless."""

HERE = Path(__file__).parent
CONFIG = HERE / "photos.yaml"
SIZE, BATCH, CHUNK, PROCESS_BATCH, SMALL_BATCH = 224, 128, 16, 32, 32
FOUR = ("decode", "batch", "normalize", "transfer")
"""The workloads of SPDL's example: each does what the one before it does, and one step more."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
WAIT_SECONDS = 120.0


def files_of(folder: str) -> list[str]:
    return sorted(str(path) for path in Path(folder).glob("*/*") if path.is_file())


def has_normalize(workload: str) -> bool:
    """Return whether one of the four workloads normalizes."""
    return workload in ("normalize", "transfer")


class Counted:
    """A loader of (images, labels) as one of numbers of photographs."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[int]:
        for _, labels in self.loader:
            yield 1 if isinstance(labels, int) else len(labels)


# --- gpuflow ----------------------------------------------------------------------------------------------------------


def imported_gpuflow() -> Any:
    """Import what `gpuflow.load` would import, so that only `cold_start_s` includes the time for it."""
    import gpuflow
    import gpuflow.loader.assemble
    import gpuflow.stages

    return gpuflow


def gpuflow_arm(job: Job, workload: str, *overrides: str, device: str | None = None) -> Build:
    """Load by gpuflow with these overrides of photos.yaml."""
    gpuflow = imported_gpuflow()
    every = [f"source.folder={job['folder']}", *overrides]
    return lambda: gpuflow.load(CONFIG, workload, device=device, overrides=every)


def on_threads(job: Job, workload: str) -> Build:
    """Decode on threads, also where the batches are transferred to a GPU."""
    threads = (f"run.threads={job['workers']}", "run.processes=0")
    if workload == "transfer":
        on_cpu = "pipelines.transfer.stages.0.decode.backend=cpu"
        return gpuflow_arm(job, workload, *threads, on_cpu, device="cuda")
    return gpuflow_arm(job, workload, *threads)


def on_gpu(job: Job, workload: str) -> Build:
    return gpuflow_arm(job, workload, f"run.threads={job['workers']}", device="cuda")


def on_processes(job: Job, workload: str) -> Build:
    return gpuflow_arm(job, workload, f"run.threads={job['workers']}", f"run.processes={job['workers']}")


# --- PyTorch's DataLoader ---------------------------------------------------------------------------------------------


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


def in_random_order(folder: str, *arguments: Any, **options: Any) -> Any:
    """Return torchvision's ImageFolder with its samples in a random order, which is the same in each call."""
    from torchvision.datasets import ImageFolder

    dataset = ImageFolder(folder, *arguments, **options)
    random.Random(0).shuffle(dataset.samples)
    return dataset


def normalized(images: Any) -> Any:
    from torchvision.transforms.functional import normalize

    return normalize(images.float() / 255, MEAN, STD)


class OnGpu:
    """Transfers the images of a loader to the GPU, as SPDL's example does."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for images, labels in self.loader:
            yield images.cuda(), labels


def dataloader(job: Job, workload: str, **how_to_read: Any) -> Build:
    """DataLoader on torchvision's ImageFolder; the four workloads as SPDL's example writes them."""
    from torch.utils.data import DataLoader, default_collate
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import Compose, PILToTensor, Resize, v2

    workers = {"num_workers": job["workers"]}
    if workload not in FOUR:
        dataset = ImageFolder(job["folder"], transform_of(workload), **how_to_read)
        return lambda: DataLoader(dataset, batch_size=BATCH, shuffle=True, persistent_workers=True, **workers)

    def collate(samples: list[Any]) -> tuple[Any, Any]:
        images, labels = default_collate(samples)
        return (normalized(images) if has_normalize(workload) else images), labels

    size = (SIZE, SIZE)
    transform: Any = v2.Resize(size) if how_to_read else Compose([Resize(size), PILToTensor()])
    dataset = in_random_order(job["folder"], transform, **how_to_read)
    batches = {} if workload == "decode" else {"batch_size": SMALL_BATCH, "collate_fn": collate}

    def build() -> Any:
        options = {"batch_size": None, "prefetch_factor": 1, "multiprocessing_context": "fork", **workers, **batches}
        loader: Any = DataLoader(dataset, **options)
        return OnGpu(loader) if workload == "transfer" else loader

    return build


# --- SPDL -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spdl:
    """SPDL's PipelineBuilder as its example uses it.

    Threads `load` the items, in another order in each epoch. `join` makes (images, labels) of `parts` of them. `stages`
    then run on the images of a batch.
    """

    workers: int
    items: list[Any]
    load: Callable[[Any], Any]
    parts: int
    join: Callable[[list[Any]], tuple[Any, Any]]
    stages: Sequence[Callable[[Any], Any]] = ()
    ready: int

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        from spdl.pipeline import PipelineBuilder

        random.shuffle(self.items)
        builder: Any = PipelineBuilder()
        builder = builder.add_source(self.items).pipe(self.load, concurrency=self.workers)
        builder = builder.aggregate(self.parts).pipe(self.join)
        for stage in self.stages:
            builder = builder.pipe(lambda batch, stage=stage: (stage(batch[0]), batch[1]))
        pipeline = builder.add_sink(self.ready).build(num_threads=self.workers)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator(timeout=WAIT_SECONDS)


def spdl_stages(workload: str) -> list[Callable[[Any], Any]]:
    """Return what the example does with the images of a batch."""
    stages: dict[str, list[Callable[[Any], Any]]] = {
        "normalize": [normalized],
        "transfer": [normalized, lambda images: images.cuda()],
    }
    return stages.get(workload, [])


def spdl_io(job: Job, workload: str, **scaling: Any) -> Build:
    """SPDL's example, with its own decoder and scaler, which are FFmpeg's."""
    import spdl.io
    import spdl.pipeline

    filter_desc = spdl.io.get_video_filter_desc(scale_width=SIZE, scale_height=SIZE, **scaling)

    def decoded(path: str) -> Any:
        return spdl.io.decode_packets(spdl.io.demux_image(path), filter_desc=filter_desc)

    def join(items: list[Any]) -> tuple[Any, Any]:
        frames, labels = zip(*items, strict=True)
        return spdl.io.to_torch(spdl.io.convert_frames(frames)).permute(0, 3, 1, 2), labels

    dataset = in_random_order(job["folder"], loader=decoded)
    decoded(dataset.samples[0][0])  # a pipeline would leave out every photograph if FFmpeg is not found
    return lambda: Spdl(
        workers=job["workers"],
        items=list(range(len(dataset))),
        load=dataset.__getitem__,
        parts=1 if workload == "decode" else SMALL_BATCH,
        join=join,
        stages=spdl_stages(workload),
        ready=job["workers"],
    )


class OpenCv:
    """Loads chunks of files by OpenCV. It resizes without antialiasing, which is less work than the other arms do."""

    def __init__(self) -> None:
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

    def resized(self, files: Sequence[str]) -> tuple[Any, Sequence[str]]:
        """Return uint8 images [N, H, W, 3] of the whole photographs, and the files."""
        import cv2
        import numpy as np

        images = np.empty((len(files), SIZE, SIZE, 3), np.uint8)
        for image, file in zip(images, files, strict=True):
            pixels: Any = cv2.imdecode(np.fromfile(file, np.uint8), cv2.IMREAD_COLOR_RGB)
            cv2.resize(pixels, (SIZE, SIZE), dst=image)
        return images, files

    def augmented(self, files: Sequence[str]) -> tuple[Any, Sequence[str]]:
        """Return normalized images [N, 3, H, W] of random crops, flipped at random, and the files."""
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
        return images, files


def spdl_cv2(job: Job, workload: str) -> Build:
    """SPDL with OpenCV: an item is a chunk of files, so that threads take turns with the interpreter less often."""
    import cv2
    import numpy as np
    import spdl.pipeline  # noqa: F401
    import torch

    cv2.setNumThreads(1)
    files, is_one_of_four, opencv = files_of(job["folder"]), workload in FOUR, OpenCv()
    chunk = 1 if workload == "decode" else CHUNK
    random.Random(0).shuffle(files)

    def join(parts: list[Any]) -> tuple[Any, Any]:
        images = torch.from_numpy(np.concatenate([images for images, _ in parts]))
        labels = [file for _, files in parts for file in files]
        return (images.permute(0, 3, 1, 2) if is_one_of_four else images), labels

    return lambda: Spdl(
        workers=job["workers"],
        items=[files[start : start + chunk] for start in range(0, len(files), chunk)],
        load=opencv.resized if is_one_of_four else opencv.augmented,
        parts=1 if workload == "decode" else (SMALL_BATCH if is_one_of_four else BATCH) // CHUNK,
        join=join,
        stages=spdl_stages(workload),
        ready=job["workers"] if is_one_of_four else 3,
    )


# --- DALI -------------------------------------------------------------------------------------------------------------


def dali(job: Job, workload: str, *, device: str) -> Build:
    """NVIDIA DALI. device: its decoder's, cpu or mixed; mixed leaves all results on the GPU."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    files = files_of(job["folder"])
    random.Random(0).shuffle(files)

    @pipeline_def  # type: ignore[untyped-decorator]  # DALI ships no types
    def pipeline() -> Any:
        encoded, numbers = fn.readers.file(files=files, labels=list(range(len(files))))
        images = fn.decoders.image(encoded, device=device, output_type=types.RGB)
        images = fn.resize(images, resize_x=SIZE, resize_y=SIZE, interp_type=types.INTERP_LINEAR, antialias=True)
        if has_normalize(workload):
            mean, std = ([255 * value for value in values] for values in (MEAN, STD))
            images = fn.crop_mirror_normalize(images, dtype=types.FLOAT, output_layout="CHW", mean=mean, std=std)
        return images.gpu() if workload == "transfer" else images, numbers

    def build() -> Iterator[tuple[Any, Any]]:
        gpu = 0 if device == "mixed" or workload == "transfer" else None
        batch = 1 if workload == "decode" else SMALL_BATCH
        pipe = pipeline(batch_size=batch, num_threads=job["workers"], device_id=gpu, prefetch_queue_depth=3)
        pipe.build()
        for (found,) in DALIGenericIterator(pipe, ["images", "numbers"], size=-1):
            images = found["images"]
            yield images if has_normalize(workload) else images.permute(0, 3, 1, 2), found["numbers"].flatten()

    return build


# --- decoding alone ---------------------------------------------------------------------------------------------------


class Decoding:
    """Threads that only read and decode whole files by torchvision, which does not hold the interpreter for it."""

    def __init__(self, job: Job) -> None:
        self.files = files_of(job["folder"])
        self.pool = ThreadPoolExecutor(job["workers"])

    def decode(self, files: Sequence[str]) -> tuple[None, Sequence[str]]:
        for file in files:
            decoded_tensor(file)
        return None, files

    def __iter__(self) -> Iterator[tuple[None, Sequence[str]]]:
        return self.pool.map(self.decode, [self.files[i : i + CHUNK] for i in range(0, len(self.files), CHUNK)])


def decode(job: Job, workload: str) -> Build:
    import torchvision.io  # noqa: F401

    return lambda: Decoding(job)


# --- measuring --------------------------------------------------------------------------------------------------------


def process_tree() -> list[Any]:
    import psutil

    this = psutil.Process()
    return [this, *this.children(recursive=True)]


def cpu_seconds(processes: Iterable[Any]) -> float:
    """Return the user and system time of these processes, and of their children that have ended."""
    return float(sum(sum(process.cpu_times()[:4]) for process in processes))


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
    loader = Counted(build())
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
    second = Counted(build())
    next(iter(second))
    metrics["second_first_batch_s"] = time.perf_counter() - start
    return metrics


def endless(loader: Iterable[int]) -> Generator[int, None, None]:
    """Yield the numbers of one epoch after the other. Raise RuntimeError after an epoch without photographs."""
    while True:
        count = 0
        for number in loader:
            count += number
            yield number
        if not count:
            raise RuntimeError("an epoch of this arm has no photographs: its library left out all of them")


def steady_metrics(build: Build, seconds: float) -> dict[str, float]:
    """Measure `seconds` after half of that time. Both begin and end when a batch arrives; the loader is new."""
    import torch

    cuda: Any = torch.cuda

    def is_over(start: float, limit: float) -> bool:
        if time.perf_counter() - start < limit:
            return False
        if cuda.is_initialized():  # CUDA begins with the workload `transfer`, after the others have forked workers
            cuda.synchronize()
        return True

    with closing(endless(Counted(build()))) as counts:
        next(counts)
        start = time.perf_counter()
        while not is_over(start, seconds / 2):
            next(counts)
        used, start, count = cpu_seconds(process_tree()), time.perf_counter(), 0
        while not is_over(start, seconds):
            count += next(counts)
        elapsed = time.perf_counter() - start
        used = cpu_seconds(process_tree()) - used
        memory = pss_mb(process_tree())
    return {"images_per_s": count / elapsed, "cpu_ms_per_image": 1000 * used / count, "pss_mb": memory}


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
    loader = Counted(build())
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


def process_metrics(job: Job, recipe: str) -> dict[str, float]:
    """Measure processes that each load their share of the epoch with one thread. An epoch's rate is the sum of theirs.

    They are forked before the clock starts and wait for each other at the start alone. Each draws its share from all
    photographs in another order, and continues until all have done their epochs, so that none gets a free core.
    """
    imported_gpuflow()
    context, workers = multiprocessing.get_context("fork"), job["workers"]
    barrier, ended = context.Barrier(workers + 1, timeout=WAIT_SECONDS), context.Event()
    counts, rates = context.Array("q", workers, lock=False), context.Queue()
    for number in range(workers):
        arguments = (job, recipe, number, barrier, ended, counts, rates)
        context.Process(target=load_share, args=arguments, daemon=True).start()
    processes = process_tree()
    barrier.wait()
    used = cpu_seconds(processes)
    found = [rates.get(timeout=WAIT_SECONDS) for _ in range(workers)]
    count, used = sum(counts), cpu_seconds(processes) - used
    metrics = epoch_metrics([sum(epoch) for epoch in zip(*found, strict=True)])
    return {**metrics, "cpu_ms_per_image": 1000 * used / count, "pss_mb": pss_mb(processes)}


def load_share(job: Job, recipe: str, number: int, barrier: Any, ended: Any, counts: Any, rates: Any) -> None:
    """Load in this process, and put the rates of the epochs into the queue `rates`."""
    size = f"pipelines.{recipe}.batch.size={PROCESS_BATCH}"
    build = gpuflow_arm(job, recipe, "run.threads=1", "run.processes=0", f"source.seed={number}", size)
    loader = Counted(build())
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

LOADERS: dict[str, Callable[[Job, str], Build]] = {
    "gpuflow": on_threads,
    "gpuflow default": gpuflow_arm,
    "gpuflow-gpu": on_gpu,
    "gpuflow-processes": on_processes,
    "decode": decode,
    "dataloader-pil": dataloader,
    "dataloader-tensors": lambda job, workload: dataloader(job, workload, loader=decoded_tensor),
    "spdl-io": spdl_io,
    "spdl-io-stretch": lambda job, workload: spdl_io(job, workload, scale_mode=None, scale_algo="bilinear"),
    "spdl-cv2": spdl_cv2,
    "dali-cpu": lambda job, workload: dali(job, workload, device="cpu"),
    "dali-mixed": lambda job, workload: dali(job, workload, device="mixed"),
}


def measure(job: Job, workload: str) -> dict[str, float]:
    """Measure one arm on one workload, and return its metrics."""
    if job["arm"] == "processes":
        return process_metrics(job, workload)
    if job["arm"] == "gpuflow+spinner":
        return spinner_metrics(on_threads(job, workload), job["epochs"])
    build = LOADERS[job["arm"]](job, workload)
    return steady_metrics(build, job["seconds"]) if workload in FOUR else loader_metrics(build, job["epochs"])


def main() -> None:
    job = json.loads(sys.argv[1])
    metrics = {workload: measure(job, workload) for workload in job["workloads"]}
    print(json.dumps(metrics), flush=True)
    for process in process_tree()[1:]:
        process.kill()
    os._exit(0)  # do not wait for loaders that have more to give


if __name__ == "__main__":
    main()
