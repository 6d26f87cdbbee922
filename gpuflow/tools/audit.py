"""`gpuflow audit`: from the lines of `run.audit`, how often a training that was restarted got each sample."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from gpuflow.arrays import Bools, Ints
from gpuflow.loader.sampler import Steps


@dataclass(slots=True)
class EpochAudit:
    """The deliveries of an epoch that the surviving run counts, on all ranks.

    name: the pipeline and the epoch.
    steps: of the latest loop, as of rank 0. drawn: whether a sample may come several times.
    counts, samples [positions]: how often each position was delivered, and the sample that belongs there.
    made: by rank, the number of steps of the latest loop.
    bad: by position a bad sample, and what replaced it, or -1.
    lost: how many deliveries no surviving state knows of.
    """

    name: str
    steps: Steps
    drawn: bool
    counts: Ints
    samples: Ints
    made: dict[int, int] = field(default_factory=dict)
    bad: dict[int, tuple[int, int]] = field(default_factory=dict)
    lost: int = 0

    def add(self, line: Mapping[str, Any]) -> None:
        """Count what a line says."""
        rows = slice(*line["positions"])
        self.counts[rows] += 1
        self.samples[rows] = line["indices"]
        for place, sample in line["bad"]:
            self.bad[rows.start + place] = sample, line["indices"][place]
            self.samples[rows.start + place] = sample
        self.made[line["rank"]] = line["step"] + 1

    def forget(self, gone: Bools) -> None:
        """Leave out what was delivered at these positions."""
        self.lost += int(self.counts[gone].sum())
        self.counts[gone] = 0
        self.bad = {position: pair for position, pair in self.bad.items() if not gone[position]}

    @property
    def reached(self) -> int:
        """Return the position up to which the latest loop delivered the epoch."""
        return min(self.steps.reached(max(self.made.values())), self.steps.size)

    @property
    def faults(self) -> dict[str, Ints]:
        """Return what is missing or was repeated. Missing samples have names once a whole epoch was delivered."""
        size, came = self.steps.size, self.samples[self.counts > 0]
        absent = np.setdiff1d(np.arange(size), came) if self.reached == size and not self.drawn else came[:0]
        samples, times = np.unique(came, return_counts=True)
        repeated = np.union1d(self.samples[self.counts > 1], samples[times > 1] if not self.drawn else [])
        missing = np.flatnonzero(self.counts[: self.reached] == 0)
        found = {"missing at positions": missing, "missing samples": absent, "repeated samples": repeated}
        return {name: np.asarray(numbers, np.int64) for name, numbers in found.items() if len(numbers)}

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints of the epoch. A sample that was left out is replaced by none."""
        return {
            "name": self.name,
            "samples": self.steps.size,
            "reached": self.reached,
            "lost": self.lost,
            "faults": {name: numbers.tolist() for name, numbers in self.faults.items()},
            "bad": [{"sample": old, "replaced_by": None if new < 0 else int(new)} for old, new in self.bad.values()],
        }

    def __str__(self) -> str:
        parts = [f"{self.name}: {self.reached:,} of {self.steps.size:,} samples"]
        parts += [f"{name} {_ranges(numbers)}" for name, numbers in self.faults.items()] or ["each exactly once"]
        parts += [f"{self.lost:,} deliveries lost at a restart are not counted"] if self.lost else []
        for old, new in self.bad.values():
            parts.append(f"bad sample {old} " + ("left out" if new < 0 else f"replaced by {new}"))
        return "; ".join(parts)


def read_lines(paths: Iterable[Path]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the lines of these files, and the places of damaged ones, as FILE:LINE.

    Raises:
        ValueError: there is no line of an audit. OSError: a file cannot be read.
    """
    lines: list[dict[str, Any]] = []
    damaged: list[str] = []
    for path in paths:
        for number, text in enumerate(path.read_bytes().splitlines(), 1):
            try:
                line = json.loads(text or "null")
                steps = line and Steps(**{key.name: line[key.name] for key in fields(Steps)})
                lines += [{**line, "steps": steps, "indices": np.array(line["indices"])}] if line else []
            except (ValueError, KeyError, TypeError):
                damaged.append(f"{path}:{number}")
    if not lines:
        raise ValueError("audit: needs files that run.audit names, got no line of one")
    return lines, damaged


def audit(lines: Iterable[dict[str, Any]]) -> list[EpochAudit]:
    """Return what the lines of all ranks and runs prove of each epoch of each pipeline.

    A loop that begins at a position delivers the epoch anew from there: the state that it restored knows nothing of
    what was delivered beyond, nor of later epochs.

    Examples:
        >>> line = {"pipeline": "train", "epoch": 0, "begun": 1, "rank": 0, "step": 0, "drawn": False, "bad": []}
        >>> line |= {"steps": Steps(size=3, batch_size=3), "positions": [0, 3], "indices": np.array([2, 0, 2])}
        >>> print(*audit([line]))
        train epoch 0: 3 of 3 samples; missing samples 1; repeated samples 2
    """
    epochs: dict[tuple[str, int], EpochAudit] = {}
    last: dict[str, EpochAudit] = {}
    begun = None
    for line in sorted(lines, key=lambda line: (line["pipeline"], line["begun"], line["step"])):
        key, steps = (line["pipeline"], line["epoch"]), line["steps"]
        if begun != (begun := (key, line["begun"], steps.rank)):
            epochs = {each: epoch for each, epoch in epochs.items() if each <= key}
            loop, positions = replace(steps, rank=0), np.arange(steps.size)
            new = EpochAudit(f"{key[0]} epoch {key[1]}", loop, line["drawn"], *np.zeros((2, steps.size), np.int64))
            epoch = last[key[0]] = epochs.setdefault(key, new)
            again = positions >= steps.start
            if epoch.steps == loop:  # other ranks may have begun it already
                again &= (positions - steps.start) % steps.stride // steps.batch_size == steps.rank
            else:
                epoch.steps, epoch.made = loop, {}
            epoch.forget(again)
        epochs[key].add(line)
    for epoch in last.values():  # where a run ended, its ranks need not be at the same step
        epoch.made = {0: min(epoch.made.values())}
        epoch.forget(np.arange(epoch.steps.size) >= epoch.reached)
    return list(epochs.values())


def _ranges(numbers: Ints) -> str:
    """Return ascending numbers as text, such as 3-5 7."""
    parts = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return " ".join(f"{part[0]}" if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
