"""Trains one model with one loader and prints its figures: `python experiments/epoch_time/arms.py JOB`, for run.py.

JOB is JSON. With `parallel: ddp` torchrun starts this script, once for each GPU; rank 0 prints.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpuflow  # before the first use of the GPU: it requests as many hardware queues as CUDA has, for each arm

# isort: split

import torch
import torch.distributed as dist
import torchvision
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.io import decode_image, read_file
from torchvision.transforms import v2

CONFIG = Path(__file__).with_name("photos.yaml")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, WARM_UP = 0.1, 0.9, 1e-4, 0.2
"""Of SGD with a cosine schedule; the learning rate is for a batch of 256. WARM_UP: this part of the steps."""

Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One training.

    train, val: folders. batch: of one GPU. workers: of one process. parallel: none, dp or ddp. seed: of the weights,
    and of the loaders that take one.
    """

    arm: str
    model: str
    train: str
    val: str
    device: str
    size: int
    batch: int
    epochs: int
    workers: int
    seed: int
    parallel: str

    def folder(self, name: str) -> str:
        """Return the photographs of `train` or `val`."""
        return {"train": self.train, "val": self.val}[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Names the device of a process that trains. loaded: images in a batch of its loader."""

    rank: int
    ranks: int
    device: torch.device
    loaded: int


def place_of(job: Job) -> Place:
    """Join torchrun's process group with `ddp`, and return this process's place."""
    on_gpu = job.device == "cuda"
    if job.parallel != "ddp":
        gpus = torch.cuda.device_count() if on_gpu and job.parallel == "dp" else 1
        device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        return Place(rank=0, ranks=1, device=device, loaded=job.batch * gpus)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    return Place(rank=dist.get_rank(), ranks=dist.get_world_size(), device=device, loaded=job.batch)


# --- loaders: one for training and one for validation; a `for` is an epoch --------------------------------------------

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]
Loaders = tuple[Any, Any]


def sampled(dataset: Any, job: Job, place: Place, name: str, **options: Any) -> DataLoader[Any]:
    """Return a DataLoader, with a DistributedSampler where there are several ranks."""
    training = name == "train"
    sampler: Any = None
    if place.ranks > 1:
        sampler = DistributedSampler(dataset, shuffle=training, seed=job.seed)
    shuffle = training and sampler is None
    return DataLoader(dataset, place.loaded, shuffle=shuffle, sampler=sampler, drop_last=training, **options)


def dataloader(job: Job, place: Place, **reading: Any) -> Loaders:
    """DataLoader on ImageFolder with torchvision's transforms."""
    end = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    cuts = {
        "train": [v2.RandomResizedCrop(job.size), v2.RandomHorizontalFlip()],
        "val": [v2.Resize(larger(job.size)), v2.CenterCrop(job.size)],
    }
    workers = {"num_workers": job.workers, "persistent_workers": True, "pin_memory": job.device == "cuda"}
    train, val = (
        sampled(ImageFolder(job.folder(name), v2.Compose([*cut, *end]), **reading), job, place, name, **workers)
        for name, cut in cuts.items()
    )
    return train, val


def dataloader_tensors(job: Job, place: Place) -> Loaders:
    return dataloader(job, place, loader=lambda path: decode_image(read_file(path), mode="RGB"))


def larger(size: int) -> int:
    """The shorter side of an image before the center crop of validation."""
    return size * 8 // 7


class Dali:
    """An iterator of DALI that is reset after each epoch."""

    def __init__(self, job: Job, place: Place, training: bool) -> None:
        from nvidia.dali import fn, pipeline_def, types
        from nvidia.dali.plugin.base_iterator import LastBatchPolicy
        from nvidia.dali.plugin.pytorch import DALIGenericIterator

        on_gpu, size = job.device == "cuda", job.size
        decoder = {"device": "mixed" if on_gpu else "cpu", "output_type": types.RGB}
        resize = {"interp_type": types.INTERP_TRIANGULAR}

        @pipeline_def  # type: ignore[untyped-decorator]  # DALI ships no types
        def pipeline() -> Any:
            encoded, labels = fn.readers.file(
                file_root=job.train if training else job.val,
                random_shuffle=training,
                shard_id=place.rank,
                num_shards=place.ranks,
                pad_last_batch=True,
                name="files",
            )
            mirror: Any = False
            if training:
                images = fn.decoders.image_random_crop(
                    encoded, random_aspect_ratio=[3 / 4, 4 / 3], random_area=[0.08, 1.0], **decoder
                )
                images = fn.resize(images, resize_x=size, resize_y=size, **resize)
                mirror = fn.random.coin_flip()
            else:
                images = fn.resize(fn.decoders.image(encoded, **decoder), resize_shorter=larger(size), **resize)
            images = fn.crop_mirror_normalize(
                images.gpu() if on_gpu else images,
                crop=(size, size),
                mirror=mirror,
                mean=[255 * mean for mean in MEAN],
                std=[255 * std for std in STD],
                dtype=types.FLOAT16 if on_gpu else types.FLOAT,
                output_layout="HWC",
            )
            return images, labels.gpu() if on_gpu else labels

        pipe = pipeline(
            batch_size=place.loaded,
            num_threads=job.workers,
            device_id=place.device.index if on_gpu else None,
            seed=job.seed,
        )
        policy = LastBatchPolicy.DROP if training else LastBatchPolicy.PARTIAL
        self._batches = DALIGenericIterator(
            pipe, ["images", "labels"], reader_name="files", last_batch_policy=policy, auto_reset=True
        )

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for (batch,) in self._batches:
            yield batch["images"].permute(0, 3, 1, 2), batch["labels"].flatten().long()


def dali(job: Job, place: Place) -> Loaders:
    """The guide's pipelines: decoding fused with the random crop, resize, mirror, normalize."""
    return Dali(job, place, training=True), Dali(job, place, training=False)


def overrides_of(job: Job, place: Place, name: str) -> list[str]:
    """Return what differs from photos.yaml in the pipeline `name`."""
    cuts = {
        "train": {"random_resized_crop.size": job.size},
        "val": {"resize.shorter": larger(job.size), "center_crop.size": job.size},
    }
    stages: dict[str, Any] = {**cuts[name], **({} if job.device == "cuda" else {"normalize.dtype": "float32"})}
    keys = {"source.folder": job.folder(name), "source.seed": job.seed, f"pipelines.{name}.batch.size": place.loaded}
    keys |= {f"pipelines.{name}.stages.{key}": value for key, value in stages.items()}
    return [f"{key}={value}" for key, value in keys.items()]


def gpuflow_load(job: Job, place: Place) -> Loaders:
    train, val = (
        gpuflow.load(CONFIG, name, device=place.device, overrides=overrides_of(job, place, name))
        for name in ("train", "val")
    )
    return train, val


def gpuflow_wrap(job: Job, place: Place) -> Loaders:
    """Samples and batches of a DataLoader; photos.yaml has all stages."""
    train, val = (
        gpuflow.wrap(
            sampled(ImageFolder(job.folder(name), loader=gpuflow.bytes_loader), job, place, name),
            CONFIG,
            parallel_type="ddp" if job.parallel == "ddp" else "dp",
            name=name,
            device=place.device,
            overrides=overrides_of(job, place, name),
        )
        for name in ("train", "val")
    )
    return train, val


LOADERS: dict[str, Callable[[Job, Place], Loaders]] = {
    "dataloader-pil": dataloader,
    "dataloader-tensors": dataloader_tensors,
    "dali": dali,
    "gpuflow": gpuflow_load,
    "gpuflow-wrap": gpuflow_wrap,
}


# --- training ---------------------------------------------------------------------------------------------------------


class Autocast(torch.nn.Module):
    """Runs a model in bfloat16 autocast on a GPU. Its logits are float32.

    Autocast is entered in the module, because DataParallel's threads would enter it with float16.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
            logits: torch.Tensor = self.model(images)
        return logits.float()


class Training:
    """A torchvision model with SGD in channels_last memory. steps: in the whole run."""

    def __init__(self, job: Job, place: Place, classes: int, steps: int) -> None:
        torch.manual_seed(job.seed)
        self._place = place
        model = torchvision.models.get_model(job.model, num_classes=classes)
        self._network: torch.nn.Module = Autocast(model).to(place.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        if job.parallel == "dp":
            self._network = torch.nn.DataParallel(self._network)
        elif job.parallel == "ddp":
            devices = [place.device] if place.device.type == "cuda" else None
            self._network = torch.nn.parallel.DistributedDataParallel(self._network, device_ids=devices)
        images = place.loaded * place.ranks
        self._optimizer = torch.optim.SGD(
            self._network.parameters(), LEARNING_RATE * images / 256, MOMENTUM, weight_decay=WEIGHT_DECAY
        )
        warm_up = max(1, round(WARM_UP * steps))

        def rate(step: int) -> float:
            return min(1.0, (step + 1) / warm_up) * (1 + math.cos(math.pi * min(1.0, step / steps))) / 2

        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, rate)

    def run(self, batches: Batches, training: bool) -> tuple[float, float, int]:
        """Run one pass. Return its seconds, the share of correct predictions and the images of all ranks."""
        device, start = self._place.device, time.perf_counter()
        self._network.train(training)
        counts = torch.zeros(2, dtype=torch.int64, device=device)
        with torch.set_grad_enabled(training):
            for images, labels in batches:
                images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
                labels = labels.to(device, non_blocking=True)
                logits = self._network(images)
                loss = torch.nn.functional.cross_entropy(logits, labels)
                if training:
                    self._optimizer.zero_grad(set_to_none=True)
                    loss.backward()  # type: ignore[no-untyped-call]
                    self._optimizer.step()
                    self._schedule.step()
                counts[0] += (logits.argmax(dim=1) == labels).sum()
                counts[1] += len(labels)
        if self._place.ranks > 1:
            dist.all_reduce(counts)
        correct, images_seen = counts.tolist()  # waits for the GPU
        return time.perf_counter() - start, correct / images_seen, images_seen


def gpu_memory(place: Place) -> Metrics:
    """Return MB of each GPU: reserved by torch, and in use by all (NVML). Empty without a GPU, and on other ranks."""
    if place.device.type != "cuda":
        return {}
    gpus = torch.cuda.device_count()
    reserved = torch.tensor([torch.cuda.max_memory_reserved(gpu) for gpu in range(gpus)], device=place.device)
    if place.ranks > 1:  # each rank has reserved memory on its own GPU
        dist.all_reduce(reserved)
    metrics = {f"gpu{gpu}_reserved_mb": number / 1e6 for gpu, number in enumerate(reserved.tolist())}
    return metrics | {f"gpu{gpu}_used_mb": torch.cuda.device_memory_used(gpu) / 1e6 for gpu in range(gpus)}


def measure(job: Job) -> tuple[Metrics, int]:
    """Train, and return the figures and this process's rank."""
    place = place_of(job)
    torch.backends.cudnn.benchmark = True
    classes = sum(path.is_dir() for path in Path(job.train).iterdir())
    photographs = sum(1 for path in Path(job.train).glob("*/*") if path.is_file())
    training = Training(job, place, classes, job.epochs * max(1, photographs // (place.loaded * place.ranks)))
    metrics: Metrics = {}
    start = time.perf_counter()
    train, val = LOADERS[job.arm](job, place)
    sampler = getattr(train, "sampler", None)
    images, seconds = 0, 0.0
    for epoch in range(job.epochs):
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        seconds, _, images = training.run(train, training=True)
        metrics[f"epoch_{epoch + 1}_s"] = seconds
        _, metrics["accuracy"], _ = training.run(val, training=False)
        metrics[f"accuracy_{epoch + 1}"] = metrics["accuracy"]
    metrics["run_s"] = time.perf_counter() - start
    metrics["images_per_s"] = images / seconds
    return metrics | gpu_memory(place), place.rank


def main() -> None:
    metrics, rank = measure(Job(**json.loads(sys.argv[1])))
    if rank == 0:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        print(json.dumps({"device": device, "metrics": metrics}), flush=True)
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)  # do not wait for the threads of other libraries


if __name__ == "__main__":
    main()
