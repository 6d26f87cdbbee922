"""Disturbs loaders, trainings and a service for as long as one likes; writes results.csv and failures.log.

    python experiments/chaos/run.py --minutes 60 [--seed 0] [--jobs 2] [--only kills service fuzz-tars] [--out DIR]

Every round runs in its own process with the next seed. README.md says what each round does and what is counted. Ends
with code 1 if a round failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from gpuflow.tools.bench import row, write_results

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ROUND_SECONDS = 900.0
SPREAD = {"tp50_ms": "ms", "tp99_ms": "ms", "worst_ms": "ms", "growth_mb": "MB", "slowest_s": "s"}
"""Metrics of which the median and the extremes over all rounds are kept, with their units; others are added up."""


@dataclass(frozen=True, slots=True)
class Done:
    """How a round ended: what it counted, or the end of what it wrote."""

    name: str
    seed: int
    seconds: float
    report: dict[str, float] | None
    text: str = ""

    @property
    def replay(self) -> str:
        return f"python -m tests.chaos.rounds {self.name} {self.seed}"


def names() -> list[str]:
    """Of all rounds."""
    command = [sys.executable, "-m", "tests.chaos.rounds", "--list"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout.split()


def play(name: str, seed: int) -> Done:
    """One round in its own process."""
    start = time.monotonic()
    command = [sys.executable, "-m", "tests.chaos.rounds", name, str(seed)]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ROUND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return Done(name, seed, time.monotonic() - start, None, f"no end within {ROUND_SECONDS:g} s\n{late.stderr!r}")
    seconds = time.monotonic() - start
    if done.returncode:
        return Done(name, seed, seconds, None, f"exit code {done.returncode}\n{done.stderr[-8000:]}")
    return Done(name, seed, seconds, json.loads(done.stdout.splitlines()[-1]))


def play_all(names: Sequence[str], *, first: int, minutes: float, jobs: int) -> Iterator[Done]:
    """Rounds of all names in turns, each at least once, until the time is over."""
    end = time.monotonic() + 60 * minutes
    rounds = ((name, seed) for seed in count(first) for name in names)
    running: set[Future[Done]] = set()
    started = 0
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            while len(running) < jobs and (started < len(names) or time.monotonic() < end):
                running.add(pool.submit(play, *next(rounds)))
                started += 1
            if not running:
                return
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def rows_of(done: Sequence[Done], workload: str) -> list[dict[str, Any]]:
    """The rows of results.csv: for each name its rounds, failures and seconds, and what the rounds counted."""
    found = []
    for name in sorted({one.name for one in done}):
        mine = [one for one in done if one.name == name]
        reports = [one.report for one in mine if one.report is not None]
        found.append(row(name, workload, "rounds", [len(mine)], "rounds"))
        found.append(row(name, workload, "failures", [len(mine) - len(reports)], "rounds"))
        found.append(row(name, workload, "round_s", [one.seconds for one in mine], "s"))
        for metric in sorted({metric for report in reports for metric in report}):
            values = [report[metric] for report in reports if metric in report]
            spread = metric in SPREAD
            found.append(row(name, workload, metric, values if spread else [sum(values)], SPREAD.get(metric, "count")))
    return found


def main() -> None:
    known = names()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="how long to start new rounds")
    parser.add_argument("--seed", type=int, default=None, help="of the first rounds; by default one from the clock")
    parser.add_argument("--jobs", type=int, default=2, help="rounds at a time")
    parser.add_argument("--only", nargs="+", choices=known, default=known, metavar="NAME", help=", ".join(known))
    parser.add_argument("--out", type=Path, default=HERE, help="where results.csv and failures.log are written")
    options = parser.parse_args()
    first = int(time.time()) % 1_000_000_000 if options.seed is None else options.seed
    print(f"seed {first}, {options.minutes:g} minutes, {options.jobs} rounds at a time", flush=True)
    done: list[Done] = []
    options.out.mkdir(parents=True, exist_ok=True)
    failures = options.out / "failures.log"
    failures.write_text("")
    for one in play_all(options.only, first=first, minutes=options.minutes, jobs=options.jobs):
        done.append(one)
        print(
            f"{one.name:22} seed {one.seed} {one.seconds:7.1f} s  {'ok' if one.report is not None else 'FAILED'}",
            flush=True,
        )
        if one.report is None:
            print(f"    {one.replay}", flush=True)
            with failures.open("a") as file:
                file.write(f"{one.replay}\n{one.text}\n\n")
    write_results(
        options.out / "results.csv", rows_of(done, f"{options.minutes:g} minutes, {options.jobs} rounds at a time")
    )
    failed = [one for one in done if one.report is None]
    print(f"{len(done)} rounds, {len(failed)} failed; wrote {options.out / 'results.csv'}")
    for one in failed:
        print(f"    {one.replay}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
