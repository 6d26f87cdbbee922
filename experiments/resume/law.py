"""Counts which samples a training that was killed and restarted has trained on, from the logs of its processes.

Each process of each attempt writes lines of JSON: first the attempt and the number of steps that its checkpoint had
made (0 without one), then each step with its epoch, its number, and of each sample its index and a hash of its pixels.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Log", "Outcome", "outcome"]


class Log:
    """Written by one process of one attempt. start: the steps of the checkpoint that it began with."""

    def __init__(self, folder: Path, *, attempt: int, rank: int, ranks: int, start: int) -> None:
        self._path = folder / f"{attempt}.{rank}.jsonl"
        self._write(attempt=attempt, ranks=ranks, start=start)

    def step(self, epoch: int, step: int, indices: list[int], images: torch.Tensor) -> None:
        """Write a step. Its number counts from 1 and goes on over epochs and restarts."""
        hashes = [hashlib.blake2b(image.numpy().tobytes(), digest_size=8).hexdigest() for image in images]
        self._write(epoch=epoch, step=step, samples=list(zip(indices, hashes, strict=True)))

    def _write(self, **line: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Counts what a training delivered along its surviving checkpoints: in the steps that no later attempt made again.

    missing, repeated: samples of all epochs. replayed: samples of steps that were made again. changed: those of them
    whose pixels were others then, or that did not come again. ranks: of each attempt.
    """

    missing: int
    repeated: int
    replayed: int
    changed: int
    ranks: tuple[int, ...]


def outcome(folder: Path, *, samples: int, epochs: int) -> Outcome:
    """Return what the logs in a folder say of a training on a number of samples."""
    starts: dict[int, int] = {}
    ranks: dict[int, int] = {}
    steps: list[tuple[int, dict[str, Any]]] = []
    for path in folder.glob("*.jsonl"):
        first, *others = map(json.loads, path.read_text().splitlines())
        starts[first["attempt"]], ranks[first["attempt"]] = first["start"], first["ranks"]
        steps += ((first["attempt"], line) for line in others)
    survived: dict[tuple[int, int], list[str]] = defaultdict(list)
    replayed: dict[tuple[int, int], list[str]] = defaultdict(list)
    for attempt, line in steps:
        later = [start for other, start in starts.items() if other > attempt]
        to = survived if line["step"] <= min(later, default=line["step"]) else replayed
        for index, digest in line["samples"]:
            to[line["epoch"], index].append(digest)
    return Outcome(
        missing=sum((epoch, index) not in survived for epoch in range(epochs) for index in range(samples)),
        repeated=sum(len(digests) - 1 for digests in survived.values()),
        replayed=len(replayed),
        changed=sum({*digests} != {*survived[sample]} for sample, digests in replayed.items()),
        ranks=tuple(ranks[attempt] for attempt in sorted(ranks)),
    )
