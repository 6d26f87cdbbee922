"""Compares loaders on a GPU: alone, and during training.

    gpuflow samples /dev/shm/photos -n 32768
    python experiments/gpu_path/run.py /dev/shm/photos [gpuflow] [gpuflow:run.prefetch=1] [dali]

The text after a colon overrides photos.yaml. Each arm runs in its own process, in which a new loader feeds ResNet-18,
then ResNet-50, then a loop that only requests batches. Ratios compare measurements within that process.
DALI runs with the hw_decoder_load that is fastest alone, or with a given one: dali:0.8. Writes results.csv in this
file's folder. Batch 256, RandomResizedCrop 224, flip, normalize to 16-bit floats in channels_last memory. An epoch
should take many seconds, because with a small folder the start of each epoch is measured too.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpuflow.tools.bench import row, write_results

HERE = Path(__file__).parent
BATCH, SECONDS, REPEATS = 256, 3.0, 3
WORKLOAD = "random_resized_crop 224, flip, normalize to 16 bits nhwc; batch=256"
UNITS = {"images_per_s": "images/s", "step_ratio": "ratio", "gpu_mem_mb": "MB"}
DALI_LOADS = (0.65, 0.8, 0.9)
DTYPES = {"gpuflow": torch.bfloat16, "dali": torch.float16}

Batches = Iterator[torch.Tensor]


def rate(step: Callable[[], Any]) -> tuple[float, float]:
    """(images per second, processor seconds per 1,000 images of this process and its descendants)."""
    for _ in range(8):
        step()
    torch.cuda.synchronize()
    images, start, cpu = 0, time.perf_counter(), cpu_seconds()
    while time.perf_counter() - start < SECONDS:
        step()
        images += BATCH
    torch.cuda.synchronize()
    return images / (time.perf_counter() - start), (cpu_seconds() - cpu) / images * 1000


def cpu_seconds() -> float:
    """Processor seconds of this process and its descendants, from proc(5)."""
    seconds, parents = time.process_time(), ["self"]
    while parents:
        for children in Path(f"/proc/{parents.pop()}/task").glob("*/children"):
            for child in children.read_text().split():
                ticks = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:13]
                seconds += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
                parents.append(child)
    return seconds


# --- arms ------------------------------------------------------------------------------------------------------------


def gpuflow_batches(folder: str, overrides: Sequence[str]) -> Batches:
    import gpuflow

    loader = gpuflow.load(HERE / "photos.yaml", device="cuda", overrides=[f"source.folder={folder}", *overrides])
    while True:
        for images, _ in loader:
            yield images


def dali_batches(folder: str, load: float) -> Batches:
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    @pipeline_def  # type: ignore[untyped-decorator]  # DALI ships no types
    def pipeline() -> Any:
        files, labels = fn.readers.file(file_root=folder, random_shuffle=True)
        images = fn.decoders.image_random_crop(
            files,
            device="mixed",
            output_type=types.RGB,
            random_aspect_ratio=[3 / 4, 4 / 3],
            random_area=[0.08, 1.0],
            hw_decoder_load=load,
        )
        images = fn.resize(images, resize_x=224, resize_y=224, interp_type=types.INTERP_TRIANGULAR)
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.FLOAT16,
            output_layout="HWC",
            mirror=fn.random.coin_flip(),
            mean=[123.675, 116.28, 103.53],
            std=[58.395, 57.12, 57.375],
        )
        return images, labels.gpu()

    pipe = pipeline(batch_size=BATCH, num_threads=16, device_id=0, prefetch_queue_depth=3)
    pipe.build()
    for (batch,) in DALIGenericIterator(pipe, ["images", "labels"], size=-1):
        yield batch["images"].permute(0, 3, 1, 2)


# --- measurements ----------------------------------------------------------------------------------------------------


class Training:
    """One step of a torchvision model: bf16 autocast, channels_last, SGD, on a stream of high priority."""

    def __init__(self, model: str, dtype: torch.dtype) -> None:
        import torchvision

        self._network = getattr(torchvision.models, model)().cuda().to(memory_format=torch.channels_last)
        self._optimizer = torch.optim.SGD(self._network.parameters(), 0.1, momentum=0.9)
        self._labels = torch.randint(0, 1000, (BATCH,), device="cuda")
        images = torch.randn((BATCH, 3, 224, 224), device="cuda")
        self._resident = images.to(dtype).contiguous(memory_format=torch.channels_last)
        self.stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]

    def step(self, batches: Batches | None) -> None:
        with torch.cuda.stream(self.stream):
            images = next(batches) if batches is not None else self._resident
            with torch.autocast("cuda", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(self._network(images), self._labels)
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()


def batches_of(arm: str, folder: str) -> Batches:
    """arm: `gpuflow`, also with an override; or `dali` and its hw_decoder_load, as in `dali:0.8`."""
    name, _, rest = arm.partition(":")
    if name == "gpuflow":
        return gpuflow_batches(folder, [rest] if rest else [])
    return dali_batches(folder, float(rest))


class Memory:
    """Watches how much GPU memory is allocated by any library. mb: the amount so far."""

    def __init__(self) -> None:
        self.mb = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        free = torch.cuda.mem_get_info()[0]
        yield
        self.mb += (free - torch.cuda.mem_get_info()[0]) / 1e6


def measure(arm: str, folder: str) -> Iterator[tuple[str, str, float]]:
    """Yield (workload, metric, value) for one arm."""
    torch.backends.cudnn.benchmark = True
    batches, memory = batches_of(arm, folder), Memory()
    for model in ("resnet18", "resnet50"):
        yield from train(arm, model, batches, memory)
    with memory.watched():
        for _ in range(REPEATS):
            images_per_s, cpu = rate(functools.partial(next, batches))
            yield WORKLOAD, "images_per_s", images_per_s
            yield WORKLOAD, "cpu_s_per_1000", cpu
    yield WORKLOAD, "gpu_mem_mb", memory.mb


def train(arm: str, model: str, batches: Batches, memory: Memory) -> Iterator[tuple[str, str, float]]:
    """Yield (workload, metric, value) of training on the batches, relative to training on a resident batch.

    The training allocates its own memory before the first batch is requested.
    """
    workload = f"{model}; {WORKLOAD}"
    training = Training(model, DTYPES[arm.partition(":")[0]])
    rate(functools.partial(training.step, None))
    for _ in range(REPEATS):
        alone, cpu_alone = rate(functools.partial(training.step, None))
        with memory.watched():
            fed, cpu_fed = rate(functools.partial(training.step, batches))
        yield workload, "step_ratio", fed / alone
        yield workload, "cpu_s_per_1000", cpu_fed
        yield workload, "cpu_s_per_1000_of_loader", cpu_fed - cpu_alone
        print(f"{arm} {model}: resident {alone:,.0f}, fed {fed:,.0f} images/s", file=sys.stderr, flush=True)
    yield workload, "gpu_mem_mb", memory.mb


def in_a_process(folder: str, *arguments: str) -> list[Any]:
    """Run this script with these arguments and return the JSON lines that it prints."""
    command = [sys.executable, __file__, folder, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    folder, *arms = sys.argv[1:]
    if arms[:1] == ["--rate"]:
        print(rate(functools.partial(next, batches_of(arms[1], folder)))[0])
        return
    if arms[:1] == ["--measure"]:
        for found in measure(arms[1], folder):
            print(json.dumps(found), flush=True)
        return
    rows = []
    for arm in arms or ["gpuflow", "dali"]:
        kinds = [f"dali:{load}" for load in DALI_LOADS] if arm == "dali" else [arm]
        best = max(kinds, key=lambda kind: in_a_process(folder, "--rate", kind)[0]) if kinds[1:] else kinds[0]
        values: dict[tuple[str, str], list[float]] = {}
        for workload, metric, value in in_a_process(folder, "--measure", best):
            values.setdefault((workload, metric), []).append(value)
        for (workload, metric), numbers in values.items():
            entry = row("dali" if arm.startswith("dali") else arm, workload, metric, numbers, UNITS.get(metric, "s"))
            entry["machine"] = f"{torch.cuda.get_device_name()}, {entry['machine']}"
            rows.append(entry)
            print(f"{best:8} {workload:78} {metric:24} {entry['value']:>9} ({entry['low']}-{entry['high']})")
    write_results(HERE / "results.csv", rows)


if __name__ == "__main__":
    main()
