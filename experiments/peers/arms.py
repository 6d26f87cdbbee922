"""The arms of peers: a loader each. `python arms.py JOB` measures one in this process and prints the result.

JOB: an object with the fields of Job. Each arm is written as its library's documentation recommends. It gets a job and
returns a loader: each `for` over that is an epoch and yields pairs of images and labels.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inputs import samples_of

START = time.perf_counter()
HERE = Path(__file__).parent
SIZE = 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LEVELS = {"mean": [255 * value for value in MEAN], "std": [255 * value for value in STD]}

Loader = Any
"""Each `for` over it is an epoch of pairs: images and labels. The libraries ship no types."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Holds what an arm gets.

    input: the photographs in the format that the arm reads (Arm.input); empty to find out whether it can run.
    workers: processes, or threads where the loader has those. seconds: how long to measure, after `warm_up` seconds; 0
    only describes the batches of one epoch.
    """

    arm: str
    input: str
    workers: int
    batch: int
    warm_up: float = 2.0
    seconds: float = 8.0


def transform() -> Any:
    """Return torchvision's transform, for a PIL image or a uint8 tensor."""
    import torch
    from torchvision.transforms import v2

    return v2.Compose(
        [
            v2.RandomResizedCrop(SIZE),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )


def opened(path: str) -> Any:
    from PIL import Image

    return Image.open(path).convert("RGB")


def decoded(path: str) -> Any:
    from torchvision.io import decode_image, read_file

    return decode_image(read_file(path), mode="RGB")


@dataclass(frozen=True, slots=True)
class Epochs:
    """A loader of batches of any type as one of pairs. epoch: begins an epoch. pair: a batch as images and labels."""

    epoch: Callable[[], Iterable[Any]]
    pair: Callable[[Any], tuple[Any, Any]]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return map(self.pair, self.epoch())


def named(batch: Any) -> tuple[Any, Any]:
    return batch["image"], batch["label"]


# --- gpuflow ----------------------------------------------------------------------------------------------------------


def gpuflow(job: Job, *, tar: bool = False, device: str = "cpu") -> Loader:
    import gpuflow

    last = len(list(Path(job.input).glob("*.tar"))) - 1
    source = f"source.tar={job.input}/{{000..{last:03}}}.tar" if tar else f"source.folder={job.input}"
    overrides = [source, f"run.threads={job.workers}", f"pipelines.train.batch.size={job.batch}"]
    return gpuflow.load(HERE / ("shards.yaml" if tar else "photos.yaml"), device=device, overrides=overrides)


# --- PyTorch ----------------------------------------------------------------------------------------------------------


def dataloader(job: Job, read: Callable[[str], Any] = opened) -> Loader:
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    dataset = ImageFolder(job.input, transform(), loader=read)
    return DataLoader(dataset, batch_size=job.batch, shuffle=True, num_workers=job.workers, persistent_workers=True)


def torchcodec(job: Job) -> Loader:
    from torchcodec.decoders import decode_image

    return dataloader(job, decode_image)


def torchdata(job: Job) -> Loader:
    """As torchdata's guide moves a DataLoader to nodes: each worker process makes whole batches."""
    import torchdata.nodes as nodes
    from torch.utils.data import RandomSampler, default_collate
    from torchvision.datasets import ImageFolder

    dataset = ImageFolder(job.input, transform())
    node: Any = nodes.SamplerWrapper(RandomSampler(dataset))
    node = nodes.Batcher(node, job.batch, drop_last=False)
    load = MapAndCollate(dataset, default_collate)
    node = nodes.ParallelMapper(node, load, num_workers=job.workers, method="process")
    return nodes.Loader(nodes.Prefetcher(node, prefetch_factor=2 * job.workers))


@dataclass(frozen=True, slots=True)
class MapAndCollate:
    dataset: Any
    collate: Callable[[list[Any]], Any]

    def __call__(self, indices: list[int]) -> Any:
        return self.collate([self.dataset[index] for index in indices])


def timm(job: Job) -> Loader:
    """timm's processes give uint8 batches, which its prefetcher normalizes. It drops an incomplete last batch."""
    import torch
    from timm.data import create_dataset, create_loader

    return create_loader(
        create_dataset("", root=job.input),
        (3, SIZE, SIZE),
        job.batch,
        is_training=True,
        color_jitter=None,
        interpolation="bilinear",
        num_workers=job.workers,
        device=torch.device("cpu"),
    )


# --- others -----------------------------------------------------------------------------------------------------------


def spdl(job: Job) -> Loader:
    """Threads, so with torchvision's decoder and transforms of tensors, which run without the interpreter."""
    import torch
    from spdl.pipeline import PipelineBuilder
    from torch.utils.data import default_collate

    torch.set_num_threads(1)
    samples, prepare = samples_of(job.input), transform()

    def epoch() -> Iterator[Any]:
        random.shuffle(samples)
        builder: Any = PipelineBuilder().add_source(samples)
        builder.pipe(lambda sample: (prepare(decoded(sample[0])), sample[1]), concurrency=job.workers)
        builder.aggregate(job.batch).pipe(default_collate).add_sink(3)
        pipeline = builder.build(num_threads=job.workers)
        with pipeline.auto_stop():
            yield from pipeline

    return Epochs(epoch, tuple)


def dali(job: Job, device: str = "cpu") -> Loader:
    """device: `cpu`, or `mixed`, which decodes and does everything else on the GPU."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator

    @pipeline_def  # type: ignore[untyped-decorator]  # DALI ships no types
    def pipeline() -> Any:
        files, labels = fn.readers.file(file_root=job.input, random_shuffle=True, name="photographs")
        shape = {"random_area": [0.08, 1.0], "random_aspect_ratio": [3 / 4, 4 / 3]}
        images = fn.decoders.image_random_crop(files, device=device, output_type=types.RGB, **shape)
        images = fn.resize(images, size=[SIZE, SIZE], interp_type=types.INTERP_LINEAR, antialias=True)
        layout = {"dtype": types.FLOAT, "output_layout": "CHW", **LEVELS}
        images = fn.crop_mirror_normalize(images, mirror=fn.random.coin_flip(), **layout)
        return images, labels if device == "cpu" else labels.gpu()

    device_id = None if device == "cpu" else 0
    made = pipeline(batch_size=job.batch, num_threads=job.workers, device_id=device_id, prefetch_queue_depth=3)
    ends = {"reader_name": "photographs", "last_batch_policy": LastBatchPolicy.PARTIAL, "auto_reset": True}
    loader = DALIClassificationIterator(made, **ends)
    return Epochs(lambda: loader, lambda batch: (batch[0]["data"], batch[0]["label"].flatten()))


def webdataset(job: Job) -> Loader:
    import webdataset as wds

    shards = sorted(str(path) for path in Path(job.input).glob("*.tar"))
    dataset = wds.WebDataset(shards, shardshuffle=len(shards)).shuffle(1000).decode("pil").to_tuple("jpg", "cls")
    dataset = dataset.map_tuple(transform(), int).batched(job.batch)
    return wds.WebLoader(dataset, batch_size=None, num_workers=job.workers, persistent_workers=True)


def litdata(job: Job) -> Loader:
    import litdata

    prepare = transform()

    class Photographs(litdata.StreamingDataset):  # type: ignore[misc]  # LitData ships no types
        def __getitem__(self, index: Any) -> Any:
            image, label = named(super().__getitem__(index))
            return prepare(image), label

    dataset = Photographs(job.input, shuffle=True)
    return litdata.StreamingDataLoader(dataset, batch_size=job.batch, num_workers=job.workers, persistent_workers=True)


def streaming(job: Job) -> Loader:
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    prepare = transform()

    class Photographs(StreamingDataset):  # type: ignore[misc]  # Streaming ships no types
        def __getitem__(self, index: int) -> Any:
            image, label = named(super().__getitem__(index))
            return prepare(image), label

    dataset = Photographs(local=job.input, shuffle=True, batch_size=job.batch)
    return DataLoader(dataset, batch_size=job.batch, num_workers=job.workers, persistent_workers=True)


def grain(job: Job) -> Loader:
    import grain
    import numpy as np
    import torch
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # worker processes read one

    prepare = transform()

    def load(sample: tuple[str, int], generator: Any) -> Any:
        torch.set_num_threads(1)
        torch.manual_seed(int(generator.integers(2**31)))
        return {"image": prepare(opened(sample[0])).numpy(), "label": np.int64(sample[1])}

    epochs = None if job.seconds else 1  # without end while measuring: each new iterator starts processes again
    dataset = grain.MapDataset.source(samples_of(job.input)).seed(0).shuffle().repeat(epochs).random_map(load)
    dataset = dataset.batch(job.batch).to_iter_dataset(grain.ReadOptions(num_threads=1))
    workers = grain.multiprocessing.MultiprocessingOptions(num_workers=job.workers)
    return Epochs(lambda: dataset.mp_prefetch(workers), named)


def hf_datasets(job: Job) -> Loader:
    from datasets import load_dataset
    from torch.utils.data import DataLoader

    prepare = transform()

    def prepared(rows: dict[str, Any]) -> dict[str, Any]:
        return {**rows, "image": [prepare(image.convert("RGB")) for image in rows["image"]]}

    cache = f"{job.input}.datasets"
    dataset = load_dataset("imagefolder", data_dir=job.input, split="train", cache_dir=cache).with_transform(prepared)
    loader: Any = DataLoader(
        dataset, batch_size=job.batch, shuffle=True, num_workers=job.workers, persistent_workers=True
    )
    return Epochs(lambda: loader, named)


def ray(job: Job) -> Loader:
    import ray.data
    from PIL import Image

    labels, prepare = dict(samples_of(job.input)), transform()

    def prepared(row: dict[str, Any]) -> dict[str, Any]:
        return {"image": prepare(Image.fromarray(row["image"])).numpy(), "label": labels[row["path"]]}

    ray.init(num_cpus=job.workers, include_dashboard=False, log_to_driver=False)
    dataset = ray.data.read_images(job.input, mode="RGB", include_paths=True, shuffle="files").map(prepared)
    return Epochs(lambda: dataset.iter_torch_batches(batch_size=job.batch, prefetch_batches=3), named)


@dataclass(frozen=True, slots=True)
class Arm:
    """module: must be importable. input: `folder`, or a format of inputs.py. gpu: it needs one."""

    load: Callable[[Job], Loader]
    module: str
    input: str = "folder"
    gpu: bool = False


ARMS = {
    "gpuflow": Arm(gpuflow, "gpuflow"),
    "gpuflow-tar": Arm(lambda job: gpuflow(job, tar=True), "gpuflow", "tar"),
    "dataloader": Arm(dataloader, "torchvision.datasets"),
    "dataloader-tensors": Arm(lambda job: dataloader(job, decoded), "torchvision.datasets"),
    "torchcodec": Arm(torchcodec, "torchcodec.decoders"),
    "torchdata": Arm(torchdata, "torchdata.nodes"),
    "timm": Arm(timm, "timm.data"),
    "spdl": Arm(spdl, "spdl.pipeline"),
    "dali": Arm(dali, "nvidia.dali"),
    "webdataset": Arm(webdataset, "webdataset", "tar"),
    "litdata": Arm(litdata, "litdata", "litdata"),
    "streaming": Arm(streaming, "streaming", "mds"),
    "grain": Arm(grain, "grain"),
    "hf-datasets": Arm(hf_datasets, "datasets"),
    "ray": Arm(ray, "ray.data"),
    "dali-mixed": Arm(lambda job: dali(job, "mixed"), "nvidia.dali", gpu=True),
    "gpuflow-gpu": Arm(lambda job: gpuflow(job, device="cuda"), "gpuflow", gpu=True),
}

# --- measuring --------------------------------------------------------------------------------------------------------


def missing(arm: Arm) -> str | None:
    """Return a text that says why an arm cannot run here; None if it can."""
    try:
        importlib.import_module(arm.module)
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: torchcodec without its libraries
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    import torch

    return "torch sees no NVIDIA GPU" if arm.gpu and not torch.cuda.is_available() else None


def version_of(arm: Arm) -> str:
    """Return the name and the version of an arm's library; empty if it does not say its version."""
    name = arm.module.removeprefix("nvidia.").partition(".")[0]
    module = sys.modules.get(name, sys.modules[arm.module])
    version = getattr(module, "__version__", "unknown").partition("+")[0]
    return "" if version == "unknown" else f"{name} {version}"


def processes() -> list[Any]:
    import psutil

    this = psutil.Process()
    return [this, *this.children(recursive=True)]


def cpu_seconds() -> float:
    """Return the processor time of this process and its children, with those that have ended."""
    import psutil

    seconds = 0.0
    for process in processes():
        with suppress(psutil.NoSuchProcess):
            seconds += sum(process.cpu_times()[:4])
    return seconds


def pss_mb() -> float:
    """Return the proportional memory of this process and its children, from proc(5)'s smaps_rollup."""
    kilobytes = 0
    for process in processes():
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile, as at the end of an epoch
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
            kilobytes += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return kilobytes / 1000


def forever(loader: Loader) -> Iterator[Any]:
    while True:
        yield from loader


def metrics(job: Job, arm: Arm) -> tuple[dict[str, float], Iterator[Any]]:
    """Measure a loader in its steady state; an epoch that ends is followed by the next.

    Returns:
        The figures, and the loader's batches. Who dropped these would wait while the loader ends its processes: grain's
        take 25 s each.
    """
    import torch

    begin = time.perf_counter()
    batches = forever(arm.load(job))
    next(batches)
    first = time.perf_counter()
    while time.perf_counter() - first < job.warm_up:
        next(batches)
    count, used, start = 0, cpu_seconds(), time.perf_counter()
    while time.perf_counter() - start < job.seconds:
        count += len(next(batches)[1])
    if arm.gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    figures = {
        "images_per_s": count / seconds,
        "cpu_s_per_1000": 1000 * (cpu_seconds() - used) / count,
        "pss_mb": pss_mb(),
        "first_batch_s": first - begin,
        "import_s": begin - START,
    }
    return figures, batches


def description(job: Job, arm: Arm) -> dict[str, Any]:
    """Return what one epoch consists of. levels: the mean level of each image, from 0 to 1, before `normalize`."""
    import torch

    found: dict[str, Any] = {"shapes": [], "dtypes": [], "labels": [], "levels": []}
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    for images, labels in arm.load(job):
        pixels = torch.as_tensor(images).cpu()
        found["shapes"].append(list(pixels.shape))
        found["dtypes"].append(str(pixels.dtype))
        found["labels"] += [int(label) for label in labels]
        found["levels"] += (pixels * std + mean).mean((1, 2, 3)).tolist()
    return found


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    arm = ARMS[job.arm]
    result: dict[str, Any] = {}
    if (reason := missing(arm)) is not None:
        result["missing"] = reason
    elif job.input:
        result["version"] = version_of(arm)
        if job.seconds:
            result["result"], _batches = metrics(job, arm)
        else:
            result["result"] = description(job, arm)
    print(json.dumps(result), flush=True)
    for process in processes()[1:]:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    os._exit(0)  # do not wait for loaders that have more to give


if __name__ == "__main__":
    main()
