"""Measures the time and the accuracy of whole trainings by loader: `python experiments/epoch_time/run.py`.

Each training runs in a new process and is appended to measurements.jsonl at once; results.csv is then written again.
What measurements.jsonl has is not measured again, so an interrupted run continues where it stopped. At the end it
prints README's tables. README.md defines arms and metrics.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuflow.tools.bench import Log, commit, machine, spread, versions, write_results

HERE = Path(__file__).parent
PHOTOS = HERE.parent / "real_data" / "photos.py"
ARMS = ("dataloader-pil", "dataloader-tensors", "dali", "gpuflow", "gpuflow-wrap")
DEFAULT_ARMS, BASE = ARMS[:-1], "dataloader-pil"
"""BASE: the arm whose time is 100%."""
PARALLEL = {"none": "", "dp": "DataParallel", "ddp": "DistributedDataParallel"}
VALIDATION_SHARE = 8
"""Photographs of training for each photograph of validation."""
SECONDS = 500.0
"""A training that takes longer is ended."""
ORIGIN = ("machine", "versions", "commit", "date")

Record = dict[str, Any]
Job = dict[str, Any]


def main() -> None:
    options = parsed()
    log, failures = Log(options.out / "measurements.jsonl"), []
    done = [record["job"] for record in log.records]
    for job in jobs_of(options):
        if job in done:
            continue
        try:
            record = measured(job, options)
        except (subprocess.SubprocessError, json.JSONDecodeError, IndexError) as error:
            failures.append(f"{brief(job)}: {error}")
            print(failures[-1], flush=True)
            continue
        log.append(record)
        write_results(options.out / "results.csv", rows_of(log.records))
        print(brief(job), " ".join(f"{name}={value:.4g}" for name, value in record["metrics"].items()), flush=True)
    if log.records:
        print(tables(rows_of(log.records)))
    if failures:
        sys.exit("\n".join(["Failed; the same command measures the rest:", *failures]))


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--arms", nargs="+", default=list(DEFAULT_ARMS), choices=ARMS)
    parser.add_argument("--models", nargs="+", default=["resnet18", "resnet50"], metavar="MODEL", help="of torchvision")
    parser.add_argument("--parallel", nargs="+", default=["none"], choices=PARALLEL, help="on all GPUs that torch sees")
    parser.add_argument("--count", type=int, default=16000, help="photographs to train on (default: %(default)s)")
    parser.add_argument("--size", type=int, default=224, help="pixels (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="of each GPU (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="each with another seed")
    parser.add_argument("--photos", type=Path, default=Path("/dev/shm/epoch_time"), help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of measurements.jsonl and results.csv")
    options = parser.parse_args(arguments)
    if "dali" in options.arms and importlib.util.find_spec("nvidia.dali") is None:
        print("dali is left out: nvidia-dali-cuda130 is not installed", flush=True)
        options.arms.remove("dali")
    return options


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Return the trainings in order: the arms of a model one after the other, in each second repeat from the last."""
    names = ("device", "count", "size", "batch", "epochs")
    common = {name: getattr(options, name) for name in names}
    return [
        {"arm": arm, "model": model, "parallel": parallel, "repeat": repeat, **common}
        for repeat in range(options.repeats)
        for parallel in options.parallel
        for model in options.models
        for arm in (options.arms if repeat % 2 == 0 else options.arms[::-1])
    ]


def brief(job: Job) -> str:
    return f"{job['repeat']} {job['model']:9} {job['parallel']:4} {job['arm']:18}"


# --- measuring --------------------------------------------------------------------------------------------------------


