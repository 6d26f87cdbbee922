"""Compares the accuracies of one training by timm's train.py, with two loaders, and by `gpuflow train`.

    TIMM_TRAIN=/path/to/train.py python experiments/trainers/run.py

Each training is a command in a new process and is appended to measurements.jsonl at once; results.csv is then written
again. What measurements.jsonl has is not trained again, so an interrupted run goes on. README.md defines the arms.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuflow.tools.bench import Log, row, write_results
from gpuflow.tools.samples import make_samples

HERE = Path(__file__).parent
ARMS = ("timm", "timm-gpuflow", "gpuflow-train")
VALIDATION_SHARE = 8
"""Photographs of training for each photograph of validation."""
SIZES = ("model", "count", "size", "batch", "epochs", "lr", "device")
PATCH = {
    "\nfrom timm.layers import": "\nfrom gpuflow.integrations.timm import create_loader\nfrom timm.layers import",
    "common_loader_kwargs = dict(": "common_loader_kwargs = dict(seed=args.seed, ",
}
"""The differences of docs/timm_train.md."""

Job = dict[str, Any]
Record = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    log, failures = Log(options.out / "measurements.jsonl"), []
    done = [record["job"] for record in log.records]
    for job in jobs_of(options):
        if job in done:
            continue
        try:
            record = {"job": job, **trained(job, options)}
        except (subprocess.SubprocessError, OSError, LookupError, ValueError) as error:
            failures.append(f"{job['arm']}, seed {job['seed']}: {error}")
            continue
        log.append(record)
        write_results(options.out / "results.csv", rows_of(log.records))
        print(f"{job['arm']:13} seed {job['seed']}  accuracy {record['accuracy']:.4f}", flush=True)
    if log.records:
        print(tables_of(options.out / "results.csv"))
    if failures:
        sys.exit("\n".join(["Failed; the same command trains the rest:", *failures]))


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--model", default="resnet18", help="of timm (default: %(default)s)")
    parser.add_argument("--count", type=int, default=4000, help="photographs to train on (default: %(default)s)")
    parser.add_argument("--size", type=int, default=64, help="pixels (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--train-script", type=Path, default=Path(os.environ.get("TIMM_TRAIN", "")), metavar="FILE")
    parser.add_argument("--photos", type=Path, default=Path("data/trainers/photos"), help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of measurements.jsonl and results.csv")
    options = parser.parse_args(arguments)
    if not options.train_script.is_file() and set(options.arms) - {"gpuflow-train"}:
        parser.error("--train-script or TIMM_TRAIN must name train.py of timm's repository")
    return options


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Return the trainings in order: all arms of a seed, then of the next one."""
    sizes = {name: getattr(options, name) for name in SIZES}
    return [{"arm": arm, "seed": seed, **sizes} for seed in range(options.seeds) for arm in options.arms]


# --- training ---------------------------------------------------------------------------------------------------------


