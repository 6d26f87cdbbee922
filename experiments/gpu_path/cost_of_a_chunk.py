"""Counts the GPU work, allocations and thread switches that one chunk of the loader needs.

    python experiments/gpu_path/cost_of_a_chunk.py /dev/shm/photos

Prints figures for each chunk of 256 images in the steady state, with a consumer whose step takes 20 ms on the GPU: the
kernels, copies and CUDA calls that torch's profiler recorded, the requests to torch's allocator and from it to CUDA,
and how often each kind of thread gave up the processor. A thread gives it up once each time that it waits for the
interpreter, a lock or the GPU.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

import gpuflow

HERE = Path(__file__).parent
WARM, CHUNKS, STEP_CYCLES = 40, 60, 36_000_000
ALLOCATIONS = ("allocation.all.allocated", "segment.all.allocated", "num_device_alloc", "num_device_free")


def waits() -> Counter[str]:
    """How often this process's threads gave up the processor, by thread name without its number."""
    counts: Counter[str] = Counter()
    for thread in threading.enumerate():
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        fields = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
        counts[thread.name.rstrip("0123456789")] += int(fields["voluntary_ctxt_switches"])
    return counts


def allocations() -> Counter[str]:
    stats = torch.cuda.memory_stats()
    return Counter({name: int(stats[name]) for name in ALLOCATIONS})


def step(batches: Iterator[torch.Tensor]) -> None:
    next(batches)
    torch.cuda._sleep(STEP_CYCLES)  # type: ignore[no-untyped-call]


def show(heading: str, counts: Counter[str], most: int = 30) -> None:
    print(f"\n{heading}, a chunk:")
    for name, count in counts.most_common(most):
        if count:
            print(f"  {count / CHUNKS:9.2f}  {name[:110]}")


def main() -> None:
    loader = gpuflow.load(HERE / "photos.yaml", device="cuda", overrides=[f"source.folder={sys.argv[1]}"])
    batches = (images for _ in range(sys.maxsize) for images, _ in loader)
    for _ in range(WARM):
        step(batches)
    torch.cuda.synchronize()
    before = waits(), allocations()
    for _ in range(CHUNKS):
        step(batches)
    torch.cuda.synchronize()
    after = waits(), allocations()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, chunks of {loader.batch_size} images")
    show("times a thread gave up the processor", after[0] - before[0])
    show("torch's allocator", after[1] - before[1])
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(CHUNKS):
            step(batches)
        torch.cuda.synchronize()
    on_gpu: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    microseconds: Counter[str] = Counter()
    for event in seen.events():
        if event.device_type == DeviceType.CUDA:
            on_gpu[event.name] += 1
            microseconds[event.name] += int(event.time_range.elapsed_us())
        else:
            calls[event.name] += 1
    show("kernels and copies on the GPU", on_gpu)
    show("their microseconds", microseconds)
    show("calls of CUDA", calls)
    loader.close()


if __name__ == "__main__":
    main()
