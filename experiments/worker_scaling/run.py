"""Measures images per second by number of workers, for gpuflow and other loaders on this machine's CPU.

    python experiments/worker_scaling/run.py

Each measurement runs in a new process and is appended to measurements.jsonl at once; results.csv is then written again.
What measurements.jsonl has is not measured again, so an interrupted run continues where it stopped. The arms take turns
within each repeat. README.md defines arms and metrics.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from gpuflow.tools.bench import commit, machine, read_log, spread, versions, write_log, write_results

HERE = Path(__file__).parent
PHOTOS = HERE.parent / "real_data" / "photos.py"
RECIPES = {
    "base": "random_resized_crop 224, flip, normalize",
    "color_jitter": "crop, flip, color_jitter",
    "rand_augment": "crop, flip, rand_augment",
    "rotate": "crop, flip, rotate",
    "two_views": "two views of SimCLR",
}
ARMS = (
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
"""Arms that run with all numbers of workers by default, that run with the largest number alone, and that have no
recipes but `base`."""
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
SECONDS = 300.0
BUSY_SHARE = 0.1
"""The share of the cores that others may use before an arm starts, before a warning is printed."""

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One measurement. photographs: in an epoch."""

    kind: str
    recipe: str
    arm: str
    workers: int
    photographs: int
    epochs: int
    repeat: int

    def __str__(self) -> str:
        return f"{self.repeat} {self.kind:5} {self.recipe:12} {self.arm:18} {self.workers:3} workers"


def main() -> None:
    options = parsed()
    log, failures = options.out / "measurements.jsonl", []
    records = read_log(log)
    write_log(log, records)
    done = {Job(**record["job"]) for record in records}
    for job in jobs_of(options):
        if job in done:
            continue
        folder = photographs_of(job, options)
        try:
            record = measured(job, folder)
        except (subprocess.SubprocessError, json.JSONDecodeError) as error:
            failures.append(f"{job}: {error}")
            print(failures[-1], flush=True)
            continue
        records.append(record)
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        write_results(options.out / "results.csv", rows_of(records))
        print(job, " ".join(f"{name}={value:.4g}" for name, value in record["metrics"].items()), flush=True)
    print(*comparisons(records), sep="\n")
    if failures:
        sys.exit("\n".join(["Failed; the same command measures the rest:", *failures]))


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=["same", "web"], help="kinds of photographs")
    parser.add_argument("--recipes", nargs="+", default=["base"], choices=RECIPES)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--workers", nargs="+", type=int, help="of every arm; by default see README.md")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--count", type=int, default=4500, help="photographs (default: %(default)s)")
    parser.add_argument("--photos", type=Path, default=Path("/dev/shm/worker_scaling"), help="default: %(default)s")
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR", help="cut photographs from your pictures")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of measurements.jsonl and results.csv")
    return parser.parse_args(arguments)


# --- what is measured -------------------------------------------------------------------------------------------------


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Each repeat begins with the most workers, then come the scaling arms with fewer, then the other arms."""
    cores = len(os.sched_getaffinity(0))
    counts = options.workers or sorted({cores, *(count for count in (1, 2, 4, 8, 12, 16, 32, 64) if count < cores)})
    few = options.workers or [count for count in counts if count in (1, 4, cores)]
    most = max(counts)
    steps = [(kind, recipe, [most], options.arms) for recipe in options.recipes for kind in options.kinds]
    for arms, numbers in ((SCALING_ARMS, counts), (set(ARMS) - {*SCALING_ARMS, *MOST_WORKERS_ARMS}, few)):
        fewer = sorted({number for number in numbers if number < most}, reverse=True)
        chosen = [arm for arm in options.arms if arm in arms]
        steps += [(kind, recipe, fewer, chosen) for recipe in options.recipes for kind in options.kinds]
    return [
        Job(
            kind=kind,
            recipe=recipe,
            arm=arm,
            workers=number,
            photographs=min(options.count, -(-options.count // 4) * number),
            epochs=options.epochs,
            repeat=repeat,
        )
        for repeat in range(options.repeats)
        for kind, recipe, numbers, arms in steps
        for number in numbers
        for arm in (arms if repeat % 2 == 0 else arms[::-1])
        if recipe == "base" or arm not in BASE_ARMS
    ]


def photographs_of(job: Job, options: argparse.Namespace) -> Path:
    """Return the folder of a job's photographs, made if it is absent; fewer than all are evenly chosen links."""
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
    part = folder.with_name(f"{job.kind}_{job.photographs}")
    for number in range(job.photographs):
        file = files[number * len(files) // job.photographs]
        link = part / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.hardlink_to(file)
    return part


# --- measuring --------------------------------------------------------------------------------------------------------


def measured(job: Job, folder: Path) -> Record:
    """Measure in a new process."""
    load, busy = os.getloadavg()[0], psutil.cpu_percent(interval=0.3) / 100
    if busy > BUSY_SHARE:
        print(f"other processes use {busy:.0%} of this machine's cores; the next figure is too low", flush=True)
    command = [sys.executable, str(HERE / "arms.py"), json.dumps({**asdict(job), "folder": str(folder)})]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=True)
    cores = os.cpu_count() or 1
    return {
        "job": asdict(job),
        "metrics": {**json.loads(done.stdout), "load_before": load, "busy_cores_before": busy * cores},
        "cpu_count": cores,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


# --- results ----------------------------------------------------------------------------------------------------------


def rows_of(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return the rows of results.csv: median and range over the repeats, and where they were measured."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        job = record["job"]
        workload = f"{job['kind']}: {RECIPES[job['recipe']]}; batch=128; workers={job['workers']}"
        for metric in record["metrics"]:
            groups.setdefault((job["arm"], workload, metric), []).append(record)
    origin = ("machine", "versions", "commit", "date")
    return [
        {
            "arm": arm,
            "workload": workload,
            "metric": metric,
            "unit": UNITS[metric],
            **spread([member["metrics"][metric] for member in members]),
            **{name: " / ".join(dict.fromkeys(member[name] for member in members)) for name in origin},
        }
        for (arm, workload, metric), members in groups.items()
    ]


def comparisons(records: Iterable[Record]) -> Iterator[str]:
    """For each workload the medians of the last epoch, and gpuflow's as a multiple of each arm's."""
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
