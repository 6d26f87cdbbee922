"""Everything that chaos does, by name; replays one round: `python -m tests.chaos.rounds NAME SEED`.

A round is a function of a seed and an empty folder. It raises if gpuflow did what it must not, and returns what it
counted. The seed decides what the round does, but not when: what happens meanwhile depends on the machine as well.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.chaos import fuzzing, limits, loading, serving, training
from tests.chaos.accounting import Report
from tests.datasets import deadline

Round = Callable[[int, Path], Report]
SECONDS = 600.0
"""Limit for one round on a busy machine."""


def machine(seed: int, directory: Path) -> Report:
    """The state machine of tests/laws, with another seed than in CI."""
    from tests.laws.test_loader_machine import run_machine

    return {"examples": float(run_machine(seed, examples=20, steps=30))}


ROUNDS: dict[str, Round] = {
    "kills": loading.kills,
    "files": loading.files,
    "shards": loading.shards,
    "store": loading.store,
    "descriptors": limits.descriptors,
    "disk": limits.disk,
    "training": training.training,
    "service": serving.service,
    "machine": machine,
    **{f"fuzz-{name}": functools.partial(fuzzing.fuzz, name) for name in fuzzing.TARGETS},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Replay one round; prints what it counted, as JSON.")
    parser.add_argument("name", choices=ROUNDS, nargs="?")
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--list", action="store_true", help="print the names of all rounds")
    parser.add_argument("--here", type=Path, metavar="DIR", help="an empty folder to use; by default a temporary one")
    options = parser.parse_args()
    if options.list or options.name is None:
        print(*ROUNDS, sep="\n")
        return
    print(f"round {options.name}, seed {options.seed}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as temporary, deadline(SECONDS):
        directory = options.here or Path(temporary)
        os.environ["XDG_CACHE_HOME"] = str(directory / "cache")
        print(json.dumps(ROUNDS[options.name](options.seed, directory)), flush=True)


if __name__ == "__main__":
    main()
