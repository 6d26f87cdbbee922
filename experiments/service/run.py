"""Compares the served graph with the plain way, with the same engine: `python experiments/service/run.py [--quick]`.

On a machine with an NVIDIA GPU: `--device cuda`, and again with `--cores 3`. After every process it updates results.csv
next to this file, keeping the rows of other machines and settings; at the end it draws the chart. See README.md.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CONFIG = HERE / "photos.yaml"
DATA = Path("data/service")
RESULTS, LISTS, PROCESSES = HERE / "results.csv", HERE / "lists.csv", HERE / "processes.csv"
SIZES = {"500x375": (500, 375), "1080x1080": (1080, 1080)}
PHOTOGRAPHS = 128
UNITS = {"qps": "requests/s", "images_per_s": "images/s", "rss_mb": "MB", "mean_batch": "images", "bound_per_s": "1/s"}
ARMS = {"cpu": ("plain", "graph-cpu"), "cuda": ("plain", "plain-eager", "graph-cpu", "graph-gpu")}
LIST_ARMS = {"cpu": ("plain", "plain-batch", "graph-cpu"), "cuda": ("plain", "plain-batch", "graph-cpu", "graph-gpu")}
"""Where a request has several images: with --images."""
PROCESS_ARMS = ("graph-cpu",)
"""Where the CPU decodes: with --processes, one arm for each value."""
BOUNDS = {
    "cpu": ("engine only", "CPU decode only", "scheduler only"),
    "cuda": ("engine only", "CPU decode only", "GPU decode only", "scheduler only"),
}
GPU_MODEL = (
    "serve.model.batch=32",
    "serve.model.instances=1",
    "serve.model.precision=bfloat16",
)
"""Overrides for the model on a GPU; `--set serve.model.compile=true` and the like change it for every arm."""
NO_GRAPHS = "serve.model.cuda_graphs=false"
PLAIN_EAGER = "plain-eager"
"""The plain way without CUDA graphs, as guides for beginners write it."""
_PROCESS_SECONDS = 600.0
_QUIET_PERCENT = 15


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """What is measured. name: of measure.py. title: in the results. overrides: of photos.yaml, for this arm alone."""

    name: str
    title: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A served model. name: in the results. photographs: directories of the images that are sent."""

    name: str
    overrides: tuple[str, ...]
    photographs: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--arch", help="a torchvision model; by default resnet18 on a CPU, resnet50 on a GPU")
    parser.add_argument("--cores", type=int, help="how many cores are used; by default all")
    parser.add_argument("--engines", default="", help="torch, onnxruntime; by default both on a CPU, torch on a GPU")
    parser.add_argument("--arms", help="plain, plain-eager, graph-cpu, graph-gpu, separated by commas; by default all")
    parser.add_argument("--images", default="1", help="images in a request, such as 1,4,16; the rows go to lists.csv")
    parser.add_argument(
        "--processes", help="values of run.processes, such as 0,4,8,auto, where the CPU decodes; into processes.csv"
    )
    parser.add_argument("--photographs", default=",".join(SIZES), help="sizes; a CPU's onnxruntime gets the first")
    parser.add_argument("--clients", default="1,5,10,20,40")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3, help="rounds; 0 measures only the bounds")
    parser.add_argument(
        "--bounds", type=int, default=2, help="rounds of the engine, of decoding and of the scheduler, each alone"
    )
    parser.add_argument(
        "--tries", type=int, default=1, help="most tries of a measurement, until no other process disturbs it"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of photos.yaml")
    parser.add_argument(
        "--label", default="", help="appended to the model's name; by default 'CUDA graphs' where they are used"
    )
    parser.add_argument("--out", type=Path, help="by default results.csv, lists.csv or processes.csv next to this file")
    parser.add_argument(
        "--resume", action="store_true", help="continue a run that was cut off, by its file OUT.rounds.jsonl"
    )
    parser.add_argument("--quick", action="store_true", help=f"one short round, into {DATA}, to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.repeats, options.bounds, options.clients = 0.5, 1, 1, "1,4"
        if options.images != "1":  # a list of 16 takes a second on two cores
            options.seconds, options.bounds, options.clients = 3.0, 0, "1"
        options.out = options.out or DATA / "quick.csv"
    if (
        options.device == "cuda"
        and options.engines in ("", "torch")
        and not options.label
        and NO_GRAPHS not in options.set
    ):
        options.label = "CUDA graphs"
    charted = options.images == "1" and options.processes is None
    options.out = options.out or (RESULTS if charted else PROCESSES if options.processes else LISTS)
    sizes = options.photographs.split(",")
    photographs = {size: str(make_photographs(size)) for size in sizes}
    rounds = Rounds(options, models(options, photographs))
    arms = arms_of(options)
    for repeat in range(options.repeats):
        rounds.measure(f"round {repeat}", arms if repeat % 2 == 0 else tuple(reversed(arms)))
    bounds = expanded(BOUNDS[options.device], options.processes)
    for repeat in range(options.bounds):
        rounds.measure(f"bounds {repeat}", bounds)
    for line in compare(rounds.rows()):
        print(line)
    if options.repeats and charted:  # the chart shows no bounds
        from gpuflow.plots import lines

        for path in lines.load_test(options.out, options.out.with_name("service")):
            print("wrote", path)


def arms_of(options: argparse.Namespace) -> tuple[Arm, ...]:
    """The arms that are chosen, one for each of `--processes` where the CPU decodes."""
    every = LIST_ARMS if options.images != "1" else ARMS
    names = PROCESS_ARMS if options.processes else every[options.device]
    return expanded(tuple(options.arms.split(",")) if options.arms else names, options.processes)


def expanded(names: Iterable[str], processes: str | None) -> tuple[Arm, ...]:
    """Arms by name; of one that decodes on the CPU one for each of the values of `run.processes`."""
    arms = []
    for name in names:
        if processes and name in (*PROCESS_ARMS, "CPU decode only"):
            values = processes.split(",")
            arms += [Arm(name=name, title=f"{name} processes={n}", overrides=(f"run.processes={n}",)) for n in values]
        elif name == PLAIN_EAGER:
            arms.append(Arm(name="plain", title=name, overrides=(NO_GRAPHS,)))
        else:
            arms.append(Arm(name=name, title=name))
    return tuple(arms)


class Rounds:
    """Measures one arm after the other, and writes the results after each of them.

    What every process measured is also kept in a file next to the results, by which a run that was cut off continues.
    """

    def __init__(self, options: argparse.Namespace, models: Sequence[Model]) -> None:
        from gpuflow.tools.bench import Log

        self._options, self._models = options, models
        self._found: dict[tuple[str, str, str], list[float]] = {}
        self._device = "cpu"
        self._log = Log(options.out.with_suffix(".rounds.jsonl"))
        if not options.resume:
            self._log.discard(lambda entry: True)
        self._done: dict[str, Any] = {entry["key"]: entry["answer"] for entry in self._log.records}

    def measure(self, round_name: str, arms: Iterable[Arm]) -> None:
        """Each arm once with each model, in a separate process; arms without a model run once."""
        options = self._options
        for arm in arms:
            for number, model in enumerate(self._models):
                if number and arm.name.endswith(("decode only", "scheduler only")):
                    continue
                job = {
                    "arm": arm.name,
                    "config": str(CONFIG),
                    "overrides": [*model.overrides, *options.set, *arm.overrides],
                    "device": options.device,
                    "photographs": model.photographs,
                    "clients": [int(word) for word in options.clients.split(",")],
                    "seconds": options.seconds,
                    "cores": options.cores,
                    "tries": options.tries,
                    "images": [int(word) for word in options.images.split(",")],
                }
                answer = self._answer(f"{round_name}: {json.dumps(job)}", job)
                self._device = answer["device"]
                title = self._title(model.name if arm.name in (*LIST_ARMS["cuda"], "engine only") else "")
                for workload, figures in answer["figures"].items():
                    print(f"{arm.title:16} {title}; {workload:24} {_brief(figures)}", flush=True)
                    for metric, value in figures.items():
                        self._found.setdefault((arm.title, f"{title}; {workload}", metric), []).append(value)
                write(options.out, self.rows())

    def _answer(self, key: str, job: dict[str, Any]) -> Any:
        """What `run` returns, or what it returned before the run was cut off."""
        if key not in self._done:
            answer = run(job)
            self._log.append({"key": key, "answer": answer})
            self._done[key] = answer
        return self._done[key]

    def _title(self, model: str) -> str:
        options = self._options
        label = f"{model} ({options.label})" if model and options.label else model
        cores = options.cores or len(os.sched_getaffinity(0))
        gpu = [self._device.removeprefix("NVIDIA ").split()[0]] if options.device == "cuda" else []
        return ", ".join([*filter(None, [label]), *gpu, f"{cores} cores"])

    def rows(self) -> list[dict[str, Any]]:
        from gpuflow.tools.bench import machine, row

        where = machine() if self._device == "cpu" else f"{self._device}, {machine()}"
        made = []
        for (arm, workload, metric), values in self._found.items():
            unit = UNITS.get(metric) or ("%" if metric.endswith("percent") else "ms")
            made.append({**row(arm, workload, metric, values, unit), "machine": where})
        return made


def run(job: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "measure.py"), json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PROCESS_SECONDS, check=False)
    if done.returncode != 0:
        sys.exit(f"{job['arm']} failed:\n{done.stderr.strip()[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def _brief(figures: dict[str, float]) -> str:
    names = {
        "bound_per_s": "{:.0f}/s",
        "qps": "{:.1f}/s",
        "images_per_s": "{:.0f} images/s",
        "tp50_ms": "TP50 {:.1f}",
        "tp99_ms": "TP99 {:.1f} ms",
    }
    words = [text.format(figures[name]) for name, text in names.items() if name in figures]
    if figures.get("others_cpu_percent", 0) > _QUIET_PERCENT:
        words.append(f"NOT QUIET: others took {figures['others_cpu_percent']:.0f}% of a core")
    return "  ".join(words)


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write results; they replace earlier ones of the same workloads on the same machine."""
    from gpuflow.tools.bench import write_results

    new = {(row["workload"], row["arm"], row["machine"]) for row in rows}
    kept: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            kept = [row for row in csv.DictReader(file) if (row["workload"], row["arm"], row["machine"]) not in new]
    write_results(path, [*kept, *rows])


def compare(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Ratios of throughput and latency, graph to plain way."""
    values = {(row["workload"], row["arm"], row["metric"]): float(row["value"]) for row in rows}
    for (workload, arm, metric), qps in values.items():
        for base in ("plain", PLAIN_EAGER):
            if metric != "qps" or arm in ("plain", PLAIN_EAGER) or (workload, base, metric) not in values:
                continue
            ours, plain = (
                {name: values.get((workload, which, name), float("nan")) for name in ("qps", "tp50_ms", "tp99_ms")}
                for which in (arm, base)
            )
            tp50, tp99 = (ours[name] / plain[name] for name in ("tp50_ms", "tp99_ms"))
            rate = qps / plain["qps"]
            yield f"{workload:44} {arm:10} throughput {rate:.2f}x  TP50 {tp50:.2f}x  TP99 {tp99:.2f}x of {base}"


def models(options: argparse.Namespace, photographs: dict[str, str]) -> list[Model]:
    """The model in the file format of each engine."""
    arch = options.arch or ("resnet18" if options.device == "cpu" else "resnet50")
    engines = options.engines or ("torch,onnxruntime" if options.device == "cpu" else "torch")
    checkpoint = make_checkpoint(arch)
    found = []
    for engine in engines.split(","):
        path = checkpoint if engine == "torch" else make_onnx(checkpoint, next(iter(photographs.values())))
        first_alone = engine == "onnxruntime" and options.device == "cpu"
        found.append(
            Model(
                name=f"{arch} by {engine}",
                overrides=(f"serve.model.file={path}", *(GPU_MODEL if options.device == "cuda" else ())),
                photographs=tuple(photographs.values())[: 1 if first_alone else None],
            )
        )
    return found


def make_photographs(size: str) -> Path:
    """JPEGs of one size: sample photographs scaled and cropped, with noise so that their file size is usual."""
    import numpy as np
    from PIL import Image

    from gpuflow.tools.samples import make_samples

    directory, (width, height) = DATA / size, SIZES[size]
    if directory.exists():
        return directory
    make_samples(DATA / "samples", PHOTOGRAPHS)
    made = directory.with_name(f"{size}.partial")
    made.mkdir(exist_ok=True)
    for number, path in enumerate(sorted((DATA / "samples").glob("*/*.jpg"))):
        with Image.open(path, formats=["JPEG"]) as image:
            photo = image.convert("RGB")
        scale = max(width / photo.width, height / photo.height)
        sides = max(width, round(photo.width * scale)), max(height, round(photo.height * scale))
        photo = photo.resize(sides, Image.Resampling.LANCZOS).crop((0, 0, width, height))
        noise_HWC = np.random.default_rng(number).integers(-5, 6, (height, width, 3))
        pixels_HWC = (np.asarray(photo, np.int16) + noise_HWC).clip(0, 255).astype(np.uint8)
        encoded = io.BytesIO()
        Image.fromarray(pixels_HWC).save(encoded, "JPEG", quality=90)
        (made / f"{number:03}.jpg").write_bytes(encoded.getvalue())
    made.rename(directory)
    return directory


def make_checkpoint(arch: str) -> Path:
    """A model with random weights, as `gpuflow train` writes it."""
    import torch
    from torchvision import models as torchvision_models

    from gpuflow import stage_table
    from gpuflow.config import read_config

    path = DATA / f"{arch}.pt"
    pipeline = read_config(CONFIG, stage_table(), []).programs["serve"].pipeline
    torch.manual_seed(0)
    state = {
        "arch": arch,
        "classes": [str(number) for number in range(1000)],
        "model": torchvision_models.get_model_builder(arch)(weights=None).state_dict(),
        "preprocessing": pipeline.fingerprint,
        "stages": pipeline.lines,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)
    return path


def make_onnx(checkpoint: Path, photographs: str) -> Path:
    """The same model as `gpuflow export --onnx` writes it, checked against torch."""
    from gpuflow import stage_table
    from gpuflow.config import read_config
    from gpuflow.serve.export import export_model

    path = checkpoint.with_suffix(".onnx")
    config = read_config(CONFIG, stage_table(), [f"source.folder={photographs}"])
    export_model(config, path, checkpoint=checkpoint, data=Path(photographs))
    return path


if __name__ == "__main__":
    main()
