"""Measures `gpuflow predict` without Ray, on one node of Ray and on two, each with some cores of this machine, and the
model alone.

    python experiments/predict_on_ray/run.py                # nodes of half of this machine's cores
    python experiments/predict_on_ray/run.py --model mobilenet_v3_small
    python experiments/predict_on_ray/run.py --count 400 --photos data/predict_on_ray     # to see that it runs

Each measurement is appended to measurements.jsonl, and results.csv is written again. The same command continues an
interrupted run.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torchvision

from gpuflow.tools.bench import Log, commit, machine, versions, write_results

HERE = Path(__file__).parent
PHOTOS = HERE.parent / "real_data" / "photos.py"
ARMS = {"without Ray": 0, "one node": 1, "two nodes": 2}
"""Arms by name, with their number of nodes of Ray."""
MODEL_ALONE = "model alone"
BATCH, BATCHES = 32, 20
"""Size and number of the batches with which the model alone is measured. photos.yaml has this size, too."""
NAMES = 10
"""Hard links to each photograph, because making that many photographs would take longer than predicting them."""
SECONDS = 1800
RAY = {"RAY_AUTH_MODE": "disabled"}
"""Ray 2.60 asks for the token that `~/.ray` may hold. These nodes are on one machine, so they go without."""

Record = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    log = Log(options.out / "measurements.jsonl")
    photos = options.photos / f"photographs_{options.count}"
    photos.parent.mkdir(parents=True, exist_ok=True)
    make = [PHOTOS, "same", photos, "--count", options.count // NAMES, "--names", NAMES]
    subprocess.run([sys.executable, *map(str, make)], check=True, timeout=SECONDS)
    model = options.photos / f"{options.model}.pt2"
    if not model.exists():
        save_model(options.model, model)
    done = {(record["workload"], record["arm"], record["repeat"]) for record in log.records}
    for repeat, arm in itertools.product(range(options.repeats), options.arms):
        if (workload(options), arm, repeat) not in done:
            if arm == MODEL_ALONE:
                speed = model_alone(options.model, options.cores)
            else:
                speed = options.count / measured(arm, photos, model, options.cores)
            log.append(record_of(arm, repeat, speed, options))
            write_results(options.out / "results.csv", rows_of(log.records))
            print(f"{arm}: {speed:,.0f} images/s", flush=True)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, MODEL_ALONE], default=[MODEL_ALONE, *ARMS])
    parser.add_argument("--cores", type=int, default=half, help="of a node, and of the run without Ray")
    parser.add_argument("--model", default="resnet18", help="of torchvision (default: %(default)s)")
    parser.add_argument("--count", type=int, default=100_000, help="photographs")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--photos", type=Path, default=Path("/dev/shm/predict_on_ray"), help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of measurements.jsonl and results.csv")
    return parser.parse_args(arguments)


def new_model(name: str) -> torch.nn.Module:
    """Return a model of torchvision with random weights."""
    torch.manual_seed(0)
    model: torch.nn.Module = torchvision.models.get_model(name, num_classes=14)
    return model.eval()


def save_model(name: str, path: Path) -> None:
    """Save the model for batches of any size."""
    sizes = ({0: torch.export.Dim("batch")},)
    torch.export.save(torch.export.export(new_model(name), (torch.zeros(2, 3, 224, 224),), dynamic_shapes=sizes), path)


def measured(arm: str, photos: Path, model: Path, cores: int) -> float:
    """Return the seconds of `gpuflow predict`, from the start of its process to its end."""
    overrides = [f"source.folder={photos}", f"serve.model.file={model}"]
    with cluster(ARMS[arm], cores) as address, tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "gpuflow", "predict", str(HERE / "photos.yaml"), *overrides]
        command += ["--out", f"{out}/predictions", "--device", "cpu", "--format", "csv"]
        if address:
            command += ["--on", "ray", address]
        begin = time.perf_counter()
        subprocess.run(
            on_cores(0, cores, command), check=True, timeout=SECONDS, stdout=subprocess.DEVNULL, env=os.environ | RAY
        )
        return time.perf_counter() - begin


def model_alone(name: str, cores: int) -> float:
    """Return the images/s of the model on batches that are in memory, in a process on the cores of the first node."""
    command = on_cores(0, cores, [sys.executable, str(Path(__file__).resolve()), MODEL_ALONE, name])
    done = subprocess.run(command, check=True, timeout=SECONDS, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


def run_model(name: str) -> float:
    """Return the images/s of the model in this process."""
    model, images = new_model(name), torch.rand(BATCH, 3, 224, 224)
    with torch.inference_mode():
        for _ in range(3):
            model(images)
        begin = time.perf_counter()
        for _ in range(BATCHES):
            model(images)
    return BATCH * BATCHES / (time.perf_counter() - begin)


def on_cores(node: int, cores: int, command: list[str]) -> list[str]:
    """Return the command for the cores of a node."""
    return ["taskset", "--cpu-list", f"{node * cores}-{(node + 1) * cores - 1}", *command]


@contextmanager
def cluster(nodes: int, cores: int) -> Iterator[str]:
    """Start a cluster and yield its address, empty without nodes. All of Ray on this machine is stopped at the end."""
    if not nodes:
        yield ""
        return
    from ray.util import get_node_ip_address

    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    address = f"{get_node_ip_address()}:{port}"  # a driver on this machine looks for the head there
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    head = ["--head", "--port", str(port), "--include-dashboard", "false"]
    try:
        for node in range(nodes):
            place = ["--address", address] if node else head
            start = [*ray, "start", *place, "--num-cpus", str(cores), "--num-gpus", "0"]
            subprocess.run(
                on_cores(node, cores, start), check=True, timeout=300, stdout=subprocess.DEVNULL, env=os.environ | RAY
            )
        yield address
    finally:
        subprocess.run(
            [*ray, "stop", "--force"], check=True, timeout=120, stdout=subprocess.DEVNULL, env=os.environ | RAY
        )


def workload(options: argparse.Namespace) -> str:
    return f"{options.model}; {options.count} photographs; {options.cores} cores a node"


def record_of(arm: str, repeat: int, speed: float, options: argparse.Namespace) -> Record:
    record = {"arm": arm, "repeat": repeat, "workload": workload(options), "images_per_s": speed}
    origin = {"machine": machine(), "versions": versions(), "commit": commit()}
    return {**record, **origin, "date": datetime.date.today().isoformat()}


def rows_of(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the rows of results.csv: the median of each arm, and its ratio to the run without Ray."""
    rows = []
    for work in dict.fromkeys(record["workload"] for record in records):
        of_workload = [record for record in records if record["workload"] == work]
        base = [record["images_per_s"] for record in of_workload if record["arm"] == "without Ray"]
        for arm in dict.fromkeys(record["arm"] for record in of_workload):
            found = [record for record in of_workload if record["arm"] == arm]
            speeds = [record["images_per_s"] for record in found]
            rows.append(row(found[-1], "images_per_s", "images/s", speeds, len(found)))
            if base:
                ratios = [speed / statistics.median(base) for speed in speeds]
                rows.append(row(found[-1], "ratio", "", ratios, len(found)))
    return rows


def row(record: Record, metric: str, unit: str, values: Sequence[float], repeats: int) -> dict[str, Any]:
    spread = {"value": statistics.median(values), "low": min(values), "high": max(values)}
    same = {name: record[name] for name in ("arm", "workload", "machine", "versions", "commit", "date")}
    return {**same, "metric": metric, "unit": unit, "repeats": repeats} | {
        name: f"{value:.3f}" for name, value in spread.items()
    }


if __name__ == "__main__":
    if sys.argv[1:2] == [MODEL_ALONE]:
        print(run_model(sys.argv[2]))
    else:
        main()
