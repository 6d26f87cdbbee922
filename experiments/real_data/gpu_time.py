"""What the GPU does while a training is fed: `python experiments/real_data/gpu_time.py FOLDER`.

Traces steps of a training on a resident batch and on the loader's batches. Prints where the time of a step goes, in ms:
the training's kernels, and the gaps between them. A gap is `queued late` if the host called for the kernel only after
the one before it had ended, otherwise `held up`: the kernel waited for an event, such as a batch that was not decoded
yet, or for room on the GPU. Then it prints which of CUDA's functions take most time in each thread, waits included; the
threads that launch the training's kernels come first. Needs an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import arms
import numpy as np
import torch
from next_to_training import SETTLING_STEPS, run_for

LONG_US = 200.0
"""A longer gap is not one of those between any two kernels."""
THREADS, FUNCTIONS = 6, 6
"""The numbers of threads, and of functions of each, that are printed."""
Event = dict[str, Any]


def traced(step: Callable[[], object], steps: int) -> list[Event]:
    """What ran on the GPU and which of CUDA's functions were called, in the order of their starts (Kineto's events)."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return sorted((event for event in events if event.get("ph") == "X"), key=lambda event: float(event["ts"]))


def on_gpu_of(events: list[Event]) -> tuple[list[Event], int]:
    """The kernels and copies, and the stream on which most kernels ran: the training's."""
    on_gpu = [event for event in events if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels = Counter(event["args"]["stream"] for event in on_gpu if event["cat"] == "kernel")
    return on_gpu, kernels.most_common(1)[0][0]


def calls_of(events: list[Event]) -> list[Event]:
    """The calls of CUDA's functions."""
    return [event for event in events if event["cat"] in ("cuda_runtime", "cuda_driver")]


def milliseconds_of(events: list[Event], steps: int) -> dict[str, float]:
    """Parts of a step in ms on the training's stream."""
    on_gpu, training = on_gpu_of(events)
    calls = {event["args"].get("correlation"): float(event["ts"]) for event in calls_of(events)}
    found = defaultdict[str, float](float)
    end = begin = 0.0
    for event in on_gpu:
        start, duration = float(event["ts"]), float(event["dur"])
        if event["args"]["stream"] != training:
            name = event["name"] if event["cat"] == "kernel" else event["cat"]
            found[f"other streams: {name[:40]}"] += duration
            continue
        begin = begin or start
        if end and start > end:
            late = calls.get(event["args"]["correlation"], start) > end
            length = "long" if start - end > LONG_US else "short"
            found[f"{length} gaps, {'queued late' if late else 'held up'}"] += start - end
        found["the training's kernels"] += duration
        end = max(end, start + duration)
    found["all"] = end - begin
    return {name: value / steps / 1e3 for name, value in sorted(found.items())}


def calls_by_thread(events: list[Event], steps: int) -> Iterator[str]:
    """For each thread the functions of CUDA that took most of its time."""
    on_gpu, training = on_gpu_of(events)
    launched = {event["args"]["correlation"] for event in on_gpu if event["args"]["stream"] == training}
    threads, is_launching = defaultdict[int, list[Event]](list), set[int]()
    for event in calls_of(events):
        threads[event["tid"]].append(event)
        if event["args"].get("correlation") in launched:
            is_launching.add(event["tid"])
    totals = {tid: sum(float(event["dur"]) for event in calls) for tid, calls in threads.items()}
    for tid in sorted(threads, key=lambda tid: (tid not in is_launching, -totals[tid]))[:THREADS]:
        role = "a thread of the training" if tid in is_launching else "another thread"
        yield f"    {role}: {len(threads[tid]) / steps:.0f} calls a step, {totals[tid] / steps / 1e3:.2f} ms"
        by_name = defaultdict[str, list[float]](list)
        for event in threads[tid]:
            by_name[event["name"]].append(float(event["dur"]))
        for name, spans in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:FUNCTIONS]:
            total, longest = sum(spans) / steps / 1e3, max(spans) / 1e3
            yield f"        {name:44} {len(spans) / steps:7.1f} {total:8.2f} ms, longest {longest:.2f}"


def measure(title: str, training: arms.Training, loader: arms.Gpuflow | None, options: argparse.Namespace) -> None:
    waits: list[float] = []

    def step() -> None:
        if loader is None:
            training.resident_step()
            return
        before = time.perf_counter()
        batch = loader.next()
        waits.append((time.perf_counter() - before) * 1e3)
        training.step(*batch)

    for _ in range(SETTLING_STEPS):
        step()
    waits.clear()
    run = run_for(step, options.seconds, options.batch)
    print(f"{title}: {options.batch / run.rate * 1e3:.2f} ms a step, {run.rate:,.0f} images/s", flush=True)
    print(f"    the loop was {run.ahead:.1f} ms ahead of the GPU at the end")
    if loader is not None:
        middle, most = np.percentile(waits, [50, 95])
        share = loader.stats().get("gpu_wait_share", float("nan"))
        print(f"    the loop waits {np.mean(waits):.1f} ms for a batch (p50 {middle:.1f}, p95 {most:.1f}), ", end="")
        print(f"the GPU for {share:.1%} of its time")
    events = traced(step, options.steps)
    for name, value in milliseconds_of(events, options.steps).items():
        print(f"    {name:56} {value:8.2f}", flush=True)
    print(*calls_by_thread(events, options.steps), sep="\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="photographs, in a folder for each class")
    parser.add_argument("--models", nargs="+", default=["resnet18", "compiled_resnet18"], help="see run.py's workloads")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="of each untraced measurement (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=24, help="that are traced (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of photos.yaml")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    loader = arms.Gpuflow({"folder": options.folder, "batch": options.batch, "device": "cuda", "set": options.set})
    meter = arms.Meter("cuda", options.batch, options.seconds)
    trainings = {model: arms.Training(model, meter, loader.dtype) for model in options.models}
    for training in trainings.values():
        meter.warm(training.resident_step, 1.0)
    loader.next()
    while not (loader.is_started() and loader.is_warm()):
        loader.next()
    for repeat in range(options.repeats):
        for model, training in trainings.items():
            if repeat == 0:
                measure(f"{model}, resident", training, None, options)
            measure(f"{model}, fed", training, loader, options)
    loader.close()


if __name__ == "__main__":
    main()
