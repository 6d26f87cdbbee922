"""Measures images per second of an affine warp: cv2.warpAffine, gpuflow's warp_affine and this folder's own operator.

    python experiments/extension/run.py                  # a CPU
    python experiments/extension/run.py --device cuda    # an NVIDIA GPU

Each measurement runs in a new process and is appended to measurements.jsonl at once; results.csv is then written again.
What measurements.jsonl has is not measured again, so an interrupted run continues where it stopped. README.md defines
arms and metrics.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

import gpuflow
from gpuflow.tools.bench import Log, row, write_results

HERE = Path(__file__).parent
ARMS = {
    "cpu": ("cv2", "gpuflow", "own-cpp", "own-cpp stage"),
    "cuda": ("cv2", "gpuflow", "own-cuda", "own-triton", "own-cuda stage", "own-triton stage", "own-copy stage"),
}
HEIGHT, WIDTH, DEGREES, SCALE = 375, 500, 15.0, 0.9
UNITS = {"images_per_s": "images/s", "ready_s": "s", "most_levels": "levels"}
SECONDS = 500
"""The limit for one measurement, which may build the operator."""


def main() -> None:
    options = parsed()
    if options.measure:
        print(json.dumps(measured(options.measure, options)))
        return
    log, failures = Log(options.out / "measurements.jsonl"), []
    workload = f"{options.device}, {HEIGHT}x{WIDTH}, batch {options.batch}, {options.threads} threads"
    done = {(record["arm"], record["workload"], record["repeat"]) for record in log.records}
    for repeat in range(options.repeats):
        for arm in options.arms or ARMS[options.device]:
            if (arm, workload, repeat) in done:
                continue
            try:
                metrics = in_new_process(arm, options)
            except subprocess.SubprocessError as error:
                output = getattr(error, "stderr", None) or str(error)
                failures.append(f"{arm}: {output.strip().splitlines()[-1]}")
                continue
            log.append({"arm": arm, "workload": workload, "repeat": repeat, "metrics": metrics})
            write_results(options.out / "results.csv", rows_of(log.records))
            print(repeat, arm, *(f"{name}={value:.5g}" for name, value in metrics.items()), flush=True)
    if failures:
        sys.exit("\n".join(["Not measured; the same command tries again:", *dict.fromkeys(failures)]))


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=ARMS, default="cpu")
    parser.add_argument("--arms", nargs="+", help="by default all of the device")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="that each measurement takes at least")
    parser.add_argument("--out", type=Path, default=HERE, help="the folder of measurements.jsonl and results.csv")
    parser.add_argument("--measure", metavar="ARM", help="measure this arm in this process, and print it as JSON")
    options = parser.parse_args(arguments)
    if unknown := {*(options.arms or ()), *filter(None, [options.measure])} - {*ARMS[options.device]}:
        parser.error(f"no arm of {options.device}: {', '.join(unknown)}; known: {', '.join(ARMS[options.device])}")
    return options


def in_new_process(arm: str, options: argparse.Namespace) -> dict[str, float]:
    given = {name: getattr(options, name) for name in ("device", "batch", "threads", "seconds")}
    words = [f"--{name}={value}" for name, value in given.items()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, __file__, "--measure", arm, *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    metrics: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return metrics


def measured(arm: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the metrics of an arm. It is ready after its first two calls, which build and compile what it calls."""
    images = photographs(options.batch)
    start = time.perf_counter()
    call, synchronize = made(arm, images, options)
    results = call(), call()
    synchronize()
    ready, calls, start = time.perf_counter() - start, 0, time.perf_counter()
    while time.perf_counter() - start < options.seconds or not calls:
        for _ in range(8 if options.device == "cuda" else 1):
            call()
            calls += 1
        synchronize()
    seconds = time.perf_counter() - start
    inner = by_opencv([np.full((HEIGHT, WIDTH, 3), 255, np.uint8)])[0] == 255  # the frame: see README.md
    pairs = zip(as_arrays(results[1]), by_opencv(images), strict=True)
    levels = max(int(np.abs(result.astype(int) - expected)[inner].max()) for result, expected in pairs)
    return {"images_per_s": calls * options.batch / seconds, "ready_s": ready, "most_levels": levels}


