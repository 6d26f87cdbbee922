"""Kills a training once and counts which samples it has trained on, with several loaders, under torchrun and Ray.

    gpuflow samples data/resume -n 96
    python experiments/resume/run.py data/resume

It writes results.csv in this file's folder. Arms whose library is not installed are left out, and named.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Literal, get_args

import arms
import launch
from law import outcome
from training import HERE, Job

EPOCHS = 2
NEEDED = {"gpuflow": "gpuflow", "torchdata": "torchdata", "litdata": "litdata", "gpuflow under Ray": "ray"}
Kill = Literal["worker", "node"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("photos", type=Path, help="one directory for each class")
    parser.add_argument("--repeats", type=int, choices=range(1, 100), default=3, metavar="N")
    parser.add_argument("--arms", nargs="+", choices=NEEDED, default=list(NEEDED), metavar="ARM")
    parser.add_argument("--out", type=Path, default=HERE / "results.csv", metavar="FILE")
    options = parser.parse_args(arguments)
    from gpuflow.tools.bench import row, write_results

    photos = str(options.photos.resolve())
    samples = len(arms.photographs(photos))
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        for arm in options.arms:
            if importlib.util.find_spec(NEEDED[arm]) is None:
                print(f"{arm}: left out, because {NEEDED[arm]} is not installed")
                continue
            start: Callable[[Job], None] = launch.by_torchrun
            if arm == "gpuflow under Ray":
                start = functools.partial(launch.by_ray, cluster=stack.enter_context(launch.ray_cluster()))
            data = photos
            if arm == "litdata":
                data = str(Path(temporary) / "litdata")
                arms.write_streamed(photos, data)
            for kill in get_args(Kill):
                for repeat in range(options.repeats):
                    folder = Path(temporary) / f"{arm} {kill} {repeat}"
                    for metric, value in measured(arm, kill, repeat, data, folder, start, samples):
                        found[arm, f"{kill} killed", metric].append(value)
    units = {"failed": "runs"}
    rows = [row(*key, values, units.get(key[2], "samples")) for key, values in found.items()]
    write_results(options.out, rows)


def measured(
    arm: str, kill: Kill, repeat: int, data: str, folder: Path, start: Callable[[Job], None], samples: int
) -> list[tuple[str, float]]:
    """Return each metric of one training. Its steps are the same for every arm: the seed is the repeat."""
    steps = EPOCHS * (samples // arms.BATCH)
    kill_at = random.Random(repeat).randrange(1, steps)
    name = arm.partition(" ")[0]
    job = Job(arm=name, data=data, folder=str(folder), epochs=EPOCHS, kill=kill, kill_at=kill_at)
    try:
        start(job)
    except RuntimeError as error:
        print(f"{arm}, {kill} killed after step {kill_at}: {error}")
        return [("failed", 1)]
    counts = asdict(outcome(folder / "logs", samples=samples, epochs=EPOCHS))
    print(f"{arm}, {kill} killed after step {kill_at} of {steps}: {counts}")
    ranks = counts.pop("ranks")
    assert ranks == ((2, 1) if kill == "node" else (2, 2)), ranks
    return [("failed", 0), *counts.items()]


if __name__ == "__main__":
    main()
