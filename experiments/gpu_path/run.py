"""The loader on a GPU: images a second alone, and training on it over training on a resident batch.

    python experiments/gpu_path/run.py /dev/shm/photos

Prints and writes results.csv beside this file; batch 256, RandomResizedCrop 224, flip, normalize to bf16 channels_last.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torchvision

import gpuflow
from gpuflow.bench import row, write_results

HERE = Path(__file__).parent
BATCH, SECONDS, REPEATS = 256, 4.0, 3
WORKLOAD = "random_resized_crop 224, flip, normalize to bf16 nhwc; batch=256"


def load(folder: str) -> gpuflow.Loader:
    overrides = [f"source.folder={folder}", "pipelines.train.batch.size=256"]
    return gpuflow.load(HERE / "photos.yaml", device="cuda", overrides=overrides)


def batches(loader: gpuflow.Loader) -> Iterator[torch.Tensor]:
    while True:
        for images, _ in loader:
            yield images


def rate(step: Callable[[], Any]) -> float:
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < SECONDS:
        step()
        count += BATCH
    torch.cuda.synchronize()
    return count / (time.perf_counter() - start)


def train(name: str, stream: Iterator[torch.Tensor]) -> tuple[list[float], list[float]]:
    """Of each repeat: training on the loader over training on a resident batch; processor seconds for 1,000 images."""
    network = getattr(torchvision.models, name)().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    labels = torch.randint(0, 1000, (BATCH,), device="cuda")
    resident = next(stream).clone(memory_format=torch.preserve_format)
    training = torch.cuda.Stream(priority=-1)

    def step(fed: bool) -> None:
        with torch.cuda.stream(training):
            images = next(stream) if fed else resident
            with torch.autocast("cuda", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(network(images), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    rate(lambda: step(False))
    ratios, cpu = [], []
    for _ in range(REPEATS):
        alone = rate(lambda: step(False))
        start = time.process_time()
        fed = rate(lambda: step(True))
        cpu.append((time.process_time() - start) / (fed * SECONDS) * 1000)
        ratios.append(fed / alone)
        print(f"{name}: resident {alone:,.0f}, fed {fed:,.0f} images/s, ratio {fed / alone:.3f}", flush=True)
    return ratios, cpu


def main() -> None:
    torch.backends.cudnn.benchmark = True
    loader = load(sys.argv[1])
    stream = batches(loader)
    rates = [rate(lambda: next(stream)) for _ in range(REPEATS)]
    print(f"loader alone: {', '.join(f'{value:,.0f}' for value in rates)} images/s", flush=True)
    rows = [row("gpuflow", WORKLOAD, "images_per_s", rates, "images/s")]
    for name in ("resnet18", "resnet50"):
        ratios, cpu = train(name, stream)
        rows.append(row("gpuflow", f"{name}; {WORKLOAD}", "step_ratio", ratios, "ratio"))
        rows.append(row("gpuflow", f"{name}; {WORKLOAD}", "cpu_s_per_1000", cpu, "s"))
    for entry in rows:
        entry["machine"] = f"{torch.cuda.get_device_name()}, {entry['machine']}"
    write_results(HERE / "results.csv", rows)
    loader.close()


if __name__ == "__main__":
    main()
