"""Scores models on test images that were decoded in other ways than those of their training.

    python experiments/consistency/run.py                                              # on a CPU
    python experiments/consistency/run.py --model resnet18 --size 112 --device cuda \\
        --count 4000 --test-count 2000 --out runs/consistency                          # on an NVIDIA GPU

Each combination of task, seed and training is appended to measurements.jsonl when it is done, and results.csv is
written again. The same command continues an interrupted run. README.md defines ways and metrics.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import statistics
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from images import PARTS, TASKS, make_images
from models import MODELS, logits_of
from ways import LEFT_OUT, TRAINING, files_of, missing, serving

from gpuflow.tools.bench import Log, commit, machine, versions, write_results

HERE = Path(__file__).parent
SHARES = {"all": 1.0, "5%": 0.05}
ENGINES = ("fp32", "fp16")
"""Engines besides torch, which every way is scored with. They get the images of the training's own way."""
OWN_WAY = "validation"
"""Names the service that prepares images exactly as the training did. All others are compared with it."""
UNITS = {
    "recall": "%",
    "precision": "%",
    "recall_difference": "points",
    "precision_difference": "points",
    "flips": "%",
    "logit_distance": "standard deviations",
}
_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""The 97.5% quantile of Student's t by degrees of freedom."""

Record = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    torch.set_num_threads(options.threads)
    log = Log(options.out / "measurements.jsonl")
    print(*(f"left out: {name}: {reason}" for name, reason in {**LEFT_OUT, **_missing()}.items()), sep="\n")
    done = {_key(record) for record in log.records}
    for seed in range(options.seeds):
        for task in options.tasks:
            jobs = [_job(task, seed, way, options) for way in options.train]
            pending = [job for job in jobs if _key(job) not in done]
            for record in measured(pending, options):
                log.append(record)
                write_results(options.out / "results.csv", rows_of(log.records))
                print(_key(record), f"recall {record['scores']['all'][OWN_WAY]['torch']['recall']:.1f}", flush=True)
    write_results(options.out / "results.csv", rows_of(log.records))
    print(*table(rows_of(log.records)), sep="\n")


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    trainings = [name for name in TRAINING if missing(name) is None]
    if "gpu decode" in trainings:
        trainings.remove("gpu decode (emulated)")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--train", nargs="+", choices=trainings, default=trainings, help="ways of the training")
    parser.add_argument("--seeds", type=int, choices=range(2, 11), default=5, metavar="N")
    parser.add_argument("--model", choices=MODELS, default="filters")
    parser.add_argument("--size", type=int, default=80, help="height and width of the model's input")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the model runs")
    parser.add_argument("--count", type=int, default=560, help="training images of each task and seed")
    parser.add_argument("--test-count", type=int, default=308)
    parser.add_argument("--threads", type=int, default=1, help="of torch on the CPU")
    parser.add_argument("--images", type=Path, default=Path("data/consistency"), help="where the images are made")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of measurements.jsonl and results.csv")
    return parser.parse_args(arguments)


def _missing() -> dict[str, str]:
    names = dict.fromkeys([*TRAINING, "gpu decode, fast DCT (emulated)", "hugging face slow", "dali cpu", "dali mixed"])
    return {name: reason for name in names if (reason := missing(name)) is not None}


def _job(task: str, seed: int, way: str, options: argparse.Namespace) -> Record:
    settings = {name: getattr(options, name) for name in ("model", "size", "count", "test_count")}
    return {"task": task, "seed": seed, "train": way, **settings}


def _key(record: Record) -> tuple[Any, ...]:
    return tuple(record[name] for name in ("task", "seed", "train", "model", "size", "count", "test_count"))


# --- measuring --------------------------------------------------------------------------------------------------------


def measured(jobs: Sequence[Record], options: argparse.Namespace) -> Iterator[Record]:
    """Train and score the jobs of one task and seed, which share their images."""
    if not jobs:
        return
    task, seed = jobs[0]["task"], jobs[0]["seed"]
    folders = {part: options.images / f"{task}_{seed}_{options.count}_{options.test_count}" / part for part in PARTS}
    for part, count in zip(PARTS, (options.count, options.test_count), strict=True):
        make_images(folders[part], task, part, count=count, seed=seed)
    labels, truth = (_labels(folder) for folder in folders.values())
    classes = int(labels.max()) + 1
    tests = {name: way(folders["test"], options.size, options.device) for name, way in serving().items()}
    for job in jobs:
        way = TRAINING[job["train"]]
        images = way(folders["train"], options.size, options.device)
        tests[OWN_WAY] = way(folders["test"], options.size, options.device)
        scores = {}
        for share, fraction in SHARES.items():
            chosen = _share(labels, fraction, seed)
            model = MODELS[options.model](images[chosen], labels[chosen], classes, seed, options.device)
            logits = _logits(model, tests, options.device)
            if share == "all":
                for engine in ENGINES:
                    logits[OWN_WAY, engine] = logits_of(model, tests[OWN_WAY], engine, options.device)
            scores[share] = _scores(logits, truth)
        yield {**job, "scores": scores, "origin": _origin()}