def photographs(count: int) -> list[Any]:
    """Return images with smooth areas, edges and noise: uint8 [HEIGHT, WIDTH, 3] each."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (count, 12, 16, 3)).astype(np.uint8)
    noise = rng.integers(0, 16, (HEIGHT, WIDTH, 3)).astype(np.uint8)
    return [cv2.add(cv2.resize(one, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC), noise) for one in coarse]


def matrix() -> Any:
    from own_warp import inverse_matrices

    return inverse_matrices(DEGREES, SCALE, HEIGHT, WIDTH)


def by_opencv(images: Sequence[Any]) -> list[Any]:
    flags, inverse = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP, matrix()
    return [cv2.warpAffine(image, inverse, (WIDTH, HEIGHT), flags=flags) for image in images]


def as_arrays(result: Any) -> list[Any]:
    return list(result.permute(0, 2, 3, 1).cpu().numpy()) if isinstance(result, torch.Tensor) else list(result)


def made(arm: str, images: list[Any], options: argparse.Namespace) -> tuple[Callable[[], Any], Callable[[], None]]:
    """Return what warps the batch, and what waits for it."""
    threads: int = options.threads
    if arm == "cv2":
        cv2.setNumThreads(0)  # the threads below share the images
        parts, pool = [images[i::threads] for i in range(threads)], ThreadPoolExecutor(threads)

        def warp_all() -> list[Any]:
            found = list(pool.map(by_opencv, parts))
            return [found[i % threads][i // threads] for i in range(len(images))]

        return warp_all, lambda: None
    torch.set_num_threads(threads)
    tensors = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).to(options.device)
    synchronize = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    operator, _, in_pipeline = arm.removeprefix("own-").partition(" ")
    kernel: Any = "copy" if operator == "cpp" else operator
    if arm == "gpuflow" or in_pipeline:
        fixed = {"degrees": [DEGREES, DEGREES], "scale": [SCALE, SCALE], "kernel": kernel}
        affine = {"matrix": matrix().tolist(), "inverse_map": True}
        return in_gpuflow(
            {"own_warp": fixed} if in_pipeline else {"warp_affine": affine}, tensors, options
        ), synchronize
    from own_warp import warp

    matrices = torch.from_numpy(np.tile(matrix(), (len(images), 1, 1))).to(options.device)
    return lambda: warp(tensors, matrices, kernel), synchronize


def in_gpuflow(stage: dict[str, Any], images: torch.Tensor, options: argparse.Namespace) -> Callable[[], torch.Tensor]:
    """Return `gpuflow.transform` of a pipeline with this stage, on images in memory."""
    stages = ["decode", {"center_crop": {"size": [HEIGHT, WIDTH]}}, stage]  # a crop that keeps all: one size
    document = {
        "source": {"folder": "none"},
        "pipelines": {"train": {"stages": stages, "batch": {"size": len(images)}}},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "warp.yaml"
        path.write_text(json.dumps({**document, "run": {"threads": options.threads}}), encoding="utf-8")
        transform = gpuflow.transform(path, "train", device=options.device)
    return lambda: transform(images, epoch=0, positions=range(len(images)))


def rows_of(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    keys = dict.fromkeys((record["arm"], record["workload"]) for record in records)
    of = {key: [one["metrics"] for one in records if (one["arm"], one["workload"]) == key] for key in keys}
    return [
        row(arm, workload, metric, [metrics[metric] for metrics in found], unit)
        for (arm, workload), found in of.items()
        for metric, unit in UNITS.items()
    ]


if __name__ == "__main__":
    main()