def measured(job: Job, options: argparse.Namespace) -> Record:
    """Train in a new process, or in one for each GPU."""
    count, ranks = job["count"], ranks_of(job)
    folders = {
        "train": photographs(options.photos / f"train_{count}", count, seed=0),
        "val": photographs(options.photos / f"val_{count}", -(-count // VALIDATION_SHARE), seed=1),
    }
    settings = {name: value for name, value in job.items() if name not in ("repeat", "count")}
    settings |= {name: str(folder) for name, folder in folders.items()}
    settings |= {"seed": job["repeat"], "workers": max(1, len(os.sched_getaffinity(0)) // ranks)}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launcher = torchrun if job["parallel"] == "ddp" else []
    command = [sys.executable, *launcher, str(HERE / "arms.py"), json.dumps(settings)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=True)
    answer = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    return {
        "job": job,
        "metrics": answer["metrics"],
        "gpus": gpus_of(job),
        "machine": ", ".join(filter(None, [answer["device"], machine()])),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def gpus_of(job: Job) -> int:
    """Return how many GPUs train; on a CPU how many processes."""
    if job["parallel"] == "none":
        return 1
    if job["device"] == "cpu":
        return 2 if job["parallel"] == "ddp" else 1
    import torch

    return torch.cuda.device_count()


def ranks_of(job: Job) -> int:
    return gpus_of(job) if job["parallel"] == "ddp" else 1


def photographs(folder: Path, count: int, seed: int) -> Path:
    """Make a folder of photographs by class, if it is absent."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(PHOTOS), "same", str(folder), "--count", str(count), "--names", "1"]
    subprocess.run([*command, "--seed", str(seed)], stdout=subprocess.DEVNULL, timeout=SECONDS, check=True)
    return folder


# --- results ----------------------------------------------------------------------------------------------------------


def workload_of(record: Record) -> str:
    job, gpus = record["job"], record["gpus"]
    parts = [f"{job['model']}, {job['count']} photographs at {job['size']}", f"batch={job['batch']}"]
    parts += [f"epochs={job['epochs']}"]
    parts += [f"gpus={gpus} by {PARALLEL[job['parallel']]}"] if job["parallel"] != "none" else []
    return "; ".join(parts)


def unit_of(metric: str) -> str:
    if metric == "images_per_s":
        return "images/s"
    return {"s": "s", "mb": "MB"}.get(metric.rpartition("_")[2], "share")


def rows_of(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return the rows of results.csv: median and range over the repeats. `time_share`: of BASE's in the same repeat."""
    records = list(records)
    base = {(workload_of(one), one["job"]["repeat"]): one["metrics"]["run_s"] for one in records if is_base(one)}
    groups: dict[tuple[str, str, str], list[tuple[float, Record]]] = {}
    for record in records:
        workload, metrics = workload_of(record), dict(record["metrics"])
        if time := base.get((workload, record["job"]["repeat"])):
            metrics["time_share"] = metrics["run_s"] / time
        for metric, value in metrics.items():
            groups.setdefault((record["job"]["arm"], workload, metric), []).append((value, record))
    return [
        {
            "arm": arm,
            "workload": workload,
            "metric": metric,
            "unit": unit_of(metric),
            **spread([value for value, _ in members]),
            **{name: " / ".join(dict.fromkeys(record[name] for _, record in members)) for name in ORIGIN},
        }
        for (arm, workload, metric), members in groups.items()
    ]


def is_base(record: Record) -> bool:
    return bool(record["job"]["arm"] == BASE)


def tables(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a Markdown table of each workload."""
    workloads: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        arms = workloads.setdefault(row["workload"], {})
        arms.setdefault(row["arm"], {})[row["metric"]] = float(row["value"])
    return "\n\n".join("\n".join(table(workload, arms)) for workload, arms in workloads.items())


def table(workload: str, arms: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield the lines of a workload's table. With several GPUs it has their memory in place of each epoch's seconds."""
    metrics = dict.fromkeys(metric for figures in arms.values() for metric in figures)
    if "gpus=" in workload:
        memory = [metric for metric in metrics if metric.endswith("_mb")]
        columns = {metric: (metric.replace("_mb", ", MB").replace("_", " "), ",.0f") for metric in memory}
    else:
        epochs = [metric for metric in metrics if re.fullmatch(r"epoch_\d+_s", metric)]
        columns = {metric: (metric.replace("_s", ", s").replace("_", " "), ",.1f") for metric in epochs}
    columns |= {"images_per_s": ("images/s", ",.0f"), "run_s": ("whole run, s", ",.1f")}
    columns |= {"time_share": ("share of DataLoader's time", ".0%"), "accuracy": ("accuracy", ".1%")}
    columns = {metric: column for metric, column in columns.items() if metric in metrics}
    yield f"**{workload}**"
    yield ""
    yield f"| arm | {' | '.join(title for title, _ in columns.values())} |"
    yield f"|{' --- |' * (len(columns) + 1)}"
    for arm, figures in arms.items():
        cells = [format(figures[name], form) if name in figures else "-" for name, (_, form) in columns.items()]
        yield f"| {arm} | {' | '.join(cells)} |"


def tables_of(path: Path) -> str:
    """Return the tables of a results.csv."""
    with path.open(newline="", encoding="utf-8") as file:
        return tables(csv.DictReader(file))


if __name__ == "__main__":
    main()