def _origin() -> dict[str, str]:
    """Return where this is measured: machine, versions, commit and date."""
    found = {package.metadata["Name"].lower(): package.version for package in metadata.distributions()}
    others = [f"{name} {found[name]}" for name in ("pillow", "torchpipe", "transformers") if name in found]
    return {
        "machine": machine(),
        "versions": " ".join([versions(), *others]),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def _labels(folder: Path) -> torch.Tensor:
    return torch.tensor([int(path.parent.name.removeprefix("class_")) for path in files_of(folder)])


def _share(labels: torch.Tensor, fraction: float, seed: int) -> torch.Tensor:
    """Return the indices of a random part of each class."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for label in sorted(set(labels.tolist())):
        members = (labels == label).nonzero()[:, 0]
        order = torch.randperm(len(members), generator=generator)
        parts.append(members[order[: max(1, round(fraction * len(members)))]])
    return torch.cat(parts)


def _logits(model: torch.nn.Module, tests: dict[str, torch.Tensor], device: str) -> dict[tuple[str, str], torch.Tensor]:
    """Return the logits of each way by torch. Images that are equal bit for bit are computed once."""
    known: dict[str, torch.Tensor] = {}
    logits = {}
    for name, images in tests.items():
        digest = hashlib.sha256(images.contiguous().numpy().tobytes()).hexdigest()
        if digest not in known:
            known[digest] = logits_of(model, images, "torch", device)
        logits[name, "torch"] = known[digest]
    return logits


def _scores(logits: dict[tuple[str, str], torch.Tensor], truth: torch.Tensor) -> dict[str, dict[str, dict[str, float]]]:
    """Return the metrics of each way and engine."""
    own = logits[OWN_WAY, "torch"]
    scores: dict[str, dict[str, dict[str, float]]] = {}
    recall, precision = _quality(own.argmax(1), truth)
    for (name, engine), found in logits.items():
        top = found.argmax(1)
        own_recall, own_precision = _quality(top, truth)
        scores.setdefault(name, {})[engine] = {
            "recall": own_recall,
            "precision": own_precision,
            "recall_difference": own_recall - recall,
            "precision_difference": own_precision - precision,
            "flips": 100 * float((top != own.argmax(1)).float().mean()),
            "logit_distance": float((found - own).abs().mean() / own.std()),
        }
    return scores


def _quality(top: torch.Tensor, truth: torch.Tensor) -> tuple[float, float]:
    """Return recall and precision in percent: of class 1 where there are two, else the mean over the classes."""
    classes = sorted(set(truth.tolist()))
    recalls, precisions = [], []
    for label in classes[1:] if len(classes) == 2 else classes:
        hits = float(((top == label) & (truth == label)).sum())
        recalls.append(100 * hits / float((truth == label).sum()))
        precisions.append(100 * hits / max(1.0, float((top == label).sum())))
    return statistics.mean(recalls), statistics.mean(precisions)


# --- results ----------------------------------------------------------------------------------------------------------


def rows_of(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return the rows of results.csv: the mean over the seeds, low and high of its 95% confidence interval."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    origins: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for record in records:
        for share, ways in record["scores"].items():
            for name, engines in ways.items():
                for engine, metrics in engines.items():
                    settings = {
                        "train": record["train"],
                        "data": share,
                        "engine": engine,
                        "model": record["model"],
                        "size": record["size"],
                        "images": record["count"],
                    }
                    workload = "; ".join([record["task"], *(f"{key}={value}" for key, value in settings.items())])
                    for metric, value in metrics.items():
                        groups.setdefault((name, workload, metric), []).append(value)
                        origins.setdefault((name, workload, metric), []).append(record["origin"])
    return [
        {
            "arm": key[0],
            "workload": key[1],
            "metric": key[2],
            "unit": UNITS[key[2]],
            **interval(values),
            **{name: " / ".join(dict.fromkeys(origin[name] for origin in origins[key])) for name in origins[key][0]},
        }
        for key, values in groups.items()
    ]


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean of the seeds' values and its 95% confidence interval by Student's t."""
    mean, count = statistics.mean(values), len(values)
    half = _T[count - 1] * statistics.stdev(values) / count**0.5 if count > 1 else 0.0
    texts = {"value": mean, "low": mean - half, "high": mean + half}
    return {**{name: f"{number:.5g}" for name, number in texts.items()}, "repeats": count}


def table(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the document's rows in its order, then today's stacks, as Markdown; each task has recall and precision."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for one in rows:
        task, *settings = one["workload"].split("; ")
        train, share, engine = (setting.split("=", 1)[1] for setting in settings[:3])
        found[task, train, share, one["arm"], engine, one["metric"]] = one
    tasks = list(dict.fromkeys(key[0] for key in found))
    yield f"| training | data | service | {' | '.join(f'{task}: recall | precision' for task in tasks)} |"
    yield "| --- " * (3 + 2 * len(tasks)) + "|"
    for line in _lines({key[1] for key in found}, dict.fromkeys(key[3] for key in found)):
        cells = []
        for task in tasks:
            for metric in ("recall", "precision"):
                value, difference = (found.get((task, *line, name)) for name in (metric, f"{metric}_difference"))
                cells.append("-" if value is None or difference is None else _cell(value, difference))
        train, share, service, engine = line
        yield f"| {train} | {share} | {service}, {engine} | {' | '.join(cells)} |"


def _lines(trainings: set[str], services: Iterable[str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield training, share of the data, service and engine of each row."""
    gpu = "gpu decode" if "gpu decode" in trainings else "gpu decode (emulated)"
    for share in SHARES:
        yield from (("cpu decode", share, service, "torch") for service in ("cpu decode", gpu))
    yield gpu, "all", gpu, "torch"
    yield from ((gpu, "all", OWN_WAY, engine) for engine in ENGINES)
    others = [service for service in services if service not in (OWN_WAY, "gpuflow")]
    for share in SHARES:
        yield from (("gpuflow", share, service, "torch") for service in (*others, "gpuflow"))


def _cell(value: dict[str, Any], difference: dict[str, Any]) -> str:
    mean, low, high = (float(difference[side]) for side in ("value", "low", "high"))
    change = f" ({mean:+.1f} ± {(high - low) / 2:.1f})" if mean or low != high else " (0)"
    return f"{float(value['value']):.1f}{change}"


if __name__ == "__main__":
    main()
