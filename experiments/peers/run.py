"""Compares the full training input of gpuflow with that of other loaders, on photographs of two sizes.

    python experiments/peers/run.py

Each arm runs in a new process, and the arms in turn within each repeat. Each measurement is appended to
measurements.jsonl at once; results.csv and gpu.csv are then written again. What measurements.jsonl has is not measured
again, so an interrupted run continues where it stopped. README.md defines arms and metrics.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from arms import ARMS, Job

from gpuflow.tools.bench import Log, commit, machine, spread, versions, write_results
from gpuflow.tools.samples import encoded, load_photos, noisy_crop, write

HERE = Path(__file__).parent
SIZES = {"500x375": (500, 375), "1080x1080": (1080, 1080)}
COUNTS = {"500x375": 8192, "1080x1080": 2048}
NAMES, BATCH = 4, 128
"""Names of each file, so that an epoch lasts; images in a batch."""
UNITS = {
    "images_per_s": "images/s",
    "cpu_s_per_1000": "s",
    "pss_mb": "MB",
    "first_batch_s": "s",
    "import_s": "s",
    "busy_cores_before": "cores",
}
ARM_SECONDS, PREPARE_SECONDS = 240.0, 900.0
BUSY_SHARE = 0.1
"""The share of the cores that others may use before an arm starts, before a warning is printed."""

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    kind: str
    arm: str
    workers: int
    repeat: int

    def __str__(self) -> str:
        return f"{self.repeat} {self.kind:9} {self.arm:18} {self.workers} workers"


def main() -> None:
    options = parsed()
    log, problems = Log(options.out / "measurements.jsonl"), {}
    done = {Measurement(**record["job"]) for record in log.records}
    for job in jobs_of(options):
        if job in done or job.arm in problems:
            continue
        try:
            record = measured(job, options)
        except (subprocess.SubprocessError, json.JSONDecodeError) as error:
            problems[job.arm] = f"failed, the same command measures it again: {error}"
            continue
        if "missing" in record:
            problems[job.arm] = record["missing"]
            continue
        log.append(record)
        for name, gpu in (("results.csv", False), ("gpu.csv", True)):
            if rows := rows_of(record for record in log.records if ARMS[record["job"]["arm"]].gpu == gpu):
                write_results(options.out / name, rows)
        print(job, " ".join(f"{name}={value:.4g}" for name, value in record["metrics"].items()), flush=True)
    print(*(f"not measured: {arm}: {reason}" for arm, reason in problems.items()), sep="\n")


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="default: the cores")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement (default: %(default)s)")
    parser.add_argument("--count", type=int, help="photographs of each kind (default: 8192 and 2048)")
    parser.add_argument("--photos", type=Path, default=Path("/dev/shm/peers"), help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of measurements.jsonl and the CSV files")
    return parser.parse_args(arguments)


def jobs_of(options: argparse.Namespace) -> list[Measurement]:
    return [
        Measurement(kind=kind, arm=arm, workers=options.workers, repeat=repeat)
        for repeat in range(options.repeats)
        for kind in options.kinds
        for arm in (options.arms if repeat % 2 == 0 else options.arms[::-1])
    ]


# --- photographs ------------------------------------------------------------------------------------------------------


def make_photographs(folder: Path, size: tuple[int, int], count: int) -> None:
    """Make photographs of one size, in a folder for each class, each under NAMES names."""
    photos = load_photos()
    with ProcessPoolExecutor() as pool:
        for start in range(0, count, 512):
            numbers = range(start, min(start + 512, count))
            pictures = [photos[list(photos)[number % len(photos)]] for number in numbers]
            for number, data in zip(
                numbers, pool.map(photograph, pictures, numbers, [size] * len(numbers)), strict=True
            ):
                path = folder / f"{number % len(photos):02}" / f"{number:05}-0.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                write(path, data)
                for name in range(1, NAMES):
                    path.with_name(f"{number:05}-{name}.jpg").hardlink_to(path)


def photograph(picture: Any, number: int, size: tuple[int, int]) -> bytes:
    return encoded(*noisy_crop(picture, np.random.default_rng([0, number]), [size]))


def photographs_of(kind: str, options: argparse.Namespace) -> Path:
    """Return the folder of a kind's photographs, made if it is absent."""
    count = options.count or COUNTS[kind]
    folder: Path = options.photos / f"{kind}_{count}"
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        make_photographs(unfinished, SIZES[kind], count)
        unfinished.rename(folder)
    return folder


# --- measuring --------------------------------------------------------------------------------------------------------


def measured(job: Measurement, options: argparse.Namespace) -> Record:
    """Measure in a new process. An arm that cannot run here has the record {missing: reason}."""
    folder, form = photographs_of(job.kind, options), ARMS[job.arm].input
    source = folder if form == "folder" else folder.with_name(f"{folder.name}.{form}")
    arm = Job(arm=job.arm, input=str(source), workers=job.workers, batch=BATCH, seconds=options.seconds)
    if not source.exists():
        if "missing" in (found := ran(replace(arm, input=""))):
            return found
        command = [sys.executable, str(HERE / "inputs.py"), form, str(folder), str(source)]
        subprocess.run(command, stdout=subprocess.DEVNULL, timeout=PREPARE_SECONDS, check=True)
    busy = psutil.cpu_percent(interval=0.3) / 100
    if busy > BUSY_SHARE:
        print(f"other processes use {busy:.0%} of this machine's cores; the next figure is too low", flush=True)
    if "missing" in (found := ran(arm)):
        return found
    return {
        "job": asdict(job),
        "metrics": {**found["result"], "busy_cores_before": busy * (os.cpu_count() or 1)},
        "machine": machine(),
        "versions": versions(),
        "library": found["version"],
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def ran(job: Job) -> Record:
    command = [sys.executable, str(HERE / "arms.py"), json.dumps(asdict(job))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=ARM_SECONDS, check=True)
    found: Record = json.loads(done.stdout.splitlines()[-1])
    return found


def rows_of(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return rows of results: median and range over the repeats, and where they were measured.

    All have the versions of all arms' libraries, because a figure shows all arms.
    """
    records = list(records)
    libraries = dict.fromkeys(record["library"] for record in records)
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        job = record["job"]
        workload = f"{job['kind']}: random_resized_crop 224, flip, normalize; batch={BATCH}; workers={job['workers']}"
        for metric in record["metrics"]:
            groups.setdefault((job["arm"], workload, metric), []).append(record)
    origin = ("machine", "commit", "date")
    return [
        {
            "arm": arm,
            "workload": workload,
            "metric": metric,
            "unit": UNITS[metric],
            **spread([member["metrics"][metric] for member in members]),
            **{name: " / ".join(dict.fromkeys(member[name] for member in members)) for name in origin},
            "versions": " ".join([*dict.fromkeys(record["versions"] for record in records), *filter(None, libraries)]),
        }
        for (arm, workload, metric), members in groups.items()
    ]


if __name__ == "__main__":
    main()
