"""Measures what the loader costs a training on several GPUs, and which part of the loader costs it.

    python experiments/ranks/run.py --gpus 1,2,4 [--photos /dev/shm/photos] [--models resnet18 resnet50]
    python experiments/ranks/run.py --gpus 2 --models resnet18 --arms gpuflow "decoding only" --resume

One process a GPU, with DistributedDataParallel over NCCL. All arms take turns within one process group. Each figure is
printed and appended to measurements.jsonl as soon as it is measured; --resume measures only what is missing there.
After each workload results.csv is written. See README.md.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from one_rank import ARMS, WARM_UP_STEPS, Job, Record, free_port
from one_rank import main as measure
from torch.multiprocessing.spawn import ProcessException, spawn

from gpuflow.tools.bench import Log, commit, machine, row, versions, write_results

HERE = Path(__file__).parent
UNITS = {
    "images_per_s": "images/s",
    "step_ratio": "ratio",
    "call_ms": "ms",
    "two_at_a_time": "ratio",
    "interval_ms": "ms",
    "interval_p95_ms": "ms",
}
ON_CPU = ("resident", "gpuflow", "busy interpreter", "resident without DDP", "gpuflow without DDP")
"""The arms that need no GPU."""
START_SECONDS, SLOWEST = 180.0, 6
"""How long the processes may take to start; how many times as long as a resident batch an arm may take."""
ORIGIN = ("machine", "versions", "commit", "date")


# --- the log and its table --------------------------------------------------------------------------------------------


def rows_of(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Rows of results.csv: the median and range over the repeats, and where they were measured."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        for metric in record["metrics"]:
            groups.setdefault((record["arm"], record["workload"], metric), []).append(record)
    rows = []
    for (arm, workload, metric), members in groups.items():
        values = [member["metrics"][metric] for member in members]
        origin = {name: " / ".join(dict.fromkeys(member[name] for member in members)) for name in ORIGIN}
        rows.append({**row(arm, workload, metric, values, UNITS[metric]), **origin})
    return rows


def write_table(path: Path, records: Iterable[Record]) -> None:
    """Write the rows of these records; rows of other arms and workloads stay."""
    rows = rows_of(records)
    measured = {(one["arm"], one["workload"]) for one in rows}
    others = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            others = [one for one in csv.DictReader(file) if (one["arm"], one["workload"]) not in measured]
    write_results(path, [*others, *rows])


# --- what to measure --------------------------------------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    """`1,2,4` as numbers of GPUs."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError(text)
    return found


def at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=numbers, default=[1, 2], metavar="1,2,4", help="numbers of GPUs, one rank each")
    parser.add_argument("--photos", type=Path, default=Path("/dev/shm/photos"), help="folder (default: %(default)s)")
    parser.add_argument(
        "--models",
        nargs="+",
        default=["resnet18", "resnet50"],
        help="of torchvision; the name may follow `compiled_`, or `graph_` for steps that are CUDA graphs",
    )
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS, metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--repeats", type=at_least_one, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a measurement (default: %(default)s)")
    parser.add_argument(
        "--warm-up",
        type=int,
        default=256,
        metavar="N",
        help="batches that each rank loads first, so that most files are known; 0 measures a first epoch, too",
    )
    parser.add_argument(
        "--settling",
        type=int,
        metavar="N",
        help="steps that each loader feeds after that, unmeasured (default: 300, on a CPU 2)",
    )
    parser.add_argument("--batch", type=at_least_one, default=256, help="of each rank (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="keep what is measured already and measure the rest")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of measurements.jsonl and results.csv")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to see that the script runs"
    )
    options = parser.parse_args(arguments)
    if options.settling is None:
        options.settling = 300 if options.device == "cuda" else 2
    if options.device == "cpu":
        options.arms = [arm for arm in options.arms if arm in ON_CPU]
    return options


def workload_of(options: argparse.Namespace, gpus: int, model: str) -> str:
    return f"{gpus} GPU{'s' if gpus > 1 else ''}; {model}; {options.photos.name}; batch={options.batch} a rank"


def turns(missing: Iterable[tuple[str, int]]) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Each repeat that lacks figures, with its arms in order.

    The resident batch comes first, because the others are compared with it, and even if its own figure is not missing.
    The others have the reverse order in every other repeat, so that a machine that becomes slower affects all alike.
    """
    found = []
    absent = set(missing)
    for repeat in sorted({repeat for _, repeat in absent}):
        arms = [arm for arm in ARMS if arm != "resident" and (arm, repeat) in absent]
        found.append((repeat, ("resident", *(arms if repeat % 2 == 0 else reversed(arms)))))
    return tuple(found)


def job_of(options: argparse.Namespace, gpus: int, model: str, records: Sequence[Record], origin: Record) -> Job:
    """The job that measures what these records lack of one workload."""
    workload = workload_of(options, gpus, model)
    done = {(record["arm"], record["repeat"]) for record in records if record["workload"] == workload}
    chosen = dict.fromkeys(["resident", *options.arms])
    missing = frozenset((arm, repeat) for arm in chosen for repeat in range(options.repeats)) - done
    return Job(
        ranks=gpus,
        model=model,
        photos=str(options.photos.resolve()),
        device=options.device,
        batch=options.batch,
        seconds=options.seconds,
        warm_up=options.warm_up,
        settling=options.settling,
        workload=workload,
        arms=turns(missing),
        missing=missing,
        log=options.out / "measurements.jsonl",
        origin=origin,
    )


# --- processes --------------------------------------------------------------------------------------------------------


def run_ranks(job: Job) -> None:
    """Run the processes of a job. Raises what one of them raised, or TimeoutError; then all of them have ended."""
    context = spawn(measure, (job, free_port()), nprocs=job.ranks, join=False)  # type: ignore[no-untyped-call]
    turns = sum(len(names) for _, names in job.arms)
    limit = START_SECONDS + turns * (SLOWEST * job.seconds + WARM_UP_STEPS)
    end = time.monotonic() + limit
    try:
        while not context.join(timeout=5):
            if time.monotonic() > end:
                raise TimeoutError(f"its processes did not end within {limit:.0f} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def main() -> None:
    options = parsed()
    options.out.mkdir(parents=True, exist_ok=True)
    log, table = options.out / "measurements.jsonl", options.out / "results.csv"
    workloads = [(gpus, model) for gpus in options.gpus for model in options.models]
    again = {(workload_of(options, *one), arm) for one in workloads for arm in ("resident", *options.arms)}
    Log(log).discard(lambda one: not options.resume and (one["workload"], one["arm"]) in again)
    origin = {
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
    there = torch.cuda.device_count() if options.device == "cuda" else max(options.gpus)
    if there and options.device == "cuda":
        origin["machine"] = f"{there} of {torch.cuda.get_device_name()}, {origin['machine']}"
    failures = []
    for gpus, model in workloads:
        job = job_of(options, gpus, model, Log(log).records, origin)
        if not job.missing:
            print(f"{job.workload}: is measured already", flush=True)
            continue
        if gpus > there:
            failures.append(f"{job.workload}: this machine has {there} GPUs; choose --gpus")
            continue
        try:
            run_ranks(job)
        except (TimeoutError, ProcessException) as error:
            failures.append(f"{job.workload}: {error}")
        write_table(table, Log(log).records)
    for failure in failures:
        print(failure, file=sys.stderr)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
