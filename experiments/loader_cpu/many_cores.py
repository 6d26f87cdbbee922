"""Threads, processes and DataLoader on all cores of a machine that has many.

    gpuflow samples /dev/shm/photos -n 2048
    python experiments/loader_cpu/many_cores.py /dev/shm/photos [WORKERS]

WORKERS: of each arm; by default the cores. Prints images a second, each measured for 3 s in a process of its own, once
the processes have started. An epoch should take seconds: with a small folder the start of each one is measured too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gpuflow.bench import Job, measure

HERE = Path(__file__).parent


def main() -> None:
    folder, *rest = sys.argv[1:]
    workers = int(rest[0]) if rest else len(os.sched_getaffinity(0))
    arms = [("dataloader", ""), ("dataloader-uint8", ""), (f"{HERE / 'bare_threads.py'}:run", "")]
    arms += [("gpuflow", f"run.processes={count}") for count in sorted({0, workers // 4, workers // 2, workers})]
    for arm, override in arms:
        overrides = (f"source.folder={folder}", *filter(None, [override]))
        path = str(HERE / "photos.yaml")
        job = Job(arm=arm, path=path, overrides=overrides, pipeline="train", workers=workers, seconds=3)
        print(f"{Path(arm).name:20} {override:18} {measure([job], repeats=1)[job][0]:8,.0f} images/s", flush=True)


if __name__ == "__main__":
    main()
