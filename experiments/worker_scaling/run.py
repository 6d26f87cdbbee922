"""Measures images per second by number of workers, for gpuflow and other loaders on this machine.

    python experiments/worker_scaling/run.py

Each process of an arm is appended to measurements.jsonl at once; the CSV files are then written again. What
measurements.jsonl has is not measured again, so an interrupted run continues where it stopped. The arms take turns
within each repeat. README.md defines workloads, arms and metrics.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from arms import FOUR

from gpuflow.tools.bench import Log, commit, machine, spread, versions, write_results

HERE = Path(__file__).parent
PHOTOS = HERE.parent / "real_data" / "photos.py"
RECIPES = {
    "base": "random_resized_crop 224, flip, normalize",
    "color_jitter": "crop, flip, color_jitter",
    "rand_augment": "crop, flip, rand_augment",
    "rotate": "crop, flip, rotate",
    "two_views": "two views of SimCLR",
}
"""Workloads: the four of SPDL's example run one after the other in one process, each recipe in another process."""
FOUR_COUNTS = {
    "gpuflow": (1, 2, 4, 8, 16, 32),
    **dict.fromkeys(
        (
            "gpuflow-gpu",
            "dataloader-pil",
            "dataloader-tensors",
            "spdl-io",
            "spdl-io-stretch",
            "spdl-cv2",
            "dali-cpu",
            "dali-mixed",
        ),
        (1, 4, 16),
    ),
}
"""The arms of the four workloads, and their default numbers of workers."""
RECIPE_ARMS = (
    "gpuflow",
    "gpuflow default",
    "processes",
    "decode",
    "dataloader-pil",
    "dataloader-tensors",
    "spdl-cv2",
    "gpuflow+spinner",
    "gpuflow-processes",
)
SCALING_ARMS, MOST_WORKERS_ARMS = ("gpuflow", "processes"), ("gpuflow default", "gpuflow+spinner", "gpuflow-processes")
BASE_ARMS = ("decode", "spdl-cv2")
"""Arms of recipes that run with all numbers of workers by default, that run with the largest number alone, and that
have no recipes but `base`."""
ARMS = tuple(dict.fromkeys([*FOUR_COUNTS, *RECIPE_ARMS]))
GPU_ARMS = ("gpuflow-gpu", "dali-mixed")
UNITS = {
    "images_per_s": "images/s",
    "images_per_s_epoch_1": "images/s",
    "images_per_s_epoch_2": "images/s",
    "images_per_s_next_to_spinner": "images/s",
    "loader_share": "ratio",
    "spinner_share": "ratio",
    "cold_start_s": "s",
    "first_batch_s": "s",
    "second_first_batch_s": "s",
    "cpu_ms_per_image": "ms",
    "pss_mb": "MB",
    "load_before": "processes",
    "busy_cores_before": "cores",
}
NAMES = 16
"""How often an epoch of the four workloads has each photograph, so that no epoch ends within a second."""
SECONDS = 300.0
BUSY_SHARE = 0.1
"""The share of the cores that others may use before an arm starts, before a warning is printed."""

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One process. photographs: in an epoch. epochs: of a recipe. seconds: of each of the four workloads."""

    kind: str
    workloads: tuple[str, ...]
    arm: str
    workers: int
    photographs: int
    epochs: int
    seconds: float
    repeat: int

    def __str__(self) -> str:
        return f"{self.repeat} {self.kind:5} {self.arm:18} {self.workers:3} workers"


def main() -> None:
    options = parsed()
    log, failures = Log(options.out / "measurements.jsonl"), []
    done = {Job(**{**record["job"], "workloads": tuple(record["job"]["workloads"])}) for record in log.records}
    left_out = {arm: reason for arm in options.arms if (reason := reason_against(arm))}
    if "transfer" in options.workloads and not torch.cuda.is_available():
        left_out["transfer"] = "this workload needs a GPU"
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}", flush=True)
    options.arms = [arm for arm in options.arms if arm not in left_out]
    options.workloads = [workload for workload in options.workloads if workload not in left_out]
    with tempfile.TemporaryDirectory() as links:
        environment = ffmpeg_environment(Path(links))
        for job in jobs_of(options):
            if job in done:
                continue
            folder = photographs_of(job, options)
            try:
                record = measured(job, folder, environment)
            except (subprocess.SubprocessError, json.JSONDecodeError) as error:
                failures.append(f"{job}: {error}")
                print(failures[-1], flush=True)
                continue
            log.append(record)
            write_tables(options.out, log.records)
            for workload, metrics in record["metrics"].items():
                print(job, workload, " ".join(f"{name}={value:.4g}" for name, value in metrics.items()), flush=True)
    print(*comparisons(log.records), sep="\n")
    if failures:
        sys.exit("\n".join(["Failed; the same command measures the rest:", *failures]))


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", default=list(FOUR), choices=[*FOUR, *RECIPES])
    parser.add_argument("--kinds", nargs="+", default=["same"], help="kinds of photographs (default: same)")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--workers", nargs="+", type=int, help="of every arm; by default see README.md")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3, help="of a recipe")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each of the four workloads, after half of that")
    parser.add_argument("--count", type=int, default=4500, help="photographs (default: %(default)s)")
    parser.add_argument("--photos", type=Path, default=Path("/dev/shm/worker_scaling"), help="default: %(default)s")
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR", help="cut photographs from your pictures")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of measurements.jsonl and the CSV files")
    return parser.parse_args(arguments)


# --- what is measured -------------------------------------------------------------------------------------------------


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that contains it
        return False


def reason_against(arm: str) -> str | None:
    """Return why an arm cannot run on this machine, or None."""
    if arm in GPU_ARMS and not torch.cuda.is_available():
        return "it needs a GPU"
    if arm.startswith("dali") and not is_installed("nvidia.dali"):
        return "DALI is not installed: pip install nvidia-dali-cuda130"
    if arm.startswith("spdl-io") and not (is_installed("spdl.io") and is_installed("av")):
        return "it needs spdl.io, and the FFmpeg libraries of PyAV: pip install spdl-io av"
    return None


def ffmpeg_environment(links: Path) -> dict[str, str]:
    """Return the environment in which spdl.io finds the FFmpeg libraries of PyAV's wheel, with links in this folder.

    The wheel's names have a hash, which spdl.io does not know: libavutil-5809ad29.so.60.26.102 is libavutil.so.60.
    """
    package = importlib.util.find_spec("av")
    if package is None or package.origin is None:
        return dict(os.environ)
    libraries = Path(package.origin).parents[1] / "av.libs"
    for library in libraries.glob("lib*.so.*"):
        if name := re.match(r"(lib(?:av|sw)\w+)-\w+(\.so\.\d+)", library.name):
            (links / "".join(name.groups())).symlink_to(library)
    paths = [str(links), str(libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(paths)}


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Return the processes in order: the most workers come first within a repeat, and arms change place in the next."""
    cores = len(os.sched_getaffinity(0))
    four = tuple(workload for workload in options.workloads if workload in FOUR)
    groups = [four] * bool(four) + [(workload,) for workload in options.workloads if workload in RECIPES]
    counts = {(group, arm): options.workers or counts_of(group, arm, cores) for group in groups for arm in options.arms}
    numbers = sorted({number for every in counts.values() for number in every}, reverse=True)
    return [
        Job(
            kind=kind,
            workloads=group,
            arm=arm,
            workers=number,
            photographs=NAMES * options.count if group == four else min(options.count, -(-options.count // 4) * number),
            epochs=options.epochs,
            seconds=options.seconds,
            repeat=repeat,
        )
        for repeat in range(options.repeats)
        for group in groups
        for kind in options.kinds
        for number in numbers
        for arm in (options.arms if repeat % 2 == 0 else options.arms[::-1])
        if number in counts[group, arm] and counts_of(group, arm, cores)
    ]


def counts_of(group: tuple[str, ...], arm: str, cores: int) -> tuple[int, ...]:
    """Return the default numbers of workers of an arm, none if it does not have these workloads."""
    if group[0] in FOUR:
        return FOUR_COUNTS.get(arm, ())
    if arm not in RECIPE_ARMS or (arm in BASE_ARMS and group != ("base",)):
        return ()
    if arm in MOST_WORKERS_ARMS:
        return (cores,)
    fewer = (1, 2, 4, 8, 12, 16, 32, 64) if arm in SCALING_ARMS else (1, 4)
    return (*(count for count in fewer if count < cores), cores)


def photographs_of(job: Job, options: argparse.Namespace) -> Path:
    """Return the folder of a job's photographs, made if it is absent: evenly chosen links where an epoch has others."""
    folder: Path = options.photos / job.kind
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(PHOTOS), job.kind, str(folder), "--count", str(options.count), "--names", "1"]
        subprocess.run([*command, *(["--from", str(options.source)] if options.source else [])], check=True)
    files = sorted(path for path in folder.glob("*/*") if path.is_file())
    if len(files) != options.count:
        sys.exit(f"{folder} must hold {options.count} photographs, found {len(files)}; say --count or --photos DIR")
    if job.photographs == len(files):
        return folder
    chosen = folder.with_name(f"{job.kind}_{job.photographs}")
    if not chosen.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
            for number in range(job.photographs):
                file = files[number * len(files) // job.photographs]
                link = Path(partial) / "photos" / file.parent.name / f"{number:06d}{file.suffix}"
                link.parent.mkdir(parents=True, exist_ok=True)
                link.hardlink_to(file)
            (Path(partial) / "photos").rename(chosen)
    return chosen


# --- measuring --------------------------------------------------------------------------------------------------------


def measured(job: Job, folder: Path, environment: dict[str, str]) -> Record:
    """Measure in a new process."""
    load, busy = os.getloadavg()[0], psutil.cpu_percent(interval=0.3) / 100
    if busy > BUSY_SHARE:
        print(f"other processes use {busy:.0%} of this machine's cores; the next figure is too low", flush=True)
    command = [sys.executable, str(HERE / "arms.py"), json.dumps({**asdict(job), "folder": str(folder)})]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=True, env=environment)
    cores = os.cpu_count() or 1
    before = {"load_before": load, "busy_cores_before": busy * cores}
    return {
        "job": asdict(job),
        "metrics": {workload: {**metrics, **before} for workload, metrics in json.loads(done.stdout).items()},
        "cpu_count": cores,
        "machine": machine(),
        "versions": " ".join([versions(), *other_versions(job.arm)]),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def other_versions(arm: str) -> Iterator[str]:
    """Yield the versions of packages that this arm alone needs."""
    dali, spdl_io = ("nvidia-dali-cuda120", "nvidia-dali-cuda130"), ("spdl-io", "av")
    for package in dali if arm.startswith("dali") else spdl_io if arm.startswith("spdl-io") else ():
        with suppress(metadata.PackageNotFoundError):
            yield f"{package} {metadata.version(package)}"


# --- results ----------------------------------------------------------------------------------------------------------


def write_tables(folder: Path, records: Sequence[Record]) -> None:
    """Write workloads.csv for the four workloads and results.csv for recipes, where any of these was measured."""
    of_recipes = [record for record in records if not set(record["metrics"]) <= {*FOUR}]
    for name, chosen in (
        ("workloads.csv", [one for one in records if one not in of_recipes]),
        ("results.csv", of_recipes),
    ):
        if chosen:
            write_results(folder / name, rows_of(chosen))


def rows_of(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return the rows of a CSV file: median and range over the repeats, and where they were measured."""
    groups: dict[tuple[str, str, str], list[tuple[float, Record]]] = {}
    for record in records:
        for workload, metrics in record["metrics"].items():
            text = text_of(workload, record["job"])
            for metric, value in metrics.items():
                groups.setdefault((record["job"]["arm"], text, metric), []).append((value, record))
    origin = ("machine", "versions", "commit", "date")
    return [
        {
            "arm": arm,
            "workload": workload,
            "metric": metric,
            "unit": UNITS[metric],
            **spread([value for value, _ in members]),
            **{name: " / ".join(dict.fromkeys(record[name] for _, record in members)) for name in origin},
        }
        for (arm, workload, metric), members in groups.items()
    ]


def text_of(workload: str, job: dict[str, Any]) -> str:
    """Return the column `workload`."""
    if workload in FOUR:
        return f"{workload}: {job['kind']}; workers={job['workers']}"
    return f"{job['kind']}: {RECIPES[workload]}; batch=128; workers={job['workers']}"


def comparisons(records: Iterable[Record]) -> Iterator[str]:
    """For each workload the medians, and gpuflow's as a multiple of each arm's."""
    rates: dict[str, dict[str, float]] = {}
    for row in rows_of(records):
        if row["metric"] == "images_per_s":
            rates.setdefault(row["workload"], {})[row["arm"]] = float(row["value"])
    for workload, arms in rates.items():
        yield workload
        for arm, value in arms.items():
            ratio = (
                f"  gpuflow / {arm}: {arms['gpuflow'] / value:.2f}" if "gpuflow" in arms and arm != "gpuflow" else ""
            )
            yield f"  {arm:18} {value:8,.0f} images/s{ratio}"


if __name__ == "__main__":
    main()