def photographs(folder: Path, count: int) -> Path:
    """Make photographs in train/ and validation/, a folder a class, and photos.csv, which lists both."""
    folder = folder / str(count)
    make_samples(folder / "train", count, seed=0)
    make_samples(folder / "validation", -(-count // VALIDATION_SHARE), seed=1)
    with (folder / "photos.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["path", "label", "part"])
        for name, part in (("train", "train"), ("validation", "val")):
            for path in sorted((folder / name).glob("*/*.jpg")):
                table.writerow([path.relative_to(folder), path.parent.name, part])
    return folder


def shorter(size: int) -> int:
    """Return the shorter side before the central crop."""
    return size * 9 // 8


def timm_command(job: Job, script: Path, photos: Path, out: Path) -> list[str]:
    """Return the command of timm's train.py. Its crop share is just below the exact one: timm rounds the side down."""
    classes = sum(path.is_dir() for path in (photos / "train").iterdir())
    values = {
        "data-dir": photos, "model": job["model"], "num-classes": classes, "img-size": job["size"],
        "batch-size": job["batch"], "epochs": job["epochs"], "lr": job["lr"], "seed": job["seed"],
        "device": job["device"], "opt": "sgd", "momentum": 0.9, "weight-decay": 0, "sched": "cosine", "min-lr": 0,
        "warmup-epochs": 0, "smoothing": 0, "color-jitter": 0, "train-interpolation": "bilinear",
        "interpolation": "bilinear", "crop-pct": job["size"] / (shorter(job["size"]) + 0.01),
        "workers": min(8, len(os.sched_getaffinity(0))), "output": out, "experiment": "run",
    }  # fmt: skip
    normalize = ["--mean", "0.485", "0.456", "0.406", "--std", "0.229", "0.224", "0.225"]
    options = [f"--{key}={value}" for key, value in values.items()]
    return [sys.executable, str(script), "--sched-on-updates", *normalize, *options]


def gpuflow_command(job: Job, photos: Path, out: Path) -> list[str]:
    size = job["size"]
    values = {
        "source.listing": photos / "photos.csv", "source.seed": job["seed"],
        "pipelines.train.stages.random_resized_crop.size": size,
        "pipelines.val.stages.resize.shorter": shorter(size), "pipelines.val.stages.center_crop.size": size,
        "pipelines.train.batch.size": job["batch"], "pipelines.val.batch.size": job["batch"],
        "train.model": f"timm:{job['model']}", "train.epochs": job["epochs"], "train.lr": job["lr"], "train.out": out,
    }  # fmt: skip
    overrides = [f"{key}={value}" for key, value in values.items()]
    return [sys.executable, "-m", "gpuflow", "train", str(HERE / "photos.yaml"), *overrides, "--device", job["device"]]


def trained(job: Job, options: argparse.Namespace) -> Record:
    """Train in a new process, and return the accuracy of the last validation and the seconds of the command."""
    photos = photographs(options.photos, job["count"]).absolute()
    with tempfile.TemporaryDirectory() as folder:
        out, file, column, scale = Path(folder), "run/summary.csv", "eval_top1", 100
        if job["arm"] == "gpuflow-train":
            command, file, column, scale = gpuflow_command(job, photos, out), "metrics.csv", "val_accuracy", 1
        elif job["arm"] == "timm":
            command = timm_command(job, options.train_script, photos, out)
        else:
            command = timm_command(job, patched(options.train_script, out / "train_gpuflow.py"), photos, out)
        start = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        seconds = time.perf_counter() - start
        with (out / file).open(newline="") as table:
            *_, last = csv.DictReader(table)
    return {"accuracy": float(last[column]) / scale, "seconds": seconds}


def patched(script: Path, copy: Path) -> Path:
    """Write train.py with the differences of docs/timm_train.md."""
    text = script.read_text()
    for old, new in PATCH.items():
        if text.count(old) != 1:
            raise ValueError(
                f"{script} has {text.count(old)} times {old.strip()!r}: it is not the train.py of timm 1.0"
            )
        text = text.replace(old, new)
    copy.write_text(text)
    return copy


# --- results ----------------------------------------------------------------------------------------------------------


def groups_of(records: Iterable[Record]) -> Mapping[tuple[str, str], list[Record]]:
    """Return the records by workload and arm."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        job = record["job"]
        workload = f"{job['model']}, {job['count']} photographs at {job['size']}; batch={job['batch']}; "
        workload += f"epochs={job['epochs']}; lr={job['lr']}; {job['device']}"
        groups.setdefault((workload, job["arm"]), []).append(record)
    return groups


def moments(records: Sequence[Record]) -> tuple[float, float]:
    """Return mean and standard deviation of the accuracies; the latter is NaN for one seed."""
    values = [record["accuracy"] for record in records]
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else float("nan")


def rows_of(records: Iterable[Record]) -> list[dict[str, Any]]:
    rows = []
    for (workload, arm), members in groups_of(records).items():
        mean, deviation = moments(members)
        rows.append(row(arm, workload, "accuracy", [member["accuracy"] for member in members], "share"))
        rows.append(row(arm, workload, "accuracy_mean", [mean], "share"))
        rows.append(row(arm, workload, "accuracy_sd", [deviation], "share"))
        rows.append(row(arm, workload, "seconds", [member["seconds"] for member in members], "s"))
    return rows


def tables_of(path: Path) -> str:
    """Return README's tables of a results.csv: mean, standard deviation and range of the accuracies of each arm."""
    with path.open(newline="") as file:
        rows = {(row["workload"], row["arm"], row["metric"]): row for row in csv.DictReader(file)}
    lines: list[str] = []
    for (workload, arm, metric), known in rows.items():
        if metric != "accuracy":
            continue
        if (title := f"**{workload}**") not in lines:
            lines += ["", title, "", "| arm | mean | standard deviation | lowest | highest | seeds |"]
            lines += ["| --- | --- | --- | --- | --- | --- |"]
        mean, deviation = (rows[workload, arm, f"accuracy_{name}"]["value"] for name in ("mean", "sd"))
        figures = " | ".join(f"{100 * float(text):.2f}%" for text in (mean, deviation, known["low"], known["high"]))
        lines.append(f"| {arm} | {figures} | {known['repeats']} |")
    return "\n".join(lines[1:])


if __name__ == "__main__":
    main()
