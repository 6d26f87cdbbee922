"""Measures threads, processes and DataLoader on a machine with many cores; writes results.csv.

    gpuflow samples /dev/shm/photos -n 2048
    python experiments/many_cores/run.py /dev/shm/photos [WORKERS]

WORKERS: the number of workers of each arm; by default the number of cores. Each arm is measured for 3 s in its own
process, after its workers have started. An epoch should take seconds, because with a small folder the start of each
epoch is measured too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gpuflow.tools.bench import Job, measure, row, write_results

HERE = Path(__file__).parent
LOADER_CPU = HERE.parent / "loader_cpu"
WORKLOAD = "random_resized_crop 224, flip, normalize; batch=64"


def main() -> None:
    folder, *rest = sys.argv[1:]
    workers = int(rest[0]) if rest else len(os.sched_getaffinity(0))
    arms = [("dataloader", ""), ("dataloader-uint8", ""), (f"{LOADER_CPU / 'bare_threads.py'}:run", "")]
    arms += [("gpuflow", f"run.processes={count}") for count in sorted({0, workers // 4, workers // 2, workers})]
    rows = []
    for arm, override in arms:
        overrides = (f"source.folder={folder}", *filter(None, [override]))
        path = str(LOADER_CPU / "photos.yaml")
        job = Job(arm=arm, path=path, overrides=overrides, pipeline="train", workers=workers, seconds=3)
        name = "bare threads" if arm.endswith(":run") else arm
        workload = "; ".join([WORKLOAD, f"workers={workers}", *filter(None, [override])])
        rows.append(row(name, workload, "images_per_s", measure([job], repeats=1)[job], "images/s"))
        print(f"{name:20} {override:18} {float(rows[-1]['value']):8,.0f} images/s", flush=True)
        write_results(HERE / "results.csv", rows)


if __name__ == "__main__":
    main()
